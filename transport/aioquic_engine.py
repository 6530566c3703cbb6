"""QUIC by aioquic (pure Python), the second engine and the interoperability oracle. The only file of this
package that touches it.

Why each private attribute is touched stands beside it; test_aioquic_engine.py fails when one of them changes meaning.
The library's version is pinned in pyproject.toml.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

from aioquic import tls
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicProtocolVersion
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from transport.config import TransportConfig
from transport.identity import Identity, PeerId, peer_id_of_certificate
from transport.quic_engine import (
    ALPN,
    CID_LENGTH,
    INITIAL_WINDOW,
    LOGICAL_ADDRESS,
    MAX_PROBE_INTERVAL,
    MAX_WINDOW_HINT,
    SERVER_NAME,
    WINDOW_MARGIN,
    EngineCounters,
    EngineEvents,
    exporter,
    hold_until,
    report_events,
    termination_of,
)

# A handshake may go to an address that opens only in a moment, and is over by then if it doubles its intervals.
MAX_FIRST_INTERVAL = 0.6
_PLENTY = 1 << 30  # aioquic queues streams beyond the peer's limit by itself


class _Connection(QuicConnection):  # type: ignore[misc]  # aioquic is not type-checked here
    """QuicConnection that takes Ed25519 only, keeps the exporter secret, counts losses and never stops probing."""

    exporter_master: bytes | None = None
    lost = 0
    opened = 0

    def __init__(self, initial_window: int, **arguments: Any) -> None:  # the rest is handed to the library as it is
        super().__init__(**arguments)
        recovery = self._loss
        recovery._cc.congestion_window = initial_window  # no setting; ten packets without
        report, ask = recovery._on_packets_lost, recovery.get_loss_detection_time

        def count(*, packets: Iterable[Any], congestion_event: bool = True, **rest: Any) -> None:
            packets = list(packets)
            if congestion_event:  # else a probe sends them again, lost or not
                self.lost += len(packets)
            report(packets=packets, congestion_event=congestion_event, **rest)

        def capped(*, amplification_limited: bool) -> float | None:
            # The back-off doubles for ever. Where losses wait for their time, that is the earlier one already.
            due: float | None = ask(amplification_limited=amplification_limited)
            if due is None:
                return None
            known = recovery._rtt_initialized
            interval = max(MAX_PROBE_INTERVAL, recovery.get_probe_timeout()) if known else MAX_FIRST_INTERVAL
            latest: float = recovery._time_of_last_sent_ack_eliciting_packet + interval
            return min(due, latest)

        recovery._on_packets_lost = count
        recovery.get_loss_detection_time = capped
        # Probes that went unanswered tell of a path that broke: the window is halved for it, and not to two packets.
        recovery._in_persistent_congestion = _never

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        context = self.tls
        context._signature_algorithms = [tls.SignatureAlgorithm.ED25519]  # no public setting
        original = context._setup_traffic_protection

        def setup(direction: Any, epoch: Any, label: bytes) -> Any:
            # At this label the transcript ends with the server's Finished, as exporter_master_secret needs.
            if label == b"s ap traffic":
                self.exporter_master = context.key_schedule.derive_secret(b"exp master")
            return original(direction, epoch, label)

        context._setup_traffic_protection = setup

    def _payload_received(self, *arguments: Any, **rest: Any) -> Any:
        self.opened += 1  # called with what a packet held, once it was decrypted
        return super()._payload_received(*arguments, **rest)


def _never(*, packets: list[Any]) -> bool:
    return False


class AioquicEngine:
    """One aioquic connection. See QuicEngine for the meaning of every method."""

    def __init__(self, connection: _Connection, datagram_size: int) -> None:
        self._quic = connection
        self.host_cid: bytes = connection.host_cid
        self.datagram_size = datagram_size
        self.more = False
        self._closing = False
        self._silent = False  # a timer has ended the connection
        self._pings = 0
        self._hold_until = 0.0
        self._sent = self._written = self._acked = self._ran_dry = 0

    @property
    def opened(self) -> int:
        return self._quic.opened

    def connect(self, now: float) -> None:
        self._quic.connect(LOGICAL_ADDRESS, now=now)

    def receive(self, data: bytes, now: float) -> None:
        self._quic.receive_datagram(data, LOGICAL_ADDRESS, now)

    def receive_batch(self, data: bytes, segment: int, now: float) -> None:
        receive = self._quic.receive_datagram
        for at in range(0, len(data), segment):
            receive(data[at : at + segment], LOGICAL_ADDRESS, now)

    def dispatch(self, sink: EngineEvents) -> None:
        report_events(self._quic, events, sink)
        # The event for a close comes only after the draining period; the peer's word is known at once.
        closed = self._quic._close_event
        if closed is not None and not self._closing:
            self._closing = True
            sink.terminated(termination_of(closed, by_timer=self._silent))

    def datagrams(self, now: float) -> list[bytes]:
        quic = self._quic
        if not self._started or now < self._hold_until:
            return []  # the library raises IndexError before a server's first datagram
        self._hold_until = 0.0
        recovery = quic._loss
        before = recovery.bytes_in_flight
        result = [data for data, _ in quic.datagrams_to_send(now)]
        in_flight = recovery.bytes_in_flight
        if in_flight > before:
            self._sent += len(result)
        if in_flight + self.datagram_size <= recovery.congestion_window:
            self._ran_dry += quic._pacing_at is None
        return result

    def timer(self) -> float | None:
        if not self._started:
            return None
        return self._hold_until or self._quic.get_timer()

    def handle_timer(self, now: float) -> None:
        if now < self._hold_until:
            return
        self._hold_until = 0.0
        alive = self._quic._close_event is None
        # A microsecond late: the library may find by rounding that a loss is not due yet, and ask again for this time.
        self._quic.handle_timer(now + 1e-6)
        self._silent |= alive and self._quic._close_event is not None

    @property
    def _started(self) -> bool:
        return bool(self._quic._network_paths)

    def wake(self, now: float) -> None:
        self._hold_until = 0.0
        if self._closing or not self._started:
            return
        recovery = self._quic._loss
        recovery._pto_count = 0
        if recovery.bytes_in_flight:
            recovery.reschedule_data(now=now)  # what its timer does

    def switch(self, now: float, rtt: float) -> None:
        recovery = self._quic._loss
        if self._closing or not recovery.bytes_in_flight or not recovery._rtt_initialized:
            return
        old = max(recovery._rtt_latest, recovery._rtt_smoothed)
        self._hold_until = hold_until(now, old, recovery._rtt_min, rtt)
        # What is overtaken nevertheless is no sign of congestion: the window was halved for all that was sent so far.
        recovery._cc._congestion_recovery_start_time = now

    def restart(self, now: float, rtt: float) -> None:
        self.wake(now)
        congestion = self._quic._loss._cc
        congestion.congestion_window = max(congestion.congestion_window, INITIAL_WINDOW)
        congestion.ssthresh = None
        congestion._congestion_recovery_start_time = now  # as above

    def set_window_hint(self, size: int) -> None:
        congestion = self._quic._loss._cc
        size = min(size, MAX_WINDOW_HINT)
        congestion.congestion_window = max(congestion.congestion_window, size)
        if congestion.ssthresh is not None:
            congestion.ssthresh = max(congestion.ssthresh, size)

    def streams_available(self) -> int:
        return _PLENTY

    def open_stream(self) -> int:
        # The id is taken by the first send; an empty one creates the stream without putting it on the wire.
        stream_id: int = self._quic.get_next_available_stream_id()
        self._quic.send_stream_data(stream_id, b"")
        return stream_id

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, end: bool = False) -> None:
        self._written += len(data)
        self._quic.send_stream_data(stream_id, data, end)

    def reset(self, stream_id: int, code: int) -> None:
        self._quic.reset_stream(stream_id, code)

    def stop(self, stream_id: int, code: int) -> None:
        self._quic.stop_stream(stream_id, code)

    def backlog(self) -> int:
        # No public figure; the sender keeps what is queued or unacknowledged between these two offsets.
        senders = (stream.sender for stream in self._quic._streams.values())
        return sum(sender._buffer_stop - sender._buffer_start for sender in senders)

    def ping(self) -> None:
        self._pings += 1
        self._quic.send_ping(self._pings)

    def close(self, code: int, reason: str) -> None:
        self._closing = True
        self._hold_until = 0.0
        self._quic.close(error_code=code, reason_phrase=reason)

    def peer_id(self) -> PeerId | None:
        certificate = self._quic.tls._peer_certificate  # no public access
        if certificate is None:
            return None
        return peer_id_of_certificate(certificate.public_bytes(serialization.Encoding.DER))

    def export(self, label: bytes, length: int) -> bytes:
        secret = self._quic.exporter_master
        if secret is None:
            raise RuntimeError("no exporter secret before the handshake has completed")
        return exporter(self._quic.tls.key_schedule.algorithm.name, secret, label, length)

    def counters(self) -> EngineCounters:
        recovery = self._quic._loss  # no public figures
        known = recovery._rtt_initialized
        self._acked = max(self._acked, self._written - self.backlog())
        return EngineCounters(
            recovery._rtt_smoothed if known else None,
            recovery._rtt_min if known else None,
            self._quic.lost,
            recovery.congestion_window,
            self._sent,
            self._acked,
            recovery.bytes_in_flight,
            self._ran_dry,
        )


class AioquicFactory:
    """Engines for one identity. Configurations are shared by all connections of a role and datagram size."""

    def __init__(self, identity: Identity, config: TransportConfig) -> None:
        self._config = config
        self._configurations: dict[tuple[bool, int], Any] = {}
        self._certificate = x509.load_pem_x509_certificate(identity.certificate_pem)
        self._key = serialization.load_pem_private_key(identity.private_key_pem, None)

    def warm_up(self) -> None:
        self.client(self._config.datagram_size).connect(0.0)

    def client(self, datagram_size: int, initial_window: int = INITIAL_WINDOW) -> AioquicEngine:
        configuration = self._configuration(True, datagram_size)
        return AioquicEngine(_Connection(initial_window, configuration=configuration), datagram_size)

    def server(self, original_cid: bytes, datagram_size: int, initial_window: int = INITIAL_WINDOW) -> AioquicEngine:
        connection = _Connection(
            initial_window,
            configuration=self._configuration(False, datagram_size),
            original_destination_connection_id=original_cid,
        )
        return AioquicEngine(connection, datagram_size)

    def _configuration(self, is_client: bool, datagram_size: int) -> Any:
        key = (is_client, datagram_size)
        if key not in self._configurations:
            config = self._config
            self._configurations[key] = QuicConfiguration(
                is_client=is_client,
                alpn_protocols=[ALPN],
                certificate=None if is_client else self._certificate,
                private_key=None if is_client else self._key,
                congestion_control_algorithm="reno",  # cubic collapses after a change of path
                connection_id_length=CID_LENGTH,
                idle_timeout=config.idle_timeout,
                max_data=config.connection_window + WINDOW_MARGIN,
                max_stream_data=config.stream_window + WINDOW_MARGIN,
                max_datagram_size=datagram_size,
                server_name=SERVER_NAME if is_client else None,
                supported_versions=[QuicProtocolVersion.VERSION_1],
                verify_mode=ssl.CERT_NONE,  # the key is compared instead, by the endpoint
            )
        return self._configurations[key]
