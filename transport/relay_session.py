"""One WebSocket session with a relay, from the open connection to its end. SHELL.

An asyncio protocol around the sans-IO WebSocket of `websockets`: a `send` is in the socket before it returns, with
no task in between. Not the connecting and not the trying again (relay_dial, relay_link). One loop only.

order of a session     upgrade → CHALLENGE → LOGIN → WELCOME → DATA, DISCO, GONE, PING, PONG … → end, told once
records                PUBLISH, WATCH and RECORD pass through to relay_directory
when the socket is full    what comes waits in proto/relay_queue, cut small, so that little stands in front of disco
when nobody answers    proto/relay_watch says when to ping and when the relay is dead

Everything from the relay is hostile: sizes are bounded by the WebSocket (one message) and by the queues, what the
relay makes us answer (pings) is bounded by the write buffer, times that it names are clamped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from transport.identity import Identity, PeerId
from transport.proto import relay_frames as frames
from transport.proto.relay_queue import RelayQueue
from transport.proto.relay_url import RelayUrl
from transport.proto.relay_watch import RelayWatch, WatchTimes

logger = logging.getLogger(__name__)
_websocket_logger = logging.getLogger(f"{__name__}.websocket")
_websocket_logger.setLevel(logging.INFO)  # its debug lines show payloads and cost what a frame costs

MAX_FRAME = 128 * 1024  # datagrams of one send() in one message …
MAX_QUEUED_FRAME = 16 * 1024  # … but when the socket is full, so much must not stand in front of disco
MAX_WRITE_BUFFER = 512 * 1024  # WebSocket pongs that the relay makes us write and does not read
LINGER_SECONDS = 2.0  # after a last word: a relay that restarts delivers what it has, one that refuses closes
MAX_SPREAD = 3600.0
KNOWN_PEERS = 256  # PeerId objects kept, so that a datagram costs a look-up


@dataclass(frozen=True, slots=True)
class RelayLinkConfig:
    """Settings of links to relays. Times in seconds, sizes in bytes.

    connect_timeout: from the name look-up to WELCOME. pong_timeout: for regular pings.
    silence: with something sent and nothing heard for so long, a ping goes out and has urgent_timeout.
    kick_timeout: for the ping after a change of network. write_timeout: how long a full socket may take nothing.
    queue: bulk that waits for a full socket; queue_age: how old it may become.
    ca_file: certificates of authorities to trust beside the system's (PEM).
    """

    connect_timeout: float = 10.0
    pong_timeout: float = 5.0
    silence: float = 1.0
    urgent_timeout: float = 1.5
    kick_timeout: float = 2.0
    write_timeout: float = 10.0
    queue: int = 1 << 20
    queue_age: float = 1.0
    ca_file: Path | None = None


@dataclass(slots=True)
class RelayCounters:
    """What went over one link since it was made, and what did not."""

    sent_frames: int = 0
    sent_bytes: int = 0  # messages, without WebSocket headers
    received_frames: int = 0
    received_bytes: int = 0
    dropped_frames: int = 0  # bulk that found the queue full or became too old, disco beyond its bound
    bad_frames: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ended. Seconds; None when the relay did not ask for it.

    own: our side gave up because our network changed. refused_for: leave the relay alone for so long.
    restart: come back between these times. spread: after a loss, first try again within this time.
    """

    reason: str
    own: bool = False
    refused_for: float | None = None
    restart: tuple[float, float] | None = None
    spread: float = 0.0


class SessionOwner(Protocol):
    """Who is told what happens; called on the loop, must not raise."""

    def session_up(self, session: RelaySession) -> None: ...

    def session_datagrams(self, peer: PeerId, datagrams: list[bytes], disco: bool) -> None: ...

    def session_gone(self, peer: PeerId, why: frames.GoneReason) -> None: ...

    def session_record(self, record: frames.Record) -> None: ...

    def session_measured(self) -> None: ...

    def session_ended(self, session: RelaySession, ending: Ending) -> None: ...


class RelaySession(asyncio.Protocol):
    """One session; of no use after its end."""

    def __init__(
        self, url: RelayUrl, identity: Identity, config: RelayLinkConfig, counters: RelayCounters, owner: SessionOwner
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._url, self._identity, self._config, self._owner = url, identity, config, owner
        self.counters = counters
        self._websocket = ClientProtocol(
            parse_uri(url.websocket),
            subprotocols=[Subprotocol(frames.SUBPROTOCOL)],
            max_size=frames.MAX_MESSAGE,
            logger=_websocket_logger,
        )
        self._transport: asyncio.Transport | None = None
        self._fragments: list[bytes] = []
        self._challenged = False
        self.welcome: frames.Welcome | None = None
        self.up = False
        # None of the three ever gets an exception.
        self.finished_login: asyncio.Future[None] = self._loop.create_future()  # welcomed or ended
        self.ended: asyncio.Future[Ending] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()  # the connection is no more
        self.spread = 0.0
        self._peers: dict[bytes, PeerId] = {}
        self._paused = False
        self._queue = RelayQueue(config.queue, config.queue_age)
        times = WatchTimes(
            config.pong_timeout, config.silence, config.urgent_timeout, config.kick_timeout, config.write_timeout
        )
        self._watch = RelayWatch(times, self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._linger: asyncio.TimerHandle | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._websocket.send_request(self._websocket.connect())
        self._write_out()

    def data_received(self, data: bytes) -> None:
        self._watch.heard(self._loop.time())
        self._websocket.receive_data(data)
        for event in self._websocket.events_received():
            if not isinstance(event, Frame):
                self._upgraded()
            elif event.opcode in (Opcode.BINARY, Opcode.CONT):
                self._received(event)
            elif event.opcode is Opcode.TEXT:
                self._break("the relay sent text")
            elif event.opcode is Opcode.CLOSE:
                close = self._websocket.close_rcvd
                self._end(self._lost(f"the relay closed the session{f' ({close.code})' if close else ''}"))
            if self._transport is None or self._transport.is_closing():
                break  # what else came in this read is of no use
        if self._websocket.handshake_exc is not None:
            self._upgraded()
        elif self._websocket.parser_exc is not None:
            self._break(f"the relay broke the WebSocket protocol: {_one_line(str(self._websocket.parser_exc))}")
        self._write_out()

    def eof_received(self) -> None:
        if self._websocket.state is State.CONNECTING:  # an HTTP answer may end with the connection
            self._websocket.receive_eof()
            self._upgraded()

    def connection_lost(self, error: Exception | None) -> None:
        detail = getattr(error, "strerror", None) or error
        self._end(self._lost(f"the connection broke: {detail}" if error else "the relay closed the connection"))
        self._drop_linger()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._paused = True
        self._watch.full(self._loop.time())
        self._look_at(self._watch.due)

    def resume_writing(self) -> None:
        self._paused = False
        now = self._loop.time()
        self._watch.took(now)
        before = self._queue.dropped
        while not self._paused and (message := self._queue.pop(now)) is not None:
            self._write(message)
        self.counters.dropped_frames += self._queue.dropped - before

    # -- for the link

    def send(self, peer: bytes, datagrams: Sequence[bytes], disco: bool) -> bool:
        """Send datagrams to a peer by this relay; never waits. False when the session is not up.

        Raises RelayFrameError on an empty datagram, or one that is too large for its class.
        """
        if not self.up:
            return False
        if disco:
            for message in _pack(peer, datagrams, frames.MAX_DISCO_MESSAGE, True):
                self._send_first(message)
        else:
            for message in _pack(peer, datagrams, MAX_QUEUED_FRAME if self._paused else MAX_FRAME, False):
                if self._paused or self._queue:
                    before = self._queue.dropped
                    self._queue.push_bulk(message, self._loop.time())
                    self.counters.dropped_frames += self._queue.dropped - before
                else:
                    self._write(message)
        if self._watch.sent(self._loop.time()):
            self._look_at(self._watch.due)
        return True

    def send_record(self, message: bytes) -> bool:
        """Send a PUBLISH or WATCH now; False when the session is not up or its socket is full: nothing is queued."""
        if not self.up or self._paused:
            return False
        self._write(message)
        return True

    def kick(self) -> None:
        """Our network changed: an answer is due within kick_timeout, or the session is over."""
        if self.up:
            self._ping(self._watch.kick(self._loop.time()))

    def fail(self, reason: str, own: bool = False) -> None:
        """End the session now, without a word to the relay."""
        self._end(Ending(reason, own=own, spread=self.spread))
        self.abort()

    def close(self) -> None:
        """End the session with a WebSocket close, which is not waited for."""
        self._end(Ending("closed"))
        if self._transport is not None and not self._transport.is_closing():
            if self._websocket.state is State.OPEN:
                self._websocket.send_close(1000)
                self._write_out()
            self._transport.close()
            self._linger_until(self._loop.time() + LINGER_SECONDS)

    def drop(self) -> None:
        """End the session now and tell nobody."""
        if not self.ended.done():
            self.up = False
            self.ended.set_result(Ending("dropped"))
        self.abort()

    def abort(self) -> None:
        """Drop the connection and what waits."""
        self._drop_linger()
        if self._transport is not None:
            self._transport.abort()

    @property
    def rtt(self) -> float | None:
        """Seconds, smoothed; None before the first answer on this network."""
        return self._watch.rtt

    @property
    def local_host(self) -> str:
        """The address of this machine that the connection uses."""
        name = self._transport.get_extra_info("sockname") if self._transport is not None else None
        return str(name[0]) if name else ""

    # -- receiving

    def _upgraded(self) -> None:
        error = self._websocket.handshake_exc
        if isinstance(error, InvalidStatus):
            status = error.response.status_code
            self._break(f"the relay answered HTTP {status}; {_STATUS_HINTS.get(status, 'is this the URL of a relay?')}")
        elif error is not None and isinstance(error.__cause__, EOFError):
            self._break("the relay closed the connection during the WebSocket handshake")
        elif error is not None:
            self._break(f"no WebSocket answers there ({_one_line(str(error))}); is this the URL of a relay?")
        elif self._websocket.subprotocol != frames.SUBPROTOCOL:
            self._break("a WebSocket answers there that is no relay; check the URL")

    def _received(self, frame: Frame) -> None:
        data: bytes | bytearray | memoryview
        if self._fragments or not frame.fin:  # the sum of the sizes is bounded by the WebSocket's max_size
            self._fragments.append(bytes(frame.data))
            if not frame.fin:
                return
            data = b"".join(self._fragments)
            self._fragments.clear()
        else:
            data = frame.data
        self.counters.received_frames += 1
        self.counters.received_bytes += len(data)
        try:
            if len(data) > frames.PAYLOAD_AT and data[0] in _RELAYED and self.welcome is not None:  # the hot path
                source = bytes(data[1 : frames.PAYLOAD_AT])
                found = frames.datagrams(memoryview(data)[frames.PAYLOAD_AT :])
                self._owner.session_datagrams(self._peer(source), found, data[0] == frames.FrameType.DISCO)
            else:
                self._handle(frames.decode_server(bytes(data)))
        except frames.UnknownRelayFrame:
            pass  # of a later version
        except frames.RelayFrameError as error:
            self.counters.bad_frames += 1
            self._break(f"the relay broke the protocol: {error}")

    def _handle(self, frame: frames.ServerFrame) -> None:
        if self.ended.done():
            return
        match frame:
            case frames.Refused():
                reason = f"the relay refused: {_one_line(frame.reason) or frame.code.name.lower().replace('_', ' ')}"
                self._end(Ending(reason, refused_for=frame.retry_after_ms / 1000))
                # Its close frame is answered: behind a front, only that tells the relay that somebody is here, and so
                # that two nodes fight for one key.
                self._linger_until(self._loop.time() + LINGER_SECONDS)
            case frames.Challenge() if not self._challenged:
                self._login(frame)
            case frames.Welcome() if self._challenged and self.welcome is None:
                self._welcomed(frame)
            case frames.Restarting():
                logger.info("relay.restarting %s", self._url)
                self._end(Ending("the relay restarts", restart=(frame.min_ms / 1000, frame.max_ms / 1000)))
                self._linger_until(self._loop.time() + LINGER_SECONDS)
            case _ if self.welcome is None:
                self._break(f"the relay sent {type(frame).__name__} before its welcome")
            case frames.Gone():
                self._owner.session_gone(self._peer(frame.peer), frame.why)
            case frames.Record():
                self._owner.session_record(frame)
            case frames.Ping():
                self._send_first(frames.Pong(frame.echo).encode())
            case frames.Pong():
                self._answered(frame)
            case frames.Limited():
                logger.info("relay.limited %s %d ms", self._url, frame.ms)
            case _:
                self._break(f"the relay sent {type(frame).__name__} twice")

    def _login(self, challenge: frames.Challenge) -> None:
        self._challenged = True
        if challenge.version != frames.VERSION:
            self._break(
                f"the relay speaks version {challenge.version} of the protocol, this node {frames.VERSION}; "
                "update the older of the two"
            )
            return
        authority = self._url.authority
        signature = self._identity.sign(frames.login_message(challenge.nonce, authority))
        login = frames.Login(frames.VERSION, self._identity.peer_id.raw, authority, signature)
        self._write(login.encode())

    def _welcomed(self, welcome: frames.Welcome) -> None:
        self.welcome = welcome
        self.spread = min(welcome.spread_ms / 1000, MAX_SPREAD)
        self.up = True
        if not self.finished_login.done():
            self.finished_login.set_result(None)
        self._owner.session_up(self)
        if self.up:
            self._ping(self._watch.welcomed(welcome.ping_s, self._loop.time()))

    def _answered(self, pong: frames.Pong) -> None:
        if not self._watch.answered(pong.echo, self._loop.time()):
            return
        if pong.spread_ms is not None:
            self.spread = min(pong.spread_ms / 1000, MAX_SPREAD)
        self._owner.session_measured()

    def _peer(self, key: bytes) -> PeerId:
        peer = self._peers.get(key)
        if peer is None:
            if len(self._peers) >= KNOWN_PEERS:
                self._peers.clear()
            peer = self._peers[key] = PeerId(key)
        return peer

    # -- writing

    def _send_first(self, message: bytes) -> None:
        if not self._paused:
            self._write(message)
            return
        before = self._queue.dropped
        self._queue.push_first(message)
        self.counters.dropped_frames += self._queue.dropped - before

    def _write(self, message: bytes) -> None:
        if self.ended.done() or self._websocket.state is not State.OPEN:
            return
        self.counters.sent_frames += 1
        self.counters.sent_bytes += len(message)
        self._websocket.send_binary(message)
        self._write_out()

    def _write_out(self) -> None:
        """What the WebSocket has to say goes to the socket."""
        transport = self._transport
        if transport is None or not (pieces := self._websocket.data_to_send()):
            return
        for piece in pieces:
            if piece:
                transport.write(piece)
            else:
                transport.close()  # the relay has said goodbye
        # A TLS transport that was aborted has no buffer to ask for.
        if not transport.is_closing() and transport.get_write_buffer_size() > MAX_WRITE_BUFFER:
            self.fail("the relay does not read what it makes this node write")

    # -- watching

    def _ping(self, echo: bytes | None) -> None:
        if echo is not None:
            self._send_first(frames.Ping(echo).encode())
        if self.up:
            self._look_at(self._watch.due)

    def _look_at(self, at: float) -> None:
        """Look at `at` at the latest; a look that comes too early costs little."""
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self.up:
            return
        now = self._loop.time()
        if reason := self._watch.verdict(now):
            self.fail(reason, own=self._watch.own)
        else:
            self._ping(self._watch.look(now))

    # -- ending

    def _lost(self, reason: str) -> Ending:
        return Ending(reason, spread=self.spread)

    def _break(self, reason: str) -> None:
        """The relay is at fault, or none at all."""
        self.fail(reason)

    def _end(self, ending: Ending) -> None:
        """Tell the owner, once. The connection may stay open to read what still comes."""
        if self.ended.done():
            return
        self.up = False
        self.ended.set_result(ending)
        if not self.finished_login.done():
            self.finished_login.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        self._queue.clear()
        self._peers.clear()
        self._owner.session_ended(self, ending)

    def _linger_until(self, at: float) -> None:
        if self._linger is None and self._transport is not None:
            self._linger = self._loop.call_at(at, self._transport.abort)

    def _drop_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()


_RELAYED = frozenset((int(frames.FrameType.DATA), int(frames.FrameType.DISCO)))

_STATUS_HINTS = {
    403: "its front forbids it",
    429: "too many connections from here, wait a little",
    502: "the relay behind its front is down, wait a little",
    503: "it is overloaded or restarting, wait a little",
    504: "the relay behind its front does not answer, wait a little",
}


def _one_line(text: str) -> str:
    """What others wrote, fit for a log and a terminal."""
    return "".join(character for character in " ".join(text.split()) if character.isprintable())[:200]


def _pack(peer: bytes, datagrams: Sequence[bytes], limit: int, disco: bool) -> list[bytes]:
    """As few messages as hold the datagrams, each at most `limit` bytes unless one datagram alone is more."""
    if sum(map(len, datagrams)) + 2 * len(datagrams) + frames.PAYLOAD_AT <= limit:
        return [frames.data_frame(peer, datagrams, disco)]
    messages: list[bytes] = []
    start, size = 0, frames.PAYLOAD_AT
    for at, datagram in enumerate(datagrams):
        size += 2 + len(datagram)
        if size > limit and at > start:
            messages.append(frames.data_frame(peer, datagrams[start:at], disco))
            start, size = at, frames.PAYLOAD_AT + 2 + len(datagram)
    messages.append(frames.data_frame(peer, datagrams[start:], disco))
    return messages
