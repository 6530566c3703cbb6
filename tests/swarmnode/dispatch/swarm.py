"""A swarm in one process: a client and any number of workers over real connections on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swarmnode.compute.engine_api import Engine
from swarmnode.compute.null_engine import NullEngine
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.admission import AdmissionLimits
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.codec import F32
from swarmnode.dispatch.frame_decoder import FrameDecoder
from swarmnode.dispatch.frames import TO_WORKER, CallFrame, Limits, Welcome
from swarmnode.dispatch.hello import ModelKey, pack_holdings
from swarmnode.dispatch.options import DispatchOptions, WorkerOptions
from swarmnode.dispatch.remote_worker import RemoteWorker
from swarmnode.dispatch.request import I32
from swarmnode.dispatch.worker import ExpertWorker
from tests.swarmnode.dispatch.samples import MODEL, SITES, local_rows, make_input
from transport.config import TransportConfig
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.identity import Identity
from transport.stream import Stream

LOOPBACK = ("127.0.0.1", 0)
LIMITS = Limits(4096, 8 << 20, 8)
Behaviour = Callable[[CallFrame, Stream], None]
Holdings = Mapping[int, Sequence[int]]


@dataclass
class Member:
    """A worker of the swarm; `worker` is None for one that follows a script."""

    endpoint: Endpoint
    worker: ExpertWorker | None
    serving: list[asyncio.Task[None]] = field(default_factory=list)
    remote: RemoteWorker | None = None

    @property
    def real(self) -> ExpertWorker:
        assert self.worker is not None
        return self.worker

    async def close(self) -> None:
        if self.worker is not None:
            await self.worker.close()
        await self.kill()

    async def kill(self) -> None:
        """End it without a goodbye."""
        await self.endpoint.close()
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)


class Swarm:
    """See the module; made by `swarm()`."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: DispatchOptions,
        local: Engine | None,
        seed: int,
        sites: Sequence[Site],
        more: Mapping[str, Any],
    ) -> None:
        self.endpoint = endpoint
        self.sites = sites
        self.client = ExpertClient(sites, model=MODEL, options=options, local=local, node="backbone", **more)
        self.members: list[Member] = []
        self.extras: list[Endpoint] = []  # endpoints of a test's own
        self._seed = 100 * (1 + seed)

    async def bind(self, config: TransportConfig | None = None) -> Endpoint:
        self._seed += 1
        identity = Identity.generate(self._seed.to_bytes(32, "big"))
        return await Endpoint.bind(identity, config or TransportConfig(), listen=LOOPBACK)

    async def add(
        self,
        holdings: Holdings,
        *,
        engine: Engine | None = None,
        model: ModelKey = MODEL,
        limits: AdmissionLimits | None = None,
        options: WorkerOptions | None = None,
        config: TransportConfig | None = None,
        attach: bool = True,
    ) -> Member:
        """Start a worker and attach it."""
        endpoint = await self.bind(config)
        engine = engine or NullEngine(self.sites, holdings)
        name = f"w{len(self.members)}"
        worker = ExpertWorker(engine, self.sites, model=model, name=name, limits=limits, options=options)
        return await self._join(Member(endpoint, worker), worker.serve, attach)

    async def add_scripted(self, holdings: Holdings, behave: Behaviour) -> Member:
        """Start something that says HELLO like a worker and then does as it likes, and attach it."""

        async def serve(connection: Connection) -> None:
            stream = await connection.accept_stream()
            decoder = FrameDecoder(TO_WORKER)
            packed = pack_holdings(holdings, {site.index: site for site in SITES})
            while data := await stream.read(1 << 16):
                for frame in decoder.feed(data):
                    if isinstance(frame, CallFrame):
                        behave(frame, stream)
                    elif frame.type.name == "HELLO":
                        stream.write_nowait(Welcome(MODEL.key("scripted"), LIMITS, packed).encode())

        return await self._join(Member(await self.bind(), None), serve, attach=True)

    async def _join(self, member: Member, serve: Callable[[Connection], Awaitable[object]], attach: bool) -> Member:
        async def accept() -> None:
            while True:
                connection = await member.endpoint.accept()
                member.serving.append(asyncio.create_task(swallow(connection)))

        async def swallow(connection: Connection) -> None:
            with contextlib.suppress(Exception):  # a script may end as it likes
                await serve(connection)

        member.serving.append(asyncio.create_task(accept()))
        self.members.append(member)
        if attach:
            member.remote = await self.client.attach(await self.dial(member))
        return member

    async def dial(self, member: Member) -> Connection:
        return await self.endpoint.dial(member.endpoint.peer_id, [member.endpoint.address])

    async def call(self, site: int, x: F32, ids: I32, weights: F32) -> F32:
        """One call from a thread of its own, as the hook makes it."""
        return await asyncio.to_thread(lambda: self.client.submit(site, x, ids, weights).result())

    async def check(self, site: int = 0, n: int = 1, seed: int = 0) -> None:
        """A call gives the bits of the local run."""
        x, ids, weights = make_input(SITES[site], n, seed)
        rows = await self.call(site, x, ids, weights)
        assert rows.tobytes() == local_rows(SITES[site], x, ids, weights).tobytes()

    async def close(self) -> None:
        await self.client.close()
        for endpoint in self.extras:
            await endpoint.close()
        for member in self.members:
            await member.close()
        await self.endpoint.close()


@contextlib.asynccontextmanager
async def swarm(
    options: DispatchOptions | None = None,
    local: Engine | None = None,
    *,
    seed: int = 0,
    sites: Sequence[Site] = SITES,
    **more: Any,
) -> AsyncIterator[Swarm]:
    """A client without workers, made with `more`; everything is closed at the end, and within bounds."""
    endpoint = await Endpoint.bind(Identity.generate(seed.to_bytes(32, "big")), listen=LOOPBACK)
    made = Swarm(endpoint, options or DispatchOptions(), local, seed, sites, more)
    try:
        yield made
    finally:
        async with asyncio.timeout(30):
            await made.close()


class GatedEngine(NullEngine):
    """Computes only when the test says so: `entered` is set by each call, which then waits for a permit."""

    def __init__(self, holdings: Holdings) -> None:
        super().__init__(SITES, holdings)
        self.entered = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)

    def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
        self.entered.release()
        assert self.permits.acquire(timeout=20)
        return super().raw_rows(site, x, rows, experts)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=20)

    def open(self) -> None:
        for _ in range(1000):
            self.permits.release()


class BrokenEngine(NullEngine):
    """Raises, whatever it is asked."""

    def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
        raise RuntimeError("device lost")


def stop_sending(stream: Stream) -> None:
    """Send STOP_SENDING alone, which nothing public does: the peer can send no more, and hears nothing else of it."""
    ours = types.SimpleNamespace(id=stream.id, send_ended=True, receive_ended=False)
    stream._host.abort(ours, 5)  # type: ignore[arg-type]  # a stream whose other side is not to be reset


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a figure that has no event of its own is as it should be."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  that is the point
            await asyncio.sleep(0.005)


def cut_up(n: int, n_expert: int = 16) -> list[dict[int, tuple[int, ...]]]:
    """All experts of all sites, cut into n unequal contiguous parts."""
    cuts = np.linspace(0, n_expert**0.5, n + 1) ** 2
    edges = [round(c) for c in cuts]
    for i in range(1, n + 1):
        edges[i] = max(edges[i], edges[i - 1] + 1)
    edges[-1] = n_expert
    return [{site.index: tuple(range(edges[i], edges[i + 1])) for site in SITES} for i in range(n)]
