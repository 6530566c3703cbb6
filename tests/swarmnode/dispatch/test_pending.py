"""Where two threads meet: the first end counts, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.pending import PendingRows
from swarmnode.dispatch.request import Share, combine, make_request
from swarmnode.dispatch.views import SiteStats
from swarmnode.errors import Cancelled
from tests.swarmnode.dispatch.samples import SITES, full_engine, local_rows, make_input

heard: list[PendingRows] = []  # those that failed


class Listener:
    def __init__(self, *, alive: bool = True) -> None:
        self._alive = alive

    def check_alive(self, pending: PendingRows) -> None:
        if not self._alive:
            pending.fail(Cancelled("the loop is gone"))

    def on_failed(self, pending: PendingRows) -> None:
        heard.append(pending)


def make_pending(*, alive: bool = True) -> PendingRows:
    request = make_request(SITES[0], *make_input(SITES[0], 2), partial=False)
    return PendingRows(request, SiteStats(), Listener(alive=alive))


def test_the_rows_that_count_are_combined_by_whoever_asks() -> None:
    pending = make_pending()
    for attempt, pairs in ((1, range(4)), (2, range(4)), (3, range(4, 8))):
        pending.shares[attempt] = share = pending.request.share(pairs)
        pending.keep(attempt, share.compute(full_engine()) * (0 if attempt == 1 else 1), None)
    pending.finish((2, 3))
    assert np.array_equal(pending.result(), local_rows(SITES[0], *make_input(SITES[0], 2)))
    assert pending.stats.local_calls == 1
    assert pending.stats.local_pairs == 8


def test_a_waiting_thread_is_woken_by_an_error_from_any_thread() -> None:
    pending = make_pending()
    threading.Thread(target=pending.fail, args=(Cancelled("stop"),)).start()
    with pytest.raises(Cancelled, match="stop"):
        pending.result()
    pending.fail(Cancelled("too late"))
    with pytest.raises(Cancelled, match="stop"):
        pending.result()


def test_only_the_end_of_a_call_that_fails_is_told() -> None:
    failed, finished = make_pending(), make_pending()
    failed.fail(Cancelled("stop"))
    failed.fail(Cancelled("too late"))
    finished.finish(())
    finished.fail(Cancelled("too late"))
    assert heard.count(failed) == 1
    assert finished not in heard


def test_a_dead_loop_is_noticed() -> None:
    with pytest.raises(Cancelled, match="the loop is gone"):
        make_pending(alive=False).result()


# A large call of partial sums: 40 tokens, two workers with eight experts each, cut into four ranges of tokens.

CELLS = [(1, 2), (3, 4), (5, 6), (7, 8)]


def make_large() -> PendingRows:
    request = make_request(SITES[0], *make_input(SITES[0], 40), partial=True)
    pending = PendingRows(request, SiteStats(), Listener())
    experts = pending.request.experts
    for attempt in range(1, 9):
        tokens = range(10 * ((attempt - 1) // 2), 10 * ((attempt - 1) // 2) + 10)
        pairs = [p for t in tokens for p in range(4 * t, 4 * t + 4) if (experts[p] < 8) == (attempt % 2 == 1)]
        pending.shares[attempt] = pending.request.share(pairs)
    return pending


def waited_for(pending: PendingRows) -> Iterator[bytes]:
    """Begin to wait; the next item is the result."""
    results: list[bytes] = []
    thread = threading.Thread(target=lambda: results.append(pending.result().tobytes()))
    thread.start()
    yield b""
    thread.join(20)
    yield results[0]


def summed(pending: PendingRows, order: list[int]) -> bytes:
    parts: list[tuple[Share, np.ndarray]] = [
        (pending.shares[attempt], pending.shares[attempt].compute(full_engine())) for attempt in order
    ]
    return combine(pending.request, parts).tobytes()


@given(st.permutations(range(1, 9)), st.booleans())
def test_ranges_of_tokens_are_added_as_they_come_and_the_bits_are_always_the_same(
    order: list[int], waits: bool
) -> None:
    pending = make_large()
    pending.cut_into(CELLS)
    waiting = waited_for(pending)
    if waits:
        next(waiting)
    for attempt in order:
        pending.keep(attempt, pending.shares[attempt].compute(full_engine()), None)
        pending.counts(attempt)
    pending.finish(range(1, 9))
    if not waits:
        next(waiting)
    assert next(waiting) == summed(pending, list(range(1, 9)))
    assert pending.result().tobytes() == summed(pending, list(range(1, 9)))  # again, if anybody likes


def test_an_answer_that_was_added_and_does_not_count_is_taken_out() -> None:
    pending = make_large()
    pending.cut_into(CELLS)
    waiting = waited_for(pending)
    next(waiting)
    pending.shares[9] = pending.shares[2]
    for attempt in range(1, 10):
        rows = pending.shares[attempt].compute(full_engine())
        pending.keep(attempt, rows * 3 if attempt == 2 else rows, None)
        pending.counts(attempt)
    pending.finish((1, 9, 3, 4, 5, 6, 7, 8))
    assert next(waiting) == summed(pending, list(range(1, 9)))


def test_what_came_from_another_worker_is_added_at_the_end() -> None:
    pending = make_large()
    pending.cut_into(CELLS)
    waiting = waited_for(pending)
    next(waiting)
    pending.shares[9] = pending.shares[5]
    for attempt in (7, 8, 1, 2, 9, 6, 4, 3):
        pending.keep(attempt, pending.shares[attempt].compute(full_engine()), None)
        pending.counts(attempt)
    pending.finish((1, 2, 3, 4, 9, 6, 7, 8))
    assert next(waiting) == summed(pending, list(range(1, 9)))


def test_an_error_ends_the_adding() -> None:
    pending = make_large()
    pending.cut_into(CELLS)
    for attempt in (1, 2):
        pending.keep(attempt, pending.shares[attempt].compute(full_engine()), None)
        pending.counts(attempt)
    timer = threading.Timer(0.01, pending.fail, (Cancelled("stop"),))
    timer.start()
    with pytest.raises(Cancelled, match="stop"):
        pending.result()
    timer.join()


def test_a_dead_loop_is_noticed_by_large_calls_too() -> None:
    request = make_request(SITES[0], *make_input(SITES[0], 40), partial=True)
    pending = PendingRows(request, SiteStats(), Listener(alive=False))
    with pytest.raises(Cancelled, match="the loop is gone"):
        pending.result()
