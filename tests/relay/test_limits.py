"""limits: buckets give what they promise and no more; queues keep their bounds, order and priorities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.limits import (
    MAX_SPREAD_MS,
    MIN_SPREAD_MS,
    OutboundQueue,
    Priority,
    QueueBounds,
    QueueTotal,
    Seldom,
    Slots,
    TokenBucket,
    reconnect_spread_ms,
)

SMALL = QueueBounds(
    bulk_bytes=100,
    bulk_count=5,
    disco_bytes=40,
    disco_count=4,
    control_bytes=20,
    control_count=3,
    record_bytes=30,
    record_count=2,
)


def test_spread_keeps_logins_after_a_crash_below_a_tenth_per_second() -> None:
    assert reconnect_spread_ms(0) == MIN_SPREAD_MS
    assert reconnect_spread_ms(1000) == 15_000
    assert reconnect_spread_ms(10**9) == MAX_SPREAD_MS
    for clients in (50, 100, 1000, 8000):
        per_second = clients / (reconnect_spread_ms(clients) / 1000)
        assert per_second <= max(clients / 10, 67)  # few clients: 67 a second is nothing


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    bucket = TokenBucket(rate=10, burst=20, now=0.0)
    assert sum(bucket.take(1, 0.0) for _ in range(100)) == 20
    assert bucket.wait() > 0
    assert bucket.ready(bucket.wait())
    assert sum(bucket.take(1, step / 100) for step in range(1001)) == pytest.approx(100, abs=2)


def test_a_frame_larger_than_the_burst_passes_and_is_paid_for() -> None:
    bucket = TokenBucket(rate=10, burst=20, now=0.0)
    assert bucket.take(120, 0.0)
    assert bucket.wait() == pytest.approx(10.0, abs=0.01)
    assert not bucket.ready(9.9)
    assert bucket.ready(10.1)


def test_rate_zero_is_no_limit_and_a_clock_that_stands_still_gives_nothing() -> None:
    unlimited = TokenBucket(rate=0, burst=0, now=0.0)
    assert all(unlimited.take(10**9, 0.0) for _ in range(10))
    assert unlimited.wait() == 0.0
    bucket = TokenBucket(rate=10, burst=1, now=5.0)
    assert bucket.take(1, 5.0)
    assert not bucket.ready(4.0)


@given(steps=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50)), max_size=60))
def test_a_bucket_never_gives_more_than_rate_and_burst(steps: list[tuple[float, int]]) -> None:
    bucket, now, given_out, largest = TokenBucket(rate=7, burst=30, now=0.0), 0.0, 0, 0
    for wait, amount in steps:
        now += wait
        if bucket.take(amount, now):
            given_out, largest = given_out + amount, max(largest, amount)
        assert given_out <= 30 + 7 * now + largest


def queue(total: int = 10_000) -> tuple[OutboundQueue, QueueTotal]:
    shared = QueueTotal(total)
    return OutboundQueue(SMALL, shared), shared


def drained(waiting: OutboundQueue) -> list[bytes]:
    return [waiting.pop() for _ in range(waiting.count)]


def test_control_leaves_first_then_disco_then_records_then_bulk_each_in_order() -> None:
    waiting, total = queue()
    for message, priority in (
        (b"b1", Priority.BULK),
        (b"r1", Priority.RECORD),
        (b"d1", Priority.DISCO),
        (b"c1", Priority.CONTROL),
        (b"b2", Priority.BULK),
        (b"d2", Priority.DISCO),
    ):
        assert waiting.push(message, priority) == 0
    assert (waiting.size, waiting.count, total.used) == (12, 6, 12)
    assert drained(waiting) == [b"c1", b"d1", b"d2", b"r1", b"b1", b"b2"]
    assert (waiting.size, waiting.count, total.used) == (0, 0, 0)
    with pytest.raises(IndexError):
        waiting.pop()


def test_a_full_class_loses_its_oldest_and_no_other_class_anything() -> None:
    waiting, _ = queue()
    waiting.push(b"disco", Priority.DISCO)
    assert [waiting.push(bytes([number]) * 30, Priority.BULK) for number in range(5)] == [0, 0, 0, 1, 1]
    assert drained(waiting) == [b"disco", b"\2" * 30, b"\3" * 30, b"\4" * 30]
    assert waiting.dropped == [0, 0, 0, 2]
    assert [waiting.push(b"x", Priority.BULK) for _ in range(7)] == [0, 0, 0, 0, 0, 1, 1]
    assert [waiting.push(b"d", Priority.DISCO) for _ in range(6)] == [0, 0, 0, 0, 1, 1]
    assert waiting.dropped == [0, 2, 0, 4]


def test_a_message_beyond_its_class_is_dropped_alone() -> None:
    waiting, _ = queue()
    waiting.push(b"stays", Priority.DISCO)
    assert waiting.push(bytes(41), Priority.DISCO) == 1
    assert drained(waiting) == [b"stays"]


def test_when_all_queues_are_full_bulk_makes_room_in_its_own() -> None:
    shared = QueueTotal(100)
    mine, other = OutboundQueue(SMALL, shared), OutboundQueue(SMALL, shared)
    other.push(bytes(60), Priority.BULK)
    mine.push(b"a" * 30, Priority.BULK)
    assert mine.push(b"b" * 35, Priority.BULK) == 1
    assert mine.push(b"d", Priority.DISCO) == 0
    assert drained(mine) == [b"d", b"b" * 35]
    assert mine.push(bytes(50), Priority.BULK) == 1  # nothing of its own to drop
    other.clear()
    assert shared.used == 0
    assert mine.push(bytes(50), Priority.BULK) == 0


pushes = st.lists(
    st.one_of(st.none(), st.tuples(st.binary(min_size=1, max_size=120), st.sampled_from(list(Priority)))), max_size=80
)


@given(steps=pushes)
def test_bounds_hold_whatever_comes(steps: list[tuple[bytes, Priority] | None]) -> None:
    waiting, total = queue(150)
    put = dict.fromkeys(Priority, 0)
    left = dict.fromkeys(Priority, 0)
    for step in steps:
        if step is None:
            if waiting:
                waiting.pop()
                left[Priority.CONTROL] += 1
            continue
        message, priority = step
        waiting.push(message, priority)
        put[priority] += 1
        assert waiting.size <= 100 + 40 + 20 + 30
        assert waiting.count <= 5 + 4 + 3 + 2
        assert total.used == waiting.size
    assert waiting.count == sum(put.values()) - sum(left.values()) - sum(waiting.dropped)
    drained(waiting)
    assert total.used == 0


def test_slots_are_bounded_per_key_and_in_all_and_given_back() -> None:
    slots = Slots(limit=2, total=3)
    assert [slots.take("a"), slots.take("a"), slots.take("a"), slots.take("b"), slots.take("c")] == [
        True, True, False, True, False,
    ]  # fmt: skip
    slots.give("a")
    assert slots.take("c")
    assert slots.used == 3


def test_seldom_lets_through_once_per_interval_and_remembers_a_bounded_number() -> None:
    seldom = Seldom(interval=1.0, capacity=2)
    assert [seldom.allows("a", at) for at in (0.0, 0.5, 1.0, 1.9)] == [True, False, True, False]
    assert seldom.allows("b", 1.9)
    assert seldom.allows("c", 1.9)  # "a" is forgotten
    assert seldom.allows("a", 1.9)
