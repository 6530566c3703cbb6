"""Our endpoint as a carrier: directly over loopback, and through a relay."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from swarmnode.bench.carriers.base import HOST, Answers, Place, Session
from transport.config import TransportConfig
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import Address
from transport.identity import Identity
from transport.stream import Stream

# Through a relay: no datagram goes from one family's loopback to the other's, so a direct path is never found.
IPV6_HOST = "::1"


class QuicSession:
    """Our stream, on the hot path: answers come by set_receiver, requests go by write_nowait."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._missing = 0
        self._done: asyncio.Future[None] | None = None
        stream.set_receiver(self._received, lambda _: None)

    def _received(self, data: bytes) -> None:
        self._missing -= len(data)
        if self._missing <= 0 and self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def _wait(self, size: int) -> None:
        self._missing += size
        self._done = asyncio.get_running_loop().create_future()
        if self._missing > 0:
            await self._done

    async def ask(self, request: bytes, size: int) -> None:
        """See Session."""
        self._stream.write_nowait(request)
        await self._wait(size)

    async def push(self, data: bytes) -> None:
        """See Session."""
        await self._stream.write(data)

    async def answer(self) -> None:
        """See Session."""
        await self._wait(1)


class Quic:
    """Our endpoint with one of its engines; `relayed`: through the relay, as peers do that have no direct path."""

    missing = ""

    def __init__(self, name: str, engine: str, *, relayed: bool = False, network: bool = False) -> None:
        """`network`: with the datagrams of a network path, instead of loopback's."""
        self.name = name
        self.quick = engine == "qh3"
        self.bulk_megabytes = 200 if engine == "qh3" else 40
        if relayed:
            self.bulk_megabytes //= 2
        self._engine, self._relayed, self._network = engine, relayed, network
        way = "through the relay" if relayed else "direct"
        config = self._config("")
        size = config.datagram_size if relayed or network else config.loopback_datagram_size
        self.note = f"our endpoint on {engine}, {way}, {size}-byte datagrams"

    def _config(self, relay: str) -> TransportConfig:
        config = TransportConfig(engine=self._engine, port_mapping=False)
        if self._network:
            config = replace(config, loopback_datagram_size=config.datagram_size)
        return replace(config, relays=(relay,)) if self._relayed and relay else config

    async def serve(self, place: Place) -> AsyncIterator[str]:
        """See Carrier."""
        listen = (IPV6_HOST if self._relayed else HOST, 0)
        endpoint = await Endpoint.bind(place.identity(self.name), self._config(place.relay), listen=listen)
        async with endpoint, asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(_connections(endpoint, tasks))
            while self._relayed and not any(view.up for view in endpoint.relays()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            yield str(endpoint.address[1])
            accepting.cancel()
            for connection in endpoint.connections():
                await connection.close()

    @contextlib.asynccontextmanager
    async def connect(self, place: Place, where: str) -> AsyncIterator[Session]:
        """See Carrier."""
        config = self._config(place.relay)
        addresses: list[Address] = [] if self._relayed else [(HOST, int(where))]
        async with await Endpoint.bind(Identity.generate(), config, listen=(HOST, 0)) as endpoint:
            connection = await endpoint.dial(place.identity(self.name).peer_id, addresses)
            yield QuicSession(await connection.open_stream())
            if self._relayed and connection.stats().relay != place.relay:
                raise RuntimeError("the two endpoints left the relay; these figures would be of a direct path")


async def _connections(endpoint: Endpoint, tasks: asyncio.TaskGroup) -> None:
    while True:
        connection = await endpoint.accept()
        tasks.create_task(_until_closed(_streams(connection)))


async def _streams(connection: Connection) -> None:
    while True:
        stream = await connection.accept_stream()
        stream.set_receiver(Answers(stream.write_nowait).received, lambda _: None)  # from the receive path


async def _until_closed(work: Coroutine[Any, Any, None]) -> None:  # Any: what the coroutine is sent, nothing here
    with contextlib.suppress(Exception):  # the client has gone
        await work
