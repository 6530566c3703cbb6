"""The small interface to a sans-IO QUIC library, and what both adapters share. No socket, no asyncio.

An engine is one QUIC connection: bytes and `now` in, callbacks and bytes out. qh3_engine.py and aioquic_engine.py
implement it; every private attribute of a library that is touched is touched there. Called by quic_driver.py and
connection.py, which know nothing of either library.

Both libraries live on one wire: QUIC version 1, TLS 1.3 with Ed25519 only, ALPN below, the server's self-signed
certificate checked by the caller (`peer_id`), no resumption and no 0-RTT, so nothing can be replayed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from transport.config import TransportConfig
from transport.identity import Identity, PeerId

ALPN = "peer-transport/1"
SERVER_NAME = "peer"  # a fixed name: the certificate's key is what counts
CID_LENGTH = 8
# What QUIC is told about where its peer is, always and for every peer: paths are chosen below it, so an address
# would only be wrong one day. A literal, because qh3 insists on one.
LOGICAL_ADDRESS = ("fd00::1", 1)
# Bytes in flight before anything was acknowledged. RFC 9002, 7.2 says ten packets, which costs 100 KB three round
# trips more; one burst of this size passes the queue of any access link that is worth sending an expert over.
INITIAL_WINDOW = 128 * 1024
# What a hint may raise a window to, whatever it says.
MAX_WINDOW_HINT = 1024 * 1024
# A silent peer is probed at least this often (seconds) while something is in flight; RFC 9002 lets it double forever.
MAX_PROBE_INTERVAL = 1.5
# The longest pause at a change of path, in seconds: a deeper queue than that is worth overtaking.
MAX_HOLD = 0.25
# QUIC's windows stand this far above our credits, for the control stream and what is in flight as a window moves.
WINDOW_MARGIN = 256 * 1024

# Both libraries log to "quic", and Python prints warnings of loggers that nobody configured.
logging.getLogger("quic").addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Termination:
    """How QUIC ended: by silence, by the peer's application, or by a transport or TLS error of either side."""

    kind: Literal["idle", "application", "transport"]
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What loss recovery knows. RTT in seconds, None before the first sample; windows and amounts in bytes.

    sent: datagrams so far that the peer had to acknowledge; lost: packets of them declared lost. acked: stream bytes
    delivered. ran_dry: how often there was nothing left to send: where it stood still for a second, `acked` per second
    is what the path carries, not what the application wanted.
    """

    rtt: float | None
    min_rtt: float | None
    lost: int
    congestion_window: int
    sent: int = 0
    acked: int = 0
    in_flight: int = 0
    ran_dry: int = 0


class EngineEvents(Protocol):
    """What an engine tells its connection, in order, from inside `dispatch`."""

    def handshake_completed(self) -> None:
        """TLS is done; keys and exporter are valid. On a client: before the server's verdict about us."""

    def stream_data(self, stream_id: int, data: bytes, end: bool) -> None:
        """In-order bytes of one stream; `end` after the last."""

    def stream_reset(self, stream_id: int, code: int) -> None:
        """The peer gave up sending on a stream."""

    def stop_sending(self, stream_id: int, code: int) -> None:
        """The peer does not want more of a stream; the engine has reset our side of it."""

    def cid_issued(self, cid: bytes) -> None:
        """Datagrams with this connection ID are ours from now on."""

    def cid_retired(self, cid: bytes) -> None:
        """… and no longer."""

    def terminated(self, end: Termination) -> None:
        """The connection is over; the last event."""


class QuicEngine(Protocol):
    """One QUIC connection. All times are the loop's monotonic clock in seconds."""

    host_cid: bytes
    datagram_size: int
    more: bool  # the last `datagrams` stopped at the burst limit

    @property
    def opened(self) -> int:
        """How many packets were authentic so far: once the handshake is done, only the peer can raise it."""

    def connect(self, now: float) -> None:
        """Start the handshake (clients, once)."""

    def receive(self, data: bytes, now: float) -> None:
        """Take one datagram. May raise anything on hostile bytes; the connection stays usable."""

    def receive_batch(self, data: bytes, segment: int, now: float) -> None:
        """Take datagrams of one connection, each `segment` bytes long but the last."""

    def dispatch(self, events: EngineEvents) -> None:
        """Report what happened since the last call."""

    def datagrams(self, now: float) -> list[bytes]:
        """What to send now, at most BURST datagrams where the library can stop (`more` tells)."""

    def timer(self) -> float | None:
        """When `handle_timer` is due."""

    def handle_timer(self, now: float) -> None:
        """The timer fired."""

    def wake(self, now: float) -> None:
        """The path is new, or back: probe with the next `datagrams` instead of sitting out a back-off.

        For a path that may have lost what is in flight; harmless at any time, and nothing where all is acknowledged.
        """

    def switch(self, now: float, rtt: float) -> None:
        """The path changes now from one that works to another, of this round-trip time in seconds.

        Where the new one is faster, nothing is sent (at most MAX_HOLD) until what is under way on the old one is
        there: it would be overtaken, and taken for lost. For a path that broke, call `wake` instead.
        """

    def restart(self, now: float, rtt: float) -> None:
        """The path changes now from one that lost packets, or was slow, to one of this round-trip time in seconds:
        congestion control begins anew (RFC 9000, 9.4).

        What was under way is asked for as by `wake`; its losses are the old path's. Until they are known little may be
        sent, for a round trip and a quarter, and MAX_HOLD beyond it at most.
        """

    def set_window_hint(self, size: int) -> None:
        """The path has carried `size` bytes per round trip without loss, by an earlier measurement.

        Raises the congestion window to it (at most MAX_WINDOW_HINT), where the library can; never lowers it.
        """

    def streams_available(self) -> int:
        """How many more streams may be opened now without waiting for the peer."""

    def open_stream(self) -> int:
        """The id of a new bidirectional stream."""

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, end: bool = False) -> None:
        """Queue bytes on a stream; copies them."""

    def reset(self, stream_id: int, code: int) -> None:
        """Abort our side of a stream; what was queued is dropped."""

    def stop(self, stream_id: int, code: int) -> None:
        """Ask the peer to abort its side."""

    def backlog(self) -> int:
        """Stream bytes that wait inside the library."""

    def ping(self) -> None:
        """Make the next datagram one that the peer acknowledges."""

    def close(self, code: int, reason: str) -> None:
        """End the connection with an application code; the next `datagrams` has the last word."""

    def peer_id(self) -> PeerId | None:
        """The key in the server's certificate; None on servers, or when it is no Ed25519 key."""

    def export(self, label: bytes, length: int) -> bytes:
        """TLS exporter (RFC 8446, 7.5) with an empty context; equal at both ends of this connection alone."""

    def counters(self) -> EngineCounters:
        """Loss recovery's figures."""


class EngineFactory(Protocol):
    """Makes engines for one identity and configuration."""

    def warm_up(self) -> None:
        """Pay one-time costs of the library now; may take 60 ms, may run in a thread."""

    def client(self, datagram_size: int, initial_window: int = INITIAL_WINDOW) -> QuicEngine:
        """The dialling side. `initial_window`: bytes that may be in flight before the first acknowledgement."""

    def server(self, original_cid: bytes, datagram_size: int, initial_window: int = INITIAL_WINDOW) -> QuicEngine:
        """The answering side of the Initial that carried `original_cid` as its destination."""


def create_factory(identity: Identity, config: TransportConfig) -> EngineFactory:
    """The engines that `config.engine` names. Imports only that library. Raises EngineFault."""
    if config.engine == "aioquic":
        from transport.aioquic_engine import AioquicFactory  # noqa: PLC0415 - a node loads one library

        return AioquicFactory(identity, config)
    from transport.qh3_engine import Qh3Factory  # noqa: PLC0415

    return Qh3Factory(identity, config)


def hold_until(now: float, old: float, minimum: float, new: float) -> float:
    """When to send again after a switch from a path with this round-trip time now, and this at its best, to a new one.

    What was sent last is still on its way for the old path's queue and half of its empty round trip; the queue is
    taken to be all on our side, and an eighth longer than when it was measured, since one packet that is overtaken
    costs as much as all. 0.0 where the old path is the faster one.
    """
    wait = old - minimum / 2 - new / 2
    return now + min(wait + (old - minimum) / 8 + 0.001, MAX_HOLD) if wait > 0 else 0.0


def report_events(quic: Any, events: Any, sink: EngineEvents) -> None:
    """Pass on what a connection has queued. Both libraries share an ancestor, and with it the names in `events`.

    `quic` is the library's connection and `events` its module of events: neither library is typed here.
    """
    while True:
        event = quic.next_event()
        if event is None:
            return
        kind = type(event)
        if kind is events.StreamDataReceived:
            sink.stream_data(event.stream_id, event.data, event.end_stream)
        elif kind is events.HandshakeCompleted:
            sink.handshake_completed()
        elif kind is events.StreamReset:
            sink.stream_reset(event.stream_id, event.error_code)
        elif kind is events.StopSendingReceived:
            sink.stop_sending(event.stream_id, event.error_code)
        elif kind is events.ConnectionIdIssued:
            sink.cid_issued(event.connection_id)
        elif kind is events.ConnectionIdRetired:
            sink.cid_retired(event.connection_id)


def termination_of(event: Any, *, by_timer: bool) -> Termination:
    """What a library's ConnectionTerminated means. `by_timer`: a timer ended the connection, not a datagram.

    Only that tells silence from a peer: code, frame type and text of the libraries' own idle event can all be sent.
    """
    reason = event.reason_phrase or ""
    if by_timer:
        return Termination("idle", 0, reason)
    return Termination("application" if event.frame_type is None else "transport", int(event.error_code), reason)


def exporter(hash_name: str, master_secret: bytes, label: bytes, length: int) -> bytes:
    """RFC 8446, 7.5: TLS-Exporter(label, "", length) from the exporter_master_secret."""
    empty = hashlib.new(hash_name).digest()
    secret = _expand_label(hash_name, master_secret, label, empty, len(empty))
    return _expand_label(hash_name, secret, b"exporter", empty, length)


def _expand_label(hash_name: str, secret: bytes, label: bytes, context: bytes, length: int) -> bytes:
    """HKDF-Expand-Label of RFC 8446, 7.1."""
    full = b"tls13 " + label
    info = length.to_bytes(2, "big") + bytes([len(full)]) + full + bytes([len(context)]) + context
    output = block = b""
    counter = 1
    while len(output) < length:
        block = hmac.digest(secret, block + info + bytes([counter]), hash_name)
        output += block
        counter += 1
    return output[:length]
