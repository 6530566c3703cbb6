"""The TCP port that metrics are read from: GET /metrics, and /healthz for whoever watches the process. SHELL.

Not the gateway, and no web server: one request per connection, of MAX_REQUEST bytes, in TIMEOUT seconds; MAX_OPEN
connections at once, then the oldest gives way. Of a larger request so much is read that its sender sees why it gets
none. It runs on the node's loop, whose state it reads; prometheus_client's
own server has a thread per connection, without bounds, and would read from there. A page is kept for KEPT seconds, so
that asking more often costs the node nothing. Made and closed by `node.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from swarmnode.config import format_address
from swarmnode.errors import UsageError
from transport.errors import Address

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REQUEST = 8192  # bytes of a request with its headers; Prometheus sends 300
MAX_OPEN = 16
TIMEOUT = 5.0  # seconds for a request, and again for whoever reads the answer
KEPT = 1.0
MAX_DROPPED = 1 << 20  # bytes of a request that is too large: closing with some unread would take the answer away
_PLAIN = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class MetricsListener:
    """`start`, then `close`. `render` makes the page, `is_ready` is what /healthz tells."""

    def __init__(self, address: Address, render: Callable[[], Awaitable[bytes]], is_ready: Callable[[], bool]) -> None:
        self._wanted = address
        self._render, self._is_ready = render, is_ready
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], None] = {}  # in the order of their coming
        self._page, self._made = b"", float("-inf")
        self._making = asyncio.Lock()

    async def start(self) -> None:
        """Listen. UsageError where that is impossible."""
        host, port = self._wanted
        try:
            self._server = await asyncio.start_server(self._accepted, host, port, limit=MAX_REQUEST, backlog=MAX_OPEN)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no resolver can be asked for
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"--metrics {format_address(self._wanted)}: {why}; choose another address") from None

    @property
    def address(self) -> Address:
        """Where it listens."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Stop listening and break off what is under way."""
        if self._server is None:
            return
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._server = None

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_OPEN:  # the oldest has had its time; whoever asks honestly takes milliseconds
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._serve(reader, writer), name="metrics")
        self._open[task] = None
        task.add_done_callback(lambda done: self._open.pop(done, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # drain waits until everything has been sent
        try:
            async with asyncio.timeout(TIMEOUT):
                head = await _head(reader)
            if head is None:
                writer.write(_response(431, _PLAIN, b"a request has at most %d bytes\n" % MAX_REQUEST, b""))
                await _drop_rest(reader, writer)
                return
            writer.write(await self._answer(head))
            async with asyncio.timeout(TIMEOUT):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # gone, too slow, or no HTTP
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                writer.transport.abort()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path, _, protocol = rest.partition(b" ")
        if not protocol.startswith(b"HTTP/1."):
            return _response(400, _PLAIN, b"this is HTTP/1.1\n", method)
        if method not in (b"GET", b"HEAD"):
            return _response(405, _PLAIN, b"only GET\n", method)
        match path.partition(b"?")[0]:
            case b"/metrics":
                try:
                    return _response(200, CONTENT_TYPE, await self._metrics(), method)
                except Exception:  # the node goes on without its figures
                    log.exception("metrics_failed")
                    return _response(500, _PLAIN, b"the page could not be made; see the node's log\n", method)
            case b"/healthz" if self._is_ready():
                return _response(200, _PLAIN, b"ok\n", method)
            case b"/healthz":
                return _response(503, _PLAIN, b"starting or stopping\n", method)
        return _response(404, _PLAIN, b"nothing here; /metrics and /healthz are\n", method)

    async def _metrics(self) -> bytes:
        async with self._making:  # who comes meanwhile gets the same page
            now = time.monotonic()
            if now - self._made >= KEPT:
                self._page, self._made = await self._render(), now
            return self._page


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    """A request up to its empty line; None where it is too large."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return None


async def _drop_rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End our side, and read until theirs ends, with bounds."""
    async with asyncio.timeout(TIMEOUT):
        await writer.drain()
        writer.write_eof()
        dropped = 0
        while dropped < MAX_DROPPED and (data := await reader.read(MAX_REQUEST)):
            dropped += len(data)


def _response(status: int, content_type: str, body: bytes, method: bytes) -> bytes:
    allow = "Allow: GET, HEAD\r\n" if status == 405 else ""
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"{allow}X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == b"HEAD" else body)
