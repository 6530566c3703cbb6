"""Exact mode over a real worker process; what is said where it is not exact, and where the process dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from swarmnode.architectures.tiny_model import write_tiny_model
from swarmnode.compute.engine import ExpertEngine
from swarmnode.demo import MODEL
from swarmnode.dispatch.client import ExpertClient
from swarmnode.errors import ComputeError, ModelError, SwarmnodeError
from swarmnode.gate import wires
from swarmnode.gate.exact import POSITIONS, ExactRows, differing_rows
from swarmnode.gate.experts import Ready, site_engine
from swarmnode.gate.local_run import LocalCalls
from swarmnode.gate.memory import backbone_memory
from swarmnode.gate.report import report
from swarmnode.gate.staged import Recording
from swarmnode.gate.verdict import LocalFigures, Verdict
from swarmnode.gate.wires import GateOptions, measure
from swarmnode.gate.worker_process import WorkerSettings, run_beside_worker
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack, onboard

TYPES = {"gate": "Q4_K", "up": "Q4_K", "down": "Q8_0"}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> ModelPack:
    folder = tmp_path_factory.mktemp("exact")
    write_random_model(RandomModel(n_layers=3, expert_types=TYPES), folder / "r.gguf")
    return onboard(folder / "r.gguf", folder / "pack")


@pytest.fixture(scope="module")
def whole(pack: ModelPack) -> Verdict:
    return measure(pack, GateOptions(positions=1024))


def workers() -> list[psutil.Process]:
    """The gate's worker processes that this process has."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "swarmnode.gate.worker_child" in process.cmdline():
                found.append(process)
    return found


def memory_for(pack: ModelPack, layers: int) -> int:
    """What the backbone and the experts of so many of the largest layers need."""
    assert pack.source is not None
    sizes = [site.n_expert * pack.manifest.expert_bytes(site.index) for site in pack.manifest.sites]
    return backbone_memory(GgufFile.open(pack.source), 128) + layers * max(sizes)


def test_the_same_bytes(whole: Verdict) -> None:
    assert (whole.exact_positions, whole.local_differ, whole.identical) == (POSITIONS, 0, True)
    assert [(site.exact_rows, site.differ) for site in whole.sites] == [(POSITIONS, 0)] * 3
    assert [site.local for site in whole.sites] == [LocalFigures(POSITIONS, 0, 0.0)] * 3
    assert all(site.lowest["f32/f32"] >= 0.999999 for site in whole.sites)
    assert whole.partial is not None
    assert 0 <= whole.partial.kl < 1e-6
    assert workers() == []


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
def test_some_layers_at_a_time_give_the_very_same_figures(pack: ModelPack, whole: Verdict, layers: int) -> None:
    stages: list[tuple[str, int, int]] = []
    found = measure(
        pack,
        GateOptions(positions=1024, memory=memory_for(pack, layers)),
        lambda *stage: stages.append(stage),
    )
    assert (found.sites, found.pairs, found.partial) == (whole.sites, whole.pairs, whole.partial)
    assert (found.exact_positions, found.local_differ, found.identical) == (POSITIONS, 0, True)
    assert found.failure == ""
    passes = 3 if layers == 1 else 2
    for stage in ("layers", "logits"):
        assert [total for name, _, total in stages if name == stage][-1] == passes * 1024
        assert (stage, passes * 1024, passes * 1024) in stages


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama4", "qwen3next", "grovemoe"])
def test_other_graphs(arch: str, tmp_path: Path) -> None:
    """Weights before the experts; recurrent layers; two sites per layer."""
    other = onboard(write_tiny_model(tmp_path / "m.gguf", arch), tmp_path / "pack")
    found = measure(other, GateOptions(positions=1024))
    assert (found.identical, found.failure) == (True, "")
    staged = measure(other, GateOptions(positions=1024, memory=memory_for(other, 1)))
    assert (staged.sites, staged.pairs, staged.partial) == (found.sites, found.pairs, found.partial)


@pytest.mark.slow
def test_a_layer_that_does_not_fit_ends_it_there(tmp_path: Path) -> None:
    """The demo model's later layers are larger."""
    demo = onboard(MODEL, tmp_path / "pack")
    small = min(site.n_expert * demo.manifest.expert_bytes(site.index) for site in demo.manifest.sites)
    options = GateOptions(positions=1024, memory=memory_for(demo, 0) + small)
    found = measure(demo, options)
    assert [site.measured for site in found.sites] == [True, True, False, False]
    assert [(site.exact_rows, site.differ) for site in found.sites] == [(POSITIONS, 0)] * 2 + [(0, 0)] * 2
    assert [(site.local.rows, site.local.differ) for site in found.sites] == [(POSITIONS, 0)] * 2 + [(0, 0)] * 2
    assert (found.local_differ, found.identical, found.unverified) == (None, None, "")
    assert (found.pairs, found.partial, found.failure) == ((), None, "")
    assert set(found.best().values()) == {("f16", "f16")}
    with pytest.raises(SwarmnodeError, match="for the experts of the first layer"):
        measure(demo, GateOptions(positions=1024, memory=memory_for(demo, 0) + small - 1))


def test_which_layer_differs_first(pack: ModelPack, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own experts of layer 1 are made slightly different from the worker's."""

    class Bent(ExpertEngine):
        def partial_sums(self, site: int, *arguments: Any) -> Any:
            rows = super().partial_sums(site, *arguments)
            if site == 1 and len(rows) == 1:
                rows[0, 3] = np.nextafter(rows[0, 3], np.float32(1))
            return rows

    def bent(*arguments: Any, **named: Any) -> ExpertEngine:
        engine = site_engine(*arguments, **named)
        engine.__class__ = Bent
        return engine

    monkeypatch.setattr(wires, "site_engine", bent)
    found = measure(pack, GateOptions(positions=1024))
    assert [(site.exact_rows, site.differ) for site in found.sites] == [(128, 0), (128, 32), (128, 0)]
    assert found.identical is False
    assert "layer 1 is the first that differs, in 32 of 128 rows" in found.failure


def test_differing_rows_are_told_by_their_bytes() -> None:
    a = np.array([[0.0, 1.0], [np.nan, 2.0], [3.0, 4.0]], np.float32)
    b = np.array([[-0.0, 1.0], [np.nan, 2.0], [3.0, 4.0]], np.float32)
    assert (differing_rows(a, a), differing_rows(a, b), differing_rows(a, b[:2])) == (0, 1, 3)
    assert differing_rows(a[:, :0], b[:, :0]) == 0


def test_counts_what_comes_back(pack: ModelPack) -> None:
    assert pack.source is not None
    engine = site_engine(pack.source, pack.manifest, range(1), threads=1, device="cpu")
    x, ids = np.ones((2, 256), np.float32), np.array([[0, 1], [2, 3]], np.int32)
    weights = np.full((2, 2), 0.5, np.float32)

    class Zeros:
        def submit(self, *_: object) -> Ready:
            return Ready(np.zeros((2, 256), np.float32))

    rows = ExactRows(Zeros(), engine, pack.manifest.sites[:1])
    assert not rows.submit(0, x, ids, weights).result().any()
    assert (rows.rows, rows.differ) == ({0: 2}, {0: 2})
    engine.close()


@pytest.mark.parametrize("when", ["at once", "in the middle"])
def test_a_worker_that_is_killed_is_one_line(pack: ModelPack, when: str) -> None:
    killed: list[int] = []

    def progress(stage: str, done: int, _total: int) -> None:
        if stage == "exact" and (done > 96 or when == "at once") and not killed:
            for process in workers():
                process.send_signal(signal.SIGKILL)
                killed.append(process.pid)

    with pytest.raises(ComputeError, match=r"worker process ended too early \(killed by SIGKILL\)") as caught:
        measure(pack, GateOptions(positions=1024), progress)
    assert killed
    assert "\n" not in str(caught.value)
    assert workers() == []


def test_a_worker_that_cannot_serve_says_why(pack: ModelPack, tmp_path: Path) -> None:
    """Its GGUF is gone by the time it starts."""
    settings = WorkerSettings(
        manifest_file=pack.path / "manifest.json",
        manifest=pack.manifest,
        source=tmp_path / "copy.gguf",
        group=range(1),
        threads=1,
        device="cpu",
    )
    with pytest.raises(ComputeError, match=r"ended too early .*copy\.gguf") as caught:
        run_beside_worker(settings, lambda _client: None, lambda: None)
    assert "\n" not in str(caught.value)


def test_what_progress_raises_ends_it(pack: ModelPack) -> None:
    def progress(stage: str, done: int, _total: int) -> None:
        if stage == "exact" and done > 96:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(pack, GateOptions(positions=1024), progress)
    assert workers() == []


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A shell that starts tests in the background has them ignore Ctrl-C, and their children too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to one process")
@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_a_gate_that_ends_leaves_no_process(pack: ModelPack, how: signal.Signals) -> None:
    """Ctrl-C, which a terminal sends to both processes; and a crash, after which nobody cleans up."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "swarmnode", "gate", str(pack.path), "--json", "--threads", "1",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True, env=os.environ,
    )  # fmt: skip
    gate = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    while not children:
        await asyncio.sleep(0.05)
        children = gate.children()
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.kill()
    out, errors = await process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    assert (out, errors) == (b"", b"")
    await asyncio.to_thread(psutil.wait_procs, children, 30)
    assert not any(child.is_running() for child in children)


BROKEN_CHILD = """#!{python}
import asyncio, sys
from swarmnode.gate import worker_child

serve = worker_child.ExpertWorker.serve

async def broken(worker, connection):
    serving = asyncio.create_task(serve(worker, connection))
    await asyncio.sleep(1)
    raise RuntimeError("a fault of its own")

worker_child.ExpertWorker.serve = broken
sys.exit(worker_child.main(sys.argv[3:]))
"""


def test_a_worker_that_can_no_longer_serve_says_so(
    pack: ModelPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pack.source is not None
    child = tmp_path / "python"
    child.write_text(BROKEN_CHILD.format(python=sys.executable))
    child.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(child))
    settings = WorkerSettings(
        manifest_file=pack.path / "manifest.json",
        manifest=pack.manifest,
        source=pack.source,
        group=range(1),
        threads=1,
        device="cpu",
    )

    def work(client: ExpertClient) -> None:
        x = np.ones((1, pack.manifest.sites[0].d_in), np.float32)
        while True:
            client.submit(0, x, np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32)).result()

    with pytest.raises(
        ComputeError, match=r"too early \(exit code 1\): RuntimeError: a fault of its own; run the same"
    ):
        run_beside_worker(settings, work, lambda: None)


def test_a_recording_that_is_gone(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "r")
    recording.write(0, np.ones((2, 3), np.float32))
    assert recording.read(0, 1, 3).tolist() == [[1, 1, 1]]
    (tmp_path / "r" / "0.f32").unlink()
    with pytest.raises(ModelError, match=r"cannot be read again \(No such file"):
        recording.read(0, 1, 3)


class TestAnEngineThatIsWrong:
    """By the same tenth in this process and in the worker's: their rows agree, and only llama.cpp knows better."""

    @pytest.fixture(autouse=True)
    def _wrong(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compute = ExpertEngine._compute

        def wrong(self: ExpertEngine, held: Any, x: Any, rows: Any, slots: Any, out: Any) -> None:
            compute(self, held, x, rows, slots, out)
            out *= np.float32(1.1)

        monkeypatch.setattr(ExpertEngine, "_compute", wrong)
        child = tmp_path / "python"
        child.write_text(WRONG_CHILD.format(python=sys.executable))
        child.chmod(0o700)
        monkeypatch.setattr("sys.executable", str(child))

    @pytest.mark.parametrize("layers", [None, 2])
    def test_it_fails(self, pack: ModelPack, layers: int | None) -> None:
        memory = None if layers is None else memory_for(pack, layers)
        found = measure(pack, GateOptions(positions=1024, memory=memory))
        assert [(site.exact_rows, site.differ) for site in found.sites] == [(POSITIONS, 0)] * 3
        assert [site.local.differ for site in found.sites] == [POSITIONS] * 3
        assert all(site.local.error == pytest.approx(0.1, rel=1e-3) for site in found.sites)
        assert (found.identical, found.local_differ) == (False, POSITIONS)
        assert found.failure == "the experts of layer 0 do not give llama.cpp's own rows: 128 of 128 differ, by 10 %"

    def test_also_where_only_some_layers_fit(self, demo_pack: ModelPack) -> None:
        demo = demo_pack
        small = min(site.n_expert * demo.manifest.expert_bytes(site.index) for site in demo.manifest.sites)
        found = measure(demo, GateOptions(positions=1024, memory=memory_for(demo, 0) + small))
        assert [site.measured for site in found.sites] == [True, True, False, False]
        assert (found.identical, found.local_differ) == (False, None)
        assert "layer 0 do not give llama.cpp's own rows: 128 of 128 differ" in found.failure

    def test_also_without_exact_mode(self, pack: ModelPack) -> None:
        """As on a GPU, where bits may differ: a tenth is more than they do."""
        found = measure(pack, GateOptions(positions=1024, worker=False))
        assert (found.exact_positions, found.identical) == (0, False)
        assert "128 of 128 differ, by 10 %" in found.failure


WRONG_CHILD = """#!{python}
import sys
import numpy as np
from swarmnode.compute.engine import ExpertEngine
from swarmnode.gate import worker_child

compute = ExpertEngine._compute

def wrong(self, held, x, rows, slots, out):
    compute(self, held, x, rows, slots, out)
    out *= np.float32(1.1)

ExpertEngine._compute = wrong
sys.exit(worker_child.main(sys.argv[3:]))
"""


def test_a_model_that_llama_cpp_cannot_run_alone(pack: ModelPack, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not refused, and not verified: INT8 and FP8 are not for it."""

    def refuse(*_: object, **__: object) -> None:
        raise ComputeError("llama.cpp cannot make a context of 128 tokens: no memory")

    monkeypatch.setattr("swarmnode.gate.local_run.LlamaModel", refuse)
    found = measure(pack, GateOptions(positions=1024))
    assert (found.failure, found.identical, found.local_differ) == ("", None, None)
    assert found.unverified == ("not compared with llama.cpp: llama.cpp cannot make a context of 128 tokens: no memory")
    assert found.passed("f16") == ""
    assert [found.objection(pair) for pair in (("int8", "int8"), ("f16", "fp8"))] == [found.unverified] * 2
    assert set(found.best().values()) == {("f16", "f16")}
    row = report(pack.manifest, found)
    assert (row["passed"], row["error"]) == (False, found.unverified)


@pytest.mark.slow
@pytest.mark.parametrize("free", [0, 1 << 40])
def test_a_disk_with_no_room_still_judges_the_model(
    pack: ModelPack, whole: Verdict, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Of what is played back; where the files really do not fit, that is an error."""
    monkeypatch.setattr("swarmnode.gate.wires.shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    found = measure(pack, GateOptions(positions=1024, memory=memory_for(pack, 2)))
    assert found.partial == whole.partial
    assert found._figures(("f16", "f16")) == whole._figures(("f16", "f16"))
    assert (len(found.pairs) == len(whole.pairs)) is bool(free)


def test_what_llama_cpp_said_at_a_layer(tmp_path: Path) -> None:
    calls = LocalCalls(tmp_path / "local")
    assert list(calls.read(0)) == []
    x, ids = np.ones((2, 3), np.float32), np.zeros((2, 1), np.int32)
    calls.write(0, (x, ids, x[:, :1], x * 2))
    calls.write(0, (x, ids, x[:, :1], x * 3))
    assert [float(rows[0, 0]) for _, _, _, rows in calls.read(0)] == [2, 3]
    file = tmp_path / "local" / "0.npy"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match="cannot be read again") as caught:
        list(calls.read(0))
    assert "\n" not in str(caught.value)
