"""How a large call is cut: what overlaps is hidden, what does not is not cut for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.pace import SETUP_ROWS, Pace
from swarmnode.dispatch.pieces import (
    BEARABLE_ROWS,
    Load,
    best_cut,
    duration,
    equal_cut,
    recommended_batch,
    token_seconds,
    window,
)

# 2,048 tokens of 3,072 values in F16, top-8 of 32 experts
PROMPT = Load(2048, 8.0, 32, 6224.0, 6144.0)
THIN = Pace(byte_s=8 / 100e6, pair_s=20e-6, rtt_s=0.08)  # 100 Mbit/s, 80 ms
MOST, IN_FLIGHT = 1365, 8


def stages(load: Load, pace: Pace) -> list[float]:
    rows = load.units * load.pairs_per_unit + SETUP_ROWS * load.experts
    return [load.units * load.out_bytes * pace.byte_s, rows * pace.pair_s, load.units * load.back_bytes * pace.byte_s]


def test_one_piece_takes_the_sum_of_its_stages() -> None:
    assert duration((2048,), PROMPT, THIN, 8) == pytest.approx(0.08 + sum(stages(PROMPT, THIN)), rel=0.01)


def test_a_prompt_over_a_thin_link_takes_little_more_than_its_longest_stage() -> None:
    cut = best_cut(PROMPT, THIN, MOST, IN_FLIGHT)
    assert len(cut) >= 6
    assert duration(cut, PROMPT, THIN, IN_FLIGHT) < (0.08 + max(stages(PROMPT, THIN))) / 0.85


def test_where_the_link_takes_no_time_nothing_is_gained_by_cutting() -> None:
    near = Pace(byte_s=1e-10, pair_s=20e-6, rtt_s=1e-4)
    assert best_cut(PROMPT, near, 1 << 30, IN_FLIGHT) == (2048,)
    assert best_cut(PROMPT, near, 1024, IN_FLIGHT) == (1024, 1024)


def test_experts_with_few_rows_are_not_given_fewer() -> None:
    many = Load(256, 8.0, 256, 6224.0, 6144.0)  # 8 rows per expert
    slow = Pace(byte_s=8 / 1e9, pair_s=150e-6, rtt_s=0.08)
    assert best_cut(many, slow, MOST, IN_FLIGHT) == (256,)


def test_whole_experts_cost_no_weights_again() -> None:
    pace = Pace(byte_s=8 / 100e6, pair_s=100e-6, rtt_s=0.02)
    tokens = Load(512, 8.0, 128, 6224.0, 6144.0)
    pairs = Load(4096, 1.0, 128, 6224.0, 6144.0, whole_experts=True)
    assert len(best_cut(tokens, pace, 4096, IN_FLIGHT)) < len(best_cut(pairs, pace, 4096, IN_FLIGHT))
    whole, half = (duration(cut, pairs, Pace(1e-15, 100e-6), 8) for cut in ((4096,), (2048, 2048)))
    assert half == pytest.approx(whole, rel=0.01)


def test_an_engine_is_not_kept_from_others_for_long() -> None:
    slow = Pace(byte_s=1e-10, pair_s=150e-6, rtt_s=1e-4)
    assert max(best_cut(PROMPT, slow, 1 << 30, IN_FLIGHT)) * 8 * 150e-6 <= 0.5
    wide = Load(4096, 8.0, 512, 6224.0, 6144.0)  # unless that leaves its experts with few rows
    assert max(best_cut(wide, slow, 1 << 30, IN_FLIGHT)) * 8 >= BEARABLE_ROWS * 512


def test_no_more_pieces_are_under_way_than_keep_the_worker_busy() -> None:
    cut = equal_cut(2048, 128)
    full = duration(cut, PROMPT, THIN, 64)
    few = window(cut, PROMPT, THIN, 64)
    assert 2 <= few < 12
    assert duration(cut, PROMPT, THIN, few) < full * 1.04
    assert window(cut, PROMPT, Pace(THIN.byte_s, THIN.pair_s, 10.0), 8) == 8  # a long way holds many
    assert window((2048,), PROMPT, THIN, 8) == 2


loads = st.builds(
    Load,
    st.integers(1, 5000),
    st.integers(0, 160).map(lambda tenths: tenths / 10),
    st.integers(0, 512),
    st.floats(0, 1e5),
    st.floats(0, 1e5),
    st.booleans(),
)
paces = st.builds(Pace, st.floats(0, 1e-3), st.floats(0, 1e-1), st.floats(0, 2))


@given(loads, paces, st.integers(1, 5000), st.integers(1, 64))
def test_every_cut_is_whole_and_within_bounds(load: Load, pace: Pace, most: int, in_flight: int) -> None:
    pace = pace.coarse()
    cut = best_cut(load, pace, most, in_flight)
    assert sum(cut) == load.units
    assert all(0 < units <= most for units in cut)
    assert 1 <= window(cut, load, pace, in_flight) <= in_flight
    assert math.isfinite(duration(cut, load, pace, in_flight))
    assert sum(equal_cut(load.units, most)) == load.units
    assert max(equal_cut(load.units, most)) <= most


@given(loads, paces)
def test_what_is_measured_a_little_otherwise_cuts_alike(load: Load, pace: Pace) -> None:
    for factor in (1.0, 2.0**0.5):
        near = Pace(pace.byte_s * factor, pace.pair_s * factor, pace.rtt_s * factor).coarse()
        assert near.coarse() == near


# What a batch of a prompt should have.


def test_a_batch_outweighs_its_round_trip_and_gives_experts_rows() -> None:
    assert recommended_batch(0.0, 1e-3, n_expert=8, n_used=2) == 128
    assert recommended_batch(0.08, 1.2e-3, n_expert=32, n_used=8) == 1024  # 80 ms × 8 ÷ 1.2 ms = 533 tokens
    assert recommended_batch(0.0, 1e-3, n_expert=256, n_used=8) == 1024  # 32 rows each
    assert recommended_batch(0.5, 1e-6, n_expert=8, n_used=2) == 4096
    assert recommended_batch(0.5, 1e-6, n_expert=8, n_used=2, most=2048) == 2048
    assert recommended_batch(0.5, 0.0, n_expert=8, n_used=2, most=64) == 64
    assert recommended_batch(0.5, 1e-6, n_expert=8, n_used=2, most=3000) == 3000  # nothing smaller is enough
    assert recommended_batch(0.08, 1.2e-3, n_expert=32, n_used=8, most=3000) == 1024


def test_a_token_takes_what_the_engines_together_or_the_slowest_link_need() -> None:
    row = (6144, 12288)
    unknown, engine, link = Pace(), Pace(1e-12, 100e-6), Pace(8e-8, 1e-9)
    assert token_seconds([], 8, row, partial=True) == 0.0
    assert token_seconds([unknown], 8, row, partial=True) == 0.0
    assert token_seconds([engine], 8, row, partial=True) == pytest.approx(800e-6)
    assert token_seconds([engine, engine, unknown], 8, row, partial=True) == pytest.approx(400e-6)
    assert token_seconds([engine, link], 8, row, partial=True) == pytest.approx(12288 * 8e-8)
    assert token_seconds([link], 8, row, partial=False) == pytest.approx(8 * 12288 * 8e-8)
    assert token_seconds([link, link], 8, row, partial=False) == pytest.approx(4 * 12288 * 8e-8)
