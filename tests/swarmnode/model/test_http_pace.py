from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.model.http_pace import LEAST_BYTES, SLOW_WINDOWS, WINDOW_S, Pace


def windows(rate: float, seconds: float, every_s: float = 1.0) -> Pace:
    pace, now, owed = Pace(), 100.0, 0.0
    pace.resume(now)
    while now < 100.0 + seconds and not pace.is_hopeless:
        now += every_s
        owed += rate * every_s
        pace.count(now, int(owed))
        owed -= int(owed)
    return pace


def test_twenty_bytes_a_second_are_hopeless_after_three_minutes() -> None:
    pace = windows(20, 3600)
    assert pace.is_hopeless
    assert pace.waited_s == SLOW_WINDOWS * WINDOW_S
    assert pace.rate == 20


def test_a_sixth_of_a_slow_link_is_enough() -> None:
    pace = windows(5000 / 6, 4 * 3600)
    assert pace.slow_windows == 0


def test_a_slow_window_is_not_made_good() -> None:
    pace, now = Pace(), 0.0
    for n in range(2 * SLOW_WINDOWS):
        assert not pace.is_hopeless
        now += WINDOW_S
        assert pace.count(now, 0 if n % 2 else 1 << 20) == (n % 2 == 1)
    assert pace.is_hopeless


def test_only_waiting_counts() -> None:
    pace = Pace()
    for n in range(1000):
        pace.resume(n * 1e4)
        pace.count(n * 1e4 + 0.1, 1000)
    assert pace.waited_s < 101
    assert pace.slow_windows == 0


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 1 << 30))))
def test_windows_are_judged_by_what_came_in_them(steps: list[tuple[float, int]]) -> None:
    pace, now = Pace(), 0.0
    for seconds, n_bytes in steps:
        now += seconds
        is_slow = pace.count(now, n_bytes)
        assert not (is_slow and n_bytes >= LEAST_BYTES * max(1.0, 2 * now / WINDOW_S))
    assert pace.received == sum(n_bytes for _, n_bytes in steps)
    assert pace.slow_windows <= len(steps)
