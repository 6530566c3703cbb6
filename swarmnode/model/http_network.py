"""Bounds on a reader's network operations: an end that reaches each of them at once, and a deadline for several.

httpx bounds every operation and not their sum, so that a server which sends one header a second keeps its client for
ever; and it shows a connection only once that has answered. So the connection pools of a client get a network backend
that asks the calling thread's `Watch` before each operation. This file alone touches httpx's private names; a test
fails where they change. Caller: `http_file.py`.
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import httpcore
import httpx

_here = threading.local()  # .bounds: (the watch, its deadline by time.monotonic) of what this thread is doing


class Watch:
    """Ends the network operations of one reader, from any thread, and bounds how long some of them take together."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._ends: set[Callable[[], object]] = set()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called: every operation fails then."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """End what is under way and all that would follow."""
        self._stopped.set()
        with self._lock:
            for end in self._ends:
                end()

    def wait(self, seconds: float) -> None:
        """Sleep, until `stop` at most."""
        self._stopped.wait(seconds)

    @contextlib.contextmanager
    def over(self, within_s: float = math.inf) -> Iterator[None]:
        """This thread's operations are this reader's, and together take no longer: they time out."""
        before = getattr(_here, "bounds", None)
        _here.bounds = self, time.monotonic() + within_s
        try:
            yield
        finally:
            _here.bounds = before

    @contextlib.contextmanager
    def reach(self, end: Callable[[], object]) -> Iterator[None]:
        """`stop` calls `end` as long as this lasts. Raises httpcore.NetworkError where it was called already."""
        with self._lock:
            self._ends.add(end)
        try:
            if self._stopped.is_set():
                raise httpcore.NetworkError("stopped")
            yield
        finally:
            with self._lock:
                self._ends.discard(end)


def watch_client(client: httpx.Client) -> httpx.Client:
    """The same client; from now on its operations obey the calling thread's watch, where it has one."""
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):
            transport._pool._network_backend = _Backend(transport._pool._network_backend)
    return client


class _Backend(httpcore.NetworkBackend):
    """Looks up names and connects in threads of their own, because neither can be ended from outside."""

    def __init__(self, inner: httpcore.NetworkBackend) -> None:
        self._inner = inner

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,  # httpcore's own type for them is private
    ) -> httpcore.NetworkStream:
        future: Future[httpcore.NetworkStream] = Future()

        def connect() -> None:
            try:
                stream = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
            except BaseException as error:  # it is the caller's
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
                return
            if future.set_running_or_notify_cancel():
                future.set_result(stream)
            else:
                stream.close()  # too late

        with _bounded(None, httpcore.ConnectTimeout, future.cancel) as left:
            threading.Thread(target=connect, name="http-connect", daemon=True).start()
            try:
                return _Stream(future.result(left))
            except CancelledError:
                raise httpcore.ConnectError("stopped") from None
            except TimeoutError:
                if future.cancel():
                    raise httpcore.ConnectTimeout("timed out") from None
                return _Stream(future.result())  # it came at this very moment

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    """A connection of which every operation is bounded."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _bounded(timeout, httpcore.ReadTimeout, self._shut) as left:
            return self._inner.read(max_bytes, left)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _bounded(timeout, httpcore.WriteTimeout, self._shut) as left:
            self._inner.write(buffer, left)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        raw = self.get_extra_info("socket")
        with contextlib.ExitStack() as stack:
            end: Callable[[], object] = self._shut
            if isinstance(raw, socket.socket) and not isinstance(raw, ssl.SSLSocket):
                # Wrapping takes the connection away from this object: a second one reaches it during the handshake.
                twin = stack.enter_context(contextlib.closing(raw.dup()))
                end = lambda: _shut(twin)  # noqa: E731
            left = stack.enter_context(_bounded(timeout, httpcore.ConnectTimeout, end))
            return _Stream(self._inner.start_tls(ssl_context, server_hostname, left))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)

    def _shut(self) -> None:
        _shut(self.get_extra_info("socket"))


@contextlib.contextmanager
def _bounded(
    timeout: float | None, too_late: type[httpcore.TimeoutException], end: Callable[[], object]
) -> Iterator[float | None]:
    """The time that one operation may take, s, while `end` ends it."""
    bounds: tuple[Watch, float] | None = getattr(_here, "bounds", None)
    if bounds is None:
        yield timeout
        return
    watch, deadline = bounds
    left = min(math.inf if timeout is None else timeout, deadline - time.monotonic())
    if left <= 0:
        raise too_late("timed out")
    with watch.reach(end):
        yield left if math.isfinite(left) else None


def _shut(sock: object) -> None:
    """End a connection for whoever reads it. The TLS layer's state is left to its own thread."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(sock, socket.socket):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
