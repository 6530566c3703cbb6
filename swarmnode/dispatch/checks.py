"""Spot checks in progress: answers that are computed once more, compared, and what follows.

Owned by `call_runner.py`, loop thread only; which rows are looked at and what counts as the same is `spot_check.py`. A
check chosen by chance is computed during the trip it is about, by this node's own engine or by another holder of the
same experts, so that it costs no time; one of rows that stand out begins when they are there. An answer under check is
held back. Right, it counts; wrong by this node's own engine, its worker is convicted. Where the other computation was
another worker's, a third one is asked, and whoever is alone is suspected: its answer is replaced, and it is asked only
for what nobody else holds. Without a third nobody is, unless one worker has been at odds with two others. The word of
workers alone never convicts: two who collude would have an honest one put out. A worker is its key here, whatever it
calls itself and however often it reconnects: it is no witness for itself.

A check that gets no second computation in time is dropped: the answer counts unchecked. Nor does an answer wait for a
worker that is slower than its own: such a check may still convict, but only for the calls to come.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from swarmnode.dispatch.codec import F32, WireType
from swarmnode.dispatch.hello import mask_of
from swarmnode.dispatch.replicas import LOCAL, Candidate
from swarmnode.dispatch.request import Request, Share
from swarmnode.dispatch.row_screen import COARSEST_SCREENED, Screen
from swarmnode.dispatch.spot_check import SpotChecks, Standouts, agrees

Rows = NDArray[np.intp]
MAX_SCREENED = 256  # rows of one answer: the loop thread must not stand still for a prompt's thousands
log = logging.getLogger(__name__)


class Verdict(Enum):
    """What becomes of an answer that has just come."""

    COUNTS = auto()
    HELD = auto()
    REJECTED = auto()


class CheckHost(Protocol):
    """What checks need of the calls in progress (`check_host.py`)."""

    def next_attempt(self) -> int:
        """Return a number that is never reused."""

    def own_held(self, request: Request) -> int:
        """Return the bitmap of the experts that this node's own engine holds at the request's site."""

    def candidates(self, request: Request) -> list[Candidate]:
        """Return the workers that take calls of this request now."""

    def compute_again(self, attempt: int, by: int, share: Share, subject: int) -> bool:
        """Have LOCAL or a worker compute a share; `computed` or `dropped` follows. False if it cannot be asked."""

    def withdraw(self, attempt: int, by: int) -> None:
        """Have no more interest in that."""

    def patience(self, by: int, n_pairs: int) -> float:
        """Return for how long an answer may be held back for such a computation. Seconds."""

    def release(self, attempt: int) -> None:
        """Let an answer count that was held."""

    def hold(self, attempt: int, seconds: float) -> None:
        """Hold an answer for so long from now on, at most."""

    def reject(self, attempt: int, why: str) -> None:
        """Do without an answer; its worker is not convicted."""

    def convict(self, worker: int, why: str, subject: int) -> None:
        """Never ask this worker again, and replace what it has answered to calls in progress.

        `subject` is the attempt by whose check it came out.
        """

    def suspect(self, worker: int, why: str) -> None:
        """Ask this worker last from now on."""

    def peer(self, worker: int) -> str:
        """Return whose connection a worker is: the same after it has reconnected."""

    def name(self, worker: int) -> str:
        """Return a worker's name for people."""


@dataclass(slots=True, eq=False)
class _Check:
    subject: int  # the attempt whose answer it is about
    worker: int
    share: Share  # the pairs computed once more
    rows: Rows  # of the subject's answer
    by: int  # who computes it now
    afterwards: bool  # the answer does not wait for it
    theirs: F32 | None = None
    others: list[tuple[int, F32]] = field(default_factory=list)  # computations that are there


class Checks:
    """See the module. `wire` gives the coarser of the types that the rows of a site travel in."""

    def __init__(
        self, host: CheckHost, policy: SpotChecks, wire: Callable[[int], WireType], screen: Screen | None
    ) -> None:
        self._host, self._policy, self._wire = host, policy, wire
        self._screen = screen
        self._standouts = Standouts(policy.screened_share)
        self._by_subject: dict[int, list[_Check]] = {}
        self._running: dict[int, _Check] = {}  # by the attempt that computes
        self._at_odds: dict[str, set[str]] = {}

    def asked(self, attempt: int, worker: int, share: Share) -> None:
        """Hear that a worker was asked for a share; perhaps have some of it computed elsewhere meanwhile."""
        chosen = self._policy.choose(self._host.peer(worker), len(share.pairs), share.n_rows_back)
        if chosen:
            self._begin(attempt, worker, share, np.array(chosen, np.intp), None)

    def answered(self, attempt: int, worker: int, share: Share, rows: F32) -> Verdict:
        """Hear an answer; say whether it counts at once. Where it is HELD, the host has been told for how long."""
        for check in self._by_subject.get(attempt, ()):
            check.theirs = rows[check.rows]
        for check in list(self._by_subject.get(attempt, ())):
            if check.others and not self._judge(check):
                return Verdict.REJECTED
        if self._screen is not None:
            self._look(attempt, worker, share, rows)
        open_checks = self._awaited(attempt)
        if not open_checks:
            return Verdict.COUNTS
        self._host.hold(attempt, max(self._host.patience(c.by, len(c.share.pairs)) for c in open_checks))
        return Verdict.HELD

    def owns(self, attempt: int) -> bool:
        """Whether an attempt is a check's computation."""
        return attempt in self._running

    def computed(self, attempt: int, rows: F32) -> None:
        """Hear the rows of a check's computation."""
        check = self._running.pop(attempt, None)
        if check is not None:
            check.others.append((check.by, rows))
            if check.theirs is not None and self._judge(check):
                self._release_if_done(check.subject)

    def dropped(self, attempt: int) -> None:
        """Hear that a check's computation will not come."""
        check = self._running.pop(attempt, None)
        if check is None:
            return
        self._end(check)
        if check.others and check.theirs is not None:  # it was to have been the third opinion
            right = self._agree(check, check.theirs, check.others[0][1])
            if not self._disputed(check, check.others[0][0], _wrong(check, right)):
                return
        if check.theirs is not None:
            self._release_if_done(check.subject)

    def forget(self, subject: int) -> None:
        """Drop the checks of an attempt that nobody needs any more."""
        checks = self._by_subject.pop(subject, [])
        if later := [check for check in checks if check.afterwards and check.theirs is not None]:
            self._by_subject[subject] = later
        for check in checks:
            if check in later:
                continue
            for attempt in [a for a, running in self._running.items() if running is check]:
                del self._running[attempt]
                self._host.withdraw(attempt, check.by)

    def lost(self, worker: int) -> None:
        """Hear that a worker computes nothing more."""
        for attempt in [a for a, check in self._running.items() if check.by == worker]:
            self.dropped(attempt)

    def _look(self, attempt: int, worker: int, share: Share, answer: F32) -> None:
        """Have the rows that stand out computed once more."""
        rows = answer
        single = not share.request.partial or len(share.pairs) == len(share.tokens)
        site, experts, at = share.request.site.index, share.experts, 0
        if not single or self._screen is None or self._wire(site) > COARSEST_SCREENED:
            return
        if len(rows) > MAX_SCREENED:
            at = self._policy.pick(len(rows) - MAX_SCREENED + 1)
            experts, rows = experts[at : at + MAX_SCREENED], rows[at : at + MAX_SCREENED]
        scores = self._screen.score(site, experts, rows)
        if scores is None:
            return
        found = self._standouts.among(site, scores)
        checked = {row - at for check in self._by_subject.get(attempt, ()) for row in check.rows.tolist()}
        # Those that stand out most come first: the budget may not last for all.
        found = sorted((row for row in found if row not in checked), key=lambda row: -float(scores[row]))
        found = [row for row in found if self._policy.allowed_by_screen(1)]
        if found:
            self._begin(attempt, worker, share, np.array(sorted(found), np.intp) + at, answer)

    def _begin(self, attempt: int, worker: int, share: Share, rows: Rows, answer: F32 | None) -> None:
        request = share.request
        held = self._host.own_held(request)
        by, kept, afterwards = LOCAL, self._within(share, rows, held), False
        if not len(kept):
            candidates = self._host.candidates(request)
            own_peer = self._host.peer(worker)
            others = [c for c in candidates if not c.suspended and self._host.peer(c.worker) != own_peer]
            able = [(c, part) for c in others if len(part := self._within(share, rows, c.held))]
            if not able:
                return
            own = max((c.latency_class for c in candidates if c.worker == worker), default=0)
            quick = [(c, part) for c, part in able if c.latency_class <= own]
            afterwards = not quick
            able = quick or able
            candidate, kept = able[self._policy.pick(len(able))]
            by = candidate.worker
        smaller = request.share(self._pairs(share, kept).tolist())
        if afterwards:  # x is the caller's again when the call is over
            smaller = dataclasses.replace(smaller, x=smaller.x.copy())
        check = _Check(attempt, worker, smaller, kept, by, afterwards, None if answer is None else answer[kept])
        if self._compute(check):
            self._by_subject.setdefault(attempt, []).append(check)

    def _compute(self, check: _Check) -> bool:
        attempt = self._host.next_attempt()
        self._running[attempt] = check
        if self._host.compute_again(attempt, check.by, check.share, check.subject):
            return True
        del self._running[attempt]
        return False

    def _pairs(self, share: Share, rows: Rows) -> Rows:
        """The pairs, as the request numbers them, behind these rows of a share's answer."""
        if not share.request.partial:
            return share.pairs[rows]
        return share.pairs[np.isin(share.index, rows)]

    def _within(self, share: Share, rows: Rows, held: int) -> Rows:
        """Those of these rows that somebody who holds `held` can compute."""
        if not held:
            return rows[:0]
        experts = share.experts
        if not share.request.partial:
            return np.array([row for row in rows.tolist() if held >> int(experts[row]) & 1], np.intp)
        masks = {row: mask_of(experts[share.index == row].tolist()) for row in rows.tolist()}
        return np.array([row for row, mask in masks.items() if not mask & ~held], np.intp)

    def _agree(self, check: _Check, rows: F32, reference: F32) -> NDArray[np.bool_]:
        """See `agrees`. An honest answer may have come as F32 where another type was agreed on; that only helps."""
        return agrees(rows, reference, self._wire(check.share.request.site.index))

    def _judge(self, check: _Check) -> bool:
        """Compare what is there; return False where the answer's worker was convicted or its answer rejected."""
        assert check.theirs is not None
        by, rows = check.others[0]
        right = self._agree(check, check.theirs, rows)
        if right.all():
            self._end(check)
            return True
        name, other = self._host.name(check.worker), self._host.name(by)
        if by == LOCAL:
            self._end(check)
            self._host.convict(check.worker, f"{_wrong(check, right)}, by this node's own computation", check.subject)
            return False
        if len(check.others) == 1:
            if self._ask_third(check):
                if check.afterwards:
                    return True
                self._host.hold(check.subject, self._host.patience(check.by, len(check.share.pairs)))
                return True
            self._end(check)
            return self._disputed(check, by, _wrong(check, right))
        third, rows_of_third = check.others[1]
        worker_right = bool(self._agree(check, check.theirs, rows_of_third).all())
        other_right = bool(self._agree(check, rows, rows_of_third).all())
        self._end(check)
        against = f"{_wrong(check, right)}, by {self._host.name(third)}"
        if worker_right == other_right:
            log.warning("dispatch_check_undecided peers=%r", (name, other, self._host.name(third)))
            if worker_right:
                return True
            self._host.reject(check.subject, f"{against} and {other}, who differ too")
            return False
        if worker_right:
            agreed = f"{name} and {self._host.name(third)}"
            self._host.suspect(by, f"computed a row otherwise than {agreed}, who agree")
            return True
        return self._suspect(check, f"{against} and {other}")

    def _ask_third(self, check: _Check) -> bool:
        need = mask_of(check.share.experts.tolist())
        known = {self._host.peer(check.worker), self._host.peer(check.by)}
        able = [
            c
            for c in self._host.candidates(check.share.request)
            if not c.suspended and not need & ~c.held and self._host.peer(c.worker) not in known
        ]
        if not able:
            return False
        check.by = able[self._policy.pick(len(able))].worker
        return self._compute(check)

    def _disputed(self, check: _Check, by: int, what: str) -> bool:
        """Two workers disagree and nobody else can tell: who is at odds with two others is suspected."""
        names = self._host.name(check.worker), self._host.name(by)
        log.warning("dispatch_check_disputed peers=%r what=%r", names, what)
        peers = self._host.peer(check.worker), self._host.peer(by)
        for one, other in (peers, peers[::-1]):
            self._at_odds.setdefault(one, set()).add(other)
        odds = [len(self._at_odds[peer]) for peer in peers]
        if max(odds) < 2 or odds[0] == odds[1]:
            return True
        why = f"{what}: at odds with {max(odds)} others"
        if odds[0] > odds[1]:
            return self._suspect(check, why)
        self._host.suspect(by, why)
        return True

    def _suspect(self, check: _Check, why: str) -> bool:
        """Ask the worker last whose answer this is, and do without the answer. Returns False."""
        self._host.suspect(check.worker, why)
        self._host.reject(check.subject, why)
        return False

    def _end(self, check: _Check) -> None:
        """A check is over."""
        checks = self._by_subject.get(check.subject)
        if checks is not None and check in checks:
            checks.remove(check)
            if not checks:
                del self._by_subject[check.subject]

    def _release_if_done(self, subject: int) -> None:
        if not self._awaited(subject):
            self._host.release(subject)

    def _awaited(self, subject: int) -> list[_Check]:
        """The checks that an answer is held back for."""
        return [check for check in self._by_subject.get(subject, ()) if not check.afterwards]


def _wrong(check: _Check, right: NDArray[np.bool_]) -> str:
    """What is wrong with an answer, for people."""
    assert check.theirs is not None
    row = int(np.flatnonzero(~right)[0])
    ours = check.others[0][1][row].astype(np.float64)
    theirs = check.theirs[row].astype(np.float64)
    lengths = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
    cosine = float(ours @ theirs) / (lengths[0] * lengths[1]) if lengths[0] and lengths[1] else math.nan
    ratio = lengths[1] / lengths[0] if lengths[0] else math.inf
    layer = check.share.request.site.layer
    return f"layer {layer}: a row is wrong (cosine {cosine:.4f}, length × {ratio:.3f})"
