"""The node: composes identity, endpoint, worker, backbone and control channel, and owns every task. Nothing else does.

    start  identity → model pack → slices and engine → endpoint → backbone → control channel → links to peers
    close  the same backwards: no new work, drain, withdraw, close

Events are handed to `emit` (name and fields) as they happen; the command line prints them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from swarmnode import __version__
from swarmnode.backbone.hook import EvalHook
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.runner import GenerationRunner
from swarmnode.backbone.session import GenerateRequest, GenerateResult, Session
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.ggml import engine_build
from swarmnode.compute.recipe import recipes_hash
from swarmnode.config import NodeConfig, PeerAddress, default_cache_dir, format_address
from swarmnode.control import ControlServer, Json, Send
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.worker import ExpertWorker
from swarmnode.errors import ControlError, DispatchError, ModelError, SwarmnodeError, UsageError
from swarmnode.experts_spec import format_holdings, parse_experts
from swarmnode.model.source_bank import SourceBank
from swarmnode.model.store import SliceStore
from swarmnode.onboard import ModelPack, onboard, trace_model
from swarmnode.peer_links import PeerLinks
from swarmnode.rates import Rates
from swarmnode.snapshot import peer_rows, site_rows, traffic, unconnected
from swarmnode.status import GenerationStatus, NodeStatus, PeerStatus, SiteStatus
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import EndpointClosed, TransportError
from transport.identity import Identity, PeerId

DEFAULT_CONTEXT = 4096  # tokens, where the model was trained for more
WRONG_LANE = 1  # close code: the peer does not do what the lane is for
_RATE_INTERVAL = 1.0  # seconds between two readings of the connections' counters


def dispatch_lane(caller: PeerId) -> str:
    """The lane on which `caller` calls experts of the other node. The same whoever dials, so that two nodes that serve
    each other have one connection per direction."""
    return f"dispatch:{caller.short}"


class Emit(Protocol):
    """Takes an event: its name and fields."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Must not block."""


def resolve_pack(model: Path, emit: Emit) -> ModelPack:
    """The pack that `--model` means: a pack folder, or one made (and kept in the cache) from a GGUF."""
    if model.is_dir():
        return ModelPack.open(model)
    if not model.is_file():
        raise ModelError(f"{model}: no such file: give a GGUF or a model pack made by swarmnode onboard")
    key = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:12]

    def progress(stage: str, done: int, total: int) -> None:
        emit("onboard", stage=stage, done=done, total=total)

    return onboard(model, default_cache_dir() / "packs" / f"{model.stem[:60]}-{key}", progress)


class Node:
    """One running node. Use from one event loop: `start`, then `close`, in every case."""

    def __init__(self, config: NodeConfig, emit: Emit) -> None:
        self.config = config
        self.emit = emit
        self._started = time.monotonic()
        self._cleanup: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._rates = Rates()
        self.pack: ModelPack
        self.endpoint: Endpoint
        self.worker: ExpertWorker | None = None
        self.client: ExpertClient | None = None
        self.runner: GenerationRunner | None = None
        self._links: PeerLinks | None = None
        self._adopted: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._engine: ExpertEngine | None = None

    @property
    def address(self) -> str:
        """PEERID@HOST:PORT, what other nodes are given."""
        return f"{self.endpoint.peer_id}@{format_address(self.endpoint.address)}"

    async def start(self) -> None:
        """Bring everything up, or close what was started and raise the first error."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        config = self.config
        identity = Identity.load_or_create(config.state_dir / "identity.key")
        control = ControlServer(config.state_dir, self._on_control)
        await control.start()
        self._cleanup.append(control.close)
        self.pack = await asyncio.to_thread(resolve_pack, config.model, self.emit)
        manifest = self.pack.manifest
        key = ModelKey(manifest.model_hash, recipes_hash(manifest.sites), engine_build(), manifest.name)
        engine = None
        if config.is_worker:
            engine = self._engine = await asyncio.to_thread(self._worker_engine)
            self._closing(engine.close)
        self.endpoint = await Endpoint.bind(identity, config.transport, listen=config.listen, admit=self._admit)
        self._cleanup.append(self.endpoint.close)
        self._cleanup.append(self._end_tasks)
        if engine is not None:
            self.worker = ExpertWorker(engine, manifest.sites, model=key, name=config.name)
            self._cleanup.append(self.worker.close)
        if config.is_backbone:
            await self._start_backbone(key)
        self._links = PeerLinks(self.endpoint, self._wanted_links(), self._adopt)
        self._cleanup.append(self._links.close)
        self._links.start()
        self._task(self._accept(), "accept")
        self._task(self._sample_rates(), "rates")
        self.emit("ready", peer=str(self.endpoint.peer_id), address=self.address, role=config.role, model=manifest.name)

    async def close(self) -> None:
        """End everything in the reverse order of starting. Safe to call twice."""
        while self._cleanup:
            step = self._cleanup.pop()
            try:
                await step()
            except (SwarmnodeError, TransportError, OSError) as error:
                self.emit("close-problem", error=str(error))

    def _closing(self, close: Callable[[], None]) -> None:
        async def step() -> None:
            await asyncio.to_thread(close)

        self._cleanup.append(step)

    def _task(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.emit("task-failed", task=task.get_name(), error=f"{type(error).__name__}: {error}")

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- worker

    def _worker_engine(self) -> ExpertEngine:
        """Fill this node's slices from the source, then map them into an engine."""
        config, manifest = self.config, self.pack.manifest
        assert config.experts is not None
        wanted = parse_experts(config.experts, manifest.sites)
        if not wanted:
            raise UsageError(f"--experts {config.experts}: that is no expert at all")
        store = SliceStore(config.state_dir / "slices" / manifest.model_hash[:16], manifest)
        try:
            missing = store.missing(wanted)
            if missing:
                source = config.source or self.pack.source
                if source is None:
                    raise ModelError(
                        f"{self.pack.path}: its GGUF is not on this machine any more: give --source MODEL.gguf"
                    )
                store.fill_from_source(source, wanted, lambda done, total: self.emit("slices", done=done, total=total))
            stacked = {site.index: store.stacked(site.index) for site in manifest.sites if site.index in wanted}
            bank = ExpertBank(manifest.sites, stacked)
            self._closing(store.close)
        except BaseException:
            store.close()
            raise
        return ExpertEngine(bank, threads=config.threads)

    # ---- backbone

    async def _start_backbone(self, key: ModelKey) -> None:
        config, manifest = self.config, self.pack.manifest
        local = await asyncio.to_thread(self._local_engine)
        if local is not None:
            self._closing(local.close)
        options = DispatchOptions(mode=config.mode, wire_out=config.wire, wire_back=config.wire)
        self.client = ExpertClient(manifest.sites, model=key, options=options, local=local, node=config.name)
        self._cleanup.append(self.client.close)
        session = await asyncio.to_thread(self._load_session, self.client)
        self.runner = GenerationRunner(session)
        self._closing(session.close)
        self._cleanup.append(self.runner.close)

    def _local_engine(self) -> ExpertEngine | None:
        """The backbone's own copy of all experts, mapped and untouched until it is needed."""
        source = self.config.source or self.pack.source
        if not self.config.local_experts or source is None:
            return None
        manifest = self.pack.manifest
        bank = SourceBank(source, manifest)
        stacked = {site.index: bank.stacked(site.index) for site in manifest.sites}
        return ExpertEngine(ExpertBank(manifest.sites, stacked), threads=self.config.threads)

    def _load_session(self, client: ExpertClient) -> Session:
        config, manifest = self.config, self.pack.manifest
        model = LlamaModel(
            self.pack.backbone,
            remote_experts=True,
            gpu_layers=config.gpu_layers,
            progress=lambda done: self.emit("load", done=done),
        )
        plan = trace_model(model, {tensor.name: tensor.ne for tensor in manifest.tensors})
        traced = recipes_hash([site.site for site in plan.sites])
        if traced != recipes_hash(manifest.sites):
            raise ModelError(
                f"{self.pack.path}: this llama.cpp builds another graph than the pack was made with; "
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

        def round_trips() -> int:
            return sum(stats.calls for stats in client.site_stats().values())

        return Session(model, context, hook, round_trips=round_trips, release=client.cancel_all)

    # ---- connections

    def _admit(self, peer: PeerId) -> bool:
        """Everybody on a loopback address or with --open; else only peers that were named."""
        if self.config.open or self.config.listen[0] in ("127.0.0.1", "::1", "localhost"):
            return True
        return any(known.peer == peer for known in self.config.peers)

    async def _accept(self) -> None:
        with contextlib.suppress(EndpointClosed):
            while True:
                await self._adopt(await self.endpoint.accept())

    def _wanted_links(self) -> list[tuple[PeerAddress, str]]:
        """Both directions that this node can take part in, whoever dials."""
        own = [dispatch_lane(self.endpoint.peer_id)] if self.config.is_backbone else []
        return [
            (known, lane)
            for known in self.config.peers
            for lane in [*own, *([dispatch_lane(known.peer)] if self.config.is_worker else [])]
        ]

    async def _adopt(self, connection: Connection) -> None:
        """Give a connection to the one that uses it: we call on our own lane, and serve the peer on the peer's.

        Called once per dial and once per accept, so twice for a connection that both sides dialled.
        """
        if connection in self._adopted:
            return
        self._adopted.add(connection)
        peer = connection.peer
        self.emit("connected", peer=str(peer), path=connection.stats().path)
        if connection.lane == dispatch_lane(self.endpoint.peer_id) and self.client is not None:
            self._task(self._attach(connection, self.client), f"attach {peer.short}")
        elif connection.lane == dispatch_lane(peer) and self.worker is not None:
            self._task(self.worker.serve(connection), f"serve {peer.short}")
        else:
            reason = "this node serves no experts" if self.worker is None else "this node calls no experts"
            await connection.close(WRONG_LANE, reason)

    async def _attach(self, connection: Connection, client: ExpertClient) -> None:
        try:
            worker = await client.attach(connection)
        except (DispatchError, TransportError) as error:
            self.emit("not-attached", peer=str(connection.peer), error=str(error))
            return
        self.emit("attached", peer=str(connection.peer), name=worker.name)
        await connection.wait_closed()
        self.emit("lost", peer=str(connection.peer), reason=str(connection.close_reason or ""))

    async def _sample_rates(self) -> None:
        while True:
            now = time.monotonic()
            for peer, (out, back) in traffic(self.endpoint.connections()).items():
                self._rates.update(peer, now, out, back)
            await asyncio.sleep(_RATE_INTERVAL)

    # ---- control channel

    async def _on_control(self, op: str, arguments: Json, send: Send) -> None:
        if op == "status":
            await send({"event": "status", "status": msgspec.to_builtins(self.status())})
        elif op == "peers":
            await send({"event": "peers", "peers": msgspec.to_builtins(self.status().peers)})
        elif op == "generate":
            await self._generate(arguments, send)
        else:
            raise ControlError(f"this node does not know the operation {op!r}; is the command another version?")

    async def _generate(self, arguments: Json, send: Send) -> None:
        if self.runner is None:
            raise UsageError("this node is a worker: generate on a backbone (a node started without --experts)")
        try:
            request = msgspec.convert(arguments.get("request"), GenerateRequest)
        except msgspec.ValidationError as error:
            raise UsageError(f"the request is not understood: {error}") from None
        stream = self.runner.stream(request)
        async with contextlib.aclosing(stream):
            async for event in stream:
                if isinstance(event, GenerateResult):
                    sites = [msgspec.to_builtins(site) for site in self._sites()]
                    await send({"event": "result", "result": msgspec.to_builtins(event), "sites": sites})
                else:
                    await send({"event": "token", **msgspec.to_builtins(event)})

    # ---- status

    def status(self) -> NodeStatus:
        """A snapshot; loop thread only. Works while the node is still starting."""
        config = self.config
        started = hasattr(self, "endpoint")
        pack = getattr(self, "pack", None)
        sites = pack.manifest.sites if pack is not None else ()
        worker = self.worker.stats() if self.worker is not None else None
        return NodeStatus(
            peer=str(self.endpoint.peer_id) if started else "",
            name=config.name,
            version=__version__,
            role=config.role,
            nat="unknown",
            addresses=[format_address(self.endpoint.address)] if started else [],
            relays=[],
            model=pack.manifest.name if pack is not None else str(config.model),
            holdings=format_holdings(self._engine.holdings, sites) if self._engine is not None else {},
            memory=psutil.Process().memory_info().rss,
            uptime_s=round(time.monotonic() - self._started, 3),
            peers=self._peers() if started else [],
            sites=self._sites(),
            generation=self._generation(),
            served_calls=worker.calls if worker is not None else 0,
            served_rows=worker.pairs if worker is not None else 0,
            served_busy_ms=round(worker.busy_s * 1e3, 3) if worker is not None else 0.0,
            served_kernel_ms=round(self._engine.kernel_s * 1e3, 3) if self._engine is not None else 0.0,
        )

    def _generation(self) -> GenerationStatus:
        runner = self.runner
        if runner is None:
            return GenerationStatus(False, 0, 0.0)
        return GenerationStatus(runner.active, runner.tokens, runner.last_tokens_per_s)

    def _sites(self) -> list[SiteStatus]:
        return site_rows(self.client.site_stats(), self.pack.manifest.sites) if self.client is not None else []

    def _peers(self) -> list[PeerStatus]:
        connections = self.endpoint.connections()
        rows = peer_rows(
            connections,
            {view.peer: view for view in self.client.workers()} if self.client is not None else {},
            [str(c.peer) for c in connections if c.lane == dispatch_lane(c.peer)],
            self._rates,
            time.monotonic(),
            self.pack.manifest.sites,
        )
        there = {row.peer for row in rows}
        problems = self._links.problems if self._links is not None else {}
        missing = [known for known in self.config.peers if str(known.peer) not in there]
        return rows + [unconnected(known, problems.get(str(known.peer), "dialling")) for known in missing]
