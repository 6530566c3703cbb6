"""Experts that tokens select together live together, as evenly loaded as by load alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import BadPlacement
from swarmnode.placement.coactivation import balance, load_only, pairs_of, split, workers_per_token
from tests.swarmnode.placement.traces import clustered, skewed


@pytest.mark.parametrize(("n", "k", "workers"), [(64, 4, 4), (128, 8, 4), (256, 8, 8)])
def test_clusters_are_found_at_equal_balance(n: int, k: int, workers: int) -> None:
    choices = clustered(n, k, 2 * workers, noise=0.1, tokens=8000)
    known, judged = choices[:6000], choices[6000:]
    weights = np.bincount(known.reshape(-1), minlength=n).astype(float)
    by_load = load_only(weights, [n // workers] * workers)
    together = split(weights, pairs_of(known, n), [n // workers + 2] * workers, max_over_mean=1.05)
    assert balance(together, weights, workers) <= 1.05 + 1e-6
    before, after = workers_per_token(by_load, judged, workers), workers_per_token(together, judged, workers)
    assert after <= 0.6 * before


def test_where_the_trace_has_no_structure_nothing_is_lost() -> None:
    choices = skewed(64, 4, steep=0.5, tokens=8000)
    weights = np.bincount(choices.reshape(-1), minlength=64).astype(float)
    by_load = load_only(weights, [16] * 4)
    together = split(weights, pairs_of(choices, 64), [16] * 4)
    assert workers_per_token(together, choices, 4) <= workers_per_token(by_load, choices, 4)


def test_unequal_memory_and_shares() -> None:
    choices = clustered(32, 4, 4, noise=0.2)
    weights = np.bincount(choices.reshape(-1), minlength=32).astype(float)
    worker = split(weights, pairs_of(choices, 32), [4, 12, 20], shares=[1, 3, 4], max_over_mean=1.2)
    assert (np.bincount(worker, minlength=3) <= [4, 12, 20]).all()
    assert balance(worker, weights, 3, [1, 3, 4]) <= 1.2 + 1e-6


@settings(max_examples=60)
@given(st.data())
def test_bounds_hold_and_the_answer_is_always_the_same(data: st.DataObject) -> None:
    n, workers = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 5))
    weights = np.array(data.draw(st.lists(st.integers(0, 100), min_size=n, max_size=n)), float)
    room = data.draw(st.lists(st.integers(0, n), min_size=workers, max_size=workers))
    room[0] += max(0, n - sum(room))
    pairs = np.array(data.draw(st.lists(st.integers(0, 50), min_size=n * n, max_size=n * n)), float).reshape(n, n)
    pairs = np.triu(pairs, 1) + np.triu(pairs, 1).T
    worker = split(weights, pairs, room, max_over_mean=1.3)
    assert (np.bincount(worker, minlength=workers) <= room).all()
    by_load = balance(load_only(weights, room), weights, workers)
    assert balance(worker, weights, workers) <= max(1.3, by_load) + 1e-6
    assert (split(weights, pairs, room, max_over_mean=1.3) == worker).all()


@pytest.mark.parametrize(
    ("weights", "room", "shares", "says"),
    [
        ([1.0, 2.0], [1], None, "room for 1 experts on 1 workers does not hold 2"),
        ([1.0, 2.0], [], None, "does not hold"),
        ([1.0, 2.0], [3, -1], None, "does not hold"),
        ([1.0, np.inf], [2], None, "finite"),
        ([1.0, 2.0], [1, 1], [1.0], "shares"),
        ([1.0, 2.0], [1, 1], [1.0, 0.0], "positive"),
    ],
)
def test_bad_arguments(weights: list[float], room: list[int], shares: list[float] | None, says: str) -> None:
    with pytest.raises(BadPlacement, match=says):
        load_only(np.array(weights), room, shares)
    with pytest.raises(BadPlacement, match=says):
        split(np.array(weights), np.zeros((2, 2)), room, shares=shares)


def test_pairs_must_fit() -> None:
    with pytest.raises(BadPlacement, match="pairs of shape"):
        split(np.ones(3), np.zeros((2, 2)), [3])


def test_pairs_and_workers_by_hand() -> None:
    choices = np.array([[0, 1], [0, 2], [1, 0]], np.int32)
    assert pairs_of(choices, 3).tolist() == [[0, 2, 1], [2, 0, 0], [1, 0, 0]]
    assert workers_per_token(np.array([0, 0, 1]), choices, 2) == pytest.approx(4 / 3)
    assert workers_per_token(np.array([0, 0, 1]), choices[:0], 2) == 0
