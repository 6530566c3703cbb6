"""A STUN reflector in the test's own process, told by the test what to do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from transport.errors import Address
from transport.proto import stun


class Reflector:
    """Two ports; answers from the other one when asked to, and plays NAT when told."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.ports: list[int] = []
        self.transports: list[Any] = []
        self.deaf = 0
        self.limit = 9000
        self.other_port = True
        self.filtered = False  # as behind a NAT that lets in only ports that were written to
        self.port_step = 0  # as behind a NAT that gives every destination another port
        self.wrong_transaction = False

    def protocol(self, index: int) -> asyncio.DatagramProtocol:
        reflector = self

        class Port(asyncio.DatagramProtocol):
            def datagram_received(self, data: bytes, source: Any) -> None:
                reflector.answer(index, data, source)

        return Port()

    def answer(self, index: int, data: bytes, source: Any) -> None:
        transaction = stun.parse_binding_request(data)
        if transaction is None or len(data) > self.limit:
            return
        if self.deaf:
            self.deaf -= 1
            return
        if self.wrong_transaction:
            transaction = bytes(12)
        seen = (source[0], source[1] + index * self.port_step)
        if stun.wants_other_port(data):
            if self.filtered:
                return
            index = 1 - index if self.other_port else index
        self.transports[index].sendto(stun.make_binding_response(transaction, seen), source)

    def at(self, index: int) -> Address:
        return self.host, self.ports[index]


@contextlib.asynccontextmanager
async def reflector(host: str = "127.0.0.1") -> AsyncIterator[Reflector]:
    it = Reflector(host)
    for index in range(2):
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda index=index: it.protocol(index),  # type: ignore[misc]
            local_addr=(host, 0),
        )
        it.transports.append(transport)
        it.ports.append(transport.get_extra_info("sockname")[1])
    try:
        yield it
    finally:
        for transport in it.transports:
            transport.close()
