"""Who is to hold what: reports of the workers in, assignments out. Pure; the planner decides, this says when and how.

One member coordinates, the one that founded the swarm. A change goes in steps, so that serving never stops: everybody
is told to hold what only it has, what it will have, and what it has, in this order and as far as its budget goes; again
when all have that; and when all have what the plan says, to hold nothing else. Only where no step helps (full workers
that exchange) is something given up that nobody else holds yet.

    somebody came                 plan SETTLE_S after the last one came
    somebody came back            plan after BACK_S: with others that come back nothing has to be moved
    an expert is with nobody      plan at once
    a holder of spares is gone    plan after RETURN_S: a device that restarts brings its slices back
    somebody wants to leave       plan without it, release it when the others have what it held
    a worker is linked anew       its last order again, under a new number
    routing changed               look every REVIEW_S, change only for a clear gain (planner.replan)
    it has trouble, or cannot be called: plan without it; with it again when that is over
    it is not heard any more      for RETURN_S at most nothing is moved that does not have to be: it may come back, or
                                  turn out to be gone; then plan without it
    a worker's speed changed      look SPEED_S after that, not more often than QUICK_REVIEW_S

A worker that the plan has no use for holds a few experts all the same, those asked for most: dispatch sends it a copy
of a call now and then, and it measures itself, and so it is known when it has become useful. One that was useful only
until it was used waits ever longer for the next try (`second_chance.py`).

What members say of themselves can make this node plan, but not without end: between two plans lie at least GAP_S, and
much more time than a plan takes, unless experts are lost.

Called by `swarmnode/coordination/lead.py`, which owns the clock and the connections.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmnode.coordination.orders import KeepLocal, Order, Outcome, Planned, Release, Standing
from swarmnode.coordination.second_chance import SecondChances
from swarmnode.placement.planner import estimate, plan, replan
from swarmnode.placement.request import F64, I32, Holdings, Placement, PlanRequest, WorkerSpec

SETTLE_S = 1.0  # devices that are started together come together
BACK_S = 5.0  # … and those that were here before come back over several seconds, when this node or a network was away
RETURN_S = 20.0  # a restart takes a few seconds, loading a large slice more
REVIEW_S = 30.0
QUICK_REVIEW_S = 10.0
SPEED_S = 3.0  # several workers of one bad link become slow together
SPEED_FACTOR = 1.5  # of what a call takes: less than this changes with every busy moment
SPEED_LEAST_S = 0.002  # and changes smaller than this are a scheduler's
CARRY_OUT_S = 120.0  # without any progress; then it is planned around, until it has carried out what it was told
GAP_S = 2.0
GAP_FACTOR = 10.0  # of the time that the last plan took to make


_URGENT = frozenset({"experts were lost", "a worker leaves", "a worker is not trusted any more"})


@dataclass(slots=True)
class _Worker:
    standing: Standing
    distrusted: str = ""  # why it is never used again
    leaving: bool = False
    is_late: bool = False  # makes no progress with what it was told
    callable: bool = True  # this node's client reaches it
    silent_at: float = math.inf  # since when nothing comes from it
    ordered: Holdings = field(default_factory=dict)  # what it was told last
    number: int = 0
    progress_at: float = 0.0
    tell_again: bool = False
    planned_s: float = 0.0  # what a call took when it was last planned with

    @property
    def usable(self) -> bool:
        out = self.leaving or self.distrusted or self.is_late or self.standing.trouble
        return not out and self.callable

    @property
    def carried_out(self) -> bool:
        return self.standing.pinned or self.standing.assignment == self.number

    @property
    def lacks(self) -> bool:
        """Does it not hold what it was told to?"""
        return any(mask & ~self.standing.held.get(site, 0) for site, mask in self.ordered.items())


class Coordinator:
    """See the module. `request` describes the model and this node: its `workers` are not looked at.

    `after`: orders are numbered from here on, so that those of a coordinator that restarted are newer than before.
    """

    def __init__(self, request: PlanRequest, after: int = 0) -> None:
        self._request = request
        self._workers: dict[str, _Worker] = {}
        self._plan: Placement | None = None
        self._number = after
        self._due = math.inf  # when to plan
        self._silent_since = math.inf  # when the first of those who are not heard fell silent
        self._why = ""
        self._review = math.inf
        self._reviewed = -math.inf
        self._targets: dict[str, Holdings] = {}  # the plan's, and what keeps the others known
        self._final = True  # the plan's last step is ordered
        self._is_shared = False  # others generate too
        self._distrusted: dict[str, str] = {}
        self._planned_at = -math.inf
        self._took = 0.0  # seconds, the last plan
        self._chances = SecondChances(lambda then, now: now > then and _differ(then, now))

    # ---- what happens

    def report(self, standing: Standing, now: float) -> None:
        """A worker says how it is; the first report makes it a member of plans."""
        known = self._workers.get(standing.peer)
        if known is None:
            worker = _Worker(standing, self._distrusted.get(standing.peer, ""), progress_at=now)
            self._workers[standing.peer] = worker
            if self._has_its_part(worker):
                worker.ordered, worker.tell_again = self._targets[standing.peer], True
                return
            has_slices = any(standing.held.values())  # and serves them, whether there is a plan or not
            self._want(now + (BACK_S if has_slices else SETTLE_S), "a worker came")
            return
        before, was_usable = known.standing, known.usable
        known.standing = standing
        if standing.held != before.held or standing.fetched != before.fetched:
            known.progress_at = now
        if known.is_late and known.carried_out:
            known.is_late = False
        if known.number and known.carried_out and not standing.pinned and known.lacks:
            known.tell_again = True
        if known.usable != was_usable:
            self._want(now + SETTLE_S, "a worker recovered" if known.usable else "a worker has trouble")
        elif (standing.budget, standing.pinned) != (before.budget, before.pinned):
            self._want(now + SETTLE_S, "a worker's budget changed")
        elif _differ(self._call_s(standing, now), known.planned_s):
            self._review = min(self._review, max(now + SPEED_S, self._reviewed + QUICK_REVIEW_S))

    def returned(self, peer: str, now: float) -> None:
        """A worker reports over a new link: its last order may not have arrived, or not have outlived its restart."""
        worker = self._workers.get(peer)
        if worker is None:
            return
        worker.tell_again = worker.number > 0
        worker.progress_at = now
        if worker.leaving:
            worker.leaving = False
            self._want(now + SETTLE_S, "a worker came")

    def reached(self, peer: str, is_so: bool, now: float) -> None:
        """This node's client can call a worker, or cannot."""
        worker = self._workers.get(peer)
        if worker is not None and worker.callable != is_so:
            worker.callable = is_so
            self._want(now + SETTLE_S, "a worker can be called" if is_so else "a worker cannot be called")

    def heard(self, peer: str, is_so: bool, now: float) -> None:
        """Something comes from a worker again, or nothing any more: it may be gone, which is known for sure later."""
        worker = self._workers.get(peer)
        if worker is None or (worker.silent_at == math.inf) == is_so:
            return
        worker.silent_at = math.inf if is_so else now
        if is_so:
            self.reached(peer, True, now)
        self._note_silence(now)

    def gone(self, peer: str, now: float) -> None:
        """A worker's connection is lost, or its record has expired."""
        worker = self._workers.pop(peer, None)
        self._note_silence(now)
        self._chances.gone(peer)
        if worker is None or self._plan is None:
            return
        if worker.leaving:
            return  # planned around already
        lost = self._held_nowhere()
        self._want(now if lost else now + RETURN_S, "experts were lost" if lost else "a worker is gone")

    def leaving(self, peer: str, now: float) -> None:
        """A worker wants to go."""
        worker = self._workers.get(peer)
        if worker is not None and not worker.leaving:
            worker.leaving = True
            self._want(now, "a worker leaves")

    def stays_out(self, peer: str, why: str, now: float) -> None:
        """A worker is not to be trusted with anything any more, whatever it comes back as."""
        self._distrusted[peer] = why
        worker = self._workers.get(peer)
        if worker is not None and not worker.distrusted:
            worker.distrusted = why
            self._want(now, "a worker is not trusted any more")

    def others_generate(self, is_so: bool, now: float) -> None:
        """There are members beside this node that generate, or not any more: they cannot use what this node keeps."""
        if is_so != self._is_shared:
            self._is_shared = is_so
            if self._workers:
                self._want(now + SETTLE_S, "others generate too" if is_so else "nobody else generates any more")

    def learn(self, weights: Mapping[int, F64], pairs: Mapping[int, F64], samples: Mapping[int, I32]) -> None:
        """Newer routing statistics: per site, as in PlanRequest."""
        self._request = replace(self._request, weights=weights, pairs=pairs, samples=samples)

    def took(self, seconds: float) -> None:
        """How long the last step was computed."""
        self._took = seconds

    def failed(self, now: float) -> None:
        """The last step could not be made: try again later."""
        self._want(now + REVIEW_S, "the last plan failed")

    # ---- what follows

    @property
    def placement(self) -> Placement | None:
        """The plan that is carried out."""
        return self._plan

    def next_due(self) -> float:
        """When `step` has something to do if nothing happens before."""
        due = min(self._due, self._review)
        return due if self._why in _URGENT else max(due, self._waits_until())

    def step(self, now: float) -> list[Outcome]:
        """Plan where it is time to, order what is to be ordered next."""
        outcomes: list[Outcome] = []
        for peer, worker in self._workers.items():
            if now >= worker.silent_at + RETURN_S:
                self.reached(peer, False, now)
        waits = now < self._waits_until()
        if now >= self._due and not (waits and self._why not in _URGENT):
            why, self._due, self._why = self._why, math.inf, ""
            self._adopt(self._planned(now), why, now, outcomes)
        elif now >= self._review and not waits:
            self._looked_at(now)
            if self._plan is not None and self._final:
                better = self._better(self._plan, now)
                if better is not None:
                    self._adopt(better, "routing or speeds changed", now, outcomes)
        for peer, worker in self._workers.items():
            if worker.tell_again and worker.usable and self._bytes(worker.ordered) <= worker.standing.budget:
                self._order(peer, worker, worker.ordered, now, outcomes)
        self._go_on(now, outcomes)
        return outcomes

    # ---- how

    def _waits_until(self) -> float:
        """Until when nothing is moved because somebody whom the plan counts on is not heard.

        However many fall silent in turns: RETURN_S after the first of them.
        """
        for peer, worker in self._workers.items():
            counts = any(worker.standing.held.values()) or any(self._targets.get(peer, {}).values())
            if worker.silent_at < math.inf and worker.usable and counts and self._plan is not None:
                return self._silent_since + RETURN_S
        return -math.inf

    def _note_silence(self, now: float) -> None:
        if all(worker.silent_at == math.inf for worker in self._workers.values()):
            self._silent_since = math.inf
        else:
            self._silent_since = min(self._silent_since, now)

    def _has_its_part(self, worker: _Worker) -> bool:
        """Did it come back with what the plan gives it, before there was another? Then nothing has to be planned."""
        target = self._targets.get(worker.standing.peer)
        if not target or not worker.usable:
            return False
        if any(mask & ~worker.standing.held.get(site, 0) for site, mask in target.items()):
            return False
        if self._why == "a worker is gone" and all(peer in self._workers for peer in self._targets):
            self._due, self._why = math.inf, ""
        return True

    def _want(self, at: float, why: str) -> None:
        if why not in _URGENT:
            at = max(at, self._planned_at + max(GAP_S, GAP_FACTOR * self._took))
        first = why in _URGENT and self._why not in _URGENT  # what waits for somebody may be due long since
        if first or at < self._due or not math.isfinite(self._due):
            self._due, self._why = at, why
        elif why == "a worker came":
            self._due = max(self._due, min(at, self._due + SETTLE_S))

    def _planned(self, now: float) -> Placement:
        asked = self._asked(now)
        own = plan(asked)
        if not self._is_shared or not own.local:
            return own
        return self._for_all(asked, own, plan(replace(asked, local_budget=0)))

    def _better(self, current: Placement, now: float) -> Placement | None:
        asked = self._asked(now)
        if not self._is_shared or not current.local:
            return replan(asked, current)
        everything = replan(replace(asked, local_budget=0), replace(current, local={}))
        return None if everything is None else self._for_all(asked, current, everything)

    @staticmethod
    def _for_all(asked: PlanRequest, own: Placement, everything: Placement) -> Placement:
        """Workers hold what this node keeps too, where they have room for everything."""
        if everything.uncovered:
            return own
        return replace(everything, local=own.local, estimate=estimate(asked, everything.holdings, own.local))

    def _asked(self, now: float) -> PlanRequest:
        speeds = {peer: self._speed(worker.standing, now) for peer, worker in self._workers.items()}
        specs = [
            WorkerSpec(
                peer=peer,
                budget=worker.standing.budget,
                rtt_s=speeds[peer][0],
                row_s=speeds[peer][1],
                byte_s=0.0,
                held=worker.standing.held,
                pinned=worker.standing.pinned,
                usable=worker.usable,
            )
            for peer, worker in sorted(self._workers.items())
        ]
        return replace(self._request, workers=specs)

    def _adopt(self, placement: Placement, why: str, now: float, outcomes: list[Outcome]) -> None:
        before = self._plan
        self._plan, self._final, self._planned_at = placement, False, now
        self._note_shares(placement, now)
        self._looked_at(now)
        self._targets = self._wanted_of_each()
        if before is None or before.local != placement.local:
            outcomes.append(KeepLocal(placement.local))
        outcomes.append(Planned(placement, why))
        self._next_step(now, outcomes)

    def _note_shares(self, placement: Placement, now: float) -> None:
        """Whoever has less now because it is slow will not be believed at once when it seems to be fast again."""
        shown = {peer: worker.standing for peer, worker in self._workers.items() if worker.usable}
        calls = {peer: self._call_s(standing, now) for peer, standing in shown.items() if standing.row_s}
        ordered = sorted(calls.values())
        for peer in self._workers:
            if peer not in shown:
                self._chances.gone(peer)
                continue
            share = sum(mask.bit_count() for mask in placement.holdings.get(peer, {}).values())
            call_s = calls.get(peer, 0.0)
            others_s = _median_without(ordered, call_s)
            self._chances.planned(peer, share, call_s, others_s, (shown[peer].rtt_s, shown[peer].row_s), now)

    def _go_on(self, now: float, outcomes: list[Outcome]) -> None:
        """The next step, and releases, once everybody has what the one before says."""
        if self._plan is None:
            return
        for worker in self._workers.values():
            if worker.usable and not worker.carried_out and now - worker.progress_at > CARRY_OUT_S:
                worker.is_late = True
                self._want(now, "a worker does not take its experts")
        settled = all(worker.carried_out for worker in self._workers.values() if worker.usable)
        if settled and not math.isfinite(self._due) and not self._final and now >= self._waits_until():
            self._next_step(now, outcomes)
        is_done = settled and self._final and not math.isfinite(self._due)
        for peer, worker in self._workers.items():
            if worker.leaving and (is_done or self._can_spare(peer, worker)):
                outcomes.append(Release(peer))

    def _can_spare(self, peer: str, worker: _Worker) -> bool:
        """Is everything that it holds held by others, or planned to be with nobody?"""
        assert self._plan is not None
        return not any(
            mask
            & ~(self._plan.local.get(site, 0) | self._plan.uncovered.get(site, 0) | self._held_by_others(peer, site))
            for site, mask in worker.standing.held.items()
        )

    def _order(self, peer: str, worker: _Worker, hold: Holdings, now: float, outcomes: list[Outcome]) -> None:
        if worker.number and worker.ordered == hold and not worker.tell_again:
            return
        worker.tell_again = False
        self._number += 1
        worker.number, worker.ordered, worker.progress_at = self._number, hold, now
        outcomes.append(Order(peer, self._number, hold))

    def _next_step(self, now: float, outcomes: list[Outcome]) -> None:
        """Order what brings the plan nearer; the plan itself where all is there, or nothing else helps."""
        there = {peer: worker for peer, worker in self._workers.items() if worker.usable and not worker.standing.pinned}
        missing = any(
            mask & ~worker.standing.held.get(site, 0)
            for peer, worker in there.items()
            for site, mask in self._targets.get(peer, {}).items()
        )
        holds = self._careful_step(there) if missing else {}
        self._final = not missing or all(there[peer].number and there[peer].ordered == h for peer, h in holds.items())
        for peer, worker in there.items():
            hold = self._targets.get(peer, {}) if self._final else holds[peer]
            self._order(peer, worker, hold, now, outcomes)

    def _careful_step(self, there: Mapping[str, _Worker]) -> dict[str, Holdings]:
        """For each worker what only it has or the plan leaves it, what the plan gives it, and what else it has.

        What two have and neither is to have, one of them keeps.
        """
        assert self._plan is not None
        kept = dict(self._plan.local)  # by those who have it, from now on
        for peer, worker in self._workers.items():
            if worker.usable:
                for site, mask in worker.standing.held.items():
                    stays = mask if worker.standing.pinned else mask & self._targets.get(peer, {}).get(site, 0)
                    kept[site] = kept.get(site, 0) | stays
        holds: dict[str, Holdings] = {}
        for peer, worker in there.items():
            target, held, room = self._targets.get(peer, {}), worker.standing.held, worker.standing.budget
            hold: dict[int, int] = {}
            ways = (
                {site: mask & (target.get(site, 0) | ~kept.get(site, 0)) for site, mask in held.items()},
                target,
                held,
            )
            for number, masks in enumerate(ways):
                for site, mask in masks.items():
                    fits = max(0, room) // max(1, self._request.expert_bytes[site])
                    chosen = _lowest(mask & ~hold.get(site, 0), fits)
                    room -= chosen.bit_count() * self._request.expert_bytes[site]
                    if chosen:
                        hold[site] = hold.get(site, 0) | chosen
                    if number == 0:
                        kept[site] = kept.get(site, 0) | chosen
            holds[peer] = hold
        return holds

    def _wanted_of_each(self) -> dict[str, Holdings]:
        """The plan's holdings, and a few experts for each worker that it has no use for."""
        assert self._plan is not None
        targets = dict(self._plan.holdings)
        idle = [peer for peer, worker in self._workers.items() if worker.usable and not targets.get(peer)]
        if idle:
            shares = {site: weights / (weights.sum() or 1.0) for site, weights in self._request.weights.items()}
            site = max(shares, key=lambda s: (float(shares[s].max()), -s))
            hottest = shares[site].argsort(kind="stable")[::-1].tolist()
            for peer in idle:
                room = self._workers[peer].standing.budget // max(1, self._request.expert_bytes[site])
                if few := hottest[: min(self._request.k[site], room)]:
                    targets[peer] = {site: sum(1 << expert for expert in few)}
        return targets

    def _looked_at(self, now: float) -> None:
        self._review, self._reviewed = now + max(REVIEW_S, 2 * GAP_FACTOR * self._took), now
        for worker in self._workers.values():
            worker.planned_s = self._call_s(worker.standing, now)

    def _call_s(self, standing: Standing, now: float) -> float:
        """What a call of one token takes whose experts are all there."""
        rtt_s, row_s = self._speed(standing, now)
        return rtt_s + max(self._request.k.values(), default=1) * row_s

    def _speed(self, standing: Standing, now: float) -> tuple[float, float]:
        """(rtt_s, row_s) of a worker, as far as it is believed."""
        return self._chances.believed(standing.peer, standing.rtt_s, standing.row_s, now)

    def _held_by_others(self, peer: str, site: int) -> int:
        held = 0
        for other, worker in self._workers.items():
            if other != peer and worker.usable:
                held |= worker.standing.held.get(site, 0)
        return held

    def _held_nowhere(self) -> bool:
        """Is there an expert of the plan that no live worker holds and this node does not keep?"""
        assert self._plan is not None
        for site, n_expert in self._request.n_expert.items():
            held = self._plan.local.get(site, 0) | self._plan.uncovered.get(site, 0) | self._held_by_others("", site)
            if held != (1 << n_expert) - 1:
                return True
        return False

    def _bytes(self, masks: Mapping[int, int]) -> int:
        return sum(mask.bit_count() * self._request.expert_bytes[site] for site, mask in masks.items())


def _differ(one: float, other: float) -> bool:
    return max(one, other) > min(one, other) * SPEED_FACTOR + SPEED_LEAST_S


def _median_without(ordered: Sequence[float], one: float) -> float:
    """The (lower) median of what is left without `one`, where it is there; `one` itself where nothing is left."""
    at = bisect_left(ordered, one)
    is_there = at < len(ordered) and ordered[at] == one
    left = len(ordered) - is_there
    if not left:
        return one
    middle = (left - 1) // 2
    return ordered[middle + (is_there and at <= middle)]


def _lowest(mask: int, count: int) -> int:
    """The `count` lowest bits of a mask."""
    if count >= mask.bit_count():
        return mask
    chosen = 0
    for _ in range(count):
        low = mask & -mask
        chosen |= low
        mask ^= low
    return chosen
