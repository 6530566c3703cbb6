"""Runs the coordinator on the node that founded the swarm: feeds it what is seen, carries out what it decides. A shell.

The planner may compute for seconds over a large model: it runs in a thread, what happens meanwhile waits in a queue.
Made by `node.py`. The policy is `coordinator.py`, the messages' way is `mesh.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from swarmnode.coordination.coordinator import Coordinator
from swarmnode.coordination.messages import Assign, Message, Released, Report, pack_masks, unpack_masks
from swarmnode.coordination.orders import KeepLocal, Order, Outcome, Planned, Release, Standing
from swarmnode.placement.request import Holdings
from swarmnode.placement.routing import RoutingStats
from transport.identity import PeerId

ATTACH_S = 15.0  # until a worker that reports must be attached to this node's client: dials, a slow handshake
LOOK_S = 0.5  # at least so often it is looked who is heard, and time passes for the coordinator
UNHEARD_S = 0.5  # a connection that is replaced is away for less
Emit = Callable[..., None]
log = logging.getLogger(__name__)


class Swarm(Protocol):
    """What the lead needs of the node."""

    def send(self, peer: PeerId, message: Message) -> bool:
        """To a member; False when there is no link."""

    def rtt_s(self, peer: PeerId) -> float:
        """Of the path to a member, in seconds."""

    def recent(self, peer: PeerId) -> tuple[float | None, float] | None:
        """What calls of a worker took lately, s, and their rows, as the client has seen it; None where it is not
        attached, or nothing comes from it any more."""

    def keep_local(self, masks: Holdings) -> None:
        """Compute these experts here from now on."""


class Lead:
    """See the module. `n_expert` per site bounds what workers may claim; `model` is the model's hash; `has_file` says
    that this node computes in the end what nobody else holds."""

    def __init__(
        self,
        coordinator: Coordinator,
        swarm: Swarm,
        routing: RoutingStats,
        *,
        model: bytes,
        n_expert: list[int],
        has_file: bool,
        emit: Emit,
    ) -> None:
        self._coordinator, self._swarm, self._routing = coordinator, swarm, routing
        self._model, self._n_expert, self._has_file, self._emit = model, n_expert, has_file, emit
        self._events: deque[Callable[[float], None]] = deque()
        self._wake = asyncio.Event()
        self.plan: dict[str, Any] | None = None  # the last one, see `summary`
        self._latest: dict[PeerId, Report] = {}
        self._news: dict[PeerId, Report] = {}  # of these, not looked at yet: a flood replaces itself
        self._alone_since: dict[PeerId, float] = {}  # reports, and is not attached
        self._called: set[PeerId] = set()  # have been attached since they were linked
        self._unheard_since: dict[PeerId, float] = {}  # of these
        self._leaving: set[PeerId] = set()
        self._fresh: set[PeerId] = set()  # linked anew, and not heard since

    @property
    def reports(self) -> Mapping[PeerId, Report]:
        """The last report of every worker that is linked."""
        return self._latest

    # ---- what happens; loop thread

    def reported(self, peer: PeerId, report: Report) -> None:
        """A worker reports. Raises BadMessage for holdings that do not exist; another model's report is ignored."""
        if report.model != self._model or peer in self._leaving:
            return
        unpack_masks(report.held, self._n_expert)
        self._latest[peer] = self._news[peer] = report
        self._wake.set()

    def linked(self, peer: PeerId) -> None:
        """A member has a new link: whatever it did before, it is here."""
        self._leaving.discard(peer)
        self._fresh.add(peer)
        self._called.discard(peer)

    def leaving(self, peer: PeerId) -> None:
        """A worker wants to go."""
        self._leaving.add(peer)
        self._happened(lambda now: self._coordinator.leaving(str(peer), now))

    def gone(self, peer: PeerId) -> None:
        """A worker is not there any more."""
        self._fresh.discard(peer)
        self._called.discard(peer)
        self._unheard_since.pop(peer, None)
        self._news.pop(peer, None)
        self._alone_since.pop(peer, None)
        if self._latest.pop(peer, None) is not None:
            self._happened(lambda now: self._coordinator.gone(str(peer), now))

    def others_generate(self, is_so: bool) -> None:
        """Other members generate too, or none."""
        self._happened(lambda now: self._coordinator.others_generate(is_so, now))

    def stays_out(self, peer: PeerId, why: str) -> None:
        """A worker must not be given anything, from now on."""
        self._happened(lambda now: self._coordinator.stays_out(str(peer), why, now))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            wait = min(LOOK_S, max(0.0, self._coordinator.next_due() - time.monotonic()))
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._look()
            except Exception as error:  # the last plan stays
                log.exception("plan_failed")
                self._coordinator.failed(time.monotonic())
                self._emit("plan-problem", error=f"{type(error).__name__}: {error}")

    async def _look(self) -> None:
        now = time.monotonic()
        news, self._news = self._news, {}
        for peer, report in news.items():
            self._coordinator.report(self._standing(peer, report), now)
            if peer in self._fresh:
                self._fresh.discard(peer)
                self._coordinator.returned(str(peer), now)
            self._look_at(peer, now)
        while self._events:
            self._events.popleft()(now)
        for peer in self._latest:
            self._listen(peer, now)
        if now >= self._coordinator.next_due():
            sites = range(len(self._n_expert))
            self._coordinator.learn(
                {site: self._routing.weights(site) for site in sites},
                {site: pairs for site in sites if (pairs := self._routing.pairs(site)) is not None},
                {site: drawn for site in sites if len(drawn := self._routing.samples(site))},
            )
            outcomes = await asyncio.to_thread(self._coordinator.step, now)
            self._coordinator.took(time.monotonic() - now)
        else:
            outcomes = self._coordinator.step(now)
        for outcome in outcomes:
            self._carry_out(outcome)

    def _look_at(self, peer: PeerId, now: float) -> None:
        """A worker that reports and cannot be called for a while is not planned with."""
        if self._swarm.recent(peer) is not None:
            self._alone_since.pop(peer, None)
            self._coordinator.reached(str(peer), True, now)
        elif now - self._alone_since.setdefault(peer, now) > ATTACH_S:
            self._coordinator.reached(str(peer), False, now)

    def _listen(self, peer: PeerId, now: float) -> None:
        """A worker that was called and from which nothing comes may be gone long before its link says so."""
        if self._swarm.recent(peer) is not None:
            self._called.add(peer)
            self._unheard_since.pop(peer, None)
            self._coordinator.heard(str(peer), True, now)
        elif peer in self._called and now - self._unheard_since.setdefault(peer, now) >= UNHEARD_S:
            self._coordinator.heard(str(peer), False, now)

    def _standing(self, peer: PeerId, report: Report) -> Standing:
        rtt_s, row_s = self._pace(peer, report)
        return Standing(
            peer=str(peer),
            budget=report.budget,
            held=unpack_masks(report.held, self._n_expert),
            row_s=row_s,
            rtt_s=rtt_s,
            assignment=report.assignment,
            pinned=report.pinned,
            trouble=report.trouble,
            fetched=report.fetched,
        )

    # ---- how

    def _happened(self, event: Callable[[float], None]) -> None:
        self._events.append(event)
        self._wake.set()

    def _pace(self, peer: PeerId, report: Report) -> tuple[float, float]:
        path = self._swarm.rtt_s(peer)
        recent = self._swarm.recent(peer)
        if recent is None or recent[0] is None:
            return path, report.row_s
        return pace(path, report.row_s, recent[0], recent[1])

    def _carry_out(self, outcome: Outcome) -> None:
        match outcome:
            case Order(peer, number, hold):
                self._swarm.send(PeerId.parse(peer), Assign(number, self._model, pack_masks(hold)))
            case Release(peer):
                self._swarm.send(PeerId.parse(peer), Released())
            case KeepLocal(masks):
                self._swarm.keep_local(masks)
            case Planned(placement, why):
                self.plan = {**summary(placement, why), "has_file": self._has_file}
                self._emit("plan", **self.plan)


def summary(placement: Any, why: str) -> dict[str, Any]:
    """A plan in figures, for people and for `status`."""
    estimate = placement.estimate
    return {
        "why": why,
        "workers": {
            peer: sum(mask.bit_count() for mask in masks.values()) for peer, masks in placement.holdings.items()
        },
        "local": sum(mask.bit_count() for mask in placement.local.values()),
        "uncovered": sum(mask.bit_count() for mask in placement.uncovered.values()),
        "step_ms": round(estimate.step_s * 1e3, 3) if math.isfinite(estimate.step_s) else None,
        "round_trips_per_token": round(estimate.round_trips_per_token, 3),
        "workers_per_token": round(estimate.workers_per_token, 3),
    }


def pace(path_s: float, row_s: float, answer_s: float, rows: float) -> tuple[float, float]:
    """What an answer takes beyond its rows, and what a row takes: seconds.

    `path_s` is the path's round trip, `row_s` what the worker says of itself, `answer_s` what answers of `rows` have
    taken lately. A worker that has become faster says so late: no row takes longer than its share of an answer.
    """
    row_s = min(row_s, answer_s / max(rows, 1.0))
    return max(path_s, answer_s - row_s * rows), row_s
