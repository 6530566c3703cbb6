"""One dispatch stream as frames instead of bytes, at either end; and one end of it, however many things break.

A shell around `Connection` and `Stream`, loop thread only. Bytes become frames (`frame_decoder.py`), frames
leave through `frame_writer.py`; whatever goes wrong (garbage, a frame that its handler refuses, a peer that
does not read or stops our side, a closed stream) resolves `ended` with one line that says why. The connection
belongs to this stream and is closed with it. Owned by `remote_worker.py` and by `worker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable

from swarmnode.dispatch.frame_decoder import FrameDecoder
from swarmnode.dispatch.frame_writer import FrameWriter, Written
from swarmnode.dispatch.frames import MAX_BULK, Frame, FrameType
from swarmnode.errors import PeerFault
from transport.connection import Connection
from transport.errors import TransportError
from transport.stream import Stream

PROTOCOL_FAULT = 1  # the code a connection is closed with when its peer is at fault
log = logging.getLogger(__name__)


class FrameLink:
    """See the module. Frames that come before `deliver` are kept for `first_frame`, and reading pauses."""

    def __init__(
        self,
        connection: Connection,
        stream: Stream,
        accept: Iterable[FrameType],
        *,
        stall_s: float,
        max_bulk: int = MAX_BULK,
    ) -> None:
        self.connection = connection
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.bytes_in = 0
        self.broken = False  # ended for a fault of the peer
        self._stream = stream
        self._decoder = FrameDecoder(accept, max_bulk)
        self._writer = FrameWriter(stream, stall_s, self.break_off)
        self._early: deque[Frame] = deque()
        self._arrived = asyncio.Event()
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_end: Callable[[str], None] | None = None
        self._closing: asyncio.Task[None] | None = None
        stream.set_receiver(self._on_data, self._on_stream_end)

    @property
    def bytes_out(self) -> int:
        """Bytes of all frames sent."""
        return self._writer.bytes_out

    def send(self, frame: bytes, on_written: Written | None = None) -> None:
        """Write a frame; see FrameWriter.send."""
        self._writer.send(frame, on_written)

    async def first_frame(self) -> Frame | None:
        """Wait for the peer's first frame; None when the stream ends before it."""
        arrived = asyncio.ensure_future(self._arrived.wait())
        try:
            await asyncio.wait((arrived, self.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            arrived.cancel()
        return self._early.popleft() if self._early else None

    def deliver(self, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]) -> None:
        """Hand over every further frame, and then why the stream ended. `on_frame` may raise PeerFault."""
        if self.ended.done():
            on_end(self.ended.result())
            return
        self._on_frame, self._on_end = on_frame, on_end
        early, self._early = self._early, deque()
        for frame in early:
            self._handle(frame)
        if not self.ended.done():
            self._stream.resume_reading()

    def break_off(self, why: str) -> None:
        """End a stream whose peer is at fault, at once, and its connection."""
        if self.ended.done():
            return
        log.info("dispatch_broken_off peer=%s why=%r", self.connection.peer.short, why)
        self.broken = True
        self._end(why)
        with contextlib.suppress(TransportError):
            self._stream.reset(PROTOCOL_FAULT)
        self._close_connection(PROTOCOL_FAULT, why)

    async def finish(self, timeout: float) -> None:
        """Hand everything to the transport, end the stream, and wait until the peer has ended its side."""
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(timeout):
                await self._writer.drain()
                self._writer.close()  # a frame that comes from now on is dropped: it is no fault of the peer
                await self._stream.finish()
                await asyncio.shield(self.ended)

    async def close(self, why: str) -> None:
        """End the stream if nothing else has, and close the connection."""
        if not self.ended.done():
            self._end(why)
        await self._close_connection(0, why)

    def _on_data(self, data: bytes) -> None:
        if self.ended.done():
            return
        self.bytes_in += len(data)
        try:
            for frame in self._decoder.feed(data):
                if self._on_frame is not None:
                    self._handle(frame)
                else:
                    self._early.append(frame)
        except PeerFault as error:
            self.break_off(str(error))
        except Exception:
            log.exception("dispatch_decoder_failed peer=%s", self.connection.peer.short)
            self.break_off("internal error in the frame decoder")  # the transport would reset the stream and not say so
        if self._early and not self._arrived.is_set():
            self._arrived.set()
            self._stream.pause_reading()

    def _handle(self, frame: Frame) -> None:
        if self.ended.done() or self._on_frame is None:
            return
        try:
            self._on_frame(frame)
        except PeerFault as error:
            self.break_off(str(error))
        except Exception:
            # Our own fault, but this stream's state is unknown now: others must not suffer from it.
            log.exception("dispatch_handler_failed peer=%s frame=%s", self.connection.peer.short, frame.type.name)
            self.break_off("internal error in the frame handler")

    def _on_stream_end(self, error: TransportError | None) -> None:
        why = str(error) if error is not None else "the peer closed the stream"
        self._end(why)
        self._close_connection(0, why)

    def _end(self, why: str) -> None:
        if self.ended.done():
            return
        self.ended.set_result(why)
        self._writer.close()
        if self._on_end is not None:
            self._on_end(why)

    def _close_connection(self, code: int, why: str) -> asyncio.Task[None]:
        if self._closing is None:
            close = self.connection.close(code, why[:200])
            self._closing = asyncio.get_running_loop().create_task(close)
        return self._closing
