from __future__ import annotations

from swarmnode.bench.idle import SIZES, after_idle


async def test_every_size_gets_its_times_and_none_beats_the_wire() -> None:
    times = await after_idle("qh3", 0.05, 2)
    assert set(times) == set(SIZES)
    assert all(len(ms) == 2 and min(ms) >= 24 for ms in times.values())
