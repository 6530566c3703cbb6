"""One bidirectional, ordered byte stream with back-pressure both ways.

Not QUIC: bytes come from and go to the connection that owns the stream (`StreamHost`), which counts credits. Two ways
to use it: `read`/`write` from tasks, or `set_receiver`/`write_nowait` from the loop thread without a task switch.
A peer sees a new stream with its first bytes. Created by connection.py only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from transport.errors import IncompleteRead, SendBufferFull, StreamClosed, TransportError
from transport.proto.flow import ReceiveCredit, SendCredit
from transport.waiters import Waiters, wait, wake

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")
INTERNAL_CODE = 1  # the code of a stream whose receiver raised
CHUNK = 256 * 1024  # what one step of write() hands to QUIC

OnData = Callable[[bytes], None]
OnEnd = Callable[[TransportError | None], None]


class StreamHost(Protocol):
    """What a stream needs of its connection."""

    def send_room(self, stream: Stream) -> int:
        """How many bytes the stream may hand over now: credits and what waits inside QUIC."""

    def send(self, stream: Stream, data: Buffer, end: bool) -> None:
        """Hand bytes to QUIC, at most `send_room`."""

    def wants_room(self, stream: Stream) -> None:
        """Call `stream.pump` when there may be room again."""

    def consumed(self, stream: Stream, size: int) -> None:
        """The application took bytes: return credit."""

    def abort(self, stream: Stream, code: int) -> None:
        """Reset our side, and ask the peer to reset its own."""

    def half_closed(self, stream: Stream) -> None:
        """One side has ended; forget the stream when both have."""


class Stream:
    """Bidirectional, ordered, reliable. All methods belong to the endpoint's loop."""

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_buffered",
        "_credited",
        "_finish_queued",
        "_finish_sent",
        "_host",
        "_max_queue",
        "_on_data",
        "_on_end",
        "_paused",
        "_queue",
        "_queued",
        "_read_error",
        "_readers",
        "_receive_ended",
        "_send_ended",
        "_withheld",
        "_write_error",
        "_write_lock",
        "_writers",
        "id",
        "interrupted",
        "receive_credit",
        "send_credit",
    )

    def __init__(self, host: StreamHost, stream_id: int, send_limit: int, window: int, max_queue: int) -> None:
        self.id = stream_id
        self.send_credit = SendCredit(send_limit)
        self.receive_credit = ReceiveCredit(window, f"stream {stream_id}")
        self.interrupted = False  # QUIC has seen the peer's reset; its control frame is on the way
        self._host = host
        self._max_queue = max_queue
        self._queue: deque[bytes] = deque()  # write_nowait beyond the credit
        self._queued = 0
        self._finish_queued = False
        self._finish_sent = False
        self._send_ended = False  # finished or reset, as far as QUIC knows
        self._buffer: deque[bytes] = deque()  # received, not yet taken
        self._buffered = 0
        self._receive_ended = False
        self._read_error: TransportError | None = None
        self._write_error: TransportError | None = None
        self._credited = 0  # at the head of the buffer: bytes that were taken, credited and put back
        self._on_data: OnData | None = None
        self._on_end: OnEnd | None = None
        self._paused = False
        self._withheld = 0  # given to the receiver while it paused: credit follows on resume
        self._readers: Waiters = []
        self._writers: Waiters = []
        self._write_lock: asyncio.Lock | None = None

    # -- receiving, for the application

    async def read(self, n: int) -> bytes:
        """Between 1 and `n` bytes as they come; b"" after the peer's finish. Raises StreamReset, ConnectionClosed."""
        if n <= 0:
            return b""
        while not self._buffered:
            if self._receive_ended:
                if self._read_error is not None:
                    raise self._read_error
                return b""
            await wait(self._readers)
        return self._take(n)

    async def readexactly(self, n: int) -> bytes:
        """Exactly `n` bytes. Raises IncompleteRead at the end of the stream, StreamReset, ConnectionClosed."""
        parts: list[bytes] = []
        missing = n
        try:
            while missing > 0:
                part = await self.read(missing)
                if not part:
                    raise IncompleteRead(b"".join(parts), n)
                parts.append(part)
                missing -= len(part)
        except asyncio.CancelledError:  # what was taken belongs to the next reader
            self._buffer.extendleft(reversed(parts))
            self._buffered += n - missing
            self._credited += n - missing
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def set_receiver(self, on_data: OnData, on_end: OnEnd) -> None:
        """Have bytes delivered from the receive path itself instead of by read(); for the hot path.

        `on_data` gets in-order bytes as they arrive (what waits already, at once); its credit is returned when it
        comes back, unless it has called pause_reading. `on_end` is called once: None after the peer's finish,
        StreamReset or ConnectionClosed otherwise; not after our own reset. An exception in either resets the stream.
        """
        self._on_data, self._on_end = on_data, on_end
        self._deliver()

    def pause_reading(self) -> None:
        """Stop deliveries to the receiver; the peer is held back once its credit is used up."""
        self._paused = True

    def resume_reading(self) -> None:
        """Deliver again, starting with what came meanwhile."""
        self._paused = False
        withheld, self._withheld = self._withheld, 0
        self._return_credit(withheld)
        if self._on_data is not None:
            self._deliver()

    # -- sending, for the application

    async def write(self, data: Buffer) -> None:
        """Send all of `data`; waits while the peer has not read what it got. Raises ConnectionClosed, StreamClosed.

        Concurrent writers take turns, each with its whole data.
        """
        view = memoryview(data).cast("B")
        if self._write_lock is None:
            self._write_lock = asyncio.Lock()
        async with self._write_lock:
            self._check_writable()
            while len(view):
                room = 0 if self._queue else self._host.send_room(self)
                if room <= 0:
                    self._host.wants_room(self)
                    await wait(self._writers)
                    self._check_writable()
                    continue
                chunk = view[: min(room, CHUNK)]
                self._host.send(self, chunk, False)
                view = view[len(chunk) :]

    def write_nowait(self, data: Buffer) -> None:
        """Send or queue all of `data` at once; goes out with the next transmit. For the loop thread only.

        Raises SendBufferFull (nothing was taken) when more than config.max_send_buffer would wait for credit.
        """
        self._check_writable()
        size = len(data) if isinstance(data, bytes | bytearray) else memoryview(data).nbytes
        room = 0 if self._queue else self._host.send_room(self)
        if size <= room:
            self._host.send(self, data, False)
            return
        if self._queued + size - room > self._max_queue:
            raise SendBufferFull(self._queued, size, self._max_queue)
        view = memoryview(data).cast("B")
        if room > 0:
            self._host.send(self, view[:room], False)
        self._queue.append(bytes(view[max(room, 0) :]))
        self._queued += len(self._queue[-1])
        self._host.wants_room(self)

    async def finish(self) -> None:
        """Send nothing more; the peer's read ends after what was written. Returns when QUIC has all of it."""
        if self._finish_queued or self._send_ended:
            return
        self._check_writable()
        self._finish_queued = True
        self.pump()
        while not self._send_ended:
            await wait(self._writers)
        if not self._finish_sent and self._write_error is not None:
            raise self._write_error

    def reset(self, code: int) -> None:
        """Abort both directions at once; unsent bytes are dropped, unread ones too. The peer gets StreamReset(code)."""
        if self._send_ended and self._receive_ended:
            return
        self._host.abort(self, code)
        self._drop_queue()
        self._send_ended = True
        self._read_error = self._write_error = StreamClosed(f"stream {self.id} was reset here with code {code}")
        self._on_data = self._on_end = None
        self._discard_buffer()
        wake(self._readers)
        wake(self._writers)
        self._host.half_closed(self)

    # -- for the connection

    @property
    def send_ended(self) -> bool:
        """Whether our side is finished or reset."""
        return self._send_ended

    @property
    def receive_ended(self) -> bool:
        """Whether the peer's side is finished, reset, or the connection is gone."""
        return self._receive_ended

    @property
    def buffered(self) -> int:
        """Bytes received and not yet taken by the application."""
        return self._buffered

    def received(self, data: bytes, end: bool) -> None:
        """In-order bytes from the peer, already counted against the credits."""
        if self._receive_ended:
            return
        if data:
            if self._on_data is not None and not self._paused and not self._buffer:
                self._hand_over(data)
            elif self._read_error is not None:  # reset here: what was in flight is dropped
                self._return_credit(len(data))
            else:
                self._buffer.append(data)
                self._buffered += len(data)
        if end:
            self.end_receiving(None)
        elif self._readers and self._buffered:
            wake(self._readers)

    def end_receiving(self, error: TransportError | None) -> None:
        """The peer's side has ended: finished (None), reset, or the connection is gone."""
        if self._receive_ended:
            return
        self._receive_ended = True
        self._read_error = self._read_error or error
        wake(self._readers)
        if self._on_data is not None:
            self._deliver()
        self._host.half_closed(self)

    def end_sending(self, error: TransportError) -> None:
        """Nothing can be sent any more: the peer stopped it or the connection is gone."""
        if self._send_ended:
            return
        self._send_ended = True
        self._drop_queue()
        self._write_error = error
        wake(self._writers)
        self._host.half_closed(self)

    def discard(self) -> None:
        """Drop what was received and not taken; the peer reset the stream."""
        self._discard_buffer()

    def pump(self) -> bool:
        """Move queued bytes to QUIC as credits allow and wake writers; False when nothing waits any more."""
        while self._queue:
            room = self._host.send_room(self)
            if room <= 0:
                return True
            head = self._queue.popleft()
            if len(head) > room:
                self._queue.appendleft(head[room:])
                head = head[:room]
            self._queued -= len(head)
            self._host.send(self, head, False)
        if self._finish_queued and not self._send_ended:
            self._send_ended = self._finish_sent = True
            self._host.send(self, b"", True)
            wake(self._writers)
            self._host.half_closed(self)
            return False
        if self._writers and self._host.send_room(self) > 0:
            wake(self._writers)
        return bool(self._writers)

    # -- inside

    def _check_writable(self) -> None:
        if not (self._send_ended or self._finish_queued):
            return
        if self._write_error is not None:
            raise self._write_error
        raise StreamClosed(f"stream {self.id} was finished; nothing more can be written")

    def _take(self, n: int) -> bytes:
        buffer = self._buffer
        if n >= self._buffered:
            data = buffer[0] if len(buffer) == 1 else b"".join(buffer)
            buffer.clear()
        else:
            parts, missing = [], n
            while missing:
                head = buffer.popleft()
                if len(head) > missing:
                    buffer.appendleft(head[missing:])
                    head = head[:missing]
                parts.append(head)
                missing -= len(head)
            data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._buffered -= len(data)
        self._return_credit(len(data))
        return data

    def _deliver(self) -> None:
        """Everything buffered, then the end, to the receiver."""
        while self._buffer and not self._paused and self._on_data is not None:
            data = self._buffer.popleft()
            self._buffered -= len(data)
            self._hand_over(data)
        if self._receive_ended and not self._buffer and self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            self._call(on_end, self._read_error)

    def _hand_over(self, data: bytes) -> None:
        assert self._on_data is not None
        self._call(self._on_data, data)
        if self._paused:
            self._withheld += len(data)
        else:
            self._return_credit(len(data))

    def _return_credit(self, size: int) -> None:
        already = min(size, self._credited)
        self._credited -= already
        if size > already:
            self._host.consumed(self, size - already)

    def _call(self, callback: Callable[[T], None], argument: T) -> None:
        try:
            callback(argument)
        except Exception as error:
            context = {"message": f"receiver of stream {self.id} raised; the stream is reset", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
            self.reset(INTERNAL_CODE)

    def _drop_queue(self) -> None:
        self._queue.clear()
        self._queued = 0

    def _discard_buffer(self) -> None:
        dropped = self._buffered + self._withheld
        self._buffer.clear()
        self._buffered = self._withheld = 0
        self._return_credit(dropped)
