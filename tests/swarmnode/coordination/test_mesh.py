"""Who is linked with whom, and what a link does with what comes over it, over real QUIC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from swarmnode.coordination.mesh import LANE, OTHERS, WHOLE_MESH, Mesh, wanted_links
from swarmnode.coordination.messages import Leaving, Message, Released, Serves
from swarmnode.errors import BadMessage
from swarmnode.peer_links import PeerLinks
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import EndpointClosed
from transport.identity import Identity, PeerId
from transport.stream import Stream

HOST = "127.0.0.1"


def peers(count: int) -> list[PeerId]:
    return [Identity.generate(bytes([i]) * 32).peer_id for i in range(count)]


def test_a_small_swarm_is_a_whole_mesh() -> None:
    everybody = peers(WHOLE_MESH + 1)
    for one in everybody:
        assert wanted_links(one, everybody, []) == set(everybody) - {one}


def test_a_large_swarm_is_connected_and_nobody_has_many_links() -> None:
    everybody = peers(100)
    hub = everybody[7]
    wanted = {one: wanted_links(one, everybody, [hub]) for one in everybody}
    for one, links in wanted.items():
        assert one not in links
        assert one == hub or hub in links
        assert len(links) <= OTHERS + 1
    # Without the hub too, news reaches nearly all: the links of both ends count.
    linked = {one: links | {other for other in everybody if one in wanted[other]} for one, links in wanted.items()}
    reached, edge = {everybody[0]}, {everybody[0]}
    while edge:
        edge = {other for one in edge for other in linked[one] if other != hub} - reached
        reached |= edge
    assert len(reached) >= 95


class Node:
    """An endpoint with a mesh; remembers what it hears."""

    def __init__(self, endpoint: Endpoint, where: dict[PeerId, tuple[str, int]]) -> None:
        self.endpoint = endpoint
        self.heard: asyncio.Queue[tuple[PeerId, Message]] = asyncio.Queue()
        self.links: asyncio.Queue[tuple[PeerId, bool]] = asyncio.Queue()
        self._peer_links = PeerLinks(endpoint, lambda peer: [where[peer]], lambda _: b"", self._on_connection)
        self.mesh = Mesh(
            self._peer_links,
            self._on_message,
            lambda peer: self.links.put_nowait((peer, True)),
            lambda peer, _: self.links.put_nowait((peer, False)),
        )
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        with contextlib.suppress(EndpointClosed):
            while True:
                await self._on_connection(await self.endpoint.accept(), None)

    async def _on_connection(self, connection: Connection, stream: Stream | None) -> None:
        if connection.lane == LANE:
            self.mesh.adopt(connection)

    def _on_message(self, peer: PeerId, message: Message) -> None:
        if message == Released():
            raise BadMessage("nobody was leaving")
        self.heard.put_nowait((peer, message))

    async def close(self) -> None:
        await self._peer_links.close()
        await self.mesh.close()
        await self.endpoint.close()
        await self._accepting


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[Node, Node]]:
    where: dict[PeerId, tuple[str, int]] = {}
    nodes = []
    for _ in range(2):
        endpoint = await Endpoint.bind(Identity.generate(), listen=(HOST, 0))
        where[endpoint.peer_id] = endpoint.address
        nodes.append(Node(endpoint, where))
    try:
        async with asyncio.timeout(20):
            yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            await node.close()


async def linked(one: Node, other: Node) -> None:
    assert await one.links.get() == (other.endpoint.peer_id, True)
    assert await other.links.get() == (one.endpoint.peer_id, True)


async def test_both_dial_at_once_and_each_message_comes_once() -> None:
    async with two() as (one, other):
        one.mesh.target({other.endpoint.peer_id})
        other.mesh.target({one.endpoint.peer_id})
        await linked(one, other)
        for i in range(20):
            assert one.mesh.send(other.endpoint.peer_id, Serves(bytes([i]) * 32))
        for i in range(20):
            assert await other.heard.get() == (one.endpoint.peer_id, Serves(bytes([i]) * 32))
        other.mesh.broadcast(Leaving())
        assert await one.heard.get() == (other.endpoint.peer_id, Leaving())
        assert other.heard.empty()


async def test_a_link_of_a_visit_stays_and_is_not_made_again() -> None:
    async with two() as (one, other):
        there = other.endpoint.peer_id
        assert not one.mesh.send(there, Leaving())
        one.mesh.visit(there)
        await linked(one, other)
        one.mesh.leave(there)
        assert one.mesh.send(there, Leaving())
        assert await other.heard.get() == (one.endpoint.peer_id, Leaving())
        await other.mesh.drop(one.endpoint.peer_id, "enough")
        assert await one.links.get() == (there, False)
        assert not one._peer_links.wanted()


async def test_a_visit_of_a_peer_that_is_wanted_anyway_changes_nothing() -> None:
    async with two() as (one, other):
        there = other.endpoint.peer_id
        one.mesh.visit(there)
        one.mesh.target({there})
        one.mesh.leave(there)
        assert one._peer_links.wanted() == {(there, LANE)}
        await linked(one, other)


async def test_a_message_that_must_not_come_ends_the_link_and_it_is_made_again() -> None:
    async with two() as (one, other):
        one.mesh.target({other.endpoint.peer_id})
        await linked(one, other)
        one.mesh.send(other.endpoint.peer_id, Released())
        assert await other.links.get() == (one.endpoint.peer_id, False)
        assert await other.links.get() == (one.endpoint.peer_id, True)
        assert one.mesh.up() == [other.endpoint.peer_id] or await one.links.get()


async def test_garbage_ends_the_link_of_who_sent_it() -> None:
    async with two() as (one, other):
        connection = await one.endpoint.dial(other.endpoint.peer_id, [other.endpoint.address], lane=LANE)
        stream = await connection.open_stream()
        await stream.write(b"\xff" * 64)
        assert await other.links.get() == (one.endpoint.peer_id, True)
        assert await other.links.get() == (one.endpoint.peer_id, False)
        reason = await connection.wait_closed()
        assert "1 to 1048576 are allowed" in str(reason)


async def test_closing_does_not_wait_for_links_that_newer_ones_replaced_or_that_come_meanwhile() -> None:
    async with two() as (one, other):
        for lane in ("another", LANE):  # as when both dial at the same moment
            connection = await one.endpoint.dial(other.endpoint.peer_id, [other.endpoint.address], lane=lane)
            one.mesh.adopt(connection)
            assert await one.links.get() == (other.endpoint.peer_id, True)
        async with asyncio.timeout(10):
            await one.mesh.close()
        one.mesh.adopt(connection)
        assert one.mesh.up() == []
