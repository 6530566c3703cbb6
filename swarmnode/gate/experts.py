"""A site's experts computed in this process, with what would have travelled sent through the codec: no network.

What a client and its workers do to the numbers in partial mode, and nothing else of it. Two of them, both `Experts` of
`backbone/hook.py`: `CodedExperts` answers with what came through the wires; `TeacherForced` answers with the exact sum
and only notes what each pair of wires would have made of it. Called by `wires.py`; not thread safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

from swarmnode.backbone.hook import F32, I32
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.engine_api import Engine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.codec import WireName
from swarmnode.errors import ModelError
from swarmnode.fidelity import CosineTail, RowReference
from swarmnode.gate.coding import WIRES, Codec, Pair
from swarmnode.model.manifest import Manifest
from swarmnode.model.source_bank import SourceBank

ALL_PAIRS: tuple[Pair, ...] = tuple(product(WIRES, WIRES))


def site_engine(source: Path, manifest: Manifest, group: range, *, threads: int, device: str) -> ExpertEngine:
    """All experts of the sites of `group`, mapped from the GGUF itself."""
    slices = SourceBank(source, manifest)
    bank = ExpertBank(manifest.sites, {index: slices.stacked(index) for index in group}, device)
    try:
        return ExpertEngine(bank, threads=threads)
    finally:
        bank.close()  # it goes when the engine does


@dataclass(frozen=True, slots=True)
class Ready:
    """An answer that is there already."""

    rows: F32

    def result(self) -> F32:
        """See `hook.PendingRows`."""
        return self.rows


@dataclass(frozen=True, slots=True)
class Call:
    """What the hook hands over, as an engine wants it: x [n or n × k, d_in]; the others [n × k]."""

    site: Site
    n_tokens: int
    x: F32
    rows: I32  # of x, per pair
    tokens: I32
    experts: I32
    weights: F32 | None  # None where x is weighted already

    @classmethod
    def of(cls, site: Site, x: F32, ids: I32, weights: F32) -> Call:
        """See `hook.Experts.submit` for the shapes."""
        n, k = ids.shape
        tokens = np.repeat(np.arange(n, dtype=np.int32), k)
        experts = np.ascontiguousarray(ids, np.int32).reshape(-1)
        x = np.ascontiguousarray(x, np.float32).reshape(-1, site.d_in)
        if site.recipe.weights == "before":
            return cls(site, n, x, np.arange(n * k, dtype=np.int32), tokens, experts, None)
        return cls(site, n, x, tokens, tokens, experts, np.ascontiguousarray(weights, np.float32).reshape(-1))

    def total(self, engine: Engine, x: F32) -> F32:
        """Σ wᵢ·Eᵢ(x) per token, added up in rank order: the local run's bits where x is its own. [n, d_out]"""
        return engine.partial_sums(
            self.site.index, x, self.rows, self.experts, self.weights, self.tokens, self.n_tokens
        )

    def terms(self, engine: Engine, x: F32) -> F32:
        """Each wᵢ·Eᵢ(x) by itself, [n × k, d_out]: what comes back when no two experts live on one worker."""
        rows = engine.raw_rows(self.site.index, x, self.rows, self.experts)
        if self.weights is not None:
            rows *= self.weights[:, None]
        return rows


class CodedExperts:
    """Experts behind wires: `wires` are the types per site, out and back; sites that it does not name are exact.

    One worker has all experts: how many there are hardly changes the figures, see `TeacherForced`. `refused` counts
    rows that were not finite when they arrived. A client would refuse them; here they become zeros, as llama.cpp's
    router must not see NaN. `backwards`: each expert on a worker of its own and the sums added up from the last rank
    on, which is what partial sums in F32 do to the bits, at most.
    """

    def __init__(self, engine: Engine, sites: Sequence[Site], codec: Codec) -> None:
        self._engine, self._codec = engine, codec
        self._sites = {site.index: site for site in sites}
        self.wires: Mapping[int, Pair] = {}
        self.refused = 0
        self.backwards = False

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> Ready:
        """See `hook.Experts`."""
        call = Call.of(self._sites[site], x, ids, weights)
        if self.backwards:
            terms = call.terms(self._engine, call.x).reshape(*ids.shape, -1)
            return Ready(_added(terms, range(ids.shape[1] - 1, -1, -1)))
        out, back = self.wires.get(site, ("f32", "f32"))
        rows = self._codec.through(call.total(self._engine, self._codec.through(call.x, out)), back)
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(bad):
            self.refused += len(bad)
            rows = rows.copy()  # it may be a view of what was sent
            rows[bad] = 0
        return Ready(rows)


@dataclass
class TeacherForced:
    """Exact experts that note, per site and pair of wires, how the layer's output compares with the exact one.

    The way back is judged twice, with all of a token's experts on one worker (one sum comes back) and each on its own
    (k rows come back, and are added up last rank first, so that F32 both ways shows what the order of addition does):
    a row counts with the lower cosine. On the demo model the two differ in the fifth digit.
    """

    engine: Engine
    sites: Sequence[Site]
    codec: Codec
    expected: int  # rows per site in all
    tails: dict[int, dict[Pair, CosineTail]] = field(init=False)

    def __post_init__(self) -> None:
        self.tails = {site.index: {pair: CosineTail(self.expected) for pair in ALL_PAIRS} for site in self.sites}
        self._by_index = {site.index: site for site in self.sites}

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> Ready:
        """See `hook.Experts`."""
        call = Call.of(self._by_index[site], x, ids, weights)
        exact = call.total(self.engine, call.x)
        if not (np.isfinite(call.x).all() and np.isfinite(exact).all()):
            raise ModelError(f"layer {call.site.layer}: NaN or infinity without any wire; check the model file")
        reference = RowReference(exact)
        for out in WIRES:
            self._note(call, reference, out)
        return Ready(exact)

    def _note(self, call: Call, reference: RowReference, out: WireName) -> None:
        n, k = call.n_tokens, len(call.experts) // max(1, call.n_tokens)
        terms = call.terms(self.engine, self.codec.through(call.x, out))
        total = _added(terms.reshape(n, k, -1), range(k))
        for back in WIRES:
            alone = self.codec.through(terms, back).reshape(n, k, -1)
            cosines = np.minimum(  # NaN stays NaN
                reference.cosines(self.codec.through(total, back)),
                reference.cosines(_added(alone, range(k - 1, -1, -1))),
            )
            self.tails[call.site.index][out, back].add(cosines)


def _added(terms: F32, ranks: Sequence[int]) -> F32:
    """[n, k, d] -> [n, d], one rank after the other."""
    total = terms[:, ranks[0]].copy()
    for rank in ranks[1:]:
        total += terms[:, rank]
    return total
