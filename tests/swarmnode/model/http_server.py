"""A small web server with ranges, and with every bad habit that the tests need."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Habit = Callable[["Handler"], bool]  # answers the request itself and returns True, or leaves it


@dataclass
class Site:
    """What a server serves and how. Paths begin with "/"."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)  # "" sends none
    habit: Habit = lambda _handler: False
    token: str = ""
    drop_after: list[int] = field(default_factory=list)  # answers that break off after so many bytes
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # path, Range, Authorization
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def add(self, path: Path, at: str = "") -> str:
        """Serve a file; its address."""
        self.files[at or f"/{path.name}"] = path.read_bytes()
        return self.url + (at or f"/{path.name}")


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    site: Site

    def log_message(self, format: str, *args: Any) -> None:  # the base class names it so
        """Nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A whole answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:  # the base class names it so
        """A range of a file."""
        site, path = self.site, urlsplit(self.path).path
        with site.lock:
            site.asked.append((self.path, self.headers.get("Range", ""), self.headers.get("Authorization")))
            drop = site.drop_after.pop(0) if site.drop_after else None
        if site.habit(self):
            return
        if path in site.redirects:
            return self.answer(302, Location=site.redirects[path])
        if path not in site.files:
            return self.answer(404, b"<html>no</html>", Content_Type="text/html")
        if site.token and self.headers.get("Authorization") != f"Bearer {site.token}":
            return self.answer(401)
        data = site.files[path]
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(data))
        if start >= len(data):
            return self.answer(416, Content_Range=f"bytes */{len(data)}")
        body = data[start:end]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        tag = site.tags.get(path, f'"{hash(data):x}"')
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Last-Modified", formatdate(1e9, usegmt=True))
        self.end_headers()
        if drop is not None and drop < len(body):
            body, self.close_connection = body[:drop], True
        with site.lock:
            site.sent += len(body)
        with contextlib.suppress(OSError):
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away in mid-answer all the time."""


@contextlib.contextmanager
def serve(tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    """A server on a free port of this machine."""
    site = Site()
    handler = type("H", (Handler,), {"site": site})
    server = _Server(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    site.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Silent:
    """A server that never finishes an answer's headers."""

    address: str
    heard: threading.Event = field(default_factory=threading.Event)  # a request has come
    over: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def silent(said: bytes = b"", again: bytes = b"", every_s: float = 0.02) -> Iterator[Silent]:
    """It answers each connection with `said`, then with `again` and again, where there is something to say at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Silent(f"127.0.0.1:{listener.getsockname()[1]}")
        listener.settimeout(0.05)

        def one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                found.heard.set()
                connection.sendall(said)
                while not found.over.wait(every_s):
                    connection.sendall(again if said else b"")

        def accept() -> None:
            while not found.over.is_set():
                with contextlib.suppress(TimeoutError):
                    threads.append(threading.Thread(target=one, args=(listener.accept()[0],), daemon=True))
                    threads[-1].start()

        threads = [threading.Thread(target=accept, daemon=True)]
        threads[0].start()
        try:
            yield found
        finally:
            found.over.set()
            for thread in list(threads):
                thread.join(10)
