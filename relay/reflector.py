"""UDP "what is my address": answers STUN Binding requests on two ports, IPv4 and IPv6. SHELL.

Two ports, because a NAT that gives the same client another external port for each is hard to punch; a request that
asks for it is answered from the other port, which shows what the NAT lets in. What is no good request, or is shorter
than the answer, gets none, so nobody can be flooded through this. Owned by the server.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any, cast

from relay.limits import TokenBucket
from relay.metrics import Counts, Unreflected
from transport.errors import Address, BindFailed
from transport.proto.stun import make_binding_response, parse_binding_request, wants_other_port

logger = logging.getLogger(__name__)

ANSWERS_PER_SECOND = 5_000  # about a quarter of a core
EPHEMERAL_TRIES = 20
IPV6_MISSING = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


class Reflector:
    """Four sockets at most: two ports, each for IPv4 and IPv6."""

    def __init__(self, counts: Counts) -> None:
        self.ports = (0, 0)
        self._counts = counts
        self._bucket: TokenBucket | None = None
        self._transports: list[asyncio.DatagramTransport] = []

    async def start(self, host: str, ports: tuple[int, int]) -> None:
        """Answer at `host` ("::": every address, IPv6 and IPv4); port 0 is any. Raises BindFailed."""
        loop = asyncio.get_running_loop()
        self._bucket = TokenBucket(ANSWERS_PER_SECOND, ANSWERS_PER_SECOND, loop.time())
        hosts = ["0.0.0.0", "::"] if host in ("", "::") else [host]
        opened = [_bind(hosts, port) for port in ports]
        self.ports = (opened[0][0].getsockname()[1], opened[1][0].getsockname()[1])
        by_family: dict[int, list[_Port]] = {}
        for sockets in opened:
            for sock in sockets:
                port = _Port(self)
                transport, _ = await loop.create_datagram_endpoint(lambda port=port: port, sock=sock)  # type: ignore[misc]
                self._transports.append(transport)
                by_family.setdefault(sock.family, []).append(port)
        for pair in by_family.values():
            if len(pair) == 2:
                pair[0].other, pair[1].other = pair[1], pair[0]

    def close(self) -> None:
        """Stop answering."""
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    def answer(self, data: bytes, source: Address) -> tuple[bytes, bool] | None:
        """The answer to a datagram, and whether it leaves from the other port; None for none."""
        transaction = parse_binding_request(data)
        if transaction is None or not source[1]:
            self._counts.unreflected[Unreflected.BAD] += 1
            return None
        assert self._bucket is not None
        if not self._bucket.take(1, asyncio.get_running_loop().time()):
            self._counts.unreflected[Unreflected.RATE] += 1
            return None
        response = make_binding_response(transaction, source)
        if len(response) > len(data):
            self._counts.unreflected[Unreflected.BAD] += 1
            return None
        self._counts.reflected += 1
        return response, wants_other_port(data)


class _Port(asyncio.DatagramProtocol):
    def __init__(self, reflector: Reflector) -> None:
        self._reflector = reflector
        self.other: _Port | None = None
        self.full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:  # IPv6 has four parts
        answer = self._reflector.answer(data, (str(addr[0]), int(addr[1])))
        if answer is None:
            return
        response, from_other = answer
        port = self.other if from_other else self
        if port is not None and not port.full:
            port.transport.sendto(response, addr)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False

    def error_received(self, exc: Exception) -> None:
        logger.debug("reflector_error error=%r", str(exc))


def _bind(hosts: list[str], port: int) -> list[socket.socket]:
    """One socket per host, all on the same port. The first host must work; IPv6, the second, may be missing."""
    host = hosts[0]
    try:
        for _ in range(EPHEMERAL_TRIES if port == 0 else 1):
            host = hosts[0]
            first = _bind_one(host, port)
            try:
                others = []
                for host in hosts[1:]:
                    others.append(_bind_one(host, first.getsockname()[1]))
            except OSError as error:
                if error.errno in IPV6_MISSING:
                    return [first]
                first.close()
                if port:
                    raise
                continue  # the other family has no such port free: try another
            return [first, *others]
    except (UnicodeError, TypeError) as error:  # a name that no resolver can be asked for
        raise BindFailed(f"UDP port {port}: {host!r} is no host name; choose another --reflector-host") from error
    except OSError as error:
        raise BindFailed(
            f"UDP port {port} on {host}: {error.strerror or error}; "
            "choose others with --reflector PORT,PORT or --reflector-host, or --reflector off"
        ) from error
    raise BindFailed("no UDP port is free for IPv4 and IPv6; name them with --reflector PORT,PORT")


def _bind_one(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
