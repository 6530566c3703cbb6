"""The shape of `bench transport`, and that its processes end. Never a time."""

from __future__ import annotations

import json

import psutil
import pytest

from swarmnode.bench import transport as bench


@pytest.mark.slow
def test_every_transport_and_case_has_a_row_and_no_process_is_left() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    result = bench.run(quick=True, engines=("qh3",))
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert json.loads(json.dumps(result)) == result
    assert {"system", "python", "cpus", "load"} <= set(result["machine"])
    rows = {(row["transport"], row["case"]): row for row in result["rows"]}
    names, cases = ("quic-direct", "tcp-tls", "aioquic-stock"), [*bench.REQUEST_SIZES, "bulk"]
    expected = {(name, case) for name in names for case in cases}
    assert set(rows) == expected | {("quic-direct", "12KB-1280"), ("quic-direct", "bulk-1280")}
    for (_, case), row in rows.items():
        assert set(row) == {"transport", "case", "p50_ms", "p99_ms", "MBps", "n", "note"}
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert (row["MBps"] is not None) == case.startswith("bulk")
    text = bench.table(result)
    assert len(text.splitlines()) == 1 + len(rows)
    assert "1.00×" in text


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(SystemExit):
        bench.main(["--engine", "msquic"])
