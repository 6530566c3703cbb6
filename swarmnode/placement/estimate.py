"""What a token costs under a placement: the choice that dispatch would make, replayed over real routing.

Pure. For every sampled token and site: the experts that are not local go to the workers that `dispatch.replicas` would
ask (nearest latency class that suffices, fewest workers, name), all at once, so the site takes as long as the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from swarmnode.placement.coactivation import pairs_of
from swarmnode.placement.request import F64, I32, Bools, Estimate, PlanRequest, bools

MAX_SAMPLES = 512  # tokens replayed per site: a mean over all sites is then good to about a percent
_CACHED = 4096


@dataclass(frozen=True, slots=True)
class SiteCost:
    """Means per token of one site; see `Estimate`."""

    step_s: float
    workers: float
    trips: float
    bytes: float
    uncovered: float


class Estimator:
    """Judges placements of one request. `workers` are its usable ones, nearest first; all arrays follow this order."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.k = float(np.mean(list(request.k.values()))) if request.k else 1.0
        usable = [worker for worker in request.workers if worker.usable]
        known = sorted(worker.row_s for worker in usable if worker.row_s > 0)
        self._typical_row_s = known[len(known) // 2] if known else 0.0
        self.workers = sorted(usable, key=lambda w: (self._cost(w.rtt_s, w.row_s, w.byte_s), w.peer))
        self.rtt_s = np.array([w.rtt_s for w in self.workers])
        self.row_s = np.array([w.row_s or self._typical_row_s for w in self.workers])
        self.byte_s = np.array([w.byte_s for w in self.workers])
        self.cost_s = np.array([self._cost(w.rtt_s, w.row_s, w.byte_s) for w in self.workers])
        self.classes = np.array(
            [max(0, math.ceil(math.log2(max(cost, 1e-9) / request.near_s))) for cost in self.cost_s], np.int64
        )
        self.samples = {site: site_samples(request, site) for site in request.n_expert}
        self._replayed = {site: _thin(drawn, MAX_SAMPLES) for site, drawn in self.samples.items()}
        self._cache: dict[tuple[int, bytes, bytes], SiteCost] = {}

    def _cost(self, rtt_s: float, row_s: float, byte_s: float) -> float:
        """Seconds of a call of one token whose experts at a site are all on this worker."""
        rows_back = 1.0 if self.request.partial else self.k
        return rtt_s + self.k * (row_s or self._typical_row_s) + (1 + rows_back) * self.request.d_bytes * byte_s

    def site(self, site: int, held: Bools, local: Bools) -> SiteCost:
        """held [workers, n_expert], local [n_expert]."""
        key = (site, np.packbits(held).tobytes(), np.packbits(local).tobytes())
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= _CACHED:
                self._cache.clear()
            found = self._cache[key] = self._site(self._replayed[site], held, local)
        return found

    def _site(self, ids: I32, held: Bools, local: Bools) -> SiteCost:
        m, n_workers = len(ids), len(self.workers)
        need = ~local[ids]
        if not n_workers or not m:
            return SiteCost(0.0, 0.0, 0.0, 0.0, float(need.sum()) / max(m, 1))
        have = held[:, ids]  # [workers, m, k]
        covered = have.any(axis=0)
        uncovered = float((need & ~covered).sum()) / m
        need &= covered
        cutoff = np.full(m, np.iinfo(np.int64).max)
        for latency_class in sorted(set(self.classes.tolist()), reverse=True):
            near = have[self.classes <= latency_class].any(axis=0)
            cutoff[(near | ~need).all(axis=1)] = latency_class
        have &= (self.classes[:, None] <= cutoff)[:, :, None]
        rows = np.zeros((n_workers, m), np.int64)
        tokens = np.arange(m)
        while need.any():
            gain = (have & need).sum(axis=2)
            best = np.argmax(gain * 1024 - self.classes[:, None], axis=0)
            rows[best, tokens] += gain[best, tokens]
            need &= ~have[best, tokens]
        asked = rows > 0
        back = asked.astype(np.int64) if self.request.partial else rows
        sent = (asked + back) * float(self.request.d_bytes)
        seconds = asked * self.rtt_s[:, None] + rows * self.row_s[:, None] + sent * self.byte_s[:, None]
        return SiteCost(
            step_s=float(seconds.max(axis=0).mean()),
            workers=float(asked.sum(axis=0).mean()),
            trips=float(asked.any(axis=0).mean()),
            bytes=float(sent.sum(axis=0).mean()),
            uncovered=uncovered,
        )

    def total(self, held: Mapping[int, Bools], local: Mapping[int, Bools]) -> Estimate:
        """All sites: site -> [workers, n_expert] and site -> [n_expert]."""
        costs = [self.site(site, held[site], local[site]) for site in self.request.n_expert]
        wanted = min(self.request.replicas, len(self.workers))
        remote = secured = 0.0
        for site in self.request.n_expert:
            chance = self.chances(site) * ~local[site]
            remote += float(chance.sum())
            secured += float(chance[held[site].sum(axis=0) >= wanted].sum()) if wanted else 0.0
        return Estimate(
            step_s=sum(cost.step_s for cost in costs),
            workers_per_token=sum(cost.workers for cost in costs) / max(len(costs), 1),
            round_trips_per_token=sum(cost.trips for cost in costs),
            bytes_per_token=sum(cost.bytes for cost in costs),
            uncovered=sum(cost.uncovered for cost in costs),
            secured=secured / remote if remote else 1.0,
        )

    def chances(self, site: int) -> F64:
        """The probability of each expert to be selected by a token, [n_expert]."""
        weights = np.asarray(self.request.weights[site], np.float64)
        total = float(weights.sum())
        n, k = self.request.n_expert[site], self.request.k[site]
        return weights * (k / total) if total else np.full(n, k / n)

    def pairs(self, site: int) -> F64:
        """Co-activation of a site [n_expert, n_expert]: as it was counted, or counted in the sample."""
        given = None if self.request.pairs is None else self.request.pairs.get(site)
        return pairs_of(self.samples[site], self.request.n_expert[site]) if given is None else np.asarray(given)

    def arrays(self, placement_holdings: Mapping[str, Mapping[int, int]]) -> dict[int, Bools]:
        """Bitmaps by peer as site -> [workers, n_expert]; what is not among the workers is left out."""
        return {
            site: np.stack([bools(placement_holdings.get(w.peer, {}).get(site, 0), n) for w in self.workers])
            if self.workers
            else np.zeros((0, n), bool)
            for site, n in self.request.n_expert.items()
        }


def estimate(request: PlanRequest, holdings: Mapping[str, Mapping[int, int]], local: Mapping[int, int]) -> Estimate:
    """Judge any holdings (peer -> site -> bitmap) with these local experts (site -> bitmap)."""
    estimator = Estimator(request)
    own = {site: bools(local.get(site, 0), n) for site, n in request.n_expert.items()}
    return estimator.total(estimator.arrays(holdings), own)


def site_samples(request: PlanRequest, site: int) -> I32:
    """Choices [m, k] of a site: the request's own, or drawn from its weights and pairs, always the same ones."""
    k, n = request.k[site], request.n_expert[site]
    given = None if request.samples is None else request.samples.get(site)
    if given is not None and len(given) >= 64 and given.shape[1] == k:
        return np.asarray(given, np.int32)
    weights = np.asarray(request.weights[site], np.float64)
    weights = (weights / weights.sum() if weights.sum() else np.full(n, 1 / n)) + 1e-6
    lift = None
    pairs = None if request.pairs is None else request.pairs.get(site)
    if pairs is not None and pairs.sum() > 0:
        expected = np.outer(weights, weights)
        lift = np.log((pairs / pairs.sum() + 1e-6 * expected) / (expected / expected.sum()) + 1e-3)
    return _drawn(weights, lift, k, 2 * MAX_SAMPLES)


def _drawn(weights: F64, lift: F64 | None, k: int, m: int) -> I32:
    """Draw k different experts m times, each next one by weight and by its affinity to those before (Gumbel-max)."""
    generator = np.random.Generator(np.random.PCG64(0x5EED))  # a fixed sequence: no chance is involved
    score = np.log(weights) + generator.gumbel(size=(m, len(weights)))
    if lift is None:
        return np.ascontiguousarray(np.argsort(-score, axis=1)[:, :k].astype(np.int32))
    chosen = np.empty((m, k), np.int32)
    tokens = np.arange(m)
    for rank in range(k):
        chosen[:, rank] = np.argmax(score, axis=1)
        score += lift[chosen[:, rank]] / max(1, k - 1) * 2
        score[tokens, chosen[:, rank]] = -np.inf
    return chosen


def _thin(samples: I32, most: int) -> I32:
    return samples[:: max(1, -(-len(samples) // most))]
