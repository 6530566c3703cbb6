"""Placement on real routing of the shipped model."""

from __future__ import annotations

import pytest

from swarmnode.bench import placement as bench


@pytest.mark.slow
def test_fewer_workers_and_fewer_round_trips_on_real_routing() -> None:
    result = bench.run(4096)
    assert result["tokens"] == 4096
    for row in result["rows"]:
        assert row["coactivation"] < row["load_only"]
        assert row["coactivation_balance"] <= max(row["load_only_balance"], 1.05) + 1e-3
        assert row["planned_fewer"] >= 0.3
    trips = [row["round_trips_per_token"] for row in result["local_budget"]]
    assert trips[0] == result["sites"]
    assert trips[-1] == 0
    assert trips[5] <= 0.6 * result["sites"]  # half of the experts
    for row in result["local_budget"]:
        assert row["round_trips_per_token"] <= row["hottest_of_each_site"] + 0.2  # other text than it was made from
