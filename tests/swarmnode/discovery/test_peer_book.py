from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmnode.discovery.gossip import TELL_S, Gossip
from swarmnode.discovery.peer_book import (
    FORGED_BURST,
    MAX_SKEW_S,
    MAX_STRANGERS,
    REMEMBER_S,
    STRANGERS_BURST,
    EventKind,
    PeerBook,
)
from swarmnode.discovery.record import PeerRecord, sign
from tests.swarmnode.discovery.samples import SWARM, UNIX, blob, identity, record
from transport.identity import PeerId

OWN = identity(99)


def peer_of(number: int) -> PeerId:
    return identity(number).peer_id


def certified(record: PeerRecord) -> str | None:
    return None if record.certificate == b"member" else "you are not a member of this swarm"


class Watch:
    """A book, and a clock that both its times come from."""

    def __init__(self, max_peers: int = 8, judge: Callable[[PeerRecord], str | None] = certified) -> None:
        self.book = PeerBook(SWARM, OWN.peer_id, judge=judge, max_peers=max_peers)

    def offer(self, told: bytes, at: float, source: str = "relay", *, lasting: bool = False) -> EventKind | None:
        event = self.book.offer(told, source, at, UNIX + at, lasting=lasting)
        return event.kind if event else None

    def alive(self, at: float) -> set[str]:
        return {one.name for one in self.book.records(at)}


def test_a_member_is_seen_refreshed_changed_and_gone_after_its_last_record_s_life() -> None:
    watch = Watch()
    assert watch.offer(blob(1, 0), 0) == EventKind.NEW
    assert watch.offer(blob(1, 3), 3) == EventKind.REFRESHED
    assert watch.offer(blob(1, 6, name="renamed"), 6) == EventKind.CHANGED
    assert watch.alive(15.9) == {"renamed"}
    assert watch.book.next_expiry == 16
    assert watch.book.expire(15.9) == []
    assert watch.book.expire(16) == [peer_of(1)]
    assert watch.alive(16) == set()
    assert watch.book.get(peer_of(1)) is None
    assert watch.book.next_expiry is None


def test_a_newer_genuine_record_of_this_node_is_another_one_s_with_its_key() -> None:
    watch = Watch()
    issued = record(99, 5).seq
    for told, is_twin in (
        (blob(99, 6), True),
        (blob(99, 5), False),  # our own, told back
        (blob(99, 6)[:-1] + b"?", False),
        (blob(1, 6), False),
        (b"", False),
    ):
        assert watch.book.is_of_twin(told, issued, "peer", 0.0) == is_twin


def test_what_is_expired_is_out_of_the_view_before_anybody_asks_to_expire() -> None:
    watch = Watch()
    watch.offer(blob(1, 0), 0)
    assert not watch.book.is_alive(peer_of(1), 10)
    assert watch.alive(10) == set()
    assert watch.book.all_blobs(10) == []


def test_a_killed_node_is_out_of_every_view_within_15_s_also_when_others_tell_of_it() -> None:
    """A chain: the relay tells the first, each tells the next at the last moment at which it still may."""
    chain = [Watch() for _ in range(3)]
    last = blob(1, 0)
    chain[0].offer(last, 0)
    heard, gone = {0: 0.0}, {0: 0.0}
    for at in [step / 10 for step in range(1, 400)]:
        for left, right in ((1, 2), (0, 1)):
            if left in heard and right not in heard and at + 0.1 > heard[left] + TELL_S:
                gossip = Gossip(OWN.peer_id)
                gossip.learned(peer_of(1), last, heard[left], is_new=True, teller=None)
                assert gossip.share([OWN.peer_id], (), 3, at) == {OWN.peer_id: [last]}
                assert gossip.share([peer_of(7)], (), 3, at + 0.2) == {}
                chain[right].offer(last, at, "peer")
                heard[right] = at
        for number, watch in enumerate(chain):
            if watch.book.expire(at):
                gone[number] = at
    assert gone.keys() == {0, 1, 2}
    assert max(gone.values()) <= 15


def test_a_repeated_record_keeps_nobody_alive() -> None:
    watch = Watch()
    first, second = blob(1, 0), blob(1, 3)
    watch.offer(first, 0)
    watch.offer(second, 3)
    for at in map(float, range(4, 13)):
        assert watch.offer(second, at, f"peer {at}") == EventKind.SAME
        assert watch.offer(first, at) is None
    assert watch.book.expire(13) == [peer_of(1)]
    for at in (13.0, 60.0, 300.0, MAX_SKEW_S + 9, REMEMBER_S - 1, REMEMBER_S + 100, 100_000):
        watch.book.expire(at)
        assert watch.offer(second, at) is None, at
        assert watch.alive(at) == set()
    assert watch.offer(blob(1, 100_000), 100_000) == EventKind.NEW  # itself, later


def test_a_record_that_ran_ahead_of_its_time_is_remembered_until_its_date_refuses_it() -> None:
    watch = Watch()
    ahead = blob(1, 299)
    assert watch.offer(ahead, 0) == EventKind.NEW
    watch.book.expire(10)
    for at in range(20, 2000, 20):
        watch.book.expire(at)
        assert watch.offer(ahead, at) is None, at


def test_dates_far_from_ours_are_refused_with_a_reason() -> None:
    watch = Watch()
    assert watch.offer(blob(1, 301), 0) is None
    assert "301 s in the future: check the clocks" in watch.book.last_refusal
    assert watch.offer(blob(1, -400), 0) is None
    assert "400 s old: check the clocks" in watch.book.last_refusal
    assert watch.book.refused == {"future": 1, "old": 1}
    assert watch.offer(blob(1, 299), 0) == EventKind.NEW
    assert watch.offer(blob(2, -305), 0) == EventKind.NEW


def test_an_open_connection_keeps_a_member_and_nobody_else() -> None:
    watch = Watch()
    watch.offer(blob(1, 0), 0)
    for at in range(5, 60, 5):
        assert watch.book.sees(peer_of(1), at) is None
        assert watch.book.expire(at) == []
    assert watch.book.expire(65) == [peer_of(1)]
    assert watch.book.sees(peer_of(2), 65) is None
    assert watch.alive(65) == set()


def test_what_a_lan_announces_is_a_candidate_until_it_is_connected_or_heard() -> None:
    watch = Watch()
    assert watch.offer(blob(1, -5000), 0, "mdns", lasting=True) == EventKind.CANDIDATE  # told once, long ago
    assert watch.offer(blob(2, 0), 0, "mdns", lasting=True) == EventKind.CANDIDATE
    assert watch.alive(0) == set()
    assert [one.name for one in sorted(watch.book.candidates(), key=lambda one: one.name)] == ["node1", "node2"]
    event = watch.book.sees(peer_of(1), 1)
    assert event is not None
    assert event.kind == EventKind.NEW
    assert watch.offer(blob(2, 2), 2) == EventKind.NEW
    assert watch.alive(2) == {"node1", "node2"}
    assert set(watch.book.expire(12)) == {peer_of(1), peer_of(2)}
    assert {one.name for one in watch.book.candidates()} == {"node1", "node2"}  # still announced
    watch.book.lost(peer_of(1), "mdns")
    assert [one.name for one in watch.book.candidates()] == ["node2"]
    assert watch.offer(blob(1, -5000), 20, "mdns", lasting=True) == EventKind.CANDIDATE


def test_a_lan_s_older_record_marks_as_announced_but_changes_nothing() -> None:
    watch = Watch()
    watch.offer(blob(1, 5, name="newer"), 5)
    assert watch.offer(blob(1, 0, name="older"), 6, "mdns", lasting=True) == EventKind.SAME
    assert watch.alive(6) == {"newer"}
    watch.book.lost(peer_of(1), "mdns")
    assert watch.alive(6) == {"newer"}
    watch.offer(blob(1, 0, name="older"), 7, "mdns", lasting=True)
    watch.book.expire(15)
    assert [one.name for one in watch.book.candidates()] == ["newer"]


def test_a_goodbye_counts_at_once_and_older_records_do_not_bring_it_back() -> None:
    watch = Watch()
    watch.offer(blob(1, 0), 0)
    late = blob(1, 3)
    assert watch.offer(blob(1, 4, ttl_s=0), 4) == EventKind.LEFT
    assert watch.alive(4) == set()
    for at in (4, 5, 30, 59, 300):
        assert watch.offer(late, at) is None
        assert watch.offer(late, at, "mdns", lasting=True) is None
    assert watch.offer(blob(1, 4, ttl_s=0), 30) is None
    assert watch.offer(blob(1, 310), 310) == EventKind.NEW  # started again
    assert watch.offer(blob(1, 4, ttl_s=0), 311) is None
    assert watch.alive(311) == {"node1"}


def test_a_goodbye_that_comes_before_the_record_counts_too() -> None:
    watch = Watch()
    assert watch.offer(blob(1, 4, ttl_s=0), 4) is None
    assert watch.offer(blob(1, 3), 4) is None
    assert watch.offer(blob(1, 5), 5) == EventKind.NEW
    assert not watch.book.leave(peer_of(1), int((UNIX + 4) * 1000), 5)
    assert watch.book.leave(peer_of(1), int((UNIX + 6) * 1000), 6)
    assert watch.alive(6) == set()


def test_only_members_of_this_swarm_enter_and_never_ourselves() -> None:
    watch = Watch()
    assert watch.offer(blob(1, certificate=b"forged"), 0) is None
    assert watch.book.last_refusal == f"{peer_of(1).short}: you are not a member of this swarm"
    other = PeerRecord(identity(50).peer_id, peer_of(1), seq=int(UNIX * 1000))
    assert watch.offer(sign(other, identity(1).sign), 0) is None
    assert watch.offer(blob(99), 0) is None
    assert watch.offer(b"nonsense", 0) is None
    assert watch.offer(sign(record(1), identity(2).sign), 0) is None
    assert watch.book.refused == {"judged": 1, "other swarm": 1, "malformed": 2}
    assert len(watch.book) == 0


def test_a_member_that_was_expelled_stays_out() -> None:
    expelled = set()
    watch = Watch(judge=lambda one: "revoked" if one.peer in expelled else None)
    watch.offer(blob(1, 0), 0)
    expelled.add(peer_of(1))
    assert watch.book.forget(peer_of(1))
    assert not watch.book.forget(peer_of(1))
    assert watch.offer(blob(1, 1), 1) is None
    assert watch.alive(1) == set()


def test_invented_peers_push_nobody_out_and_cost_little() -> None:
    """A relay passes on hundreds of invented peers; the members it also passes on stay in the view."""
    judged = []

    def judge(one: PeerRecord) -> str | None:
        judged.append(one.peer)
        return certified(one)

    watch = Watch(max_peers=4, judge=judge)
    for number in (1, 2, 3):
        watch.offer(blob(number, 0), 0)
    made = [blob(number, 1, certificate=b"none") for number in range(1000, 1000 + int(STRANGERS_BURST) + 200)]
    for told in made:
        watch.offer(told, 1)
    assert len(judged) == 3 + STRANGERS_BURST
    assert watch.book.refused["rate"] == 200
    for number in (1, 2, 3):
        assert watch.offer(blob(number, 3), 3) == EventKind.REFRESHED
    assert watch.offer(blob(4, 3), 3, "peer a") == EventKind.NEW  # by another source
    assert watch.alive(3) == {"node1", "node2", "node3", "node4"}


def test_forged_records_of_members_silence_their_source_and_no_other() -> None:
    watch = Watch()
    watch.offer(blob(1, 0), 0)
    checked = 0
    for number in range(200):
        forged = sign(record(1, 1 + number / 1000), identity(5).sign)
        before = watch.book.refused["malformed"]
        watch.offer(forged, 1)
        checked += watch.book.refused["malformed"] - before
    assert checked == FORGED_BURST
    assert watch.offer(blob(1, 3), 3, "peer b") == EventKind.REFRESHED
    assert watch.offer(blob(1, 60), 60) == EventKind.NEW or watch.alive(60) == {"node1"}  # forgiven after a while


def checks(watch: Watch, told: list[bytes], at: float, publishers: list[PeerId]) -> int:
    """How many of these records, each published by one of those, had their signature looked at."""
    before = watch.book.refused.total() - watch.book.refused["rate"]
    for number, one in enumerate(told):
        watch.book.offer(one, "relay", at, UNIX + at, publisher=publishers[number % len(publishers)])
    return watch.book.refused.total() - watch.book.refused["rate"] - before


def published(watch: Watch, number: int, at: float) -> EventKind | None:
    event = watch.book.offer(blob(number, at), "relay", at, UNIX + at, publisher=peer_of(number))
    return event.kind if event else None


def test_a_stranger_on_a_relay_mutes_nobody_but_itself() -> None:
    watch = Watch()
    assert published(watch, 1, 0) == EventKind.NEW
    bad = [sign(record(50, 1 + number / 1000), identity(5).sign) for number in range(200)]
    assert checks(watch, bad, 1, [peer_of(50)]) == FORGED_BURST
    assert published(watch, 50, 1.1) is None  # it has used up its own budget
    assert published(watch, 1, 1.1) == EventKind.REFRESHED
    assert published(watch, 2, 1.1) == EventKind.NEW


def test_many_strangers_cost_no_more_than_one_source_may_and_displace_no_member_s_budget() -> None:
    watch = Watch()
    assert published(watch, 1, 0) == EventKind.NEW
    bad = [sign(record(1, 1 + number / 1000), identity(5).sign) for number in range(100)]
    assert checks(watch, bad, 1, [peer_of(1)]) == FORGED_BURST  # a member that misbehaves
    keys = [identity(number) for number in range(100, 100 + MAX_STRANGERS + 88)]
    strange = [sign(record(100 + n, 1, certificate=b"none"), key.sign) for n, key in enumerate(keys)]
    assert checks(watch, strange, 1, [key.peer_id for key in keys]) == STRANGERS_BURST
    assert checks(watch, bad, 1.1, [peer_of(1)]) == 0  # still muted: its budget was not thrown away


def test_a_full_book_takes_no_more_and_prefers_who_is_alive() -> None:
    watch = Watch(max_peers=2)
    watch.offer(blob(1, 0), 0)
    watch.offer(blob(2, 0), 0, "mdns", lasting=True)
    assert watch.offer(blob(3, 0), 0, "mdns", lasting=True) is None
    assert watch.offer(blob(4, 0), 0) == EventKind.NEW
    assert watch.book.get(peer_of(2)) is None
    assert watch.offer(blob(5, 0), 0) is None
    assert "more than 2 members" in watch.book.last_refusal
    assert watch.alive(0) == {"node1", "node4"}


def test_a_member_that_issues_too_often_is_not_checked_each_time() -> None:
    watch = Watch()
    watch.offer(blob(1, 0), 0)
    assert watch.offer(blob(1, 0.05), 0.05) is None
    assert watch.book.refused == {"too often": 1}
    assert watch.offer(blob(1, 0.06, ttl_s=0), 0.06) == EventKind.LEFT  # a goodbye always counts


def test_the_whole_view_for_who_knows_nobody() -> None:
    watch = Watch()
    watch.offer(blob(1, 0), 0)
    watch.offer(blob(2, 1), 1)
    watch.offer(blob(3, 1), 1, "mdns", lasting=True)
    assert set(watch.book.all_blobs(5)) == {blob(1, 0), blob(2, 1)}


@pytest.mark.parametrize("source", ["relay", "mdns"])
def test_events_carry_what_is_passed_on(source: str) -> None:
    book = PeerBook(SWARM, OWN.peer_id, judge=certified)
    event = book.offer(blob(1, 0), source, 0, UNIX, lasting=source == "mdns")
    assert event is not None
    assert event.blob == blob(1, 0)
    assert event.record == record(1, 0)
    assert event.is_news == (source == "relay")


steps = st.lists(
    st.tuples(
        st.sampled_from(["offer", "replay", "sees", "lost", "expire", "leave", "forget", "bytes"]),
        st.integers(1, 4),
        st.floats(0, 30),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(steps, st.binary(max_size=200))
@example([("offer", 1, 0.0, True), ("lost", 1, 0.0, False), ("replay", 1, 0.0, False)], b"")
def test_nobody_is_in_the_view_longer_than_what_speaks_for_it(
    taken: list[tuple[str, int, float, bool]], junk: bytes
) -> None:
    """Whatever happens: in the view is who issued a newer record, or was seen, in the last 10 s, and no other.

    Of whom the book was told to know nothing any more, a record that is repeated is the first.
    """
    watch, now = Watch(max_peers=3), 0.0
    spoke: dict[int, float] = {}
    unknown: set[int] = set()
    issued: dict[int, list[bytes]] = {}
    for what, number, pause, lasting in taken:
        now += pause
        candidates = watch.book.candidates()
        if what == "offer":
            told = blob(number, now)
            issued.setdefault(number, []).append(told)
            watch.offer(told, now, lasting=lasting)
            if not lasting:
                spoke[number] = now
        elif what == "replay":
            for told in issued.get(number, []):
                if watch.offer(told, now, lasting=lasting) == EventKind.NEW and number in unknown:
                    spoke[number] = now
                    unknown.discard(number)
        elif what == "sees":
            watch.book.sees(peer_of(number), now)
            spoke[number] = now
        elif what == "lost":
            watch.book.lost(peer_of(number), "relay")
        elif what == "expire":
            watch.book.expire(now)
        elif what == "leave":
            watch.offer(blob(number, now, ttl_s=0), now)
        elif what == "forget":
            watch.book.forget(peer_of(number))
            unknown.add(number)
        else:
            watch.offer(junk, now)
        if what != "leave":
            gone = [one for one in candidates if watch.book.get(one.peer) is None]
            unknown.update(int(one.name.removeprefix("node")) for one in gone)
        for one in watch.book.records(now):
            assert now < spoke.get(int(one.name.removeprefix("node")), -1e9) + 10.001
        assert len(watch.book) <= 3
