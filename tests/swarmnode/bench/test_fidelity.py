"""The bounds that make partial sums and F16 usable, on ≥ 2,000 positions of held-out text over three real workers."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode import fidelity
from swarmnode.bench import fidelity as bench


@pytest.mark.slow
def test_partial_sums_and_f16_stay_within_their_bounds() -> None:
    f32, f16 = bench.run(2048)["rows"]
    assert f32["positions"] == f16["positions"] == 2048
    assert f32["confident"] > 1500
    assert f32["layer_cosine_lowest_0.1%"] >= 0.9999999
    assert f32["argmax"] == 1.0
    assert f16["layer_cosine_lowest_0.1%"] >= 0.9999
    assert f16["argmax_confident"] >= 0.999
    assert abs(f16["dnll"]) <= 0.003


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
