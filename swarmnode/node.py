"""The node: composes identity, endpoint, worker, backbone and control channel, and owns every task. Nothing else does.

    start  identity → control channel → model pack → slices and engine → endpoint → worker → backbone → links to peers
    close  the same backwards: no new work, drain, withdraw, close

A node of a swarm comes in before it knows the model, and holds what it is told (`swarm_part.py`); one that is wired by
hand has its peers and its experts from its flags.

Events are handed to `emit` (name and fields) as they happen; the command line prints them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from swarmnode import parts
from swarmnode.backbone.runner import GenerationRunner
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.ggml import engine_build
from swarmnode.compute.recipe import recipes_hash
from swarmnode.config import NodeConfig, format_address, is_loopback_host, reachable_host
from swarmnode.control import ControlServer
from swarmnode.coordination.coordinator import Coordinator
from swarmnode.coordination.lead import Lead
from swarmnode.coordination.messages import Message
from swarmnode.coordination.planning import RoutingFile, plan_request
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.lane import dispatch_lane
from swarmnode.dispatch.worker import ExpertWorker
from swarmnode.errors import Cancelled, DispatchError, JoinRefused, SwarmnodeError, UsageError
from swarmnode.gate import gate_failure, whose_verdict
from swarmnode.model.manifest import told_address
from swarmnode.network_events import NetworkEvents
from swarmnode.node_status import node_status
from swarmnode.onboard import ModelPack
from swarmnode.operations import Operations
from swarmnode.peer_links import PeerLinks
from swarmnode.placement.request import Holdings
from swarmnode.rates import Rates
from swarmnode.screening import Screening
from swarmnode.snapshot import traffic
from swarmnode.status import NodeStatus
from swarmnode.swarm_part import SwarmPart
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import Address, EndpointClosed, TransportError
from transport.identity import Identity, PeerId
from transport.stream import Stream

if TYPE_CHECKING:
    from swarmnode.metrics import NodeMetrics

T = TypeVar("T")
log = logging.getLogger(__name__)

WRONG_LANE = 1  # close code: the peer does not do what the lane is for
_VALUE_BYTES = {"f32": 4, "f16": 2, "int8": 1, "fp8": 1, "auto": 1}  # on the wire, as far as a plan cares
_RATE_INTERVAL = 1.0  # seconds between two readings of the connections' counters


def _close(part: Closable | None) -> None:
    if part is not None:
        part.close()


class Closable(Protocol):
    """A part that holds something."""

    def close(self) -> None:
        """Let it go."""


class Node:
    """One running node. Use from one event loop: `start`, then `close`, in every case."""

    def __init__(self, config: NodeConfig, emit: parts.Report) -> None:
        self.config = config
        self.emit = emit
        self.started = time.monotonic()
        self._cleanup: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.rates = Rates()
        self.pack: ModelPack
        self.endpoint: Endpoint
        self.worker: ExpertWorker | None = None
        self.client: ExpertClient | None = None
        self.runner: GenerationRunner | None = None
        self.links: PeerLinks | None = None
        self._network = NetworkEvents(emit)
        self._adopted: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.operations = Operations(self)
        self.swarm: SwarmPart | None = None
        self.routing: RoutingFile | None = None
        self.is_ready = False
        self.over = asyncio.Event()  # it cannot go on, for `why_over`
        self.why_over: SwarmnodeError | None = None
        self.engine: ExpertEngine | None = None
        self.verdict = ""  # see GenerationStatus
        self._worker_parts: parts.WorkerParts | None = None
        self._metrics: NodeMetrics | None = None
        self.metrics_address: Address | None = None
        self._stopping = threading.Event()

    @property
    def address(self) -> str:
        """PEERID@HOST:PORT, what other nodes are given."""
        host, port = self.endpoint.address
        return f"{self.endpoint.peer_id}@{format_address((reachable_host(host), port))}"

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
        control = ControlServer(config.state_dir, self.operations.answer)
        await control.start()
        self._cleanup.append(control.close)
        if config.metrics is not None:
            await self._start_metrics(config.metrics)
        if config.swarm:
            await self._start_in_swarm(identity)
        else:
            await self._start_by_hand(identity)
        self._task(self._sample_rates(), "rates")
        self.is_ready = True
        self.emit("ready", peer=str(self.endpoint.peer_id), address=self.address, role=config.role, model=self._model)
        if self.swarm is not None and self.swarm.entry.authority is not None:
            self.emit("ticket", ticket=str(await self.swarm.standing_ticket()))

    async def _start_metrics(self, address: Address) -> None:
        from swarmnode.metrics import NodeMetrics  # noqa: PLC0415  only where they are wanted
        from swarmnode.metrics_listener import MetricsListener  # noqa: PLC0415

        self._metrics = NodeMetrics(self)
        listener = MetricsListener(address, self._metrics.render, lambda: self.is_ready)
        await listener.start()
        self._cleanup.append(listener.close)
        self.metrics_address = listener.address
        where = f"http://{format_address(listener.address)}/metrics"
        everybody = "" if is_loopback_host(listener.address[0]) else ", open to everybody who reaches this address"
        self.emit("note", note=f"metrics at {where}{everybody}")

    async def _start_by_hand(self, identity: Identity) -> None:
        config = self.config
        self.pack = await self._in_thread(lambda: parts.resolve_pack(self._model_path, self._report))
        if config.is_worker:
            await self._make_worker_parts()
        self.endpoint = await Endpoint.bind(identity, config.transport, listen=config.listen, admit=self._admit)
        links = self._use_endpoint()
        self._start_worker()
        if config.is_backbone:
            await self._start_backbone()
        for peer, lane in self._wanted_links():
            links.want(peer, lane)
        self._task(self._accept(), "accept")

    async def _start_in_swarm(self, identity: Identity) -> None:
        config = self.config
        swarm = SwarmPart(config, identity, self.emit, self._task, self.status)
        swarm.on_over = self._end
        await swarm.enter()
        if config.founds_swarm:
            self.pack = await self._in_thread(lambda: parts.resolve_pack(self._model_path, self._report))
            gate_failure(self.pack, force=config.force)  # before anybody joins; the note comes with the backbone
            manifest = self.pack.manifest
            is_whole = self.pack.backbone.is_file()  # else that is what is said
            if is_whole and self.pack.source is None and config.source is None and not told_address(manifest):
                raise UsageError(
                    f"members could not get the experts of {manifest.name}: without TLS they take them only with "
                    "hashes; swarmnode onboard URL --hash --out PACK, then up --model PACK; or give --source MODEL.gguf"
                )
        transport = replace(config.transport, relays=swarm.entry.relays)
        self.endpoint = await Endpoint.bind(identity, transport, listen=config.listen, gate=swarm)
        links = self._use_endpoint()
        self.swarm = swarm
        self._task(self._accept(), "accept")
        await swarm.begin(self.endpoint, links)
        self._cleanup.append(swarm.close)
        if not config.founds_swarm:
            self.pack = await swarm.find_model()
        if config.is_worker:
            await self._make_worker_parts()
            self._start_worker()
            assert self.worker is not None
            assert self._worker_parts is not None
            await swarm.serve(self.worker, self._worker_parts.store, self.pack)
            self._cleanup.append(swarm.end_serving)
        if config.is_backbone:
            await self._start_backbone()
            swarm.client = self.client
            await swarm.generates(self.pack)
            swarm.on_members = self._want_workers
            self._want_workers()
        if config.founds_swarm:
            self._start_lead(swarm)

    def _use_endpoint(self) -> PeerLinks:
        self._cleanup.append(self.endpoint.close)
        self.endpoint.on_news = self._network
        self._cleanup.append(self._end_tasks)
        self._cleanup.append(self._end_news)
        self.links = PeerLinks(self.endpoint, self._addresses_of, self._first, self._adopt)
        self._cleanup.append(self.links.close)
        return self.links

    async def _make_worker_parts(self) -> None:
        made = await self._in_thread(lambda: parts.WorkerParts(self.config, self.pack, self._report), _close)
        self._closing(made.close)
        self.engine = made.engine
        self._worker_parts = made

    def _start_worker(self) -> None:
        if self.engine is not None:
            sites = self.pack.manifest.sites
            self.worker = ExpertWorker(self.engine, sites, model=self._key, name=self.config.name)
            self._cleanup.append(self.worker.close)

    def _start_lead(self, swarm: SwarmPart) -> None:
        assert self.routing is not None
        manifest, config = self.pack.manifest, self.config
        budget = swarm.local_budget(manifest) if self._has_local else 0
        swarm.leads(
            Lead(
                Coordinator(
                    plan_request(
                        manifest,
                        partial=config.mode == "partial",
                        value_bytes=_VALUE_BYTES[config.wires[1]],
                        replicas=config.replicas,
                        local_budget=budget,
                    ),
                    after=int(time.time() * 1000),
                ),
                self,
                self.routing.stats,
                model=bytes.fromhex(manifest.model_hash),
                n_expert=[site.n_expert for site in manifest.sites],
                has_file=self._has_local,
                emit=self.emit,
            )
        )

    @property
    def _key(self) -> ModelKey:
        manifest = self.pack.manifest
        return ModelKey(manifest.model_hash, recipes_hash(manifest.sites), engine_build(), manifest.name)

    @property
    def _model(self) -> str:
        return self.pack.manifest.name

    @property
    def _model_path(self) -> Path:
        assert self.config.model is not None
        return self.config.model

    async def _start_backbone(self) -> None:
        config, pack = self.config, self.pack
        local = await self._in_thread(
            lambda: parts.local_engine(config, pack, self._worker_parts, self._report), _close
        )
        if local is not None:
            self._closing(local.close)
        options = await self._in_thread(lambda: parts.dispatch_options(config, pack, self._report))
        self.verdict = await self._in_thread(lambda: whose_verdict(pack))
        self._has_local = local is not None
        if config.founds_swarm:
            file = config.state_dir / "routing.bin"
            self.routing = await asyncio.to_thread(RoutingFile, file, pack.manifest)
            self._cleanup.append(self.routing.save)
        screening: Screening | None = None
        if local is not None and pack.source is not None and config.mode == "exact":
            source = pack.source
            screening = await self._in_thread(lambda: Screening(pack.manifest, source), _close)
            self._closing(screening.close)
        client = ExpertClient(
            pack.manifest.sites,
            model=self._key,
            options=options,
            local=local,
            node=config.name,
            on_routing=self.routing.stats.note if self.routing is not None else None,
            on_quarantine=self._quarantined,
            screen=screening.screen if screening is not None else None,
        )
        self.client = client
        self._cleanup.append(client.close)
        sessions = await self._in_thread(
            lambda: parts.load_sessions(config, pack, client, self._report), parts.close_sessions
        )
        self._closing(lambda: parts.close_sessions(sessions))
        drafting = await self._in_thread(lambda: parts.Drafting(config, sessions), _close)
        self._closing(drafting.close)
        self.runner = GenerationRunner(sessions, drafting.make)
        self._cleanup.append(self.runner.close)

    async def close(self, hurry: asyncio.Event | None = None) -> None:
        """End everything in the reverse order of starting. Safe to call twice.

        A worker of a swarm hands over first; `hurry` ends the wait for that.
        """
        if self.swarm is not None and self.is_ready:
            self.is_ready = False
            await self.swarm.hand_over(hurry)
        self._stopping.set()
        while self._cleanup:
            step = self._cleanup.pop()
            try:
                await step()
            except Exception as error:  # the other steps must be taken all the same
                self.emit("close-problem", error=f"{type(error).__name__}: {error}")

    def _report(self, event: str, **fields: Any) -> None:
        """Progress of a part that is being made, from its thread; ends the making when the node is stopping."""
        if self._stopping.is_set():
            raise Cancelled("the node is stopping")
        self.emit(event, **fields)

    async def _in_thread(self, make: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """Run blocking work. A thread cannot be ended: when cancelled, have it stop at its next report and undo it."""
        making = asyncio.ensure_future(asyncio.to_thread(make))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            self._stopping.set()
            await asyncio.wait({making})
            if making.exception() is None and undo is not None:
                await asyncio.to_thread(undo, making.result())
            raise

    def _closing(self, close: Callable[[], None]) -> None:
        async def step() -> None:
            await asyncio.to_thread(close)

        self._cleanup.append(step)

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.emit("task-failed", task=task.get_name(), error=f"{type(error).__name__}: {error}")

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_news(self) -> None:
        self._network.close()

    # ---- connections

    def _admit(self, peer: PeerId) -> bool:
        """Everybody with --open, or where only this machine can come in; else only peers that were named."""
        config = self.config
        if config.open or (is_loopback_host(config.listen[0]) and not config.transport.relays):
            return True
        return any(known.peer == peer for known in self.config.peers)

    async def _accept(self) -> None:
        with contextlib.suppress(EndpointClosed):
            while True:
                connection = await self.endpoint.accept()
                try:
                    await self._adopt(connection)
                except Exception as error:  # one connection's trouble is not the others'
                    log.exception("adopt_failed peer=%s lane=%s", connection.peer.short, connection.lane)
                    self.emit("task-failed", task="accept", error=f"{type(error).__name__}: {error}")
                    await connection.close(WRONG_LANE, "internal error")

    def _wanted_links(self) -> list[tuple[PeerId, str]]:
        """Both directions that this node can take part in, whoever dials."""
        own = [dispatch_lane(self.endpoint.peer_id)] if self.config.is_backbone else []
        return [
            (known.peer, lane)
            for known in self.config.peers
            for lane in [*own, *([dispatch_lane(known.peer)] if self.config.is_worker else [])]
        ]

    def _want_workers(self) -> None:
        """Be connected to every member that serves experts of this model."""
        assert self.swarm is not None
        assert self.links is not None
        lane, model = dispatch_lane(self.endpoint.peer_id), bytes.fromhex(self.pack.manifest.model_hash)[:8]
        records = self.swarm.member.records()
        workers = {record.peer for record in records if record.role != "backbone" and record.model == model}
        linked = {peer for peer, wanted in self.links.wanted() if wanted == lane}
        for peer in workers - linked:
            self.links.want(peer, lane)
        for peer in linked - workers:
            self.links.unwant(peer, lane)

    def _addresses_of(self, peer: PeerId) -> list[Address]:
        if self.swarm is not None:
            return self.swarm.member.addresses_of(peer)
        return [address for known in self.config.peers if known.peer == peer for address in known.addresses]

    def _first(self, lane: str) -> bytes:
        """What goes with a dial for this lane: on our own, our client's greeting, a round trip early."""
        if self.client is None or lane != dispatch_lane(self.endpoint.peer_id):
            return b""
        return self.client.greeting

    async def _adopt(self, connection: Connection, greeted: Stream | None = None) -> None:
        """Give a connection to the one that uses it: we call on our own lane, and serve the peer on the peer's.

        Called once per dial and once per accept, so twice for a connection that both sides dialled. `greeted`: the
        stream on which our client's greeting went out with the dial.
        """
        if self.swarm is not None and self.swarm.adopt(connection):
            return
        if connection in self._adopted:
            if greeted is not None:  # the same peer was configured twice: one greeting is enough
                greeted.reset(0)
            return
        self._adopted.add(connection)
        peer = connection.peer
        self._network.connected(peer, connection.stats())
        if connection.lane == dispatch_lane(self.endpoint.peer_id) and self.client is not None:
            self._task(self._attach(connection, self.client, greeted), f"attach {peer.short}")
        elif connection.lane == dispatch_lane(peer) and self.worker is not None:
            self._task(self._serve(connection, self.worker), f"serve {peer.short}")
        else:
            reason = "this node serves no experts" if self.worker is None else "this node calls no experts"
            await connection.close(WRONG_LANE, reason)

    async def _attach(self, connection: Connection, client: ExpertClient, greeted: Stream | None) -> None:
        try:
            worker = await client.attach(connection, greeted)
        except (DispatchError, TransportError) as error:
            self._forget(connection.peer)
            self.emit("not-attached", peer=str(connection.peer), error=str(error))
            return
        self.emit("attached", peer=str(connection.peer), name=worker.name)
        await connection.wait_closed()
        self._lost(connection)

    async def _serve(self, connection: Connection, worker: ExpertWorker) -> None:
        await worker.serve(connection)
        self._lost(connection)

    def _lost(self, connection: Connection) -> None:
        self._forget(connection.peer)
        if not self._stopping.is_set():
            self.emit("lost", peer=str(connection.peer), reason=str(connection.close_reason or ""))

    def _forget(self, peer: PeerId) -> None:
        if all(other.peer != peer for other in self.endpoint.connections()):
            self._network.forget(peer)

    async def _sample_rates(self) -> None:
        while True:
            now = time.monotonic()
            totals = traffic(self.endpoint.connections())
            for peer, (out, back) in totals.items():
                self.rates.update(peer, now, out, back)
            self.rates.keep_only(totals)
            if self._metrics is not None:
                self._metrics.sample()
            await asyncio.sleep(_RATE_INTERVAL)

    # ---- what the lead asks (lead.Swarm)

    def send(self, peer: PeerId, message: Message) -> bool:
        """See lead.Swarm."""
        return self.swarm is not None and self.swarm.member.mesh.send(peer, message)

    def rtt_s(self, peer: PeerId) -> float:
        """See lead.Swarm."""
        seen = [one.stats().min_rtt_s for one in self.endpoint.connections() if one.peer == peer]
        return min((rtt for rtt in seen if rtt is not None), default=0.0)

    def recent(self, peer: PeerId) -> tuple[float | None, float] | None:
        """See lead.Swarm."""
        return self.client.recent(str(peer)) if self.client is not None else None

    def keep_local(self, masks: Holdings) -> None:
        """See lead.Swarm."""
        if self.client is not None:
            self.client.keep_local(masks)

    def _quarantined(self, peer: str, why: str) -> None:
        self.emit("quarantined", peer=peer, why=why)
        if self.swarm is not None and self.swarm.lead is not None:
            self.swarm.lead.stays_out(PeerId.parse(peer), why)

    def _end(self, why: str) -> None:
        self.why_over = JoinRefused(why)
        self.over.set()

    def status(self) -> NodeStatus:
        """A snapshot; loop thread only. Works while the node is still starting."""
        return node_status(self)
