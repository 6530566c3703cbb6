"""Routing made up for tests: experts in clusters that tokens prefer, with popularity that falls off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarmnode.placement.planner import PlanRequest, WorkerSpec
from swarmnode.placement.routing import RoutingStats

I32 = NDArray[np.int32]


def clustered(n: int, k: int, clusters: int, *, noise: float, tokens: int = 4000, seed: int = 0) -> I32:
    """Choices [tokens, k]: all of one cluster, except for a share `noise` of tokens that choose anywhere."""
    generator = np.random.Generator(np.random.PCG64(seed))
    member = generator.permutation(np.arange(n) % clusters)
    popularity = np.log(generator.gamma(2.0, 1.0, n))
    wanted = generator.integers(clusters, size=tokens)
    score = popularity + generator.gumbel(size=(tokens, n))
    score += 6.0 * ((member == wanted[:, None]) & (generator.random(tokens) >= noise)[:, None])
    return np.argsort(-score, axis=1)[:, :k].astype(np.int32)


def skewed(n: int, k: int, *, steep: float, tokens: int = 4000, seed: int = 0) -> I32:
    """Choices [tokens, k] by a popularity that falls off as a power of the rank."""
    generator = np.random.Generator(np.random.PCG64(seed))
    popularity = -steep * np.log(generator.permutation(n) + 1.0)
    return np.argsort(-(popularity + generator.gumbel(size=(tokens, n))), axis=1)[:, :k].astype(np.int32)


def stats_of(choices: dict[int, I32], n: int) -> RoutingStats:
    stats = RoutingStats(dict.fromkeys(choices, n))
    for site, ids in choices.items():
        stats.note(site, ids)
    stats.flush()
    return stats


def request_of(
    choices: dict[int, I32],
    n: int,
    workers: list[WorkerSpec],
    *,
    size: int = 1000,
    local_budget: int = 0,
    replicas: int = 2,
    d_bytes: int = 500,
) -> PlanRequest:
    stats = stats_of(choices, n)
    pairs = {site: found for site in choices if (found := stats.pairs(site)) is not None}
    return PlanRequest(
        expert_bytes=dict.fromkeys(choices, size),
        n_expert=dict.fromkeys(choices, n),
        weights={site: stats.weights(site) for site in choices},
        pairs=pairs,
        samples={site: stats.samples(site) for site in choices},
        workers=workers,
        k={site: ids.shape[1] for site, ids in choices.items()},
        local_budget=local_budget,
        replicas=replicas,
        d_bytes=d_bytes,
    )
