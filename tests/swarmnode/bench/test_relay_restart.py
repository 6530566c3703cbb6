from __future__ import annotations

from swarmnode.bench.relay_restart import run


async def test_all_clients_come_back_after_both_ends() -> None:
    result = await run(count=20, settle=0.2)
    for name in ("terminated", "killed"):
        assert sum(result[name]["per_second"]) == 20
        assert 0 < result[name]["peak_share_per_s"] <= 1
