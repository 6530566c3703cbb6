"""One authenticated QUIC connection to a peer for one lane: streams, credits, control stream, close.

Between quic_driver (below: engine events in, bytes out) and endpoint (above, `ConnectionOwner`: who may connect, which
of two connections stays). Pure rules live in proto/: frames, credit accounting. All methods belong to the endpoint's
loop; nothing here is thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from transport.config import TransportConfig
from transport.errors import (
    Address,
    BadControlFrame,
    ConnectionClosed,
    CreditExceeded,
    EngineFault,
    LocalFault,
    ProtocolViolation,
    TooMuchEarly,
    TransportError,
    WrongPeer,
)
from transport.identity import Identity, PeerId
from transport.proto.close_codes import MAX_REASON, error_of_termination
from transport.proto.control_frames import (
    BINDING_BYTES,
    EXPORTER_LABEL,
    FIRST_RESERVED_CODE,
    VERSION,
    Accept,
    Authenticate,
    CloseCode,
    ConnectionCredit,
    ControlFrame,
    FrameReader,
    Reset,
    StreamCredit,
)
from transport.proto.early import EarlyAllowance
from transport.quic_driver import Link, QuicDriver
from transport.quic_engine import Termination
from transport.stream import Stream
from transport.stream_table import StreamTable

CONTROL_STREAM = 0  # the client's first bidirectional stream
CONNECTION_ID_BYTES = 8


class State(Enum):
    """Where a connection stands. It only ever moves down this list."""

    HANDSHAKE = 1  # TLS runs
    PROVING = 2  # the client has proved who it is, or the server has the proof and has not decided
    OPEN = 3
    CLOSED = 4


@dataclass(frozen=True, slots=True)
class ConnectionStats:
    """A snapshot. RTT in seconds, None before the first sample; bytes are UDP payload."""

    rtt_s: float | None
    min_rtt_s: float | None
    bytes_out: int
    bytes_in: int
    datagrams_out: int
    datagrams_in: int
    lost: int
    cwnd: int
    path: str
    path_address: Address
    relay: str


class ConnectionOwner(Protocol):
    """What a connection reports to its endpoint."""

    def handshake_done(self, connection: Connection) -> None:
        """A client knows that it talks to the right peer; the endpoint may have it prove itself."""

    def proof_received(self, connection: Connection, proof: Authenticate) -> None:
        """A server has read a proof; the endpoint verifies and decides."""

    def proof_accepted(self, connection: Connection, credentials: bytes) -> None:
        """A client was let in, and shown this; the endpoint opens the connection, or ends it."""

    def connection_ended(self, connection: Connection, error: TransportError) -> None:
        """It is over, for this reason."""


class Connection:
    """A connection to one peer for one lane. Handed out by Endpoint.dial and Endpoint.accept once authenticated."""

    def __init__(
        self,
        driver: QuicDriver,
        link: Link,
        owner: ConnectionOwner,
        config: TransportConfig,
        *,
        expected: PeerId | None,
        lane: str = "",
    ) -> None:
        self.is_client = expected is not None
        self.lane = lane
        self.state = State.HANDSHAKE
        self.boot_id = b""  # the peer's, since its proof or acceptance
        self.connection_id = 0  # equal at both ends, from the TLS exporter
        self.close_reason: TransportError | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.link = link
        self._peer = expected
        self._driver, self._owner, self._config = driver, owner, config
        self._binding = b""
        self._reader = FrameReader()
        self._control = b""  # frames for the next transmit
        self._streams = StreamTable(link.engine, config, self._mark, self.is_client)
        self._early = EarlyAllowance()  # before it is open: what a client sent, what a server holds
        self._last_ping = 0.0
        link.owner = self

    # -- for the application

    @property
    def peer(self) -> PeerId:
        """Who is at the other end."""
        if self._peer is None:
            raise LocalFault("the peer of this connection is not authenticated yet")
        return self._peer

    @property
    def is_identified(self) -> bool:
        """Whether it is known who is, or should be, at the other end."""
        return self._peer is not None

    async def open_stream(self) -> Stream:
        """A new stream; waits while config.max_streams of ours are open. Raises ConnectionClosed."""
        return await self._streams.open()

    async def accept_stream(self) -> Stream:
        """The next stream that the peer opened. Raises ConnectionClosed when there will be none any more."""
        return await self._streams.accept()

    def stats(self) -> ConnectionStats:
        """What the connection has seen so far."""
        link, counters = self.link, self.link.engine.counters()
        return ConnectionStats(
            rtt_s=counters.rtt,
            min_rtt_s=counters.min_rtt,
            bytes_out=link.bytes_out,
            bytes_in=link.bytes_in,
            datagrams_out=link.datagrams_out,
            datagrams_in=link.datagrams_in,
            lost=counters.lost,
            cwnd=counters.congestion_window,
            path=link.route.path.kind,
            path_address=link.route.path.id.address,
            relay=link.route.path.id.relay,
        )

    async def wait_closed(self) -> TransportError | None:
        """Wait until the connection is over; returns close_reason."""
        await asyncio.shield(self.closed)
        return self.close_reason

    async def close(self, code: int = 0, reason: str = "") -> None:
        """End the connection; the peer gets `code` (below 0x4000) and `reason`. Unsent stream data is dropped:
        finish() streams and wait for the peer's answer before, where that matters."""
        if not 0 <= code < FIRST_RESERVED_CODE:
            raise LocalFault(f"close codes are 0 to {FIRST_RESERVED_CODE - 1}, not {code}")
        self.end(code, reason, ConnectionClosed(code, reason, "local"))

    # -- for the endpoint

    def prove(self, identity: Identity, boot_id: bytes, previous: int, credentials: bytes = b"") -> None:
        """Client: send the proof of identity, and what else is to be shown, and wait for the verdict."""
        config = self._config
        proof = Authenticate(
            VERSION,
            identity.peer_id.raw,
            self.peer.raw,
            boot_id,
            previous,
            config.stream_window,
            config.connection_window,
            self.lane,
        )
        signed = replace(proof, signature=identity.sign(proof.message(self._binding)), credentials=credentials)
        self.state = State.PROVING
        opened = self.link.engine.open_stream()
        assert opened == CONTROL_STREAM
        self.link.engine.send(CONTROL_STREAM, signed.encode())  # at once: `send_early` comes behind it
        self._mark()

    def send_early(self, data: bytes) -> Stream | None:
        """Client: a new stream that begins with `data`, in the flight of the proof; None where that is not allowed.

        The server's key has been checked. Nothing can be replayed: the handshake is over, these are not 0-RTT data.
        The peer's application sees the stream once it has let us in, and never when it refuses.
        """
        if self.state is not State.PROVING or not self.is_client or not self._early.fits(len(data)):
            return None
        stream = self._streams.open_early(data)
        if stream is not None:
            self._early.take(stream.id, len(data))
        return stream

    def open_after_proof(self) -> None:
        """Client: what the peer has shown will do."""
        self.state = State.OPEN

    def verify(self, proof: Authenticate) -> bool:
        """Server: whether the proof was signed by the peer it names, for this connection."""
        return PeerId(proof.client).verify(proof.signature, proof.message(self._binding))

    def identify(self, proof: Authenticate) -> None:
        """Server: the proof has verified; this is who it is and what it wants."""
        self._peer = PeerId(proof.client)
        self.link.authenticated = True
        self.lane = proof.lane
        self.boot_id = proof.boot_id
        self._streams.take_windows(proof.stream_window, proof.connection_window)

    def accept_proof(self, boot_id: bytes, credentials: bytes = b"") -> None:
        """Server: let the peer in, and show it what it may want to see of us."""
        config = self._config
        accept = Accept(VERSION, boot_id, config.stream_window, config.connection_window, credentials)
        self._send_control(accept.encode())
        self.state = State.OPEN

    def end(self, code: int, reason: str, error: TransportError) -> None:
        """Close for `error`, telling the peer `code` and `reason`."""
        if self.state is State.CLOSED:
            return
        with contextlib.suppress(Exception):  # an engine that cannot close any more is dropped just the same
            self.link.engine.close(code, reason.encode()[:MAX_REASON].decode(errors="ignore"))
        self._ended(error)

    def tick(self, now: float) -> None:
        """Keep-alive: a ping after config.keep_alive seconds of silence."""
        interval = self._config.keep_alive
        if (
            self.state in (State.OPEN, State.PROVING)
            and now - max(self.link.last_received, self._last_ping) >= interval
        ):
            self._last_ping = now
            self.link.engine.ping()
            self.link.engine.counters()  # lets the engine sample its RTT
            self._mark()

    @property
    def heard_at(self) -> float:
        """When a datagram last came from the peer, on the loop's clock."""
        return self.link.last_received

    def ping(self) -> None:
        """Have the peer acknowledge something. Nothing happens on a connection that is over."""
        if self.state is State.OPEN:
            self.link.engine.ping()
            self._mark()

    # -- events from the engine

    def handshake_completed(self) -> None:
        if self.state is not State.HANDSHAKE:
            return
        self.link.validated = True  # it could not have finished without reading what was sent there
        exported = self.link.engine.export(EXPORTER_LABEL, BINDING_BYTES + CONNECTION_ID_BYTES)
        self._binding = exported[:BINDING_BYTES]
        self.connection_id = int.from_bytes(exported[BINDING_BYTES:], "big")
        if not self.is_client:
            return
        found = self.link.engine.peer_id()
        if found != self._peer:
            error = WrongPeer(self._peer, found or "no Ed25519 key", [self.link.route.path.id.address])
            self.end(CloseCode.WRONG_PEER, "another peer was expected here", error)
            return
        self.link.authenticated = True
        self._owner.handshake_done(self)

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        if self.state is State.CLOSED:
            return
        try:
            if stream_id == CONTROL_STREAM:
                self._control_data(data, end)
            elif self.state is State.OPEN or (self.state is State.PROVING and self.is_client):
                self._streams.data(stream_id, data, end)  # a server's may overtake its acceptance
            elif self._binding and not self.is_client:  # held: nobody has this connection before it is let in
                self._early.take(stream_id, len(data))
                self._streams.data(stream_id, data, end)
            else:
                raise ProtocolViolation("stream data before the handshake is complete")
        except ProtocolViolation as error:
            self._violated(error)

    def stream_reset(self, stream_id: int, code: int) -> None:
        if stream_id == CONTROL_STREAM:
            self._violated(ProtocolViolation("it reset the control stream"))
        else:
            self._streams.quic_reset(stream_id)

    def stop_sending(self, stream_id: int, code: int) -> None:
        if stream_id == CONTROL_STREAM:
            self._violated(ProtocolViolation("it stopped the control stream"))
        else:
            self._streams.stopped(stream_id, code)

    def cid_issued(self, cid: bytes) -> None:
        self._driver.add_cid(self.link, cid)

    def cid_retired(self, cid: bytes) -> None:
        self._driver.remove_cid(self.link, cid)

    def terminated(self, end: Termination) -> None:
        if self.state is not State.CLOSED:
            self._ended(error_of_termination(end.kind, end.code, end.reason, is_open=self.state is State.OPEN))

    def flooded(self, limit: int) -> None:
        self._violated(ProtocolViolation(f"more than {limit} bytes came before it was authenticated"))

    def failed(self, error: Exception) -> None:
        if self.state is not State.CLOSED:
            fault = EngineFault(f"the QUIC library or what serves it failed: {error!r}")
            fault.__cause__ = error
            self.end(CloseCode.INTERNAL, "internal error", fault)

    # -- around a transmit

    def before_transmit(self) -> None:
        frames = self._streams.control_frames() if self.state is State.OPEN else b""
        if self._control or frames:
            control, self._control = self._control, b""
            self.link.engine.send(CONTROL_STREAM, control + frames)

    def after_transmit(self) -> None:
        self._streams.transmitted()

    # -- inside

    def _mark(self) -> None:
        self._driver.mark(self.link)

    def _control_data(self, data: bytes, end: bool) -> None:
        for frame in self._reader.feed(data):
            self._control_frame(frame)
            if self.state is State.CLOSED:
                return
        if end:
            raise ProtocolViolation("it finished the control stream")

    def _control_frame(self, frame: ControlFrame) -> None:
        if self.state is State.HANDSHAKE and not self.is_client and isinstance(frame, Authenticate):
            self.state = State.PROVING
            self._owner.proof_received(self, frame)
        elif self.state is State.PROVING and self.is_client and isinstance(frame, Accept):
            if frame.version != VERSION:
                raise ProtocolViolation(f"it accepted version {VERSION} with version {frame.version}")
            self.boot_id = frame.boot_id
            self._streams.take_windows(frame.stream_window, frame.connection_window)
            self._owner.proof_accepted(self, frame.credentials)
        elif self.state is State.OPEN and isinstance(frame, ConnectionCredit):
            self._streams.connection_credit(frame.limit)
        elif self.state is State.OPEN and isinstance(frame, StreamCredit):
            self._streams.stream_credit(frame.stream_id, frame.limit)
        elif self.state is State.OPEN and isinstance(frame, Reset):
            self._streams.peer_reset(frame)
        else:
            raise BadControlFrame(f"a {type(frame).__name__} frame while the connection is {self.state.name}")

    def _send_control(self, frame: bytes) -> None:
        self._control += frame
        self._mark()

    def _violated(self, error: ProtocolViolation) -> None:
        credit = isinstance(error, CreditExceeded)
        code = CloseCode.CREDIT_EXCEEDED if credit else CloseCode.PROTOCOL_VIOLATION
        self.end(code, error.reason, error)

    def _ended(self, error: TransportError) -> None:
        if not self.is_client and self.state is not State.OPEN:
            self._driver.counters.early_excess += isinstance(error, TooMuchEarly)
            self._driver.counters.early_dropped += self._early.is_used and not isinstance(error, TooMuchEarly)
        self.state = State.CLOSED
        self.close_reason = error
        self._driver.drop(self.link)
        self._streams.close(error)
        if not self.closed.done():
            self.closed.set_result(None)
        self._owner.connection_ended(self, error)

    def __repr__(self) -> str:
        peer = self._peer.short if self._peer is not None else "unknown"
        return f"<Connection {peer} lane={self.lane!r} {self.state.name.lower()}>"
