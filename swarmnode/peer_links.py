"""Keeps wanted peers connected: dials, watches, dials again with growing pauses. One task per peer and lane.

Not discovery, and no choice of paths: who is wanted is told, and where he may be is asked before each dial. Called by
`node.py` and `coordination/mesh.py`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import Address, EndpointClosed, TransportError
from transport.identity import PeerId
from transport.stream import Stream

FIRST_PAUSE, LAST_PAUSE = 0.2, 15.0  # seconds; doubled each time, with jitter so that nodes do not march in step
STEADY = 30.0  # a connection that held this long starts the pauses from the beginning

log = logging.getLogger(__name__)

OnConnection = Callable[[Connection, Stream | None], Awaitable[None]]
AddressesOf = Callable[[PeerId], Sequence[Address]]
First = Callable[[str], bytes]


class PeerLinks:
    """`want` and `unwant` links. `problems` tells, per peer, why the last dial failed or the connection ended.

    `first` says what goes with the dial for a lane, b"" for nothing; the stream that it went out on is handed over too.
    """

    def __init__(
        self, endpoint: Endpoint, addresses_of: AddressesOf, first: First, on_connection: OnConnection
    ) -> None:
        self._endpoint, self._addresses_of = endpoint, addresses_of
        self._first, self._on_connection = first, on_connection
        self.problems: dict[str, str] = {}
        self._tasks: dict[tuple[PeerId, str], asyncio.Task[None]] = {}
        self._hurry: dict[tuple[PeerId, str], asyncio.Event] = {}

    def want(self, peer: PeerId, lane: str) -> None:
        """Keep a connection to `peer` for `lane`; wanting it twice is wanting it once."""
        key = (peer, lane)
        if key not in self._tasks:
            self._hurry[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._keep(peer, lane), name=f"link {peer.short} {lane}")

    def unwant(self, peer: PeerId, lane: str) -> None:
        """Stop dialling; a connection that is there stays as it is."""
        task = self._tasks.pop((peer, lane), None)
        self._hurry.pop((peer, lane), None)
        if task is not None:
            task.cancel()
        if all(known != peer for known, _ in self._tasks):
            self.problems.pop(str(peer), None)

    def wanted(self) -> set[tuple[PeerId, str]]:
        """All links that are kept."""
        return set(self._tasks)

    def hurry(self, peer: PeerId) -> None:
        """There is news of this peer: dial now instead of sitting out a pause."""
        for (known, _), event in self._hurry.items():
            if known == peer:
                event.set()

    async def close(self) -> None:
        """Stop dialling; connections stay as they are."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self._hurry.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, peer: PeerId, lane: str) -> None:
        loop = asyncio.get_running_loop()
        hurry = self._hurry[peer, lane]
        pause = FIRST_PAUSE
        key = str(peer)
        while True:
            hurry.clear()
            try:
                connection, stream = await self._endpoint.dial_with(
                    peer, self._addresses_of(peer), first=self._first(lane), lane=lane
                )
            except EndpointClosed:
                return
            except TransportError as error:
                self.problems[key] = str(error).removeprefix(f"peer {key} ")
            except Exception as error:  # the link is wanted all the same
                log.exception("dial_failed peer=%s lane=%s", peer.short, lane)
                self.problems[key] = f"{type(error).__name__}: {error}"
            else:
                self.problems.pop(key, None)
                began = loop.time()
                try:
                    await self._on_connection(connection, stream)
                except Exception:
                    log.exception("link_not_used peer=%s lane=%s", peer.short, lane)
                    await connection.close(0, "internal error")
                await connection.wait_closed()
                self.problems[key] = str(connection.close_reason or "connection closed")
                if loop.time() - began > STEADY:
                    pause = FIRST_PAUSE
            try:
                async with asyncio.timeout(pause * random.uniform(0.5, 1.5)):
                    await hurry.wait()
                pause = FIRST_PAUSE
            except TimeoutError:
                pause = min(pause * 2, LAST_PAUSE)
