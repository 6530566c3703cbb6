"""Options that several commands share, as annotated types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

State = Annotated[
    Path | None,
    typer.Option(
        "--state", envvar="SWARMNODE_STATE", help="Folder with this node's key and slices.", show_default="per user"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print data for machines.")]
Emulate = Annotated[
    str | None,
    typer.Option(
        "--emulate", envvar="SWARMNODE_EMULATE", help="Add to every link: rtt=80ms,jitter=5ms,loss=1%,rate=20mbit"
    ),
]
Relays = Annotated[
    list[str] | None,
    typer.Option(
        "--relay", envvar="SWARMNODE_RELAY", help="URL of a relay, https://relay.example; repeat for a second one."
    ),
]
RelayCa = Annotated[
    Path | None,
    typer.Option(
        "--relay-ca", envvar="SWARMNODE_RELAY_CA", help="PEM file of an authority that signed a relay's certificate."
    ),
]
Quic = Annotated[str | None, typer.Option("--quic", envvar="SWARMNODE_QUIC", help="QUIC engine: qh3 or aioquic.")]
Threads = Annotated[
    int | None, typer.Option("--threads", envvar="SWARMNODE_THREADS", help="Compute threads.", show_default="cores − 1")
]
Member = Annotated[
    str | None,
    typer.Option("--peer", metavar="NAME|ID", help="Of another member of this node's swarm, where it allows that."),
]
Mode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        envvar="SWARMNODE_MODE",
        help="exact: the local run's bits · partial: one weighted sum per worker.",
        show_default="exact",
    ),
]
Wire = Annotated[
    str | None,
    typer.Option(
        "--wire",
        envvar="SWARMNODE_WIRE",
        help="Types on the wire in partial mode, one or OUT/BACK: f32, f16, int8, fp8; or auto, the cheapest gated.",
        show_default="f32",
    ),
]


def named_member(given: str | None) -> str:
    """What --peer says, "" where it was not given. UsageError where it says nothing."""
    from swarmnode.errors import UsageError  # noqa: PLC0415

    if given is not None and not given.strip():
        raise UsageError("--peer: give the name of a member, or the beginning of its id")
    return given or ""


def state_dir(given: Path | None) -> Path:
    """The state folder that was given, or the user's own."""
    from swarmnode.config import default_state_dir  # noqa: PLC0415

    return given if given is not None else default_state_dir()
