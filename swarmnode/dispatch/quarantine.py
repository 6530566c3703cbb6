"""Which peers are not asked any more in this run, or last, because their answers were wrong.

Owned by `call_runner.py`, loop thread only but for `peers`. That an answer is wrong is found by `checks.py`, or is a
worker's `bad_answers`; what calls in progress do without it is `distrust`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from swarmnode.dispatch.remote_worker import RemoteWorker
from swarmnode.dispatch.roster import FormerWorker, Roster

OnQuarantine = Callable[[str, str], None]
log = logging.getLogger(__name__)


class Quarantine:
    """See the module. `distrust` has calls in progress do without a worker, by its number; see `ExpertClient` for
    `on_quarantine`. A peer is its key: whatever it calls itself and however often it reconnects.
    """

    def __init__(
        self, roster: Roster, distrust: Callable[[int, str], None], on_quarantine: OnQuarantine | None
    ) -> None:
        self._roster, self._distrust, self._on_quarantine = roster, distrust, on_quarantine
        self._quarantined: dict[str, str] = {}  # peer -> why
        self._suspected: dict[str, str] = {}

    def peers(self) -> dict[str, str]:
        """Return the peers that are not asked any more, and why. Any thread."""
        return dict(self._quarantined)

    def mark(self, worker: RemoteWorker) -> None:
        """Have a new connection know what is held against its peer."""
        worker.quarantined = self._quarantined.get(worker.peer, "")
        worker.suspected = self._suspected.get(worker.peer, "")

    def add(self, worker: RemoteWorker | FormerWorker, why: str) -> None:
        """Ask this worker's peer nothing more in this run; calls in progress do without it, also its answers.

        Whether it is connected or not: who disconnects before its answer is looked at gains nothing.
        """
        is_new = worker.peer not in self._quarantined
        why = self._quarantined.setdefault(worker.peer, why)
        for connected in self._roster.connections_of(worker.peer):
            connected.quarantined = why
        for number in {worker.number} | self._roster.numbers_of(worker.peer):
            self._distrust(number, why)
        if not is_new:
            return
        log.warning("dispatch_quarantined peer=%s name=%r why=%r", worker.peer, worker.name, why)
        if self._on_quarantine is not None:
            try:
                self._on_quarantine(worker.peer, why)
            except Exception:
                log.exception("dispatch_on_quarantine_failed peer=%s", worker.peer)

    def suspect(self, worker: RemoteWorker | FormerWorker, why: str) -> None:
        """Ask this worker's peer last in this run: others say that it was wrong, and this node cannot tell."""
        if worker.peer in self._suspected:
            return
        self._suspected[worker.peer] = why
        log.warning("dispatch_suspected peer=%s name=%r why=%r", worker.peer, worker.name, why)
        for connected in self._roster.connections_of(worker.peer):
            connected.suspected = why
            connected.health.fault(why, time.monotonic())
