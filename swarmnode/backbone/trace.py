"""Reads the sites of a model off llama.cpp's own graph: two tokens are evaluated, nothing of the experts is computed.

`trace_model` works on a model that is loaded. `trace_apart` loads a backbone file in a process of its own, because
llama.cpp ends the process it is in over some files that it cannot run (GGML_ASSERT): so that is an error of one line.
`accept_apart` asks llama.cpp there whether it takes a model at all. Callers: onboarding, and whoever makes sessions.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from swarmnode import errors
from swarmnode.backbone.graph_trace import GraphPlan, plan_graph, with_others
from swarmnode.backbone.hook import GraphRecorder
from swarmnode.backbone.llama import Chunk, LlamaContext, LlamaModel
from swarmnode.compute.recipe import Site
from swarmnode.errors import BrokenModel, ComputeError, SwarmnodeError, TraceError
from swarmnode.process_end import TAIL, process_end

HEARTBEAT_S = 0.1
MOST_TOKENS = 8  # evaluated to find out how many graphs a model has; more where more states are kept
PATIENCE_S = 600.0  # for a process that reads a graph, a second at most, on a machine with much else to do …
LEAST_BYTES_S = 10e6  # … and reads its file from a disk that is as slow as this


class _Task(msgspec.Struct, frozen=True):
    """What the process is to do: a file. Without `expert_ne` the model is a shell (model/gguf_shell.py)."""

    model: str
    expert_ne: dict[str, tuple[int, ...]] | None
    gpu_layers: int = 0


class _Answer(msgspec.Struct, frozen=True):
    """What it found: a file. `error` and `kind` where it failed, the latter a class of swarmnode.errors."""

    sites: tuple[Site, ...] = ()
    error: str = ""
    kind: str = ""


def trace_backbone(backbone: Path, expert_ne: Mapping[str, tuple[int, ...]], *, gpu_layers: int = 0) -> GraphPlan:
    """Load a backbone file in this process and read its graph."""
    model = LlamaModel(backbone, remote_experts=True, gpu_layers=gpu_layers)
    try:
        return trace_model(model, expert_ne)
    finally:
        model.close()


def trace_model(model: LlamaModel, expert_ne: Mapping[str, tuple[int, ...]], *, n_seq: int = 1) -> GraphPlan:
    """The plan of a loaded backbone, for contexts of so many sequences: some graphs differ by that.

    Some depend on the number of tokens too: one has other nodes than two, or, where states are kept, each number up to
    theirs. So more tokens are tried until two numbers have the same graph.

    Raises TraceError, DenseModel, ComputeError.
    """
    most = max(MOST_TOKENS, model.take_back + 3)

    def trace(*tokens: int) -> GraphPlan:
        """With so many tokens of each sequence."""
        recorder = GraphRecorder()
        n_batch = max(most, n_seq)
        n_context = max(32, most)
        context = LlamaContext(model, n_context=n_context, n_batch=n_batch, threads=1, callback=recorder, n_seq=n_seq)
        token = min(1, model.n_vocab - 1)
        try:
            context.decode_chunks([Chunk([token] * n, 0, sequence, n) for sequence, n in enumerate(tokens)])
        finally:
            context.close()
        if recorder.error is not None:
            raise recorder.error
        return plan_graph(recorder.nodes, expert_ne)

    plan = trace(2)
    others = [trace(1)]
    if n_seq > 1:
        others.append(trace(1, 1))
    if not all(plan.same_nodes(other) for other in others):
        last = plan
        for n in range(3, most + 1):
            others.append(trace(n))
            if last.same_nodes(others[-1]):
                break
            last = others[-1]
        else:
            raise TraceError(
                f"this model's graph is another one for every number of tokens up to {most}; this is not supported"
            )
    return with_others(plan, others)


def trace_apart(
    backbone: Path,
    expert_ne: Mapping[str, tuple[int, ...]],
    *,
    shown: str,
    gpu_layers: int = 0,
    heartbeat: Callable[[], None] = lambda: None,
) -> tuple[Site, ...]:
    """The sites of a backbone file, found out in another process.

    `shown` names the model in errors. `heartbeat` is called several times a second; what it raises ends the work.
    Raises what `trace_backbone` does, BrokenModel where llama.cpp ended the process, and ComputeError where the process
    did not come to an end: it has PATIENCE_S and the time that a very slow disk takes.
    """
    task = _Task(str(backbone), {name: tuple(ne) for name, ne in expert_ne.items()}, gpu_layers)
    return _apart(task, shown, heartbeat).sites


def accept_apart(shell: Path, *, shown: str, heartbeat: Callable[[], None] = lambda: None) -> None:
    """Whether llama.cpp takes a model of which there is only the shell, asked in another process.

    Raises ModelError with llama.cpp's reason, UnknownArchitecture, BrokenModel where it ended the process, and
    ComputeError as `trace_apart` does.
    """
    _apart(_Task(str(shell), None), shown, heartbeat)


def _apart(task: _Task, shown: str, heartbeat: Callable[[], None]) -> _Answer:
    with tempfile.TemporaryDirectory(prefix="swarmnode-trace-") as name:
        folder = Path(name)
        patience_s = PATIENCE_S + _size(Path(task.model)) / LEAST_BYTES_S
        status = _run(folder, msgspec.json.encode(task), heartbeat, patience_s)
        if status is None:
            raise ComputeError(
                f"{shown}: llama.cpp was not through with this file after {patience_s:.0f} s; "
                "try again when this machine and its disk have less to do"
            )
        try:
            answer = msgspec.json.decode((folder / "answer.json").read_bytes(), type=_Answer)
        except (OSError, msgspec.DecodeError):
            raise _no_answer(shown, folder / "log", status) from None
    if answer.kind:
        kind = getattr(errors, answer.kind, ComputeError)
        raise kind(answer.error.replace(task.model, shown))
    return answer


def _size(path: Path) -> int:
    """What a file takes on its disk, in bytes."""
    with contextlib.suppress(OSError):
        return path.stat().st_blocks * 512  # a shell is mostly holes
    return 0


def _run(folder: Path, task: bytes, heartbeat: Callable[[], None], patience_s: float) -> int | None:
    """The exit status of the process that does the task and leaves answer.json and log in `folder`.

    None where it was ended, not being through after so many seconds. It ends with this process, however this one ends.
    """
    (folder / "task.json").write_bytes(task)
    # Without the variable ggml lets a debugger write a page about its own end.
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "swarmnode.backbone.trace", str(folder)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        until = time.monotonic() + patience_s
        try:
            while time.monotonic() < until:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(HEARTBEAT_S)
                heartbeat()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            assert child.stdin is not None
            child.stdin.close()
    return None


def _no_answer(shown: str, log: Path, status: int) -> SwarmnodeError:
    """The error for a process that ended without an answer: what it or the system says of that, in one line."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        end = process_end(status, file.read(TAIL))
    said = end.said or end.how
    if end.traceback:  # not llama.cpp's doing
        return ComputeError(f"{shown}: its graph could not be read ({said})")
    return BrokenModel(
        f"{shown}: llama.cpp ended its process over this file ({said}); "
        "fetch the file again, or update llama-cpp-python"
    )


def _serve(folder: Path) -> None:
    """The other process: from task.json to answer.json."""
    # Should memory run out, this process is the one to go.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    task = msgspec.json.decode((folder / "task.json").read_bytes(), type=_Task)
    try:
        answer = _Answer()
        if task.expert_ne is None:
            LlamaModel(Path(task.model), remote_experts=False, header_only=True).close()
        else:
            plan = trace_backbone(Path(task.model), task.expert_ne, gpu_layers=task.gpu_layers)
            answer = _Answer(sites=tuple(site.site for site in plan.sites))
    except SwarmnodeError as error:
        answer = _Answer(error=str(error), kind=type(error).__name__)
    (folder / "answer.part").write_bytes(msgspec.json.encode(answer))
    (folder / "answer.part").rename(folder / "answer.json")


def _end_with_input() -> None:
    """End this process, whatever it does, once whoever started it is gone."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    """`python -m swarmnode.backbone.trace FOLDER`, until the task is done or standard input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    _serve(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
