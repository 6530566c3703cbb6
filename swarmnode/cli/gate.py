"""`swarmnode gate`: does a model run over a swarm as it runs alone, and with which wire types? Kept in its pack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.cli.options import AsJson, Threads

if TYPE_CHECKING:
    from swarmnode.gate.verdict import Verdict
    from swarmnode.gate.wires import GateOptions
    from swarmnode.onboard import ModelPack


# What says how a model is measured: tiny models and single layers are all measured alike.
_OF_A_FILE = ("positions", "text", "own_kl", "memory", "threads", "device", "gpu_layers", "show")


def gate(
    context: typer.Context,
    file: Annotated[
        str | None, typer.Argument(help="A GGUF with routed experts, or its model pack.", show_default=False)
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Instead: tiny random models of an architecture of llama.cpp, or of all.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead: one MoE layer with the true shape of a known model, or of all.")
    ] = None,
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
    memory: Annotated[
        str | None,
        typer.Option(
            help="What to take at most, 8G: layers whose experts do not fit together are measured one after the other.",
            show_default="what is free",
        ),
    ] = None,
    threads: Threads = None,
    device: Annotated[str, typer.Option(help="Where experts are computed: auto, cpu, or ggml's name.")] = "auto",
    gpu_layers: Annotated[int, typer.Option(help="Backbone layers on the GPU.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Only show what was found out before.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a model in parts and compare with the whole: exact mode over a worker process, then what F16, INT8 and FP8
    on the wire do to it. Nothing leaves this machine.

    INT8 and FP8 are used for a model only after they passed here. Exit code 1 where the model fails.
    """
    import os  # noqa: PLC0415

    from swarmnode.config import parse_size  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415
    from swarmnode.gate.wires import GateOptions  # noqa: PLC0415

    if sum(given is not None for given in (file, arch, shape)) != 1:
        raise UsageError("gate what? give one of FILE (a GGUF or its model pack), --arch NAME and --shape NAME")
    if file is None:
        _refuse_options_of_a_file(context, "--arch" if arch is not None else "--shape")
    if arch is not None:
        _gate_architectures(arch, as_json=as_json)
        return
    if shape is not None:
        _gate_shapes(shape, as_json=as_json)
        return
    assert file is not None
    options = GateOptions(
        positions=positions,
        text=text,
        own_kl=own_kl,
        memory=parse_size(memory, "memory") if memory is not None else None,
        threads=threads if threads is not None else max(1, (os.cpu_count() or 2) - 1),
        device=device,
        gpu_layers=gpu_layers,
    )
    _gate_file(file, options, show=show, as_json=as_json)


def _refuse_options_of_a_file(context: typer.Context, instead: str) -> None:
    """Raise UsageError with those that were given; an environment variable is meant for other commands too."""
    from swarmnode.errors import UsageError  # noqa: PLC0415

    sources = ((name, context.get_parameter_source(name)) for name in _OF_A_FILE)
    given = [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{names}: only for a FILE, which {instead} does not take: leave {names} out")


def _gate_file(file: str, options: GateOptions, *, show: bool, as_json: bool) -> None:
    import json  # noqa: PLC0415

    from swarmnode.errors import ModelError  # noqa: PLC0415
    from swarmnode.gate.report import pack_needs, report  # noqa: PLC0415
    from swarmnode.gate.verdict_file import keep_verdict, load_verdict  # noqa: PLC0415
    from swarmnode.gate.wires import measure  # noqa: PLC0415
    from swarmnode.gate_view import GateProgress, show_model  # noqa: PLC0415
    from swarmnode.interruptible import run_interruptible  # noqa: PLC0415
    from swarmnode.model.http_url import shown, url_of  # noqa: PLC0415
    from swarmnode.parts import resolve_pack  # noqa: PLC0415

    url = url_of(file)
    if url is not None and not show:
        raise ModelError(f"{shown(url)}: the gate computes every expert: download the GGUF and give its file")

    with GateProgress(enabled=not as_json and not show) as bar:

        def work(check: Callable[[], None]) -> tuple[ModelPack, Verdict]:
            def update(stage: str, done: int, total: int) -> None:
                check()
                bar.update(stage, done, total)

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
    found = report(pack.manifest, verdict, pack_needs(pack))
    if as_json:
        print(json.dumps(found))
    else:
        where = f"kept in {pack.verdict_file}"
        if not kept:
            where = f"not kept: with an earlier text the model passed, and that verdict stays in {pack.verdict_file}"
        show_model(found, where)
    if not found["passed"]:
        raise typer.Exit(1)


def _gate_architectures(wanted: str, *, as_json: bool) -> None:
    import tempfile  # noqa: PLC0415

    from swarmnode.architectures.tiny_model import ARCHITECTURES  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415

    names = ARCHITECTURES if wanted == "all" else [name for name in ARCHITECTURES if name == wanted.lower()]
    if not names:
        raise UsageError(f"--arch {wanted[:60]}: say all, or one of {', '.join(ARCHITECTURES)}")

    from swarmnode.architectures.run import gate_architectures  # noqa: PLC0415

    def work(progress: Callable[[str, int, int], None]) -> Sequence[Any]:
        with tempfile.TemporaryDirectory(prefix="swarmnode-gate-") as folder:
            found: Sequence[Any] = gate_architectures(names, None, None, Path(folder), progress)
            return found

    _gate_many(work, "architecture", as_json=as_json)


def _gate_shapes(wanted: str, *, as_json: bool) -> None:
    from swarmnode.architectures.real_shapes import SHAPES, gate_shapes  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415
    from swarmnode.sizing.shapes import find_shape  # noqa: PLC0415

    try:
        names = SHAPES if wanted == "all" else [find_shape(wanted).name]
    except UsageError:
        raise UsageError(f"--shape {wanted[:60]}: say all, or one of {', '.join(SHAPES)}") from None
    _gate_many(lambda progress: gate_shapes(names, progress), "model", as_json=as_json)


def _gate_many(
    gate_all: Callable[[Callable[[str, int, int], None]], Sequence[Any]], what: str, *, as_json: bool
) -> None:
    """Rows with live progress; exit code 1 where one failed that llama.cpp itself can run, and where it cannot run what
    it should (`_not_built`).
    """
    import json  # noqa: PLC0415

    import msgspec  # noqa: PLC0415

    from swarmnode.gate_view import GateProgress, show_many  # noqa: PLC0415
    from swarmnode.interruptible import run_interruptible  # noqa: PLC0415

    with GateProgress(enabled=not as_json) as bar:

        def work(check: Callable[[], None]) -> Sequence[Any]:
            def progress(name: str, done: int, total: int) -> None:
                check()
                bar.update_one(name, done, total)

            return gate_all(progress)

        results = run_interruptible(work)
    rows = [msgspec.to_builtins(result) for result in results]
    if as_json:
        print(json.dumps(rows))
    else:
        show_many(rows, what)
    missing = _not_built(rows)
    if missing:
        typer.echo(missing, err=True)
    if missing or not all(row["passed"] or not row.get("built", True) for row in rows):
        raise typer.Exit(1)


def _not_built(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why it is not good enough that the rows that could be built have passed, "" where it is.

    Some variants llama.cpp cannot run, which is no fault of a swarm; it can run the base model of every architecture
    that is listed, so where it does not, the list is of another llama.cpp, or something is wrong with this one.
    """
    from swarmnode.architectures.tiny_model import ARCHITECTURES  # noqa: PLC0415
    from swarmnode.architectures.variants import BASE  # noqa: PLC0415

    if not any(row.get("built", True) for row in rows):
        return "failed: llama.cpp could build none of these models, so nothing was checked"
    failed = [row for row in rows if not row.get("built", True) and row.get("variant") == BASE]
    names = sorted({row["arch"] for row in failed if row["arch"] in ARCHITECTURES})
    return f"failed: llama.cpp could not build or run the base model of {', '.join(names)}" if names else ""
