from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from tests.transport.virtual_time import run_in_virtual_time
from transport import interfaces
from transport.config import TransportConfig
from transport.errors import Address
from transport.proto import stun
from transport.proto.addresses import CandidateSource, NatKind
from transport.proto.candidates import InterfaceAddress
from transport.reflector_checks import KEEP_SECONDS, MAX_SILENT_SECONDS, STUN_BURST
from transport.surroundings import OBSERVED_MINIMUM, Surroundings

PORT = 4433
A1, A2 = ("11.0.0.1", 3478), ("11.0.0.1", 3479)
B1, B2 = ("11.0.0.2", 3478), ("11.0.0.2", 3479)
SIX = ("2001:db8:f::1", 3478)
LAN = [InterfaceAddress("lo", "127.0.0.1", 8), InterfaceAddress("wlan0", "192.168.1.7", 24, preferred=True)]
PUBLIC = [InterfaceAddress("eth0", "11.7.7.7", 24, preferred=True)]


class FakeMapper:
    """A router that grants what the test says."""

    def __init__(self, port: int, on_mapped: Callable[[Address | None, str], None]) -> None:
        self.port, self.on_mapped = port, on_mapped
        self.started = self.refreshed = self.closed = 0

    def start(self) -> None:
        self.started += 1

    def refresh(self) -> None:
        self.refreshed += 1

    async def close(self) -> None:
        self.closed += 1


class World:
    """A network as one node sees it: its interfaces, a NAT that `sees` for each reflector, reflectors that answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses = LAN
        self.routes = ["wlan0 by 192.168.1.1"]
        self.sees: Callable[[Address], Address | None] = lambda _reflector: ("11.5.5.5", 48259)
        self.asked: list[Address] = []
        self.requests: list[bytes] = []
        self.lose = 0  # so many requests vanish
        self.changes = 0
        self.news: list[str] = []
        self.mappers: list[FakeMapper] = []
        self.open: list[Surroundings] = []
        self._moved = asyncio.Event()
        monkeypatch.setattr(interfaces, "addresses", lambda: list(self.addresses))
        monkeypatch.setattr(interfaces, "default_routes", lambda: list(self.routes))

    def node(
        self, listen_host: str = "::", *, port_mapping: bool = False, advertise: tuple[Address, ...] = ()
    ) -> Surroundings:
        config = TransportConfig(port_mapping=port_mapping, advertise=advertise)
        made = Surroundings(
            config, PORT, listen_host, self.send, self.changed, self.news.append, make_mapper=self.mapper
        )
        self.open.append(made)
        return made

    def mapper(self, port: int, on_mapped: Callable[[Address | None, str], None]) -> FakeMapper:
        self.mappers.append(FakeMapper(port, on_mapped))
        return self.mappers[-1]

    def send(self, data: bytes, destination: Address) -> None:
        self.asked.append(destination)
        self.requests.append(data)
        self._moved.set()
        transaction = stun.parse_binding_request(data)
        seen = self.sees(destination)
        assert transaction is not None
        if self.lose:
            self.lose -= 1
        elif seen is not None:
            answer = stun.make_binding_response(transaction, seen)
            asyncio.get_running_loop().call_soon(self.open[-1].on_stun, answer, destination)

    def changed(self) -> None:
        self.changes += 1
        self._moved.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something has moved and `holds`."""
        async with asyncio.timeout(3600):
            while not holds():
                self._moved.clear()
                await self._moved.wait()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A laptop behind an easy NAT."""
    return World(monkeypatch)


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test of `world` in virtual time and close what it made."""

    @functools.wraps(test)
    def run(world: World, **parameters: object) -> None:
        async def whole() -> None:
            try:
                await test(world, **parameters)
            finally:
                for made in world.open:
                    await made.close()

        run_in_virtual_time(whole())

    return run


def now() -> float:
    """Virtual seconds since the test began."""
    return asyncio.get_running_loop().time()


def look(node: Surroundings) -> None:
    """As when the system tells that something may have changed."""
    assert node._watch is not None
    node._watch.look()


def texts(node: Surroundings) -> list[str]:
    return [f"{c.address[0]} {c.address[1]} {c.source.name}" for c in node.candidates]


@virtual_time
async def test_without_reflectors_a_node_knows_its_lan(world: World) -> None:
    node = world.node()
    await node.start()
    assert texts(node) == ["192.168.1.7 4433 INTERFACE"]
    assert node.nat.kind == NatKind.UNKNOWN
    assert not world.asked
    assert not world.changes


@virtual_time
async def test_an_easy_nat_is_found_and_its_address_told(world: World) -> None:
    node = world.node()
    node.set_reflectors([A1, A2, B1, B2])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    assert texts(node) == ["192.168.1.7 4433 INTERFACE", "11.5.5.5 48259 REFLECTED"]
    assert world.changes == 1
    assert world.asked == [A1, B1, A2, B2]  # hosts first
    assert all(len(request) >= 44 for request in world.requests)  # no reflector amplifies


@virtual_time
async def test_reflectors_may_come_later_and_the_same_again_change_nothing(world: World) -> None:
    node = world.node()
    await node.start()
    node.set_reflectors([A1, B1])
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    asked = len(world.asked)
    node.set_reflectors([B1, A1])
    node.set_reflectors([])  # all relays away for a moment
    assert len(world.asked) == asked
    assert node.nat.kind == NatKind.EASY


@pytest.mark.parametrize(("step", "told"), [(1, 40003), (0, None)])
@virtual_time
async def test_a_hard_nat_and_the_step_of_its_ports(world: World, step: int, told: int | None) -> None:
    ports: dict[Address, int] = {}
    chance = Random(7)

    def sees(reflector: Address) -> Address:
        return "11.5.5.5", ports.setdefault(reflector, 40000 + len(ports) if step else chance.randint(1024, 65535))

    world.sees = sees
    node = world.node()
    node.set_reflectors([A1, A2, B1, B2])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.HARD)
    assert node.nat.port_delta == step
    reflected = [c.address for c in node.candidates if c.source == CandidateSource.REFLECTED]
    assert len(reflected) == 1
    assert told is None or reflected == [("11.5.5.5", told)]


@virtual_time
async def test_a_public_node_asks_once_and_is_then_quiet(world: World) -> None:
    world.addresses, world.sees = PUBLIC, lambda _reflector: ("11.7.7.7", PORT)
    node = world.node()
    node.set_reflectors([A1, B1])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.NONE)
    assert texts(node) == ["11.7.7.7 4433 INTERFACE"]
    await asyncio.sleep(3600)
    assert len(world.asked) == 2


@virtual_time
async def test_behind_a_nat_the_mapping_is_kept_and_watched(world: World) -> None:
    node = world.node()
    node.set_reflectors([A1, A2, B1, B2])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    await asyncio.sleep(600)
    later = world.asked[4:]
    assert set(later) == {A1, B1}
    assert 2 * 600 / KEEP_SECONDS * 0.9 <= len(later) <= 2 * 600 / KEEP_SECONDS * 1.2  # 5 datagrams a minute
    assert world.changes == 1
    world.sees = lambda _reflector: ("11.5.5.5", 50001)  # the NAT was restarted
    restarted, asked = now(), len(world.asked)
    await world.until(lambda: node.nat.reflected == (("11.5.5.5", 50001),))
    assert now() - restarted < 1.2 * KEEP_SECONDS
    await asyncio.sleep(1)
    assert world.asked[asked:] == [A1, B1, A1, B1, A2, B2]  # everyone was asked whether it is still the same kind
    assert node.nat.kind == NatKind.EASY


@virtual_time
async def test_lost_datagrams_change_nothing(world: World) -> None:
    node = world.node()
    node.set_reflectors([A1, B1])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    changes = world.changes
    for lost in (1, 2, 3, 4):  # four are both tries of both reflectors
        world.lose = lost
        await asyncio.sleep(2 * KEEP_SECONDS)
        assert world.lose == 0
    assert (node.nat.kind, world.changes) == (NatKind.EASY, changes)


@virtual_time
async def test_blocked_udp_is_found_within_three_seconds_and_asked_less_and_less(world: World) -> None:
    world.sees = lambda _reflector: None
    node = world.node()
    node.set_reflectors([A1, A2, B1, B2])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.BLOCKED)
    assert now() <= 3
    assert len(world.asked) == 8  # two tries each
    await asyncio.sleep(60)
    assert len(world.asked) <= 20
    await asyncio.sleep(3600)
    asked = len(world.asked)
    await asyncio.sleep(3600)
    assert len(world.asked) - asked <= 4 * 7
    world.sees = lambda _reflector: ("11.5.5.5", 1)
    opened = now()
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    assert now() - opened <= 1.2 * MAX_SILENT_SECONDS


@virtual_time
async def test_udp_that_becomes_blocked_is_found(world: World) -> None:
    node = world.node()
    node.set_reflectors([A1, A2, B1, B2])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    world.sees = lambda _reflector: None
    began = now()
    await world.until(lambda: node.nat.kind == NatKind.BLOCKED)
    assert now() - began <= 4 * KEEP_SECONDS
    assert texts(node) == ["192.168.1.7 4433 INTERFACE"]


@virtual_time
async def test_however_the_network_flaps_stun_stays_bounded(world: World) -> None:
    world.sees = lambda _reflector: None
    node = world.node()
    node.set_reflectors([A1, A2, B1, B2])
    await node.start()
    for round_ in range(600):  # ten minutes
        world.addresses = [InterfaceAddress("wlan0", f"192.168.{round_ % 250}.7", 24)]
        look(node)
        await asyncio.sleep(1)
    assert len(world.news) == 600
    assert len(world.asked) <= STUN_BURST + 10 * 20
    assert node.stun.withheld


@virtual_time
async def test_another_network_is_told_at_once_and_asked_about(world: World) -> None:
    node = world.node()
    node.set_reflectors([A1, B1])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    world.addresses = [InterfaceAddress("eth1", "10.0.0.3", 24)]
    world.sees = lambda _reflector: ("11.6.6.6", 7)
    look(node)
    assert world.news == ["address 192.168.1.7 gone, address 10.0.0.3 on eth1 new"]
    assert "10.0.0.3 4433 INTERFACE" in texts(node)
    await world.until(lambda: texts(node) == ["10.0.0.3 4433 INTERFACE", "11.6.6.6 7 REFLECTED"])
    assert node.last_change == world.news[0]


@virtual_time
async def test_a_network_without_udp_takes_the_old_address_away(world: World) -> None:
    node = world.node()
    node.set_reflectors([A1, B1])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    world.addresses = [InterfaceAddress("eth1", "10.0.0.3", 24)]
    world.sees = lambda _reflector: None
    look(node)
    await world.until(lambda: node.nat.kind == NatKind.BLOCKED)
    assert texts(node) == ["10.0.0.3 4433 INTERFACE"]


@virtual_time
async def test_a_network_without_ipv4_takes_the_old_address_away_at_once(world: World) -> None:
    node = world.node()
    node.set_reflectors([A1, B1])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    await asyncio.sleep(10)
    world.addresses = [InterfaceAddress("eth1", "2001:db8::7", 64)]
    look(node)
    assert texts(node) == ["2001:db8::7 4433 INTERFACE"]
    assert node.nat.kind == NatKind.UNKNOWN


@virtual_time
async def test_answers_nobody_asked_for_are_ignored(world: World) -> None:
    world.sees = lambda _reflector: None
    node = world.node()
    node.set_reflectors([A1, B1])
    await node.start()
    transaction = stun.parse_binding_request(world.requests[0])
    assert transaction is not None
    lie = ("11.9.9.9", 9)
    node.on_stun(stun.make_binding_response(bytes(12), lie), A1)
    node.on_stun(stun.make_binding_response(transaction, lie), B1)
    node.on_stun(stun.make_binding_response(transaction, lie), ("11.0.0.1", 9))
    node.on_stun(stun.binding_request(transaction), A1)
    node.on_stun(b"\x01\x01garbage", A1)
    node.on_stun(b"", ("nonsense", 0))
    assert node.stun.ignored == 6
    assert node.nat.reflected == ()
    node.on_stun(stun.make_binding_response(transaction, ("11.5.5.5", 1)), A1)
    assert node.stun.answers == 1


@virtual_time
async def test_a_late_answer_still_counts(world: World) -> None:
    world.sees = lambda _reflector: None
    node = world.node()
    node.set_reflectors([A1, B1])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.BLOCKED)
    for request, asked in zip(world.requests[:2], world.asked[:2], strict=True):
        transaction = stun.parse_binding_request(request)
        assert transaction is not None
        node.on_stun(stun.make_binding_response(transaction, ("11.5.5.5", 1)), asked)
    assert node.nat.kind == NatKind.EASY


@virtual_time
async def test_only_reflectors_that_can_be_reached_are_asked(world: World) -> None:
    node = world.node()
    node.set_reflectors([SIX, ("", 1), ("11.0.0.1", 0), ("name.example", 4), ("fe80::1", 7), ("224.0.0.1", 5), A1])
    await node.start()
    assert world.asked == [A1]
    six = InterfaceAddress("wlan0", "2001:db8::7", 64)
    world.addresses = [*LAN, six]
    look(node)
    await world.until(lambda: SIX in world.asked)
    other = world.node("127.0.0.1")
    other.set_reflectors([A1])
    await other.start()
    assert texts(other) == ["127.0.0.1 4433 INTERFACE"]


# -- peers' observations


@virtual_time
async def test_one_peer_is_believed_only_where_nothing_else_is_known(world: World) -> None:
    node = world.node()
    await node.start()
    node.observed_by_peer("peer 1", ("11.5.5.5", 48259))
    assert "11.5.5.5 48259 OBSERVED" in texts(node)
    node.observed_by_peer("peer 2", ("11.66.6.6", 666))  # one of them lies
    assert texts(node) == ["192.168.1.7 4433 INTERFACE"]
    node.observed_by_peer("peer 3", ("11.5.5.5", 48259))
    assert "11.5.5.5 48259 OBSERVED" in texts(node)
    assert not any("11.66.6.6" in text for text in texts(node))


@virtual_time
async def test_one_peer_is_not_believed_where_others_are_there_to_ask(world: World) -> None:
    world.sees = lambda _reflector: None
    asking = world.node()
    asking.set_reflectors([A1, B1])
    given = world.node(advertise=(("11.5.5.5", PORT),))
    mapped = world.node(port_mapping=True)
    for node in (asking, given, mapped):
        await node.start()
    world.mappers[0].on_mapped(("11.5.5.5", PORT), "pcp")
    for node in (asking, given, mapped):
        node.observed_by_peer("peer 1", ("11.6.6.6", 7))
        assert not any("OBSERVED" in text for text in texts(node))
        node.observed_by_peer("peer 2", ("11.6.6.6", 7))
        assert "11.6.6.6 7 OBSERVED" in texts(node)


@virtual_time
async def test_a_public_node_knows_its_address_better_than_one_peer(world: World) -> None:
    world.addresses = PUBLIC
    node = world.node()
    await node.start()
    node.observed_by_peer("peer", ("11.6.6.6", 7))
    assert texts(node) == ["11.7.7.7 4433 INTERFACE"]


@virtual_time
async def test_an_address_of_a_family_that_this_machine_does_not_have_is_no_address_of_it(world: World) -> None:
    node = world.node()
    await node.start()
    for peer in range(3):
        node.observed_by_peer(peer, ("2001:db8:666::1", 6))
    assert world.changes == 0
    world.addresses = [*LAN, InterfaceAddress("wlan0", "fd00::7", 64)]
    look(node)
    for peer in range(2):
        node.observed_by_peer(peer, ("2001:db8:666::1", 6))
    assert "2001:db8:666::1 6 OBSERVED" in texts(node)
    only_v4 = world.node("0.0.0.0")
    await only_v4.start()
    changes = world.changes
    for peer in range(2):
        only_v4.observed_by_peer(peer, ("2001:db8:666::1", 6))
    assert world.changes == changes


@virtual_time
async def test_a_peer_that_lies_each_time_costs_one_change_a_minute(world: World) -> None:
    node = world.node()
    await node.start()
    for lie in range(1000):
        node.observed_by_peer("liar", ("11.66.6.6", 1 + lie))
        node.observed_by_peer("liar", ("2001:db8:666::1", 1 + lie))
    assert world.changes == 1
    for lie in range(600):  # ten minutes
        await asyncio.sleep(1)
        node.observed_by_peer("liar", ("11.66.6.6", 2000 + lie))
    assert world.changes <= 11
    node.observed_by_peer("liar", ("11.66.6.6", 9))
    await asyncio.sleep(OBSERVED_MINIMUM)
    node.observed_by_peer("liar", ("11.5.5.5", 7))  # a NAT that was restarted, say
    assert "11.5.5.5 7 OBSERVED" in texts(node)


@virtual_time
async def test_what_peers_say_is_bounded_and_checked(world: World) -> None:
    node = world.node()
    await node.start()
    for number in range(1000):
        node.observed_by_peer(number, ("11.5.5.5", 1 + number // 2))
    for address in (("127.0.0.1", 5), ("10.0.0.1", 5), ("11.5.5.5", 0), ("11.5.5.5", 65536), ("x" * 1000, 1)):
        node.observed_by_peer("liar", address)
    assert len([text for text in texts(node) if "OBSERVED" in text]) == 2


@virtual_time
async def test_a_peer_heard_directly_shows_that_udp_works(world: World) -> None:
    world.sees = lambda _reflector: None
    node = world.node()
    node.set_reflectors([A1, B1])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.BLOCKED)
    node.observed_by_peer("peer", ("11.5.5.5", 48259))
    assert node.nat.kind == NatKind.UNKNOWN


@virtual_time
async def test_behind_a_hard_nat_peers_observations_are_not_told(world: World) -> None:
    ports: dict[Address, int] = {A1: 2000, B1: 30000}
    world.sees = lambda reflector: ("11.5.5.5", ports[reflector])
    node = world.node()
    node.set_reflectors([A1, B1])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.HARD)
    for peer in range(3):
        node.observed_by_peer(peer, ("11.5.5.5", 777))
    assert not any("OBSERVED" in text for text in texts(node))


# -- what the user says


@virtual_time
async def test_an_address_that_the_user_gives_is_told(world: World) -> None:
    node = world.node(advertise=(("11.5.5.5", 4444), ("2001:db8::5", 4444)))
    await node.start()
    assert texts(node) == ["192.168.1.7 4433 INTERFACE", "11.5.5.5 4444 GIVEN", "2001:db8::5 4444 GIVEN"]


# -- port mapping


@virtual_time
async def test_a_mapped_port_is_told_while_private_addresses_are_all_we_have(world: World) -> None:
    node = world.node(port_mapping=True)
    await node.start()
    [mapper] = world.mappers
    assert (mapper.port, mapper.started) == (PORT, 1)
    mapper.on_mapped(("11.5.5.5", PORT), "pcp")
    assert "11.5.5.5 4433 MAPPED" in texts(node)
    assert (node.mapped, node.mapping, world.changes) == (("11.5.5.5", PORT), "pcp", 1)
    world.routes = ["wlan0 by 192.168.1.254"]
    look(node)
    assert mapper.refreshed == 1
    world.addresses = PUBLIC
    look(node)
    assert texts(node) == ["11.7.7.7 4433 INTERFACE"]
    await node.close()
    assert mapper.closed == 1
    mapper.on_mapped(("11.5.5.5", PORT), "pcp")
    assert node.mapped is None


@virtual_time
async def test_a_public_or_loopback_node_maps_nothing(world: World) -> None:
    loopback = world.node("127.0.0.1", port_mapping=True)
    await loopback.start()
    unwanted = world.node(port_mapping=False)
    await unwanted.start()
    world.addresses = PUBLIC
    public = world.node(port_mapping=True)
    await public.start()
    assert not world.mappers


@virtual_time
async def test_closing_removes_the_mapping_and_ends_all_timers(world: World) -> None:
    node = world.node(port_mapping=True)
    node.set_reflectors([A1, B1])
    await node.start()
    await world.until(lambda: node.nat.kind == NatKind.EASY)
    await node.close()
    asked, changes = len(world.asked), world.changes
    node.set_reflectors([A2])
    node.observed_by_peer("peer", ("11.5.5.5", 9))
    await asyncio.sleep(3600)
    assert (len(world.asked), world.changes, world.mappers[0].closed) == (asked, changes, 1)


# -- for real


async def reflector() -> tuple[asyncio.DatagramTransport, Address]:
    """A reflector on loopback."""

    class Reflector(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
            self.transport = transport

        def datagram_received(self, data: bytes, source: Address) -> None:
            transaction = stun.parse_binding_request(data)
            if transaction is not None:
                self.transport.sendto(stun.make_binding_response(transaction, source), source)

    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Reflector, ("127.0.0.1", 0))
    return transport, transport.get_extra_info("sockname")


async def test_real_sockets_and_reflectors_on_loopback() -> None:
    reflectors = [await reflector() for _ in range(2)]
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as main:
        main.bind(("127.0.0.1", 0))
        main.setblocking(False)
        port = main.getsockname()[1]

        def send(data: bytes, destination: Address) -> None:
            main.sendto(data, destination)

        node = Surroundings(TransportConfig(), port, "127.0.0.1", send, changed.set)
        loop.add_reader(main, lambda: node.on_stun(*main.recvfrom(2048)))
        node.set_reflectors([address for _, address in reflectors])
        await node.start()
        async with asyncio.timeout(10):
            await changed.wait()
        assert (node.nat.kind, node.nat.port_kept) == (NatKind.NONE, True)
        assert texts(node) == [f"127.0.0.1 {port} INTERFACE"]
        await node.close()
        loop.remove_reader(main)
    for transport, _ in reflectors:
        transport.close()
