"""One connection between two members as messages: sends on a stream of its own, reads the peer's. A shell.

Loop thread only. Owned by `mesh.py` and by the two ends of a join. What is queued is bounded: a peer that does not read
loses the connection instead of our memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from swarmnode.coordination.messages import HEADER_BYTES, MAX_MESSAGE, Message, body_length, decode, encode
from swarmnode.errors import PeerFault
from transport.connection import Connection
from transport.errors import TransportError
from transport.stream import Stream

MAX_QUEUED = 4 * MAX_MESSAGE  # bytes not yet taken by the stream
PROTOCOL_FAULT = 1  # close code
STALL_S = 20.0  # a peer that takes nothing for so long is given up


class MessageLink:
    """See the module. `send` never waits; iterate `messages()` in one task."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._queued = 0
        self._writer = asyncio.create_task(self._write(), name=f"messages to {connection.peer.short}")

    def send(self, message: Message) -> None:
        """Queue a message."""
        data = encode(message)
        self._queued += len(data)
        if self._queued > MAX_QUEUED:
            self._writer.cancel()
            return
        self._queue.put_nowait(data)

    async def messages(self) -> AsyncIterator[Message]:
        """Every message of the peer until the connection ends. Raises BadMessage, TransportError."""
        stream = await self.connection.accept_stream()
        while True:
            message = await read_message(stream)
            if message is not None:
                yield message

    async def drain(self, timeout: float) -> None:
        """Wait until everything queued was handed to the transport."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._queue.join()

    async def close(self, why: str = "") -> None:
        """End the link and its connection."""
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        await self.connection.close(0, why[:200])

    async def break_off(self, error: PeerFault) -> None:
        """End it for a fault of the peer."""
        self._writer.cancel()
        await self.connection.close(PROTOCOL_FAULT, str(error)[:200])

    async def _write(self) -> None:
        try:
            stream = await self.connection.open_stream()
            while True:
                data = await self._queue.get()
                async with asyncio.timeout(STALL_S):
                    await stream.write(data)
                self._queued -= len(data)
                self._queue.task_done()
        except (TransportError, TimeoutError) as error:
            await self.connection.close(0, str(error)[:200] or "the peer does not read")
        except asyncio.CancelledError:
            if self._queued > MAX_QUEUED:
                await self.connection.close(0, "the peer does not read")
            raise


async def read_message(stream: Stream) -> Message | None:
    """The next message of a stream; None for one of a later version. Raises BadMessage, TransportError."""
    header = await stream.readexactly(HEADER_BYTES)
    return decode(await stream.readexactly(body_length(header)))
