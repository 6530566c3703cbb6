from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.proto.relay_watch import MAX_FACTOR, PING_SECONDS, RelayWatch, WatchTimes

TIMES = WatchTimes()


def welcomed(ping: float = 20.0) -> RelayWatch:
    """A watch at 0 s whose first ping was answered after 50 ms."""
    watch = RelayWatch(TIMES, 0.0)
    assert watch.answered(watch.welcomed(ping, 0.0), 0.05)
    return watch


def run(
    watch: RelayWatch, start: float, end: float, on_ping: Callable[[bytes, float], None] = lambda _echo, _now: None
) -> tuple[list[float], float | None]:
    """Look whenever it is due; when pings went out, and when the relay was declared dead."""
    pings: list[float] = []
    now = start
    for _ in range(10_000):
        now = max(now, watch.due)
        if now >= end:
            return pings, None
        if watch.verdict(now):
            return pings, now
        echo = watch.look(now)
        if echo is not None:
            pings.append(now)
            on_ping(echo, now)
    raise AssertionError("a look was due ten thousand times")


def test_an_answering_relay_is_pinged_twice_soon_and_then_as_it_asked() -> None:
    watch = welcomed()

    def answer(echo: bytes, now: float) -> None:
        watch.heard(now)
        watch.answered(echo, now)

    pings, dead = run(watch, 0.05, 70.0, answer)
    assert dead is None
    assert pings == [1.0, 3.0, 23.0, 43.0, 63.0]


@pytest.mark.parametrize(("asked", "got"), [(0, PING_SECONDS[0]), (1e9, PING_SECONDS[1]), (25, 25)])
def test_what_a_relay_may_ask_for_is_bounded(asked: float, got: float) -> None:
    watch = welcomed(asked)
    for _ in range(3):
        echo = watch.look(watch.due)
        assert echo is not None
        last = watch.due - TIMES.pong_timeout
        watch.answered(echo, last)
    assert watch.due == pytest.approx(last + got)


def test_a_silent_relay_is_dead_five_seconds_after_a_ping() -> None:
    pings, dead = run(welcomed(), 0.05, 100.0)
    assert pings == [1.0]
    assert dead == 6.0


def test_with_traffic_a_silent_relay_is_dead_after_two_and_a_half_seconds() -> None:
    watch = welcomed()
    assert watch.answered(watch.look(1.0) or b"", 1.05)
    assert watch.answered(watch.look(3.0) or b"", 3.05)
    assert watch.sent(10.0)
    assert not watch.sent(10.01)
    pings, dead = run(watch, 10.0, 100.0)
    assert pings == [11.0]
    assert dead == 12.5


def test_traffic_tightens_a_regular_ping_that_is_out() -> None:
    watch = welcomed()
    assert watch.look(1.0)
    watch.sent(1.1)
    pings, dead = run(watch, 1.1, 100.0)
    assert pings == [2.1]
    assert dead == pytest.approx(3.6)


def test_bytes_that_come_keep_it_alive_but_not_without_an_answer() -> None:
    watch = welcomed()
    assert watch.look(1.0)
    now = 1.0
    while not watch.verdict(now):
        now += 0.5
        if now < 40:
            watch.heard(now)
    assert now == 1.0 + MAX_FACTOR * TIMES.pong_timeout


def test_a_slow_uplink_that_still_takes_bytes_is_not_dead() -> None:
    watch = welcomed()
    watch.answered(watch.look(1.0) or b"", 1.05)
    watch.sent(2.0)
    assert watch.look(3.0)
    for step in range(8):
        now = 3.0 + step
        watch.took(now)
        watch.full(now)
        assert not watch.verdict(now + 0.99)


def test_a_full_socket_that_takes_nothing_is_dead_after_ten_seconds() -> None:
    watch = welcomed()
    watch.full(0.5)
    watch.heard(9.0)
    assert "took nothing" not in watch.verdict(18.9)
    assert "took nothing" in watch.verdict(19.0)


def test_a_kick_wants_an_answer_within_two_seconds_and_forgets_the_old_round_trip() -> None:
    watch = welcomed()
    assert watch.rtt == pytest.approx(0.05)
    echo = watch.kick(0.5)
    assert echo is not None
    assert watch.own
    assert watch.rtt is None
    assert watch.kick(0.6) is None  # one is out
    assert not watch.verdict(2.49)
    assert watch.verdict(2.5)
    assert watch.answered(echo, 2.5)
    assert not watch.own
    assert watch.rtt == pytest.approx(2.0)


def test_the_round_trip_is_smoothed() -> None:
    watch = welcomed()
    watch.answered(watch.look(1.0) or b"", 1.13)
    assert watch.rtt == pytest.approx(0.05 + 0.08 / 4)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["heard", "sent", "full", "took", "kick", "look", "pong", "old pong"]), st.floats(0, 3.0)
    ),
    max_size=60,
)


@given(STEPS)
def test_a_silent_relay_is_always_found_dead_and_never_flooded(steps: list[tuple[str, float]]) -> None:
    watch, now, pings = RelayWatch(TIMES, 0.0), 0.0, 1
    echo = watch.welcomed(20.0, 0.0)
    for step, passed in steps:
        now += passed
        sent: bytes | None = None
        match step:
            case "heard":
                watch.heard(now)
            case "sent":
                watch.sent(now)
            case "full":
                watch.full(now)
            case "took":
                watch.took(now)
            case "kick":
                sent = watch.kick(now)
            case "look":
                sent = watch.look(now)
            case "pong":
                watch.answered(echo, now)
            case _:
                assert not watch.answered(b"12345678", now)
        if sent is not None:
            echo = sent
            pings += 1
    assert pings <= len(steps) + 1
    _, dead = run(watch, now, now + 1000)
    assert dead is not None
    assert dead <= now + 20.0 + TIMES.pong_timeout + 0.001
