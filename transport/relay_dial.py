"""From a relay's URL to an open TCP (or TLS) connection: look the name up, race its addresses, shake hands. SHELL.

Not WebSocket and not the relay's login (relay_session). Called by relay_link, which bounds the time of the whole.

Addresses are raced as RFC 8305 says, families interleaved, so that a dead IPv6 costs a quarter of a second. A name
server that does not answer is asked once at a time, and while it does not, the addresses of the last success are
used: a network that has just changed often has no name service yet. Every failure is one line for people.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import itertools
import os
import socket
import ssl
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transport.errors import Address, TransportError, format_addresses
from transport.proto.relay_url import RelayUrl, is_address

MAX_ADDRESSES = 8  # of one name; a hostile name server may list thousands
RACE_SECONDS = 0.25  # RFC 8305, 5: the next address is tried after this head start
# Linux' number; the kernel gives a connection up whose bytes nobody acknowledged for so long (ms).
TCP_USER_TIMEOUT, USER_TIMEOUT_MS = 18, 10_000
# Linux' number; what the kernel takes from us before it could be sent: more would stand in front of disco.
TCP_NOTSENT_LOWAT, NOT_SENT_BYTES = 25, 128 * 1024

# OpenSSL's X509_V_ERR_* numbers.
_NOT_YET_VALID, _EXPIRED, _UNKNOWN_ISSUERS, _WRONG_NAMES = 9, 10, {18, 19, 20, 21}, {62, 64}


class DialFailed(TransportError):
    """No connection to the relay; one line says why."""


class Resolver:
    """The addresses of one relay's name."""

    def __init__(self, url: RelayUrl) -> None:
        self._url = url
        self._pending: asyncio.Future[list[Address]] | None = None
        self.known: tuple[Address, ...] = ()

    async def addresses(self) -> tuple[Address, ...]:
        """IP addresses to try, in order. Raises DialFailed when the name is unknown and always was."""
        if is_address(self._url.host):
            self.known = ((self._url.host, self._url.port),)
            return self.known
        pending = self._pending
        if pending is None:  # a thread that hangs in getaddrinfo cannot be stopped: never start a second one
            pending = self._pending = _look_up(self._url)
            pending.add_done_callback(self._looked_up)
        # What is known already need not wait for a name server that may never answer.
        await asyncio.wait([pending], timeout=RACE_SECONDS if self.known else None)
        if self.known:
            return self.known
        error = None if pending.cancelled() else pending.exception()
        detail = getattr(error, "strerror", None) or error or "no address"
        raise DialFailed(f"the name {self._url.host} cannot be looked up: {detail}; is this machine online?")

    def close(self) -> None:
        """Stop waiting for the name server."""
        if self._pending is not None:
            self._pending.cancel()

    def _looked_up(self, pending: asyncio.Future[list[Address]]) -> None:
        self._pending = None
        if not pending.cancelled() and pending.exception() is None and pending.result():
            self.known = tuple(pending.result())


async def connect(addresses: Sequence[Address]) -> socket.socket:
    """A TCP connection to the first of these that answers. Raises DialFailed when none does; cancel to give up."""
    loop = asyncio.get_running_loop()
    tries: set[asyncio.Task[socket.socket]] = set()
    waiting = list(addresses[:MAX_ADDRESSES])
    reasons: dict[str, None] = {}
    try:
        while waiting or tries:
            if waiting:
                tries.add(loop.create_task(_connect_one(waiting.pop(0)), name="relay-connect"))
            done, _ = await asyncio.wait(
                tries, timeout=RACE_SECONDS if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                tries.discard(task)
                error = task.exception()
                if error is None:
                    return task.result()
                number = getattr(error, "errno", None)  # asyncio's own text repeats the address
                reasons[os.strerror(number).lower() if number else str(error)] = None
        raise DialFailed(f"cannot connect to {format_addresses(addresses[:MAX_ADDRESSES])}: {', '.join(reasons)}")
    finally:
        for task in tries:  # who comes second is closed
            task.add_done_callback(_close_late)
            task.cancel()


async def start(
    connection: socket.socket, protocol: asyncio.Protocol, url: RelayUrl, tls: ssl.SSLContext | None
) -> asyncio.Transport:
    """Put `protocol` on the connection, with TLS when the URL asks for it; returns its transport.

    The protocol's `connection_made` is called when it may write. Raises DialFailed when TLS fails.
    """
    loop = asyncio.get_running_loop()
    if tls is None:
        transport, _ = await loop.create_connection(lambda: protocol, sock=connection)
        transport.set_write_buffer_limits(high=0)  # what the kernel does not take waits with us, where disco goes first
        return transport
    raw, _ = await loop.create_connection(asyncio.Protocol, sock=connection)
    raw.set_write_buffer_limits(high=0)
    try:
        secured = await loop.start_tls(raw, protocol, tls, server_hostname=url.host)
    except (ssl.SSLError, OSError) as error:
        raw.abort()
        raise DialFailed(_tls_reason(error, url)) from None
    except BaseException:
        raw.abort()
        raise
    if secured is None:  # the documented return when the connection went away meanwhile
        raise DialFailed(f"{url} closed the connection during the TLS handshake")
    secured.set_write_buffer_limits(high=16 * 1024, low=0)
    protocol.connection_made(secured)
    return secured


@functools.lru_cache(maxsize=8)
def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """The system's authorities and those in `ca_file`. Raises DialFailed when the file is not usable."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if ca_file is not None:
        try:
            context.load_verify_locations(cafile=str(ca_file))
        except (ssl.SSLError, OSError) as error:
            detail = getattr(error, "strerror", None) or error
            raise DialFailed(f"the file of relay authorities {ca_file} is not usable: {detail}") from None
    return context


def _look_up(url: RelayUrl) -> asyncio.Future[list[Address]]:
    """Ask the system's resolver in a thread of its own: a name server that hangs blocks no pool and no exit."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Address]] = loop.create_future()

    def settle(result: list[Address] | Exception) -> None:
        if answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    def ask() -> None:
        result: list[Address] | Exception
        try:
            result = _in_order(socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            result = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            loop.call_soon_threadsafe(settle, result)

    threading.Thread(target=ask, name=f"look up {url.host}", daemon=True).start()
    return answer


def _in_order(found: Sequence[tuple[Any, Any, int, str, Any]]) -> list[Address]:
    """What getaddrinfo found (its types depend on the family), families taking turns, the system's favourite first."""
    hosts = list(dict.fromkeys((str(entry[4][0]), int(entry[4][1])) for entry in found))
    v6 = [address for address in hosts if ":" in address[0]]
    v4 = [address for address in hosts if ":" not in address[0]]
    first, second = (v6, v4) if hosts and hosts[0] in v6 else (v4, v6)
    mixed = [address for pair in itertools.zip_longest(first, second) for address in pair if address is not None]
    return mixed[:MAX_ADDRESSES]


async def _connect_one(address: Address) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in ((TCP_USER_TIMEOUT, USER_TIMEOUT_MS), (TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)):
            if sys.platform.startswith("linux"):  # elsewhere the numbers mean something else
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
        await asyncio.get_running_loop().sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


def _close_late(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _tls_reason(error: Exception, url: RelayUrl) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code in (_NOT_YET_VALID, _EXPIRED):
            state = "not valid yet" if code == _NOT_YET_VALID else "expired"
            clock = datetime.datetime.now(datetime.UTC)
            return (
                f"the certificate of {url} is {state}; this machine's clock says {clock:%Y-%m-%d %H:%M} UTC, "
                "set it if that is wrong"
            )
        if code in _UNKNOWN_ISSUERS:
            return f"the certificate of {url} is signed by nobody known here; give its authority's file with --relay-ca"
        if code in _WRONG_NAMES:
            return f"the certificate of {url} is for another name; check the URL"
        return f"the certificate of {url} does not verify: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        hint = "; does it speak TLS? if not, write http://" if "WRONG_VERSION" in (error.reason or "") else ""
        return f"TLS with {url} failed: {error.reason or error}{hint}"
    return f"{url} closed the connection during the TLS handshake"
