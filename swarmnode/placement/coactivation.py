"""Shares one site's experts out so that those which a token selects together live together.

Pure and deterministic. Each distinct worker that a token needs costs a message each way, and the slowest decides when
the layer goes on: the aim is the fewest distinct workers per token, within each one's memory and a bound on its load.

What is maximised is the co-activation inside workers, by exchanging and moving experts from two starts (balanced by
load alone, and grown cluster by cluster), as Kernighan and Lin (1970) cut a graph. Pairs are counted over many tokens,
so they know the tail too; descending on a sample's exact number of workers instead finds nothing better on real
routing, and less where experts are many.

`planner` calls it for sites that no single worker can hold; the placement benchmark compares it with `load_only`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swarmnode.errors import BadPlacement

F64 = NDArray[np.float64]
Index = NDArray[np.int64]

MAX_ROUNDS = 60  # 256 experts of clear structure settle after some 30
NOISE = 2e-6  # the share of all co-activation below which an exchange gains nothing that would last
_EXCHANGES = 12  # the best exchanges of a round, each counted again before it is made


def load_only(weights: F64, capacity: Sequence[int], shares: Sequence[float] | None = None) -> Index:
    """Each expert's worker by load alone: the hottest first to whoever has least for its share (EPLB's packing).

    weights [n]; capacity: experts that each worker may hold; shares: how much load each should have, equal by default.
    Returns int64[n]. Raises BadPlacement.
    """
    loads, room, share = _checked(weights, capacity, shares)
    taken = np.zeros(len(room))
    worker = np.empty(len(loads), np.int64)
    for expert in np.argsort(-loads, kind="stable"):
        after = np.where(room > 0, (taken + loads[expert]) / share, np.inf)
        best = int(np.argmin(after))
        worker[expert] = best
        taken[best] += loads[expert]
        room[best] -= 1
    return worker


def split(
    weights: F64,
    pairs: F64,
    capacity: Sequence[int],
    *,
    shares: Sequence[float] | None = None,
    max_over_mean: float = 1.1,
) -> Index:
    """Each expert's worker, int64[n], for the fewest distinct workers per token.

    weights [n] and pairs [n, n] as `RoutingStats` counts them; capacity: experts that each worker may hold, together
    at least n; shares: the load that each should have, equal by default. No worker's load exceeds `max_over_mean` × its
    share of the whole, or what load alone leads to where that is worse. Raises BadPlacement.
    """
    loads, room, share = _checked(weights, capacity, shares)
    if np.shape(pairs) != (len(loads), len(loads)):
        raise BadPlacement(f"pairs of shape {np.shape(pairs)} do not fit {len(loads)} experts")
    balanced = load_only(weights, capacity, shares)
    if len(room) == 1:
        return balanced
    reached = (np.bincount(balanced, loads, len(room)) / share).max() * share
    limit = np.maximum(loads.sum() * share / share.sum() * max_over_mean, reached) * (1 + 1e-9)
    together = np.asarray(pairs, np.float64)
    starts = [balanced]
    if (grown := _grow(loads, together, room, limit)) is not None:
        starts.append(grown)
    ends = [_descend(start, loads, together, room, limit) for start in starts]
    return max(ends, key=lambda worker: _inside(worker, together, len(room)))


def pairs_of(samples: NDArray[np.int32], n_expert: int) -> F64:
    """Co-activation counts [n, n], diagonal 0, of a sample of choices [m, k]."""
    chosen = np.zeros((len(samples), n_expert), np.float32)
    np.put_along_axis(chosen, samples.astype(np.int64), 1.0, 1)
    pairs = (chosen.T @ chosen).astype(np.float64)
    np.fill_diagonal(pairs, 0.0)
    return pairs


def workers_per_token(worker: Index, samples: NDArray[np.int32], n_workers: int) -> float:
    """The mean number of distinct workers that a token's experts live on. worker [n], samples [m, k]."""
    if not len(samples):
        return 0.0
    return float((_counts(worker, samples, n_workers) > 0).sum(axis=1).mean())


def balance(worker: Index, weights: F64, n_workers: int, shares: Sequence[float] | None = None) -> float:
    """The largest load over the mean one, each relative to its worker's share."""
    share = np.ones(n_workers) if shares is None else np.asarray(shares, np.float64)
    load = np.bincount(worker, weights, n_workers) / share
    return float(load.max() * share.sum() / weights.sum()) if weights.sum() else 1.0


def _checked(weights: F64, capacity: Sequence[int], shares: Sequence[float] | None) -> tuple[F64, Index, F64]:
    loads = np.asarray(weights, np.float64)
    room = np.array(capacity, np.int64)
    share = np.ones(len(room)) if shares is None else np.array(shares, np.float64)
    if loads.ndim != 1 or not len(loads) or not np.isfinite(loads).all() or (loads < 0).any():
        raise BadPlacement("weights must be a row of finite numbers, none negative")
    if not len(room) or (room < 0).any() or room.sum() < len(loads):
        raise BadPlacement(f"room for {int(room.sum())} experts on {len(room)} workers does not hold {len(loads)}")
    if share.shape != room.shape or not np.isfinite(share).all() or (share <= 0).any():
        raise BadPlacement(f"{len(room)} workers need as many shares of the load, all positive")
    return loads + max(loads.sum(), 1.0) * 1e-9, room, share  # never-seen experts still count as one each


def _grow(loads: F64, pairs: F64, capacity: Index, limit: F64) -> Index | None:
    """Grow clusters: the hottest expert left goes where it fits best. None where the bounds leave no place."""
    n_workers, room, taken = len(capacity), capacity.copy(), np.zeros(len(capacity))
    worker = np.full(len(loads), -1, np.int64)
    affinity = np.zeros((len(loads), n_workers))
    for seat in np.argsort(-limit, kind="stable"):  # one worker filled after the other, the one with most room first
        while room[seat]:
            free = np.flatnonzero((worker < 0) & (taken[seat] + loads <= limit[seat]))
            if not len(free):
                break
            inside = affinity[free, seat]
            expert = int(free[np.lexsort((-loads[free], -inside / loads[free]))[0]])
            worker[expert] = seat
            room[seat] -= 1
            taken[seat] += loads[expert]
            affinity[:, seat] += pairs[expert]
    left = np.flatnonzero(worker < 0)
    for expert in left[np.argsort(-loads[left], kind="stable")]:
        fits = (room > 0) & (taken + loads[expert] <= limit)
        if not fits.any():
            return None
        seat = int(np.argmax(np.where(fits, affinity[expert], -np.inf)))
        worker[expert] = seat
        room[seat] -= 1
        taken[seat] += loads[expert]
    return worker


def _descend(start: Index, loads: F64, pairs: F64, capacity: Index, limit: F64) -> Index:
    worker, n_workers, n = start.copy(), len(capacity), len(start)
    everyone = np.arange(n)
    taken = np.bincount(worker, loads, n_workers)
    room = capacity - np.bincount(worker, minlength=n_workers)
    affinity = np.stack([pairs[:, worker == w].sum(axis=1) for w in range(n_workers)], axis=1)
    least = NOISE * float(pairs.sum()) + 1e-9

    def move(expert: int, seat: int) -> None:
        was = worker[expert]
        worker[expert] = seat
        affinity[:, was] -= pairs[expert]
        affinity[:, seat] += pairs[expert]
        taken[was] -= loads[expert]
        taken[seat] += loads[expert]
        room[was] += 1
        room[seat] -= 1

    def swap_helps(a: int, b: int) -> bool:
        at, to, heavier = worker[a], worker[b], loads[b] - loads[a]
        if at == to or taken[at] + heavier > limit[at] or taken[to] - heavier > limit[to]:
            return False
        gain = affinity[a, to] - affinity[a, at] + affinity[b, at] - affinity[b, to] - 2 * pairs[a, b]
        return bool(gain > least)

    for _ in range(MAX_ROUNDS):
        gain = affinity - affinity[everyone, worker][:, None]  # of a move, [expert, worker]
        allowed = (room > 0) & (taken + loads[:, None] <= limit)
        allowed[everyone, worker] = False
        moves = np.where(allowed, gain, -np.inf)
        swaps = gain[:, worker]
        swaps = swaps + swaps.T - 2 * pairs
        heavier = loads - loads[:, None]  # what a's worker gets more, if a and b change places
        slack = (limit - taken)[worker]
        swaps[(worker[:, None] == worker) | (heavier > slack[:, None]) | (-heavier > slack)] = -np.inf
        best_move = int(np.argmax(moves))
        few = min(2 * _EXCHANGES, n * n)  # each exchange stands there twice
        best = np.argpartition(swaps.reshape(-1), n * n - few)[n * n - few :]
        best = best[np.lexsort((best, -swaps.flat[best]))]
        if max(moves.flat[best_move], swaps.flat[best[0]]) <= least:
            break
        if moves.flat[best_move] >= swaps.flat[best[0]]:
            move(*divmod(best_move, n_workers))
            continue
        for a, b in (divmod(int(cell), n) for cell in best):
            if swap_helps(a, b):
                at, to = int(worker[a]), int(worker[b])
                move(a, to)
                move(b, at)
    return worker


def _counts(worker: Index, samples: NDArray[np.int32], n_workers: int) -> NDArray[np.int16]:
    seats = np.where(samples < 0, n_workers, worker[samples])
    cells = (np.arange(len(samples))[:, None] * (n_workers + 1) + seats).reshape(-1)
    counts = np.bincount(cells, minlength=len(samples) * (n_workers + 1)).reshape(len(samples), -1)
    return counts[:, :n_workers].astype(np.int16)


def _inside(worker: Index, pairs: F64, n_workers: int) -> float:
    return float(sum(pairs[np.ix_(worker == w, worker == w)].sum() for w in range(n_workers)))
