from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from transport.config import TransportConfig
from transport.emulation import LinkEmulation
from transport.identity import PeerId
from transport.peer_socket import IPV6_SAFE_DATAGRAM, Path, PeerSocket, Route

PEER = PeerId(b"\x01" * 32)
SMALL, BIG = Path("direct-lan", ("192.0.2.1", 1), 1280), Path("loopback", ("127.0.0.1", 1), 8900)


def nothing(*_: object) -> None:
    pass


def open_socket(config: TransportConfig) -> PeerSocket:
    return PeerSocket(("127.0.0.1", 0), config, on_quic=nothing, on_drained=nothing, on_writable=nothing)


@pytest.fixture
async def peer_socket() -> AsyncIterator[PeerSocket]:
    opened = open_socket(TransportConfig())
    yield opened
    opened.close()


async def test_paths_are_named_and_sized_by_where_they_lead(
    peer_socket: PeerSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.peer_socket.path_mtu", lambda _: 65536)
    assert peer_socket.path_to(("127.0.0.1", 5)) == Path("loopback", ("127.0.0.1", 5), 8900)
    assert peer_socket.path_to(("192.168.1.2", 5)) == Path("direct-lan", ("192.168.1.2", 5), 1280)
    assert peer_socket.path_to(("8.8.8.8", 5)) == Path("direct-public", ("8.8.8.8", 5), 1280)
    assert peer_socket.path_to(("2606:4700::1", 5)).datagram_size == IPV6_SAFE_DATAGRAM
    assert peer_socket.path_to(("fe80::1%eth0", 5)).kind == "direct-lan"


@pytest.mark.parametrize(("mtu", "size"), [(65536, 8900), (8948, 8900), (8947, 1280), (1500, 1280), (None, 1280)])
async def test_loopback_datagrams_are_large_only_where_the_interface_carries_them(
    peer_socket: PeerSocket, monkeypatch: pytest.MonkeyPatch, mtu: int | None, size: int
) -> None:
    monkeypatch.setattr("transport.peer_socket.path_mtu", lambda _: mtu)
    assert peer_socket.path_to(("127.0.0.1", 5)).datagram_size == size


async def test_an_emulated_link_uses_the_datagrams_of_a_real_one() -> None:
    emulated = open_socket(TransportConfig(emulation=LinkEmulation(rtt=0.01)))
    assert emulated.path_to(("127.0.0.1", 5)).datagram_size == 1280
    emulated.close()


async def test_connections_to_one_peer_share_a_route(peer_socket: PeerSocket) -> None:
    first, second = Route(BIG), Route(BIG)
    assert peer_socket.adopt(PEER, first, restarted=False, in_use=False) is first
    assert peer_socket.adopt(PEER, second, restarted=False, in_use=True) is first
    assert first.path is BIG


async def test_a_route_that_is_in_use_stays_unless_the_new_path_is_needed(peer_socket: PeerSocket) -> None:
    other = Path("direct-lan", ("192.0.2.9", 1), 1280)
    route = peer_socket.adopt(PEER, Route(SMALL), restarted=False, in_use=False)
    peer_socket.adopt(PEER, Route(other), restarted=False, in_use=True)
    assert route.path is SMALL
    peer_socket.adopt(PEER, Route(BIG), restarted=False, in_use=True)
    assert route.path is BIG
    peer_socket.adopt(PEER, Route(other), restarted=True, in_use=True)
    assert route.path is other
    peer_socket.adopt(PEER, Route(SMALL), restarted=False, in_use=False)
    assert route.path is SMALL


async def test_a_peer_without_connections_is_forgotten(peer_socket: PeerSocket) -> None:
    peer_socket.adopt(PEER, Route(SMALL), restarted=False, in_use=False)
    fresh = Route(BIG)
    assert peer_socket.adopt(PEER, fresh, restarted=False, in_use=False) is fresh
