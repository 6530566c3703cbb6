"""Asks workers that are at a large call for a sign of life, so that nobody waits for one that is gone.

A large call may rightly take seconds, and a process that was killed says nothing. So while a worker has one and nothing
has come from it for QUIET_S, its connection is pinged: a living node acknowledges that, whatever its engine is doing.
Where nothing comes back in time, what the worker was sent goes to others, as if it were late. The deadlines of
`health.py` are for workers that live and are slow. Calls of decode size need no ping: their deadlines are near enough.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from enum import Enum, auto

from swarmnode.dispatch.health import FAR_FACTOR
from swarmnode.dispatch.remote_worker import RemoteWorker

QUIET_S = 0.1
LOOK_S = 0.05
MOST_PATIENT = 8  # times as long at most, for a worker that has lived after all


class Sign(Enum):
    """What to make of a worker that is waited for."""

    NONE_NEEDED = auto()
    ASK = auto()  # ping it
    SILENT = auto()  # once, until it is heard again


class FailureDetector:
    """Judges one worker. Pure: times in seconds of one clock.

    A ping may take FAR_FACTOR × the round trip + `slack_s`: so much that one which is lost can be sent again. A worker
    that was called silent and is heard again was only busy: it is given twice as long, up to MOST_PATIENT times.
    """

    def __init__(self, slack_s: float) -> None:
        self._slack_s = slack_s
        self._asked_at = math.inf
        self._silent = False
        self._patience = 1

    def look(self, now: float, heard_at: float, rtt_s: float) -> Sign:
        """Say what to make of it; `heard_at`: when anything last came from the worker. For ASK it is pinged now."""
        if heard_at >= self._asked_at:
            self._asked_at = math.inf
            if self._silent:
                self._silent, self._patience = False, min(2 * self._patience, MOST_PATIENT)
        if self._asked_at == math.inf:
            if now - heard_at < QUIET_S:
                return Sign.NONE_NEEDED
            self._asked_at = now
            return Sign.ASK
        if self._silent or now - self._asked_at < FAR_FACTOR * rtt_s + self._slack_s * self._patience:
            return Sign.NONE_NEEDED
        self._silent = True
        return Sign.SILENT

    def rest(self) -> None:
        """Nothing is waited for: what was asked before says nothing when something is again."""
        if not self._silent:
            self._asked_at = math.inf


class Watch:
    """Looks at the workers while any of them is at a large call. Loop thread only; owned by `call_runner.py`."""

    def __init__(
        self, workers: Mapping[int, RemoteWorker], slack_s: float, on_silent: Callable[[RemoteWorker], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers, self._slack_s, self._on_silent = workers, slack_s, on_silent
        self._detectors: dict[int, FailureDetector] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def begun(self) -> None:
        """Hear that a large call was sent."""
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for number in self._detectors.keys() - self._workers.keys():
            del self._detectors[number]
        for number, worker in list(self._workers.items()):
            detector = self._detectors.get(number)
            if worker.large_calls:
                if detector is None:
                    detector = self._detectors[number] = FailureDetector(self._slack_s)
                self.begun()
                sign = detector.look(now, worker.connection.heard_at, worker.connection.stats().rtt_s or 0.0)
                if sign is Sign.ASK:
                    worker.connection.ping()
                elif sign is Sign.SILENT:
                    self._on_silent(worker)
            elif detector is not None:
                detector.rest()
