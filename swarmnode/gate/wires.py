"""Measures what a swarm does to a model: on real text, on this machine.

    1  digests  every expert's bytes are those that were onboarded
    2  local    a short text by llama.cpp alone; this machine's experts are compared with what it has at each site, and
                its logits with those of 3
    3  exact    the short text with all experts on a worker process, over QUIC; each row is compared with this machine's
    4  layers   the text once, with exact experts; at each site every pair of types is tried on the same exact inputs
    5  logits   the text again: exactly, with partial sums, and once per pair as a whole, each site with the types that
                its cosine allows

4 and 5 use the real codec and no network. The experts are computed from the pack's own GGUF, so the reference is the
model as it is quantised, not as it was trained. Nothing of the text stays in memory but sums. A model whose experts do
not fit beside its backbone is gone through some layers at a time (`staged.py`). Blocks; called by the `gate` command in
a thread.

The experts are mapped, so a file that is cut short while it is read ends the process (SIGBUS), here or the worker's.
Size and time of the files are looked at between pieces of text, which makes most such changes an error of one line; the
rest end this process with what faulthandler says, and its temporary folder goes with the next gate (`temporary.py`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from swarmnode import __version__
from swarmnode.backbone.graph_trace import GraphPlan
from swarmnode.backbone.hook import F32, Experts
from swarmnode.backbone.library import library
from swarmnode.backbone.llama import LlamaModel
from swarmnode.backbone.trace import trace_model
from swarmnode.compute.device import choose_device
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.recipe import Site, recipes_hash
from swarmnode.errors import ModelError, SwarmnodeError
from swarmnode.fidelity import ExactLogits, LogitSums
from swarmnode.gate.bounds import fit
from swarmnode.gate.coding import Pair, pair_name
from swarmnode.gate.exact import POSITIONS, ExactRows, differing_rows, run_text
from swarmnode.gate.experts import ALL_PAIRS, CodedExperts, TeacherForced, site_engine
from swarmnode.gate.forward import CHUNK, Forward
from swarmnode.gate.integrity import verify_experts
from swarmnode.gate.local_run import LocalRun, run_locally
from swarmnode.gate.memory import backbone_memory, groups_within
from swarmnode.gate.options import MAX_THREADS, GateOptions
from swarmnode.gate.staged import Recording, Staged
from swarmnode.gate.temporary import gate_folder
from swarmnode.gate.text import HELD_OUT, file_tokens, held_out_tokens
from swarmnode.gate.verdict import (
    FINEST,
    FORMAT,
    MOST_FIGURE,
    SAFE,
    VERIFIED,
    PairFigures,
    SiteFigures,
    Verdict,
    printable,
)
from swarmnode.gate.verdict_file import bound_of
from swarmnode.gate.watch import Progress, Watch
from swarmnode.gate.worker_process import WorkerSettings, run_beside_worker
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.stamps import Stamps
from swarmnode.onboard import ModelPack

__all__ = ["MAX_THREADS", "GateOptions", "measure"]

# The finest, the cheapest, what is between them.
_MATTERS: tuple[Pair, ...] = (FINEST, ("int8", "int8"), ("int8", "f16"), ("fp8", "fp8"), *VERIFIED)


def measure(pack: ModelPack, options: GateOptions, progress: Progress | None = None) -> Verdict:
    """Run the gate. What `progress` raises ends it.

    Raises ModelError (no GGUF here, one that changes meanwhile or whose experts are not those that were onboarded, no
    room for one layer, NaN in the model, another graph than the pack's), UsageError (a text that is too short or says
    nothing), EngineError (and so ComputeError, where the worker process does not live).
    """
    began = time.monotonic()
    if pack.source is None:
        raise ModelError(
            f"{pack.path}: the gate computes every expert, and the GGUF is not on this machine or has changed: "
            "give its file"
        )
    source = GgufFile.open(pack.source)
    report = Watch(pack.source, Stamps.of(source.paths), progress or (lambda _stage, _done, _total: None))
    pack.verify_backbone(lambda done, total: report("backbone", done, total))
    room = psutil.virtual_memory().available if options.memory is None else options.memory
    sizes = [site.n_expert * pack.manifest.expert_bytes(site.index) for site in pack.manifest.sites]
    groups = groups_within(pack.manifest.name, backbone_memory(source, CHUNK), sizes, room)
    verify_experts(source, pack.manifest, lambda done, total: report("digests", done, total))
    model = LlamaModel(pack.backbone, remote_experts=True, gpu_layers=options.gpu_layers)
    try:
        with gate_folder() as folder:
            verdict = _Gate(pack, pack.source, options, model, groups, folder, report).run(began)
        report.look()
        return verdict
    except SwarmnodeError:
        report.look()  # what fails over a file that changes fails because of that
        raise
    finally:
        model.close()


class _Gate:
    def __init__(
        self,
        pack: ModelPack,
        source: Path,
        options: GateOptions,
        model: LlamaModel,
        groups: Sequence[range],
        folder: Path,
        report: Progress,
    ) -> None:
        self._pack, self._source, self._options, self._report = pack, source, options, report
        self._model, self._groups, self._folder = model, groups, folder
        self._sites = pack.manifest.sites
        self._staged = groups[0] != range(len(self._sites))
        self._positions = -(-options.positions // CHUNK) * CHUNK
        self._not_exact = _not_exact(options)
        text, count = options.text, self._positions + 1
        self._tokens = held_out_tokens(model, count) if text is None else file_tokens(model, text, count)
        self._expert_ne = {tensor.name: tensor.ne for tensor in pack.manifest.tensors}
        self._plan = trace_model(model, self._expert_ne)
        if recipes_hash([site.site for site in self._plan.sites]) != recipes_hash(self._sites):
            raise ModelError(
                f"{pack.path}: this llama.cpp builds another graph than the pack was made with; "
                "run swarmnode onboard again"
            )
        self._exact = Recording(folder / "exact")  # what each site answered without any wire

    def run(self, began: float) -> Verdict:
        options = self._options
        exact_rows: dict[int, tuple[int, int]] = {}
        figures: dict[int, SiteFigures] = {}
        logits: F32 | None = None
        tried = Recording(self._folder / "tried")
        local = self._local_run()
        for done, group in enumerate(self._groups):
            with self._engine(group) as engine:
                if not self._not_exact:
                    logits = self._beside_worker(engine, group, tried, exact_rows)
                figures |= self._layers(engine, group, done, exact_rows, local)
        whole = len(figures) == len(self._sites)
        sites = tuple(figures.get(site.index) or _unmeasured(site) for site in self._sites)
        pairs, partial = self._whole(sites) if whole else ((), None)
        return Verdict(
            format=FORMAT,
            version=__version__,
            bound=bound_of(self._pack, options.codec),
            name=printable(self._pack.manifest.name),
            text=printable(HELD_OUT if options.text is None else options.text.name),
            positions=self._positions,
            seconds=round(time.monotonic() - began, 3),
            own_kl=options.own_kl,
            exact_positions=POSITIONS if exact_rows else 0,
            local_differ=_logits_differ(local, logits) if whole else None,
            sites=sites,
            pairs=pairs,
            partial=partial,
            not_exact=self._not_exact,
            not_local=local.refused,
        )

    def _local_run(self) -> LocalRun:
        """The short text by llama.cpp alone, listened to at every site that is measured."""
        return run_locally(
            self._source,
            self._sites,
            self._expert_ne,
            self._tokens,
            self._folder / "local",
            listen=self._groups,
            threads=self._options.threads,
            progress=lambda done: self._report("local", done, POSITIONS),
        )

    def _beside_worker(
        self, engine: ExpertEngine, group: range, tried: Recording, found: dict[int, tuple[int, int]]
    ) -> F32:
        """The text in exact mode with the group's experts on a worker process: its logits; `found` gets
        (rows, of them differing) of each site."""
        at = 0

        def note(done: int) -> None:
            nonlocal at
            at = done

        def work(client: Experts) -> F32:
            rows = ExactRows(client, engine, self._sites)
            tried.rewind()
            with closing(self._forward(self._one_group(rows, group, tried, keep=True))) as forward:
                logits = run_text(forward, self._tokens, note)
            found.update({index: (rows.rows[index], rows.differ[index]) for index in group})
            return logits

        settings = WorkerSettings(
            manifest_file=self._pack.path / "manifest.json",
            manifest=self._pack.manifest,
            source=self._source,
            group=group,
            threads=self._options.threads,
            device=self._options.device,
        )
        return run_beside_worker(settings, work, lambda: self._report("exact", at, POSITIONS))

    def _layers(
        self,
        engine: ExpertEngine,
        group: range,
        done: int,
        exact_rows: dict[int, tuple[int, int]],
        local: LocalRun,
    ) -> dict[int, SiteFigures]:
        """Every pair of types at each site of the group, on the same exact inputs; and what llama.cpp has there."""
        sites = [self._sites[index] for index in group]
        forced = TeacherForced(engine, sites, self._options.codec, self._positions)
        total = len(self._groups) * self._positions
        self._exact.rewind()
        with closing(self._forward(self._one_group(forced, group, self._exact, keep=True))) as forward:
            for at in range(0, self._positions, CHUNK):
                self._report("layers", done * self._positions + at, total)
                forward.logits(self._tokens[at : at + CHUNK])
        self._report("layers", (done + 1) * self._positions, total)
        figures = {}
        for site in sites:
            tails = forced.tails[site.index]
            lowest = {_key(pair): tails[pair].lowest for pair in ALL_PAIRS}
            mean = {_key(pair): tails[pair].mean for pair in ALL_PAIRS}
            rows, differ = exact_rows.get(site.index, (0, 0))
            beside = local.compare(engine, site)
            figures[site.index] = SiteFigures(site.layer, site.d_in, site.d_out, lowest, mean, rows, differ, beside)
        return figures

    def _whole(self, sites: Sequence[SiteFigures]) -> tuple[tuple[PairFigures, ...], PairFigures | None]:
        """Each pair of types as a whole, and partial sums. Pairs that came to the same types everywhere are run once.

        What is played back has to lie on disk: where that has not the room, what matters less is left out, but never
        what judges the model, which is partial sums and F16.
        """
        wires = {pair: _wires(sites, pair) for pair in sorted(VERIFIED, key=_MATTERS.index)}
        chosen = [None, *dict.fromkeys(wires.values())]  # None: partial sums
        if self._staged:
            chosen = chosen[: max(2, shutil.disk_usage(self._folder).free // 2 // self._recorded)]
        runs = {one: _Run(one, Recording(self._folder / f"run-{i}")) for i, one in enumerate(chosen)}
        total = len(self._groups) * self._positions
        for done, group in enumerate(self._groups):
            with self._engine(group) as engine:
                self._whole_group(engine, group, list(runs.values()), (done * self._positions, total))
        self._report("logits", total, total)
        partial = _figures(SAFE, (SAFE,) * len(sites), runs[None])
        return tuple(
            _figures(pair, wires[pair], runs[wires[pair]]) for pair in VERIFIED if wires[pair] in runs
        ), partial

    @property
    def _recorded(self) -> int:
        """Bytes on disk of one run over the text."""
        return self._positions * 4 * sum(site.d_out for site in self._sites)

    def _whole_group(self, engine: ExpertEngine, group: range, runs: Sequence[_Run], progress: tuple[int, int]) -> None:
        coded = CodedExperts(engine, [self._sites[index] for index in group], self._options.codec)
        experts = self._one_group(coded, group, self._exact, keep=False)
        is_last = group.stop == len(self._sites)
        for recording in [self._exact, *(run.recording for run in runs)]:
            recording.rewind()
        with closing(self._forward(experts)) as forward:

            def logits(tokens: Sequence[int], recording: Recording, *, keep: bool) -> F32:
                if isinstance(experts, Staged):
                    experts.recording, experts.keep = recording, keep
                return forward.logits(tokens)

            for at in range(0, self._positions, CHUNK):
                self._report("logits", progress[0] + at, progress[1])
                tokens = self._tokens[at : at + CHUNK]
                coded.wires, coded.backwards = {}, False
                if is_last:
                    targets = np.array(self._tokens[at + 1 : at + CHUNK + 1], np.int64)
                    exact = ExactLogits(_finite(logits(tokens, self._exact, keep=False)), targets)
                for run in runs:
                    coded.wires, coded.refused = dict(enumerate(run.wires or ())), 0
                    coded.backwards = run.wires is None
                    found = logits(tokens, run.recording, keep=not is_last)
                    run.refused += coded.refused
                    if is_last:
                        run.logits.add(exact, found)

    @contextmanager
    def _engine(self, group: range) -> Iterator[ExpertEngine]:
        options = self._options
        engine = site_engine(self._source, self._pack.manifest, group, threads=options.threads, device=options.device)
        try:
            yield engine
        finally:
            engine.close()

    def _one_group(self, experts: Experts, group: range, recording: Recording, *, keep: bool) -> Experts:
        """These experts for the group's sites; where that is not all of them, the others are played back."""
        return Staged(experts, self._sites, group, recording, keep=keep) if self._staged else experts

    def _forward(self, experts: Experts) -> Forward:
        plan: GraphPlan = self._plan
        return Forward(self._model, plan, experts, threads=self._options.threads)


@dataclass(slots=True)
class _Run:
    """The text once more, with these types at the sites; None for partial sums in F32."""

    wires: tuple[Pair, ...] | None
    recording: Recording
    logits: LogitSums = field(default_factory=LogitSums)
    refused: int = 0  # rows that were not finite when they arrived


def _not_exact(options: GateOptions) -> str:
    """Why exact mode is not tried, "" where it is: on a GPU sums are added up in another order."""
    if not options.worker:
        return "no worker process was wanted"
    device = choose_device(options.device)
    if not device.is_cpu:
        return f"experts are computed on {device.name}, where sums are added up in another order"
    if options.gpu_layers and library().llama_supports_gpu_offload():
        return "layers of the backbone lie on a GPU, where sums are added up in another order"
    return ""


def _logits_differ(local: LocalRun, logits: F32 | None) -> int | None:
    """How many positions' logits are not those of llama.cpp alone, None where one of the two was not run."""
    return None if local.logits is None or logits is None else differing_rows(local.logits, logits)


def _unmeasured(site: Site) -> SiteFigures:
    return SiteFigures(site.layer, site.d_in, site.d_out, {}, {})


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


def _figures(pair: Pair, wires: tuple[Pair, ...], sums: _Run) -> PairFigures:
    found = sums.logits.result()
    return PairFigures(
        out=pair[0],
        back=pair[1],
        wires=wires,
        positions=found.positions,
        confident=found.confident,
        argmax=found.argmax,
        argmax_confident=found.argmax_confident,
        kl=min(found.kl, MOST_FIGURE),
        dnll=max(-MOST_FIGURE, min(found.dnll, MOST_FIGURE)),
        broken=found.broken + sums.refused,
    )
