"""Where two threads meet: the first end counts, and nobody waits for ever."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from swarmnode.dispatch.pending import PendingRows
from swarmnode.dispatch.request import make_request
from swarmnode.dispatch.views import SiteStats
from swarmnode.errors import Cancelled
from tests.swarmnode.dispatch.samples import SITES, full_engine, local_rows, make_input


def make_pending(*, alive: bool = True) -> PendingRows:
    def check_alive(pending: PendingRows) -> None:
        if not alive:
            pending.fail(Cancelled("the loop is gone"))

    return PendingRows(make_request(SITES[0], *make_input(SITES[0], 2), partial=False), SiteStats(), check_alive)


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


def test_a_dead_loop_is_noticed() -> None:
    with pytest.raises(Cancelled, match="the loop is gone"):
        make_pending(alive=False).result()
