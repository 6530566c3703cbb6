"""Whole nodes' discovery over a pretended relay, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from swarmnode.discovery.discovery import Discovery
from swarmnode.discovery.peer_book import FORGED_BURST, Event, EventKind, PeerBook
from swarmnode.discovery.record import PeerRecord, decode, sign
from swarmnode.discovery.relay_directory import RelayDirectory
from tests.swarmnode.discovery.samples import SWARM, UNIX, blob, identity, record
from tests.transport.virtual_time import run_in_virtual_time
from transport.identity import PeerId

GRACE_S = 5.0  # for which a relay shows the records of a session that has ended


class Hub:
    """A relay's directory with one topic, as it is promised: records end with their life, or after their session."""

    def __init__(self) -> None:
        self.records: dict[PeerId, tuple[bytes, asyncio.TimerHandle]] = {}
        self.watchers: dict[PeerId, Callable[[PeerId, bytes | None], None]] = {}

    def put(self, key: PeerId, ttl_s: float, blob: bytes) -> None:
        if key in self.records:
            self.records[key][1].cancel()
        self.records[key] = (blob, asyncio.get_running_loop().call_later(ttl_s, self.drop, key))
        self.tell(key, blob)

    def drop(self, key: PeerId) -> None:
        if key in self.records:
            self.records.pop(key)[1].cancel()
            self.tell(key, None)

    def tell(self, key: PeerId, blob: bytes | None) -> None:
        for watcher in self.watchers.values():
            asyncio.get_running_loop().call_later(0.02, watcher, key, blob)


class Client:
    """One node's side of it."""

    def __init__(self, hub: Hub, key: PeerId) -> None:
        self.hub, self.key, self.alive = hub, key, True

    def publish(self, topic: bytes, ttl_s: int, blob: bytes) -> None:
        if self.alive:
            self.hub.put(self.key, ttl_s, blob)

    def withdraw(self, topic: bytes) -> None:
        self.hub.drop(self.key)

    def watch(self, topic: bytes, on_record: Callable[[PeerId, bytes | None], None]) -> None:
        self.hub.watchers[self.key] = on_record
        for key, (told, _) in self.hub.records.items():
            asyncio.get_running_loop().call_soon(on_record, key, told)

    def unwatch(self, topic: bytes) -> None:
        self.hub.watchers.pop(self.key, None)

    def kill(self) -> None:
        self.alive = False
        self.hub.watchers.pop(self.key, None)
        asyncio.get_running_loop().call_later(GRACE_S, self.hub.drop, self.key)


class Member:
    """A node's discovery, and what it said."""

    def __init__(self, number: int, hub: Hub | None) -> None:
        self.key = identity(number)
        self.client = Client(hub, self.key.peer_id) if hub is not None else None
        self.name = f"node{number}"
        self.number = number
        self.events: list[Event] = []
        self.gone: list[tuple[float, PeerId]] = []
        self.discovery = Discovery(
            self.key,
            PeerBook(SWARM, self.key.peer_id, judge=lambda _: None),
            [RelayDirectory(self.client, SWARM)] if self.client is not None else [],
            describe=self.describe,
            on_event=self.events.append,
            on_gone=lambda peer: self.gone.append((now(), peer)),
            unix=lambda: UNIX + now(),
        )

    def describe(self) -> PeerRecord:
        return record(self.number, name=self.name)

    def news_for(self, other: Member) -> list[bytes]:
        return self.discovery.news([other.key.peer_id]).get(other.key.peer_id, [])

    def view(self) -> set[str]:
        return {one.name for one in self.discovery.book.records(now())}

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.events]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_members_find_each_other_and_a_killed_one_is_gone_for_all_within_15_s() -> None:
    async def main() -> None:
        hub = Hub()
        members = [Member(number, hub) for number in (1, 2, 3)]
        far = Member(4, None)  # hears of the others only by what member 3 tells it
        for member in (*members, far):
            await member.discovery.start()

        async def gossip() -> None:
            while True:
                await asyncio.sleep(0.9)
                far.discovery.told(members[2].news_for(far), members[2].key.peer_id)

        gossiping = asyncio.create_task(gossip())
        await asyncio.sleep(120)
        for member in members:
            assert member.view() == {"node1", "node2", "node3"} - {member.name}
            assert not member.gone
        assert far.view() == {"node1", "node2", "node3"}

        killed, when = members[0], now()
        assert killed.client is not None
        killed.client.kill()
        await killed.discovery.close()
        await asyncio.sleep(15)
        for member in (members[1], members[2], far):
            assert "node1" not in member.view()
            ((at, peer),) = member.gone
            assert peer == killed.key.peer_id
            assert at - when <= 15

        killed.client.alive = True  # the device is switched on again
        again = Member(1, hub)
        await again.discovery.start()
        await asyncio.sleep(2)
        assert again.view() == {"node2", "node3"}
        for member in (members[1], members[2], far):
            assert "node1" in member.view()
        gossiping.cancel()
        for member in (again, members[1], members[2], far):
            await member.discovery.close()

    run_in_virtual_time(main())


def test_who_leaves_is_out_at_once_and_stays_out() -> None:
    async def main() -> None:
        hub = Hub()
        one, two = Member(1, hub), Member(2, hub)
        await one.discovery.start()
        await two.discovery.start()
        await asyncio.sleep(1)
        last = one.discovery.own
        goodbye = one.discovery.leave()
        assert decode(goodbye).leaves
        await asyncio.sleep(0.1)
        await one.discovery.close()
        assert two.view() == set()
        assert two.kinds() == [EventKind.NEW, EventKind.LEFT]
        two.discovery.told([last], identity(9).peer_id)
        await asyncio.sleep(60)
        assert two.view() == set()
        assert two.kinds() == [EventKind.NEW, EventKind.LEFT]
        assert not two.gone
        await two.discovery.close()

    run_in_virtual_time(main())


def test_a_change_is_told_at_once_and_signs_of_life_replace_records() -> None:
    async def main() -> None:
        one, two = Member(1, None), Member(2, None)
        await one.discovery.start()
        await two.discovery.start()
        two.discovery.told(one.discovery.everything(two.key.peer_id), one.key.peer_id)
        await asyncio.sleep(0.5)
        one.name = "renamed"
        one.discovery.refresh()
        two.discovery.told(one.news_for(two), one.key.peer_id)
        assert one.news_for(two) == []  # it knows
        assert two.view() == {"renamed"}
        assert two.kinds() == [EventKind.NEW, EventKind.CHANGED]
        assert two.discovery.everything(identity(9).peer_id) == [two.discovery.own, one.discovery.own]
        for _ in range(20):
            await asyncio.sleep(4)
            two.discovery.sees(one.key.peer_id)
        assert two.view() == {"renamed"}
        await asyncio.sleep(10.1)
        assert two.view() == set()
        assert [peer for _, peer in two.gone] == [one.key.peer_id]
        await one.discovery.close()
        await two.discovery.close()
        one.discovery.refresh()  # too late, and harmless
        assert one.discovery.leave() == one.discovery.own

    run_in_virtual_time(main())


def test_records_that_are_none_change_nothing() -> None:
    async def main() -> None:
        one = Member(1, Hub())
        await one.discovery.start()
        one.discovery.told([b"", b"junk", bytes(2000), one.discovery.own], identity(9).peer_id)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(20)
        assert one.view() == set()
        assert one.events == []
        await one.discovery.close()

    run_in_virtual_time(main())


def test_what_is_told_does_not_go_back_and_looking_who_is_gone_costs_no_look_at_everybody() -> None:
    async def main() -> None:
        one = Member(1, None)
        await one.discovery.start()
        told = [blob(number, now()) for number in range(10, 60)]
        one.discovery.told(told, identity(10).peer_id)
        looks = 0
        expire = one.discovery.book.expire

        def counted(at: float) -> list[PeerId]:
            nonlocal looks
            looks += 1
            return expire(at)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one.discovery.book, "expire", counted)
            for second in range(1, 9):
                await asyncio.sleep(1)
                one.discovery.told([blob(number, second) for number in range(10, 60)], identity(10).peer_id)
            assert looks <= 2
        news = one.discovery.news([identity(10).peer_id, identity(11).peer_id])
        assert news[identity(10).peer_id] == [one.discovery.own]
        passed_on = set(news[identity(11).peer_id])
        assert len(passed_on) == 50
        assert blob(11, 8) not in passed_on
        await asyncio.sleep(10.5)
        assert one.view() == set()
        assert len(one.gone) == 50
        await one.discovery.close()

    run_in_virtual_time(main())


def test_forged_records_of_this_node_cost_a_bounded_number_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        twins: list[None] = []
        one = Member(1, None)
        one.discovery._on_twin = lambda: twins.append(None)
        await one.discovery.start()
        checked = 0

        def counted(told: bytes) -> PeerRecord:
            nonlocal checked
            checked += 1
            return decode(told)

        monkeypatch.setattr("swarmnode.discovery.peer_book.decode", counted)
        forged = [sign(record(1, 1 + number / 1000), identity(5).sign) for number in range(500)]
        one.discovery.told(forged, identity(9).peer_id)
        assert checked == FORGED_BURST
        one.discovery.told([blob(1, 60)], identity(8).peer_id)  # another tells the truth
        assert twins == [None]
        await one.discovery.close()

    run_in_virtual_time(main())
