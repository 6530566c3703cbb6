"""`swarmnode gate`: tables for people, JSON for machines, one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from swarmnode.cli.gate import gate
from swarmnode.errors import ModelError, UsageError
from swarmnode.gate import load_verdict, save_verdict
from swarmnode.gate.coding import Pair
from swarmnode.gate.verdict import VERIFIED
from swarmnode.gate.verdict_file import bound_of
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack, onboard
from tests.swarmnode.gate.samples import site, verdict

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
        ([str(tmp_path / "none.gguf")], ModelError, "no such file"),
        ([str(pack.path), "--positions", "10"], UsageError, "10 positions: give 1024"),
        ([str(pack.path), "--own-kl", "-1"], UsageError, "cannot be meant"),
        ([str(pack.path), "--text", str(tmp_path / "none.txt")], UsageError, "cannot be read"),
    ):
        error = runner.invoke(app, arguments).exception
        assert isinstance(error, kind)
        assert text in str(error)
        assert "\n" not in str(error)
