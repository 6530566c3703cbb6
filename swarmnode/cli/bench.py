"""`swarmnode bench`: measurements of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from swarmnode.cli.options import AsJson

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
_OWN_FLAGS: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,  # the benchmark's own
}
Quick = Annotated[bool, typer.Option("--quick", help="Fewer repetitions.")]


@app.command()
def engine(quick: Quick = False, as_json: AsJson = False) -> None:
    """The expert engine against ggml's own kernel time."""
    from swarmnode.bench import engine as bench  # noqa: PLC0415

    _show(lambda: bench.run(quick=quick), as_json=as_json)


@app.command()
def transport(quick: Quick = False, as_json: AsJson = False) -> None:
    """QUIC between two processes of this machine, direct and relayed, beside what else carries bytes there."""
    from swarmnode.bench import transport as bench  # noqa: PLC0415

    _show(lambda: bench.run(quick=quick), as_json=as_json)


@app.command()
def dispatch(quick: Quick = False, as_json: AsJson = False) -> None:
    """What one layer's dispatch costs beside the experts' own compute, and where it goes."""
    from swarmnode.bench import dispatch as bench  # noqa: PLC0415

    _show(lambda: bench.run(quick=quick), as_json=as_json)


@app.command()
def fidelity(
    positions: Annotated[int, typer.Option(help="Positions of held-out text.")] = 2048, as_json: AsJson = False
) -> None:
    """What partial sums and F16 change against the exact run, on held-out text."""
    from swarmnode.bench import fidelity as bench  # noqa: PLC0415

    _show(lambda: bench.run(positions), as_json=as_json)


@app.command()
def wire(quick: Quick = False, as_json: AsJson = False) -> None:
    """Bytes per token and layer on the wire, for the layer shapes of published models."""
    from swarmnode.bench import wire as bench  # noqa: PLC0415

    _show(lambda: bench.run(quick=quick), as_json=as_json)


@app.command(**_OWN_FLAGS)
def wan(context: typer.Context) -> None:
    """Decoding over a distance, lever by lever, beside its physical bound; --help shows its flags."""
    from swarmnode.bench import wan as bench  # noqa: PLC0415

    raise typer.Exit(bench.main(context.args))


@app.command(**_OWN_FLAGS)
def star(context: typer.Context) -> None:
    """Workers at different distances asked at once, and what is computed during the trip; --help shows its flags."""
    from swarmnode.bench import star as bench  # noqa: PLC0415

    raise typer.Exit(bench.main(context.args))


@app.command(**_OWN_FLAGS)
def prefill(context: typer.Context) -> None:
    """Long prompts and large batches over a link with little bandwidth; --help shows its flags."""
    from swarmnode.bench import prefill as bench  # noqa: PLC0415

    raise typer.Exit(bench.main(context.args))


@app.command(**_OWN_FLAGS)
def bulk(context: typer.Context) -> None:
    """Slices between two processes, beside TLS over TCP; --help shows its flags."""
    from swarmnode.bench import bulk as bench  # noqa: PLC0415

    raise typer.Exit(bench.main(context.args))


def _show(measure: Callable[[], Mapping[str, Any]], *, as_json: bool) -> None:
    """Measure and print; what ends a process from outside ends the measurement in order."""
    from swarmnode.interruptible import End, ended_in_order  # noqa: PLC0415
    from swarmnode.tables import print_rows  # noqa: PLC0415

    end = End()
    try:
        with ended_in_order(end):
            print_rows(measure(), as_json=as_json)
    except KeyboardInterrupt:
        raise typer.Exit(end.exit_code) from None
