"""What every carrier of `bench transport` has in common: the session's small protocol, and the server's side of it.

A session starts with a header: mode "R" (requests) or "B" (bulk), size u64. A server answers each request of `size`
bytes with as many, and bulk of `size` bytes with one byte. Used by the carriers, and by bench/transport.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transport.identity import Identity

HOST = "127.0.0.1"
HEADER = struct.Struct(">cQ")
REQUESTS, BULK = b"R", b"B"
CHUNK = 256 * 1024


@dataclass(frozen=True, slots=True)
class Place:
    """What all processes of one run share: a folder for the servers' keys, and a relay's URL."""

    folder: Path
    relay: str

    def identity(self, name: str) -> Identity:
        """Who the server of a carrier is; each is another one, since a relay has one session per key."""
        return Identity.load_or_create(self.key_file(name))

    def key_file(self, name: str) -> Path:
        """Its private key, PEM."""
        return self.folder / f"{name}.key.pem"


class Session(Protocol):
    """One open stream of one carrier, as the client drives it."""

    async def ask(self, request: bytes, size: int) -> None:
        """Send a request and wait for an answer of `size` bytes."""

    async def push(self, data: bytes) -> None:
        """Send with back-pressure."""

    async def answer(self) -> None:
        """Wait for one byte."""


class Carrier(Protocol):
    """One way to carry a session between two processes. `name` and `note` stand in its rows.

    missing: why it cannot run here, empty where it can. quick: whether thousands of requests take seconds.
    """

    name: str
    note: str
    quick: bool
    bulk_megabytes: int

    @property
    def missing(self) -> str: ...

    def serve(self, place: Place) -> AsyncIterator[str]:
        """Yield once, where to connect to (one line), and serve until it is asked for more."""

    def connect(self, place: Place, where: str) -> AbstractAsyncContextManager[Session]:
        """Open a session with that server."""


class Answers:
    """A server's side of a session, whatever carries it."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.mode = b""
        self.size = 0
        self._write = write
        self._header = b""
        self._got = 0
        self._answer = b""

    def received(self, data: bytes) -> None:
        """Bytes from the client."""
        if not self.mode:
            missing = HEADER.size - len(self._header)
            self._header, data = self._header + data[:missing], data[missing:]
            if len(self._header) < HEADER.size:
                return
            self.mode, self.size = HEADER.unpack(self._header)
            self._answer = bytes(self.size) if self.mode == REQUESTS else b"\x01"
        self._got += len(data)
        while self.size and self._got >= self.size:
            self._got -= self.size
            self._write(self._answer)
