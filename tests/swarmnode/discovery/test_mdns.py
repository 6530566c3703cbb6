"""mDNS on loopback, and what it makes of interfaces and of TXT. Several machines: test_mdns_lab."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf.asyncio import AsyncServiceInfo

from swarmnode.discovery import mdns
from swarmnode.discovery.mdns import Announced, Mdns, browse_open, places, properties, read_properties
from swarmnode.discovery.record import decode, sign, swarm_tag
from tests.swarmnode.discovery.samples import blob, identity, record
from transport.identity import Identity, PeerId
from transport.proto.candidates import InterfaceAddress

WAIT_S = 20.0  # for what takes a moment on a quiet machine


class Node:
    """A node's mDNS on loopback and what it heard. Every test has a swarm of its own: they share one loopback."""

    def __init__(self, swarm: PeerId, number: int, *, is_open: bool = False) -> None:
        self.key, self.swarm, self.number = identity(number), swarm, number
        self.known: dict[PeerId, str] = {}
        self.problems: list[str] = []
        self._changed = asyncio.Event()
        self.source = Mdns(
            swarm,
            self.key.peer_id,
            port=4433,
            is_open=is_open,
            loopback=True,
            on_problem=self.problems.append,
        )

    async def start(self) -> Node:
        await self.source.start(self)
        self.announce()
        return self

    def announce(self, at: float = 0.0, name: str = "") -> None:
        told = replace(record(self.number, at), swarm=self.swarm, certificate=bytes(300))
        self.source.announce(sign(replace(told, name=name or told.name), self.key.sign))

    def heard(self, blob: bytes, source: str, *, lasting: bool, publisher: PeerId | None = None) -> None:
        assert (source, lasting) == ("mdns", True)
        one = decode(blob)
        self.known[one.peer] = one.name
        self._changed.set()

    def lost(self, peer: PeerId, source: str) -> None:
        self.known.pop(peer, None)
        self._changed.set()

    async def until(self, *names: str) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while set(self.known.values()) != set(names):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            known, problems = sorted(self.known.values()), self.problems
            pytest.fail(f"node{self.number} knows {known}, not {sorted(names)}; problems: {problems}")


async def test_members_on_one_machine_find_each_other_follow_changes_and_hear_goodbyes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mdns, "UPDATE_S", 0.2)
    swarm = Identity.generate().peer_id
    one, two = await Node(swarm, 1).start(), await Node(swarm, 2).start()
    stranger = await Node(Identity.generate().peer_id, 3).start()
    await asyncio.gather(one.until("node2"), two.until("node1"))
    one.announce(3.0)  # the same again, as every few seconds: not told
    one.announce(6.0, "renamed")
    await two.until("renamed")
    await one.source.close()
    await two.until()
    assert not stranger.known
    assert not one.problems + two.problems
    again = await Node(swarm, 1).start()
    await two.until("node1")
    assert not again.problems
    two.source.network_changed()  # everything anew
    await two.until("node1")
    await asyncio.gather(again.source.close(), two.source.close(), stranger.source.close())


async def test_open_swarms_are_found_and_others_are_not() -> None:
    swarm, closed = Identity.generate().peer_id, Identity.generate().peer_id
    nodes = [await Node(swarm, 1, is_open=True).start(), await Node(swarm, 2, is_open=True).start()]
    nodes.append(await Node(closed, 3).start())
    found = await browse_open(WAIT_S, loopback=True, enough=lambda all: any(len(one.members) == 2 for one in all))
    ours = [one for one in found if one.swarm == swarm]
    assert [sorted(member.name for member in one.members) for one in ours] == [["node1", "node2"]]
    assert closed not in {one.swarm for one in found}
    await asyncio.gather(*(node.source.close() for node in nodes))


async def test_what_strangers_on_the_lan_make_up_is_ignored() -> None:
    """Wrong instances beside a right one: no TXT of ours, another's tag, junk for a record, another peer's name."""
    swarm = Identity.generate().peer_id
    node = await Node(swarm, 1).start()
    responder = mdns._open(["127.0.0.1"])
    good = sign(replace(record(2), swarm=swarm), identity(2).sign)
    told: list[dict[str | bytes, str | bytes | None]] = [
        {b"v": b"9", b"t": b"x"},
        {b"v": b"1", b"t": swarm_tag(swarm)},
        {b"v": b"1", b"t": swarm_tag(swarm), b"r0": b"junk"},
        {b"v": b"1", b"t": swarm_tag(identity(8).peer_id), b"r0": good[:200], b"r1": good[200:]},
        {b"v": b"1", b"t": swarm_tag(swarm), b"r0": None},
        properties(good, is_open=False),  # under another name than its peer's
    ]
    for number, one in enumerate(told):
        service = AsyncServiceInfo(
            mdns.SERVICE, f"{number}.{mdns.SERVICE}", port=1, properties=one, server=f"s{number}.local."
        )
        await responder.async_register_service(service, cooperating_responders=True)
    name = f"{identity(2).peer_id}.{mdns.SERVICE}"
    service = AsyncServiceInfo(mdns.SERVICE, name, port=1, properties=told[-1], server="right.local.")
    await responder.async_register_service(service, cooperating_responders=True)
    await node.until("node2")
    await mdns._close(responder)
    await node.until()
    await node.source.close()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(98, "Address already in use"), "UDP port 5353 belongs to a program that does not share it"),
        (PermissionError(1, "Operation not permitted"), "the system does not allow multicast"),
        (OSError(19, "No such device"), "No such device"),
        (RuntimeError("No adapter found for index 3\nmore"), "No adapter found for index 3"),
    ],
)
async def test_where_multicast_is_impossible_it_says_why_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    tries = asyncio.Semaphore(0)

    def fail(*_: object, **__: object) -> None:
        tries.release()
        raise error

    monkeypatch.setattr(mdns, "RETRY_S", 0.01)
    monkeypatch.setattr(mdns, "UPDATE_S", 0.0)
    node = Node(Identity.generate().peer_id, 1)
    with monkeypatch.context() as broken:
        broken.setattr(mdns, "AsyncZeroconf", fail)
        await node.start()
        for _ in range(3):
            await asyncio.wait_for(tries.acquire(), WAIT_S)
        assert len(node.problems) == 1
        assert why in node.problems[0]
        assert "\n" not in node.problems[0]
        assert not node.source.works
        told: list[str] = []
        assert await browse_open(0.1, loopback=True, on_problem=told.append) == []
        assert told == node.problems
    other = await Node(node.swarm, 2).start()
    await asyncio.gather(node.until("node2"), other.until("node1"))  # it works again by itself
    await asyncio.gather(node.source.close(), other.source.close())


async def test_without_any_interface_there_is_nothing_to_do_and_no_error() -> None:
    problems: list[str] = []
    told = asyncio.Event()

    def on_problem(why: str) -> None:
        problems.append(why)
        told.set()

    source = Mdns(identity(5).peer_id, identity(1).peer_id, port=1, on_problem=on_problem, addresses=list)
    node = Node(identity(5).peer_id, 1)
    await source.start(node)
    source.announce(blob(1))
    await asyncio.wait_for(told.wait(), WAIT_S)
    assert await browse_open(0.1, on_problem=problems.append, addresses=list) == []
    assert problems == [mdns.NOWHERE, mdns.NOWHERE]
    await source.close()
    await Mdns(identity(5).peer_id, identity(1).peer_id, port=1).close()  # never started


# -- TXT


@given(st.integers(0, 400), st.booleans())
def test_txt_carries_a_record(size: int, is_open: bool) -> None:
    told = sign(replace(record(1), certificate=bytes(size)), identity(1).sign)
    txt = {bytes(key): value for key, value in properties(told, is_open=is_open).items() if isinstance(key, bytes)}
    assert all(len(key) + 1 + len(value) <= 255 for key, value in txt.items() if isinstance(value, bytes))
    read = {key: value for key, value in txt.items() if isinstance(value, bytes)}
    assert read_properties(read) == Announced(swarm_tag(record(1).swarm), is_open, told)


keys = st.sampled_from([b"v", b"t", b"o", *(f"r{number}".encode() for number in range(9))])
values = st.one_of(st.none(), st.sampled_from([b"1", b"8 bytes!"]), st.binary(max_size=255))


@given(st.dictionaries(keys, values))
def test_any_txt_is_bounded(told: dict[bytes, bytes | None]) -> None:
    announced = read_properties(told)
    assert announced is None or (0 < len(announced.blob) <= 1300 and len(announced.tag) == 8)


# -- interfaces


def where(*found: InterfaceAddress) -> Sequence[str | int]:
    return list(places(found))


def test_one_place_per_interface_that_leads_to_a_lan() -> None:
    assert where(
        InterfaceAddress("lo", "127.0.0.1", 8),
        InterfaceAddress("wlan0", "192.168.1.7", 24),
        InterfaceAddress("wlan0", "192.168.1.8", 24),
        InterfaceAddress("eth0", "10.0.0.3", 24, preferred=True),
        InterfaceAddress("eth0", "fe80::1%eth0", 64),
        InterfaceAddress("eth0", "2001:db8::3", 64),
        InterfaceAddress("docker0", "172.17.0.1", 16),
        InterfaceAddress("br-0123456789ab", "172.18.0.1", 16),
        InterfaceAddress("veth12ab", "169.254.3.4", 16),
        InterfaceAddress("virbr0", "192.168.122.1", 24),
        InterfaceAddress("tun0", "10.8.0.2", 24, point_to_point=True),
        InterfaceAddress("tailscale0", "100.64.0.7", 32),
        InterfaceAddress("eth1", "10.1.0.3", 24, is_up=False),
        InterfaceAddress("eth2", "fe80::2%eth2", 64, tentative=True),
    ) == ["10.0.0.3", "192.168.1.7"]


def test_an_interface_with_ipv6_alone_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "if_nametoindex", {"eth0": 7}.__getitem__)
    assert where(InterfaceAddress("eth0", "fe80::1%eth0", 64)) == [7]
    assert places([], loopback=True) == {"127.0.0.1": "loopback"}
    monkeypatch.undo()
    assert where(InterfaceAddress("nosuch0", "fe80::1%nosuch0", 64)) == []  # gone by now


def test_places_are_few_however_many_interfaces_there_are() -> None:
    many = [InterfaceAddress(f"eth{number}", f"10.0.{number}.1", 24) for number in range(200)]
    assert len(where(*many)) == mdns.MAX_INTERFACES
