"""QUIC by qh3 (Rust packet core), the default engine. The only file of this package that touches qh3.

Why each private attribute is touched stands beside it; test_qh3_engine.py fails when one of them changes meaning.
The library's version is pinned in pyproject.toml.
"""

from __future__ import annotations

import ssl
from typing import Any

from qh3 import tls
from qh3._hazmat import Buffer
from qh3.quic import events
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection
from qh3.quic.packet import (
    QuicProtocolVersion,
    pull_quic_transport_parameters,
    push_quic_transport_parameters,
)

from transport.config import BURST, TransportConfig
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

_HASH_NAMES = {256: "sha256", 384: "sha384"}
MAX_UDP_PAYLOAD = 65_527


class _Connection(QuicConnection):  # type: ignore[misc]  # qh3 is not type-checked here
    """QuicConnection that keeps the exporter secret and lets servers send datagrams of any size."""

    exporter_master: bytes | None = None
    _retry_source_connection_id: bytes | None

    def _create_core(self, remote_addr: Any, initial_dcid: bytes, now: float) -> None:
        # qh3 servers count only the QUIC packet towards RFC 9000's three-times limit, not the padding that aioquic
        # appends behind it, and raise when the limit is reached. The driver keeps the limit instead; a Retry is
        # what makes the core believe that the address is valid.
        retry, self._retry_source_connection_id = self._retry_source_connection_id, b"-"
        super()._create_core(remote_addr, initial_dcid, now)
        self._retry_source_connection_id = retry

    def _create_tls(self, remote_source_cid: bytes | None) -> Any:  # qh3's TLS bridge has no public type
        bridge = super()._create_tls(remote_source_cid)
        context = bridge.tls
        if self._is_client:
            _allow_large_datagrams(context)
        original = context._setup_traffic_protection

        def setup(direction: Any, epoch: Any, label: bytes) -> Any:
            # At this label the transcript ends with the server's Finished, as exporter_master_secret needs.
            if label == b"s ap traffic":
                self.exporter_master = context.key_schedule.derive_secret(b"exp master")
            return original(direction, epoch, label)

        context._setup_traffic_protection = setup
        return bridge


def _allow_large_datagrams(context: Any) -> None:
    """Undo max_udp_payload_size = 1472, which qh3 clients announce whatever they can take (RFC 9000, 18.2)."""
    kind, encoded = context.handshake_extensions[0]
    parameters = pull_quic_transport_parameters(Buffer(data=encoded))
    parameters.max_udp_payload_size = MAX_UDP_PAYLOAD
    buffer = Buffer(capacity=len(encoded) + 64)
    push_quic_transport_parameters(buffer, parameters)
    context.handshake_extensions[0] = (kind, buffer.data)


class Qh3Engine:
    """One qh3 connection. See QuicEngine for the meaning of every method."""

    def __init__(self, connection: _Connection, datagram_size: int) -> None:
        self._quic = connection
        self.host_cid: bytes = connection.host_cid
        self.datagram_size = datagram_size
        self.more = False
        self._min_rtt: float | None = None
        self._closing = False
        self._silent = False  # a timer has ended the connection
        self._pings = 0

    def connect(self, now: float) -> None:
        self._quic.connect(LOGICAL_ADDRESS, now=now)

    def receive(self, data: bytes, now: float) -> None:
        self._quic.receive_datagram(data, LOGICAL_ADDRESS, now)

    def receive_batch(self, data: bytes, segment: int, now: float) -> None:
        quic = self._quic
        if not quic._handshake_complete:
            quic.receive_gro_buffer(data, segment, LOGICAL_ADDRESS, now)
            return
        # The same without a Python loop over the segments that only serves qlog.
        quic._core.receive_gro_buffer(data, segment, LOGICAL_ADDRESS, now)
        quic._drain_core()

    def dispatch(self, sink: EngineEvents) -> None:
        report_events(self._quic, events, sink)
        # The event for a close comes only after the draining period; the peer's word is known at once.
        closed = self._quic._close_event
        if closed is not None and not self._closing:
            self._closing = True
            sink.terminated(termination_of(closed, by_timer=self._silent))

    def datagrams(self, now: float) -> list[bytes]:
        core = self._quic._core
        if core is None:
            return []
        poll = core.poll_transmit
        result: list[bytes] = []
        # The library's own method has no limit: a whole congestion window goes out before an ACK is read.
        for _ in range(BURST):
            transmit = poll(now)
            if transmit is None:
                self.more = False
                return result
            result.append(transmit[0])
        self.more = True
        return result

    def timer(self) -> float | None:
        return self._quic.get_timer()  # type: ignore[no-any-return]

    def handle_timer(self, now: float) -> None:
        alive = self._quic._close_event is None
        self._quic.handle_timer(now)
        self._silent |= alive and self._quic._close_event is not None

    def streams_available(self) -> int:
        core = self._quic._core
        # (peer's cumulative limit for bidirectional streams, …); ids grow by four.
        return core.stream_limits[0] - self._quic.get_next_available_stream_id() // 4  # type: ignore[no-any-return]

    def open_stream(self) -> int:
        return self._quic._open_stream()  # type: ignore[no-any-return]  # the public way opens on first send

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, end: bool = False) -> None:
        self._quic._core.send_stream(stream_id, data, end)  # past bookkeeping that only early data needs

    def reset(self, stream_id: int, code: int) -> None:
        self._quic.reset_stream(stream_id, code)

    def stop(self, stream_id: int, code: int) -> None:
        self._quic.stop_stream(stream_id, code)

    def backlog(self) -> int:
        return self._quic._core.get_send_buffer_size(None)  # type: ignore[no-any-return]

    def ping(self) -> None:
        self._pings += 1
        self._quic.send_ping(self._pings)

    def close(self, code: int, reason: str) -> None:
        self._closing = True
        self._quic.close(error_code=code, reason_phrase=reason)

    def peer_id(self) -> PeerId | None:
        certificate = self._quic.get_peercert()
        return None if certificate is None else peer_id_of_certificate(bytes(certificate.public_bytes()))

    def export(self, label: bytes, length: int) -> bytes:
        secret = self._quic.exporter_master
        if secret is None:
            raise RuntimeError("no exporter secret before the handshake has completed")
        schedule = self._quic.tls.key_schedule
        return exporter(_HASH_NAMES[schedule.algorithm], secret, label, length)

    def counters(self) -> EngineCounters:
        core = self._quic._core
        if core is None:
            return EngineCounters(None, None, 0, 0)
        self._sample_rtt(core.latest_rtt)
        return EngineCounters(core.smoothed_rtt, self._min_rtt, core.loss_total, core.congestion_window)

    def _sample_rtt(self, latest: float | None) -> None:
        # The core does not keep the minimum; it is sampled whenever someone looks (keep-alive does).
        if latest is not None and (self._min_rtt is None or latest < self._min_rtt):
            self._min_rtt = latest


class Qh3Factory:
    """Engines for one identity. Configurations are shared by all connections of a role and datagram size."""

    def __init__(self, identity: Identity, config: TransportConfig) -> None:
        self._identity = identity
        self._config = config
        self._configurations: dict[tuple[bool, int], Any] = {}

    def warm_up(self) -> None:
        self.client(self._config.datagram_size).connect(0.0)  # the first key generation takes about 50 ms

    def client(self, datagram_size: int) -> Qh3Engine:
        return Qh3Engine(_Connection(configuration=self._configuration(True, datagram_size)), datagram_size)

    def server(self, original_cid: bytes, datagram_size: int) -> Qh3Engine:
        configuration = self._configuration(False, datagram_size)
        connection = _Connection(configuration=configuration, original_destination_connection_id=original_cid)
        return Qh3Engine(connection, datagram_size)

    def _configuration(self, is_client: bool, datagram_size: int) -> Any:
        key = (is_client, datagram_size)
        if key not in self._configurations:
            config = self._config
            made = QuicConfiguration(
                is_client=is_client,
                alpn_protocols=[ALPN],
                connection_id_length=CID_LENGTH,
                idle_timeout=config.idle_timeout,
                max_data=config.connection_window + WINDOW_MARGIN,
                max_stream_data=config.stream_window + WINDOW_MARGIN,
                max_datagram_size=datagram_size,
                probe_datagram_size=config.probe_datagram_size,
                server_name=SERVER_NAME if is_client else None,
                signature_algorithms=[tls.SignatureAlgorithm.ED25519],
                supported_versions=[QuicProtocolVersion.VERSION_1],
                verify_mode=ssl.CERT_NONE,  # the key is compared instead, by the endpoint
            )
            if not is_client:
                made.load_cert_chain(self._identity.certificate_pem, self._identity.private_key_pem)
            self._configurations[key] = made
        return self._configurations[key]
