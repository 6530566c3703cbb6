"""`swarmnode gate`: does a model run over a swarm as it runs alone, and with which wire types? Kept in its pack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.cli.options import AsJson, Threads

if TYPE_CHECKING:
    from swarmnode.errors import ModelError
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
        list[str] | None,
        typer.Option(help="Instead: tiny random models of an architecture of llama.cpp, or of all; may be repeated."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Instead: one MoE layer with the true shape of a known model, or of all; may be repeated."),
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

    from swarmnode.cli.standard_output import check_stdout  # noqa: PLC0415
    from swarmnode.config import parse_size  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415
    from swarmnode.gate.wires import MAX_THREADS, GateOptions  # noqa: PLC0415
    from swarmnode.interruptible import End, ended_in_order  # noqa: PLC0415

    check_stdout()
    _tell_crashes()
    context.with_resource(ended_in_order(End()))
    if (file is not None) + bool(arch) + bool(shape) != 1:
        raise UsageError("gate what? give one of FILE (a GGUF or its model pack), --arch NAME and --shape NAME")
    if file is None:
        _refuse_options_of_a_file(context, "--arch" if arch else "--shape")
    if arch:
        _gate_architectures(arch, as_json=as_json)
        return
    if shape:
        _gate_shapes(shape, as_json=as_json)
        return
    assert file is not None
    options = GateOptions(
        positions=positions,
        text=text,
        own_kl=own_kl,
        memory=parse_size(memory, "memory") if memory is not None else None,
        threads=threads if threads is not None else min(MAX_THREADS, max(1, (os.cpu_count() or 2) - 1)),
        device=device,
        gpu_layers=gpu_layers,
    )
    _gate_file(file, options, show=show, as_json=as_json)


def _tell_crashes() -> None:
    """SIGBUS, which a mapped file that is cut short brings, at least says so."""
    import faulthandler  # noqa: PLC0415

    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, RuntimeError):  # no standard error
            faulthandler.enable()


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

    from swarmnode.cli.standard_output import flush_stdout  # noqa: PLC0415
    from swarmnode.errors import ModelError  # noqa: PLC0415
    from swarmnode.gate.known_verdicts import known_file, known_verdict  # noqa: PLC0415
    from swarmnode.gate.report import pack_needs, report  # noqa: PLC0415
    from swarmnode.gate.verdict_file import check_writable  # noqa: PLC0415
    from swarmnode.gate.wires import measure  # noqa: PLC0415
    from swarmnode.gate_view import GateProgress, show_model  # noqa: PLC0415
    from swarmnode.interruptible import run_interruptible  # noqa: PLC0415
    from swarmnode.model.http_url import shown, url_of  # noqa: PLC0415
    from swarmnode.parts import resolve_pack  # noqa: PLC0415

    url = url_of(file)
    if url is not None and not show:
        raise ModelError(f"{shown(url)}: the gate computes every expert: download the GGUF and give its file")
    if not show:
        _check_device(options.device)

    with GateProgress(enabled=not as_json and not show) as bar:

        def work(check: Callable[[], None]) -> tuple[ModelPack, Verdict]:
            def update(stage: str, done: int, total: int) -> None:
                check()
                bar.update(stage, done, total)

            def onboarding(event: str, **fields: Any) -> None:
                update(fields["stage"], fields["done"], fields["total"])

            pack = resolve_pack(file, onboarding)
            if not show:
                check_writable(pack)
                return pack, measure(pack, options, update)
            verdict = known_verdict(pack)
            if isinstance(verdict, str):
                raise ModelError(f"{pack.path}: {verdict}: run swarmnode gate {file}")
            return pack, verdict

        pack, verdict = run_interruptible(work)
    where, fails, trouble = (f"kept in {known_file(pack)}", False, None) if show else _keep(pack, verdict)
    found = report(pack.manifest, verdict, pack_needs(pack))
    if as_json:
        print(json.dumps(found | {"kept": where}))
    else:
        show_model(found, where)
    flush_stdout()
    if trouble is not None:
        raise trouble
    if fails or not found["passed"]:
        raise typer.Exit(1)


def _keep(pack: ModelPack, verdict: Verdict) -> tuple[str, bool, ModelError | None]:
    """What became of a verdict, whether the one that stays is a failure, and why it could not be kept: it
    is shown first."""
    from swarmnode.errors import ModelError  # noqa: PLC0415
    from swarmnode.gate.known_verdicts import (  # noqa: PLC0415
        keep_verdict,
        known_file,
        known_verdict,
    )

    try:
        why = keep_verdict(pack, verdict)
    except ModelError as error:
        return "not kept", False, error
    if not why:
        return f"kept in {pack.verdict_file}", False, None
    kept = known_verdict(pack)
    fails = not isinstance(kept, str) and bool(kept.failure)
    return f"{why}; that verdict stays in {known_file(pack)}", fails, None


def _check_device(device: str) -> None:
    """Raises UsageError for a device that there is not."""
    from swarmnode.compute.device import choose_device  # noqa: PLC0415
    from swarmnode.errors import EngineError, LayoutMismatch, UsageError  # noqa: PLC0415

    try:
        choose_device(device[:60])
    except LayoutMismatch:
        raise
    except EngineError as error:
        raise UsageError(f"--device: {error}") from None


def _gate_architectures(wanted: Sequence[str], *, as_json: bool) -> None:
    from swarmnode.architectures.tiny_model import ARCHITECTURES  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415

    known = {name.lower(): name for name in ARCHITECTURES}
    names: dict[str, None] = {}  # each once
    for one in wanted:
        if one != "all" and one.lower() not in known:
            raise UsageError(f"--arch {one[:60]}: say all, or one of {', '.join(ARCHITECTURES)}")
        names |= dict.fromkeys(ARCHITECTURES if one == "all" else [known[one.lower()]])

    from swarmnode.architectures.run import gate_architectures  # noqa: PLC0415
    from swarmnode.gate.temporary import gate_folder  # noqa: PLC0415

    def work(progress: Callable[[str, int, int], None]) -> Sequence[Any]:
        with gate_folder() as folder:
            found: Sequence[Any] = gate_architectures(list(names), None, None, folder, progress)
            return found

    _gate_many(work, "architecture", as_json=as_json)


def _gate_shapes(wanted: Sequence[str], *, as_json: bool) -> None:
    from swarmnode.architectures.real_shapes import SHAPES, gate_shapes  # noqa: PLC0415
    from swarmnode.errors import UsageError  # noqa: PLC0415
    from swarmnode.sizing.shapes import find_shape  # noqa: PLC0415

    names: dict[str, None] = {}  # each once
    for one in wanted:
        try:
            names |= dict.fromkeys(SHAPES if one == "all" else [find_shape(one).name])
        except UsageError:
            raise UsageError(f"--shape {one[:60]}: say all, or one of {', '.join(SHAPES)}") from None
    _gate_many(lambda progress: gate_shapes(list(names), progress), "model", as_json=as_json)


def _gate_many(
    gate_all: Callable[[Callable[[str, int, int], None]], Sequence[Any]], what: str, *, as_json: bool
) -> None:
    """Rows with live progress; exit code 1 where one failed that llama.cpp itself can run, and where it cannot run what
    it should (`_not_built`).
    """
    import json  # noqa: PLC0415

    import msgspec  # noqa: PLC0415

    from swarmnode.cli.standard_output import flush_stdout  # noqa: PLC0415
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
    flush_stdout()
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
