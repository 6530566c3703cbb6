"""The engine benchmark: the shape of its result, its table and its command. No test is a timing."""

from __future__ import annotations

import json
import subprocess
import sys

from swarmnode.bench import engine


def test_result_and_table() -> None:
    result = engine.run(quick=True)
    assert len(result["rows"]) == len(engine.QUICK)
    for row, case in zip(result["rows"], engine.QUICK, strict=True):
        assert set(row) == {"shape", "type", "n_rows", "engine_us", "kernel_us", "overhead_us", "ratio"}
        assert row["n_rows"] == case.n_rows
        assert row["engine_us"] > 0
        assert row["kernel_us"] > 0
        assert abs(row["overhead_us"] - (row["engine_us"] - row["kernel_us"])) < 0.2
    text = engine.table(result)
    assert len(text.splitlines()) == 1 + len(result["rows"])
    assert result["rows"][0]["shape"] in text


def test_the_command_prints_json() -> None:
    command = [sys.executable, "-m", "swarmnode.bench.engine", "--quick", "--json"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert [row["n_rows"] for row in json.loads(out)["rows"]] == [case.n_rows for case in engine.QUICK]
