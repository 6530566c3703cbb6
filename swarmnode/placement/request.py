"""What a planner is asked, what it answers, and how an answer is judged: plain figures that anything may read.

Pure. Built by the coordinator from what workers announce (memory, speed, what they hold) and from `RoutingStats`.
Sets of experts are bitmaps: bit e is expert e, as everywhere in dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarmnode.errors import BadPlacement

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
Bools = NDArray[np.bool_]
Holdings = Mapping[int, int]  # site -> bitmap


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker as it is now.

    budget: bytes of experts that it may hold. rtt_s: the round trip to it; row_s: seconds per (token, expert) row;
    byte_s: seconds per byte to or from it; 0 where not measured. held: what is on its disk and need not be fetched.
    pinned: its holdings were chosen by its owner and stay. usable: False while it leaves, is suspected or quarantined.
    """

    peer: str
    budget: int
    rtt_s: float
    row_s: float = 0.0
    byte_s: float = 0.0
    held: Holdings = field(default_factory=dict)
    pinned: bool = False
    usable: bool = True


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything a plan depends on. Mappings are by site index and name the same sites.

    expert_bytes: of one expert; n_expert; weights: how often each expert is chosen, [n_expert], zeros where nothing is
    known; pairs: co-activation [n_expert, n_expert] or None; k: experts per token; samples: real choices
    [m, k], without which some are drawn from weights and pairs. local_budget: bytes of experts on the backbone itself.
    d_bytes: one row on the wire. partial: a worker returns one sum per token, not a row per expert. near_s: as in
    dispatch, below this workers are equally near. Raises BadPlacement for what does not fit together.
    """

    expert_bytes: Mapping[int, int]
    n_expert: Mapping[int, int]
    weights: Mapping[int, F64]
    workers: Sequence[WorkerSpec]
    k: Mapping[int, int]
    pairs: Mapping[int, F64] | None = None
    samples: Mapping[int, I32] | None = None
    local_budget: int = 0
    replicas: int = 2
    d_bytes: int = 0
    partial: bool = True
    near_s: float = 0.008

    def __post_init__(self) -> None:
        sites = self.n_expert.keys()
        for what, table in (("expert_bytes", self.expert_bytes), ("weights", self.weights), ("k", self.k)):
            if table.keys() != sites:
                raise BadPlacement(f"{what} names other sites than n_expert")
        for site, n in self.n_expert.items():
            weights = np.asarray(self.weights[site])
            if n < 1 or self.expert_bytes[site] < 1 or not 1 <= self.k[site] <= n:
                raise BadPlacement(f"site {site}: {n} experts of {self.expert_bytes[site]} bytes, top-{self.k[site]}")
            if weights.shape != (n,) or not np.isfinite(weights).all() or (weights < 0).any():
                raise BadPlacement(f"site {site}: {n} weights are needed, finite and not negative")
            if self.pairs is not None and site in self.pairs and np.shape(self.pairs[site]) != (n, n):
                raise BadPlacement(f"site {site}: pairs of shape {np.shape(self.pairs[site])} for {n} experts")
            if self.samples is not None and site in self.samples:
                drawn = np.asarray(self.samples[site])
                if drawn.ndim != 2 or (drawn.size and not (drawn.min() >= 0 and drawn.max() < n)):
                    raise BadPlacement(f"site {site}: samples must be a table of experts 0 to {n - 1}")
        peers = [worker.peer for worker in self.workers]
        if len(set(peers)) != len(peers):
            raise BadPlacement("a worker is named twice")
        if min((self.local_budget, self.d_bytes, self.replicas - 1)) < 0 or self.near_s <= 0:
            raise BadPlacement("budgets and sizes cannot be negative, and at least one replica is needed")
        for worker in self.workers:
            figures = (worker.budget, worker.rtt_s, worker.row_s, worker.byte_s)
            if any(not math.isfinite(figure) or figure < 0 for figure in figures):
                raise BadPlacement(f"worker {worker.peer}: budget and times must be finite and not negative")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one token of a placement is expected to cost, over all sites, on the routing that the request knows.

    step_s: waiting for workers; per site the slowest of those asked (rtt + rows·row_s + bytes·byte_s), local experts
    for nothing. workers_per_token: distinct workers asked, mean over the sites. round_trips_per_token: sites that need
    any. bytes_per_token: both ways. uncovered: selected experts that nobody holds. secured: the share of the selected
    remote experts that have as many copies as were asked for.
    """

    step_s: float
    workers_per_token: float
    round_trips_per_token: float
    bytes_per_token: float
    uncovered: float
    secured: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Who holds what: peer -> site -> bitmap, without empty entries; the backbone's own; what nobody can hold."""

    holdings: Mapping[str, Holdings]
    local: Holdings
    uncovered: Holdings
    estimate: Estimate


def bools(mask: int, n: int) -> Bools:
    """A bitmap as bool[n]; bits beyond n are dropped."""
    raw = (mask & ((1 << n) - 1)).to_bytes(-(-n // 8), "little")
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=n, bitorder="little").astype(bool)


def mask(chosen: Bools) -> int:
    """bool[n] as a bitmap."""
    return int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little")
