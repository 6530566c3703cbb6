"""Cuts the pairs of a large call to pieces: between tokens, or between experts.

Pure. Where and how finely is decided by `pieces.py`, reached through `Cut`; here it is only carried out. Called by
`call.py` for calls of more than DECODE_PAIRS pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmnode.compute.chunks import plan_chunks
from swarmnode.dispatch.hello import experts_of
from swarmnode.dispatch.replicas import LOCAL, Candidate, Plan

Pairs = Sequence[int] | NDArray[np.intp]  # ascending
Piece = tuple[Candidate, Pairs, int]  # who computes what, and of which range of tokens that is a part; -1: of none


@dataclass(frozen=True, slots=True)
class Shared:
    """What one worker gets of a large call."""

    worker: int
    pairs: int
    units: int  # tokens of which it gets pairs; or the pairs again
    experts: int  # distinct ones


# Shares, units in all, the most units of a piece -> the units of each piece, in order. See call.Swarm.cut.
Cut = Callable[[Sequence[Shared], int, int], Sequence[int]]


def cut_pairs(
    choice: Plan, pairs: NDArray[np.intp], experts: NDArray[np.int32], n_expert: int, per_token: int, cut: Cut
) -> Iterator[Piece]:
    """Yield the pieces of a plan in the order in which they are to begin. `experts[i]` is the expert of pair i.

    `per_token`: pairs of a token, where calls may be cut between tokens; else 0, and no expert's pairs are parted
    except as `plan_chunks` does it. What this node computes itself is not cut.
    """
    owner = np.zeros(n_expert, np.intp)
    for number, (_, mask) in enumerate(choice.shares):
        owner[list(experts_of(mask))] = number
    owners = owner[experts[pairs]]
    mine = [(candidate, pairs[owners == number]) for number, (candidate, _) in enumerate(choice.shares)]
    remote = [(candidate, part) for candidate, part in mine if candidate.worker != LOCAL]
    if per_token and remote:
        yield from _between_tokens(remote, experts, per_token, cut)
    elif remote:
        yield from _between_experts(remote, experts, cut)
    yield from ((candidate, part, -1) for candidate, part in mine if candidate.worker == LOCAL)


def by_experts(chosen: Pairs, experts: NDArray[np.int32], limit: int) -> Sequence[Pairs]:
    """Cut pairs to the size of a call, so that the engine there adds in the same order as for all at once."""
    if len(chosen) <= limit:
        return [chosen]
    pairs = np.asarray(chosen, np.intp)
    return [np.sort(pairs[chunk]) for chunk in plan_chunks(experts[pairs], limit)]


def _between_experts(
    remote: list[tuple[Candidate, NDArray[np.intp]]], experts: NDArray[np.int32], cut: Cut
) -> Iterator[Piece]:
    for candidate, part in remote:
        chosen = experts[part]
        shared = Shared(candidate.worker, len(part), len(part), _distinct(chosen))
        limit = max(cut([shared], len(part), candidate.max_pairs))
        if limit < candidate.max_pairs:  # not needed, only quicker: no expert is parted for it
            limit = min(candidate.max_pairs, max(limit, int(np.bincount(chosen).max())))
        yield from ((candidate, piece, -1) for piece in by_experts(part, experts, limit))


def _between_tokens(
    remote: list[tuple[Candidate, NDArray[np.intp]]], experts: NDArray[np.int32], per_token: int, cut: Cut
) -> Iterator[Piece]:
    """All workers' shares at the same tokens, range by range."""
    tokens = [part // per_token for _, part in remote]
    present = np.zeros(max(int(of[-1]) for of in tokens) + 1, np.bool_)
    loads = []
    for (candidate, part), of in zip(remote, tokens, strict=True):
        present[of] = True
        units = 1 + int(np.count_nonzero(of[1:] != of[:-1]))
        loads.append(Shared(candidate.worker, len(part), units, _distinct(experts[part])))
    distinct = np.flatnonzero(present)
    sizes = cut(loads, len(distinct), max(_tokens_in(candidate, per_token) for candidate, _ in remote))
    ends = np.append(distinct, distinct[-1] + 1)[np.cumsum(sizes)]
    cuts = [[0, *np.searchsorted(of, ends).tolist()] for of in tokens]
    for cell in range(len(sizes)):
        for (candidate, part), of, edges in zip(remote, tokens, cuts, strict=True):
            at = slice(edges[cell], edges[cell + 1])
            yield from ((candidate, piece, cell) for piece in _fitting(candidate, part[at], of[at], per_token))


def _distinct(experts: NDArray[np.int32]) -> int:
    return int(np.count_nonzero(np.bincount(experts)))


def _fitting(
    candidate: Candidate, pairs: NDArray[np.intp], tokens: NDArray[np.intp], per_token: int
) -> Iterator[NDArray[np.intp]]:
    """Cut a piece further, for a worker that takes less in a call than others."""
    if not len(pairs):
        return
    step = _tokens_in(candidate, per_token)
    if int(tokens[-1] - tokens[0]) < step and len(pairs) <= candidate.max_pairs:
        yield pairs
        return
    begins = np.flatnonzero(np.append(True, tokens[1:] != tokens[:-1]))[::step].tolist()
    for begin, end in zip(begins, [*begins[1:], len(pairs)], strict=True):
        for at in range(begin, end, candidate.max_pairs):  # one token's may be more than a call
            yield pairs[at : min(end, at + candidate.max_pairs)]


def _tokens_in(candidate: Candidate, per_token: int) -> int:
    """How many tokens a call to this worker may have, whatever part of their pairs it gets."""
    return max(1, candidate.max_pairs // per_token)
