"""What large calls show of a worker and the way to it, whatever else is in their times."""

from __future__ import annotations

import math

import pytest

from swarmnode.dispatch.health import MIN_SAMPLES, Deadlines, Latency
from swarmnode.dispatch.pace import SETUP_ROWS, Pace, PaceMeter


def answered(meter: PaceMeter, attempt: int, now: float, busy_s: float, queued_s: float = 0.0) -> None:
    meter.answered(attempt, 32, 600_000, busy_s=busy_s, queued_s=queued_s, rtt_s=0.05, now=now)


def test_link_and_engine_are_told_apart() -> None:
    meter = PaceMeter(0.002, 0.05)
    assert meter.pace == Pace(rtt_s=0.05)
    for i in range(20):
        meter.sent(i, 1024, 400_000, 10.0 * i)
        answered(meter, i, 10.0 * i + 0.05 + 0.3 + 0.1 + 0.02, busy_s=0.3, queued_s=0.02)
    assert meter.pace.byte_s == pytest.approx(0.1 / 1_000_000)
    assert meter.pace.pair_s == pytest.approx(0.3 / (1024 + SETUP_ROWS * 32))
    assert meter.under_way == 0


def test_a_row_costs_what_it_costs_where_it_costs_most() -> None:
    assert Pace(1e-6, 0.0, 0.1).per_pair(100) == 0.0  # not measured
    assert Pace(1e-6, 2e-4, 0.1).per_pair(100) == 2e-4
    assert Pace(1e-6, 2e-4, 0.1).per_pair(1000) == 1e-3


def test_the_line_is_measured_by_calls_right_behind_each_other() -> None:
    """600 kB back, 400 kB out: 0.06 s on the line, where the engine takes 0.1 s and a round trip is lost on the way."""
    meter = PaceMeter(0.002, 0.05)
    for at in (0.0, 10.0, 20.0):
        for i in range(4):
            meter.sent(int(at) + i, 1024, 400_000, at + i * 0.001)
        assert meter.under_way == 4
        for i in range(4):
            ends = at + 0.025 + 0.05 + 0.06 + 0.1 * (i + 1)  # the engine is what it waits for
            answered(meter, int(at) + i, ends + 0.1, busy_s=0.1, queued_s=0.04 * i)
    assert meter.pace.byte_s == pytest.approx(0.06 / 600_000)
    assert meter.pace.pair_s == pytest.approx(0.1 / (1024 + SETUP_ROWS * 32))


def test_calls_that_left_far_apart_say_only_that_the_line_is_not_slower() -> None:
    meter = PaceMeter(0.002, 0.05)
    meter.sent(0, 1024, 400_000, 0.0)
    meter.sent(1, 1024, 400_000, 0.3)
    answered(meter, 0, 0.5, busy_s=0.1)
    before = meter.pace.byte_s
    answered(meter, 1, 0.8, busy_s=0.1)
    assert meter.pace.byte_s == before  # 0.3 s are those between them


def test_a_line_that_has_become_slow_is_noticed_by_calls_that_are_alone() -> None:
    meter = PaceMeter(0.002, 0.05)
    for i in range(3):
        meter.sent(i, 1024, 400_000, 0.0)
    for i in range(3):
        answered(meter, i, 0.2 + 0.1 * i, busy_s=0.1, queued_s=0.09 * i)
    fast = meter.pace.byte_s
    assert fast == pytest.approx(0.01 / 600_000)
    for i in range(10, 20):
        meter.sent(i, 1024, 400_000, float(i))
        answered(meter, i, i + 0.9, busy_s=0.1)
    assert meter.pace.byte_s == pytest.approx(0.75 / 1_000_000, rel=0.1)


def test_what_was_sent_before_has_to_be_waited_for() -> None:
    meter = PaceMeter(0.002, 0.05)
    meter.sent(1, 1000, 400_000, 0.0)
    assert meter.ahead(1) == meter.ahead(7) == 0.0  # nothing is known yet
    answered(meter, 1, 0.05 + 0.3 + 0.1, busy_s=0.3)
    meter.sent(2, 2000, 400_000, 1.0)
    meter.sent(3, 100, 4_000_000, 1.0)
    assert meter.ahead(2) == 0.0
    assert meter.ahead(3) == pytest.approx(0.04 + 0.6)  # its way out, and its engine
    assert meter.ahead(7) == pytest.approx(0.04 + 0.6 + 0.03) == meter.ahead(7)  # engine and link work side by side
    answered(meter, 2, 2.0, busy_s=0.6)
    assert meter.ahead(3) == 0.0


def test_the_answers_of_what_was_sent_before_have_to_be_waited_for_too() -> None:
    """1,365 pairs of 3,072 values in F32 at 100 Mbit/s: the answer alone is on the line for 1.34 s."""
    meter, back = PaceMeter(0.002, 0.05), 1365 * 3072 * 4
    meter.sent(1, 1365, 2_000_000, 0.0, back)
    took = 0.05 + 0.14 + (2_000_000 + back) * 8e-8
    meter.answered(1, 32, back, busy_s=0.14, queued_s=0.0, rtt_s=0.05, now=took)
    meter.sent(2, 1365, 2_000_000, 10.0, back)
    assert meter.ahead(99) == pytest.approx(took - 0.05)
    meter.sent(3, 1365, 2_000_000, 10.0, back)
    assert meter.ahead(99) == pytest.approx(took - 0.05 + back * 8e-8)  # all but the longest stage is done meanwhile


def test_until_when_a_worker_is_not_late_with_what_it_was_sent() -> None:
    deadlines = Deadlines(ceiling_s=5.0)
    meter, decode = PaceMeter(0.002, 0.05), Latency(0.002, 0.05)
    assert meter.answering_until(deadlines, decode) == -math.inf
    meter.sent(1, 1024, 400_000, 1.0)
    meter.sent(2, 1024, 400_000, 1.1)
    assert meter.answering_until(deadlines, decode) == 1.0 + 5.0
    answered(meter, 1, 3.0, busy_s=0.3)
    assert meter.answering_until(deadlines, decode) == 3.0 + 5.0
    meter.dropped(2)
    assert meter.answering_until(deadlines, decode) == -math.inf


def test_what_is_dropped_or_unknown_counts_for_nothing() -> None:
    meter = PaceMeter(0.002, 0.05)
    meter.sent(1, 1024, 400_000, 0.0)
    meter.dropped(1)
    meter.dropped(2)
    answered(meter, 1, 0.45, busy_s=0.3)
    assert meter.pace == Pace(rtt_s=0.05)


def test_a_lie_about_the_engine_stays_within_bounds() -> None:
    meter = PaceMeter(0.002, 0.0)
    meter.sent(1, 65, 400_000, 0.0)
    answered(meter, 1, 0.12, busy_s=4294.0, queued_s=4294.0)
    assert 0 < meter.pace.byte_s < 1e-6
    assert meter.pace.pair_s <= 0.12 / 65
    meter.sent(3, 65, 400_000, 0.5)
    assert meter.ahead(99) <= 0.12 + 0.1  # it cannot have computed for longer than it took
    meter.dropped(3)
    meter.sent(2, 65, 400_000, 1.0)
    answered(meter, 2, 1.1, busy_s=0.0)
    assert 0 < meter.pace.byte_s <= 160.0 / 400_000


def test_deadlines_rest_on_calls_that_had_nothing_before_them() -> None:
    deadlines = Deadlines(ceiling_s=5.0)
    meter, decode = PaceMeter(0.002, 0.05), Latency(0.002, 0.05)
    assert meter.late_after(1024, deadlines, decode) == 5.0  # nothing is known
    for i in range(MIN_SAMPLES):
        meter.sent(2 * i, 1024, 400_000, 10.0 * i)
        meter.sent(2 * i + 1, 1024, 400_000, 10.0 * i)
        answered(meter, 2 * i, 10.0 * i + 0.4, busy_s=0.3)
        answered(meter, 2 * i + 1, 10.0 * i + 4.0, busy_s=0.3)
    assert meter.late_after(1024, deadlines, decode) == pytest.approx(0.4 * 1.6 + 0.25)
    assert meter.late_after(100, deadlines, decode) == 5.0  # of smaller calls nothing
