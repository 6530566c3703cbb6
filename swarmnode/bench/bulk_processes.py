"""The processes of `bench bulk`: one that serves, one that connects to it and moves the bytes.

    python -m swarmnode.bench.bulk_processes serve|move FOLDER WAY CONNECTIONS NUMBER COUNT

Both are told which part of which experts they are about (`Part`). A serving process prints where it is, then its usage
after each line on its standard input. A moving one reads where to connect to, prints "ready" once it is connected,
moves the bytes after one more line, and prints how that went as JSON. Both end with their standard input.

Experts of the lane "bulk" are taken from the server; whatever else is measured is sent to it. Called by bench/bulk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode.bench.carriers.base import BULK, CHUNK, HEADER, HOST, Carrier, Place, Session
from swarmnode.bench.carriers.quic import Quic
from swarmnode.bench.carriers.streams import Tls
from swarmnode.bulk.fetcher import Fetcher
from swarmnode.bulk.frames import LANE
from swarmnode.bulk.provider import SourceProvider
from swarmnode.bulk.server import BulkServer
from swarmnode.bulk.source import PeerSource
from swarmnode.model.manifest import Manifest, load_manifest
from swarmnode.model.slicing import Buffer
from swarmnode.model.store import SliceStore
from transport.endpoint import Endpoint
from transport.identity import Identity

STORED, DROPPED = "bulk", "bulk-dropped"  # the two ways of the lane
CARRIERS: Mapping[str, Carrier] = {
    "stream": Quic("stream", "qh3"),
    "stream-1452": Quic("stream-1452", "qh3", network=True),
    "tcp-tls": Tls(),
}
SOURCE, MANIFEST = "source.gguf", "manifest.json"
MOVE_SECONDS = 180.0  # nothing takes as long

Move = Callable[[], Coroutine[Any, Any, float]]  # Any: what a coroutine is sent, nothing here


@dataclass(frozen=True, slots=True)
class Part:
    """Number `number` of `count` equal parts of the experts in `folder`, to go `way` over so many connections."""

    folder: Path
    way: str
    connections: int
    number: int
    count: int

    @classmethod
    def parse(cls, folder: str, way: str, *numbers: str) -> Part:
        """From `words`."""
        return cls(Path(folder), way, *map(int, numbers))

    @property
    def words(self) -> list[str]:
        """For a command line."""
        return [str(self.folder), self.way, *map(str, (self.connections, self.number, self.count))]

    @property
    def store(self) -> Path:
        """Where fetched experts go."""
        return self.folder / f"store-{self.number}"

    @property
    def place(self) -> Place:
        """Where the server's key is: each pair of processes has another."""
        folder = self.folder / f"keys-{self.number}"
        folder.mkdir(exist_ok=True)
        return Place(folder, "")

    def experts(self, manifest: Manifest) -> list[int]:
        """Of site 0."""
        count = manifest.sites[0].n_expert
        return list(range(count * self.number // self.count, count * (self.number + 1) // self.count))


# -- serving


@contextlib.asynccontextmanager
async def _giving(part: Part) -> AsyncIterator[str]:
    """A BulkServer with all experts; yields its port."""
    provider = SourceProvider(load_manifest(part.folder / MANIFEST), part.folder / SOURCE)
    server = BulkServer(lambda _: provider)
    identity = part.place.identity(part.way)
    async with await Endpoint.bind(identity, listen=(HOST, 0)) as endpoint, asyncio.TaskGroup() as tasks:

        async def accept() -> None:
            while True:
                tasks.create_task(server.serve(await endpoint.accept()))

        accepting = tasks.create_task(accept())
        yield str(endpoint.address[1])
        accepting.cancel()
        for connection in endpoint.connections():
            await connection.close()


@contextlib.asynccontextmanager
async def _taking(part: Part) -> AsyncIterator[str]:
    """A carrier's server, which counts what comes; yields where it is."""
    serving = CARRIERS[part.way].serve(part.place)
    yield await anext(serving)
    with contextlib.suppress(StopAsyncIteration):
        await anext(serving)


async def serve(part: Part) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as reading:  # of its own: the provider's reads have the loop's
        async with _taking(part) if part.way in CARRIERS else _giving(part) as where:
            print(where, flush=True)
            while await loop.run_in_executor(reading, sys.stdin.readline):
                print(json.dumps(_usage()), flush=True)


# -- moving


@contextlib.asynccontextmanager
async def _sending(part: Part, where: str) -> AsyncIterator[Move]:
    """Sends as many bytes of the stacks, which lie one behind the other in the file, as the experts have."""
    manifest = load_manifest(part.folder / MANIFEST)
    experts, stride = part.experts(manifest), manifest.expert_bytes(0)
    begin = min(tensor.offset for tensor in manifest.site_tensors(0)) + experts[0] * stride
    edges = [begin + len(experts) * stride * n // part.connections for n in range(part.connections + 1)]
    async with contextlib.AsyncExitStack() as stack:
        connecting = [CARRIERS[part.way].connect(part.place, where) for _ in range(part.connections)]
        sessions = [await stack.enter_async_context(one) for one in connecting]

        async def move() -> float:
            spans = zip(sessions, edges, edges[1:], strict=False)
            await asyncio.gather(*(_push(session, part.folder / SOURCE, *span) for session, *span in spans))
            return 0.0

        yield move


async def _push(session: Session, source: Path, begin: int, end: int) -> None:
    """Read as it is sent; until the server has all of it."""
    await session.push(HEADER.pack(BULK, end - begin))
    with source.open("rb", buffering=0) as file:
        file.seek(begin)
        while begin < end:
            piece = file.read(min(CHUNK, end - begin))
            if not piece:
                raise EOFError(f"{source} has no byte {begin}")
            await session.push(piece)
            begin += len(piece)
    await session.answer()


class TimedStore(SliceStore):
    """Notes for how long its callers' threads were in it."""

    spent_s = 0.0

    def add(self, site: int, expert: int, slices: Sequence[Buffer]) -> None:
        """See SliceStore."""
        with self._timed():
            super().add(site, expert, slices)

    def flush(self) -> None:
        """See SliceStore."""
        with self._timed():
            super().flush()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent_s += time.perf_counter() - began


@contextlib.asynccontextmanager
async def _fetching(part: Part, where: str) -> AsyncIterator[Move]:
    """Takes the experts from a BulkServer. The move returns the seconds for which a thread was in the store."""
    manifest = load_manifest(part.folder / MANIFEST)
    wanted = part.experts(manifest)
    server = part.place.identity(part.way).peer_id
    async with await Endpoint.bind(Identity.generate(), listen=(HOST, 0)) as endpoint:
        sources = []
        for number in range(part.connections):
            lane = f"{LANE}-{number}" if number else LANE
            connection = await endpoint.dial(server, [(HOST, int(where))], lane=lane)
            sources.append(await PeerSource.open(connection, manifest, f"connection {number}"))

        async def keep() -> float:
            store = TimedStore(part.store, manifest)
            with store:
                await Fetcher(store, manifest, {0: wanted}, lambda: sources).run()
            return store.spent_s

        async def drop() -> float:
            await asyncio.gather(*(_drop(source, wanted[n :: len(sources)]) for n, source in enumerate(sources)))
            return 0.0

        yield keep if part.way == STORED else drop
        for source in sources:
            await source.close()


async def _drop(source: PeerSource, experts: Iterable[int]) -> None:
    async def one(expert: int) -> None:
        await source.fetch(0, expert)

    await asyncio.gather(*map(one, experts))


async def move(part: Part) -> None:
    """Once, when told."""
    where = sys.stdin.readline().strip()
    if not where:  # it is over before it began
        return
    async with _sending(part, where) if part.way in CARRIERS else _fetching(part, where) as moving:
        print("ready", flush=True)
        if not sys.stdin.readline():
            return
        before, began = _usage(), time.monotonic()
        async with asyncio.timeout(MOVE_SECONDS):
            store_s = await moving()
        ended, after = time.monotonic(), _usage()
        spent = {name: after[name] - before[name] for name in before}
        print(json.dumps({"began": began, "ended": ended, "store_s": store_s, **spent}), flush=True)
        sys.stdin.readline()


def _usage() -> dict[str, float]:
    """CPU seconds of this process, and of this thread, which runs its loop."""
    return {"cpu_s": time.process_time(), "loop_s": time.thread_time()}


if __name__ == "__main__":
    asyncio.run({"serve": serve, "move": move}[sys.argv[1]](Part.parse(*sys.argv[2:])))
