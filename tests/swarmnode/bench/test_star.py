"""The measurement in small. What it finds on a quiet machine is in docs/benchmarks.md; a timing is never a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.bench import star
from swarmnode.onboard import ModelPack


async def test_a_star_takes_its_longest_round_trip(
    tmp_path: Path, demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(star, "STAR_RTT_MS", (1.0, 2.0, 3.0, 20.0))
    row = await star.star("demo", demo_pack, tmp_path, quick=True)
    assert (row["part"], row["rtt_ms"], row["n"]) == ("star", "1+2+3+20", 24)
    assert row["bound_ms"] >= 20.0
    assert row["layer_ms"] >= 19.0  # the slowest one was asked


async def test_a_trip_is_told_apart_from_the_layer_that_hides_it(
    tmp_path: Path, demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(star, "OVERLAP_RTT_MS", 5.0)
    monkeypatch.setattr(star, "OVERLAP_ROUNDS", 1)
    (row,) = await star.overlap("demo", demo_pack, tmp_path, [2])
    assert (row["part"], row["tokens"], row["n"]) == ("overlap", 2, 16 * len(demo_pack.manifest.sites))
    assert row["trip_ms"] >= 4.9
    assert row["layer_ms"] >= 4.9
    assert row["bound_ms"] >= 5.0
    assert row["trip_ratio"] <= row["ratio"] * 1.03
    assert row["path_ms"] >= 4.9
    assert row["path_ratio"] <= row["ratio"] * 1.03


def test_a_layer_without_experts_is_this_nodes_own_work(demo_pack: ModelPack) -> None:
    spans = star.decode(demo_pack, star.NoExperts(256), tokens=3, steps=2)
    assert len(spans) == 2 * len(demo_pack.manifest.sites)
    assert all(0 < span < 10 for span in spans)
