"""Makes the heavy parts of a node: model pack, worker engine, local engine, session. `node.py` runs it in threads.

Each function leaves nothing open when it raises. `report(event, **fields)` hears of progress; what it raises ends the
work, which is how Ctrl-C reaches a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swarmnode.backbone.draft_model import DraftModel
from swarmnode.backbone.draft_policy import DraftPriors
from swarmnode.backbone.graph_trace import GraphPlan
from swarmnode.backbone.hook import EvalHook
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import MakeDrafter, Session
from swarmnode.backbone.speculation import Speculator
from swarmnode.backbone.trace import trace_model
from swarmnode.bulk.fetcher import Fetcher
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.recipe import recipes_hash
from swarmnode.config import NodeConfig, default_cache_dir
from swarmnode.dispatch.call_actions import CallPolicy
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.codec import WireName
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.errors import CorruptSlice, DownloadFailed, ModelError, SourceChanged, TruncatedFile, UsageError
from swarmnode.experts_spec import parse_experts
from swarmnode.gate import best_wires, gate_failure, wires_allowed
from swarmnode.model.digests import digest_experts
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.http_url import file_name, url_of
from swarmnode.model.manifest import corrupt_expert, told_address
from swarmnode.model.recorded_digests import RecordedDigests
from swarmnode.model.source_bank import SourceBank
from swarmnode.model.store import SliceStore
from swarmnode.onboard import ModelPack, check_whole, onboard

if TYPE_CHECKING:
    from swarmnode.model.http_source import HttpSource

DEFAULT_CONTEXT = 4096  # tokens, where the model was trained for more
BATCH, LARGEST_BATCH = 512, 2048  # tokens of a prompt in one step; the second where the link's figures decide
TAKE_BACK = 8  # drafts where layers keep a running state: each costs a copy of it per generation
HEARTBEAT_S = 0.25  # how soon Ctrl-C is noticed while a server is waited for
log = logging.getLogger(__name__)


class Report(Protocol):
    """Takes an event: its name and fields."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Must not block; called from the thread that works."""


def resolve_pack(model: Path | str, report: Report) -> ModelPack:
    """The pack that `--model` means: a pack folder, or one made (and kept in the cache) from a GGUF or its address.

    Any part of a split GGUF means the whole, and so the same pack. Raises UsageError, and what `onboard` raises.
    """
    if not str(model).strip():
        raise UsageError("which model? give a GGUF, its http(s) address, or a model pack")
    url = url_of(model)
    if url is not None:
        key = hashlib.sha256(url.encode()).hexdigest()[:12]
        folder = default_cache_dir() / "packs" / f"{Path(file_name(url)).stem[:60]}-{key}"
        try:
            return onboard(
                url, folder, lambda stage, done, total: report("onboard", stage=stage, done=done, total=total)
            )
        except SourceChanged:
            raise
        except DownloadFailed as error:  # what was made before does without the server
            if not (folder / "manifest.json").is_file():
                raise
            log.warning("onboard_offline why=%r", str(error))
            return ModelPack.open(folder)
    model = Path(model)
    if model.is_dir():
        return ModelPack.open(model)
    if not model.is_file():
        raise ModelError(f"{model}: no such file: give a GGUF or a model pack made by swarmnode onboard")
    first = GgufFile.open(model).paths[0]
    key = hashlib.sha256(str(first.resolve()).encode()).hexdigest()[:12]
    return onboard(
        first,
        default_cache_dir() / "packs" / f"{first.stem[:60]}-{key}",
        lambda stage, done, total: report("onboard", stage=stage, done=done, total=total),
    )


def http_source(pack: ModelPack, source: Path | str | None = None) -> HttpSource | None:
    """The web server to take experts from, if there is one: the user's `--source`, what the pack was made from, or
    what the manifest names. Made on the loop; needs `close`. Raises UsageError."""
    url = (url_of(source) if source is not None else None) or pack.url
    if not url and not told_address(pack.manifest):
        return None
    from swarmnode.model.http_source import HttpSource  # noqa: PLC0415  httpx costs 0.2 s and 10 MB

    return HttpSource(pack.manifest, url, RecordedDigests(pack.manifest, pack.path / "digests.json"))


class WorkerParts:
    """A worker's slices on disk and the engine over them; a member of a swarm begins with what it has."""

    def __init__(self, config: NodeConfig, pack: ModelPack, report: Report) -> None:
        """Fill this node's slices from the source where any that its user wants are missing, then map them."""
        check_gate(config, pack, report)
        manifest = pack.manifest
        wanted: dict[int, tuple[int, ...]] = {}
        if config.experts is not None:
            wanted = parse_experts(config.experts, manifest.sites)
            if not wanted:
                raise UsageError(f"--experts {config.experts}: that is no expert at all")
        self.store = open_store(config.state_dir / "slices" / manifest.model_hash[:16], pack, report)
        try:
            if self.store.missing(wanted):
                self._fill(config.source or pack.source, pack, wanted, report)
            self.store.note_verified()
            serves = wanted or self.store.holdings()  # of a swarm: what it was told to hold when it ran last
            stacked = {site: self.store.stacked(site) for site in serves}
            self._bank = ExpertBank(manifest.sites, stacked, config.device)
            self.engine = ExpertEngine(self._bank, threads=config.threads)
        except BaseException:
            self.store.close()
            raise

    def _fill(self, source: Path | None, pack: ModelPack, wanted: dict[int, tuple[int, ...]], report: Report) -> None:
        if (source is not None and url_of(source)) or (source is None and (pack.url or told_address(pack.manifest))):
            asyncio.run(_fill_from_server(self.store, pack, source, wanted, report))
            return
        if source is None:
            raise ModelError(
                f"{pack.path}: its GGUF is not where it was, or has changed: give --source MODEL.gguf or onboard again"
            )
        self.store.fill_from_source(source, wanted, lambda done, total: report("slices", done=done, total=total))

    def second_engine(self, config: NodeConfig) -> ExpertEngine:
        """Another engine over the same slices, for another thread."""
        return ExpertEngine(self._bank, threads=config.threads)

    def close(self) -> None:
        """Free the engine, then let the store go."""
        self.engine.close()
        self._bank.close()
        self.store.close()


async def _fill_from_server(
    store: SliceStore, pack: ModelPack, source: Path | None, wanted: dict[int, tuple[int, ...]], report: Report
) -> None:
    """Raises SourceFailed at once where the server does not give the first expert, FetchFailed, ModelError."""
    server = http_source(pack, source)
    assert server is not None
    done = total = 0

    def progress(now: int, of: int, _received: int) -> None:
        nonlocal done, total
        done, total = now, of

    async def fetch() -> None:
        site, experts = next(iter(store.missing(wanted).items()))
        store.add(site, experts[0], await server.fetch(site, experts[0]))
        await Fetcher(store, pack.manifest, wanted, lambda: [server], progress).run()

    fetching = asyncio.create_task(fetch())
    try:
        while not fetching.done():
            await asyncio.wait({fetching}, timeout=HEARTBEAT_S)
            report("slices", done=done, total=total)
        await fetching
    finally:
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        await server.close()


def open_store(folder: Path, pack: ModelPack, report: Report) -> SliceStore:
    """A store whose slices are what the manifest says; damaged ones are reported, forgotten and so missing again."""
    try:
        store = SliceStore(folder, pack.manifest)
    except TruncatedFile as error:
        report("damaged", error=str(error))
        return SliceStore(folder, pack.manifest, repair=True)
    try:
        store.verify_changed()
    except (TruncatedFile, CorruptSlice) as error:
        store.close()
        report("damaged", error=str(error))
        return SliceStore(folder, pack.manifest, repair=True)
    except BaseException:
        store.close()
        raise
    return store


def local_engine(
    config: NodeConfig, pack: ModelPack, worker: WorkerParts | None, report: Report
) -> ExpertEngine | None:
    """What a backbone computes itself where nobody else can, in a thread of its own; None where it has nothing.

    All experts of its own file, mapped and untouched until they are needed; else the slices that it serves as a worker.
    The pack's own source is known to be what was onboarded; a file given by --source is read once to verify it.
    """
    source = config.source or pack.source
    if not config.local_experts or source is None or url_of(source) is not None:
        return worker.second_engine(config) if worker is not None else None
    manifest = pack.manifest
    gguf = GgufFile.open(source)
    slices = SourceBank(gguf, manifest)
    if config.source is not None:
        found = digest_experts(gguf, manifest.sites, lambda done, total: report("verify", done=done, total=total))
        for site, (here, there) in enumerate(zip(found, manifest.digests, strict=True)):
            # An expert without a digest is what the user's own file has.
            pairs = enumerate(zip(here, there, strict=True))
            wrong = [expert for expert, (ours, theirs) in pairs if theirs and ours != theirs]
            if wrong:
                raise corrupt_expert(manifest, site, wrong[0], str(source))
    stacked = {site.index: slices.stacked(site.index) for site in manifest.sites}
    bank = ExpertBank(manifest.sites, stacked, config.device)
    try:
        return ExpertEngine(bank, threads=config.threads)
    finally:
        bank.close()  # it goes when the engine does


def check_gate(config: NodeConfig, pack: ModelPack, report: Report) -> None:
    """GateFailed where the model failed its gate, and nobody said --force. A model that was never gated is run."""
    note = gate_failure(pack, force=config.force)
    if note:
        report("note", note=note)


def dispatch_options(config: NodeConfig, pack: ModelPack, report: Report) -> DispatchOptions:
    """How this node calls workers: with the wire types that were asked for, as far as this model's gate allows them.

    GateFailed where the model failed it and nobody said --force, UsageError where INT8 or FP8 was asked for and the
    model was not gated.
    """
    if not config.is_worker:  # which has been asked already
        check_gate(config, pack, report)
    out, back = config.wires
    site_wires: Mapping[int, tuple[WireName, WireName]] = {}
    notes: list[str] = []
    if out == "auto" or back == "auto":
        out = back = "f16"
        site_wires, notes = best_wires(pack)
    elif config.wires != ("f32", "f32"):
        site_wires, notes = wires_allowed(pack, out, back)
    for note in notes:
        report("wire", note=note)
    return DispatchOptions(
        mode=config.mode,
        wire_out=out,
        wire_back=back,
        site_wires=site_wires,
        call=CallPolicy(patient=config.swarm),
    )


def load_sessions(config: NodeConfig, pack: ModelPack, client: ExpertClient, report: Report) -> list[Session]:
    """The backbone's model, and a session with a hook of its own for each lane; the weights go with the last of them.

    ModelError where the model's graph is not the one the pack was made with.
    """
    pack.verify_backbone(lambda done, total: report("verify", done=done, total=total))
    model = LlamaModel(
        pack.backbone,
        remote_experts=True,
        gpu_layers=config.gpu_layers,
        take_back=0 if config.speculate == "off" else TAKE_BACK,
        progress=lambda done: report("load", done=done),
    )
    sessions: list[Session] = []
    plans: dict[int, GraphPlan] = {}
    try:
        n_context = config.context or min(model.n_context_trained, DEFAULT_CONTEXT)
        if n_context > model.n_context_trained:
            note = f"the model was trained for {model.n_context_trained} tokens of context; beyond, text may be poor"
            report("note", note=note)
        suited = (
            not config.batch and config.mode == "partial"
        )  # where its shape may decide bits, a batch stays the same
        n_batch = min(LARGEST_BATCH, n_context) if suited else config.batch or BATCH
        for lane in range(config.lanes):
            n_seq = (config.parallel + lane) // config.lanes
            if n_seq not in plans:
                plans[n_seq] = _checked_plan(model, pack, n_seq)
            hook = EvalHook(plans[n_seq], client)
            context = LlamaContext(
                model,
                n_context=n_context,
                n_batch=max(n_batch, n_seq),
                threads=config.threads,
                callback=hook,
                n_seq=n_seq,
            )
            sessions.append(Session(model, context, hook, prompt_chunk=client.prompt_chunk if suited else None))
    except BaseException:
        for session in sessions:
            session.close()
        model.close()
        raise
    return sessions


def _checked_plan(model: LlamaModel, pack: ModelPack, n_seq: int) -> GraphPlan:
    manifest = pack.manifest
    plan = trace_model(model, {tensor.name: tensor.ne for tensor in manifest.tensors}, n_seq=n_seq)
    if recipes_hash([site.site for site in plan.sites]) != recipes_hash(manifest.sites):
        raise ModelError(
            f"{pack.path}: this llama.cpp builds another graph than the pack was made with; run swarmnode onboard again"
        )
    return plan


def close_sessions(sessions: Sequence[Session]) -> None:
    """End what they generate and free their contexts and the model."""
    for session in sessions:
        session.close()


class Drafting:
    """What drafts tokens for a node's generations: n-gram lookup, a small model, or nothing (`make` is None)."""

    def __init__(self, config: NodeConfig, sessions: Sequence[Session]) -> None:
        """UsageError for a draft model that does not fit, ModelError for one that cannot be loaded."""
        self.make: MakeDrafter | None = None
        self._model: DraftModel | None = None
        if isinstance(config.speculate, Path):
            check_whole(config.speculate)
            first = sessions[0]
            self.make = self._model = DraftModel(
                config.speculate,
                first.model,
                n_context=first.context.n_context,
                threads=config.threads,
                drafters=config.parallel,
            )
        elif config.speculate == "ngram":
            priors = DraftPriors()  # what all generations of this node learn together
            self.make = lambda: Speculator(priors)

    def close(self) -> None:
        """Free the small model, if there is one."""
        if self._model is not None:
            self._model.close()
