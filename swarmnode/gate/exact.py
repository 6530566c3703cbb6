"""Exact mode, as it is used: are the rows that come back from a worker process this machine's own, byte by byte?

A text of PROMPT tokens in one batch and then one token after the other, so that ggml's kernels for many rows and for
few are both asked. Called by `wires.py`; the worker process is `worker_process.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarmnode.backbone.hook import F32, I32, Experts, PendingRows
from swarmnode.compute.engine_api import Engine
from swarmnode.compute.recipe import Site
from swarmnode.gate.experts import Call
from swarmnode.gate.forward import CHUNK, Forward

STEPS = 32
PROMPT = CHUNK - STEPS
POSITIONS = PROMPT + STEPS


def run_text(forward: Forward, tokens: Sequence[int], progress: Callable[[int], None]) -> F32:
    """Logits [POSITIONS, n_vocab] of the first tokens; `progress` hears how many are done."""
    logits = [forward.logits(tokens[:PROMPT])]
    for at in range(PROMPT, POSITIONS):
        progress(at)
        logits.append(forward.logits(tokens[at : at + 1], at))
    progress(POSITIONS)
    return np.concatenate(logits)


def differing_rows(a: F32, b: F32) -> int:
    """How many rows of [n, d] are not the same bytes; all, where the shapes differ."""
    if a.shape != b.shape:
        return max(len(a), len(b))
    bits = (np.ascontiguousarray(one, np.float32).view(np.uint32) for one in (a, b))
    return int(np.not_equal(*bits).any(axis=1).sum())


@dataclass(slots=True)
class ExactRows:
    """Answers with what `remote` answers, and counts the rows of each site that are not `engine`'s own."""

    remote: Experts
    engine: Engine
    sites: Sequence[Site]
    rows: dict[int, int] = field(init=False)
    differ: dict[int, int] = field(init=False)
    _by_index: dict[int, Site] = field(init=False)

    def __post_init__(self) -> None:
        self._by_index = {site.index: site for site in self.sites}
        self.rows = dict.fromkeys(self._by_index, 0)
        self.differ = dict.fromkeys(self._by_index, 0)

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> PendingRows:
        """See `hook.Experts`."""
        call = Call.of(self._by_index[site], x, ids, weights)
        return _Both(self, call, self.remote.submit(site, x, ids, weights))


class _Both:
    def __init__(self, owner: ExactRows, call: Call, pending: PendingRows) -> None:
        self._owner, self._call, self._pending = owner, call, pending

    def fail(self, error: BaseException) -> None:
        """See `hook.PendingRows`."""
        fail = getattr(self._pending, "fail", None)
        if fail is not None:
            fail(error)

    def result(self) -> F32:
        """See `hook.PendingRows`."""
        call, owner = self._call, self._owner
        own = call.total(owner.engine, call.x)
        rows = self._pending.result()
        owner.rows[call.site.index] += len(own)
        owner.differ[call.site.index] += differing_rows(own, rows)
        return rows
