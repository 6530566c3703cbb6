"""Which workers compute which experts of one call: one policy, one function.

Pure. `assignment.py` asks it when a call begins, and again for the experts of a worker that failed or is late.

The order of what counts, for one layer's call:

0. What this node keeps for itself (its hot experts) it computes during the trip, or instead of one.
1. Round trips. All workers are asked at once, so the call takes as long as its slowest one: workers of a slower
   latency class are asked only when the faster ones do not hold everything that is needed. One that is slow because it
   is far may then take all it holds, as the trip is waited for anyway; one that is slow because it computes or sends
   slowly (`thin`) gets only what nobody else holds, as each further row costs time there.
2. Few workers. Each distinct worker sends back a row per token, so fewest workers mean fewest bytes: greedy set
   cover, which is within ln(k) of the minimum and takes microseconds.
3. Load, where two workers would cover the same number of experts.
4. The worker's name, so that the same experts keep going to the same worker.

A call with many pairs is bound by compute instead: its experts are spread over all workers of the class that hold them,
each to the one that would be done with it first, by what a pair has cost there so far. Where the way to a worker is
known in seconds, it counts for these, and no class matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.dispatch.hello import experts_of

UNKNOWN_PAIR_S = 1e-4  # what a pair is taken to cost where nobody knows: counts beside distances only
LOCAL = -1  # the worker number of this node's own engine


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as seen at the moment of choosing. `held` is a bitmap of the experts it holds at this site.

    `load` counts the pairs it is busy with, `pair_s` is what a pair of a large call has taken there, and `start_s` what
    such a call takes there besides (seconds, 0 unknown). `thin`: it is slow for another reason than its distance.
    """

    worker: int
    name: str
    held: int
    load: int = 0
    latency_class: int = 0
    suspended: bool = False
    max_pairs: int = 1 << 30
    thin: bool = False
    pair_s: float = 0.0
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The experts each worker computes, as disjoint bitmaps in a fixed order, and those nobody could take."""

    shares: tuple[tuple[Candidate, int], ...]
    uncovered: int


def plan(
    need: int,
    candidates: Sequence[Candidate],
    *,
    local: Candidate | None = None,
    local_first: bool = False,
    kept: int = 0,
    pairs_per_expert: Sequence[int] | None = None,
) -> Plan:
    """Share the experts of the bitmap `need` out.

    `local` is this node's own engine: asked before all others for what is `kept` here, and for everything if
    `local_first`; for the rest only where no healthy worker holds it. Suspended workers are the last resort.
    `pairs_per_expert` asks for spreading by load.
    """
    here = 0
    if local is not None:
        here = need & local.held & (local.held if local_first else kept)
        need &= ~here
    shares: list[tuple[Candidate, int]] = []
    if need:
        healthy = [c for c in candidates if not c.suspended]
        part, need = _share(need, healthy, pairs_per_expert)
        shares += part
    if need and local is not None:
        here |= need & local.held
        need &= ~local.held
    if need:
        suspended = [c for c in candidates if c.suspended]
        part, need = _share(need, suspended, pairs_per_expert)
        shares += part
    if here and local is not None:
        shares.append((local, here))
    shares.sort(key=lambda share: share[1] & -share[1])  # partial sums are added in this order: the same bits each time
    return Plan(tuple(shares), need)


def _share(
    need: int, tier: list[Candidate], pairs_per_expert: Sequence[int] | None
) -> tuple[list[tuple[Candidate, int]], int]:
    """Share out what this tier holds of `need`; return the shares and what is left."""
    if not tier:
        return [], need
    by_name = sorted(tier, key=lambda c: (c.name, c.worker)) if len(tier) > 1 else tier
    available, reach = by_name, 0
    for latency_class in sorted({c.latency_class for c in tier}):
        # Once a slow answer must be waited for anyway, its worker may take all it holds: that saves the rows
        # of a faster one.
        available = [c for c in by_name if c.latency_class <= latency_class]
        reach = 0
        for candidate in available:
            reach |= candidate.held
        if not need & ~reach:
            break
    if pairs_per_expert is not None:
        able = [c for c in by_name if c.latency_class <= latency_class or c.start_s]
        return _spread(need & reach, able, pairs_per_expert), need & ~reach
    shares: list[tuple[Candidate, int]] = []
    left = need & reach
    for stage in _stages(available):
        held = 0
        for candidate in stage:
            held |= candidate.held
        if left & held:
            shares += _cover(left & held, stage)
            left &= ~held
    return shares, need & ~reach


def _stages(available: list[Candidate]) -> list[list[Candidate]]:
    """Those who may take all they hold, then the thin ones, the faster classes first."""
    if not any(c.thin for c in available):
        return [available]
    classes = sorted({c.latency_class for c in available if c.thin})
    thin = [[c for c in available if c.thin and c.latency_class == number] for number in classes]
    return [[c for c in available if not c.thin], *thin]


def _cover(need: int, candidates: list[Candidate]) -> list[tuple[Candidate, int]]:
    shares = []
    while need:
        best, gain = candidates[0], (-1, 0, 0)
        for candidate in candidates:
            value = ((need & candidate.held).bit_count(), -candidate.load, -candidate.latency_class)
            if value > gain:
                best, gain = candidate, value
        shares.append((best, need & best.held))
        need &= ~best.held
    return shares


def _spread(need: int, candidates: list[Candidate], pairs_per_expert: Sequence[int]) -> list[tuple[Candidate, int]]:
    """Give each expert, those with most pairs first, to the holder that would be done with it first."""
    known = [c.pair_s for c in candidates if c.pair_s]
    usual = sum(known) / len(known) if known else UNKNOWN_PAIR_S
    cost = [c.pair_s or usual for c in candidates]
    until = [c.start_s + c.load * pair_s for c, pair_s in zip(candidates, cost, strict=True)]
    masks = [0] * len(candidates)
    for expert in sorted(experts_of(need), key=lambda e: (-pairs_per_expert[e], e)):
        holders = [i for i, c in enumerate(candidates) if c.held >> expert & 1]
        best = min(holders, key=lambda i: (until[i] + pairs_per_expert[expert] * cost[i], i))
        until[best] += pairs_per_expert[expert] * cost[best]
        masks[best] |= 1 << expert
    return [(c, mask) for c, mask in zip(candidates, masks, strict=True) if mask]
