"""A UDP socket that asks reflectors and listens for a word of its own. SHELL.

For checks of the network only: a node asks from its one main socket instead (surroundings). Answers count only with
the transaction id of a question in flight and from the host that was asked. Called by netcheck.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transport.errors import Address
from transport.proto import stun

# The option that forbids cutting packets, by system and IP version: (level, option, value). Python names none of them.
_WHOLE = {
    ("linux", 4): (socket.IPPROTO_IP, 10, 3),  # IP_MTU_DISCOVER, IP_PMTUDISC_PROBE
    ("linux", 6): (socket.IPPROTO_IPV6, 23, 3),
    ("darwin", 4): (socket.IPPROTO_IP, 28, 1),  # IP_DONTFRAG
    ("darwin", 6): (socket.IPPROTO_IPV6, 62, 1),
    ("win32", 4): (socket.IPPROTO_IP, 14, 1),
    ("win32", 6): (socket.IPPROTO_IPV6, 14, 1),
}

TRIES_AT = (0.0, 0.25, 0.75)  # seconds; the answer may come until the end of WAIT
WAIT = 1.5
WORD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Seen:
    """A reflector's answer. sent, at: loop time in seconds of the first question and of the answer."""

    address: Address
    source: Address
    sent: float
    at: float


class UdpProbe(asyncio.DatagramProtocol):
    """One socket of one IP version."""

    def __init__(self) -> None:
        self._asked: dict[bytes, tuple[str, asyncio.Future[Seen], float]] = {}
        self._words: dict[bytes, asyncio.Future[None]] = {}
        self._transport: Any = None  # Any: asyncio's base class promises less than it gives
        self.address: Address = ("", 0)

    @classmethod
    async def open(cls, version: int, *, whole: bool = False) -> UdpProbe | None:
        """A socket on any address and port; `whole`: packets are never cut. None where the system cannot."""
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        try:
            handle = socket.socket(family, socket.SOCK_DGRAM)
        except OSError:
            return None
        try:
            if version == 6:
                handle.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            handle.setblocking(False)
            handle.bind(("::" if version == 6 else "0.0.0.0", 0))
            if whole:
                handle.setsockopt(*_WHOLE[sys.platform, version])
            _, probe = await asyncio.get_running_loop().create_datagram_endpoint(cls, sock=handle)
        except (OSError, KeyError):
            handle.close()
            return None
        return probe

    async def ask(
        self, reflector: Address, *, size: int = 64, change_port: bool = False, at: Sequence[float] = TRIES_AT
    ) -> Seen | None:
        """Our address as `reflector` sees it; None without an answer within WAIT. `size`: UDP payload of the question.

        With `change_port` the answer is wanted from the reflector's other port.
        """
        loop = asyncio.get_running_loop()
        transaction = secrets.token_bytes(stun.TRANSACTION_BYTES)
        answer: asyncio.Future[Seen] = loop.create_future()
        began = loop.time()
        self._asked[transaction] = (_plain(reflector[0]), answer, began)
        question = stun.binding_request(transaction, size, change_port=change_port)
        timers = [loop.call_at(began + delay, self._send, question, reflector) for delay in at]
        try:
            async with asyncio.timeout(WAIT):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._asked[transaction]
            for timer in timers:
                timer.cancel()

    async def hears(self, sender: UdpProbe, target: Address) -> bool:
        """Does what `sender` sends to `target` arrive at this socket?"""
        loop = asyncio.get_running_loop()
        word = secrets.token_bytes(WORD_BYTES)
        heard: asyncio.Future[None] = loop.create_future()
        self._words[word] = heard
        timers = [loop.call_later(delay, sender._send, word, target) for delay in TRIES_AT]
        try:
            async with asyncio.timeout(WAIT):
                await heard
        except TimeoutError:
            return False
        finally:
            del self._words[word]
            for timer in timers:
                timer.cancel()
        return True

    def close(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        name = transport.get_extra_info("sockname")
        self.address = (name[0], name[1])

    def datagram_received(self, data: bytes, source: Any) -> None:
        heard = self._words.get(data)
        if heard is not None and not heard.done():
            heard.set_result(None)
        parsed = stun.parse_binding_response(data)
        if parsed is None or parsed[0] not in self._asked:
            return
        host, answer, sent = self._asked[parsed[0]]
        if _plain(source[0]) == host and not answer.done():
            now = asyncio.get_running_loop().time()
            answer.set_result(Seen(parsed[1], (source[0], source[1]), sent, now))

    def error_received(self, _error: Exception) -> None:
        """No route, too large, or refused: the network losing a datagram."""

    def _send(self, data: bytes, target: Address) -> None:
        with contextlib.suppress(OSError):
            if not self._transport.is_closing():
                self._transport.sendto(data, target)


def _plain(host: str) -> str:
    """One spelling per address, without its zone."""
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return host
