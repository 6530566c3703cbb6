"""Makes the heavy parts of a node: model pack, worker engine, local engine, session. `node.py` runs it in threads.

Each function leaves nothing open when it raises. `report(event, **fields)` hears of progress; what it raises ends the
work, which is how Ctrl-C reaches a thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swarmnode.backbone.hook import EvalHook
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import Session
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.recipe import Site, recipes_hash
from swarmnode.config import NodeConfig, default_cache_dir
from swarmnode.dispatch.client import ExpertClient
from swarmnode.errors import ModelError, UsageError
from swarmnode.experts_spec import parse_experts
from swarmnode.model.digests import digest_experts
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import corrupt_expert
from swarmnode.model.slicing import StackedTensor
from swarmnode.model.source_bank import SourceBank
from swarmnode.model.store import SliceStore
from swarmnode.onboard import ModelPack, onboard, trace_model

DEFAULT_CONTEXT = 4096  # tokens, where the model was trained for more


class Report(Protocol):
    """Takes an event: its name and fields."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Must not block; called from the thread that works."""


def resolve_pack(model: Path, report: Report) -> ModelPack:
    """The pack that `--model` means: a pack folder, or one made (and kept in the cache) from a GGUF."""
    if model.is_dir():
        return ModelPack.open(model)
    if not model.is_file():
        raise ModelError(f"{model}: no such file: give a GGUF or a model pack made by swarmnode onboard")
    key = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:12]
    return onboard(
        model,
        default_cache_dir() / "packs" / f"{model.stem[:60]}-{key}",
        lambda stage, done, total: report("onboard", stage=stage, done=done, total=total),
    )


class WorkerParts:
    """A worker's slices on disk and the engine over them."""

    def __init__(self, config: NodeConfig, pack: ModelPack, report: Report) -> None:
        """Fill this node's slices from the source where any are missing, then map them."""
        manifest = pack.manifest
        assert config.experts is not None
        wanted = parse_experts(config.experts, manifest.sites)
        if not wanted:
            raise UsageError(f"--experts {config.experts}: that is no expert at all")
        self._store = SliceStore(config.state_dir / "slices" / manifest.model_hash[:16], manifest)
        try:
            if self._store.missing(wanted):
                self._fill(config.source or pack.source, pack, wanted, report)
            stacked = {site.index: self._store.stacked(site.index) for site in manifest.sites if site.index in wanted}
            self.engine = engine_over(manifest.sites, stacked, config)
        except BaseException:
            self._store.close()
            raise

    def _fill(self, source: Path | None, pack: ModelPack, wanted: dict[int, tuple[int, ...]], report: Report) -> None:
        if source is None:
            raise ModelError(
                f"{pack.path}: its GGUF is not where it was, or has changed: give --source MODEL.gguf or onboard again"
            )
        self._store.fill_from_source(source, wanted, lambda done, total: report("slices", done=done, total=total))

    def close(self) -> None:
        """Free the engine, then let the store go."""
        self.engine.close()
        self._store.close()


def engine_over(
    sites: Sequence[Site], stacked: Mapping[int, Mapping[str, StackedTensor]], config: NodeConfig
) -> ExpertEngine:
    """An engine over stacked slices (site index → tensor name → slices)."""
    bank = ExpertBank(sites, stacked, config.device)
    try:
        return ExpertEngine(bank, threads=config.threads)
    except BaseException:
        bank.close()
        raise


def local_engine(config: NodeConfig, pack: ModelPack, report: Report) -> ExpertEngine | None:
    """The backbone's own copy of all experts, mapped and untouched until it is needed; None where it may have none.

    The pack's own source is known to be what was onboarded; a file given by --source is read once to verify it.
    """
    source = config.source or pack.source
    if not config.local_experts or source is None:
        return None
    manifest = pack.manifest
    gguf = GgufFile.open(source)
    bank = SourceBank(gguf, manifest)
    if config.source is not None:
        found = digest_experts(gguf, manifest.sites, lambda done, total: report("verify", done=done, total=total))
        for site, (here, there) in enumerate(zip(found, manifest.digests, strict=True)):
            wrong = [expert for expert, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]]
            if wrong:
                raise corrupt_expert(manifest, site, wrong[0], str(source))
    stacked = {site.index: bank.stacked(site.index) for site in manifest.sites}
    return engine_over(manifest.sites, stacked, config)


def load_session(config: NodeConfig, pack: ModelPack, client: ExpertClient, report: Report) -> Session:
    """The backbone's model with its hook; ModelError where its graph is not the one the pack was made with."""
    manifest = pack.manifest
    model = LlamaModel(
        pack.backbone,
        remote_experts=True,
        gpu_layers=config.gpu_layers,
        progress=lambda done: report("load", done=done),
    )
    try:
        plan = trace_model(model, {tensor.name: tensor.ne for tensor in manifest.tensors})
        if recipes_hash([site.site for site in plan.sites]) != recipes_hash(manifest.sites):
            raise ModelError(
                f"{pack.path}: this llama.cpp builds another graph than the pack was made with; "
                "run swarmnode onboard again"
            )
        hook = EvalHook(plan, client)
        context = LlamaContext(
            model,
            n_context=config.context or min(model.n_context_trained, DEFAULT_CONTEXT),
            n_batch=config.batch,
            threads=config.threads,
            callback=hook,
        )
    except BaseException:
        model.close()
        raise

    def round_trips() -> int:
        return sum(stats.calls for stats in client.site_stats().values())

    return Session(model, context, hook, round_trips=round_trips, release=client.cancel_all)
