"""Keeps configured peers connected: dials, watches, dials again with growing pauses. One task per peer and lane.

Not discovery, and no choice of paths: a peer and its addresses are given. Called by `node.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from swarmnode.config import PeerAddress
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import EndpointClosed, TransportError

FIRST_PAUSE, LAST_PAUSE = 0.2, 15.0  # seconds; doubled each time, with jitter so that nodes do not march in step
STEADY = 30.0  # a connection that held this long starts the pauses from the beginning

OnConnection = Callable[[Connection], Awaitable[None]]


class PeerLinks:
    """`links` are the peers to dial, each with the lane to dial it for. `problems` tells, per peer, why one failed."""

    def __init__(
        self, endpoint: Endpoint, links: Sequence[tuple[PeerAddress, str]], on_connection: OnConnection
    ) -> None:
        self._endpoint, self._on_connection = endpoint, on_connection
        self._links = links
        self.problems: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to dial."""
        self._tasks = [
            asyncio.create_task(self._keep(peer, lane), name=f"link {peer.peer.short}") for peer, lane in self._links
        ]

    async def close(self) -> None:
        """Stop dialling; connections stay as they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, peer: PeerAddress, lane: str) -> None:
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE
        key = str(peer.peer)
        while True:
            try:
                connection = await self._endpoint.dial(peer.peer, peer.addresses, lane=lane)
            except EndpointClosed:
                return
            except TransportError as error:
                self.problems[key] = str(error).removeprefix(f"peer {key} ")
            else:
                self.problems.pop(key, None)
                began = loop.time()
                await self._on_connection(connection)
                await connection.wait_closed()
                self.problems[key] = str(connection.close_reason or "connection closed")
                if loop.time() - began > STEADY:
                    pause = FIRST_PAUSE
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, LAST_PAUSE)
