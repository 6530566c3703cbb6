"""`swarmnode gate`: tables for people, JSON for machines, one line for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from swarmnode.cli.gate import _gate_many, gate
from swarmnode.errors import ModelError, UsageError
from swarmnode.gate import load_verdict, save_verdict
from swarmnode.gate.coding import Pair
from swarmnode.gate.verdict import VERIFIED
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
    found = json.loads(CliRunner().invoke(app, [str(pack.path), "--show", "--json"]).stdout)
    assert (found["identical"], found["first_differing_layer"], found["passed"]) == (False, 1, False)


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
