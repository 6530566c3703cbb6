"""The shape of `bench transport`, and that its processes end. Never a time."""

from __future__ import annotations

import importlib.util
import json

import psutil
import pytest

from swarmnode.bench import transport as bench
from swarmnode.bench.carriers.base import BULK, HEADER, REQUESTS, Answers
from swarmnode.bench.carriers.iroh_package import Iroh

FAST = ("quic-direct", "quic-direct-1452", "quic-relay", "websocket-relay", "tcp-tls", "aioquic-stock")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP", 2)
    monkeypatch.setattr(bench, "QUICK_DIVISOR", 50)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_every_transport_and_case_has_a_row_and_no_process_is_left() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    result = bench.run(quick=True, transports=FAST)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert json.loads(json.dumps(result)) == result
    assert {"system", "python", "cpus", "load"} <= set(result["machine"])
    rows = {(row["transport"], row["case"]): row for row in result["rows"]}
    expected = {(name, case) for name in FAST if name != "quic-direct-1452" for case in bench.CASES}
    assert set(rows) == expected | {("quic-direct", f"{case}-1452") for case in ("12KB", "100KB", "bulk")}
    for (_, case), row in rows.items():
        assert set(row) == {"transport", "case", "p50_ms", "p99_ms", "MBps", "n", "note"}
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert (row["MBps"] is not None) == case.startswith("bulk")
        assert row["n"] >= 1
        assert row["note"]
    text = bench.table(result)
    assert len(text.splitlines()) == 1 + len(rows)
    assert "1.00×" in text


@pytest.mark.usefixtures("small")
def test_the_iroh_package_is_measured_where_it_is_installed_and_otherwise_the_rows_say_so() -> None:
    names = [Iroh(copy_replaced=replaced).name for replaced in (False, True)]
    result = bench.run(quick=True, transports=names)
    assert [(row["transport"], row["case"]) for row in result["rows"]] == [
        (name, case) for case in bench.CASES for name in names
    ]
    installed = importlib.util.find_spec("iroh") is not None
    for row in result["rows"]:
        assert (row["p50_ms"] is not None) == installed
        assert ("swarmnode[bench]" in row["note"]) == (not installed)
        assert not installed or ("memmove" in row["note"]) == (row["transport"] == names[1])


def test_a_carrier_that_cannot_run_has_rows_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = bench.run(quick=True, transports=["iroh-py"])
    assert [row["case"] for row in result["rows"]] == list(bench.CASES)
    for row in result["rows"]:
        assert (row["p50_ms"], row["p99_ms"], row["MBps"], row["n"]) == (None, None, None, 0)
        assert "pip install 'swarmnode[bench]'" in row["note"]
    assert len(bench.table(result).splitlines()) == 1 + len(bench.CASES)


def test_masking_stands_apart() -> None:
    rows = bench._mask_rows()
    assert [(row["transport"], row["case"]) for row in rows] == [
        ("websocket-mask", "12KB"),
        ("websocket-mask-python", "12KB"),
    ]
    for row in rows:
        assert row["p50_ms"] > 0
        assert "µs per 12 KB" in row["note"]


def test_a_server_answers_what_the_header_says_however_it_is_cut() -> None:
    for mode, count, expected in ((REQUESTS, 2, [bytes(5), bytes(5)]), (BULK, 1, [b"\x01"])):
        written: list[bytes] = []
        answers = Answers(written.append)
        for byte in HEADER.pack(mode, 5) + bytes(5 * count):
            answers.received(bytes([byte]))
        assert (answers.mode, answers.size) == (mode, 5)
        assert written == expected


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(SystemExit):
        bench.main(["--transport", "msquic"])
