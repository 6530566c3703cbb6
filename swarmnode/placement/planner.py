"""Decides who holds what: the backbone's own hot experts, each worker's share, the copies.

Pure. `plan` starts from nothing (but prefers what is on a worker's disk), `replan` from what is. Called by the
coordinator with a fresh `PlanRequest` whenever workers come, go or change, and now and then as routing drifts.

The order of what counts. (1) Every expert is held by somebody. (2) Few round trips: the backbone's own budget goes to
experts that make whole selections local (`hot_set`). (3) No round trip to a slow worker that a normal step could do
without: workers are ordered by what a call to them takes, in groups that are alike, and the experts most wanted
together go to the nearest group that has room; a far group gets the tail, and nothing but copies where the near ones
hold everything. (4) Few workers per token: whole sites on one worker; a site that must be shared is split by
co-activation. Where workers compute so slowly that sharing a site pays, the estimate says so: it decides between a few
such variants. (5) Copies with the memory that is left. (6) Nothing moves for less than a clear gain.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from swarmnode.placement.draft import ALIKE, Draft
from swarmnode.placement.estimate import Estimator, estimate
from swarmnode.placement.hot_set import Curve, Step, curve, fill, steps
from swarmnode.placement.request import Bools, Estimate, Placement, PlanRequest, WorkerSpec, bools

__all__ = ["Estimate", "Placement", "PlanRequest", "WorkerSpec", "estimate", "plan", "replan"]

Index = NDArray[np.int64]

MIN_GAIN = 0.10  # of a step: below this, moving experts costs more than it will have saved when routing changes again
MIN_SECURED = 0.05  # of the selected remote experts: more of them with a copy is worth fetching copies
SAME = 1.02  # estimates this close are equal: round trips are not measured better
MAX_PREFIXES = 6  # sets of near workers that are tried


def plan(request: PlanRequest) -> Placement:
    """The best placement found for a request, whatever is held now."""
    return _Planner(request).plan()


def replan(request: PlanRequest, current: Placement) -> Placement | None:
    """A better placement than `current`, or None where nothing is worth moving.

    What is held stays where it is as far as workers and budgets allow; experts that lost their holder get a new one,
    lost copies are made again. Only where planning afresh makes a step at least MIN_GAIN shorter, or covers more, does
    more than that move.
    """
    return _Planner(request).replan(current)


class _Planner:
    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.estimator = Estimator(request)
        self.curves: dict[int, Curve] = {
            site: curve(self.estimator.chances(site), samples) for site, samples in self.estimator.samples.items()
        }
        self.steps: list[Step] = steps(self.curves, request.expert_bytes)
        self.none = {site: np.zeros(n, bool) for site, n in request.n_expert.items()}

    def plan(self) -> Placement:
        request, estimator = self.request, self.estimator
        nowhere = dict.fromkeys(request.n_expert, 0)
        near = fill(self.steps, self.curves, request.expert_bytes, nowhere, int(request.local_budget))
        empty = Draft(estimator, self._prefixes(near))
        drafts = []
        placeable = [w for w in range(len(estimator.workers)) if empty.budget[w] > 0]
        prefixes = self._prefixes_of_workers(placeable, empty)
        for workers in prefixes:
            for ways in self._ways(workers) if workers in (prefixes[0], prefixes[-1]) else (1,):
                draft = empty.copy()
                self._fill_tiers(draft, near, workers, placeable, ways)
                draft.add_copies()  # before judging: dispatch may ask a copy instead
                drafts.append((draft, estimator.total(draft.held, draft.local)))
        if not drafts:
            drafts = [(empty, estimator.total(empty.held, empty.local))]
        covered = min(cost.uncovered for _, cost in drafts) + 1e-9
        whole = [(draft, cost) for draft, cost in drafts if cost.uncovered <= covered]
        best = min(cost.step_s for _, cost in whole) * SAME
        # Of those as good, the last that was tried: it spreads over the most workers.
        chosen = [draft for draft, cost in whole if cost.step_s <= best][-1]
        return chosen.finish()

    def _prefixes(self, lengths: Mapping[int, int]) -> dict[int, Bools]:
        chosen = {site: none.copy() for site, none in self.none.items()}
        for site, length in lengths.items():
            chosen[site][self.curves[site].order[:length]] = True
        return chosen

    def _prefixes_of_workers(self, placeable: list[int], empty: Draft) -> list[list[int]]:
        """The nearest 1, 2, 3… workers: from the fewest that hold everything to all; a few where there are many.

        Everything: without what pinned workers hold already, since it may turn out that they do.
        """
        total = sum(len(experts) * self.request.expert_bytes[s] for s, experts in empty.uncovered().items())
        room = np.cumsum(empty.budget[placeable])
        least = int(np.searchsorted(room, total)) + 1
        if least >= len(placeable):
            return [placeable] if placeable else []
        counts = list(range(least, len(placeable) + 1))
        if len(counts) > MAX_PREFIXES:
            cost = self.estimator.cost_s[placeable]
            jumps = [count for count in counts[:-1] if cost[count] > ALIKE * cost[count - 1]]
            counts = sorted({*counts[:2], *jumps[: MAX_PREFIXES - 3], counts[-1]})
        return [placeable[:count] for count in counts]

    def _ways(self, workers: list[int]) -> list[int]:
        """Over how many workers sites might be shared; only one, unless their computing is worth sharing."""
        estimator, most = self.estimator, len(workers)
        rows = estimator.k * float(estimator.row_s[workers].mean())
        whole = float(estimator.cost_s[workers].mean())
        paying = [w for w in {2, 3, 4, most} if 1 < w <= most and rows * (1 - 1 / w) > MIN_GAIN * whole]
        return [*sorted(paying, reverse=True), 1]

    def _fill_tiers(
        self,
        draft: Draft,
        near: Mapping[int, int],
        workers: list[int],
        placeable: list[int],
        ways: int,
    ) -> None:
        """The nearest group of `workers` gets what is most wanted together, and so on; leftovers go to any room."""
        request = self.request
        groups = self._groups(workers)
        skipped = self._left_to_pinned(draft, workers)
        reached = dict(near)
        for number, group in enumerate(groups):
            largest = max(request.expert_bytes.values(), default=1)
            room = int((draft.room[group] // largest * largest).sum())  # the coldest go further, not what fits badly
            if number + 1 == len(groups) or self._open_bytes(draft, skipped) <= draft.room[group].sum():
                further = dict(request.n_expert)
            else:
                further = fill(self.steps, self.curves, request.expert_bytes, reached, room)
            parts = {
                site: experts
                for site, order in ((s, c.order) for s, c in self.curves.items())
                if len(experts := self._open(draft, skipped, site, order[: further[site]]))
            }
            draft.pack(parts, group, ways)
            reached = {site: max(at, reached[site]) for site, at in further.items()}
        self._cover(draft, placeable)

    def _open(self, draft: Draft, skipped: Mapping[int, Bools], site: int, experts: Index) -> Index:
        held = draft.held[site][~draft.pinned].any(axis=0) | draft.local[site] | skipped[site]
        still: Index = experts[~held[experts]]
        return still

    def _open_bytes(self, draft: Draft, skipped: Mapping[int, Bools]) -> int:
        left = ((site, self._open(draft, skipped, site, of_site.order)) for site, of_site in self.curves.items())
        return sum(len(experts) * self.request.expert_bytes[site] for site, experts in left)

    def _groups(self, workers: list[int]) -> list[list[int]]:
        """Workers, nearest first, in groups within which all are about as near as the first."""
        groups: list[list[int]] = []
        for worker in workers:
            if groups and self.estimator.cost_s[worker] <= ALIKE * self.estimator.cost_s[groups[-1][0]]:
                groups[-1].append(worker)
            else:
                groups.append([worker])
        return groups

    def _left_to_pinned(self, draft: Draft, workers: list[int]) -> dict[int, Bools]:
        """Experts that only pinned workers will hold, because `workers` have no room: those wanted least."""
        request = self.request
        skipped = {site: none.copy() for site, none in self.none.items()}
        over = -int(draft.budget[workers].sum())
        over += sum(int((~draft.local[site]).sum()) * size for site, size in request.expert_bytes.items())
        for step in reversed(self.steps):
            pinned = draft.held[step.site][draft.pinned].any(axis=0) & ~draft.local[step.site]
            for expert in self.curves[step.site].order[step.first : step.last][::-1]:
                if over <= 0:
                    return skipped
                if pinned[expert]:
                    skipped[step.site][expert] = True
                    over -= request.expert_bytes[step.site]
        return skipped

    def _cover(self, draft: Draft, placeable: list[int]) -> None:
        """What found no room where it was meant to be: to any worker, the nearest that can hold most of it."""
        missing = draft.uncovered()
        if not missing:
            return
        wanted = {site: self.curves[site].order for site in missing}
        parts = {site: order[np.isin(order, missing[site])] for site, order in wanted.items()}
        for group in self._groups(placeable):
            draft.pack(parts, group)
            parts = {
                site: left for site, part in parts.items() if len(left := part[~draft.held[site].any(axis=0)[part]])
            }
            if not parts:
                return

    # Starting from what is.

    def replan(self, current: Placement) -> Placement | None:
        kept, broken = self._kept(current)
        before = self.estimator.total(kept.held, kept.local)
        placeable = [w for w in range(len(self.estimator.workers)) if kept.budget[w] > 0]
        for group in self._groups(placeable):
            if not (missing := kept.uncovered()):
                break
            for worker in group:
                size = sum(len(experts) * self.request.expert_bytes[s] for s, experts in missing.items())
                kept.drop_copies(worker, min(size, int(kept.budget[worker])))
            self._cover(kept, group)
        kept.add_copies()
        repaired = kept.finish()
        fresh = self.plan()
        now, then = repaired.estimate, fresh.estimate
        if then.uncovered < now.uncovered - 1e-9 or (
            then.uncovered <= now.uncovered + 1e-9 and then.step_s < (1 - MIN_GAIN) * now.step_s
        ):
            return fresh
        better = now.uncovered < before.uncovered - 1e-9 or now.secured >= before.secured + MIN_SECURED
        return repaired if better or broken else None

    def _kept(self, current: Placement) -> tuple[Draft, bool]:
        """What is left of `current`: without workers that are gone, within today's budgets; and whether those broke."""
        request, estimator = self.request, self.estimator
        local = {site: bools(current.local.get(site, 0), n) for site, n in request.n_expert.items()}
        broken = False
        over = sum(int(chosen.sum()) * request.expert_bytes[site] for site, chosen in local.items())
        over -= int(request.local_budget)
        for step in reversed(self.steps):
            for expert in self.curves[step.site].order[step.first : step.last][::-1]:
                if over > 0 and local[step.site][expert]:
                    local[step.site][expert] = False
                    over -= request.expert_bytes[step.site]
                    broken = True
        draft = Draft(estimator, local)
        for site, table in estimator.arrays(current.holdings).items():
            table[draft.pinned] = False
            draft.held[site] |= table
            draft.room -= table.sum(axis=1) * request.expert_bytes[site]
        for worker in np.flatnonzero((draft.room < 0) & ~draft.pinned).tolist():
            broken = True
            draft.drop_copies(worker, 0)
            for step in reversed(self.steps):  # copies were not enough: what is wanted least
                for expert in self.curves[step.site].order[step.first : step.last][::-1].tolist():
                    if draft.room[worker] < 0 and draft.held[step.site][worker, expert]:
                        draft.take(worker, step.site, [expert])
        return draft, broken
