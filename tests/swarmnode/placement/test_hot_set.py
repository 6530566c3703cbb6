"""Near memory goes to experts that hold whole selections."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.placement.hot_set import curve, fill, steps
from tests.swarmnode.placement.traces import clustered, skewed


def test_a_set_that_is_whole_comes_before_experts_that_are_hot() -> None:
    """Experts 0 and 1 are the hottest, but always together with one of many others; 2 and 3 go with each other."""
    lonely = np.array([[e % 2, 4 + e] for e in range(16)] * 4, np.int32)
    paired = np.array([[2, 3]] * 30, np.int32)
    choices = np.random.Generator(np.random.PCG64(0)).permutation(np.concatenate([lonely, paired]))
    weights = np.bincount(choices.reshape(-1), minlength=20).astype(float)
    assert set(np.argsort(-weights)[:2]) == {0, 1}
    found = curve(weights, choices)
    assert set(found.order[:2].tolist()) == {2, 3}
    assert found.whole[2] == pytest.approx(30 / 94, abs=0.1)
    assert found.whole[-1] == 1


def test_without_samples_every_expert_counts_alike() -> None:
    found = curve(np.array([1.0, 3.0, 2.0]), np.empty((0, 2), np.int32))
    assert found.order.tolist() == [1, 2, 0]
    assert found.whole == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_the_curve_is_honest_about_text_it_has_not_seen() -> None:
    choices = skewed(64, 4, steep=1.2, tokens=8000)
    known, judged = choices[:4000], choices[4000:]
    found = curve(np.bincount(known.reshape(-1), minlength=64).astype(float), known)
    for length in (16, 32, 48):
        inside = np.isin(judged, found.order[:length]).all(axis=1).mean()
        assert found.whole[length] == pytest.approx(inside, abs=0.04)


@settings(max_examples=40)
@given(st.integers(0, 80_000), st.integers(0, 3), st.integers(1, 900), st.integers(1, 900))
def test_memory_is_never_exceeded_nor_left_over(room: int, seed: int, small: int, large: int) -> None:
    choices = {0: clustered(32, 4, 4, noise=0.2, tokens=500, seed=seed), 1: skewed(32, 4, steep=1.0, tokens=500)}
    curves = {
        site: curve(np.bincount(ids.reshape(-1), minlength=32).astype(float), ids) for site, ids in choices.items()
    }
    size = {0: small, 1: large}
    before = {0: 3, 1: 0}
    prefix = fill(steps(curves, size), curves, size, before, room)
    used = sum((prefix[site] - before[site]) * size[site] for site in prefix)
    assert used <= room
    assert all(before[site] <= prefix[site] <= 32 for site in prefix)
    left = [size[site] for site in prefix if prefix[site] < 32]
    assert not left or room - used < max(left)


def test_more_memory_is_never_worse() -> None:
    choices = {site: skewed(32, 4, steep=0.3 * site, tokens=2000, seed=site) for site in range(4)}
    curves = {
        site: curve(np.bincount(ids.reshape(-1), minlength=32).astype(float), ids) for site, ids in choices.items()
    }
    size = dict.fromkeys(choices, 10)
    gained = []
    for room in range(0, 4 * 32 * 10 + 1, 160):
        prefix = fill(steps(curves, size), curves, size, dict.fromkeys(choices, 0), room)
        gained.append(sum(float(curves[site].whole[at]) for site, at in prefix.items()))
    assert gained[-1] == 4
    assert all(b >= a - 0.05 for a, b in itertools.pairwise(gained))
