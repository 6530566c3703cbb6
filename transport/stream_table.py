"""The streams of one connection and the credits that bound them.

Implements what a Stream needs (`StreamHost`): counts bytes both ways against the credits of proto/flow.py, returns
credit as the application takes bytes, moves queued bytes as credit arrives, and settles the credits of reset streams.
Knows nothing of authentication; connection.py owns one table per connection and feeds it QUIC's events and the
control stream's frames.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from transport.config import STREAM_TOLERANCE, TransportConfig
from transport.errors import BadControlFrame, ProtocolViolation, StreamReset, TransportError
from transport.proto.control_frames import ConnectionCredit, Reset, StreamCredit
from transport.proto.flow import MAX_LIMIT, ReceiveCredit, SendCredit
from transport.quic_engine import QuicEngine
from transport.stream import Buffer, Stream
from transport.waiters import Waiters, wait, wake

MAX_LOOSE_ENDS = 1024  # resets that wait for their other half; a peer that exceeds it is misbehaving


class StreamTable:
    """All streams of a connection. `mark` asks for a transmit."""

    def __init__(self, engine: QuicEngine, config: TransportConfig, mark: Callable[[], None], is_client: bool) -> None:
        self._engine, self._config, self._mark = engine, config, mark
        self._our_bit = 0 if is_client else 1  # the lowest bit of the ids that we open (RFC 9000, 2.1)
        self._streams: dict[int, Stream] = {}
        self._local = 0  # opened here, not yet ended on both sides
        self._incoming: deque[Stream] = deque()
        self._waiting: set[Stream] = set()  # streams that want room
        self._acceptors: Waiters = []
        self._openers: Waiters = []
        self._send_credit = SendCredit(0)
        self._initial_stream_credit = 0
        self._receive_credit = ReceiveCredit(config.connection_window, "all streams")
        self._credit_due: set[Stream] = set()
        self._connection_credit_due = False
        self._control = bytearray()  # frames for the next transmit
        self._unsent = 0  # upper bound of what waits inside the engine
        self._reset_frames_seen: set[int] = set()  # RESET came before QUIC's own reset
        self._stopped_here: dict[int, None] = {}  # asked to stop; the peer's RESET may come after its finish
        self._error: TransportError | None = None

    # -- for the connection

    async def open(self) -> Stream:
        """A new stream of ours; waits while config.max_streams of them are open."""
        while self._error is None:
            if self._local < self._config.max_streams and self._engine.streams_available() > 0:
                self._local += 1
                return self._add(self._engine.open_stream())
            await wait(self._openers)
        raise self._error

    def open_early(self, data: bytes) -> Stream | None:
        """A new stream that begins with `data`, before the peer has given any credit; None where none can be opened.

        What is written after that waits for the peer's credit. The caller bounds `data`.
        """
        if self._error is not None or self._local >= self._config.max_streams or self._engine.streams_available() <= 0:
            return None
        self._local += 1
        stream = self._add(self._engine.open_stream())
        stream.send_credit.raise_to(len(data))
        self._send_credit.raise_to(self._send_credit.used + len(data))
        self.send(stream, data, False)
        return stream

    async def accept(self) -> Stream:
        """The next stream that the peer opened."""
        while not self._incoming:
            if self._error is not None:
                raise self._error
            await wait(self._acceptors)
        return self._incoming.popleft()

    def take_windows(self, stream_window: int, connection_window: int) -> None:
        """What the peer lets us send before it has read anything."""
        self._initial_stream_credit = min(stream_window, MAX_LIMIT)
        self._send_credit.raise_to(min(connection_window, MAX_LIMIT))
        for stream in self._streams.values():  # opened before its acceptance was read here, by either side
            stream.send_credit.raise_to(self._initial_stream_credit)

    def data(self, stream_id: int, data: bytes, end: bool) -> None:
        """Bytes of one stream. Raises ProtocolViolation."""
        stream = self._streams.get(stream_id) or self._add_incoming(stream_id)
        if stream is None or stream.receive_ended:
            return
        if data:
            self._receive_credit.receive(len(data))
            stream.receive_credit.receive(len(data))
        stream.received(data, end)

    def quic_reset(self, stream_id: int) -> None:
        """QUIC saw the peer's RESET_STREAM. The stream lives until the RESET frame tells how many bytes it had."""
        if stream_id in self._reset_frames_seen:
            self._reset_frames_seen.discard(stream_id)
        elif stream_id in self._streams:
            self._streams[stream_id].interrupted = True

    def stopped(self, stream_id: int, code: int) -> None:
        """The peer does not want more of this stream; QUIC has reset our side."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._control += Reset(stream_id, code, stream.send_credit.used).encode()
            stream.end_sending(StreamReset(code))
            self._mark()

    def connection_credit(self, limit: int) -> None:
        """The peer lets us send more on all streams together."""
        if self._send_credit.raise_to(min(limit, MAX_LIMIT)):
            self._pump()

    def stream_credit(self, stream_id: int, limit: int) -> None:
        """The peer lets us send more on one stream."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.send_credit.raise_to(min(limit, MAX_LIMIT)):
            self._pump()

    def peer_reset(self, frame: Reset) -> None:
        """Settle the credits of an aborted stream: bytes that were sent and never came count as taken."""
        stream = self._streams.get(frame.stream_id)
        if frame.stream_id in self._stopped_here:
            del self._stopped_here[frame.stream_id]
            if stream is None:
                return  # it had finished before it was asked to stop
        if stream is not None and stream.receive_ended:
            return
        missing = frame.final_size - (stream.receive_credit.received if stream is not None else 0)
        if missing < 0:
            raise BadControlFrame(f"RESET of stream {frame.stream_id} at {frame.final_size} bytes, more had come")
        self._receive_credit.receive(missing)
        if self._receive_credit.consume(missing):
            self._connection_credit_due = True
            self._mark()
        if stream is None or not stream.interrupted:
            self._reset_frames_seen.add(frame.stream_id)
            if len(self._reset_frames_seen) > MAX_LOOSE_ENDS:
                raise ProtocolViolation("it reset streams that it never opened")
        if stream is not None:
            stream.receive_credit.receive(missing)
            stream.discard()
            stream.end_receiving(StreamReset(frame.code))

    def control_frames(self) -> bytes:
        """Last call before a transmit: moves queued bytes, returns the frames that are due."""
        if self._waiting:
            self._pump()
        if self._connection_credit_due:
            self._connection_credit_due = False
            self._control += ConnectionCredit(self._receive_credit.grant()).encode()
        if self._credit_due:
            for stream in self._credit_due:
                if not stream.receive_ended:
                    self._control += StreamCredit(stream.id, stream.receive_credit.grant()).encode()
            self._credit_due.clear()
        if not self._control:
            return b""
        frames = bytes(self._control)
        self._control.clear()
        return frames

    def transmitted(self) -> None:
        """Datagrams went out: what waits inside QUIC may be less."""
        if self._waiting:
            self._unsent = before = self._engine.backlog()
            if before <= self._config.send_backlog // 2:
                self._pump()
                if self._unsent > before:
                    self._mark()
        if self._openers and self._engine.streams_available() > 0:
            wake(self._openers)

    def close(self, error: TransportError) -> None:
        """The connection is over."""
        self._error = error
        for stream in list(self._streams.values()):
            stream.end_sending(error)
            stream.end_receiving(error)
        self._streams.clear()
        self._waiting.clear()
        wake(self._acceptors)
        wake(self._openers)

    # -- for streams (StreamHost)

    def send_room(self, stream: Stream) -> int:
        """How many bytes the stream may hand over now: credits and what waits inside QUIC."""
        room = min(stream.send_credit.available, self._send_credit.available)
        limit = self._config.send_backlog
        if self._unsent >= limit and room > 0:
            self._unsent = self._engine.backlog()
        return min(room, limit - self._unsent)

    def send(self, stream: Stream, data: Buffer, end: bool) -> None:
        """Hand bytes to QUIC, at most `send_room`."""
        size = len(data)
        stream.send_credit.use(size)
        self._send_credit.use(size)
        self._unsent += size
        self._engine.send(stream.id, data, end)
        self._mark()

    def wants_room(self, stream: Stream) -> None:
        """Call `stream.pump` when there may be room again."""
        self._waiting.add(stream)
        self._mark()

    def consumed(self, stream: Stream, size: int) -> None:
        """The application took bytes: return credit."""
        if self._error is not None:
            return
        if stream.receive_credit.consume(size):
            self._credit_due.add(stream)
        if self._receive_credit.consume(size):
            self._connection_credit_due = True
        if self._credit_due or self._connection_credit_due:
            self._mark()

    def abort(self, stream: Stream, code: int) -> None:
        """Reset our side, and ask the peer to reset its own."""
        if self._error is not None:
            return
        with contextlib.suppress(Exception):  # a side that has ended meanwhile cannot be reset again
            if not stream.send_ended:
                self._control += Reset(stream.id, code, stream.send_credit.used).encode()
                self._engine.reset(stream.id, code)
        with contextlib.suppress(Exception):
            if not stream.receive_ended:
                self._engine.stop(stream.id, code)
                self._stopped_here[stream.id] = None
                if len(self._stopped_here) > MAX_LOOSE_ENDS:
                    del self._stopped_here[next(iter(self._stopped_here))]
        self._mark()

    def half_closed(self, stream: Stream) -> None:
        """One side has ended; forget the stream when both have."""
        if stream.send_ended and stream.receive_ended and self._streams.pop(stream.id, None) is not None:
            self._waiting.discard(stream)
            self._credit_due.discard(stream)
            if stream.id & 1 == self._our_bit:
                self._local -= 1
                wake(self._openers)

    # -- inside

    def _add(self, stream_id: int) -> Stream:
        config = self._config
        stream = Stream(self, stream_id, self._initial_stream_credit, config.stream_window, config.max_send_buffer)
        self._streams[stream_id] = stream
        return stream

    def _add_incoming(self, stream_id: int) -> Stream | None:
        """The new stream behind an unknown id; None when it is one that has ended."""
        if stream_id & 2:
            raise ProtocolViolation("it opened a unidirectional stream")
        if stream_id & 1 == self._our_bit or stream_id in self._reset_frames_seen:
            return None
        limit = self._config.max_streams * STREAM_TOLERANCE
        if len(self._streams) - self._local >= limit:
            raise ProtocolViolation(f"it has more than {limit} streams open")
        stream = self._add(stream_id)
        self._incoming.append(stream)
        wake(self._acceptors)
        return stream

    def _pump(self) -> None:
        for stream in list(self._waiting):
            if not stream.pump():
                self._waiting.discard(stream)
