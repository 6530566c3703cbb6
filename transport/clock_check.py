"""How far this machine's clock is off, by the Date that relays put into HTTP answers. SHELL. Called by netcheck."""

from __future__ import annotations

import asyncio
import email.utils
import ssl
import statistics
import time
from collections.abc import Sequence

from transport.errors import TransportError
from transport.proto.relay_url import RelayUrl
from transport.relay_dial import Resolver, connect

CLOCK_SECONDS = 3.0
MAX_HEAD = 8192


async def clock_offset(urls: Sequence[RelayUrl]) -> float | None:
    """This machine's clock minus the relays' (median), in seconds; None when none tells the time."""
    offsets = [offset for offset in await asyncio.gather(*map(offset_to, urls)) if offset is not None]
    return round(statistics.median(offsets), 1) + 0.0 if offsets else None  # no −0.0


async def offset_to(url: RelayUrl) -> float | None:
    """From the Date header of the relay's health page, whose resolution is a second.

    The certificate is not checked: nothing secret is sent or believed, and a wrong clock is what makes checks fail.
    """
    tls: ssl.SSLContext | None = None
    if url.secure:
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    resolver = Resolver(url)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(CLOCK_SECONDS):
            connection = await connect(await resolver.addresses())
            reader, writer = await asyncio.open_connection(
                sock=connection, ssl=tls, server_hostname=url.host if tls else None, limit=MAX_HEAD
            )
            asked = time.time()
            writer.write(
                f"GET {url.prefix}/healthz HTTP/1.1\r\nHost: {url.authority}\r\nConnection: close\r\n\r\n".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            now = (asked + time.time()) / 2
    except (TransportError, OSError, EOFError, ValueError, asyncio.LimitOverrunError):  # OSError has TimeoutError
        return None
    finally:
        resolver.close()
        if writer is not None:
            writer.close()
    return offset_in(head, now)


def offset_in(head: bytes, now: float) -> float | None:
    """`now` minus the Date in an HTTP head, taken at the middle of its second."""
    for line in head.decode("latin-1").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "date":
            try:
                return now - email.utils.parsedate_to_datetime(value.strip()).timestamp() - 0.5
            except (ValueError, TypeError, OverflowError):
                return None
    return None
