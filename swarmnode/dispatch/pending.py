"""The rows of one call, some time in the future: where the loop thread and a decode thread meet.

Made by `ExpertClient.submit`, filled on the loop thread, waited for by one decode thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from swarmnode.dispatch.call import Call
from swarmnode.dispatch.codec import F32
from swarmnode.dispatch.frames import Answer
from swarmnode.dispatch.request import Request, Share, combine
from swarmnode.dispatch.views import SiteStats

ALIVE_CHECK_S = 1.0  # how often a waiting thread looks whether the loop that should wake it still runs
_COUNTING = threading.Lock()  # a site's counters are added to by the loop's thread and by the local engine's


class PendingRows:
    """See the module. `call`, `shares` (attempt -> what was asked) and `asked` (attempt -> worker) belong to the loop
    thread.
    """

    def __init__(self, request: Request, stats: SiteStats, check_alive: Callable[[PendingRows], None]) -> None:
        self.request = request
        self.stats = stats
        self.call: Call | None = None
        self.shares: dict[int, Share] = {}
        self.asked: dict[int, int] = {}
        self._check_alive = check_alive
        self._answers: dict[int, tuple[F32, Answer | None]] = {}
        self._parts: list[tuple[Share, F32]] = []
        self._error: Exception | None = None
        self._done = False
        self._submitted_at = time.monotonic()
        self._lock = threading.Lock()  # held until done; a third of the cost of threading.Event
        self._lock.acquire()

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._done

    def result(self) -> F32:
        """Wait for the rows: float32[n_tokens, d_out], Σ wᵢ·Eᵢ(x) for each token.

        Raises NobodyHolds, CallFailed, or what `ExpertClient.cancel_all` was given.
        """
        started = time.monotonic()
        while not self._lock.acquire(timeout=ALIVE_CHECK_S):
            self._check_alive(self)
        self._lock.release()
        self.stats.wait_s += time.monotonic() - started
        if self._error is not None:
            raise self._error
        return combine(self.request, self._parts)

    def keep(self, attempt: int, rows: F32, answer: Answer | None) -> None:
        """Keep the rows of an attempt until it is known whether they count. `answer` is None for the local engine's."""
        self._answers[attempt] = rows, answer

    def finish(self, attempts: Sequence[int]) -> None:
        """Wake the waiting thread: the rows of these attempts, in this order, are the result."""
        parts = [(self.shares[attempt], self._answers[attempt][0]) for attempt in attempts]
        self._count([(self.shares[attempt], self._answers[attempt][1]) for attempt in attempts])
        if not self._done:
            self._parts = parts
            self._end()

    def finish_here(self, share: Share, rows: F32) -> None:
        """Wake the waiting thread: these rows, of all pairs, are the result. The local engine's thread."""
        self._count([(share, None)])
        if not self._done:
            self._parts = [(share, rows)]
            self._end()

    def fail(self, error: Exception) -> None:
        """Wake the waiting thread with an error. The first end counts. Any thread."""
        if not self._done:
            self._error = error
            self._end()

    def _end(self) -> None:
        self._done = True
        with contextlib.suppress(RuntimeError):  # another thread was first
            self._lock.release()

    def _count(self, parts: list[tuple[Share, Answer | None]]) -> None:
        with _COUNTING:
            self._add_up(parts)

    def _add_up(self, parts: list[tuple[Share, Answer | None]]) -> None:
        stats = self.stats
        stats.tokens += self.request.n_tokens
        answers = [answer for _, answer in parts if answer is not None]
        for share, answer in parts:
            stats.pairs += len(share.pairs)
            if answer is None:
                stats.local_pairs += len(share.pairs)
        if not answers:
            stats.local_calls += 1
            return
        stats.calls += 1
        stats.round_trip_s += time.monotonic() - self._submitted_at
        stats.busy_s += sum(answer.busy_us for answer in answers) / 1e6
        stats.queued_s += sum(answer.queued_us for answer in answers) / 1e6
        stats.longest_busy_s += max(answer.busy_us for answer in answers) / 1e6
