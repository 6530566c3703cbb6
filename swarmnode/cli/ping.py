"""`swarmnode ping`: round-trip times to a peer, and the path they take, as it changes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swarmnode.cli.options import AsJson, RelayCa, Relays, State, state_dir


def ping(
    peer: Annotated[str, typer.Argument(help="PEERID, PEERID@HOST:PORT, or the beginning of a connected peer's id.")],
    count: Annotated[int, typer.Option("--count", "-c", min=0, help="How many pings; 0 until Ctrl-C.")] = 0,
    interval: Annotated[float, typer.Option("--interval", "-i", help="Seconds between them.")] = 1.0,
    relay: Relays = None,
    relay_ca: RelayCa = None,
    state: State = None,
    as_json: AsJson = False,
) -> int:
    """Ping a peer: path, round-trip time, and the switch from relay to direct as it happens.

    Asks the running node of this machine, which has relays of its own; without one, pings by itself with this
    machine's key and --relay. The peer answers those that it lets in.
    """
    import asyncio  # noqa: PLC0415
    import json  # noqa: PLC0415

    from swarmnode.pings import PingLines, run_pings  # noqa: PLC0415

    lines = PingLines()

    def show(result: dict[str, Any]) -> None:
        told = lines.of(result)
        for line in [json.dumps(result)] if as_json else told:
            print(line, flush=True)

    try:
        asyncio.run(run_pings(state_dir(state), peer, count, interval, tuple(relay or ()), relay_ca, show))
    finally:  # after Ctrl-C too
        if not as_json and lines.sent:
            print(lines.summary(), flush=True)
    return 0 if lines.answered else 1
