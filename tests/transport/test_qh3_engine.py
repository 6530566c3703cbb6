"""What qh3_engine.py relies on inside qh3. A failure here means: read the library's changes before raising the pin."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from tests.transport.engines import CLIENT, Pair
from transport.config import BURST, TransportConfig
from transport.qh3_engine import MAX_UDP_PAYLOAD, Qh3Engine, Qh3Factory


def quic_of(engine: object) -> Any:
    assert isinstance(engine, Qh3Engine)
    return engine._quic


def test_the_version_is_the_one_this_was_written_for() -> None:
    assert version("qh3") == "2.1.0"


def test_the_private_parts_are_there() -> None:
    pair = Pair("qh3", "qh3")
    quic = quic_of(pair.client)
    for name in ("_close_event", "_core", "_drain_core", "_handshake_complete", "_open_stream", "_tls"):
        assert hasattr(quic, name)
    for name in ("poll_transmit", "receive_gro_buffer", "send_stream", "get_send_buffer_size", "stream_limits"):
        assert hasattr(quic._core, name)
    for name in ("bytes_in_flight", "congestion_window", "latest_rtt", "loss_total", "pto_count", "pto_total"):
        assert getattr(quic._core, name) is not None
    assert quic._core.received_authenticated_packet is True
    assert quic._handshake_complete is True
    assert quic.tls.key_schedule.algorithm in (256, 384)


@pytest.mark.parametrize("server", ["qh3", "aioquic"])
def test_clients_announce_that_they_take_any_datagram(server: str) -> None:
    pair = Pair("qh3", server)
    if server == "qh3":
        parameters = quic_of(pair.server)._applied_transport_parameters
        assert parameters.max_udp_payload_size == MAX_UDP_PAYLOAD
    assert pair.at_server.done


def test_a_transmit_stops_at_the_burst_limit_and_says_so() -> None:
    pair = Pair("qh3", "qh3")
    stream = pair.client.open_stream()
    for _ in range(12):  # open the congestion window
        pair.client.send(stream, bytes(200_000))
        pair.run()
    pair.client.send(stream, bytes(400_000))
    assert len(pair.client.datagrams(pair.now)) == BURST
    assert pair.client.more
    while pair.client.more:
        assert len(pair.client.datagrams(pair.now)) <= BURST
    pair.run()


def test_a_client_s_small_hello_is_enough_for_a_server() -> None:
    """aioquic pads behind the Initial packet; qh3 alone would count only the packet, and raise on its third."""
    pair = Pair("aioquic", "qh3")
    assert pair.at_client.done
    assert quic_of(pair.server)._retry_source_connection_id is None


def test_streams_beyond_the_peer_s_limit_are_known_not_to_fit() -> None:
    pair = Pair("qh3", "qh3")
    for _ in range(pair.client.streams_available()):
        pair.client.open_stream()
    assert pair.client.streams_available() == 0
    with pytest.raises(ValueError, match="limit"):
        pair.client.open_stream()


def test_the_core_has_no_idle_time_out_but_the_peer_is_told_ours() -> None:
    """It would end the connection as soon as its probe timer is called with the late time that it waits for."""
    pair = Pair("qh3", "qh3")
    for engine in (pair.client, pair.server):
        quic = quic_of(engine)
        assert quic._applied_transport_parameters.max_idle_timeout == 10_000
        assert quic._core.get_timer() is None
        quic.handle_timer(pair.now + 1e6)
        assert quic._core.state == "connected"


def test_the_probe_timer_may_be_called_early_and_sends_past_a_full_window() -> None:
    pair = Pair("qh3", "qh3")
    core = quic_of(pair.client)._core
    pair.client.send(pair.client.open_stream(), bytes(500_000))
    for _ in range(10):  # its pacer wants a little time
        pair.client.datagrams(pair.now)
        pair.now += 0.001
    assert core.congestion_window - core.bytes_in_flight < 1280
    kind, deadline = core.get_timer()
    assert kind == "loss_detection"
    assert deadline > pair.now
    core.handle_timer(deadline)
    assert core.pto_count == 1
    assert len(pair.client.datagrams(pair.now)) == 2


@pytest.mark.parametrize(("window", "expected"), [(0, 14_520), (60_000, 60_000), (1 << 20, 131_070)])
def test_the_initial_window_is_two_datagrams_of_a_size_that_is_taken_back(window: int, expected: int) -> None:
    client = Qh3Factory(CLIENT, TransportConfig()).client(1452, window)
    client.connect(1.0)
    core = quic_of(client)._core
    assert core.congestion_window == expected
    assert core.active_path[5] == 1452
    assert max(map(len, client.datagrams(1.0))) <= 1452


def test_the_core_forgets_its_window_after_two_seconds_of_its_own_time() -> None:
    """What core_clock.py and the extra pings are for; when this fails, they may not be needed any more."""
    pair = Pair("qh3", "qh3")
    core = quic_of(pair.client)._core
    stream = pair.client.open_stream()
    pair.client.send(stream, b"x")
    pair.run()
    window = core.congestion_window
    assert window > 100_000
    core.send_stream(stream, b"x", False)
    assert core.poll_transmit(pair.now + 5.0) is not None
    assert core.congestion_window < 15_000


def test_configurations_are_made_once_per_role_and_size() -> None:
    factory = Qh3Factory(CLIENT, TransportConfig())
    factory.client(1280)
    factory.client(1280)
    factory.client(8900)
    factory.server(b"12345678", 1280)
    assert set(factory._configurations) == {(True, 1280), (True, 8900), (False, 1280)}
