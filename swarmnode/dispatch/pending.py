"""The rows of one call, some time in the future: where the loop thread and a decode thread meet.

Made by `ExpertClient.submit`, filled on the loop thread, waited for by one decode thread.

The partial sums of a large call are added up while the rest is on its way: the loop's thread says when a range of
tokens is complete (`Call.cells`), the waiting thread adds its parts in their order. What does not come in this way,
such as another worker's answer in place of one that was late, is added at the end; and where an answer that was added
does not count in the end, everything is added anew. So the bits do not depend on what came first.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from swarmnode.dispatch.call import Call
from swarmnode.dispatch.codec import F32
from swarmnode.dispatch.frames import Answer
from swarmnode.dispatch.health import DECODE_PAIRS
from swarmnode.dispatch.request import Request, Share, add_partials, combine
from swarmnode.dispatch.views import SiteStats

ALIVE_CHECK_S = 1.0  # how often a waiting thread looks whether the loop that should wake it still runs
Part = tuple[Share, F32]
_COUNTING = threading.Lock()  # a site's counters are added to by the loop's thread and by the local engine's


class Owner(Protocol):
    """What a call needs of its client."""

    def check_alive(self, pending: PendingRows) -> None:
        """On the waiting thread, now and then: have the call fail if the loop that should wake it is closed."""

    def on_failed(self, pending: PendingRows) -> None:
        """Hear that a call has ended with an error, on the thread where that was said."""


class PendingRows:
    """See the module. `call`, `shares` (attempt -> what was asked) and `asked` (attempt -> worker) belong to the loop
    thread.
    """

    def __init__(self, request: Request, stats: SiteStats, owner: Owner) -> None:
        self.request = request
        self.stats = stats
        self.call: Call | None = None
        self.shares: dict[int, Share] = {}
        self.asked: dict[int, int] = {}
        self._owner = owner
        self._answers: dict[int, tuple[F32, Answer | None]] = {}
        self._parts: dict[int, Part] = {}
        # attempt -> the attempts of its range of tokens, and those of them that have not come; the loop's thread
        self._missing: dict[int, tuple[tuple[int, ...], set[int]]] = {}
        # Ranges of tokens that are complete, then None. Only for calls that may be cut into such.
        self._news: queue.SimpleQueue[dict[int, Part] | None] | None = None
        if request.partial and len(request.experts) > DECODE_PAIRS:
            self._news = queue.SimpleQueue()
        self._error: Exception | None = None
        self._done = False
        self._submitted_at = time.monotonic()
        self._lock = threading.Lock()  # held until done; a third of the cost of threading.Event
        self._lock.acquire()

    @property
    def age_s(self) -> float:
        """How long ago it was asked for."""
        return time.monotonic() - self._submitted_at

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._done

    def result(self) -> F32:
        """Wait for the rows: float32[n_tokens, d_out], Σ wᵢ·Eᵢ(x) for each token.

        Raises NobodyHolds, CallFailed, or what `ExpertClient.cancel_all` was given.
        """
        started = time.monotonic()
        total, added = (None, set()) if self._news is None or self._done else self._add_as_they_come(self._news)
        while not self._lock.acquire(timeout=ALIVE_CHECK_S):
            self._owner.check_alive(self)
        self._lock.release()
        self.stats.wait_s += time.monotonic() - started
        if self._error is not None:
            raise self._error
        if total is None or not added <= self._parts.keys():
            return combine(self.request, list(self._parts.values()))
        add_partials(total, [part for attempt, part in self._parts.items() if attempt not in added])
        return total

    def _add_as_they_come(self, news: queue.SimpleQueue[dict[int, Part] | None]) -> tuple[F32 | None, set[int]]:
        """Return the sum of the ranges of tokens that were complete before the end, and whose answers are in it."""
        total: F32 | None = None
        added: set[int] = set()
        while True:
            try:
                parts = news.get(timeout=ALIVE_CHECK_S)
            except queue.Empty:
                self._owner.check_alive(self)
                continue
            if parts is None:
                return total, added
            if total is None:
                total = np.zeros((self.request.n_tokens, self.request.site.d_out), np.float32)
            add_partials(total, list(parts.values()))
            added |= parts.keys()

    def cut_into(self, cells: Sequence[tuple[int, ...]]) -> None:
        """Know which attempts make up which range of tokens. Loop thread."""
        if self._news is not None and len(cells) > 1:
            for attempts in cells:
                self._missing |= dict.fromkeys(attempts, (attempts, set(attempts)))

    def counts(self, attempt: int) -> None:
        """Hear that a kept answer counts: perhaps it makes a range of tokens complete. Loop thread."""
        cell = self._missing.pop(attempt, None)
        if cell is None or self._news is None:
            return
        attempts, missing = cell
        missing.discard(attempt)
        if not missing:
            self._news.put({one: (self.shares[one], self._answers[one][0]) for one in attempts})

    def keep(self, attempt: int, rows: F32, answer: Answer | None) -> None:
        """Keep the rows of an attempt until it is known whether they count. `answer` is None for the local engine's."""
        self._answers[attempt] = rows, answer

    def finish(self, attempts: Sequence[int]) -> None:
        """Wake the waiting thread: the rows of these attempts, in this order, are the result."""
        parts = {attempt: (self.shares[attempt], self._answers[attempt][0]) for attempt in attempts}
        self._count([(self.shares[attempt], self._answers[attempt][1]) for attempt in attempts])
        if not self._done:
            self._parts = parts
            self._end()

    def finish_here(self, share: Share, rows: F32) -> None:
        """Wake the waiting thread: these rows, of all pairs, are the result. The local engine's thread."""
        self._count([(share, None)])
        if not self._done:
            self._parts = {0: (share, rows)}
            self._end()

    def fail(self, error: Exception) -> None:
        """Wake the waiting thread with an error. The first end counts. Any thread."""
        if not self._done:
            self._error = error
            self._end()
            self._owner.on_failed(self)

    def _end(self) -> None:
        self._done = True
        if self._news is not None:
            self._news.put(None)
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
        stats.round_trip_s += self.age_s
        stats.busy_s += sum(answer.busy_us for answer in answers) / 1e6
        stats.queued_s += sum(answer.queued_us for answer in answers) / 1e6
        stats.longest_busy_s += max(answer.busy_us for answer in answers) / 1e6
