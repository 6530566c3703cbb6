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
    LOGICAL_ADDRESS,
    SERVER_NAME,
    WINDOW_MARGIN,
    EngineCounters,
    EngineEvents,
    exporter,
    report_events,
    termination_of,
)

_PLENTY = 1 << 30  # aioquic queues streams beyond the peer's limit by itself


class _Connection(QuicConnection):  # type: ignore[misc]  # aioquic is not type-checked here
    """QuicConnection that takes Ed25519 only, keeps the exporter secret and counts losses."""

    exporter_master: bytes | None = None
    lost = 0

    def __init__(self, **arguments: Any) -> None:  # handed to the library as they are
        super().__init__(**arguments)
        recovery = self._loss
        original = recovery._on_packets_lost

        def count(*, packets: Iterable[Any], **rest: Any) -> None:
            packets = list(packets)
            self.lost += len(packets)
            original(packets=packets, **rest)

        recovery._on_packets_lost = count

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
        if not self._started:
            return []  # the library raises IndexError before a server's first datagram
        return [data for data, _ in self._quic.datagrams_to_send(now)]

    def timer(self) -> float | None:
        return self._quic.get_timer() if self._started else None

    def handle_timer(self, now: float) -> None:
        alive = self._quic._close_event is None
        self._quic.handle_timer(now)
        self._silent |= alive and self._quic._close_event is not None

    @property
    def _started(self) -> bool:
        return bool(self._quic._network_paths)

    def streams_available(self) -> int:
        return _PLENTY

    def open_stream(self) -> int:
        # The id is taken by the first send; an empty one creates the stream without putting it on the wire.
        stream_id: int = self._quic.get_next_available_stream_id()
        self._quic.send_stream_data(stream_id, b"")
        return stream_id

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, end: bool = False) -> None:
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
        return EngineCounters(
            recovery._rtt_smoothed if known else None,
            recovery._rtt_min if known else None,
            self._quic.lost,
            recovery.congestion_window,
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

    def client(self, datagram_size: int) -> AioquicEngine:
        return AioquicEngine(_Connection(configuration=self._configuration(True, datagram_size)), datagram_size)

    def server(self, original_cid: bytes, datagram_size: int) -> AioquicEngine:
        configuration = self._configuration(False, datagram_size)
        connection = _Connection(configuration=configuration, original_destination_connection_id=original_cid)
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
