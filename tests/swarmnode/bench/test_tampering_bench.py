"""A cheat is found out soon and nobody else accused, by the product's own policy on the demo model's real rows."""

from __future__ import annotations

import json

import pytest

from swarmnode.bench import tampering as bench
from swarmnode.dispatch.spot_check import CheckPolicy


def test_the_quick_form_catches_every_cheat_and_accuses_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    [honest] = result["honest"]
    assert (honest["rows"], honest["accused"], honest["convicted"]) == (4800, 0, 0)
    assert 0.99 < honest["lowest_cosine"] < 1.0
    assert [(row["model"], row["error"]) for row in result["rows"]] == [(model, "noise 0.3") for model in bench.MODELS]
    for row in result["rows"]:
        assert row["caught"] == 1.0
        assert 1 <= row["p50"] <= row["p95"] <= row["most"] <= bench.LIMIT
        assert 0 < row["again"] <= row["again_most"] <= CheckPolicy().budget
        assert row["others_accused"] == 0


def test_what_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--wire", "f8"], ["--error", "none"], ["--runs", "0"]):
        with pytest.raises(SystemExit) as ended:
            bench.main(wrong)
        assert ended.value.code == 2
    capsys.readouterr()
