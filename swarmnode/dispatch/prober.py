"""Sends workers that nobody asks a copy of a small call now and then: nobody waits for it, only its time is noted.

So a worker that was slow shows when it is fast again. Loop thread only; owned by `call_runner.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from swarmnode.dispatch.health import DECODE_PAIRS
from swarmnode.dispatch.remote_worker import RemoteWorker
from swarmnode.dispatch.request import Request
from swarmnode.dispatch.roster import Roster

PROBE_EVERY_S = 1.0  # how often it is looked whether a worker has been idle for long
PROBE_UNSURE_S = 1.0  # for one whose speed is not known, or was another the last time: it takes some answers to be sure


class Prober:
    """See the module. `idle_s`: after so long unasked a worker is asked; `next_attempt` as in Call."""

    def __init__(self, roster: Roster, idle_s: float, next_attempt: Callable[[], int]) -> None:
        self._roster, self._idle_s, self._next_attempt = roster, idle_s, next_attempt
        self._look_due = 0.0
        self._to_probe: list[RemoteWorker] = []

    def begun(self, request: Request) -> None:
        """Hear that a call has begun; perhaps it is a small one that can be copied."""
        now = time.monotonic()
        if now >= self._look_due:
            self._look_due, idle_s = now + PROBE_EVERY_S, self._idle_s
            unsure_s = min(idle_s, PROBE_UNSURE_S)
            self._to_probe = [w for w in self._roster.attached.values() if w.wants_probe(now, idle_s, unsure_s)]
        if self._to_probe:
            self._probe(request)

    def _probe(self, request: Request) -> None:
        if len(request.experts) > DECODE_PAIRS:
            return
        experts = request.experts.tolist()
        for worker in list(self._to_probe):
            held = worker.held.get(request.site.index, 0)
            pairs = [pair for pair, expert in enumerate(experts) if held >> expert & 1]
            if pairs:
                self._to_probe.remove(worker)
                if not worker.leaving:
                    worker.ask(self._next_attempt(), request.share(pairs))
