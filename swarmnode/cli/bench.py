"""`swarmnode bench`: measurements of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from swarmnode.cli.options import AsJson

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
Quick = Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")]


@app.command()
def engine(quick: Quick = False, as_json: AsJson = False) -> None:
    """The expert engine against ggml's own kernel time."""
    from swarmnode.bench import engine as bench  # noqa: PLC0415
    from swarmnode.tables import print_rows  # noqa: PLC0415

    print_rows(bench.run(quick=quick), as_json=as_json)


@app.command()
def transport(quick: Quick = False, as_json: AsJson = False) -> None:
    """QUIC between two processes of this machine, direct and relayed, beside what else carries bytes there."""
    from swarmnode.bench import transport as bench  # noqa: PLC0415
    from swarmnode.tables import print_rows  # noqa: PLC0415

    print_rows(bench.run(quick=quick), as_json=as_json)


@app.command()
def dispatch(quick: Quick = False, as_json: AsJson = False) -> None:
    """What one layer's dispatch costs beside the experts' own compute, and where it goes."""
    from swarmnode.bench import dispatch as bench  # noqa: PLC0415
    from swarmnode.tables import print_rows  # noqa: PLC0415

    print_rows(bench.run(quick=quick), as_json=as_json)


@app.command()
def fidelity(
    positions: Annotated[int, typer.Option(help="Positions of held-out text.")] = 2048, as_json: AsJson = False
) -> None:
    """What partial sums and F16 change against the exact run, on held-out text."""
    from swarmnode.bench import fidelity as bench  # noqa: PLC0415
    from swarmnode.tables import print_rows  # noqa: PLC0415

    print_rows(bench.run(positions), as_json=as_json)
