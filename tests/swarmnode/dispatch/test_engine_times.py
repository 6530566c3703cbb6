"""The estimate that keeps long calls off the loop: pessimistic, by kind, and infinite where nothing is known."""

from __future__ import annotations

import math

from swarmnode.dispatch.engine_times import RECENT, WINDOW, EngineTimes
from swarmnode.dispatch.health import DECODE_PAIRS


def test_the_longest_of_the_last_calls_counts_once_there_are_enough() -> None:
    times = EngineTimes()
    for seconds in (0.001, 0.004, 0.002, 0.003)[: RECENT - 1]:
        times.add(0, 8, seconds)
        assert times.expected(0, 8) == math.inf
    times.add(0, 8, 0.003)
    assert times.expected(0, 8) == 0.004


def test_one_long_call_is_remembered_for_as_many_calls_and_then_forgotten() -> None:
    times = EngineTimes()
    times.add(0, 8, 1.0)
    for _ in range(RECENT - 1):
        times.add(0, 8, 0.001)
        assert times.expected(0, 8) in (1.0, math.inf)
    times.add(0, 8, 0.001)
    assert times.expected(0, 8) == 0.001


def test_nothing_follows_for_another_site_or_size() -> None:
    times = EngineTimes()
    for _ in range(RECENT):
        times.add(3, 4096, 0.4)  # a batch: so much per pair says nothing about a single token
    assert times.expected(3, 4096) == times.expected(3, 8191) == 0.4
    assert times.expected(3, 4095) == times.expected(3, 8) == times.expected(4, 4096) == math.inf


def test_a_site_that_was_changed_must_show_its_length_anew() -> None:
    times = EngineTimes()
    for _ in range(RECENT):
        times.add(0, 8, 0.001)
        times.add(1, 8, 0.001)
    times.changed(0)
    assert times.expected(0, 8) == math.inf
    assert times.expected(1, 8) == 0.001


def test_seconds_per_row_are_the_recent_median_of_small_calls_or_those_of_a_site_alike() -> None:
    times = EngineTimes()
    assert times.row_s([(0, 1), (2,)]) == {}
    times.add(0, 4096, 0.4096)
    assert times.row_s([(0, 1), (2,)]) == {0: 0.4096 / 4096, 1: 0.4096 / 4096}  # better than nothing
    for seconds in (0.008, 8.0, 0.016):  # one met cold slices
        times.add(0, 8, seconds)
    assert times.row_s([(0, 1), (2,)]) == {0: 0.002, 1: 0.002}
    times.add(1, DECODE_PAIRS, 0.004 * DECODE_PAIRS)
    assert times.row_s([(0, 1, 5), (2,)]) == {0: 0.002, 1: 0.004, 5: 0.003}
    times.changed(0)
    for _ in range(WINDOW):
        times.add(0, 1, 0.001)
    assert times.row_s([(0,)]) == {0: 0.001}
