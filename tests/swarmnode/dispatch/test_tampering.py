"""The double for tampering does what tests take it to do: so many rows, so much noise, the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.compute.engine_api import Engine, F32Array
from tests.swarmnode.dispatch.samples import D_IN, SITES, full_engine
from tests.swarmnode.dispatch.tampering import TamperingEngine

N = 20_000
ROWS = np.arange(N, dtype=np.int32)
EXPERTS = (ROWS * 7 % 16).astype(np.int32)


@pytest.fixture(scope="module")
def x() -> F32Array:
    return np.random.default_rng(0).standard_normal((N, D_IN), np.float32)


@pytest.fixture(scope="module")
def honest(x: F32Array) -> F32Array:
    return full_engine().raw_rows(0, x, ROWS, EXPERTS)


def test_one_row_in_so_many_is_off_by_so_much(x: F32Array, honest: F32Array) -> None:
    engine = TamperingEngine(full_engine(), one_in=50, noise=0.1, seed=3)
    off = engine.raw_rows(0, x, ROWS, EXPERTS) - honest
    changed = np.flatnonzero(off.any(axis=1))
    assert N / 50 * 0.8 < len(changed) < N / 50 * 1.2
    assert engine.tampered == [(0, int(EXPERTS[row])) for row in changed]
    assert engine.rows == N
    relative = np.linalg.norm(off[changed], axis=1) / np.linalg.norm(honest[changed], axis=1)
    np.testing.assert_allclose(relative, 0.1, rtol=1e-4)


def test_partial_sums_carry_the_same_noise_weighted(x: F32Array, honest: F32Array) -> None:
    weights = np.full(N, 0.5, np.float32)
    tokens = ROWS // 4
    sums = full_engine().partial_sums(0, x, ROWS, EXPERTS, weights, tokens, N // 4)
    engine = TamperingEngine(full_engine(), one_in=50, noise=0.1, seed=3)
    off = engine.partial_sums(0, x, ROWS, EXPERTS, weights, tokens, N // 4) - sums
    again = TamperingEngine(full_engine(), one_in=50, noise=0.1, seed=3)
    rows = again.raw_rows(0, x, ROWS, EXPERTS) - honest
    np.testing.assert_allclose(off, 0.5 * rows.reshape(N // 4, 4, -1).sum(1), atol=1e-5)
    assert again.tampered == engine.tampered


def test_without_tampering_every_bit_is_the_engines_own(x: F32Array, honest: F32Array) -> None:
    engine: Engine = TamperingEngine(full_engine(), one_in=float("inf"))
    assert engine.raw_rows(0, x, ROWS, EXPERTS).tobytes() == honest.tobytes()
    assert engine.holdings == full_engine().holdings
    engine.prepare(SITES[0].index, {})()
    assert 0 not in engine.holdings
    engine.close()
