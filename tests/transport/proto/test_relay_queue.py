from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transport.proto.relay_queue import MAX_FIRST, RelayQueue


def drain(queue: RelayQueue, now: float = 0.0) -> list[bytes]:
    found = []
    while (message := queue.pop(now)) is not None:
        found.append(message)
    return found


def test_disco_goes_first_and_each_class_keeps_its_order() -> None:
    queue = RelayQueue(1000, 1.0)
    for number in range(3):
        queue.push_bulk(b"bulk%d" % number, 0.0)
        queue.push_first(b"first%d" % number)
    assert queue
    assert drain(queue) == [b"first0", b"first1", b"first2", b"bulk0", b"bulk1", b"bulk2"]
    assert not queue
    assert queue.dropped == 0


def test_the_oldest_bulk_is_dropped_and_never_disco() -> None:
    queue = RelayQueue(100, 1.0)
    queue.push_first(b"disco")
    for number in range(20):
        queue.push_bulk(bytes([number]) * 10, 0.0)
    assert drain(queue) == [b"disco", *(bytes([number]) * 10 for number in range(10, 20))]
    assert queue.dropped == 10


def test_bulk_that_became_too_old_is_dropped_when_its_turn_comes() -> None:
    queue = RelayQueue(100, 1.0)
    queue.push_bulk(b"old", 0.0)
    queue.push_first(b"disco")
    queue.push_bulk(b"new", 1.5)
    assert drain(queue, 2.0) == [b"disco", b"new"]
    assert queue.dropped == 1


def test_what_is_cleared_is_gone() -> None:
    queue = RelayQueue(10, 1.0)
    queue.push_bulk(bytes(10), 0.0)
    queue.push_first(b"x")
    queue.clear()
    queue.push_bulk(b"y" * 10, 0.0)
    assert drain(queue) == [b"y" * 10]


@given(st.lists(st.tuples(st.sampled_from(["first", "bulk", "pop"]), st.integers(1, 40_000)), max_size=80))
def test_what_waits_is_bounded_and_nothing_is_lost_uncounted(steps: list[tuple[str, int]]) -> None:
    queue, pushed, popped = RelayQueue(100_000, 1e9), 0, 0
    for kind, size in steps:
        if kind == "pop":
            popped += queue.pop(0.0) is not None
        else:
            pushed += 1
            if kind == "first":
                queue.push_first(b"f" + bytes(size))
            else:
                queue.push_bulk(b"b" + bytes(size), 0.0)
    rest = drain(queue)
    assert sum(len(message) for message in rest if message[0] == ord("b")) <= 100_000
    assert sum(len(message) for message in rest if message[0] == ord("f")) <= MAX_FIRST
    assert pushed == popped + len(rest) + queue.dropped
