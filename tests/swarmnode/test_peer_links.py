"""Keeping peers connected, and what is said with the dial."""

from __future__ import annotations

import asyncio

from swarmnode.peer_links import PeerLinks
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.identity import Identity
from transport.stream import Stream

HOST = "127.0.0.1"


async def test_what_a_lane_begins_with_goes_with_the_dial_and_its_stream_to_who_uses_the_connection() -> None:
    made: dict[str, Stream | None] = {}
    both = asyncio.Event()

    async def on_connection(connection: Connection, stream: Stream | None) -> None:
        made[connection.lane] = stream
        if len(made) == 2:
            both.set()

    async with (
        asyncio.timeout(10),
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0)) as ours,
        await Endpoint.bind(Identity.generate(), listen=(HOST, 0)) as theirs,
    ):
        first = {"asks": b"hello", "serves": b""}
        links = PeerLinks(ours, lambda _: [theirs.address], lambda lane: first[lane], on_connection)
        for lane in first:
            links.want(theirs.peer_id, lane)
        await both.wait()
        stream = made["asks"]
        assert stream is not None
        assert made["serves"] is None
        asked = next(one for one in [await theirs.accept(), await theirs.accept()] if one.lane == "asks")
        incoming = await asked.accept_stream()
        assert await incoming.readexactly(5) == b"hello"
        await incoming.write(b"welcome")
        assert await stream.readexactly(7) == b"welcome"
        await links.close()


async def test_who_is_not_there_yet_is_reached_as_soon_as_there_is_news_of_him() -> None:
    connected = asyncio.Event()

    async def on_connection(connection: Connection, stream: Stream | None) -> None:
        connected.set()

    async with asyncio.timeout(10), await Endpoint.bind(Identity.generate(), listen=(HOST, 0)) as ours:
        identity = Identity.generate()
        addresses: list[tuple[str, int]] = []
        links = PeerLinks(ours, lambda _: addresses, lambda _: b"", on_connection)
        links.want(identity.peer_id, "swarm")
        links.want(identity.peer_id, "swarm")
        assert links.wanted() == {(identity.peer_id, "swarm")}
        async with await Endpoint.bind(identity, listen=(HOST, 0)) as theirs:
            addresses.append(theirs.address)
            links.hurry(identity.peer_id)
            await connected.wait()
        links.unwant(identity.peer_id, "swarm")
        assert links.wanted() == set()
        assert links.problems == {}
        await links.close()
