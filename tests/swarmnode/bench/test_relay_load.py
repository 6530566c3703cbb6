"""The relay's load generator: a small load gives whole figures. No test is a timing."""

from __future__ import annotations

import json

import pytest

from swarmnode.bench import relay_load


def test_a_small_load_loses_nothing_and_prints_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relay_load, "SETTLE", 0.2)  # no memory is looked at here
    assert relay_load.main(["--idle", "20", "--pairs", "3", "--seconds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["clients"] == {"idle": 20, "pairs": 3, "lost": 0}
    assert result["datagrams"]["sent"] == result["datagrams"]["received"] >= 6
    assert result["datagrams"]["dropped"] == 0
    assert result["latency"]["relay_p50_ms"] > 0
    assert result["memory"]["start_mb"] > 0
    assert "relay_p99_ms" in relay_load.table(result)
