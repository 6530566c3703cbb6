"""The core's clock: with the loop's, but for silence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transport.core_clock import LULL, STALL_RATE, CoreClock


def test_it_starts_and_runs_with_the_loop() -> None:
    clock = CoreClock()
    assert clock.tick(50.0, 0) == 50.0
    assert clock.tick(50.5, 1000) == 50.5
    assert clock.when(50.75) == 50.75
    assert clock.when(50.0) == 50.5  # what is due is due now
    assert clock.tick(50.4, 1000) == 50.5  # and never back


def test_a_lull_with_nothing_in_flight_hardly_counts() -> None:
    clock = CoreClock()
    clock.tick(50.0, 0)
    assert clock.tick(53.0, 0) == 50.0 + LULL
    assert clock.tick(56.0, 1) == 53.0 + LULL
    assert clock.when(53.0 + LULL + 1) == 57.0


def test_an_outage_hardly_counts_and_an_answer_s_round_trip_is_measured_as_it_was() -> None:
    clock = CoreClock()
    clock.tick(50.0, 1)
    clock.stall()
    assert clock.tick(54.0, 1) == 50.0 + 4 * STALL_RATE
    sent = clock.tick(56.0, 1)
    clock.stall()  # a probe
    assert abs(clock.receive(56.05, 1, 0.2) - sent - 0.05) < 1e-9
    clock.resume()
    assert abs(clock.tick(56.15, 1) - sent - 0.15) < 1e-9


def test_what_comes_too_late_for_an_answer_does_not_count_the_outage() -> None:
    clock = CoreClock()
    sent = clock.tick(50.0, 1)
    clock.stall()
    assert abs(clock.receive(51.4, 1, 0.2) - sent - 0.2) < 1e-9


def test_the_pacer_s_deadlines_wait_as_slowly_as_it_sees_the_time_go() -> None:
    clock = CoreClock()
    clock.tick(50.0, 1)
    clock.stall()
    assert clock.when(50.001) == 50.001
    assert abs(clock.when(50.001, paced=True) - (50 + 0.001 / STALL_RATE)) < 1e-6


def test_a_first_flight_is_as_if_it_was_sent_now() -> None:
    clock = CoreClock()
    clock.tick(50.0, 1)
    clock.skip(50.3)
    clock.stall()
    assert abs(clock.receive(50.35, 1, 0.3) - 50.05) < 1e-9


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 5), st.integers(0, 1)), max_size=60))
def test_it_never_goes_back_nor_ahead_of_the_loop(steps: list[tuple[int, float, int]]) -> None:
    clock = CoreClock()
    now = 10.0
    core = clock.tick(now, 0)
    for what, gap, in_flight in steps:
        now += gap
        match what:
            case 0 | 1:
                time = clock.tick(now, in_flight)
            case 2:
                time = clock.receive(now, in_flight, 0.2)
            case 3:
                time = clock.tick(now, in_flight)
                clock.stall()
            case _:
                clock.resume()
                time = clock.tick(now, in_flight)
        assert core <= time <= now + 1e-6
        core = time
