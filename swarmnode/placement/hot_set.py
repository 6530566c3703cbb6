"""Which experts are worth the nearest memory.

Pure. A token pays for a site's round trip unless *all* the experts it selects there are near, so one expert more or
less often changes nothing: what counts is the probability that the whole selection lies in a set. Per site the experts
are ordered so that every prefix of the order holds as many whole selections as greed finds; the probability as a
function of the prefix is the site's curve. Over all sites memory is given out along the upper concave hulls of the
curves, steepest first, which is optimal up to one step of one site. The same order serves every kind of "near": the
backbone's own memory, and the fast workers before the slow ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
Index = NDArray[np.int64]

PRIOR = 0.05  # of an expert's plain frequency counts too: a sample has few selections that hold one of the tail


@dataclass(frozen=True, slots=True)
class Curve:
    """`order`: experts, the ones to have first; `whole[h]`: probability that its first h hold a whole selection."""

    order: Index
    whole: F64


def curve(weights: F64, samples: I32) -> Curve:
    """weights [n], samples [m, k]. Ordered on every other sample, its probabilities read off the rest."""
    order = _order(weights, samples[::2])
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(1, len(order) + 1)
    last = place[samples[1::2] if len(samples) > 1 else samples].max(axis=1, initial=0)
    reached = np.bincount(last, minlength=len(order) + 1).cumsum()
    return Curve(order, reached / max(len(last), 1) if len(last) else np.linspace(0, 1, len(order) + 1))


def _order(weights: F64, samples: I32) -> Index:
    """Take away, again and again, the expert whose loss breaks the fewest selections that are still whole."""
    n = len(weights)
    counts = np.bincount(samples.reshape(-1), minlength=n).astype(np.float64)
    by_expert = np.argsort(samples.reshape(-1), kind="stable")
    ends = np.searchsorted(samples.reshape(-1)[by_expert], np.arange(n + 1))
    tokens = by_expert // max(samples.shape[1], 1)
    whole = np.ones(len(samples), bool)
    counts += weights / (float(weights.sum()) or 1.0) * (PRIOR * samples.size + 0.5)
    order = np.empty(n, np.int64)
    for at in range(n - 1, -1, -1):
        expert = order[at] = int(np.argmin(counts))
        mine = tokens[ends[expert] : ends[expert + 1]]
        broken = mine[whole[mine]]
        whole[broken] = False
        counts -= np.bincount(samples[broken].reshape(-1), minlength=n)
        counts[expert] = np.inf
    return order


@dataclass(frozen=True, slots=True)
class Step:
    """Experts `order[first:last]` of a site, which are worth having together."""

    site: int
    first: int
    last: int
    worth: float  # probability gained per byte


def steps(curves: Mapping[int, Curve], expert_bytes: Mapping[int, int]) -> list[Step]:
    """All sites' steps, the steepest first; those of one site in its own order."""
    found = []
    for site, of_site in sorted(curves.items()):
        whole, first = of_site.whole, 0
        while first < len(of_site.order):
            ahead = np.arange(first + 1, len(whole))
            slopes = (whole[ahead] - whole[first]) / (ahead - first)
            best = float(slopes.max())
            last = int(ahead[np.flatnonzero(slopes >= best - 1e-12)[-1]])
            found.append(Step(site, first, last, best / expert_bytes[site]))
            first = last
    return sorted(found, key=lambda step: (-step.worth, step.site, step.first))


def fill(
    plan: list[Step], curves: Mapping[int, Curve], expert_bytes: Mapping[int, int], taken: Mapping[int, int], room: int
) -> dict[int, int]:
    """How long a prefix of each site's order fits into `room` bytes, on top of the prefixes `taken`.

    Whole steps while they fit; what is left over takes the part of a step that gains most, then the hottest experts.
    Returns site -> prefix.
    """
    prefix = dict(taken)
    left = []
    for step in plan:
        at = prefix[step.site]
        if step.last <= at:
            continue
        size = (step.last - at) * expert_bytes[step.site]
        if step.first <= at and size <= room:
            prefix[step.site] = step.last
            room -= size
        else:
            left.append(step)
    while True:
        best, gain = None, (-1.0, 0.0)
        for step in left:
            at = prefix[step.site]
            more = min(step.last - at, room // expert_bytes[step.site])
            if step.first > at or more <= 0:
                continue
            whole = curves[step.site].whole
            worth = float(whole[at + more] - whole[at])
            if (worth, step.worth) > gain:
                best, gain = (step, more), (worth, step.worth)
        if best is None:
            return prefix
        step, more = best
        prefix[step.site] += more
        room -= more * expert_bytes[step.site]
