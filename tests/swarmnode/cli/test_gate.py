"""`swarmnode gate`: tables for people, JSON for machines, one line for what cannot be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from swarmnode.architectures.tiny_model import ARCHITECTURES
from swarmnode.cli.gate import _gate_many, gate
from swarmnode.errors import ModelError, UsageError
from swarmnode.gate import load_verdict, save_verdict
from swarmnode.gate.coding import Pair
from swarmnode.gate.verdict import VERIFIED, Verdict
from swarmnode.gate.verdict_file import bound_of
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack, onboard
from tests.swarmnode.gate.samples import site, unmeasured, verdict

app = typer.Typer()
app.command()(gate)


@pytest.fixture
def pack(tmp_path: Path) -> ModelPack:
    write_random_model(RandomModel(), tmp_path / "r.gguf")
    return onboard(tmp_path / "r.gguf", tmp_path / "pack")


def test_measure_and_show(pack: ModelPack) -> None:
    runner = CliRunner()
    assert isinstance(runner.invoke(app, [str(pack.path), "--show"]).exception, ModelError)
    done = runner.invoke(app, [str(pack.path), "--positions", "1024", "--threads", "1"])
    assert done.exit_code == 0, done.output
    for text in ("2 MoE layers, 8 experts (Q8_0), top 2", "the plain local run's bits", "INT8 / FP8", "F16 passed"):
        assert text in done.stdout
    verdict = load_verdict(pack)
    assert not isinstance(verdict, str)
    shown = runner.invoke(app, [str(pack.path), "--show", "--json"])
    assert shown.exit_code == 0
    found = json.loads(shown.stdout)
    assert found["positions"] == 1024
    assert found["passed"] is True
    assert [(pair["out"], pair["back"], pair["kl"]) for pair in found["pairs"]] == [
        (pair.out, pair.back, pair.kl) for pair in verdict.pairs
    ]


def test_a_model_that_does_not_even_pass_with_f16(pack: ModelPack) -> None:
    bad: dict[Pair, dict[str, float]] = {pair: {"kl": 0.5} for pair in VERIFIED}
    save_verdict(pack, verdict(site(), site(1), bound=bound_of(pack), bad=bad))
    shown = CliRunner().invoke(app, [str(pack.path), "--show"])
    assert shown.exit_code == 1
    assert "F16 does not pass: KL 5.00e-01 > 1.00e-03" in shown.stdout
    found = json.loads(CliRunner().invoke(app, [str(pack.path), "--show", "--json"]).stdout)
    assert (found["passed"], found["error"]) == (False, "KL 5.00e-01 > 1.00e-03")
    assert {row["best"] for row in found["rows"]} == {"f32/f32"}


def test_what_cannot_be(pack: ModelPack, tmp_path: Path) -> None:
    runner = CliRunner()
    for arguments, kind, text in (
        ([], UsageError, "gate what? give one of FILE"),
        ([str(pack.path), "--arch", "all"], UsageError, "gate what? give one of FILE"),
        (["--arch", "all", "--shape", "all"], UsageError, "gate what? give one of FILE"),
        ([str(pack.path), "--memory", "much"], UsageError, "--memory much: give a size such as 800M or 8G"),
        ([str(pack.path), "--memory", "1M"], ModelError, "has 1.0 MB: free some memory, or state what there is"),
        (
            ["--arch", "llama", "--positions", "99", "--show"],
            UsageError,
            "--positions, --show: only for a FILE, which --arch",
        ),
        (
            ["--shape", "all", "--gpu-layers", "0"],
            UsageError,
            "--gpu-layers: only for a FILE, which --shape does",
        ),
        (["--arch", "none"], UsageError, "--arch none: say all, or one of "),
        (["--arch", "llama", "--arch", "none"], UsageError, "--arch none: say all, or one of "),
        (["--shape", "GLM-5.2", "--shape", "none"], UsageError, "--shape none: say all, or one of "),
        ([str(pack.path), "--threads", "0"], UsageError, "0 threads cannot be meant: give 1 to 512"),
        ([str(pack.path), "--threads", "99999"], UsageError, "99999 threads cannot be meant: give 1 to 512"),
        ([str(pack.path), "--gpu-layers", "-7"], UsageError, "-7 layers on the GPU cannot be meant: give 0 to"),
        ([str(pack.path), "--device", "abacus" * 99], UsageError, "--device: no device 'abacus"),
        (["--shape", "none"], UsageError, "--shape none: say all, or one of "),
        (["https://example.com/m.gguf?key=x"], ModelError, "https://example.com/m.gguf: the gate computes every"),
        ([str(tmp_path / "none.gguf")], ModelError, "no such file"),
        ([str(pack.path), "--positions", "10"], UsageError, "10 positions: give 1024"),
        ([str(pack.path), "--own-kl", "-1"], UsageError, "cannot be meant"),
        ([str(pack.path), "--text", str(tmp_path / "none.txt")], UsageError, "cannot be read"),
    ):
        error = runner.invoke(app, arguments).exception
        assert isinstance(error, kind)
        assert text in str(error)
        assert "\n" not in str(error)


def test_layers_that_did_not_fit(pack: ModelPack) -> None:
    save_verdict(pack, verdict(site(), unmeasured(1), bound=bound_of(pack)))
    shown = CliRunner().invoke(app, [str(pack.path), "--show"])
    assert shown.exit_code == 0, shown.output
    assert "measured: layer 0; no room for the experts of layer 1: F16 at most there" in shown.stdout
    found = json.loads(CliRunner().invoke(app, [str(pack.path), "--show", "--json"]).stdout)
    assert (found["layers_measured"], found["layers_not_measured"]) == ([0], [1])
    assert (found["passed"], found["pairs"], found["kl"]) == (True, [], {})
    assert [row["best"] for row in found["rows"]] == ["f16/f16"] * 2
    assert found["rows"][1]["int8"] is None


def test_a_model_with_other_bits(pack: ModelPack) -> None:
    differs = msgspec.structs.replace(site(1), exact_rows=128, differ=7)
    save_verdict(pack, verdict(site(), differs, bound=bound_of(pack)))
    shown = CliRunner().invoke(app, [str(pack.path), "--show"])
    assert shown.exit_code == 1
    assert "layer 1 is the first that differs, in 7 of 128 rows" in shown.stdout
    assert "7 rows differ" in shown.stdout
    assert "exact mode: does not give the local run's bits" in shown.stdout
    assert "exact mode: exact mode" not in shown.stdout
    for text in ("16 passed", "INT8 passed", "FP8 passed", "cheapest that passes:", "yes", "INT8/INT8"):
        assert text not in shown.stdout
    found = json.loads(CliRunner().invoke(app, [str(pack.path), "--show", "--json"]).stdout)
    assert (found["identical"], found["first_differing_layer"], found["passed"]) == (False, 1, False)
    found = json.loads(CliRunner().invoke(app, [str(pack.path), "--show", "--json"]).stdout)
    assert not any(said["passed"] for said in [*found["wires"].values(), *found["pairs"]])


def test_exact_mode_that_was_not_tried(pack: ModelPack) -> None:
    found = verdict(site(), site(1), bound=bound_of(pack))
    why = "layers of the backbone lie on a GPU, where sums are added up in another order"
    save_verdict(pack, msgspec.structs.replace(found, exact_positions=0, local_differ=None, not_exact=why))
    shown = CliRunner().invoke(app, [str(pack.path), "--show"])
    assert shown.exit_code == 0
    assert f"exact mode: not compared: {why}" in shown.stdout


class TestKeeping:
    """What was measured is shown, whether or not it can be kept."""

    def gate(self, pack: ModelPack, monkeypatch: pytest.MonkeyPatch, found: Verdict, *arguments: str) -> Result:
        monkeypatch.setattr("swarmnode.gate.wires.measure", lambda *_: found)
        return CliRunner().invoke(app, [str(pack.path), *arguments])

    def test_other_bits_stay_known(self, pack: ModelPack, monkeypatch: pytest.MonkeyPatch) -> None:
        good = verdict(site(), site(1), bound=bound_of(pack))
        bad = msgspec.structs.replace(good, local_differ=3)
        save_verdict(pack, bad)
        for arguments in ([], ["--json"]):
            done = self.gate(pack, monkeypatch, msgspec.structs.replace(good, local_differ=None), *arguments)
            assert done.exit_code == 1
            assert "not kept: exact mode does not give the local run's bits: the logits differ at 3 of" in done.stdout
            assert load_verdict(pack) == bad
        assert self.gate(pack, monkeypatch, good).exit_code == 0
        assert load_verdict(pack) == good

    def test_a_folder_that_cannot_be_written_is_seen_before(
        self, pack: ModelPack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(30, "Read-only file system")

        def measure(*_: object) -> Verdict:
            raise AssertionError("measured all the same")

        monkeypatch.setattr("swarmnode.gate.verdict_file.tempfile.TemporaryFile", refuse)
        monkeypatch.setattr("swarmnode.gate.wires.measure", measure)
        error = CliRunner().invoke(app, [str(pack.path)]).exception
        assert isinstance(error, ModelError)
        assert str(error).startswith(f"{pack.path}: cannot be written (Read-only file system)")

    def test_the_report_comes_before_the_error(self, pack: ModelPack, monkeypatch: pytest.MonkeyPatch) -> None:
        (pack.verdict_file / "in the way").mkdir(parents=True)
        good = verdict(site(), site(1), bound=bound_of(pack))
        done = self.gate(pack, monkeypatch, good)
        assert isinstance(done.exception, ModelError)
        assert "INT8 passed" in done.stdout
        done = self.gate(pack, monkeypatch, good, "--json")
        assert isinstance(done.exception, ModelError)
        assert json.loads(done.stdout)["kept"] == "not kept"


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP"])
def test_what_ends_it_from_outside_leaves_nothing(pack: ModelPack, tmp_path: Path, how: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "swarmnode", "gate", str(pack.path), "--threads", "1", "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(temporary)}
    )
    while not list(temporary.glob("swarmnode-gate-*/exact")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(getattr(signal, how))
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="a mapped file cannot be cut there")
def test_a_file_that_is_cut_meanwhile_is_told(pack: ModelPack, tmp_path: Path) -> None:
    """In one line, or, where experts were just being read, by faulthandler; the next gate tidies up."""
    assert pack.source is not None
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "swarmnode", "gate", str(pack.path), "--threads", "1"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    while not list(temporary.glob("swarmnode-gate-*/exact")):
        assert process.poll() is None
        time.sleep(0.02)
    os.truncate(pack.source, 4096)
    out, errors = process.communicate(timeout=60)
    assert out == b""
    if process.returncode == 1:
        assert errors.count(b"\n") == 1
        assert b"r.gguf: changed while it was measured; leave it alone and gate it again" in errors
        assert list(temporary.iterdir()) == []
    else:
        assert process.returncode == -signal.SIGBUS
        assert b"Fatal Python error: Bus error" in errors


def test_several_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def gate_architectures(names: Sequence[str], *_: object) -> list[Row]:
        asked.append(names)
        return [Row(name) for name in names]

    monkeypatch.setattr("swarmnode.architectures.run.gate_architectures", gate_architectures)
    done = CliRunner().invoke(app, ["--arch", "qwen3moe", "--arch", "LLAMA", "--arch", "qwen3moe", "--json"])
    assert done.exit_code == 0
    assert asked == [["qwen3moe", "llama"]]
    CliRunner().invoke(app, ["--arch", "llama", "--arch", "all", "--json"])
    assert asked[-1] == ["llama", *(name for name in ARCHITECTURES if name != "llama")]


def test_what_it_takes_to_run(pack: ModelPack) -> None:
    save_verdict(pack, verdict(site(), site(1), bound=bound_of(pack)))
    needs = json.loads(CliRunner().invoke(app, [str(pack.path), "--show", "--json"]).stdout)["needs"]
    assert needs["experts_bytes"] == 2 * 8 * pack.manifest.expert_bytes(0)
    assert needs["backbone_bytes"] > pack.backbone.stat().st_size
    rates = [needs["tokens_per_s"][ms] for ms in ("20", "80", "100")]
    assert rates == sorted(rates, reverse=True)
    assert 4 < rates[2] <= 1 / (2 * 0.1)


COSINES = {"partial_f32": 1.0, "f16": 0.9999, "int8": 0.999, "fp8": 0.9988}


class Row(msgspec.Struct):
    """What `--arch` and `--shape` have of each model, in short."""

    arch: str
    variant: str = "top1"
    identical: bool = True
    layer_cosine: dict[str, float] = msgspec.field(default_factory=lambda: dict(COSINES))
    passed: bool = True
    error: str = ""
    built: bool = True


@pytest.mark.parametrize("as_json", [False, True])
def test_many(capsys: pytest.CaptureFixture[str], *, as_json: bool) -> None:
    heard: list[str] = []
    rows = [Row("good[/x]"), Row("strange", "top1", False, {}, False, "unknown tensor", built=False)]

    def gate_all(progress: Callable[[str, int, int], None]) -> list[Row]:
        progress("good[/x]", 1, 2)
        heard.append("good")
        return rows

    _gate_many(gate_all, "architecture", as_json=as_json)  # what llama.cpp cannot run is listed, and fails nothing
    assert heard == ["good"]
    out = capsys.readouterr().out
    if as_json:
        assert [row["arch"] for row in json.loads(out)] == ["good[/x]", "strange"]
    else:
        for text in ("good[/x]", "unknown tensor", "1 of 1 passed; llama.cpp itself cannot build or run 1"):
            assert text in out
    rows.append(Row("bad", identical=False, passed=False, error="differs"))
    with pytest.raises(typer.Exit) as ended:
        _gate_many(gate_all, "architecture", as_json=as_json)
    assert ended.value.exit_code == 1


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([Row("llama", passed=False, built=False)], "could build none of these models"),
        (
            [Row("llama"), Row("qwen3moe", "base", passed=False, built=False)],
            "could not build or run the base model of qwen3moe",
        ),
    ],
)
def test_what_should_have_been_built(capsys: pytest.CaptureFixture[str], rows: list[Row], why: str) -> None:
    with pytest.raises(typer.Exit) as ended:
        _gate_many(lambda _progress: rows, "architecture", as_json=True)
    assert ended.value.exit_code == 1
    printed = capsys.readouterr()
    assert why in printed.err
    assert len(json.loads(printed.out)) == len(rows)


def test_a_variable_for_every_command_is_no_option_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNODE_THREADS", "2")
    error = CliRunner().invoke(app, ["--arch", "none"]).exception
    assert "say all, or one of" in str(error)
