"""Which answers are computed once more, and when two computations of one row are the same row: policy only.

Pure: chance is a function that is passed in. `checks.py` carries it out, on the loop thread.

A worker cannot know which of its rows are looked at. Each pair (token, expert) it computes is chosen with a small
probability, a larger one while it is new, and never more than a fixed share of all pairs so far. To find one that
perturbs a row in fifty takes some two hundred chosen rows: a few dozen tokens of a large model, but a thousand of a
small one. So where the backbone has the experts' weights, every row is also screened for next to nothing
(`row_screen.py`), and the few that least look like an output of their expert are computed once more too. The screen
accuses nobody; only a computation does.

What a row may differ by: the wire, and the backend of ggml, whose rows have a cosine above 0.998 with another's. A row
perturbed by a tenth of its length has 0.995. What the wires cost one expert's rows, x and answer both in that type,
measured on 163,840 rows of the demo model (held-out text; the sums of several experts differ less):

          mean cosine   lowest 0.1 %   lowest    length by at most
    F16      0.999986        0.99990  0.99978                0.9 %
    INT8     0.999902        0.99964  0.99941                2.5 %
    FP8      0.999411        0.99849  0.99722                5.0 %
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmnode.dispatch.codec import F32, WireType
from swarmnode.errors import UsageError

# The lowest cosine with the right row: what the wire and another backend may cost together. FP8 with a tenth of
# perturbation has 0.9944.
LEAST_COSINE = {WireType.F32: 0.997, WireType.F16: 0.997, WireType.INT8: 0.997, WireType.FP8: 0.9955}
# By how much a row's length may differ: one value of x that outweighs the others is off by up to 6 % as FP8.
NORM_SLACK = {WireType.F32: 0.05, WireType.F16: 0.05, WireType.INT8: 0.05, WireType.FP8: 0.08}
# Per value: what the types cannot tell from zero. INT8 and FP8 can, but F16 may be used beside them.
TINY = {WireType.F32: 1e-30, WireType.F16: 2.0**-24, WireType.INT8: 2.0**-24, WireType.FP8: 2.0**-24}
MAX_CHECKED = 64  # rows of one answer: a prompt's answer is long, and its check must not hold it up
SCREEN_WINDOW = 256  # scores of a site that the next one is compared with
SCREEN_LEAST = 64  # before there are so many, nothing stands out


@dataclass(frozen=True, slots=True)
class CheckPolicy:
    """How much is checked. Shares are of the pairs that workers compute.

    share: of the rows of a worker; alone_share: the same where there is no screen; new_share: of its first new_rows
      ones. budget: what all checks together may be of all rows at any moment; screened: the part of it that is kept for
      rows that stand out, where there is a screen.
    patience_s: how long a finished answer waits for its check by the local engine before it counts unchecked.
    bad_answers_allowed: NaN, infinity or a wrong shape so many times in a run ends the trust for good.
    """

    share: float = 0.01
    alone_share: float = 0.018
    new_share: float = 0.05
    new_rows: int = 500
    budget: float = 0.02
    screened: float = 0.006
    patience_s: float = 1.0
    bad_answers_allowed: int = 3

    def __post_init__(self) -> None:
        for name in ("share", "alone_share", "new_share", "budget", "screened"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"check {name} {getattr(self, name):g} must be in 0…1")
        if self.bad_answers_allowed < 1:
            raise UsageError(f"bad_answers_allowed {self.bad_answers_allowed} must be at least 1")


def agrees(rows: F32, reference: F32, wire: WireType) -> NDArray[np.bool_]:
    """For each row of [n, d], whether it is the reference's row up to what an honest worker's may differ by.

    `wire` is the coarsest of the types that x and either of the rows came in.
    """
    a, b = rows.astype(np.float64), reference.astype(np.float64)
    squares_a, squares_b = np.einsum("ij,ij->i", a, a), np.einsum("ij,ij->i", b, b)
    lengths = np.sqrt(squares_a * squares_b)
    cosine_ok = np.einsum("ij,ij->i", a, b) >= LEAST_COSINE[wire] * lengths
    ratio_ok = np.abs(np.sqrt(squares_a) - np.sqrt(squares_b)) <= NORM_SLACK[wire] * np.sqrt(squares_b)
    nothing = np.abs(a - b).max(axis=1, initial=0.0) <= TINY[wire]
    return np.asarray((cosine_ok & ratio_ok & (lengths > 0)) | nothing, np.bool_)


class SpotChecks:
    """Chooses. `random` returns a float in [0, 1), which no worker may be able to foretell."""

    def __init__(self, policy: CheckPolicy, random: Callable[[], float], *, screened: bool = False) -> None:
        self._policy, self._random = policy, random
        self._chance_budget = policy.budget - (min(policy.screened, policy.budget) if screened else 0.0)
        self._share = policy.share if screened else policy.alone_share
        self._workers: dict[str, _Worker] = {}
        self._seen = 0
        self._by_chance = 0
        self._standing_out = 0

    @property
    def screened_share(self) -> float:
        """The part of all rows that a screen should let stand out."""
        return self._policy.screened

    def choose(self, worker: str, n_pairs: int, n_rows: int) -> list[int]:
        """Note an answer of `n_rows` rows from `n_pairs` pairs that `worker` is asked for; return the rows to check."""
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = _Worker()
        self._seen += n_pairs
        policy = self._policy
        share = policy.new_share if known.seen < policy.new_rows else self._share
        known.seen += n_pairs
        if share != known.share:
            known.share, known.gap = share, self._gap(share)
        if known.gap >= n_rows:
            known.gap -= n_rows
            return []
        chosen = []
        at = known.gap
        while at < n_rows:
            chosen.append(at)
            at += 1 + self._gap(share)
        known.gap = at - n_rows
        cost = max(1, n_pairs // max(1, n_rows))  # of a row, in pairs
        room = int((self._chance_budget * self._seen - self._by_chance) / cost)
        chosen = self._some(chosen, min(room, MAX_CHECKED))
        self._by_chance += cost * len(chosen)
        return chosen

    def allowed_by_screen(self, n_pairs: int) -> bool:
        """Whether so many pairs that stand out may be computed once more now; counts them if so."""
        room = (self._policy.budget - self._chance_budget) * self._seen - self._standing_out
        if n_pairs > room:
            return False
        self._standing_out += n_pairs
        return True

    def pick(self, n: int) -> int:
        """Return one of n by chance."""
        return min(int(self._random() * n), n - 1)

    def _some(self, chosen: list[int], most: int) -> list[int]:
        while len(chosen) > max(0, most):
            del chosen[self.pick(len(chosen))]
        return chosen

    def _gap(self, share: float) -> int:
        """Rows to pass over before the next one: geometric, so that each row has the same chance."""
        if share >= 1:
            return 0
        if share <= 0:
            return 1 << 62
        return int(min(math.log(1.0 - self._random()) / math.log1p(-share), 1 << 62))


@dataclass(slots=True)
class _Worker:
    seen: int = 0
    share: float = -1.0
    gap: int = 0


class Standouts:
    """Tells which scores of a site are among its highest: with `share` of all rows, whatever the scores' scale."""

    def __init__(self, share: float) -> None:
        self._keep = max(1, round(SCREEN_WINDOW * share))
        self._windows: dict[int, deque[float]] = {}
        self._thresholds: dict[int, tuple[float, int]] = {}  # and how many scores ago it was worked out

    def among(self, site: int, scores: F32) -> list[int]:
        """Note the scores of one answer's rows, float32[n]; return the rows that stand out."""
        window = self._windows.get(site)
        if window is None:
            window = self._windows[site] = deque(maxlen=SCREEN_WINDOW)
        found: list[int] = []
        if len(window) >= SCREEN_LEAST:
            threshold, age = self._thresholds.get(site, (0.0, SCREEN_WINDOW))
            if age >= SCREEN_WINDOW // 8:
                keep = max(1, self._keep * len(window) // SCREEN_WINDOW)
                threshold, age = sorted(window)[-keep], 0
            found = np.flatnonzero(scores > threshold).tolist()
            self._thresholds[site] = threshold, age + len(scores)
        window.extend(scores[:SCREEN_WINDOW].tolist())
        return found
