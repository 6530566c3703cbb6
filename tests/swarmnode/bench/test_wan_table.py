from __future__ import annotations

from typing import Any

from swarmnode.bench.wan_cases import LEVERS, parse_levers
from swarmnode.bench.wan_table import by_round_trip, table, waterfall


def row(rtt_ms: float, mbit: float | None, **other: Any) -> dict[str, Any]:
    axes = {"path": "direct", "mbit": mbit, "rtt_ms": rtt_ms, "levers": list(LEVERS), "text": "code"}
    figures = {"tokens_per_s": 2.5, "bound_tokens_per_s": 3.125 if rtt_ms else None, "ratio_to_bound": 0.8}
    return {**axes, "temperature": 0.0, "streams": 1, **figures, "tokens": 9, "skipped": "", **other}


def test_a_grid_has_a_column_per_round_trip_with_bound_and_ratio() -> None:
    rows = [row(80.0, None), row(0.0, None), row(80.0, 10.0), {**row(0.0, 10.0, skipped="no"), "tokens_per_s": None}]
    assert by_round_trip(rows) == [
        {"Mbit/s": "unlimited", "streams": 1, "levers": "all", "0 ms": "2.5", "80 ms": "2.5 of 3.12 (0.80)"},
        {"Mbit/s": "10", "streams": 1, "levers": "all", "0 ms": "–", "80 ms": "2.5 of 3.12 (0.80)"},
    ]


def test_a_table_for_people_has_levers_in_a_word_and_why_last() -> None:
    shown = table({"model": "demo", "rows": [row(80.0, None)]})
    assert shown["model"] == "demo"
    assert shown["rows"][0]["levers"] == "all"
    assert list(shown["rows"][0])[-1] == "skipped"
    assert "tokens" not in shown["rows"][0]


def test_a_waterfall_is_a_table_of_its_own() -> None:
    more = {
        "steps_per_s": 2.5,
        "accepted_per_step": 1.0,
        "blocking_round_trips_per_token": 4.0,
        "bytes_per_token": 3450,
    }
    steps = [row(80.0, None, levers=list(one), **more) for one in parse_levers("waterfall")]
    rows = [*steps, row(0.0, None, levers=[], **more), row(80.0, 10.0, **more)]
    # Of the chain only none was measured at several round trips.
    assert [one["levers"] for one in by_round_trip(rows)] == ["none"]
    shown = waterfall(rows)
    assert [one["levers"] for one in shown][:3] == ["none", "+ partial", "+ f16"]
    assert len(shown) == len(steps)
    assert (shown[0]["of the bound"], shown[0]["bytes per token"]) == ("0.80", "3,450")
    assert waterfall(rows[-2:]) == waterfall([{**steps[0], "tokens_per_s": None}]) == []
