from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.proto.reconnect import (
    FIRST_DELAY,
    MAX_DELAY,
    MAX_REFUSAL,
    MAX_RESTART,
    MAX_SPREAD,
    STABLE_SECONDS,
    Reconnect,
)


def plan(seed: int = 1) -> Reconnect:
    return Reconnect(Random(seed).randbytes, 0.0)


def low(count: int) -> bytes:
    return bytes(count)


def high(count: int) -> bytes:
    return b"\xff" * count


def test_the_first_try_is_at_once() -> None:
    assert plan().due == 0.0


def test_failures_back_off_from_a_tenth_of_a_second_to_sixteen() -> None:
    reconnect = Reconnect(high, 0.0)
    delays = []
    for _ in range(12):
        now = reconnect.due
        reconnect.failed(now)
        delays.append(round(reconnect.due - now, 6))
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]
    assert delays[-1] == MAX_DELAY == 16.0


def test_the_back_off_is_never_less_than_half() -> None:
    reconnect = Reconnect(low, 0.0)
    reconnect.failed(0.0)
    assert reconnect.due == FIRST_DELAY / 2
    reconnect.failed(1.0)
    assert reconnect.due == 1.0 + FIRST_DELAY


def test_a_thousand_clients_of_a_crashed_relay_come_back_spread_out() -> None:
    tries = []
    for seed in range(1000):
        reconnect = plan(seed)
        reconnect.connected(0.0)
        reconnect.lost(15.0, 100.0)
        tries.append(reconnect.due)
    assert all(100.0 <= due <= 115.0 for due in tries)
    per_second = [sum(second <= due < second + 1 for due in tries) for second in range(100, 115)]
    assert max(per_second) <= 100  # a tenth of all


def test_a_loss_that_is_ours_alone_is_not_waited_for() -> None:
    reconnect = Reconnect(high, 0.0)
    reconnect.connected(0.0)
    reconnect.lost(15.0, 100.0, own=True)
    assert reconnect.due == 100.0


@pytest.mark.parametrize(("stood", "longest"), [(0.1, MAX_DELAY), (1.0, MAX_DELAY), (4.0, 0.4), (8.0, 0.8)])
def test_a_relay_that_takes_logins_and_closes_is_asked_ever_less_the_sooner_it_closes(
    stood: float, longest: float
) -> None:
    reconnect = Reconnect(high, 0.0)
    now, delays = 0.0, []
    for _ in range(12):
        reconnect.connected(now)
        reconnect.lost(0.0, now + stood)
        delays.append(reconnect.due - now - stood)
        now = reconnect.due
    assert delays[0] == pytest.approx(FIRST_DELAY)
    assert delays[-1] == pytest.approx(longest)
    reconnect.connected(now)
    reconnect.lost(0.0, now + STABLE_SECONDS)
    assert reconnect.due == now + STABLE_SECONDS


@pytest.mark.parametrize(
    ("shortest", "longest", "earliest", "latest"),
    [(2, 8, 2, 8), (5, 1, 5, 5), (0, 0, 0, 0), (1e9, 1e9, MAX_RESTART, MAX_RESTART), (1, 1e9, 1, MAX_RESTART)],
)
def test_a_restart_is_come_back_from_at_the_time_it_named(
    shortest: float, longest: float, earliest: float, latest: float
) -> None:
    for random_bytes in (low, high):
        reconnect = Reconnect(random_bytes, 0.0)
        reconnect.restarting(shortest, longest, 50.0)
        assert 50 + earliest <= reconnect.due <= 50 + latest


def test_a_refusal_is_obeyed_but_not_for_ever() -> None:
    reconnect = plan()
    reconnect.refused(60.0, 10.0)
    assert reconnect.due == 70.0
    reconnect.refused(1e9, 10.0)
    assert reconnect.due == 10.0 + MAX_REFUSAL


def test_a_refusal_without_a_time_backs_off() -> None:
    reconnect = Reconnect(high, 0.0)
    for now in (0.0, 1.0, 2.0):
        reconnect.refused(0.0, now)
    assert reconnect.due == pytest.approx(2.4)


def test_a_new_network_is_tried_at_once_and_starts_anew() -> None:
    reconnect = Reconnect(high, 0.0)
    for _ in range(8):
        reconnect.failed(reconnect.due)
    now = reconnect.due - 5
    reconnect.network_changed(now)
    assert reconnect.due == now
    reconnect.failed(now)
    assert reconnect.due == pytest.approx(now + FIRST_DELAY)


def test_a_new_network_does_not_move_what_the_relay_asked_for() -> None:
    refused, restarting = Reconnect(high, 0.0), Reconnect(high, 0.0)
    refused.refused(60.0, 0.0)
    restarting.restarting(5.0, 20.0, 0.0)
    for reconnect in (refused, restarting):
        before = reconnect.due
        reconnect.network_changed(1.0)
        assert reconnect.due == before


def test_after_a_login_an_old_refusal_counts_no_more() -> None:
    reconnect = plan()
    reconnect.refused(60.0, 0.0)
    reconnect.connected(61.0)
    reconnect.lost(0.0, 100.0)
    reconnect.network_changed(100.0)
    assert reconnect.due == 100.0


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["failed", "connected", "changed"])),
    st.tuples(st.sampled_from(["lost", "refused"]), st.floats(0, 1e10)),
    st.tuples(st.just("restarting"), st.floats(0, 1e10), st.floats(0, 1e10)),
)


@given(st.lists(st.tuples(st.floats(0, 100), EVENTS), max_size=40), st.integers())
def test_whatever_happens_the_next_try_is_neither_in_the_past_nor_far_away(
    events: list[tuple[float, tuple[str, ...]]], seed: int
) -> None:
    reconnect, now = plan(seed), 0.0
    for passed, (kind, *values) in events:
        now += passed
        seconds = [float(value) for value in values]
        match kind:
            case "failed":
                reconnect.failed(now)
            case "connected":
                reconnect.connected(now)
                continue
            case "changed":
                reconnect.network_changed(now)
            case "lost":
                reconnect.lost(seconds[0], now)
            case "refused":
                reconnect.refused(seconds[0], now)
            case _:
                reconnect.restarting(seconds[0], seconds[1], now)
        assert now <= reconnect.due <= now + max(MAX_REFUSAL, MAX_RESTART, MAX_SPREAD)
