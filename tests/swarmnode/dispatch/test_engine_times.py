"""The estimate that keeps long calls off the loop: pessimistic, by kind, and infinite where nothing is known."""

from __future__ import annotations

import math

from swarmnode.dispatch.engine_times import RECENT, EngineTimes


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
