"""`swarmnode gate`: find out which wire types a model can have, on real text, and keep it in its pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.cli.options import AsJson, Threads

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from swarmnode.gate.verdict import Verdict
    from swarmnode.onboard import ModelPack


def gate(
    file: Annotated[str, typer.Argument(help="A GGUF with routed experts, or its model pack.")],
    positions: Annotated[int, typer.Option(help="Tokens of text to measure on; 1024 at least.")] = 2048,
    text: Annotated[
        Path | None, typer.Option(help="A text file to measure on.", show_default="Python's standard library")
    ] = None,
    own_kl: Annotated[
        float | None,
        typer.Option(
            help="What the model's own quantisation costs (KL to its unquantised weights, nats per position).",
            show_default="unknown",
        ),
    ] = None,
    threads: Threads = None,
    device: Annotated[str, typer.Option(help="Where experts are computed: auto, cpu, or ggml's name.")] = "auto",
    gpu_layers: Annotated[int, typer.Option(help="Backbone layers on the GPU.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Only show what was found out before.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what F16, INT8 and FP8 on the wire do to a model, against its own weights: nothing leaves this machine.

    INT8 and FP8 are used for a model only after they passed here. Exit code 1 where not even F16 passes.
    """
    import json  # noqa: PLC0415
    import os  # noqa: PLC0415

    from swarmnode.errors import ModelError  # noqa: PLC0415
    from swarmnode.gate.report import report  # noqa: PLC0415
    from swarmnode.gate.verdict_file import keep_verdict, load_verdict  # noqa: PLC0415
    from swarmnode.gate.wires import GateOptions, measure  # noqa: PLC0415
    from swarmnode.interruptible import run_interruptible  # noqa: PLC0415
    from swarmnode.parts import resolve_pack  # noqa: PLC0415

    options = GateOptions(
        positions=positions,
        text=text,
        own_kl=own_kl,
        threads=threads if threads is not None else max(1, (os.cpu_count() or 2) - 1),
        device=device,
        gpu_layers=gpu_layers,
    )

    with _progress(enabled=not as_json and not show) as bar:

        def work(check: Callable[[], None]) -> tuple[ModelPack, Verdict]:
            tasks: dict[str, Any] = {}

            def update(stage: str, done: int, total: int) -> None:
                check()
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage, total=total)
                bar.update(tasks[stage], completed=done, total=total)

            def onboarding(event: str, **fields: Any) -> None:
                update(fields["stage"], fields["done"], fields["total"])

            pack = resolve_pack(file, onboarding)
            if not show:
                return pack, measure(pack, options, update)
            verdict = load_verdict(pack)
            if isinstance(verdict, str):
                raise ModelError(f"{pack.path}: {verdict}: run swarmnode gate {file}")
            return pack, verdict

        pack, verdict = run_interruptible(work)
    kept = show or keep_verdict(pack, verdict)
    found = report(pack.manifest, verdict)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, pack, kept=kept)
    if not found["passed"]:
        raise typer.Exit(1)


def _progress(*, enabled: bool) -> Progress:
    """A bar per stage; silent where standard error is no terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not enabled or not console.is_terminal)


def _show(found: dict[str, Any], pack: ModelPack, *, kept: bool) -> None:
    from swarmnode.tables import console_for_data, human_bytes, show  # noqa: PLC0415

    console = console_for_data()
    layers = f"{found['sites']} MoE layers, {found['experts']} experts ({found['variant']}), top {found['k']}"
    console.print(f"{found['model']}: {layers}", markup=False, highlight=False)
    said = {True: "the plain local run's bits", False: "not the plain local run's bits", None: "not compared"}
    console.print(
        f"{found['positions']} positions of {found['text']}, {found['seconds']:.0f} s; exact experts: "
        f"{said[found['identical']]}\n",
        markup=False,
        highlight=False,
    )
    show(_pairs_table(found["pairs"]))
    console.print("\nlayer cosine at the lowest 0.1 %: on the way out · back · both", highlight=False)
    show(_layers_table(found["rows"]))
    for wire, said_of in found["wires"].items():
        line = f"{wire.upper()} " + ("passed" if said_of["passed"] else f"does not pass: {said_of['why']}")
        console.print(line, markup=False, highlight=False)
    best = sorted({row["best"].upper() for row in found["rows"]})
    console.print(
        f"cheapest that passes: {', '.join(best)}: {human_bytes(found['bytes_best'])} per token, "
        f"beside {human_bytes(found['bytes_f32'])} in F32 (rows of all layers, one worker)",
        markup=False,
        highlight=False,
    )
    where = f"kept in {pack.verdict_file}"
    if not kept:
        where = f"not kept: with an earlier text the model passed, and that verdict stays in {pack.verdict_file}"
    console.print(where, markup=False, highlight=False, soft_wrap=True)


def _pairs_table(pairs: Sequence[dict[str, Any]]) -> Table:
    """One row per pair of types: the whole model with it."""
    table = _table(("out / back", "cosine", "argmax", "clear argmax", "KL", "ΔNLL", "bytes/token"))
    table.add_column("passed", overflow="fold")
    for pair in pairs:
        finer = f"{pair['finer_layers']} layers finer" if pair["finer_layers"] else "yes"
        table.add_row(
            f"{pair['out']} / {pair['back']}".upper(),
            f"{pair['layer_cosine']:.5f}",
            f"{100 * pair['argmax']:.2f} %",
            f"{100 * pair['argmax_confident']:.2f} %",
            f"{pair['kl']:.1e}",
            f"{pair['dnll']:+.4f}",
            str(pair["bytes"]),
            finer if pair["passed"] else f"no: {pair['why']}",
        )
    return table


def _layers_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One row per layer."""
    table = _table(("layer", "F16", "INT8", "FP8"))
    table.add_column("cheapest that passes", no_wrap=True)
    for row in rows:
        cells = [
            " · ".join(f"{row[key]:.5f}" for key in (f"{wire}_out", f"{wire}_back", wire))
            for wire in ("f16", "int8", "fp8")
        ]
        table.add_row(str(row["layer"]), *cells, row["best"].upper())
    return table


def _table(columns: Sequence[str]) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table
