"""Pools of relays, and real relays as processes, for the tests of what travels over them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.transport.relay_process import RelayProcess
from transport.identity import Identity, PeerId
from transport.proto.relay_frames import GoneReason
from transport.relay_pool import RelayPool
from transport.relay_session import RelayLinkConfig

StartRelay = Callable[..., Awaitable[RelayProcess]]


class PoolNode:
    """A pool, and what it and its directory have told."""

    def __init__(self, urls: list[str], identity: Identity | None = None) -> None:
        self.identity = identity or Identity.generate()
        self.peer = self.identity.peer_id
        self.received: list[tuple[PeerId, list[bytes], bool]] = []
        self.gone: list[tuple[PeerId, GoneReason]] = []
        self.states: list[tuple[str, bool, str]] = []
        self.told: list[tuple[PeerId, bytes | None]] = []
        self.there: dict[PeerId, bytes] = {}
        self._changed = asyncio.Event()
        self.pool = RelayPool(
            urls, self.identity, RelayLinkConfig(), self._on_datagrams, self._on_state, self._on_gone, self._changed.set
        )
        self.directory = self.pool.directory
        self.pool.start()

    def _on_datagrams(self, _url: str, peer: PeerId, datagrams: list[bytes], disco: bool) -> None:
        self.received.append((peer, datagrams, disco))
        self._changed.set()

    def _on_state(self, url: str, up: bool, reason: str) -> None:
        self.states.append((url, up, reason))
        self._changed.set()

    def _on_gone(self, _url: str, peer: PeerId, why: GoneReason) -> None:
        self.gone.append((peer, why))
        self._changed.set()

    def on_record(self, peer: PeerId, blob: bytes | None) -> None:
        """Hear of a record, from `watch` or from a directory that is told to call this."""
        self.told.append((peer, blob))
        if blob is None:
            del self.there[peer]
        else:
            self.there[peer] = blob
        self._changed.set()

    def watch(self, topic: bytes) -> None:
        """Hear of the records of a topic: `told` in order, `there` as they stand."""
        self.directory.watch(topic, self.on_record)

    async def until(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        """Wait for something that the pool tells of."""
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def is_up(self, count: int = 1) -> None:
        """Wait until so many relays are connected."""
        await self.until(lambda: len(self.pool.up()) == count)


MakeNode = Callable[..., PoolNode]
