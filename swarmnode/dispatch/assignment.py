"""Who computes which pairs of one call, in which parts: a plan of experts (`replicas.py`) carried over to pairs.

Pure. Large calls are cut to pieces (`cutting.py`), small ones only where a worker takes no more at once. Owned by
`call.py`, one per call, which asks for all pairs first, and again for those of a worker that failed or is late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from swarmnode.dispatch.call_actions import CallPolicy, Swarm
from swarmnode.dispatch.cutting import Pairs, Piece, by_experts, cut_pairs
from swarmnode.dispatch.health import DECODE_PAIRS
from swarmnode.dispatch.hello import experts_of, mask_of
from swarmnode.dispatch.replicas import LOCAL, Candidate, Plan, plan


class Assignment:
    """See the module. `experts[i]` is the expert of pair i; `kept` and `per_token` as in Call."""

    def __init__(
        self, experts: Sequence[int], n_expert: int, swarm: Swarm, policy: CallPolicy, kept: int, per_token: int
    ) -> None:
        self._experts, self._n_expert = experts, n_expert
        self._swarm, self._policy, self._kept, self._per_token = swarm, policy, kept, per_token
        self._array: NDArray[np.int32] | None = None

    def everything(self) -> Pairs:
        """Return all pairs of the call, ascending."""
        n_pairs = len(self._experts)
        return np.arange(n_pairs) if n_pairs > DECODE_PAIRS else range(n_pairs)

    def plan(self, pairs: Pairs, tried: frozenset[int]) -> Plan:
        """Share the experts of these pairs out to workers that are not among `tried`."""
        counts = None
        if len(pairs) > DECODE_PAIRS:
            number = np.bincount(self._as_array()[pairs], minlength=self._n_expert)
            need = mask_of(np.flatnonzero(number).tolist())
            if len(pairs) >= self._policy.spread_pairs:
                counts = number.tolist()
        else:
            need = mask_of({self._experts[pair] for pair in pairs})
        return plan(
            need,
            [c for c in self._swarm.candidates() if c.worker not in tried],
            local=self._swarm.local() if LOCAL not in tried else None,
            local_first=self._policy.local_first,
            kept=self._kept,
            pairs_per_expert=counts,
        )

    def parts(self, choice: Plan, pairs: Pairs) -> Iterable[Piece]:
        """Return the parts in which these pairs go to the workers of a plan, in the order in which they are to begin.

        The plan covers them all; the parts hold each once.
        """
        if len(pairs) > DECODE_PAIRS:
            every = np.asarray(pairs, np.intp)
            return cut_pairs(choice, every, self._as_array(), self._n_expert, self._per_token, self._swarm.cut)
        shares: list[list[int]] = [[] for _ in choice.shares]
        share_of = {e: share for (_, mask), share in zip(choice.shares, shares, strict=True) for e in experts_of(mask)}
        for pair in pairs:
            share_of[self._experts[pair]].append(pair)
        parts: list[Piece] = []
        for (candidate, _), mine in zip(choice.shares, shares, strict=True):
            if len(mine) <= candidate.max_pairs:
                parts.append((candidate, mine, -1))
            else:
                limited = by_experts(mine, self._as_array(), candidate.max_pairs)
                parts += [(candidate, part, -1) for part in limited]
        return parts

    def holds(self, candidate: Candidate, pairs: Pairs) -> bool:
        """Whether a worker can still be called, and holds all experts of these pairs."""
        held = next((c.held for c in self._swarm.candidates() if c.worker == candidate.worker), 0)
        return not mask_of({self._experts[pair] for pair in pairs}) & ~held

    def _as_array(self) -> NDArray[np.int32]:
        """The experts as an array: for calls that are cut only."""
        if self._array is None:
            self._array = np.asarray(self._experts, np.int32)
        return self._array
