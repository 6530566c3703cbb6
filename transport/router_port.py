"""PCP (RFC 6887) and NAT-PMP (RFC 6886): one exchange each way with the router's UDP port. SHELL.

What the router says is hostile: the socket is connected, so the kernel drops what others send; nonces, opcodes and
ports are compared; sizes are bounded by the codecs (proto/port_mapping_frames). When to ask is port_mapping's business,
which calls this.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from transport.errors import Address
from transport.gateway import Gateway, MappingFailed
from transport.proto import port_mapping_frames as frames

T = TypeVar("T")

TRIES, TRY_SECONDS = 2, 0.25  # a home router answers in a few ms
ANY_ADDRESS: Address = ("0.0.0.0", 0)


class RouterSocket(asyncio.DatagramProtocol):
    """Questions to the router's PCP / NAT-PMP port and their answers; the kernel drops what others send."""

    def __init__(self) -> None:
        self._asked: list[tuple[Callable[[bytes], object], asyncio.Future[Any]]] = []  # Any: each question's own type
        self._transport: asyncio.DatagramTransport | None = None

    @classmethod
    async def open(cls, gateway: Gateway) -> RouterSocket:
        """Connect a UDP socket. Raises MappingFailed."""
        try:
            _, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
                cls, local_addr=(gateway.own_host, 0), remote_addr=(gateway.host, gateway.router_port)
            )
        except OSError as error:
            raise MappingFailed(f"no way to the router: {error.strerror or error}") from error
        return protocol

    async def ask(self, question: bytes, parse: Callable[[bytes], T | None]) -> T:
        """Send `question` up to TRIES times; the first answer that `parse` takes. Raises MappingFailed."""
        entry = (parse, asyncio.get_running_loop().create_future())
        self._asked.append(entry)
        try:
            for _ in range(TRIES):
                if self._transport is None:
                    break
                self._transport.sendto(question)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TRY_SECONDS):
                        answer: T = await asyncio.shield(entry[1])
                        return answer
            raise MappingFailed("no answer")
        finally:
            self._asked.remove(entry)
            entry[1].cancel()

    def close(self) -> None:
        """Close the socket; questions in flight get no answer."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def connection_made(self, transport: Any) -> None:  # Any: asyncio's base class promises less than it gives
        self._transport = transport

    def datagram_received(self, data: bytes, _source: object) -> None:
        for parse, answer in self._asked:
            if not answer.done():
                parsed = parse(data)
                if parsed is not None:
                    answer.set_result(parsed)

    def error_received(self, _error: Exception) -> None:
        """An ICMP refusal: nobody listens there, so that waiting is vain."""
        for _, answer in self._asked:
            if not answer.done():
                answer.set_exception(MappingFailed("no answer"))
                answer.exception()  # looked at: an answer that nobody awaits any more is no news

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None


class _Epochs:
    """Compares the router's epochs with our clock."""

    def __init__(self) -> None:
        self._clock = frames.EpochClock()

    def lost(self, epoch: int) -> bool:
        """Did the router start anew since the last epoch?"""
        return self._clock.lost(epoch, asyncio.get_running_loop().time())


class PcpRouter:
    """MAP requests with one nonce: who does not know it cannot take the mapping over, nor renew it."""

    name = "pcp"

    def __init__(self, link: RouterSocket, own_host: str, nonce: bytes) -> None:
        self._link, self._own_host, self._nonce = link, own_host, nonce
        self._epochs = _Epochs()
        self._port = 0

    async def map(self, port: int, wanted: Address, lifetime: int) -> tuple[Address, float]:
        self._port = port

        def parse(data: bytes) -> frames.PcpMapping | str | None:
            if frames.refuses_version(data, frames.PCP_VERSION):
                return frames.pcp_reason(1)
            answer = frames.parse_pcp_mapping(data)
            return answer if answer and (answer.nonce, answer.internal_port) == (self._nonce, port) else None

        question = frames.pcp_ask_mapping(self._own_host, self._nonce, port, wanted, lifetime)
        answer: frames.PcpMapping | str = await self._link.ask(question, parse)
        if isinstance(answer, str) or answer.result or not answer.lifetime:
            raise MappingFailed(answer if isinstance(answer, str) else frames.pcp_reason(answer.result))
        if ":" in answer.external[0]:
            raise MappingFailed("the router gave an IPv6 address")
        self._epochs.lost(answer.epoch)
        return answer.external, float(answer.lifetime)

    async def intact(self) -> bool:
        return not self._epochs.lost(await self._link.ask(frames.pcp_ask_epoch(self._own_host), frames.parse_pcp_epoch))

    async def unmap(self) -> None:
        if self._port:
            question = frames.pcp_ask_mapping(self._own_host, self._nonce, self._port, ANY_ADDRESS, 0)
            with contextlib.suppress(MappingFailed):
                await self._link.ask(question, frames.parse_pcp_mapping)

    def close(self) -> None:
        self._link.close()


class PmpRouter:
    """NAT-PMP: the external address and a mapping."""

    name = "nat-pmp"

    def __init__(self, link: RouterSocket) -> None:
        self._link = link
        self._epochs = _Epochs()
        self._host = ""
        self._port = 0

    async def ask_address(self) -> frames.PmpAddress:
        """The external address. Raises MappingFailed when there is none, or no NAT-PMP."""

        def parse(data: bytes) -> frames.PmpAddress | str | None:
            if frames.refuses_version(data, frames.PMP_VERSION):
                return frames.pmp_reason(1)
            return frames.parse_pmp_address(data)

        answer: frames.PmpAddress | str = await self._link.ask(frames.pmp_ask_address(), parse)
        if isinstance(answer, str) or answer.result:
            raise MappingFailed(answer if isinstance(answer, str) else frames.pmp_reason(answer.result))
        return answer

    async def map(self, port: int, wanted: Address, lifetime: int) -> tuple[Address, float]:
        self._port = port
        self._host = (await self.ask_address()).host

        def parse(data: bytes) -> frames.PmpMapping | None:
            answer = frames.parse_pmp_mapping(data)
            return answer if answer and (answer.internal_port == port or answer.result) else None

        answer = await self._link.ask(frames.pmp_ask_mapping(port, wanted[1] or port, lifetime), parse)
        if answer.result or not answer.lifetime:
            raise MappingFailed(frames.pmp_reason(answer.result))
        self._epochs.lost(answer.epoch)
        return (self._host, answer.external_port), float(answer.lifetime)

    async def intact(self) -> bool:
        answer = await self.ask_address()
        return not self._epochs.lost(answer.epoch) and answer.host == self._host

    async def unmap(self) -> None:
        if self._port:
            with contextlib.suppress(MappingFailed):
                await self._link.ask(frames.pmp_ask_mapping(self._port, 0, 0), frames.parse_pmp_mapping)

    def close(self) -> None:
        self._link.close()
