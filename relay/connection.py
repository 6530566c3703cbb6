"""One accepted WebSocket connection, as far as it knows nothing of peers: bytes, bounds, priorities, the end. SHELL.

The WebSocket itself is websockets' Sans-I/O ServerProtocol. session.py derives from this and says what requests and
messages mean; nothing else uses it.

    state    what moves it
    OPENING  TCP (and TLS) stands. A request → WEBSOCKET or ENDING
    WEBSOCKET  messages both ways. A WebSocket close by either side, or `end` → ENDING
    ENDING   last words are on their way, what comes in is thrown away; the client's close, or `linger` → CLOSED
    CLOSED   nothing more. From every state: the connection is lost, or aborted

Everything happens inside the callbacks of the connection: no task, and no await between a message's arrival and its
departure. What goes out is written at once while the socket takes data, else it waits in the OutboundQueue, whose
bounds and 64 KB in the transport are all that stands between a slow reader and the relay's memory. What comes in is
parsed in slices, so that a flood of tiny frames holds up the others for no longer than one slice takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from email.utils import formatdate
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple, cast

from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State as WebSocketState
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from relay.limits import OutboundQueue, Priority
from transport.proto.relay_frames import MAX_MESSAGE, SUBPROTOCOL

logger = logging.getLogger(__name__)
_websocket_logger = logging.getLogger(f"{__name__}.websocket")
_websocket_logger.setLevel(logging.WARNING)  # below that it tells of every connection

READ_BUFFER = 64 * 1024
SLICE = 16 * 1024  # parsed between two looks at the frame rate: 2,700 empty WebSocket frames, about 20 ms
MAX_EARLY_BYTES = 16 * 1024  # before the login: request headers and a LOGIN of 0.5 KB
MAX_HELD_BACK = 256 * 1024  # TLS may hand on some more after pause_reading
MAX_LINGER_BYTES = 4 * 1024 * 1024
MAX_LINGER_FRAMES = 4096
WRITE_HIGH, WRITE_LOW = 64 * 1024, 16 * 1024
NOT_SENT_LOW_WATER = 128 * 1024  # in the kernel and not yet sent: what disco has to wait behind


class State(Enum):
    """See the table above."""

    OPENING = 1
    WEBSOCKET = 2
    ENDING = 3
    CLOSED = 4


class Page(NamedTuple):
    """An HTTP answer."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


_shared_buffer = memoryview(bytearray(READ_BUFFER))


class Connection(asyncio.BufferedProtocol, ABC):
    """What every connection does. A subclass has the methods under "What a subclass says"."""

    __slots__ = (
        "_buffer",
        "_early_bytes",
        "_fragments",
        "_heard",
        "_held_back",
        "_linger",
        "_linger_bytes",
        "_linger_frames",
        "_loop",
        "_reading_timer",
        "_taken",
        "_taken_at",
        "_timer",
        "_transport",
        "_websocket",
        "_writable",
        "_writing_ended",
        "_written",
        "is_trusted",
        "queue",
        "state",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: OutboundQueue, linger: float) -> None:
        """`linger`: seconds that last words may take."""
        self.state = State.OPENING
        self.queue = queue
        self.is_trusted = False  # until then, MAX_EARLY_BYTES may come
        self._loop = loop
        self._linger = linger
        self._websocket = ServerProtocol(
            subprotocols=[Subprotocol(SUBPROTOCOL)], max_size=MAX_MESSAGE, logger=_websocket_logger
        )
        # Data is used up before the loop reads again, so all connections read into one buffer; not on Windows, whose
        # loop reads ahead.
        self._buffer = memoryview(bytearray(READ_BUFFER)) if sys.platform == "win32" else _shared_buffer
        self._heard = self._taken_at = loop.time()
        self._fragments: bytearray | None = None
        self._held_back = b""
        self._early_bytes = self._linger_bytes = self._linger_frames = 0
        self._writable = True
        self._writing_ended = False
        self._written = self._taken = 0
        self._timer: asyncio.TimerHandle | None = None  # the login's, then the end's
        self._reading_timer: asyncio.TimerHandle | None = None  # while reading is paused

    # What a subclass says

    @abstractmethod
    def on_open(self) -> None:
        """The connection stands."""

    @abstractmethod
    def on_request(self, request: Request) -> None:
        """An HTTP request: call upgrade(), answer() or abort()."""

    @abstractmethod
    def on_frame(self, opcode: Opcode, now: float) -> None:
        """A WebSocket frame of any kind has come, also a fragment."""

    @abstractmethod
    def on_message(self, message: bytes, now: float) -> None:
        """A whole binary message."""

    @abstractmethod
    def on_broken(self, reason: str) -> None:
        """The client sent what no client of ours sends: call end() or abort()."""

    @abstractmethod
    def reading_pause(self, now: float) -> float:
        """After each slice: for how many seconds to read nothing; 0 goes on."""

    @abstractmethod
    def on_leave(self, why: str) -> None:
        """Once, when the connection begins to end: nothing that comes from now on counts."""

    @abstractmethod
    def on_close_answered(self) -> None:
        """While ENDING the client closed the WebSocket too: somebody is there."""

    @abstractmethod
    def on_lost(self, by_client: bool) -> None:
        """The connection is gone. by_client: closed or reset from the other side of the TCP connection, not by us."""

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)
        _tune(transport.get_extra_info("socket"))
        self.on_open()

    def connection_lost(self, exc: Exception | None) -> None:
        by_client = self.state is not State.CLOSED and (exc is None or isinstance(exc, ConnectionError))
        if self.state in (State.OPENING, State.WEBSOCKET):
            self._leave("lost")
        self.state = State.CLOSED
        self._forget()
        self._cancel_timers()
        self.on_lost(by_client)
        # The library's parser and protocol refer to each other: without this, what a client took would wait for the
        # garbage collector's rarest round.
        self._websocket.parser.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._guarded(self._received, bytes(self._buffer[:nbytes]))

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        queue = self.queue
        while self._writable and queue.count:
            self._write(queue.pop())

    # What goes out

    def send(self, message: bytes, priority: Priority) -> int:
        """Send a binary message as soon as the client takes it; how many of its class were dropped for that."""
        return self._send_raw(websocket_frame(message), priority)

    def _send_raw(self, data: bytes, priority: Priority) -> int:
        if self._writable and not self.queue.count:
            self._write(data)
            return 0
        return self.queue.push(data, priority)

    def _write(self, data: bytes) -> None:
        if not self._writing_ended:
            self._written += len(data)
            self._transport.write(data)

    def _write_websocket(self) -> None:
        """Send what the WebSocket protocol itself says: the handshake, pongs, close frames."""
        for data in self._websocket.data_to_send():
            if not data:
                if not self._written:  # for what is no HTTP the library says nothing
                    self._write(BAD_REQUEST)
                self._end_writing()
            elif self.state is State.ENDING:
                self._write(data)
            else:
                self._send_raw(data, Priority.CONTROL)

    def _end_writing(self) -> None:
        if self._writing_ended:
            return
        self._writing_ended = True
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client is gone: it ended first, and has reset what we sent since
                self._transport.write_eof()  # and go on reading, so that no reset overtakes the last words
        else:
            self._transport.close()

    def has_unsent(self) -> bool:
        """Whether anything waits for this client."""
        return bool(self.queue) or (self.state is not State.CLOSED and self._transport.get_write_buffer_size() > 0)

    # Watching

    def start_timer(self, seconds: float, why: str) -> None:
        """Abort after so long, unless the timer is started anew or cancelled."""
        self.cancel_timer()
        self._timer = self._loop.call_later(seconds, self.abort, why)

    def cancel_timer(self) -> None:
        """No abort."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self, now: float, idle_timeout: float, write_timeout: float) -> None:
        """Called about once a second: abort what is silent, or takes nothing of what it is sent. Times in seconds."""
        if self.state is not State.WEBSOCKET:
            return
        unsent = self._transport.get_write_buffer_size()
        taken = self._written - unsent
        if not unsent or taken != self._taken:
            self._taken, self._taken_at = taken, now
        elif now - self._taken_at > write_timeout:
            self.abort("write_timeout")
            return
        if now - self._heard > idle_timeout:
            self.abort("idle")

    # What comes in

    def _received(self, data: bytes) -> None:
        if self.state is State.ENDING:
            self._throw_away(data)
        elif self.state is State.CLOSED:
            pass
        elif self._reading_timer is not None:
            self._held_back += data
            if len(self._held_back) > MAX_HELD_BACK:
                self.abort("too_fast")
        else:
            if not self.is_trusted:
                self._early_bytes += len(data)
                if self._early_bytes > MAX_EARLY_BYTES:
                    self.abort("too_much_before_login")
                    return
            self._process(data)

    def _process(self, data: bytes) -> None:
        now = self._heard = self._loop.time()
        websocket = self._websocket
        for at in range(0, len(data), SLICE):
            websocket.receive_data(data[at : at + SLICE])
            for event in websocket.events_received():
                if isinstance(event, Frame):
                    self._frame(event, now)
                elif isinstance(event, Request) and websocket.parser_exc is None:  # nothing broken came right after it
                    self.on_request(event)
                if self.state is State.ENDING or self.state is State.CLOSED:
                    return
            self._write_websocket()
            if self._is_over():
                return
            pause = self.reading_pause(now)
            if pause:
                self._pause_reading(pause, data[at + SLICE :])
                return

    def _frame(self, frame: Frame, now: float) -> None:
        opcode = frame.opcode
        self.on_frame(opcode, now)
        if opcode is Opcode.BINARY and frame.fin:
            self.on_message(bytes(frame.data), now)
        elif opcode is Opcode.BINARY:
            self._fragments = bytearray(frame.data)
        elif opcode is Opcode.CONT and self._fragments is not None:  # the library bounds their sum
            self._fragments += frame.data
            if frame.fin:
                message, self._fragments = bytes(self._fragments), None
                self.on_message(message, now)
        elif opcode is Opcode.TEXT:
            self.on_broken("a text message; frames are binary")

    def _is_over(self) -> bool:
        """Whether the client closed the WebSocket, or what it sends is none; the library has said what is to say."""
        websocket = self._websocket
        goes_on = websocket.state in (WebSocketState.OPEN, WebSocketState.CONNECTING)
        if goes_on and websocket.handshake_exc is None and websocket.parser_exc is None:
            return False
        self._leave("closed" if websocket.close_rcvd is not None else "websocket_error")
        self._start_ending()
        return True

    def _pause_reading(self, seconds: float, rest: bytes) -> None:
        self._held_back = rest
        self._transport.pause_reading()
        self._reading_timer = self._loop.call_later(seconds, self._guarded, self._resume_reading, b"")

    def _resume_reading(self, nothing: bytes) -> None:
        self._reading_timer = None
        data, self._held_back = self._held_back, b""
        self._process(data)
        if self._reading_timer is None:
            self._transport.resume_reading()

    def _guarded(self, step: Callable[[bytes], None], data: bytes) -> None:
        """A fault of ours ends this connection and no other."""
        try:
            step(data)
        except Exception:
            logger.exception("connection_failed")
            self.abort("internal_error")

    # HTTP

    def upgrade(self, request: Request) -> bool:
        """Answer a WebSocket handshake; False when it is none that fits, and was refused."""
        response = self._websocket.accept(request)
        self._websocket.send_response(response)
        if response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            self.state = State.WEBSOCKET
            self._write_websocket()
            return True
        self._leave("no_websocket")
        self._start_ending()
        return False

    def answer(self, page: Page, with_body: bool = True) -> None:
        """Answer a request that is none for a WebSocket, and end the connection."""
        headers = Headers(
            [
                ("Date", formatdate(usegmt=True)),
                ("Connection", "close"),
                ("Content-Type", page.content_type),
                ("Content-Length", str(len(page.body))),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                *page.headers,
            ]
        )
        body = page.body if with_body else b""
        self._websocket.send_response(Response(page.status.value, page.status.phrase, headers, body))
        self._leave("http")
        self._start_ending()

    # The end

    def end(self, code: CloseCode, why: str, last_message: bytes | None = None) -> None:
        """Close the WebSocket, after a last message; then the connection, when the client answers or after `linger`."""
        if self.state in (State.ENDING, State.CLOSED):
            return
        self._leave(why)
        if self._websocket.state is WebSocketState.OPEN:
            if last_message is not None:
                self._write(websocket_frame(last_message))
            self._websocket.send_close(code)
        self._start_ending()

    def abort(self, why: str) -> None:
        """Drop the connection now."""
        if self.state is State.CLOSED:
            return
        if self.state is not State.ENDING:
            self._leave(why)
        self.state = State.CLOSED
        self._cancel_timers()
        self._forget()
        self._transport.abort()

    def _leave(self, why: str) -> None:
        self.cancel_timer()
        self.on_leave(why)

    def _start_ending(self) -> None:
        self.state = State.ENDING
        self._forget()
        self._cancel_timers()
        self._write_websocket()
        self.start_timer(self._linger, "lingered")
        self._transport.resume_reading()

    def _throw_away(self, data: bytes) -> None:
        """Last words are sent: only the client's own close frame still means something."""
        self._linger_bytes += len(data)
        if self._linger_bytes > MAX_LINGER_BYTES or self._linger_frames > MAX_LINGER_FRAMES:
            self.abort("lingered")
            return
        for at in range(0, len(data), SLICE):
            if self._writing_ended:  # the client knows
                return
            self._websocket.receive_data(data[at : at + SLICE])
            for event in self._websocket.events_received():
                self._linger_frames += 1
                if isinstance(event, Frame) and event.opcode is Opcode.CLOSE:
                    self.on_close_answered()
            self._write_websocket()

    def _forget(self) -> None:
        self.queue.clear()
        self._held_back = b""
        self._fragments = None

    def _cancel_timers(self) -> None:
        self.cancel_timer()
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None


BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def websocket_frame(message: bytes) -> bytes:
    """A whole binary message as an unmasked WebSocket frame (RFC 6455, 5.2)."""
    size = len(message)
    if size < 126:
        return bytes((0x82, size)) + message
    if size < 65536:
        return b"\x82\x7e" + size.to_bytes(2, "big") + message
    return b"\x82\x7f" + size.to_bytes(8, "big") + message


def _tune(sock: socket.socket | None) -> None:
    if sock is None:
        return
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        options.append((socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER))
    for level, option, value in options:
        try:
            sock.setsockopt(level, option, value)
        except OSError:  # not a TCP socket, or an option that this system only names
            continue
