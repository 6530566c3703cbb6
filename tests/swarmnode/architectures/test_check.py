"""The gate: architectures pass it, and what is wrong does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmnode.architectures import check, run
from swarmnode.architectures.check import ArchResult, check_architecture, objection
from swarmnode.architectures.framed import FramedExperts
from swarmnode.architectures.refusal import LlamaRefused, refused
from swarmnode.architectures.run import Job, gate_architectures, plan_jobs, run_jobs
from swarmnode.architectures.tiny_model import ARCHITECTURES
from swarmnode.architectures.variants import BASE, TYPES, VARIANTS, variants_of
from swarmnode.backbone.hook import F32, I32
from swarmnode.errors import UsageError
from swarmnode.gate.bounds import LEAST_ROW
from swarmnode.gate.experts import Ready

# Of the models that people ask for first: Step-3.7, Qwen3.5-122B, GLM-4.5, GLM-5.2, MiniMax-M2 and M3, DeepSeek-V3,
# Kimi K3, Qwen3-235B, gpt-oss, Llama 4, Mixtral.
FIRST = (
    ("step35", "clamp"),
    ("qwen35moe", "merged"),
    ("glm4moe", "leading_dense"),
    ("glm-dsa", "base"),
    ("minimax-m2", "base"),
    ("minimax-m3", "base"),
    ("deepseek2", "groups"),
    ("kimi-k3", "base"),
    ("qwen3moe", "scales"),
    ("gpt-oss", "base"),
    ("llama4", "interleaved"),
    ("llama", "top1"),
)


@pytest.mark.parametrize(("arch", "variant"), FIRST)
def test_an_architecture_passes(tmp_path: Path, arch: str, variant: str) -> None:
    result = check_architecture(arch, variant, "F32", tmp_path)
    assert (result.error, result.passed, result.identical) == ("", True, True)
    assert result.sites > 0
    assert result.rollback == "exact"
    assert all(result.layer_cosine[wire] >= least for wire, least in LEAST_ROW.items())


@pytest.mark.parametrize(("arch", "ggml_type"), [("llama", "Q4_K"), ("gpt-oss", "MXFP4"), ("kimi-k3", "Q8_0")])
def test_a_quantised_model_passes(tmp_path: Path, arch: str, ggml_type: str) -> None:
    assert check_architecture(arch, "base", ggml_type, tmp_path).error == ""


def test_a_result_with_a_fault_does_not_pass() -> None:
    good = dict.fromkeys(LEAST_ROW, 1.0)

    def of(**fields: Any) -> str:
        base: dict[str, Any] = {"identical": True, "layer_cosine": good, "rollback": "exact"}
        return objection(ArchResult(arch="a", variant="b", type="F32", **{**base, **fields}))

    assert of() == ""
    assert of(rollback="refused") == ""
    assert "bit for bit" in of(identical=False)
    assert "0.9984000 with fp8" in of(layer_cosine={**good, "fp8": 0.9984})
    assert "with f16" in of(layer_cosine={**good, "f16": float("nan")})
    assert "taken back" in of(rollback="differs")


class OneBitOff(FramedExperts):
    """Experts of which one answers with one bit of one row changed."""

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> Ready:
        rows = super().submit(site, x, ids, weights).rows
        if site == 1:
            rows.view(np.uint32)[-1, 5] ^= 1 << 12
        return Ready(rows)


def test_one_wrong_bit_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FramedExperts", OneBitOff)
    result = check_architecture("qwen3moe", "base", "F32", tmp_path)
    assert (result.built, result.passed, result.identical) == (True, False, False)
    assert result.error == "the logits are not those of the local run, bit for bit"


def test_an_architecture_that_ends_the_process_is_a_row(tmp_path: Path) -> None:
    jobs = [("llama", "varying", "F32"), ("llama", "base", "F32"), ("no-such", "base", "F32")]
    heard: list[tuple[int, int]] = []
    broken, good, unknown = run_jobs(
        jobs, tmp_path, lambda _name, done, total: heard.append((done, total)), processes=1
    )
    assert (broken.passed, broken.built) == (False, False)
    assert broken.error.startswith("llama.cpp ended the process: ggml/src/ggml.c")
    assert good.passed
    assert not unknown.built
    assert "unknown model architecture" in unknown.error
    assert heard[-1] == (3, 3)
    assert not list(tmp_path.iterdir())


def test_a_job_is_not_blamed_for_the_end_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = run._Crew._take
    killed: list[int] = []

    def take_and_kill(crew: run._Crew) -> Job | None:
        if crew.results and not killed:  # the process has written its first result, and is dying, not dead
            (process,) = crew._running
            process.kill()
            killed.append(process.pid)
        return take(crew)

    monkeypatch.setattr(run._Crew, "_take", take_and_kill)
    results = run_jobs([("llama", "base", "F32"), ("qwen3moe", "base", "F32")], tmp_path, processes=1)
    assert len(killed) == 1
    assert [(result.arch, result.error) for result in results] == [("llama", ""), ("qwen3moe", "")]


def test_a_job_that_hangs_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "JOB_S", 0.01)
    (result,) = run_jobs([("llama", "base", "F32")], tmp_path)
    assert (result.built, result.passed, result.error) == (True, False, "took longer than 0.01 s")


DYING = """#!/bin/sh
read job
echo taken
echo 'ggml/src/ggml.c:1: GGML_ASSERT(one) failed' >&2
kill -{how} $$
"""


@pytest.mark.parametrize(("how", "built"), [("KILL", True), ("SEGV", False), ("ABRT", False)])
def test_only_its_own_end_is_llama_cpps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, *, built: bool
) -> None:
    """A process that the system killed (no memory) has failed, whatever stands in its log."""
    dying = tmp_path / "python"
    dying.write_text(DYING.format(how=how))
    dying.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(dying))
    (result,) = run_jobs([("qwen3moe", "base", "F32")], tmp_path)
    assert (result.passed, result.built) == (False, built)
    dying.write_text(DYING.format(how=how).replace("ggml/src/ggml.c:1: GGML_ASSERT(one) failed", "loading"))
    (result,) = run_jobs([("qwen3moe", "base", "F32")], tmp_path)
    assert (result.passed, result.built) == (False, True)


@pytest.mark.skipif(sys.platform == "win32", reason="no limits there")
@pytest.mark.parametrize("most", [1000, 100_000, 600_000])
def test_a_disk_without_room_is_not_llama_cpps(tmp_path: Path, most: int) -> None:
    """It is in the way when the file is probed, when it is written, and when the backbone is."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        result = check_architecture("qwen3moe", "base", "F32", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (result.passed, result.built) == (False, True)
    assert "File too large" in result.error


def test_what_this_machine_lacks_excuses_nothing() -> None:
    assert isinstance(refused("a: llama.cpp cannot load it: tensor 'b' has wrong shape"), LlamaRefused)
    for said in ("failed to allocate buffer", "unable to allocate", "mmap failed: Cannot allocate memory"):
        assert not isinstance(refused(f"a: llama.cpp cannot load it: {said}"), LlamaRefused)


def test_processes_that_do_not_even_start_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named swarmnode >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(broken))
    results = run_jobs([("llama", "base", "F32"), ("qwen3moe", "base", "F32")], tmp_path, processes=1)
    why = "the process ended (exit code 3): no module named swarmnode"
    assert [(result.built, result.error) for result in results] == [(True, why)] * 2


def test_only_its_own_last_words_count(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("/a/llama.cpp/ggml/src/ggml.c:1: GGML_ASSERT(one) failed\n")
    assert run._why(-6, log, 0) == ("llama.cpp ended the process: ggml/src/ggml.c:1: GGML_ASSERT(one) failed", True)
    assert run._why(-9, log, log.stat().st_size) == ("the process ended (killed by SIGKILL): it said nothing", False)


def test_the_work_can_be_ended(tmp_path: Path) -> None:
    def stop(_name: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gate_architectures(ARCHITECTURES, None, None, tmp_path, stop, processes=1)
    assert not list(tmp_path.iterdir())


def test_what_is_run() -> None:
    jobs = plan_jobs(ARCHITECTURES, None, None)
    assert {job[0] for job in jobs} == set(ARCHITECTURES)
    assert {job[1] for job in jobs} == set(VARIANTS)
    assert len(jobs) == len(set(jobs))
    assert len({arch for arch, _, ggml_type in jobs if ggml_type == "IQ4_XS"}) > 6
    assert plan_jobs(["dbrx"], ["base"], ["F16", "Q8_0"]) == [("dbrx", "base", "F16"), ("dbrx", "base", "Q8_0")]
    with pytest.raises(UsageError, match="no architecture qwen9"):
        plan_jobs(["qwen9"], None, None)


@pytest.mark.slow
def test_every_architecture_variant_and_type_passes(tmp_path: Path) -> None:
    """The base model of every architecture, and every variant and type of one."""
    jobs: list[Job] = [(arch, BASE, "F32") for arch in ARCHITECTURES]
    of = {variant: next(arch for arch in ARCHITECTURES if variant in variants_of(arch)) for variant in VARIANTS}
    jobs += [(arch, variant, "F32") for variant, arch in of.items() if variant != BASE]
    jobs += [("llama", BASE, ggml_type) for ggml_type in TYPES if ggml_type != "F32"]
    results = run_jobs(jobs, tmp_path)
    assert [(result.arch, result.variant, result.type, result.error) for result in results if not result.passed] == []
    assert len(results) == len(ARCHITECTURES) + len(VARIANTS) - 1 + len(TYPES) - 1
