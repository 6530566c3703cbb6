"""Datagrams on whatever path: sizes, pieces, the second path of a doubt, relays, what is sent again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from transport.config import TransportConfig
from transport.emulation import LinkEmulation
from transport.errors import Address
from transport.identity import PeerId
from transport.peer_socket import PeerSocket, SocketHandlers
from transport.proto import segments, stun
from transport.proto.addresses import PathId, PathKind
from transport.proto.candidates import InterfaceAddress
from transport.proto.disco_seal import MAGIC
from transport.proto.path_config import RELAY_SIZE, UNPROBED_SIZE
from transport.route import MAX_REPLAY_BYTES, Path, Route

PEER = PeerId(b"\x01" * 32)
QUIC = b"\x40"


@dataclass
class Inbox:
    """Takes everything that arrives."""

    quic: list[tuple[bytes, PathId, PeerId | None]] = field(default_factory=list)
    disco: list[tuple[bytes, PathId, PeerId | None]] = field(default_factory=list)
    stun: list[tuple[bytes, Address]] = field(default_factory=list)

    def handlers(self) -> SocketHandlers:
        def quic(data: bytes, segment: int, source: PathId, sender: PeerId | None) -> None:
            self.quic += [(data[at : at + segment], source, sender) for at in range(0, len(data), segment)]

        return SocketHandlers(
            on_quic=quic,
            on_drained=lambda: None,
            on_writable=lambda: None,
            on_disco=lambda *arrived: self.disco.append(arrived),
            on_stun=lambda *arrived: self.stun.append(arrived),
        )


@dataclass
class FakeRelays:
    """What is sent through relays."""

    sent: list[tuple[str, PeerId, list[bytes], bool]] = field(default_factory=list)
    up: bool = True

    def send(self, url: str, peer: PeerId, datagrams: Sequence[bytes], disco: bool = False) -> bool:
        self.sent.append((url, peer, list(datagrams), disco))
        return self.up


def open_socket(config: TransportConfig | None = None, inbox: Inbox | None = None) -> PeerSocket:
    return PeerSocket(("127.0.0.1", 0), config or TransportConfig(), (inbox or Inbox()).handlers())


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
async def peer_socket(inbox: Inbox) -> AsyncIterator[PeerSocket]:
    opened = open_socket(inbox=inbox)
    yield opened
    opened.close()


@pytest.fixture
async def other() -> AsyncIterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.bind(("127.0.0.1", 0))
        opened.setblocking(False)
        yield opened


async def received(opened: socket.socket) -> bytes:
    async with asyncio.timeout(5):
        return await asyncio.get_running_loop().sock_recv(opened, 65536)


async def until(found: Sequence[object], count: int = 1) -> None:
    async with asyncio.timeout(5):
        while len(found) < count:  # noqa: ASYNC110 - filled by the socket's callbacks
            await asyncio.sleep(0.005)


async def test_paths_are_named_and_sized_by_where_they_lead(
    peer_socket: PeerSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.peer_socket.path_mtu", lambda _: 65536)
    peer_socket.set_interfaces([InterfaceAddress("eth0", "192.168.1.7", prefix=24)])
    assert peer_socket.direct(("127.0.0.1", 5)) == Path(PathKind.LOOPBACK, PathId(("127.0.0.1", 5)), 8900)
    assert peer_socket.direct(("192.168.1.7", 5)) == Path(PathKind.LOOPBACK, PathId(("192.168.1.7", 5)), 8900)
    assert peer_socket.direct(("192.168.1.2", 5)) == Path(PathKind.LAN, PathId(("192.168.1.2", 5)), UNPROBED_SIZE)
    assert peer_socket.direct(("8.8.8.8", 5)) == Path(PathKind.PUBLIC, PathId(("8.8.8.8", 5)), UNPROBED_SIZE)
    assert peer_socket.direct(("2606:4700::1", 5)).datagram_size == UNPROBED_SIZE
    relayed = PathId(relay="https://relay.example")
    assert peer_socket.path_of(relayed) == Path(PathKind.RELAY, relayed, RELAY_SIZE)


@pytest.mark.parametrize(("mtu", "size"), [(65536, 8900), (8948, 8900), (8947, 1200), (1500, 1200), (None, 1200)])
async def test_loopback_datagrams_are_large_only_where_the_interface_carries_them(
    peer_socket: PeerSocket, monkeypatch: pytest.MonkeyPatch, mtu: int | None, size: int
) -> None:
    monkeypatch.setattr("transport.peer_socket.path_mtu", lambda _: mtu)
    path = peer_socket.direct(("127.0.0.1", 5))
    assert path.datagram_size == size
    assert peer_socket.quic_size(path) == max(size, 1452)


async def test_an_emulated_link_uses_the_datagrams_of_a_real_one() -> None:
    emulated = open_socket(TransportConfig(emulation=LinkEmulation(rtt=0.01)))
    path = emulated.direct(("127.0.0.1", 5))
    assert (path.datagram_size, emulated.quic_size(path)) == (1452, 1452)
    emulated.close()


async def test_a_small_path_gets_a_datagram_in_pieces_and_the_other_side_puts_them_together(
    peer_socket: PeerSocket, inbox: Inbox
) -> None:
    other_inbox = Inbox()
    receiver = open_socket(inbox=other_inbox)
    small = Path(PathKind.PUBLIC, PathId(receiver.address), 1200)
    datagrams = [QUIC + bytes([number]) * 1451 for number in range(5)] + [QUIC + b"short"]
    peer_socket.send(Route(small), datagrams)
    await until(other_inbox.quic, 6)
    assert sorted(data for data, _, _ in other_inbox.quic) == sorted(datagrams)
    assert {source for _, source, _ in other_inbox.quic} == {PathId(peer_socket.address)}
    receiver.close()


async def test_no_piece_is_larger_than_the_path_carries(peer_socket: PeerSocket, other: socket.socket) -> None:
    small = Path(PathKind.PUBLIC, PathId(other.getsockname()), 1200)
    peer_socket.send(Route(small), [QUIC + bytes(8899)])
    pieces = [await received(other) for _ in range(8)]
    assert all(len(piece) <= 1200 and piece[0] == segments.MAGIC for piece in pieces)


async def test_what_arrives_is_sorted_by_its_first_bytes(
    peer_socket: PeerSocket, inbox: Inbox, other: socket.socket
) -> None:
    question = stun.binding_request(bytes(12))
    for datagram in (QUIC + b"quic", MAGIC + b"disco", question, b"\x00", b"\x21", b"\x21broken", b"?"):
        other.sendto(datagram, peer_socket.address)
    source = PathId(other.getsockname())
    await until(inbox.stun)
    assert inbox.quic == [(QUIC + b"quic", source, None)]
    assert inbox.disco == [(MAGIC + b"disco", source, None)]
    assert inbox.stun == [(question, other.getsockname())]
    await asyncio.sleep(0.05)
    assert peer_socket.counters.unknown == 1 + (b"?"[0] & 0x40 == 0)


async def test_in_doubt_everything_goes_two_ways(peer_socket: PeerSocket, other: socket.socket) -> None:
    relays = peer_socket.relays = FakeRelays()
    route = Route(Path(PathKind.PUBLIC, PathId(other.getsockname()), 1452), PEER)
    route.also = peer_socket.path_of(PathId(relay="http://relay"))
    peer_socket.send(route, [QUIC + b"twice"])
    assert await received(other) == QUIC + b"twice"
    assert relays.sent == [("http://relay", PEER, [QUIC + b"twice"], False)]


async def test_all_datagrams_of_one_transmit_go_to_a_relay_together_whatever_their_size(
    peer_socket: PeerSocket,
) -> None:
    relays = peer_socket.relays = FakeRelays()
    datagrams = [QUIC + bytes(8899)] * 20
    peer_socket.send(Route(peer_socket.path_of(PathId(relay="http://relay")), PEER), datagrams)
    assert relays.sent == [("http://relay", PEER, datagrams, False)]
    relays.up = False
    peer_socket.send_disco(PathId(relay="http://relay"), PEER, b"urgent")
    assert relays.sent[-1] == ("http://relay", PEER, [b"urgent"], True)
    assert peer_socket.counters.relay_down == 1


async def test_what_a_relay_delivers_keeps_the_name_that_it_gives(peer_socket: PeerSocket, inbox: Inbox) -> None:
    peer_socket.on_relayed("http://relay", PEER, [QUIC + b"quic", MAGIC + b"disco", b"\x00junk", b"\x21piece"], False)
    source = PathId(relay="http://relay")
    assert inbox.quic == [(QUIC + b"quic", source, PEER)]
    assert inbox.disco == [(MAGIC + b"disco", source, PEER)]
    assert peer_socket.counters.unknown == 2


async def test_datagrams_of_a_frame_arrive_together_and_all_frames_of_one_read_are_answered_once(
    peer_socket: PeerSocket, inbox: Inbox
) -> None:
    batches: list[tuple[int, int]] = []
    drained: list[int] = []
    handlers = inbox.handlers()
    peer_socket._handlers = handlers
    handlers.on_quic = lambda data, segment, *_: batches.append((len(data), segment))
    handlers.on_drained = lambda: drained.append(len(batches))
    sizes = [100, 100, 40, 100, 100, 100, 7, 7, 9]
    peer_socket.on_relayed("http://relay", PEER, [QUIC * size for size in sizes], False)
    peer_socket.on_relayed("http://relay", PEER, [QUIC * 5], False)
    assert batches == [(240, 100), (307, 100), (7, 7), (9, 9), (5, 5)]
    assert drained == []  # what the application says to these in the same turn goes out with the acknowledgements
    await asyncio.sleep(0)
    assert drained == [5]


async def test_what_was_sent_last_can_be_sent_again(peer_socket: PeerSocket, other: socket.socket) -> None:
    relays = peer_socket.relays = FakeRelays()
    route = Route(Path(PathKind.PUBLIC, PathId(other.getsockname()), 1452), PEER)
    route.kept = True
    relay = peer_socket.path_of(PathId(relay="http://relay"))
    peer_socket.replay(route, relay, since=0.0)
    assert relays.sent == []
    for number in range(200):
        peer_socket.send(route, [QUIC + number.to_bytes(2, "big") + bytes(1397)] * 10)
    peer_socket.replay(route, relay, since=0.0)
    again = [datagram for _, _, batch, _ in relays.sent for datagram in batch]
    assert 0 < sum(map(len, again)) <= MAX_REPLAY_BYTES
    assert max(len(batch) for _, _, batch, _ in relays.sent) <= 12  # the first ones need not wait for the last ones
    assert again[-1][1:3] == (199).to_bytes(2, "big")
    assert again == sorted(again)
    assert not route.to_replay(0.0, asyncio.get_running_loop().time() + 60)


async def test_auxiliary_sockets_are_the_peers_own(peer_socket: PeerSocket, inbox: Inbox, other: socket.socket) -> None:
    assert peer_socket.open_auxiliary(PEER, 3) == 3
    peer_socket.send_disco(PathId(other.getsockname(), socket=2), PEER, b"\x1dprobe")
    async with asyncio.timeout(5):
        data, source = await asyncio.get_running_loop().sock_recvfrom(other, 2048)
    assert data == b"\x1dprobe"
    assert source != peer_socket.address
    other.sendto(QUIC + b"answer", source)
    await until(inbox.quic)
    assert inbox.quic == [(QUIC + b"answer", PathId(other.getsockname(), socket=2), None)]
    assert peer_socket.path_of(PathId(other.getsockname(), socket=2)).kind is PathKind.PUNCHED
    peer_socket.close_auxiliary(PEER, frozenset([2]))
    peer_socket.send_disco(PathId(other.getsockname(), socket=2), PEER, b"\x1dstill there")
    assert await received(other) == b"\x1dstill there"
    peer_socket.send_disco(PathId(other.getsockname(), socket=1), PEER, b"\x1dclosed: nothing happens")


async def test_emulation_delays_every_kind_of_datagram(other: socket.socket) -> None:
    inbox = Inbox()
    slow = open_socket(TransportConfig(emulation=LinkEmulation(rtt=0.2)), inbox)
    relays = slow.relays = FakeRelays()
    loop = asyncio.get_running_loop()
    began = loop.time()
    slow.send_disco(PathId(relay="http://relay"), PEER, b"\x1ddisco")
    slow.send(Route(slow.path_of(PathId(relay="http://relay")), PEER), [QUIC + b"a", QUIC + b"b"])
    slow.on_relayed("http://relay", PEER, [QUIC + b"in"], False)
    other.sendto(MAGIC + b"in", slow.address)
    assert relays.sent == []
    await until(relays.sent, 2)
    await until(inbox.disco)
    assert loop.time() - began >= 0.095
    assert [(datagrams, disco) for _, _, datagrams, disco in relays.sent] == [
        ([b"\x1ddisco"], True),
        ([QUIC + b"a", QUIC + b"b"], False),
    ]
    assert inbox.quic == [(QUIC + b"in", PathId(relay="http://relay"), PEER)]
    slow.close()
