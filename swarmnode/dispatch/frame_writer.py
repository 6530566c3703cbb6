"""Writes frames to a stream in order: at once while the peer keeps up, as it takes them otherwise.

A shell around `Stream.write_nowait`. Not the frames. Each end of a dispatch stream owns one writer; loop
thread only. When the transport's buffer is full, frames queue here and one task feeds them as credit comes;
what is queued is bounded by what the owner hands over. A peer that takes nothing for `stall_s`, or lets nothing
more be sent (the receiving side hears nothing of that), is reported to `on_stalled`, once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from transport.errors import SendBufferFull, TransportError
from transport.stream import Stream

MAX_QUEUED = 4096  # small frames that a peer provokes without reading them; answers are bounded by admission
CHUNK = 1 << 16  # what a peer must take in the stall time: any link that is worth using does
Written = Callable[[], None]


class FrameWriter:
    """See the module. `on_stalled` gets the reason, in a turn of the loop of its own: never from inside `send`."""

    def __init__(self, stream: Stream, stall_s: float, on_stalled: Callable[[str], None]) -> None:
        self._stream = stream
        self._stall_s = stall_s
        self._on_stalled = on_stalled
        self._queue: deque[tuple[bytes, Written | None]] = deque()
        self._flush: asyncio.Task[None] | None = None
        self._closed = False
        self.bytes_out = 0

    def send(self, frame: bytes, on_written: Written | None = None) -> None:
        """Write a frame after those before it; `on_written` is called once the transport has it, if it ever does."""
        if self._closed:
            return
        self.bytes_out += len(frame)
        if self._flush is None:
            try:
                self._stream.write_nowait(frame)
            except SendBufferFull:
                self._flush = asyncio.get_running_loop().create_task(self._feed())
            except TransportError as error:
                self._give_up(str(error))
                return
            else:
                if on_written is not None:
                    on_written()
                return
        self._queue.append((frame, on_written))
        if len(self._queue) > MAX_QUEUED:
            self._give_up(f"left {MAX_QUEUED} frames unread")

    async def drain(self) -> None:
        """Wait until everything has been handed to the transport."""
        if self._flush is not None:
            await asyncio.wait((self._flush,))

    def close(self) -> None:
        """Drop what has not been written."""
        self._closed = True
        self._queue.clear()
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None

    async def _feed(self) -> None:
        why = None
        try:
            while self._queue:
                frame, on_written = self._queue[0]
                for start in range(0, len(frame), CHUNK):
                    async with asyncio.timeout(self._stall_s):
                        await self._stream.write(memoryview(frame)[start : start + CHUNK])
                self._queue.popleft()
                if on_written is not None:
                    on_written()
        except TimeoutError:
            why = f"took no data for {self._stall_s:g} s"
        except TransportError as error:
            why = str(error)
        self._flush = None
        if why is not None:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self.close()
        asyncio.get_running_loop().call_soon(self._on_stalled, why)
