"""Which workers compute which experts of one call: one policy, one function.

Pure. `call.py` asks it when a call begins, and again for the experts of a worker that failed or is late.

The order of what counts, for one layer's call:

1. Round trips. All workers are asked at once, so the call takes as long as its slowest one: workers of a slower
   latency class are asked only when the faster ones do not hold everything that is needed.
2. Few workers. Each distinct worker sends back a row per token, so fewest workers mean fewest bytes: greedy set
   cover, which is within ln(k) of the minimum and takes microseconds.
3. Load, where two workers would cover the same number of experts.
4. The worker's name, so that the same experts keep going to the same worker.

A call with many pairs is bound by compute instead: its experts are spread over all workers of the class that
hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.dispatch.hello import experts_of

LOCAL = -1  # the worker number of this node's own engine


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as seen at the moment of choosing. `held` is a bitmap of the experts it holds at this site."""

    worker: int
    name: str
    held: int
    load: int = 0
    latency_class: int = 0
    suspended: bool = False
    max_pairs: int = 1 << 30


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
    pairs_per_expert: Sequence[int] | None = None,
) -> Plan:
    """Share the experts of the bitmap `need` out.

    `local` is this node's own engine: asked before all others if `local_first`, else only for what no healthy
    worker holds. Suspended workers are the last resort. `pairs_per_expert` asks for spreading by load.
    """
    healthy = [c for c in candidates if not c.suspended]
    suspended = [c for c in candidates if c.suspended]
    own = [local] if local is not None else []
    shares: list[tuple[Candidate, int]] = []
    for tier in (own, healthy, suspended) if local_first else (healthy, own, suspended):
        if need and tier:
            part, need = _share(need, tier, pairs_per_expert)
            shares += part
    return Plan(tuple(shares), need)


def _share(
    need: int, tier: list[Candidate], pairs_per_expert: Sequence[int] | None
) -> tuple[list[tuple[Candidate, int]], int]:
    """Share out what this tier holds of `need`; return the shares and what is left."""
    by_name = sorted(tier, key=lambda c: (c.name, c.worker)) if len(tier) > 1 else tier
    slowest = max(c.latency_class for c in tier)
    for latency_class in sorted({c.latency_class for c in tier}):
        # Once a slow answer must be waited for anyway, its worker may take all it holds: that saves the rows
        # of a faster one.
        available = [c for c in by_name if c.latency_class <= latency_class]
        reach = 0
        for candidate in available:
            reach |= candidate.held
        if latency_class == slowest or not need & ~reach:
            break
    if pairs_per_expert is None:
        return _cover(need & reach, available), need & ~reach
    return _spread(need & reach, available, pairs_per_expert), need & ~reach


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
    """Give each expert, those with most pairs first, to the holder with the fewest pairs so far."""
    taken = [c.load for c in candidates]
    masks = [0] * len(candidates)
    for expert in sorted(experts_of(need), key=lambda e: (-pairs_per_expert[e], e)):
        holders = [i for i, c in enumerate(candidates) if c.held >> expert & 1]
        best = min(holders, key=lambda i: (taken[i], i))
        taken[best] += pairs_per_expert[expert]
        masks[best] |= 1 << expert
    return [(c, mask) for c, mask in zip(candidates, masks, strict=True) if mask]
