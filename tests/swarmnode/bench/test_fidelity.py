"""The bounds that make partial sums and each wire type usable, on held-out text over three real workers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode import fidelity
from swarmnode.bench import fidelity as bench
from swarmnode.errors import UsageError
from swarmnode.gate.bounds import LEAST_CONFIDENT, LEAST_COSINE, most_kl, objection


@pytest.mark.slow
def test_partial_sums_and_f16_stay_within_their_bounds() -> None:
    f32, f16 = bench.run(2048, ("f32", "f16"))["rows"]
    assert f32["positions"] == f16["positions"] == 2048
    assert f32["confident"] > 1500
    assert f32["layer_cosine_lowest_0.1%"] >= 0.9999999
    assert f32["argmax"] >= 0.999  # the order of addition, which may flip a near-tie
    assert f32["argmax_confident"] == 1.0
    assert f16["layer_cosine_lowest_0.1%"] >= 0.9999
    assert f16["argmax_confident"] >= 0.999
    assert abs(f16["dnll"]) <= 0.003


@pytest.mark.slow
def test_what_the_gate_says_of_int8_and_fp8_is_true_over_real_frames() -> None:
    for row in bench.run(512, ("int8", "fp8"))["rows"]:
        assert row["layer_cosine_lowest_0.1%"] >= LEAST_COSINE
        assert row["layer_cosine_mean"] < 0.99999  # it was on the wire
        assert row["argmax_confident"] >= LEAST_CONFIDENT
        assert 0 < row["kl"] <= most_kl(4.8e-3)
        assert row["broken"] == 0


@pytest.mark.parametrize("positions", [0, -1, 10**12])
def test_positions_that_cannot_be_measured(positions: int) -> None:
    with pytest.raises(UsageError, match=f"--positions {positions}: give 1 to"):
        bench.run(positions)


def test_row_cosines() -> None:
    a = np.array([[1, 0], [3, 4], [0, 0], [0, 0]], np.float32)
    b = np.array([[2, 0], [4, 3], [0, 0], [1, 0]], np.float32)
    assert fidelity.row_cosines(a, b)[:3].tolist() == pytest.approx([1.0, 24 / 25, 1.0])
    assert not np.isfinite(fidelity.row_cosines(a, b)[3])


def test_lowest_is_the_nearest_rank() -> None:
    values = np.arange(1.0, 2001.0)
    assert fidelity.lowest(values) == 2.0
    assert fidelity.lowest(values[:500]) == 1.0


def test_compare_logits_separates_near_ties_from_clear_choices() -> None:
    exact = np.array([[1.0, 0.95, 0], [5.0, 0, 0], [0, 3.0, 1.0]], np.float32)
    other = np.array([[0.95, 1.0, 0], [5.0, 0, 0], [0, 3.0, 1.0]], np.float32)
    result = fidelity.compare_logits(exact, other, np.array([0, 0, 1]))
    assert (result.positions, result.confident) == (3, 2)
    assert result.argmax == pytest.approx(2 / 3)
    assert result.argmax_confident == 1.0
    assert result.kl > 0
    assert result.dnll == pytest.approx(0.05 / 3, abs=1e-3)


@given(st.lists(st.floats(-1, 1) | st.just(float("nan")), min_size=1, max_size=60), st.integers(1, 9))
def test_a_stream_of_cosines_gives_what_all_of_them_give(values: list[float], piece: int) -> None:
    tail = fidelity.CosineTail(len(values), share=0.1)
    for at in range(0, len(values), piece):
        tail.add(np.array(values[at : at + piece]))
    whole = np.where(np.isnan(values), -1.0, values)
    assert tail.count == len(values)
    assert tail.lowest == fidelity.lowest(whole, 0.1)
    assert tail.mean == pytest.approx(whole.mean())


def test_a_stream_that_brought_nothing_proves_nothing() -> None:
    assert (fidelity.CosineTail(100).lowest, fidelity.CosineTail(100).mean) == (-1.0, -1.0)


def test_logits_piece_by_piece_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(5)
    exact = rng.standard_normal((50, 30)).astype(np.float32)
    other = exact + rng.standard_normal((50, 30)).astype(np.float32) * np.float32(0.05)
    targets = rng.integers(0, 30, 50)
    sums = fidelity.LogitSums()
    for at in range(0, 50, 7):
        sums.add(fidelity.ExactLogits(exact[at : at + 7], targets[at : at + 7]), other[at : at + 7])
    whole = fidelity.compare_logits(exact, other, targets)
    found = sums.result()
    assert (found.positions, found.confident, found.broken) == (whole.positions, whole.confident, 0)
    assert (found.argmax, found.argmax_confident) == (whole.argmax, whole.argmax_confident)
    assert found.kl == pytest.approx(whole.kl)
    assert found.dnll == pytest.approx(whole.dnll)


def test_flat_logits_show_no_clear_argmax() -> None:
    flat = np.zeros((9, 30), np.float32)
    result = fidelity.compare_logits(flat, flat, np.zeros(9, np.int64))
    assert (result.positions, result.confident, result.argmax_confident, result.kl) == (9, 0, 0.0, 0.0)
    assert "only 0 of 9 positions have a clear argmax" in objection(result, 1e-3)


def test_logits_that_are_none_are_counted_and_agree_in_nothing() -> None:
    exact = np.array([[5.0, 0, 0], [0, 3.0, 1.0], [0, 1.0, 9.0]], np.float32)
    other = exact.copy()
    other[1, 0] = np.nan
    other[2, 0] = np.inf
    result = fidelity.compare_logits(exact, other, np.array([0, 1, 2]))
    assert result.broken == 2
    assert result.argmax == result.argmax_confident == pytest.approx(1 / 3)
    assert (result.kl, result.dnll) == (0.0, 0.0)
