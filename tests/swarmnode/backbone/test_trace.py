"""Reading a model's graphs: when that cannot end well, and the process of its own that does it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from swarmnode.backbone import trace
from swarmnode.backbone.graph_trace import GraphPlan, TracedNode, plan_graph
from swarmnode.backbone.llama import LlamaModel
from swarmnode.backbone.trace import MOST_TOKENS, accept_apart, trace_model
from swarmnode.errors import BrokenModel, ComputeError, TraceError
from swarmnode.onboard import ModelPack, onboard

from .hybrid_model import write_hybrid_model


def test_a_graph_that_is_another_one_for_every_number_of_tokens_is_refused(
    demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count()

    def another(nodes: Sequence[TracedNode], expert_ne: Mapping[str, tuple[int, ...]]) -> GraphPlan:
        plan = plan_graph(nodes, expert_ne)
        return dataclasses.replace(plan, names=(f"of {next(numbers)}", *plan.names[1:]))

    monkeypatch.setattr(trace, "plan_graph", another)
    with (
        contextlib.closing(LlamaModel(demo_pack.backbone, remote_experts=True)) as model,
        pytest.raises(TraceError, match=f"another one for every number of tokens up to {MOST_TOKENS};"),
    ):
        trace_model(model, {t.name: t.ne for t in demo_pack.manifest.tensors})
    assert next(numbers) == MOST_TOKENS


def test_more_states_than_a_short_context_has_tokens_can_be_kept(tmp_path: Path) -> None:
    pack = onboard(write_hybrid_model(tmp_path / "m.gguf", "lfm2moe"), tmp_path / "pack")
    with contextlib.closing(LlamaModel(pack.backbone, remote_experts=True, take_back=32)) as model:
        assert model.take_back == 32
        plan = trace_model(model, {t.name: t.ne for t in pack.manifest.tensors})
    assert tuple(site.site for site in plan.sites) == pack.manifest.sites


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A file that nobody gets to the end of."""
    path = tmp_path / "endless.gguf"
    os.mkfifo(path)
    return path


def test_a_process_that_does_not_end_is_ended(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "PATIENCE_S", 1.5)
    beats = list[int]()
    with pytest.raises(ComputeError, match=r"^it: llama.cpp was not through with this file after 2 s; try again"):
        accept_apart(endless, shown="it", heartbeat=lambda: beats.append(1))
    assert len(beats) > 2


PARENT = """
import pathlib, subprocess, sys
from swarmnode.backbone import trace

class Told(subprocess.Popen):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        print(self.pid, flush=True)

trace.subprocess.Popen = Told
trace.accept_apart(pathlib.Path(sys.argv[1]), shown="it")
"""


def test_the_process_ends_with_the_one_that_started_it_however_that_ends(endless: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(endless)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # what a killed process leaves
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        try:
            assert parent.stdout is not None
            child = os.pidfd_open(int(parent.stdout.readline()))
        finally:
            parent.kill()
    try:
        assert select.select([child], [], [], 60)[0]  # it has ended
    except AssertionError:
        signal.pidfd_send_signal(child, signal.SIGKILL)
        raise
    finally:
        os.close(child)


NOISE = b"llama_model_loader: - kv 1: tokenizer.ggml.merges\n" * 4000


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (NOISE + b"/build/llama.cpp/ggml/src/ggml.c:12: GGML_ASSERT(a / b == c) failed\n", "GGML_ASSERT(a / b == c) f"),
        (NOISE + b"cannot open /models/a: 3 of 4 tokens/s\n\n", "(cannot open /models/a: 3 of 4 tokens/s)"),
        (NOISE + b"\x1b[0mno\x07\n", "(["),
        (b"", "(killed by SIGABRT)"),
    ],
)
def test_what_a_process_said_last_is_what_it_died_of(tmp_path: Path, log: bytes, said: str) -> None:
    (tmp_path / "log").write_bytes(log)
    error = trace._no_answer("m.gguf", tmp_path / "log", -signal.SIGABRT)
    assert isinstance(error, BrokenModel)
    assert said in str(error)
    assert "/build" not in str(error)
    assert str(error).isprintable()


def test_an_error_of_python_is_not_the_files(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(NOISE + b"Traceback (most recent call last):\n  x\nOSError: no /tmp/x\n")
    assert str(trace._no_answer("m", tmp_path / "log", 1)) == "m: its graph could not be read (OSError: no /tmp/x)"
