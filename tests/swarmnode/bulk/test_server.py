from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.bulk.frames import (
    HEAD,
    LANE,
    Absent,
    Answer,
    AskBackbone,
    AskExperts,
    AskHoldings,
    AskManifest,
    BackboneFollows,
    ExpertFollows,
    FailCode,
    Failed,
    Head,
    HoldingsFollow,
    ManifestFollows,
    decode_answer,
    decode_holdings,
)
from swarmnode.bulk.provider import StoreProvider
from swarmnode.bulk.server import BulkServer
from swarmnode.model.manifest import encode_manifest
from swarmnode.model.slicing import Buffer
from swarmnode.model.store import SliceStore
from tests.swarmnode.bulk.nodes import LOOPBACK, Model, Nodes, PartProvider, head, nodes
from transport.config import TransportConfig
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import StreamReset
from transport.identity import Identity
from transport.stream import Stream


async def ask_raw(connection: Connection, data: bytes) -> Stream:
    stream = await connection.open_stream()
    await stream.write(data)
    await stream.finish()
    return stream


async def read_part(stream: Stream) -> Answer:
    part = Head.decode(await stream.readexactly(HEAD.size))
    return decode_answer(part, await stream.readexactly(part.n_fields))


async def refusal(connection: Connection, data: bytes) -> Failed:
    stream = await ask_raw(connection, data)
    part = await read_part(stream)
    assert await stream.read(1) == b""
    assert isinstance(part, Failed)
    return part


async def still_serves(swarm: Nodes, connection: Connection) -> None:
    stream = await ask_raw(connection, AskExperts(swarm.model.hash, 1, (3,)).encode())
    part = await read_part(stream)
    assert isinstance(part, ExpertFollows)
    assert await stream.readexactly(part.size) == swarm.model.slices(1, 3)


async def test_every_request(model: Model) -> None:
    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve())
        stream = await ask_raw(connection, AskManifest(model.hash).encode())
        encoded = encode_manifest(model.manifest)
        assert await read_part(stream) == ManifestFollows(len(encoded))
        assert await stream.readexactly(len(encoded)) == encoded
        assert await stream.read(1) == b""

        stream = await ask_raw(connection, AskHoldings(model.hash).encode())
        part = await read_part(stream)
        assert isinstance(part, HoldingsFollow)
        assert decode_holdings(await stream.readexactly(part.size), [16] * 3) == dict.fromkeys(range(3), 0xFFFF)

        stream = await ask_raw(connection, AskExperts(model.hash, 2, (5, 0)).encode())
        for expert in (5, 0):
            assert await read_part(stream) == ExpertFollows(expert, model.manifest.expert_bytes(2))
            assert await stream.readexactly(model.manifest.expert_bytes(2)) == model.slices(2, expert)
        assert await stream.read(1) == b""

        data = model.backbone.read_bytes()
        for offset, expected in ((0, 0), (100, 100), (1 << 60, None)):
            stream = await ask_raw(connection, AskBackbone(model.hash, offset).encode())
            follows = await read_part(stream)
            assert isinstance(follows, BackboneFollows)
            assert follows.length == len(data)
            assert follows.offset == (follows.end if expected is None else expected)
            rest = await stream.readexactly(follows.end - follows.offset)
            assert rest == data[follows.offset : follows.end]
            assert not any(data[follows.end :])


async def test_nonsense_is_refused_and_hurts_nobody(model: Model) -> None:
    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve())
        cases = [
            (head(1, model.hash, version=9), FailCode.OTHER_VERSION, "version 9 there, 1 here"),
            (head(1, bytes(32)), FailCode.UNKNOWN_MODEL, "model 0000000000000000… is not here"),
            (AskExperts(model.hash, 3, (0,)).encode(), FailCode.BAD_REQUEST, "site 3 does not exist"),
            (head(77, b""), FailCode.BAD_REQUEST, "kind 77 where a request is due"),
            (head(3, model.hash), FailCode.BAD_REQUEST, "ends after 32"),
            (b"\x01", FailCode.BAD_REQUEST, "a request ends after 1 of 4 bytes"),
            (b"\x01\x01\x20\x00abc", FailCode.BAD_REQUEST, "a request ends after 3 of 32 bytes"),
            (b"\x01\x01\xff\xff", FailCode.BAD_REQUEST, "1024 at most"),
            (b"", FailCode.BAD_REQUEST, "ends after 0 of 4"),
        ]
        for data, code, why in cases:
            part = await refusal(connection, data)
            assert (part.code, why in part.why) == (code, True), part
        for _ in range(200):
            stream = await ask_raw(connection, os.urandom(50))
            while True:  # whatever it is told, it ends
                try:
                    if not await stream.read(1 << 16):
                        break
                except StreamReset:
                    break
        await still_serves(swarm, connection)


async def test_what_is_not_held_is_absent_and_the_rest_comes(model: Model) -> None:
    provider = PartProvider(model, {1: range(8)}, hidden=[(1, 2)])
    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve(provider))
        stream = await ask_raw(connection, AskExperts(model.hash, 1, (9, 2, 3)).encode())
        assert await read_part(stream) == Absent(9)
        assert await read_part(stream) == Absent(2)
        assert await read_part(stream) == ExpertFollows(3, model.manifest.expert_bytes(1))
        assert await stream.readexactly(model.manifest.expert_bytes(1)) == model.slices(1, 3)
        assert (await refusal(connection, AskBackbone(model.hash, 0).encode())).code is FailCode.NO_BACKBONE


async def test_a_store_serves_what_it_holds_while_it_changes(model: Model, tmp_path: Path) -> None:
    with SliceStore(tmp_path / "store", model.manifest) as store:
        store.fill_from_source(model.source, {1: [3, 4]})
        async with nodes(model) as swarm:
            connection = await swarm.dial(await swarm.serve(StoreProvider(store)))
            await still_serves(swarm, connection)
            store.forget(1, [4])
            await still_serves(swarm, connection)
            stream = await ask_raw(connection, AskExperts(model.hash, 1, (4,)).encode())
            assert await read_part(stream) == Absent(4)
            store.fill_from_source(model.source, {0: [1]})
            stream = await ask_raw(connection, AskHoldings(model.hash).encode())
            part = await read_part(stream)
            assert isinstance(part, HoldingsFollow)
            assert decode_holdings(await stream.readexactly(part.size), [16] * 3) == {0: 2, 1: 8}


async def test_a_source_that_breaks_off_resets_the_stream(model: Model) -> None:
    class Breaking(PartProvider):
        def read(self, site: int, expert: int) -> Iterator[Buffer]:
            yield next(super().read(site, expert))
            yield from self._inner.read(site, 999)

    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve(Breaking(model, model.everything)))
        stream = await ask_raw(connection, AskExperts(model.hash, 1, (3,)).encode())
        part = await read_part(stream)
        assert isinstance(part, ExpertFollows)
        with pytest.raises(StreamReset):
            await stream.readexactly(part.size)


async def test_too_many_requests_are_told_so(model: Model) -> None:
    gate = threading.Event()

    class Waiting(PartProvider):
        def read(self, site: int, expert: int) -> Iterator[Buffer]:
            assert gate.wait(20)
            return super().read(site, expert)

    provider = Waiting(model, model.everything)
    server = BulkServer(lambda _: provider, max_in_all=1, busy_s=0.05)
    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve(server=server))
        first = await ask_raw(connection, AskExperts(model.hash, 0, (0,)).encode())
        while server.requests < 1:  # noqa: ASYNC110  no event of its own
            await asyncio.sleep(0.005)
        part = await refusal(connection, AskExperts(model.hash, 0, (1,)).encode())
        assert part.code is FailCode.BUSY
        gate.set()
        assert isinstance(await read_part(first), ExpertFollows)
        await still_serves(swarm, connection)


async def test_a_peer_that_does_not_read_is_cut_off(model: Model) -> None:
    provider = model.provider()
    server = BulkServer(lambda _: provider, max_in_all=1, stall_s=0.3)
    async with nodes(model) as swarm:
        node = await swarm.serve(server=server)
        narrow = TransportConfig(stream_window=16 << 10, connection_window=16 << 10)
        async with await Endpoint.bind(Identity.generate(bytes([7] * 32)), narrow, listen=LOOPBACK) as endpoint:
            connection = await endpoint.dial(node.endpoint.peer_id, [node.endpoint.address], lane=LANE)
            stream = await ask_raw(connection, AskExperts(model.hash, 0, (0,)).encode())
            async with asyncio.timeout(20):
                while not stream.receive_ended:  # noqa: ASYNC110  reading would help it
                    await asyncio.sleep(0.01)
            with pytest.raises(StreamReset):
                await stream.readexactly(model.manifest.expert_bytes(0))
        await still_serves(swarm, await swarm.dial(node))  # its place is free


async def test_it_pauses_between_pieces(model: Model) -> None:
    waits: list[float] = []

    def pause() -> float:
        waits.append(0.001)
        return waits[-1]

    provider = model.provider()
    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve(server=BulkServer(lambda _: provider, pause)))
        await still_serves(swarm, connection)
        size = sum(-(-t.stride // (64 * 1024)) for t in model.manifest.site_tensors(1))
        assert len(waits) == size


async def test_serve_ends_with_the_connection(model: Model) -> None:
    async with nodes(model) as swarm:
        node = await swarm.serve()
        connection = await swarm.dial(node)
        await still_serves(swarm, connection)
        serving = node.tasks[-1]
        await connection.close()
        await asyncio.wait_for(serving, 20)
