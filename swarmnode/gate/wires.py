"""Measures what each wire type does to a model: on real text, on this machine, with the real codec and no network.

    1  layers   the text once, with exact experts; at each site every pair of types is tried on the same exact inputs
    2  logits   the text again: exactly, and once per pair as a whole, each site with the types that its cosine allows

The experts are computed from the pack's own GGUF, so the reference is the model as it is quantised, not as it was
trained. Nothing of the text stays in memory but sums. Blocks; called by the `gate` command in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from swarmnode.backbone.graph_trace import GraphPlan
from swarmnode.backbone.hook import F32, Experts
from swarmnode.backbone.llama import LlamaModel
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.recipe import recipes_hash
from swarmnode.errors import ModelError, UsageError
from swarmnode.fidelity import ExactLogits, LogitSums
from swarmnode.gate.bounds import MIN_POSITIONS, fit
from swarmnode.gate.coding import Codec, Pair, pair_name
from swarmnode.gate.experts import ALL_PAIRS, CodedExperts, TeacherForced
from swarmnode.gate.forward import CHUNK, Forward
from swarmnode.gate.text import HELD_OUT, file_tokens, held_out_tokens
from swarmnode.gate.verdict import FORMAT, VERIFIED, PairFigures, SiteFigures, Verdict
from swarmnode.gate.verdict_file import bound_of
from swarmnode.model.source_bank import SourceBank
from swarmnode.onboard import ModelPack, trace_model

MAX_POSITIONS = 1 << 20
Progress = Callable[[str, int, int], None]  # (stage, positions done, of how many)
_LARGEST = 1e6  # nats: what is further off is told from it by nobody


@dataclass(frozen=True, slots=True)
class GateOptions:
    """How to measure. `positions` is rounded up to whole chunks; `text` is a file of the user's own; `own_kl` what the
    model's quantisation costs (KL to its unquantised weights, nats per position), where that is known."""

    positions: int = 2048
    text: Path | None = None
    own_kl: float | None = None
    threads: int = 1
    device: str = "auto"
    gpu_layers: int = 0
    codec: Codec = field(default_factory=Codec)

    def __post_init__(self) -> None:
        if not MIN_POSITIONS <= self.positions <= MAX_POSITIONS:
            few = "; of fewer, the lowest 0.1 % of rows says nothing" if self.positions < MIN_POSITIONS else ""
            raise UsageError(f"{self.positions} positions: give {MIN_POSITIONS} to {MAX_POSITIONS}{few}")
        if self.own_kl is not None and not 0 < self.own_kl <= 10:
            raise UsageError(f"a quantisation that costs a KL of {self.own_kl:g} cannot be meant")


def measure(pack: ModelPack, options: GateOptions, progress: Progress | None = None) -> Verdict:
    """Run the gate. What `progress` raises ends it.

    Raises ModelError (no GGUF here, NaN from the model itself, another graph than the pack's), UsageError (a text that
    is too short), EngineError.
    """
    report = progress or (lambda _stage, _done, _total: None)
    began = time.monotonic()
    if pack.source is None:
        raise ModelError(
            f"{pack.path}: the gate computes every expert, and the GGUF is not on this machine or has changed: "
            "give its file"
        )
    pack.verify_backbone()
    engine = _engine(pack, pack.source, options)
    try:
        model = LlamaModel(pack.backbone, remote_experts=True, gpu_layers=options.gpu_layers)
        try:
            return _Gate(pack, options, model, engine, report).run(began)
        finally:
            model.close()
    finally:
        engine.close()


def _engine(pack: ModelPack, source: Path, options: GateOptions) -> ExpertEngine:
    slices = SourceBank(source, pack.manifest)
    stacked = {site.index: slices.stacked(site.index) for site in pack.manifest.sites}
    bank = ExpertBank(pack.manifest.sites, stacked, options.device)
    try:
        return ExpertEngine(bank, threads=options.threads)
    finally:
        bank.close()  # it goes when the engine does


class _Gate:
    def __init__(
        self, pack: ModelPack, options: GateOptions, model: LlamaModel, engine: ExpertEngine, report: Progress
    ) -> None:
        self._pack, self._options, self._report = pack, options, report
        self._model, self._engine = model, engine
        self._sites = pack.manifest.sites
        self._positions = -(-options.positions // CHUNK) * CHUNK
        text, count = options.text, self._positions + 1
        self._tokens = held_out_tokens(model, count) if text is None else file_tokens(model, text, count)
        self._plan = trace_model(model, {tensor.name: tensor.ne for tensor in pack.manifest.tensors})
        if recipes_hash([site.site for site in self._plan.sites]) != recipes_hash(self._sites):
            raise ModelError(
                f"{pack.path}: this llama.cpp builds another graph than the pack was made with; "
                "run swarmnode onboard again"
            )

    def run(self, began: float) -> Verdict:
        sites, identical = self._layers()
        pairs = self._whole(sites)
        options = self._options
        return Verdict(
            format=FORMAT,
            bound=bound_of(self._pack, options.codec),
            name=self._pack.manifest.name,
            text=(HELD_OUT if options.text is None else options.text.name)[:300],
            positions=self._positions,
            seconds=round(time.monotonic() - began, 3),
            own_kl=options.own_kl,
            identical=identical,
            sites=sites,
            pairs=pairs,
        )

    def _layers(self) -> tuple[tuple[SiteFigures, ...], bool | None]:
        forced = TeacherForced(self._engine, self._sites, self._options.codec, self._positions)
        first: F32 | None = None
        with closing(self._forward(forced)) as forward:
            for at in range(0, self._positions, CHUNK):
                self._report("layers", at, self._positions)
                logits = forward.logits(self._tokens[at : at + CHUNK])
                first = logits if first is None else first
        self._report("layers", self._positions, self._positions)
        figures = []
        for site in self._sites:
            tails = forced.tails[site.index]
            lowest = {_key(pair): tails[pair].lowest for pair in ALL_PAIRS}
            mean = {_key(pair): tails[pair].mean for pair in ALL_PAIRS}
            figures.append(SiteFigures(site.layer, site.d_in, site.d_out, lowest, mean))
        return tuple(figures), self._is_local(first)

    def _is_local(self, first: F32 | None) -> bool | None:
        """Whether a plain local run gives these bits for the first chunk; not asked where it would crowd this machine
        out (its weights are read into memory), or where a GPU adds up in another order."""
        source = self._pack.source
        assert source is not None
        size = sum(file.size for file in self._pack.manifest.source_files)
        if first is None or self._options.gpu_layers or size > psutil.virtual_memory().available // 2:
            return None
        model = LlamaModel(source, remote_experts=False)
        try:
            with closing(Forward(model, threads=self._options.threads)) as forward:
                return forward.logits(self._tokens[: len(first)]).tobytes() == first.tobytes()
        finally:
            model.close()

    def _whole(self, sites: Sequence[SiteFigures]) -> tuple[PairFigures, ...]:
        """Each pair of types as a whole. Pairs that came to the same types everywhere are run once."""
        wires = {pair: _wires(sites, pair) for pair in VERIFIED}
        sums = {chosen: _Sums() for chosen in wires.values()}
        coded = CodedExperts(self._engine, self._sites, self._options.codec)
        with closing(self._forward(coded)) as forward:
            for at in range(0, self._positions, CHUNK):
                self._report("logits", at, self._positions)
                tokens = self._tokens[at : at + CHUNK]
                coded.wires = {}
                targets = np.array(self._tokens[at + 1 : at + CHUNK + 1], np.int64)
                exact = ExactLogits(_finite(forward.logits(tokens)), targets)
                for chosen, total in sums.items():
                    coded.wires, coded.refused = dict(enumerate(chosen)), 0
                    total.logits.add(exact, forward.logits(tokens))
                    total.refused += coded.refused
        self._report("logits", self._positions, self._positions)
        return tuple(_figures(pair, chosen, sums[chosen]) for pair, chosen in wires.items())

    def _forward(self, experts: Experts) -> Forward:
        plan: GraphPlan = self._plan
        return Forward(self._model, plan, experts, threads=self._options.threads)


@dataclass(slots=True)
class _Sums:
    logits: LogitSums = field(default_factory=LogitSums)
    refused: int = 0  # rows that were not finite when they arrived


def _key(pair: Pair) -> str:
    return pair_name(pair).lower()


def _wires(sites: Sequence[SiteFigures], wanted: Pair) -> tuple[Pair, ...]:
    """The types of each site that its cosine allows."""
    return tuple(
        fit({pair: site.lowest_of(pair) for pair in ALL_PAIRS}, wanted, site.d_in, site.d_out) for site in sites
    )


def _finite(logits: F32) -> F32:
    if not np.isfinite(logits).all():
        raise ModelError("the model's own logits hold NaN or infinity; check the model file")
    return logits


def _figures(pair: Pair, wires: tuple[Pair, ...], sums: _Sums) -> PairFigures:
    found = sums.logits.result()
    return PairFigures(
        out=pair[0],
        back=pair[1],
        wires=wires,
        positions=found.positions,
        confident=found.confident,
        argmax=found.argmax,
        argmax_confident=found.argmax_confident,
        kl=min(found.kl, _LARGEST),
        dnll=max(-_LARGEST, min(found.dnll, _LARGEST)),
        broken=found.broken + sums.refused,
    )
