"""What both adapters must do, alone and with each other. Fails when a library's private parts change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.transport.engines import SERVER, Events, Pair
from transport.config import TransportConfig
from transport.errors import ConfigError
from transport.identity import Identity
from transport.quic_engine import Termination, create_factory, exporter

LABEL = b"EXPORTER-test"


def test_the_server_shows_its_key_and_the_exporters_match(engines: tuple[str, str]) -> None:
    pair = Pair(*engines)
    assert pair.at_client.done
    assert pair.at_server.done
    assert pair.client.peer_id() == SERVER.peer_id
    assert pair.server.peer_id() is None
    assert pair.client.export(LABEL, 40) == pair.server.export(LABEL, 40)
    assert pair.client.export(LABEL, 32) != pair.client.export(b"EXPORTER-other", 32)
    assert pair.client.export(LABEL, 32) != Pair(*engines).client.export(LABEL, 32)


def test_streams_carry_bytes_both_ways_and_end(engines: tuple[str, str]) -> None:
    pair = Pair(*engines)
    stream = pair.client.open_stream()
    assert stream == 0
    pair.client.send(stream, b"question" * 1000)
    pair.client.send(stream, bytearray(b"!"), True)
    pair.run()
    assert pair.at_server.data == {0: b"question" * 1000 + b"!"}
    assert pair.at_server.ended == {0}
    pair.server.send(stream, memoryview(b"answer"), True)
    second = pair.server.open_stream()
    pair.server.send(second, b"mine")
    pair.run()
    assert pair.at_client.data == {0: b"answer", 1: b"mine"}
    assert pair.client.open_stream() == 4


def test_resets_and_stops_are_reported_with_their_codes(engines: tuple[str, str]) -> None:
    pair = Pair(*engines)
    stream = pair.client.open_stream()
    pair.client.send(stream, b"x")
    pair.run()
    pair.client.reset(stream, 77)
    pair.client.stop(stream, 78)
    pair.run()
    assert pair.at_server.resets == [(0, 77)]
    assert pair.at_server.stops == [(0, 78)]
    assert pair.at_client.resets == [(0, 78)]  # the library answers a stop with a reset by itself


@pytest.mark.parametrize("closer", ["client", "server"])
def test_a_close_is_known_at_once_with_code_and_reason(engines: tuple[str, str], closer: str) -> None:
    pair = Pair(*engines)
    left, right, events = pair.client, pair.server, pair.at_server
    if closer == "server":
        left, right, events = pair.server, pair.client, pair.at_client
    left.close(0x4001, "bye")
    last_word = left.datagrams(pair.now)
    assert len(last_word) == 1
    right.receive(last_word[0], pair.now)
    right.dispatch(events)
    assert events.end is not None
    assert (events.end.kind, events.end.code, events.end.reason) == ("application", 0x4001, "bye")


@pytest.mark.parametrize(("frame_type", "kind"), [(None, "application"), (0, "transport")])
def test_a_close_that_claims_to_be_silence_is_the_peer_s(
    engines: tuple[str, str], frame_type: int | None, kind: str
) -> None:
    """Code, frame type and text of the libraries' own idle event, but they came in a datagram."""
    pair = Pair(*engines)
    library: Any = pair.client
    library._quic.close(error_code=1, frame_type=frame_type, reason_phrase="Idle timeout")
    for datagram in pair.client.datagrams(pair.now):
        pair.server.receive(datagram, pair.now)
    pair.server.dispatch(pair.at_server)
    assert pair.at_server.end == Termination(kind, 1, "Idle timeout")  # type: ignore[arg-type]


def test_silence_ends_both_sides_after_the_idle_time_out(engines: tuple[str, str]) -> None:
    pair = Pair(*engines, idle_timeout=10.0)
    for engine, events in ((pair.client, pair.at_client), (pair.server, pair.at_server)):
        start = now = pair.now
        while events.end is None:
            due = engine.timer()
            assert due is not None
            now = max(now, due)
            engine.handle_timer(now)
            engine.datagrams(now)
            engine.dispatch(events)
        assert events.end.kind == "idle"
        assert 8 <= now - start <= 12


def test_counters_are_filled_after_a_round_trip(engines: tuple[str, str]) -> None:
    pair = Pair(*engines)
    for engine in (pair.client, pair.server):
        counters = engine.counters()
        assert counters.rtt is not None
        assert counters.min_rtt is not None
        assert 0 < counters.min_rtt <= counters.rtt + 0.01
        assert counters.congestion_window > 10_000
        assert counters.lost == 0


def test_backlog_is_what_waits_inside(engines: tuple[str, str]) -> None:
    pair = Pair(*engines)
    stream = pair.client.open_stream()
    pair.client.send(stream, bytes(500_000))
    assert pair.client.backlog() >= 500_000
    pair.run()
    assert pair.client.backlog() == 0
    assert len(pair.at_server.data[0]) == 500_000


def test_a_lost_datagram_is_counted_and_repaired(engines: tuple[str, str]) -> None:
    pair = Pair(*engines)
    stream = pair.client.open_stream()
    pair.client.send(stream, bytes(range(256)) * 40)
    sent = pair.client.datagrams(pair.now)
    for datagram in sent[1:]:
        pair.server.receive(datagram, pair.now)
    pair.run()
    assert pair.at_server.data[0] == bytes(range(256)) * 40
    assert pair.client.counters().lost >= 1


@pytest.mark.parametrize("size", [1280, 1452, 8900])
def test_large_datagrams_are_sent_both_ways(engines: tuple[str, str], size: int) -> None:
    pair = Pair(*engines, size=size)
    stream = pair.client.open_stream()
    pair.client.send(stream, bytes(20_000))
    to_server = pair.client.datagrams(pair.now)
    assert size - 40 <= max(map(len, to_server)) <= size
    for datagram in to_server:
        pair.server.receive(datagram, pair.now)
    pair.server.send(stream, bytes(20_000))
    pair.client.datagrams(pair.now)
    assert size - 40 <= max(map(len, pair.server.datagrams(pair.now))) <= size


def test_a_batch_of_datagrams_is_taken_at_once(engines: tuple[str, str]) -> None:
    pair = Pair(*engines)
    stream = pair.client.open_stream()
    pair.client.send(stream, bytes(5000))
    first, *batch = pair.client.datagrams(pair.now)
    batch = [datagram for datagram in batch if len(datagram) == len(batch[0])]
    assert len(batch) >= 2
    pair.server.receive(first, pair.now)
    pair.server.receive_batch(b"".join(batch), len(batch[0]), pair.now)
    pair.server.dispatch(pair.at_server)
    assert len(pair.at_server.data[0]) > 1100 * (1 + len(batch))
    pair.run()
    assert pair.at_server.data[0] == bytes(5000)


def test_many_streams_can_be_opened_and_the_limit_is_known(engines: tuple[str, str]) -> None:
    pair = Pair(*engines)
    assert pair.client.streams_available() >= 99
    for _ in range(64):
        pair.client.send(pair.client.open_stream(), b"x", True)
    assert pair.client.streams_available() >= 35
    pair.run()
    assert len(pair.at_server.data) == 64
    for stream in pair.at_server.data:
        pair.server.send(stream, b"y", True)
    pair.run()
    assert pair.client.streams_available() >= 64


@pytest.mark.parametrize("engine", ["qh3", "aioquic"])
def test_garbage_gets_no_answer_from_a_server(engine: str) -> None:
    server = create_factory(SERVER, TransportConfig(engine=engine)).server(b"12345678", 1280)
    server.receive(b"\x40" + bytes(1300), 1.0)
    server.dispatch(Events())
    assert server.timer() is None
    assert server.datagrams(1.0) == []


@pytest.mark.parametrize("engine", ["qh3", "aioquic"])
def test_warming_up_needs_no_network(engine: str) -> None:
    create_factory(Identity.generate(), TransportConfig(engine=engine)).warm_up()


@pytest.mark.parametrize("engine", ["qh3", "aioquic"])
def test_there_is_no_exporter_before_the_handshake(engine: str) -> None:
    client = create_factory(SERVER, TransportConfig(engine=engine)).client(1280)
    client.connect(0.0)
    with pytest.raises(RuntimeError, match="handshake"):
        client.export(LABEL, 32)


def test_other_engines_are_refused() -> None:
    with pytest.raises(ConfigError):
        TransportConfig(engine="msquic")


def test_the_exporter_is_rfc_8446s() -> None:
    # HKDF-Expand-Label chain computed with the cryptography package from the same inputs.
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    def expand(secret: bytes, label: bytes, context: bytes, length: int) -> bytes:
        full = b"tls13 " + label
        info = length.to_bytes(2, "big") + bytes([len(full)]) + full + bytes([len(context)]) + context
        return HKDFExpand(hashes.SHA256(), length, info).derive(secret)

    digest = hashes.Hash(hashes.SHA256())
    empty = digest.finalize()
    secret = expand(b"m" * 32, LABEL, empty, 32)
    assert exporter("sha256", b"m" * 32, LABEL, 100) == expand(secret, b"exporter", empty, 100)
