"""What a call may ask about the workers at the moment it chooses among them: the swarm behind `call_actions.Swarm`.

Loop thread only. It reads the workers' figures and changes nothing. Made by `call_runner.py`; `check_host.py` asks it
whom a check may ask.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from swarmnode.compute.recipe import Site
from swarmnode.dispatch.cutting import Shared
from swarmnode.dispatch.local_experts import LocalExperts
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.piece_queue import PieceQueues
from swarmnode.dispatch.replicas import LOCAL, Candidate
from swarmnode.dispatch.request import Request
from swarmnode.dispatch.roster import Roster


class SwarmView:
    """The workers of one client, and its own engine, as any request sees them."""

    def __init__(
        self, roster: Roster, pieces: PieceQueues, local: LocalExperts | None, options: DispatchOptions
    ) -> None:
        self._workers, self._pieces, self._local, self._options = roster.attached, pieces, local, options

    def heard(self, number: int) -> float:
        """Return when a worker last gave a good answer."""
        worker = self._workers.get(number)
        return -math.inf if worker is None else worker.answered_at

    def answering_until(self, number: int) -> float:
        """Return until when what waits here for a worker waits rightly."""
        worker = self._workers.get(number)
        if worker is None:
            return -math.inf
        return self._pieces.answering_until(number, worker.answered_at, worker.latency)

    def candidates(self, request: Request) -> list[Candidate]:
        """Return the workers that take calls of this request now."""
        now = time.monotonic()
        seen = (worker.candidate(request, now) for worker in self._workers.values())
        found = [candidate for candidate in seen if candidate is not None]
        if len(request.experts) < self._options.call.spread_pairs or len(found) < 2:
            return found
        costs = self._pieces.costs(request)
        large = ((one, costs.get(one.worker, (0.0, 0.0))) for one in found)
        return [dataclasses.replace(one, pair_s=pair_s, start_s=start_s) for one, (pair_s, start_s) in large]

    def local(self, site: Site) -> Candidate | None:
        """Return the local engine as a candidate, if there is one for this site."""
        if self._local is None or not (held := self._local.held(site)):
            return None
        return Candidate(LOCAL, "this node", held)

    def late_after(self, number: int, n_pairs: int, attempt: int = 0) -> float:
        """Return how long an attempt may take from now; `attempt` is 0 for one that is not sent yet."""
        worker = self._workers.get(number)
        if worker is None:
            return self._options.late_ceiling_s
        return self._pieces.late_after(number, n_pairs, attempt, worker.latency)

    def cut(self, request: Request, loads: Sequence[Shared], units: int, most: int) -> tuple[int, ...]:
        """Return how to cut a large call."""
        return self._pieces.cut(request, loads, units, most)


class RequestView:
    """The swarm as the call for one request sees it (call_actions.Swarm)."""

    def __init__(self, swarm: SwarmView, request: Request) -> None:
        self._swarm, self._request = swarm, request

    def candidates(self) -> list[Candidate]:
        """See Swarm."""
        return self._swarm.candidates(self._request)

    def local(self) -> Candidate | None:
        """See Swarm."""
        return self._swarm.local(self._request.site)

    def late_after(self, worker: int, n_pairs: int, attempt: int) -> float:
        """See Swarm."""
        return self._swarm.late_after(worker, n_pairs, attempt)

    def heard(self, worker: int) -> float:
        """See Swarm."""
        return self._swarm.heard(worker)

    def answering_until(self, worker: int) -> float:
        """See Swarm."""
        return self._swarm.answering_until(worker)

    def cut(self, loads: Sequence[Shared], units: int, most: int) -> tuple[int, ...]:
        """See Swarm."""
        return self._swarm.cut(self._request, loads, units, most)
