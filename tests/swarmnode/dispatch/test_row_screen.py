"""The screen: what an expert's last matrix cannot have made stands out, before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.dispatch.codec import F32
from swarmnode.dispatch.row_screen import DIRECTIONS, RowScreen, empty_directions
from swarmnode.dispatch.spot_check import SCREEN_LEAST, SCREEN_WINDOW, Standouts

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> F32:
    return RANDOM.standard_normal(shape).astype(np.float32)


def noisy(rows: F32, relative: float) -> F32:
    noise = normal(*rows.shape)
    noise *= relative * np.linalg.norm(rows, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    return rows + noise


def scores(matrix: F32, rows: F32) -> F32:
    screen = RowScreen(lambda site, expert: matrix)
    screen.prepare(3, 7)
    found = screen.score(3, np.full(len(rows), 7, np.int32), rows)
    assert found is not None
    return found


@pytest.mark.parametrize(("d_out", "d_ff"), [(256, 256), (256, 64), (128, 512), (1100, 128)])
@pytest.mark.parametrize("wire", ["f32", "f16", "int8"])
def test_noise_stands_out_of_honest_rows_also_after_a_wires_rounding(d_out: int, d_ff: int, wire: str) -> None:
    matrix = normal(d_out, d_ff)
    honest = normal(300, d_ff) @ matrix.T
    honest = honest.astype(np.float16).astype(np.float32) if wire == "f16" else honest
    honest = noisy(honest, 0.01) if wire == "int8" else honest
    wrong = noisy(honest, 0.3)
    if d_ff > 2 * d_out:  # nothing is empty there: a screen says little, and says so by not telling them apart
        return
    assert np.quantile(scores(matrix, wrong), 0.02) > np.quantile(scores(matrix, honest), 0.99)


def test_directions_are_few_and_absent_where_there_are_none() -> None:
    found = empty_directions(normal(256, 256))
    assert found is not None
    assert found.shape == (DIRECTIONS, 256)
    assert empty_directions(np.zeros((8, 8), np.float32)) is None
    assert empty_directions(np.full((8, 8), np.nan, np.float32)) is None
    assert empty_directions(normal(2048, 2048)) is None  # not worth the time


def test_what_is_not_prepared_is_not_judged() -> None:
    screen = RowScreen(lambda site, expert: normal(64, 64) if expert == 1 else None)
    rows = normal(3, 64)
    experts = np.array([0, 1, 2], np.int32)
    assert screen.score(0, experts, rows) is None
    screen.prepare(0, 0)
    assert screen.score(0, experts, rows) is None
    screen.prepare(0, 1)
    found = screen.score(0, experts, rows)
    assert found is not None
    assert (found > 0).tolist() == [False, True, False]
    assert screen.score(0, experts, np.zeros((3, 64), np.float32)) is not None


def test_the_share_that_stands_out_is_the_same_on_any_scale() -> None:
    for scale in (1e-6, 1.0, 1e6):
        standouts = Standouts(0.006)
        values = (RANDOM.lognormal(size=20_000) * scale).astype(np.float32)
        found = sum(len(standouts.among(0, values[at : at + 4])) for at in range(0, len(values), 4))
        assert 0.003 < found / len(values) < 0.012


def test_what_is_wrong_now_and_then_stands_out_though_it_is_in_the_window_too() -> None:
    standouts = Standouts(0.006)
    caught = wrong = 0
    for n in range(5000):
        bad = n % 50 == 7
        found = standouts.among(0, np.array([RANDOM.lognormal() * (1000 if bad else 1)], np.float32))
        wrong += bad
        caught += bad and bool(found)
    assert caught > wrong / 8
    fresh = Standouts(0.006)
    assert not any(fresh.among(1, np.array([float(n)], np.float32)) for n in range(SCREEN_LEAST))
    assert fresh.among(1, np.array([1e9], np.float32)) == [0]
    assert len(fresh.among(1, normal(4 * SCREEN_WINDOW, 1)[:, 0])) == 0
