"""QUIC by qh3 (Rust packet core), the default engine. The only file of this package that touches qh3.

Why each private attribute is touched stands beside it; test_qh3_engine.py fails when one of them changes meaning.
The library's version is pinned in pyproject.toml.
"""

from __future__ import annotations

import ssl
from dataclasses import replace
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
from transport.core_clock import CoreClock
from transport.identity import Identity, PeerId, peer_id_of_certificate
from transport.quic_engine import (
    ALPN,
    CID_LENGTH,
    INITIAL_WINDOW,
    LOGICAL_ADDRESS,
    MAX_HOLD,
    MAX_PROBE_INTERVAL,
    SERVER_NAME,
    WINDOW_MARGIN,
    EngineCounters,
    EngineEvents,
    Termination,
    exporter,
    hold_until,
    report_events,
    termination_of,
)

_HASH_NAMES = {256: "sha256", 384: "sha384"}
MAX_UDP_PAYLOAD = 65_527
MAX_CORE_DATAGRAM = 65_535  # the core keeps path sizes in 16 bits
_PEER_IDLE = 8  # the place of the peer's idle time-out among the core's arguments
# After two seconds without an acknowledgement the core starts again with ten packets; a ping keeps that from coming.
KEEP_WINDOW = 0.5
# … and this makes it come: ten packets, and slow start.
NEW_WINDOW = 2.001
DRAINED = 2  # datagrams in flight at that time, whose round trip may be measured as so much longer
DRAIN_GAP = 0.025  # seconds between what is sent before: the longest delay of an acknowledgement (RFC 9000, 18.2)
EXCUSE, EXCUSES = 0.75, 2  # seconds beyond that in which losses are excused, and how often: machines stand still
ACK_DELAY = 0.05  # seconds that an acknowledgement may take beyond two round trips
FIRST_PATIENCE = 0.3  # … before a round trip was measured
MAX_DOUBT = 1.0  # seconds that a round trip may be taken for, while it is not known which copy was answered
# A handshake may go to an address that opens only in a moment, and is over by then if it doubles its intervals.
MAX_FIRST_INTERVAL = 0.6
MAX_TIMERS = 8  # acknowledgements, pacing and losses that may be due before the probe is


class _Connection(QuicConnection):  # type: ignore[misc]  # qh3 is not type-checked here
    """QuicConnection with an exporter secret, no idle time-out of its own, and an initial window of our choice."""

    exporter_master: bytes | None = None
    initial_window = 0  # bytes; set before the first datagram
    _configuration: QuicConfiguration
    _retry_source_connection_id: bytes | None

    @property
    def is_client(self) -> bool:
        return bool(self._is_client)

    @property
    def idle_timeout(self) -> float:
        """What we announce, in seconds."""
        return float(self._configuration.idle_timeout)

    def _create_core(self, remote_addr: Any, initial_dcid: bytes, now: float) -> None:
        # qh3 servers count only the QUIC packet towards RFC 9000's three-times limit, not the padding that aioquic
        # appends behind it, and raise when the limit is reached. The driver keeps the limit instead; a Retry is
        # what makes the core believe that the address is valid.
        retry, self._retry_source_connection_id = self._retry_source_connection_id, b"-"
        # The window begins with two datagrams (or ten small ones): announce large ones for as long as it is made.
        configuration = self._configuration
        size = min(max(configuration.max_datagram_size, self.initial_window // 2), MAX_CORE_DATAGRAM)
        self._configuration = replace(configuration, max_datagram_size=size, idle_timeout=None)
        super()._create_core(remote_addr, initial_dcid, now)
        self._configuration = configuration
        self._retry_source_connection_id = retry
        if size > configuration.max_datagram_size:
            # … and then say what the peer would: no credit yet, and datagrams of this size at most.
            self._core.apply_peer_transport_parameters(
                0, 0, 0, 0, 0, 0, 3, 0.025, None, None, None, 2, False, configuration.max_datagram_size
            )

    def _call_core(self, operation: Any, *arguments: Any) -> Any:
        if not self._transport_parameters_applied and operation.__name__ == "apply_peer_transport_parameters":
            arguments = (*arguments[:_PEER_IDLE], None, *arguments[_PEER_IDLE + 1 :])
        return super()._call_core(operation, *arguments)

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
    """One qh3 connection. See QuicEngine for the meaning of every method.

    Idle time-out and probe back-off are kept here, since the core's cannot be reached: its idle time-out is off, its
    clock is core_clock.py's, and its probe timer is called when we want it, with the time that it waits for.
    """

    def __init__(self, connection: _Connection, datagram_size: int) -> None:
        self._quic = connection
        self.host_cid: bytes = connection.host_cid
        self.datagram_size = datagram_size
        self.opened = 0
        self.more = False
        self._clock = CoreClock()
        self._min_rtt: float | None = None
        self._closing = False
        self._silent = False  # the idle time-out has ended the connection
        self._pings = 0
        self._hold_until = 0.0
        # Congestion control begins anew after the first time, when little is in flight, or at the second; 0.0: need not
        self._restart_from = self._restart_by = 0.0
        self._restart_next = 0.0  # until then: when something may be sent
        # Losses found until this time are still the old path's: it begins anew so many times more
        self._excuse_until, self._excuses, self._excused = 0.0, 0, 0
        # Idle time-out: since when, the limit, and whether anything was asked since the peer was heard (RFC 9000, 10.1)
        self._idle_from = 0.0
        self._idle_timeout = connection.idle_timeout
        self._asked = False
        # Probes into silence: since when nothing that is in flight was acknowledged, how long an acknowledgement may
        # take, and once it took longer: when the next probe is due, and how many there were in a row
        self._unheard_from = 0.0
        self._patience = FIRST_PATIENCE
        self._probe_due = 0.0
        self._probes = 0
        # What a client has sent before it was answered; repeated as it is
        self._first_flight: list[bytes] | None = [] if connection.is_client else None
        self._repeat: list[bytes] = []
        self._sent_first = self._answered_first = 0.0  # the loop's time; the second only if it was repeated
        self._doubtful: float | None = None  # a round trip counted from a repetition, maybe of what was sent before
        # For the counters, and for keeping the congestion window
        self._in_flight = self._sent = self._written = self._acked = self._ran_dry = 0
        self._acked_at = 0.0  # the core's time, as all that the core hands out

    def connect(self, now: float) -> None:
        self._idle_from = self._unheard_from = self._sent_first = now
        self._acked_at = self._clock.tick(now, 0)
        self._quic.connect(LOGICAL_ADDRESS, now=self._acked_at)

    def receive(self, data: bytes, now: float) -> None:
        quic, core = self._quic, self._quic._core
        time = self._clock.receive(now, self._in_flight, self._patience)
        if core is None or not quic._handshake_complete or data[0] & 0x80:
            quic.receive_datagram(data, LOGICAL_ADDRESS, time)
            if core is None:
                self._acked_at = time
            if not quic._handshake_complete:  # before, nothing is authentic in any case
                self.opened += 1
            self._heard(now)
            return
        # The same without what only long headers need, and with the count of packets that were authentic.
        packets = core.receive_datagram(data, LOGICAL_ADDRESS, time, len(data))[2]
        quic._drain_core()
        self.opened += packets
        if packets:
            self._heard(now)

    def receive_batch(self, data: bytes, segment: int, now: float) -> None:
        quic = self._quic
        time = self._clock.receive(now, self._in_flight, self._patience)
        if not quic._handshake_complete:
            quic.receive_gro_buffer(data, segment, LOGICAL_ADDRESS, time)
            self.opened += 1
            self._heard(now)
            return
        # The same without a Python loop over the segments that only serves qlog.
        packets = quic._core.receive_gro_buffer(data, segment, LOGICAL_ADDRESS, time)[2]
        quic._drain_core()
        self.opened += packets
        if packets:
            self._heard(now)

    def _heard(self, now: float) -> None:
        """Something authentic came, or may have in a handshake."""
        core = self._quic._core
        self._idle_from = now
        self._asked = False
        if core is None:
            return
        if self._excuses and not self._restart_by and core.loss_total > self._excused:
            self._excuses -= 1
            if now < self._excuse_until:
                self._begin_anew(now, 0.0)
        if self._clock.stalled and core.pto_count == 0 and not self._unanswered():
            self._clock.resume()
            self._probes = 0
        latest = core.latest_rtt
        if latest is not None:
            self._sample_rtt(latest, now)
            # In doubt no shorter than the first flight may have taken: the clock of a stall shortens what it measures.
            least = min(now - self._sent_first, MAX_DOUBT) if self._min_rtt is None else self._min_rtt
            self._patience = 2 * max(core.smoothed_rtt, least) + ACK_DELAY

    def dispatch(self, sink: EngineEvents) -> None:
        report_events(self._quic, events, sink)
        if self._silent and not self._closing:
            self._closing = True
            sink.terminated(Termination("idle", 0, "idle time-out"))
            return
        # The event for a close comes only after the draining period; the peer's word is known at once.
        closed = self._quic._close_event
        if closed is not None and not self._closing:
            self._closing = True
            sink.terminated(termination_of(closed, by_timer=False))

    def datagrams(self, now: float) -> list[bytes]:
        core = self._quic._core
        self.more = False
        if core is None or self._silent or self._held(now):
            return []
        if self._repeat:
            result, self._repeat = self._repeat, []
            return result
        in_flight = core.bytes_in_flight
        time = self._clock.tick(now, in_flight)
        if in_flight < self._in_flight:
            self._acked_at = time
            self._unheard_from = now
        elif not in_flight and time - self._acked_at > KEEP_WINDOW and not self._closing:
            # Who only receives gets no acknowledgements, and would start again with a window of ten packets.
            self._acked_at = time
            self.ping()
        room = BURST
        if self._restart_by:
            room = self._drain(now)
            time = self._clock.tick(now, in_flight)
        result = []
        # The library's own method has no limit: a whole congestion window goes out before an ACK is read.
        poll = core.poll_transmit
        for _ in range(room):
            transmit = poll(time)
            if transmit is None:
                break
            result.append(transmit[0])
        else:
            self.more = room == BURST
        self._in_flight = core.bytes_in_flight
        if self._in_flight > in_flight:
            self._sent += len(result)
            if not in_flight:
                self._unheard_from = now
            if not self._asked:
                self._asked = True
                self._idle_from = now
        if not self.more and self._in_flight + self.datagram_size <= core.congestion_window:
            timer = core.get_timer()
            self._ran_dry += timer is None or timer[0] != "pacing"
        if self._first_flight is not None:
            if core.received_authenticated_packet:
                self._first_flight = None
            else:
                self._first_flight += result
        return result

    def _drain(self, now: float) -> int:
        """How many datagrams may be sent while congestion control waits for its new beginning."""
        core = self._quic._core
        in_flight = core.bytes_in_flight
        little = in_flight <= DRAINED * self.datagram_size and now >= self._restart_from
        late = now >= self._restart_by and self._unheard_from >= self._restart_from  # and the new path answers
        if not in_flight or little or late:
            self._restart_by = 0.0
            self._excused = core.loss_total
            self._clock.leap(NEW_WINDOW)
            self.ping()  # the core begins anew with the next packet that is acknowledged; and it has no time-out then
            return BURST
        if now < self._restart_next:
            return 0
        self._restart_next = now + DRAIN_GAP
        return 1  # probes, and acknowledgements, which the peer waits for

    def timer(self) -> float | None:
        core = self._quic._core
        if core is None or self._silent:
            return None
        if self._hold_until:
            return self._hold_until
        timer = core.get_timer()
        clock = self._clock
        if self._quic._close_event is not None or self._closing:
            return None if timer is None else clock.when(timer[1])
        due = self._idle_from + self._idle_timeout
        if clock.stalled:
            due = min(due, self._probe_due)
        elif self._in_flight:
            due = min(due, self._unheard_from + self._patience)
        stalled = timer is not None and clock.stalled and timer[0] == "loss_detection"
        drains = timer is not None and self._restart_by and timer[0] == "pacing"
        if timer is not None and not stalled and not drains:
            due = min(due, clock.when(timer[1], paced=timer[0] == "pacing"))
        return min(due, self._restart_next) if self._restart_by else due

    def handle_timer(self, now: float) -> None:
        core = self._quic._core
        if core is None or self._silent or self._held(now):
            return
        clock = self._clock
        if not self._closing and self._quic._close_event is None:
            if self._idle_over(now):
                self._silent = True
                return
            # The core's own timer starts again with everything that is sent: who keeps sending would never probe.
            if self._in_flight and now >= (self._probe_due if clock.stalled else self._unheard_from + self._patience):
                self._probe(now)
                return
        time = clock.tick(now, self._in_flight)
        timer = core.get_timer()
        if timer is None:
            return
        kind, deadline = timer
        # The core counts whole nanoseconds.
        if clock.when(deadline, paced=kind == "pacing") > now + 1e-9 or (clock.stalled and kind == "loss_detection"):
            return
        probes = core.pto_total
        self._quic.handle_timer(max(time, deadline))
        if core.pto_total > probes:
            self._stall(now)

    def _held(self, now: float) -> bool:
        if now < self._hold_until:
            return True
        if self._hold_until:
            self._hold_until = 0.0
            self._unheard_from = now
        return False

    def _idle_over(self, now: float) -> bool:
        parameters = self._quic._applied_transport_parameters
        limit = self._quic.idle_timeout
        if parameters is not None and parameters.max_idle_timeout:
            limit = min(limit, parameters.max_idle_timeout / 1000)
        self._idle_timeout = limit
        return now >= self._idle_from + limit

    def wake(self, now: float) -> None:
        core = self._quic._core
        if core is None or self._closing or self._silent:
            return
        self._hold_until = 0.0
        self._probes = 0
        if core.bytes_in_flight:
            self._probe(now)

    def restart(self, now: float, rtt: float) -> None:
        self.wake(now)
        core = self._quic._core
        if core is not None and self._quic._handshake_complete and not self._closing and not self._silent:
            # Probes are answered after a round trip; who is older than they by an eighth of one is lost (RFC 9002).
            self._begin_anew(now, 1.25 * rtt)
            self._excuse_until, self._excuses = self._restart_by + EXCUSE, EXCUSES

    def _begin_anew(self, now: float, wait: float) -> None:
        self._restart_next = now
        self._restart_from = now + wait
        self._restart_by = self._restart_from + MAX_HOLD

    def switch(self, now: float, rtt: float) -> None:
        core = self._quic._core
        if core is None or self._closing or self._silent or not core.bytes_in_flight or self._min_rtt is None:
            return
        self._hold_until = hold_until(now, max(core.latest_rtt, core.smoothed_rtt), self._min_rtt, rtt)

    def set_window_hint(self, size: int) -> None:
        """Nothing: qh3 takes a window only as it begins (`initial_window`). It keeps what it has in silence."""

    def _unanswered(self) -> bool:
        return self._first_flight is not None and not self._quic._core.received_authenticated_packet

    def _probe(self, now: float) -> None:
        """Have two datagrams of what is in flight sent again, whatever the congestion window says."""
        core = self._quic._core
        if self._unanswered():
            # The core would send datagrams of 1200 bytes from now on, for ever. It has seen no answer, so it may as
            # well believe that it sent these only now, and measure the round trip right.
            self._repeat = list(self._first_flight or ())
            self._doubtful = 0.0
            self._clock.skip(now)
        else:
            self._clock.tick(now, self._in_flight)
            probes = core.pto_total
            for _ in range(MAX_TIMERS):
                timer = core.get_timer()
                if timer is None or timer[0] == "close" or core.pto_total > probes:
                    break
                self._quic.handle_timer(timer[1])
        self._stall(now)

    def _stall(self, now: float) -> None:
        wait = self._patience * 2 ** min(self._probes, 8)
        self._probe_due = now + min(wait, MAX_FIRST_INTERVAL if self._unanswered() else MAX_PROBE_INTERVAL)
        self._probes += 1
        self._clock.stall()

    def streams_available(self) -> int:
        core = self._quic._core
        # (peer's cumulative limit for bidirectional streams, …); ids grow by four.
        return core.stream_limits[0] - self._quic.get_next_available_stream_id() // 4  # type: ignore[no-any-return]

    def open_stream(self) -> int:
        return self._quic._open_stream()  # type: ignore[no-any-return]  # the public way opens on first send

    def send(self, stream_id: int, data: bytes | bytearray | memoryview, end: bool = False) -> None:
        self._written += len(data)
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
        self._clock.resume()
        self._hold_until = self._restart_by = 0.0
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
        in_flight = core.bytes_in_flight
        # In flight are packets, so this is low by their headers, and high by what is lost and not yet sent again.
        self._acked = max(self._acked, self._written - core.get_send_buffer_size(None) - in_flight)
        return EngineCounters(
            core.smoothed_rtt,
            self._min_rtt,
            core.loss_total,
            core.congestion_window,
            self._sent,
            self._acked,
            in_flight,
            self._ran_dry,
        )

    def _sample_rtt(self, latest: float, now: float) -> None:
        # The core keeps the minimum to itself.
        if self._doubtful is not None:
            self._answered_first = self._answered_first or now
            if latest == self._doubtful or latest > now - self._answered_first:
                self._doubtful = latest  # of something sent before the first answer
                return
            self._doubtful = None
        if self._min_rtt is None or latest < self._min_rtt:
            self._min_rtt = latest


class Qh3Factory:
    """Engines for one identity. Configurations are shared by all connections of a role and datagram size."""

    def __init__(self, identity: Identity, config: TransportConfig) -> None:
        self._identity = identity
        self._config = config
        self._configurations: dict[tuple[bool, int], Any] = {}

    def warm_up(self) -> None:
        self.client(self._config.datagram_size).connect(0.0)  # the first key generation takes about 50 ms

    def client(self, datagram_size: int, initial_window: int = INITIAL_WINDOW) -> Qh3Engine:
        connection = _Connection(configuration=self._configuration(True, datagram_size))
        connection.initial_window = initial_window
        return Qh3Engine(connection, datagram_size)

    def server(self, original_cid: bytes, datagram_size: int, initial_window: int = INITIAL_WINDOW) -> Qh3Engine:
        configuration = self._configuration(False, datagram_size)
        connection = _Connection(configuration=configuration, original_destination_connection_id=original_cid)
        connection.initial_window = initial_window
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
                probe_datagram_size=False,  # paths are probed below QUIC, and its own probes would undo the window
                server_name=SERVER_NAME if is_client else None,
                signature_algorithms=[tls.SignatureAlgorithm.ED25519],
                supported_versions=[QuicProtocolVersion.VERSION_1],
                verify_mode=ssl.CERT_NONE,  # the key is compared instead, by the endpoint
            )
            if not is_client:
                made.load_cert_chain(self._identity.certificate_pem, self._identity.private_key_pem)
            self._configurations[key] = made
        return self._configurations[key]
