"""The node: composes identity, endpoint, worker, backbone and control channel, and owns every task. Nothing else does.

    start  identity → control channel → model pack → slices and engine → endpoint → worker → backbone → links to peers
    close  the same backwards: no new work, drain, withdraw, close

Events are handed to `emit` (name and fields) as they happen; the command line prints them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
import psutil

from swarmnode import __version__, parts
from swarmnode.backbone.runner import GenerationRunner
from swarmnode.backbone.session import GenerateRequest, GenerateResult
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.ggml import engine_build
from swarmnode.compute.recipe import recipes_hash
from swarmnode.config import NodeConfig, PeerAddress, format_address, is_loopback_host, reachable_host
from swarmnode.control import ControlServer, Json, Send
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.worker import ExpertWorker
from swarmnode.errors import Cancelled, ControlError, DispatchError, UsageError
from swarmnode.experts_spec import format_holdings
from swarmnode.network_events import NetworkEvents
from swarmnode.onboard import ModelPack
from swarmnode.peer_links import PeerLinks
from swarmnode.pings import checked_numbers, chosen_peer, ping_peer
from swarmnode.rates import Rates
from swarmnode.snapshot import peer_rows, site_rows, traffic, transport_row, unconnected
from swarmnode.status import GenerationStatus, NodeStatus, PeerStatus, SiteStatus, TransportStatus
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import EndpointClosed, TransportError
from transport.identity import Identity, PeerId

T = TypeVar("T")

WRONG_LANE = 1  # close code: the peer does not do what the lane is for
_RATE_INTERVAL = 1.0  # seconds between two readings of the connections' counters


def dispatch_lane(caller: PeerId) -> str:
    """The lane on which `caller` calls experts of the other node. The same whoever dials, so that two nodes that serve
    each other have one connection per direction."""
    return f"dispatch:{caller.short}"


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
        self._network = NetworkEvents(emit)
        self._adopted: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._engine: ExpertEngine | None = None
        self._worker_parts: parts.WorkerParts | None = None
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
        control = ControlServer(config.state_dir, self._on_control)
        await control.start()
        self._cleanup.append(control.close)
        self.pack = await self._in_thread(lambda: parts.resolve_pack(config.model, self._report))
        manifest = self.pack.manifest
        key = ModelKey(manifest.model_hash, recipes_hash(manifest.sites), engine_build(), manifest.name)
        if config.is_worker:
            made = await self._in_thread(lambda: parts.WorkerParts(config, self.pack, self._report), _close)
            self._closing(made.close)
            self._engine = made.engine
            self._worker_parts = made
        self.endpoint = await Endpoint.bind(identity, config.transport, listen=config.listen, admit=self._admit)
        self._cleanup.append(self.endpoint.close)
        self.endpoint.on_news = self._network
        self._cleanup.append(self._end_tasks)
        self._cleanup.append(self._end_news)
        if self._engine is not None:
            self.worker = ExpertWorker(self._engine, manifest.sites, model=key, name=config.name)
            self._cleanup.append(self.worker.close)
        if config.is_backbone:
            await self._start_backbone(key)
        self._links = PeerLinks(self.endpoint, self._wanted_links(), self._adopt)
        self._cleanup.append(self._links.close)
        self._links.start()
        self._task(self._accept(), "accept")
        self._task(self._sample_rates(), "rates")
        self.emit("ready", peer=str(self.endpoint.peer_id), address=self.address, role=config.role, model=manifest.name)

    async def _start_backbone(self, key: ModelKey) -> None:
        config, pack = self.config, self.pack
        local = await self._in_thread(
            lambda: parts.local_engine(config, pack, self._worker_parts, self._report), _close
        )
        if local is not None:
            self._closing(local.close)
        options = DispatchOptions(mode=config.mode, wire_out=config.wire, wire_back=config.wire)
        client = ExpertClient(pack.manifest.sites, model=key, options=options, local=local, node=config.name)
        self.client = client
        self._cleanup.append(client.close)
        session = await self._in_thread(lambda: parts.load_session(config, pack, client, self._report), _close)
        self.runner = GenerationRunner(session)
        self._closing(session.close)
        self._cleanup.append(self.runner.close)

    async def close(self) -> None:
        """End everything in the reverse order of starting. Safe to call twice."""
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
        self._network.connected(peer, connection.stats())
        if connection.lane == dispatch_lane(self.endpoint.peer_id) and self.client is not None:
            self._task(self._attach(connection, self.client), f"attach {peer.short}")
        elif connection.lane == dispatch_lane(peer) and self.worker is not None:
            self._task(self._serve(connection, self.worker), f"serve {peer.short}")
        else:
            reason = "this node serves no experts" if self.worker is None else "this node calls no experts"
            await connection.close(WRONG_LANE, reason)

    async def _attach(self, connection: Connection, client: ExpertClient) -> None:
        try:
            worker = await client.attach(connection)
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
                self._rates.update(peer, now, out, back)
            self._rates.keep_only(totals)
            await asyncio.sleep(_RATE_INTERVAL)

    # ---- control channel

    async def _on_control(self, op: str, arguments: Json, send: Send) -> None:
        if op == "status":
            await send({"event": "status", "status": msgspec.to_builtins(self.status())})
        elif op == "peers":
            await send({"event": "peers", "peers": msgspec.to_builtins(self.status().peers)})
        elif op == "generate":
            await self._generate(arguments, send)
        elif op == "ping":
            await self._ping(arguments, send)
        else:
            raise ControlError(f"this node does not know the operation {op!r}; is the command another version?")

    async def _generate(self, arguments: Json, send: Send) -> None:
        if self.runner is None:
            raise UsageError("this node is a worker: generate on a backbone (a node started without --experts)")
        try:
            request = msgspec.convert(arguments.get("request"), GenerateRequest, str_keys=True)
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

    async def _ping(self, arguments: Json, send: Send) -> None:
        """Ping a peer of this node, named by its id or the beginning of it, until `count` is reached or nobody asks."""
        if not hasattr(self, "endpoint"):
            raise ControlError("this node is still starting; ask again when it is ready")
        known = {c.peer: PeerAddress(c.peer) for c in self.endpoint.connections()}
        known |= {one.peer: one for one in self.config.peers}
        target = chosen_peer(str(arguments.get("peer", "")), list(known.values()), self.endpoint.peer_id)
        pings = ping_peer(self.endpoint, target, *checked_numbers(arguments.get("count"), arguments.get("interval")))
        async with contextlib.aclosing(pings):
            async for result in pings:
                await send({"event": "ping", **msgspec.to_builtins(result)})

    # ---- status

    def status(self) -> NodeStatus:
        """A snapshot; loop thread only. Works while the node is still starting."""
        config = self.config
        started = hasattr(self, "endpoint")
        pack = getattr(self, "pack", None)
        sites = pack.manifest.sites if pack is not None else ()
        worker = self.worker.stats() if self.worker is not None else None
        relays = [relay for relay in self.endpoint.relays() if relay.own] if started else []
        return NodeStatus(
            peer=str(self.endpoint.peer_id) if started else "",
            name=config.name,
            version=__version__,
            role=config.role,
            nat=self._nat() if started else "unknown",
            addresses=self._addresses() if started else [],
            relays=[relay.url for relay in relays if relay.up],
            relay_problems={relay.url: relay.error or "not connected yet" for relay in relays if not relay.up},
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
            transport=self._transport() if started else TransportStatus(),
        )

    def _transport(self) -> TransportStatus:
        return transport_row(self.endpoint.quic_counters, self.endpoint.reach.counters())

    def _nat(self) -> str:
        around = self.endpoint.reach.surroundings
        return around.nat.kind.name.lower() if around is not None else "unknown"

    def _addresses(self) -> list[str]:
        """Where this node listens, and where others may reach it."""
        around = self.endpoint.reach.surroundings
        told = [candidate.address for candidate in around.candidates] if around is not None else []
        return [format_address(address) for address in dict.fromkeys([self.endpoint.address, *told])]

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
            self.endpoint.decision,
        )
        there = {row.peer for row in rows}
        problems = self._links.problems if self._links is not None else {}
        missing = [known for known in self.config.peers if str(known.peer) not in there]
        return rows + [unconnected(known, problems.get(str(known.peer), "dialling")) for known in missing]
