"""Looks every LOOK_S whether the workers that are at a large call are still there, and pings those that say nothing.

The judgement is `failure_detector.py`'s. Loop thread only; owned by `call_runner.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from swarmnode.dispatch.failure_detector import FailureDetector, Sign
from swarmnode.dispatch.remote_worker import RemoteWorker

LOOK_S = 0.05


class Watch:
    """See the module. `slack_s` as in FailureDetector; `on_silent` hears of a worker once, until it is heard again."""

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
