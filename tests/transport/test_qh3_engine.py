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


def test_configurations_are_made_once_per_role_and_size() -> None:
    factory = Qh3Factory(CLIENT, TransportConfig())
    factory.client(1280)
    factory.client(1280)
    factory.client(8900)
    factory.server(b"12345678", 1280)
    assert set(factory._configurations) == {(True, 1280), (True, 8900), (False, 1280)}
