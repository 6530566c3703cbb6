"""What is checked, how much of it, and that nobody honest is ever accused."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.dispatch.codec import F32, WireType, decode_rows, encode_rows
from swarmnode.dispatch.spot_check import MAX_CHECKED, CheckPolicy, SpotChecks, agrees
from swarmnode.errors import UsageError


def rows_of(n: int, d: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def with_cosine(rows: F32, cosine: float, seed: int = 1) -> F32:
    """Rows that have just this cosine with the given ones, by noise across them."""
    noise = np.random.default_rng(seed).standard_normal(rows.shape)
    exact = rows.astype(np.float64)
    unit = exact / np.linalg.norm(exact, axis=1, keepdims=True)
    noise -= (noise * unit).sum(axis=1, keepdims=True) * unit
    noise *= np.linalg.norm(exact, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    return np.asarray(exact + noise * np.sqrt(1 / cosine**2 - 1), np.float32)


@pytest.mark.parametrize("wire", list(WireType))
def test_an_honest_worker_is_not_accused_in_a_hundred_thousand_rows(wire: WireType) -> None:
    for seed in range(10):
        exact = rows_of(10_000, 64, seed)
        rows = with_cosine(exact, [0.9985, 0.9995, 0.99994][seed % 3], seed + 100)
        used, data = encode_rows(rows, wire)
        assert agrees(decode_rows(data, used, len(rows), 64), exact, wire).all()


def test_int8_with_a_scale_per_block_is_honest() -> None:
    exact = np.random.default_rng(5).standard_t(4, (20_000, 256)).astype(np.float32)
    blocks = exact.reshape(-1, 128)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    rows = (np.round(blocks / scale) * scale).reshape(exact.shape)
    assert agrees(rows, exact, WireType.F32).all()


@pytest.mark.parametrize("relative", [0.1, 0.3, 1.0])
def test_a_perturbed_row_is_seen(relative: float) -> None:
    exact = rows_of(5000, 64)
    noise = rows_of(5000, 64, 9)
    noise *= relative * np.linalg.norm(exact, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    assert agrees(exact + noise, exact, WireType.F32).mean() < 0.02
    assert not agrees(exact * np.float32(1 + relative), exact, WireType.F32).any()
    assert not agrees(-exact, exact, WireType.F32).any()


def test_rows_of_nothing() -> None:
    zero, tiny = np.zeros((1, 8), np.float32), np.full((1, 8), 2.0**-25, np.float32)
    assert agrees(zero, zero, WireType.F32).all()
    assert agrees(zero, tiny, WireType.F16).all()  # F16 has nothing between
    assert not agrees(zero, tiny, WireType.F32).any()
    assert not agrees(zero, rows_of(1, 8), WireType.F16).any()
    assert not agrees(np.full((1, 8), 3e38, np.float32), rows_of(1, 8), WireType.F32).any()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 600), st.integers(1, 8)), max_size=30),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 0.2),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_the_budget_holds_at_every_moment(
    asked: list[tuple[int, int, int]], share: float, new_share: float, budget: float, screened: bool, seed: int
) -> None:
    checks = SpotChecks(
        CheckPolicy(share=share, alone_share=share, new_share=new_share, budget=budget),
        random.Random(seed).random,
        screened=screened,
    )
    seen = spent = 0
    for worker, n_rows, per_row in asked:
        chosen = checks.choose(str(worker), n_rows * per_row, n_rows)
        assert chosen == sorted(set(chosen))
        assert all(0 <= row < n_rows for row in chosen)
        assert len(chosen) <= MAX_CHECKED
        seen += n_rows * per_row
        spent += len(chosen) * per_row + sum(checks.allowed_by_screen(1) for _ in range(5))
        assert spent <= budget * seen + 1e-6


def test_new_workers_are_checked_more_often() -> None:
    policy = CheckPolicy(alone_share=0.01, budget=1.0)
    new = old = 0
    for seed in range(40):
        checks = SpotChecks(policy, random.Random(seed).random)
        new += sum(len(checks.choose("w", 5, 5)) for _ in range(100))
        old += sum(len(checks.choose("w", 5, 5)) for _ in range(400))
    assert 0.04 < new / (40 * 500) < 0.06
    assert 0.008 < old / (40 * 2000) < 0.012


def test_every_row_has_the_same_chance_and_calls_do_not_matter() -> None:
    checks = SpotChecks(CheckPolicy(alone_share=0.1, new_share=0.1, budget=1.0), random.Random(3).random)
    counts = np.zeros(8)
    for _ in range(5000):
        counts[checks.choose("w", 8, 8)] += 1
    assert (np.abs(counts / 5000 - 0.1) < 0.02).all()


def test_off_means_off_and_all_means_all() -> None:
    none = SpotChecks(CheckPolicy(alone_share=0.0, new_share=0.0), random.random)
    assert all(none.choose("w", 100, 100) == [] for _ in range(100))
    full = SpotChecks(CheckPolicy(alone_share=1.0, new_share=1.0, budget=1.0), random.random)
    assert full.choose("w", 8, 4) == [0, 1, 2, 3]
    for bad in ({"share": 1.5}, {"budget": -0.1}, {"bad_answers_allowed": 0}):
        with pytest.raises(UsageError):
            CheckPolicy(**bad)


def chance_of_catching(
    sites: int, k: int, workers: int, *, tokens: int = 200, one_in: int = 50, runs: int = 60
) -> float:
    """By chance alone, in exact mode: one of `workers` equal workers perturbs a row in `one_in`."""
    caught = 0
    for seed in range(runs):
        source = random.Random(seed)
        checks = SpotChecks(CheckPolicy(), source.random)
        for _, _ in itertools.product(range(tokens), range(sites)):
            shares = [0] * workers
            for _ in range(k):
                shares[source.randrange(workers)] += 1
            hits = [checks.choose(str(w), n, n) for w, n in enumerate(shares) if n]
            if shares[0] and any(source.random() < 1 / one_in for _ in hits[0]):
                caught += 1
                break
    return caught / runs


def test_chance_alone_catches_one_row_in_fifty_in_a_large_model() -> None:
    assert chance_of_catching(48, 8, 4, runs=10) > 0.8
