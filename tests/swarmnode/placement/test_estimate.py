"""What a token costs: figures that can be worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from swarmnode.errors import BadPlacement
from swarmnode.placement.estimate import site_samples
from swarmnode.placement.planner import PlanRequest, WorkerSpec, estimate
from swarmnode.placement.request import bools, mask

CHOICES = np.array([[0, 1], [0, 2], [2, 3], [1, 0]] * 32, np.int32)


def request(*workers: WorkerSpec, **given: object) -> PlanRequest:
    fields: dict[str, object] = {
        "expert_bytes": {0: 10},
        "n_expert": {0: 4},
        "weights": {0: np.bincount(CHOICES.reshape(-1), minlength=4).astype(float)},
        "k": {0: 2},
        "samples": {0: CHOICES},
        "d_bytes": 100,
    }
    return PlanRequest(workers=workers, **{**fields, **given})  # type: ignore[arg-type]  # checked by the class itself


NEAR = WorkerSpec("near", 1000, 0.010, row_s=0.001)
FAR = WorkerSpec("far", 1000, 0.100, row_s=0.002, byte_s=1e-4)


def test_the_slowest_worker_asked_decides() -> None:
    found = estimate(request(NEAR, FAR), {"near": {0: 0b0011}, "far": {0: 0b1100}}, {})
    # [0,1]: near, two rows; [0,2]: both, one row each; [2,3]: far, two rows; far takes 200 bytes' time for any
    assert found.step_s == pytest.approx((2 * 0.012 + (0.102 + 0.02) + (0.104 + 0.02)) / 4)
    assert found.workers_per_token == pytest.approx(5 / 4)
    assert found.round_trips_per_token == 1
    assert found.bytes_per_token == pytest.approx(5 / 4 * 200)
    assert found.uncovered == 0
    assert found.secured == 0


def test_exact_mode_returns_a_row_per_expert() -> None:
    found = estimate(request(NEAR, partial=False), {"near": {0: 0b1111}}, {})
    assert found.bytes_per_token == pytest.approx(300)


def test_local_experts_cost_nothing_and_whole_selections_no_round_trip() -> None:
    found = estimate(request(NEAR), {"near": {0: 0b1111}}, {0: 0b0011})
    assert found.round_trips_per_token == pytest.approx(1 / 2)
    assert found.step_s == pytest.approx((0.011 + 0.012) / 4)


def test_a_far_copy_is_not_asked() -> None:
    alone = estimate(request(NEAR), {"near": {0: 0b1111}}, {})
    both = estimate(request(NEAR, FAR), {"near": {0: 0b1111}, "far": {0: 0b1111}}, {})
    assert (both.step_s, both.workers_per_token) == (alone.step_s, alone.workers_per_token)
    assert both.secured == 1


def test_what_nobody_holds_is_counted() -> None:
    found = estimate(request(NEAR), {"near": {0: 0b0111}}, {})
    assert found.uncovered == pytest.approx(1 / 4)
    assert estimate(request(), {}, {}).uncovered == 2
    gone = dataclasses.replace(NEAR, usable=False)
    assert estimate(request(gone), {"near": {0: 0b1111}}, {}).uncovered == 2


def test_unknown_speed_is_taken_to_be_as_the_others() -> None:
    unknown = WorkerSpec("new", 1000, 0.010)
    found = estimate(request(unknown, NEAR), {"new": {0: 0b1111}}, {})
    assert found.step_s == pytest.approx(0.012)


@pytest.mark.parametrize("paired", [False, True])
def test_without_samples_choices_are_drawn_from_the_counts(paired: bool) -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    choices = np.argsort(generator.random((4000, 8)) * np.arange(1, 9), axis=1)[:, :3].astype(np.int32)
    weights = np.bincount(choices.reshape(-1), minlength=8).astype(float)
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (choices[:, :, None], choices[:, None, :]), 1)
    np.fill_diagonal(pairs, 0)
    asked = PlanRequest({0: 1}, {0: 8}, {0: weights}, (), {0: 3}, pairs={0: pairs} if paired else None)
    drawn = site_samples(asked, 0)
    assert (np.diff(np.sort(drawn, axis=1)) > 0).all()
    assert (site_samples(asked, 0) == drawn).all()
    frequency = np.bincount(drawn.reshape(-1), minlength=8) / len(drawn)
    assert frequency == pytest.approx(weights / 4000, abs=0.2)


def test_bitmaps() -> None:
    assert mask(bools(0b1000_0000_0101, 12)) == 0b1000_0000_0101
    assert bools(0b1_0000_0001, 8).tolist() == [True] + [False] * 7
    assert mask(np.ones(70, bool)) == (1 << 70) - 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"k": {}}, "k names other sites"),
        ({"k": {0: 5}}, "top-5"),
        ({"expert_bytes": {0: 0}}, "0 bytes"),
        ({"weights": {0: np.ones(3)}}, "4 weights"),
        ({"weights": {0: np.array([1, 1, 1, np.nan])}}, "finite"),
        ({"pairs": {0: np.ones((3, 4))}}, "pairs of shape"),
        ({"samples": {0: np.array([[4, 0]])}}, "experts 0 to 3"),
        ({"local_budget": -1}, "negative"),
        ({"replicas": 0}, "replica"),
    ],
)
def test_requests_that_cannot_be_meant(given: dict[str, object], says: str) -> None:
    with pytest.raises(BadPlacement, match=says):
        request(NEAR, **given)


def test_workers_that_cannot_be_meant() -> None:
    with pytest.raises(BadPlacement, match="named twice"):
        request(NEAR, NEAR)
    for wrong in (float("nan"), -1.0, float("inf")):
        with pytest.raises(BadPlacement, match="worker near"):
            request(dataclasses.replace(NEAR, rtt_s=wrong))
