"""A model on disk, nodes that serve it, and nodes that ask, over real QUIC on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.bulk.frames import (
    HEAD,
    LANE,
    AskExperts,
    AskHoldings,
    ExpertFollows,
    Head,
    HoldingsFollow,
    Request,
    decode_request,
    encode_holdings,
)
from swarmnode.bulk.provider import SliceProvider, SourceProvider
from swarmnode.bulk.server import BulkServer
from swarmnode.bulk.source import PeerSource
from swarmnode.model.backbone_file import remote_weights, write_backbone
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import Manifest, build_manifest, digest_experts, encode_manifest, save_manifest
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.model.slicing import Buffer
from swarmnode.model.store import SliceStore
from tests.swarmnode.model.conftest import swiglu_sites
from transport.config import TransportConfig
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import TransportError
from transport.identity import Identity
from transport.stream import Stream

LOOPBACK = ("127.0.0.1", 0)


@dataclass(frozen=True)
class Model:
    """A random model of 3 sites with 16 experts of 26 kB, or larger ones; its backbone file and its manifest."""

    folder: Path
    source: Path
    backbone: Path
    manifest: Manifest

    @property
    def hash(self) -> bytes:
        return bytes.fromhex(self.manifest.model_hash)

    @property
    def everything(self) -> dict[int, range]:
        return {site.index: range(site.n_expert) for site in self.manifest.sites}

    @property
    def total(self) -> int:
        return sum(self.manifest.expert_bytes(site.index) * site.n_expert for site in self.manifest.sites)

    def provider(self) -> SourceProvider:
        return SourceProvider(self.manifest, self.source, self.backbone)

    def slices(self, site: int, expert: int) -> bytes:
        return b"".join(bytes(piece) for piece in self.provider().read(site, expert))

    def check(self, store: SliceStore, wanted: Mapping[int, Iterable[int]]) -> None:
        """The store holds what is wanted, with the source's bytes, on disk."""
        assert not store.missing(wanted)
        store.verify()


def make_model(folder: Path, *, d: int = 128, n_ff: int = 64, n_expert: int = 16, layers: int = 3) -> Model:
    shape = RandomModel(
        d_model=d, n_layers=layers, n_ff_expert=n_ff, n_expert=n_expert, n_used=2, vocab=300, n_ff_shared=64, seed=5
    )
    folder.mkdir(parents=True, exist_ok=True)
    [source] = write_random_model(shape, folder / "model.gguf")
    gguf = GgufFile.open(source)
    sites = swiglu_sites(shape)
    info = write_backbone(gguf, folder / "backbone.gguf", remote_weights(gguf))
    manifest = build_manifest(gguf, sites, digest_experts(gguf, sites), backbone_sha256=info.sha256)
    save_manifest(manifest, folder / "manifest.json")
    return Model(folder, source, folder / "backbone.gguf", manifest)


class PartProvider:
    """Some experts only; `corrupt` ones have a wrong byte; `hidden` ones are claimed and not there."""

    def __init__(
        self,
        model: Model,
        held: Mapping[int, Iterable[int]],
        *,
        corrupt: Iterable[tuple[int, int]] = (),
        hidden: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.manifest = model.manifest
        self.backbone: Path | None = None
        self.held = {site: set(experts) for site, experts in held.items()}
        self.corrupt, self.hidden = set(corrupt), set(hidden)
        self.reads: list[tuple[int, int]] = []
        self._inner = model.provider()

    def manifest_bytes(self) -> bytes:
        return encode_manifest(self.manifest)

    def holdings(self) -> Mapping[int, Iterable[int]]:
        return {site: tuple(experts) for site, experts in self.held.items()}

    def read(self, site: int, expert: int) -> Iterator[Buffer]:
        if expert not in self.held.get(site, ()) or (site, expert) in self.hidden:
            yield from self._inner.read(site, 1 << 16)  # raises
        self.reads.append((site, expert))
        for number, piece in enumerate(self._inner.read(site, expert)):
            data = bytearray(piece)
            if (site, expert) in self.corrupt and number == 0:
                data[7] ^= 1
            yield data


Script = Callable[[Request, Stream], Awaitable[None]]


@dataclass
class Node:
    """An endpoint, with a server or a script behind it."""

    endpoint: Endpoint
    server: BulkServer | None = None
    script: Script | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    async def accept(self) -> None:
        with contextlib.suppress(TransportError):  # it was closed
            while True:
                connection = await self.endpoint.accept()
                self.connections.append(connection)
                serve = self.server.serve(connection) if self.server is not None else self._follow(connection)
                self.tasks.append(asyncio.create_task(serve))

    async def _follow(self, connection: Connection) -> None:
        with contextlib.suppress(TransportError):
            while True:
                self.tasks.append(asyncio.create_task(self._one(await connection.accept_stream())))

    async def _one(self, stream: Stream) -> None:
        assert self.script is not None
        with contextlib.suppress(TransportError):
            head = Head.decode(await stream.readexactly(HEAD.size))
            await self.script(decode_request(head, await stream.readexactly(head.n_fields)), stream)

    async def close(self) -> None:
        await self.endpoint.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Nodes:
    """Serving nodes and one that asks; made by `nodes()`."""

    def __init__(self, model: Model, endpoint: Endpoint) -> None:
        self.model, self.endpoint = model, endpoint
        self.members: list[Node] = []
        self.sources: list[PeerSource] = []

    async def serve(self, provider: SliceProvider | None = None, server: BulkServer | None = None) -> Node:
        given = provider or self.model.provider()
        server = server or BulkServer(lambda wanted: given if wanted == self.model.hash else None)
        return await self._add(Node(await self.bind(), server))

    async def scripted(self, script: Script) -> Node:
        return await self._add(Node(await self.bind(), script=script))

    async def _add(self, node: Node) -> Node:
        node.tasks.append(asyncio.create_task(node.accept()))
        self.members.append(node)
        return node

    async def bind(self, config: TransportConfig | None = None) -> Endpoint:
        identity = Identity.generate((1000 + len(self.members)).to_bytes(32, "big"))
        return await Endpoint.bind(identity, config or TransportConfig(), listen=LOOPBACK)

    async def dial(self, node: Node) -> Connection:
        return await self.endpoint.dial(node.endpoint.peer_id, [node.endpoint.address], lane=LANE)

    async def source(self, node: Node, name: str = "", stall_s: float = 8.0) -> PeerSource:
        number = self.members.index(node)
        source = await PeerSource.open(
            await self.dial(node), self.model.manifest, name or f"node {number}", stall_s=stall_s
        )
        self.sources.append(source)
        return source

    async def close(self) -> None:
        for source in self.sources:
            await source.close()
        await self.endpoint.close()
        for node in self.members:
            await node.close()


@contextlib.asynccontextmanager
async def nodes(model: Model) -> AsyncIterator[Nodes]:
    made = Nodes(model, await Endpoint.bind(Identity.generate(bytes(32)), listen=LOOPBACK))
    try:
        yield made
    finally:
        async with asyncio.timeout(30):
            await made.close()


def claims(model: Model, then: Script) -> Script:
    """A script that says that it has everything, and then does as it likes."""

    async def script(request: Request, stream: Stream) -> None:
        if isinstance(request, AskHoldings):
            data = encode_holdings(model.everything, [site.n_expert for site in model.manifest.sites])
            await stream.write(HoldingsFollow(len(data)).encode() + data)
            await stream.finish()
        else:
            await then(request, stream)

    return script


def half_an_expert(model: Model, request: Request) -> bytes:
    assert isinstance(request, AskExperts)
    size = model.manifest.expert_bytes(request.site)
    return ExpertFollows(request.experts[0], size).encode() + bytes(size // 2)


def head(kind: int, fields: bytes, version: int = 1) -> bytes:
    return struct.pack("<BBH", kind, version, len(fields)) + fields
