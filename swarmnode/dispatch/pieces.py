"""How a large call is cut, so that sending, computing and returning overlap: one policy.

Pure. `call.py` cuts where this says; `piece_queue.py` asks for it, with what it has measured (`pace.py`). Calls of
decode size never come here.

A piece is sent, computed, and its answer comes back: three stages, each of which takes the pieces one after the other.
In one piece a call lasts RTT + send + compute + return. In n pieces the two shorter stages hide behind the longest, all
but the first piece's way to it and the last one's way from it: RTT + longest + (the others) / n. What speaks against
many pieces is that each one reads the weights of its experts anew (SETUP_ROWS); hence small pieces only at the two
ends, where they shorten what cannot overlap. `duration` plays this through, and `best_cut` takes the fewest pieces that
come close to the best.

Where the worker adds up its experts' rows (partial mode), pieces are ranges of tokens: no row travels twice. Else they
are groups of whole experts, because the rows of one expert must not be spread over calls (`compute/chunks.py`): then a
token's x travels once for each piece that has an expert of it, and no weight is read twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from swarmnode.dispatch.pace import SETUP_ROWS, Pace

PIECE_S = 1e-3  # what a piece costs whatever its size: frames, two changes of thread at each end
# A worker's engine computes one call after the other, also of other clients: a step of theirs should not wait longer.
LONGEST_PIECE_S = 0.5
BEARABLE_ROWS = 32  # but not at the price of a quarter more work
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # pieces tried; beyond, there is nothing to gain
ENDS = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.5, 0.5), (0.25, 0.5), (0.5, 0.25), (0.25, 0.25))  # first, last
HARDLY_MORE = 1.35  # times as much to compute
SPARE_TIME = 0.9  # of the time on the line
CLOSE_TO_BEST = 1.03  # another piece must save more than 3 %: what is measured is no better than that
# Until something is measured. A guess that is wrong costs one call of a prompt some of its overlap.
GUESSED_BYTE_S = 8 / 100e6  # 100 Mbit/s
GUESSED_PAIR_S = 100e-6  # a core of a desktop computer and an expert of 20 MB in F16

BATCHES = (128, 256, 512, 1024, 2048, 4096)  # what `recommended_batch` chooses from, tokens
HIDDEN = 8  # a round trip that is an eighth of a layer's own time costs 11 % of it


@dataclass(frozen=True, slots=True)
class Load:
    """What one worker is to compute of a call: `units` are tokens (or pairs, where experts stay whole)."""

    units: int
    pairs_per_unit: float
    experts: int  # distinct ones
    out_bytes: float  # of one unit: its x and what its pairs take
    back_bytes: float  # of one unit's answer
    whole_experts: bool = False


def duration(sizes: Sequence[int], load: Load, pace: Pace, in_flight: int) -> float:
    """Return how long a load takes in pieces of these units, at most `in_flight` of them not answered yet."""
    byte_s, pair_s = pace.byte_s or GUESSED_BYTE_S, pace.pair_s or GUESSED_PAIR_S
    one_way = pace.rtt_s / 2
    sent = computed = returned = 0.0
    answers: list[float] = []
    for number, units in enumerate(sizes):
        if number >= in_flight:
            sent = max(sent, answers[number - in_flight])
        sent += units * load.out_bytes * byte_s + PIECE_S
        computed = max(computed, sent + one_way) + pair_s * _rows(units, load)
        returned = max(returned, computed) + units * load.back_bytes * byte_s
        answers.append(returned + one_way)
    return answers[-1] if answers else 0.0


def _rows(units: int, load: Load) -> float:
    """What a piece computes, in rows."""
    pairs = units * load.pairs_per_unit
    if load.whole_experts:
        return pairs + SETUP_ROWS * load.experts * units / load.units
    return pairs + SETUP_ROWS * load.experts * (1 - math.exp(-pairs / max(1, load.experts)))


@lru_cache(maxsize=256)
def best_cut(load: Load, pace: Pace, most: int, in_flight: int) -> tuple[int, ...]:
    """Return the units of each piece, in order; none has more than `most`. Sums up to `load.units`."""
    most = min(most, _bearable(load, pace))
    least = -(-load.units // max(1, most))
    counts = [count for count in COUNTS if least <= count <= load.units] or [least]
    tried = [cut for count in counts for cut in _cuts(load.units, count, most)] or [equal_cut(load.units, most)]
    tried = [cut for cut in tried if _is_cheap(cut, load, pace)] or [min(tried, key=len)]
    lasting = [(duration(cut, load, pace, in_flight), cut) for cut in tried]
    enough = CLOSE_TO_BEST * min(seconds for seconds, _ in lasting)
    fewest = min(len(cut) for seconds, cut in lasting if seconds <= enough)
    return min(one for one in lasting if len(one[1]) == fewest)[1]


def fewest(load: Load, pace: Pace, most: int) -> tuple[int, ...]:
    """Return as few pieces as there may be."""
    return equal_cut(load.units, min(most, _bearable(load, pace)))


def _is_cheap(cut: Sequence[int], load: Load, pace: Pace) -> bool:
    """Whether the engine has hardly more to do for the cut, or has time for it.

    What is measured of a link also contains what no cut can hide, such as a congestion window that grows: then more
    work for the engine is all that comes of a cut.
    """
    byte_s, pair_s = pace.byte_s or GUESSED_BYTE_S, pace.pair_s or GUESSED_PAIR_S
    rows = sum(_rows(units, load) for units in cut)
    on_the_line = load.units * max(load.out_bytes, load.back_bytes) * byte_s
    return rows <= HARDLY_MORE * _rows(load.units, load) or rows * pair_s <= on_the_line * SPARE_TIME


def _bearable(load: Load, pace: Pace) -> int:
    """The units of a piece that takes the engine LONGEST_PIECE_S, or more where its experts would have few rows."""
    pair_s = pace.pair_s or GUESSED_PAIR_S
    pairs = max(LONGEST_PIECE_S / pair_s, 0 if load.whole_experts else BEARABLE_ROWS * load.experts)
    return max(1, int(pairs / load.pairs_per_unit)) if load.pairs_per_unit else load.units


@lru_cache(maxsize=1024)
def window(cut: tuple[int, ...], load: Load, pace: Pace, in_flight: int) -> int:
    """Return how many of these pieces must be under way to lose nothing, at most `in_flight`; and one to spare.

    More would only stand in queues, where other calls have to wait behind them.
    """
    enough = CLOSE_TO_BEST * duration(cut, load, pace, in_flight)
    least = next((few for few in range(1, in_flight) if duration(cut, load, pace, few) <= enough), in_flight)
    return min(in_flight, least + 1)


def _cuts(units: int, count: int, most: int) -> list[tuple[int, ...]]:
    found = []
    for first, last in ENDS if count > 2 else ENDS[:3]:
        weights = [1.0] * count
        weights[0] *= first
        weights[-1] *= last
        cut = _weighted(units, weights)
        if min(cut) > 0 and max(cut) <= most and cut not in found:
            found.append(cut)
    return found


def equal_cut(units: int, most: int) -> tuple[int, ...]:
    """Return as few equal pieces as there can be."""
    return _weighted(units, [1.0] * max(1, -(-units // max(1, most))))


def _weighted(units: int, weights: Sequence[float]) -> tuple[int, ...]:
    whole, passed, edges = sum(weights), 0.0, [0]
    for weight in weights:
        passed += weight
        edges.append(round(units * passed / whole))
    return tuple(b - a for a, b in itertools.pairwise(edges))


def recommended_batch(
    rtt_s: float, token_s: float, *, n_expert: int, n_used: int, most: int = BATCHES[-1], least_rows: int = 32
) -> int:
    """Return how many tokens of a prompt to evaluate at once.

    Each layer of each batch waits for one round trip of `rtt_s`; `token_s` is what a token takes in one layer besides
    (the longest of sending, computing and returning, and the backbone's own part). The smallest of BATCHES for which
    the round trip is at most 1/HIDDEN of that, and which gives an expert `least_rows` rows on average, as fewer of them
    cost more each; at most `most`.
    """
    wanted = max(HIDDEN * rtt_s / max(token_s, 1e-9), least_rows * n_expert / max(1, n_used))
    return next((batch for batch in BATCHES if wanted <= batch <= most), max(1, most))


def token_seconds(paces: Sequence[Pace], n_used: int, row_bytes: tuple[int, int], *, partial: bool) -> float:
    """Return what a token of a prompt takes in one layer that is spread over workers of these paces; 0 if unknown.

    `row_bytes`: of a row of x, and of the answer. Where workers add up their rows (`partial`), each link carries one of
    each token; else the rows of its part of the token's `n_used` experts. Workers not measured yet count for nothing.
    """
    known = [pace for pace in paces if pace.pair_s]
    if not known:
        return 0.0
    computing = n_used / sum(1 / pace.pair_s for pace in known)
    rows = 1.0 if partial else n_used / len(known)
    return max(computing, max(pace.byte_s for pace in known) * max(row_bytes[0], row_bytes[1] * rows))
