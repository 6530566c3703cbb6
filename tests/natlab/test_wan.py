"""The WAN run in small, and its arithmetic. Times are only compared with what light needs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from swarmnode.onboard import ModelPack
from tests.natlab import wan
from tests.natlab.lab import Lab

SMALL = wan.Options(rtt_ms=20.0, tokens=4, rounds=1)


@pytest.mark.timeout(180)
async def test_both_paths_with_and_without_distance(
    lab: Lab, demo_pack: ModelPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wan, "SETTLE_TOKENS", 2)
    rows = [row async for row in wan.measure(lab, demo_pack.path, tmp_path, wan.MODES[1], SMALL)]
    assert [(row.path, row.rtt_ms) for row in rows] == [("direct", 0), ("direct", 20), ("relay", 0), ("relay", 20)]
    for row in rows:
        assert not row.error
        assert row.trips <= len(demo_pack.manifest.sites)
        assert not row.rtt_ms or row.trips == len(demo_pack.manifest.sites), "every site call waits for a worker"
        assert row.seen_rtt_ms >= row.rtt_ms
        assert row.step_ms >= row.trips * row.rtt_ms, "nothing is faster than the link"
        assert (row.overhead is None) == (row.rtt_ms == 0)
        assert wan.line(row).split()[0] == row.path


def test_what_a_row_says() -> None:
    results = [{"steps": 10, "decode_s": seconds, "blocking_round_trips_per_token": 4.0} for seconds in (4.0, 5.0, 3.6)]
    row = wan.row("--mode partial", "relay", 80.0, 81.23, 0.04, results)
    assert (row.steps_per_s, row.low, row.high, row.step_ms) == (2.5, 2.0, 2.7778, 400.0)
    assert row.bound_steps_per_s == 3.125  # 4 × 80 ms
    assert row.overhead == 0.2
    assert row.unexplained == 0.1  # of 400 ms are 320 distance, 40 a step without any
    assert (row.roadmap, row.seen_rtt_ms, row.founder) == (0.28, 81.2, "--mode partial")
    near = wan.row("", "direct", 0.0, 0.5, 0.04, results)
    assert (near.founder, near.bound_steps_per_s, near.overhead, near.unexplained) == ("exact", None, None, None)
    assert "20.0%" in wan.line(row)
    assert json.loads(json.dumps(asdict(row)))["bound_steps_per_s"] == 3.125
