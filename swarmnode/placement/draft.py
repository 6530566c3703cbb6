"""A placement in the making: who holds what so far, and how much room each worker has left.

Pure. Owned by `planner`, which decides; here is the book-keeping, and how parts of sites are packed onto workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from swarmnode.placement import coactivation
from swarmnode.placement.estimate import Estimator
from swarmnode.placement.request import Bools, Holdings, Placement, mask

Index = NDArray[np.int64]
SPLIT_BALANCE = 1.2  # load of a worker that shares a site, over its share of the memory that was given for it
ALIKE = 1.25  # workers whose calls take up to so many times as long count as equally near
# One that takes up to so many times as long, or whose path alone is longer by up to near_s (what is measured at first
# on busy machines), holds an only copy rather than nobody.
SPARE = 2.0
FETCHED_ALREADY = 1.0  # a worker that has a part on its disk may be so much fuller (of its budget) and still get it


class Draft:
    """See the module. Workers are numbered as in the estimator; tables are site -> [workers, n_expert]."""

    def __init__(self, estimator: Estimator, local: Mapping[int, Bools]) -> None:
        self.estimator, self.request = estimator, estimator.request
        workers = estimator.workers
        self.budget = np.array([0 if w.pinned else int(w.budget) for w in workers], np.int64)
        self.pinned = np.array([w.pinned for w in workers], bool)
        self.on_disk = estimator.arrays({w.peer: w.held for w in workers})
        self.local = {site: chosen.copy() for site, chosen in local.items()}
        self.held = {site: table & self.pinned[:, None] for site, table in self.on_disk.items()}
        self.room = self.budget.copy()

    def copy(self) -> Draft:
        """An independent draft, as this one is now."""
        other = object.__new__(Draft)
        other.__dict__.update(self.__dict__)
        other.local = {site: chosen.copy() for site, chosen in self.local.items()}
        other.held = {site: table.copy() for site, table in self.held.items()}
        other.room = self.room.copy()
        return other

    def give(self, worker: int, site: int, experts: Index | Sequence[int]) -> None:
        """Let a worker hold experts that it does not hold; there must be room."""
        self.held[site][worker, experts] = True
        self.room[worker] -= len(experts) * self.request.expert_bytes[site]

    def take(self, worker: int, site: int, experts: Index | Sequence[int]) -> None:
        """Let it hold them no longer."""
        self.held[site][worker, experts] = False
        self.room[worker] += len(experts) * self.request.expert_bytes[site]

    def uncovered(self) -> dict[int, Index]:
        """Site -> experts that nobody holds, neither a worker nor this node; sites without any are left out."""
        missing = {site: np.flatnonzero(~self.local[site] & ~self.held[site].any(axis=0)) for site in self.held}
        return {site: experts for site, experts in missing.items() if len(experts)}

    def pack(self, parts: Mapping[int, Index], workers: Sequence[int], ways: int = 1) -> None:
        """Place parts (site -> experts) on these workers, each on `ways` of them; what finds no room stays uncovered.

        Parts that a worker has on its disk go first and go there; then the largest. A part that fits nowhere whole is
        shared by as few as can hold it, split by co-activation. Sharing by choice (`ways` > 1) is for workers that
        compute slowly: there the rows of one token should be spread, so that split is by load alone.
        """
        seats = np.array(workers, np.int64)
        disk = {site: self.on_disk[site][np.ix_(seats, experts)].mean(axis=1) for site, experts in parts.items()}
        size = {site: len(experts) * self.request.expert_bytes[site] for site, experts in parts.items()}
        order = sorted(parts, key=lambda site: (-round(float(disk[site].max(initial=0)), 2), -size[site], site))
        for site in order:
            self._place(site, parts[site], list(workers), disk[site], ways)

    def _place(self, site: int, experts: Index, workers: list[int], disk: NDArray[np.float64], ways: int) -> None:
        per_expert = self.request.expert_bytes[site]
        seats = {worker: int(self.room[worker] // per_expert) for worker in workers}

        def fullness(at: int, share: int) -> tuple[float, int]:
            worker = workers[at]
            used = self.budget[worker] - self.room[worker] + share * per_expert
            return used / max(int(self.budget[worker]), 1) - FETCHED_ALREADY * float(disk[at]), worker

        ways = min(ways, len(workers), len(experts))
        if ways <= 1:
            whole = [at for at, worker in enumerate(workers) if seats[worker] >= len(experts)]
            if whole:
                self.give(workers[min(whole, key=lambda at: fullness(at, len(experts)))], site, experts)
                return
            self._share(site, experts, self._fewest(workers, seats, len(experts)), even=False)
            return
        share = -(-len(experts) // ways)
        roomy = [at for at, worker in enumerate(workers) if seats[worker] >= share]
        chosen = [workers[at] for at in sorted(roomy, key=lambda at: fullness(at, share))[:ways]]
        takes = {worker: seats[worker] for worker in chosen}
        enough = len(chosen) == ways
        self._share(site, experts, takes if enough else self._fewest(workers, seats, len(experts)), even=enough)

    @staticmethod
    def _fewest(workers: list[int], seats: Mapping[int, int], n: int) -> dict[int, int]:
        """Worker -> experts it takes of n: those with most room, and for what is left the one that it fits best."""
        chosen: dict[int, int] = {}
        while n > 0:
            free = [worker for worker in workers if seats[worker] and worker not in chosen]
            if not free:
                break
            enough = [worker for worker in free if seats[worker] >= n]
            worker = min(enough, key=lambda w: (seats[w], w)) if enough else max(free, key=lambda w: (seats[w], -w))
            chosen[worker] = min(n, seats[worker])
            n -= chosen[worker]
        return chosen

    def _share(self, site: int, experts: Index, takes: Mapping[int, int], *, even: bool) -> None:
        """takes: worker -> experts that it may take; together they may be fewer than there are."""
        workers, room = list(takes), list(takes.values())
        experts = experts[: sum(room)]  # in the order of the part: what is most wanted first
        if not len(experts):
            return
        weights = self.estimator.chances(site)[experts]
        if even:
            speeds = (1.0 / np.maximum(self.estimator.row_s[workers], 1e-9)).tolist()
            seat = coactivation.load_only(weights, room, speeds)
        else:
            pairs = self.estimator.pairs(site)[np.ix_(experts, experts)]
            seat = coactivation.split(weights, pairs, room, shares=room, max_over_mean=SPLIT_BALANCE)
        for number, worker in enumerate(workers):
            mine = experts[seat == number]
            if len(mine):
                self.give(worker, site, mine)

    def add_copies(self) -> None:
        """Fill the room that is left with further copies, the hottest experts first, up to the number asked for.

        One part's copies go to one other worker, so that they still answer together when theirs is gone; different
        parts of one worker go to different ones as room allows. A slower worker that dispatch cannot tell from the
        holder gets none, as it would be asked in its place, unless it is not much slower and there is no other: then
        losing the holder would lose the expert.
        """
        request, estimator = self.request, self.estimator
        if not len(self.room):
            return
        hottest = []
        for site in request.n_expert:
            chances = estimator.chances(site)
            open_ = np.flatnonzero(~self.local[site] & self.held[site].any(axis=0))
            hottest += list(zip((-chances[open_]).tolist(), [site] * len(open_), open_.tolist(), strict=True))
        hottest.sort()
        for copies in range(2, request.replicas + 1):
            found = {site: table.sum(axis=0).tolist() for site, table in self.held.items()}
            first = {site: table.argmax(axis=0).tolist() for site, table in self.held.items()}
            helper: dict[tuple[int, int], int] = {}  # (site, holder) -> who has its copies
            for _, site, expert in hottest:
                if found[site][expert] >= copies:
                    continue
                part = site, first[site][expert]
                worker = helper.get(part)
                if worker is None or self.room[worker] < request.expert_bytes[site] or self.held[site][worker, expert]:
                    worker = self._helper(site, expert, only=found[site][expert] == 1)
                    if worker is None:
                        continue
                    helper[part] = worker
                self.held[site][worker, expert] = True
                self.room[worker] -= request.expert_bytes[site]

    def _helper(self, site: int, expert: int, *, only: bool) -> int | None:
        estimator = self.estimator
        roomy = np.flatnonzero(self.room >= self.request.expert_bytes[site])
        if not len(roomy):
            return None
        holders = np.flatnonzero(self.held[site][:, expert])
        nearest = estimator.cost_s[holders].min(), estimator.classes[holders].min()
        best, best_key = None, (0.0, 0)
        for worker in roomy.tolist():
            if self.held[site][worker, expert]:
                continue
            cost, least = float(estimator.cost_s[worker]), float(nearest[0])
            slower = cost > ALIKE * least
            drags = slower and bool(estimator.classes[worker] <= nearest[1])
            computes_alike = estimator.row_s[worker] <= ALIKE * estimator.row_s[holders].min()
            bearable = cost <= SPARE * least or (computes_alike and cost <= least + self.request.near_s)
            if drags and not (only and bearable):
                continue
            disk = float(self.on_disk[site][worker, expert])
            used = 1 - float(self.room[worker]) / max(int(self.budget[worker]), 1)
            key = (used + slower + 2 * drags - 0.5 * disk, worker)
            if best is None or key < best_key:
                best, best_key = worker, key
        return best

    def drop_copies(self, worker: int, size: int) -> None:
        """Make `size` bytes of room on a worker, if what others hold too is enough for that: the coldest first."""
        found = []
        for site, table in self.held.items():
            spare = table[worker] & (self.local[site] | (table.sum(axis=0) > 1))
            chances = self.estimator.chances(site)
            found += [(float(chances[e]), site, e) for e in np.flatnonzero(spare).tolist()]
        for _, site, expert in sorted(found):
            if self.room[worker] >= size:
                return
            self.take(worker, site, [expert])

    def finish(self) -> Placement:
        """The draft as an answer."""
        holdings: dict[str, Holdings] = {}
        for number, worker in enumerate(self.estimator.workers):
            sites = {site: mask(table[number]) for site, table in self.held.items() if table[number].any()}
            if sites:
                holdings[worker.peer] = sites
        missing = {site: ~self.local[site] & ~table.any(axis=0) for site, table in self.held.items()}
        return Placement(
            holdings=holdings,
            local={site: mask(chosen) for site, chosen in self.local.items() if chosen.any()},
            uncovered={site: mask(experts) for site, experts in missing.items() if experts.any()},
            estimate=self.estimator.total(self.held, self.local),
        )
