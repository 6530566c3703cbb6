"""Disco between keepers over a wire of lists: who is answered, who is not, and what the counters say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from transport.errors import EndpointClosed
from transport.identity import Identity, PeerId
from transport.path_keeper import PROBE_BURST, PROBE_RATE, STRANGER_BURST, PathKeeper, Switch
from transport.proto.addresses import Candidate, CandidateSource, NatKind, PathId, PathKind
from transport.proto.candidates import InterfaceAddress
from transport.proto.disco_frames import Call, CallStage, Ping, Pong, encode
from transport.proto.disco_seal import NONCE_BYTES, DiscoBox
from transport.proto.path_config import PathConfig
from transport.proto.paths import SendPing
from transport.route import Path, Route

ALICE, BOB, EVE = (Identity.generate(bytes([number]) * 32) for number in (1, 2, 3))
A, B, E = ("192.0.2.1", 1000), ("192.0.2.2", 2000), ("192.0.2.66", 6666)
RELAY, THEIRS = "http://relay", "https://named-by-a-peer"


class Wire:
    """A peer socket that keeps what is sent."""

    def __init__(self) -> None:
        self.address = ("0.0.0.0", 1000)
        self.interfaces = (InterfaceAddress("eth0", "192.0.2.1", prefix=24),)
        self.disco: list[tuple[PathId, PeerId, bytes]] = []
        self.replayed: list[Path] = []
        self.opened = 0

    def kind_of(self, _: object) -> PathKind:
        return PathKind.PUBLIC

    def direct(self, address: tuple[str, int]) -> Path:
        return Path(PathKind.PUBLIC, PathId(address), 1200)

    def path_of(self, source: PathId) -> Path:
        return Path(PathKind.RELAY, source, 65000) if source.relay else self.direct(source.address)

    def largest(self, _: Path) -> int:
        return 1452

    def send_disco(self, path: PathId, peer: PeerId, datagram: bytes) -> None:
        self.disco.append((path, peer, datagram))

    def replay(self, _: Route, path: Path, since: float) -> None:
        self.replayed.append(path)

    def open_auxiliary(self, _: PeerId, count: int) -> int:
        self.opened += count
        return count

    def close_auxiliary(self, *_: object) -> None: ...


class Kept:
    """A keeper, its wire, and what it told its endpoint."""

    def __init__(self, identity: Identity, admitted: Sequence[Identity] = ()) -> None:
        self.wire = Wire()
        socket: Any = self.wire
        self.switches: list[Switch] = []
        self.found: list[PeerId] = []
        self.admitted = {one.peer_id for one in admitted}
        self.keeper = PathKeeper(
            identity,
            socket,
            PathConfig(),
            admits=lambda peer: peer in self.admitted,
            on_switch=lambda _, switch: self.switches.append(switch),
            on_path=self.found.append,
        )


@pytest.fixture
async def alice() -> AsyncIterator[Kept]:
    kept = Kept(ALICE, [BOB])
    yield kept
    kept.keeper.close()


@pytest.fixture
async def bob() -> AsyncIterator[Kept]:
    kept = Kept(BOB, [ALICE])
    yield kept
    kept.keeper.close()


def sealed(sender: Identity, to: Identity, plaintext: bytes) -> bytes:
    return DiscoBox(sender.peer_id.raw, sender.x25519_private()).seal(to.peer_id.raw, plaintext, bytes(NONCE_BYTES))


def deliver(sender: Kept, receiver: Kept, source: PathId) -> int:
    """Hand over everything that one has sent; how much it was."""
    sent, sender.wire.disco = sender.wire.disco, []
    for _, _, datagram in sent:
        receiver.keeper.on_disco(datagram, source, None)
    return len(sent)


async def test_a_candidate_becomes_the_path_once_it_has_answered(alice: Kept, bob: Kept) -> None:
    alice.keeper.want(BOB.peer_id, [B])
    assert alice.keeper.route(BOB.peer_id) is None
    await asyncio.sleep(0)
    assert deliver(alice, bob, PathId(A)) >= 1
    deliver(bob, alice, PathId(B))
    route = alice.keeper.route(BOB.peer_id)
    assert route is not None
    assert route.path.id == PathId(B)
    assert alice.found == [BOB.peer_id]
    decision = alice.keeper.decision(BOB.peer_id)
    assert decision is not None
    assert decision.reason.startswith("direct")


async def test_engines_are_woken_when_a_doubted_path_is_backed_by_another(alice: Kept, bob: Kept) -> None:
    alice.keeper.relay_changed(RELAY, up=True, own=True)
    alice.keeper.want(BOB.peer_id, [B])
    await asyncio.sleep(0)
    deliver(alice, bob, PathId(A))
    deliver(bob, alice, PathId(B))
    alice.switches.clear()
    alice.keeper.network_changed()
    decision = alice.keeper.decision(BOB.peer_id)
    assert decision is not None
    assert decision.duplicate == PathId(relay=RELAY)
    assert alice.switches == [Switch(lossy=True, rtt=None)]


async def test_a_path_is_called_anew_when_both_know_of_their_nats(alice: Kept, bob: Kept) -> None:
    alice.keeper.set_local((), NatKind.EASY, 0, (RELAY,))
    alice.keeper.relay_changed(RELAY, up=True, own=True)
    alice.keeper.want(BOB.peer_id, [B])
    await asyncio.sleep(0)
    deliver(alice, bob, PathId(A))
    deliver(bob, alice, PathId(B))
    route = alice.keeper.route(BOB.peer_id)
    assert route is not None
    kinds = [route.path.kind]
    call = Call(CallStage.CALL, b"session1", b"boot-one", 1, NatKind.EASY, 0, (), (RELAY,))
    alice.keeper.on_disco(sealed(BOB, ALICE, encode(call)), PathId(relay=RELAY), BOB.peer_id)
    assert [*kinds, route.path.kind] == [PathKind.PUBLIC, PathKind.PUNCHED]


async def test_an_answer_is_never_larger_than_the_question(bob: Kept) -> None:
    question = sealed(ALICE, BOB, encode(Ping(bytes(12))))
    bob.keeper.on_disco(question, PathId(A), None)
    answers = [datagram for path, _, datagram in bob.wire.disco if path == PathId(A)]
    assert answers
    assert len(answers[0]) <= len(question)


async def test_strangers_and_forgers_get_nothing_and_are_counted(alice: Kept) -> None:
    keeper = alice.keeper
    keeper.on_disco(sealed(EVE, ALICE, encode(Ping(bytes(12)))), PathId(E), None)
    assert keeper.counters.not_admitted == 1
    forged = bytearray(sealed(EVE, ALICE, encode(Ping(bytes(12)))))
    forged[4:36] = BOB.peer_id.raw
    keeper.on_disco(bytes(forged), PathId(E), None)
    keeper.on_disco(sealed(BOB, EVE, encode(Ping(bytes(12)))), PathId(E), None)
    keeper.on_disco(b"\x1dswn" + bytes(100), PathId(E), None)
    keeper.on_disco(b"\x1dswn", PathId(E), None)
    assert keeper.counters.forged == 4
    keeper.on_disco(sealed(BOB, ALICE, b"\xff" * 40), PathId(E), None)
    assert keeper.counters.malformed == 1
    assert alice.wire.disco == []


async def test_a_relay_that_lies_about_the_sender_is_not_believed(alice: Kept) -> None:
    datagram = sealed(BOB, ALICE, encode(Ping(bytes(12))))
    alice.keeper.on_disco(datagram, PathId(relay=RELAY), EVE.peer_id)
    assert alice.keeper.counters.forged == 1
    assert alice.wire.disco == []
    alice.keeper.on_disco(datagram, PathId(relay=RELAY), BOB.peer_id)
    assert alice.keeper.counters.pings_in == 1


async def test_a_forged_or_repeated_pong_makes_no_path(alice: Kept, bob: Kept) -> None:
    alice.keeper.want(BOB.peer_id, [B])
    alice.keeper.on_disco(sealed(BOB, ALICE, encode(Pong(bytes(12), A))), PathId(B), None)
    assert alice.keeper.counters.pongs_unknown == 1
    assert alice.keeper.route(BOB.peer_id) is None
    await asyncio.sleep(0)
    deliver(alice, bob, PathId(A))
    answer = bob.wire.disco[0][2]
    alice.keeper.on_disco(answer, PathId(E), None)  # recorded, and sent again from elsewhere
    assert alice.keeper.counters.pongs_unknown == 2
    assert alice.keeper.route(BOB.peer_id) is None
    alice.keeper.on_disco(answer, PathId(B), None)
    assert alice.keeper.route(BOB.peer_id) is not None


async def test_a_call_is_heard_once(alice: Kept) -> None:
    candidates = (Candidate(B, CandidateSource.REFLECTED),)
    call = Call(CallStage.CALL, b"session1", b"boot-one", 1, NatKind.EASY, 0, candidates, (RELAY, THEIRS))
    wanted: list[str] = []
    alice.keeper.on_relay_wanted = wanted.append
    alice.keeper.relay_changed(RELAY, up=True, own=True)
    for _ in range(3):
        alice.keeper.on_disco(sealed(BOB, ALICE, encode(call)), PathId(relay=RELAY), BOB.peer_id)
    assert alice.keeper.counters.calls_in == 1
    assert alice.keeper.counters.replayed == 2
    assert wanted == [THEIRS]  # the other one is there already


async def test_a_relay_that_one_peer_names_is_a_way_to_that_peer_alone(alice: Kept) -> None:
    alice.admitted.add(EVE.peer_id)
    keeper = alice.keeper
    keeper.relay_changed(RELAY, up=True, own=True)
    keeper.want(EVE.peer_id)
    call = Call(CallStage.CALL, b"session1", b"boot-eve", 1, NatKind.EASY, 0, (), (THEIRS,))
    keeper.on_disco(sealed(BOB, ALICE, encode(call)), PathId(relay=RELAY), BOB.peer_id)
    keeper.relay_changed(THEIRS, up=True, own=False)
    assert PathId(relay=THEIRS) in [view.path for view in keeper.views(BOB.peer_id)]
    assert PathId(relay=THEIRS) not in [view.path for view in keeper.views(EVE.peer_id)]
    wanted: list[str] = []
    keeper.on_relay_wanted = wanted.append
    for number in range(2, 12):  # however many a peer names, one connection in some seconds
        named = Call(
            CallStage.CALL, bytes([number]) * 8, b"boot-eve", number, NatKind.EASY, 0, (), (f"https://r{number}",)
        )
        keeper.on_disco(sealed(BOB, ALICE, encode(named)), PathId(relay=RELAY), BOB.peer_id)
    assert len(wanted) <= 1


async def test_a_restart_in_doubt_ends_the_doubt(alice: Kept) -> None:
    alice.keeper.relay_changed(RELAY, up=True, own=True)
    route = alice.keeper.adopt(BOB.peer_id, Route(alice.wire.direct(B)), restarted=False)
    alice.keeper.sent(route, [b"\x40" * 1000])
    async with asyncio.timeout(5):
        while route.also is None:  # noqa: ASYNC110 - the keeper's timers move it
            await asyncio.sleep(0.01)
    alice.keeper.adopt(BOB.peer_id, Route(alice.wire.direct(("192.0.2.3", 3000))), restarted=True)
    assert route.also is None
    assert route.path.id == PathId(("192.0.2.3", 3000))
    alice.keeper.adopt(BOB.peer_id, route, restarted=True)  # over the very route that was kept
    assert route.path.id == PathId(("192.0.2.3", 3000))
    assert alice.keeper.route(BOB.peer_id) is route


async def test_keys_never_seen_are_rationed(alice: Kept) -> None:
    for number in range(int(STRANGER_BURST) + 200):
        claimed = number.to_bytes(32, "big")
        alice.keeper.on_disco(b"\x1dswn" + claimed + bytes(80), PathId(E), None)
    assert alice.keeper.counters.rationed > 0  # the ration grows while this runs
    assert alice.keeper.counters.forged >= STRANGER_BURST * 0.9
    alice.keeper.want(BOB.peer_id, [B])
    alice.keeper.on_disco(sealed(BOB, ALICE, encode(Ping(bytes(12)))), PathId(B), None)
    assert alice.keeper.counters.pings_in == 1  # whom we know is heard all the same


async def test_pings_to_addresses_that_peers_name_are_bounded_in_all(alice: Kept) -> None:
    victim = Candidate(E, CandidateSource.REFLECTED)
    hostile = [Identity.generate() for _ in range(8)]
    alice.admitted |= {one.peer_id for one in hostile}
    alice.keeper.relay_changed(RELAY, up=True, own=True)
    for number, one in enumerate(hostile):
        call = Call(CallStage.CALL, bytes([number]) * 8, b"boot-one", 1, NatKind.HARD, 0, (victim,), (RELAY,))
        alice.keeper.on_disco(sealed(one, ALICE, encode(call)), PathId(relay=RELAY), one.peer_id)
    for kept in alice.keeper._peers.values():
        for _ in range(200):
            alice.keeper._do(kept, SendPing(PathId(E), bytes(12), 0))
    assert sum(path == PathId(E) for path, _, _ in alice.wire.disco) <= PROBE_BURST + PROBE_RATE
    assert alice.keeper.counters.withheld > 0


async def test_a_handshake_proves_a_path_and_a_restart_leaves_the_earlier_ones(alice: Kept) -> None:
    first, second = alice.wire.direct(B), alice.wire.direct(("192.0.2.3", 3000))
    route = alice.keeper.adopt(BOB.peer_id, Route(first), restarted=False)
    assert route.path.id == first.id
    assert alice.keeper.adopt(BOB.peer_id, Route(second), restarted=False) is route
    assert route.path.id == first.id
    assert alice.keeper.adopt(BOB.peer_id, Route(second), restarted=True) is route
    assert route.path.id == second.id
    assert [view.path for view in alice.keeper.views(BOB.peer_id)] == [second.id]


async def test_data_from_a_new_source_is_asked_and_not_followed(alice: Kept) -> None:
    route = alice.keeper.adopt(BOB.peer_id, Route(alice.wire.direct(B)), restarted=False)
    moved = PathId(("192.0.2.2", 4000))
    alice.wire.disco.clear()
    alice.keeper.heard(route, moved)
    await asyncio.sleep(0.02)
    assert route.path.id == PathId(B)
    assert moved in [path for path, _, _ in alice.wire.disco]


async def test_silence_after_sending_is_doubted_and_what_was_sent_goes_by_the_relay_too(alice: Kept) -> None:
    alice.keeper.relay_changed(RELAY, up=True, own=True)
    alice.keeper.set_local((), NatKind.UNKNOWN, 0, (RELAY,))
    route = alice.keeper.adopt(BOB.peer_id, Route(alice.wire.direct(B)), restarted=False)
    alice.keeper.sent(route, [b"\x40" * 1000])
    async with asyncio.timeout(5):
        while route.also is None:  # noqa: ASYNC110 - the keeper's timers move it
            await asyncio.sleep(0.01)
    assert route.also.id == PathId(relay=RELAY)
    assert [path.id for path in alice.wire.replayed] == [PathId(relay=RELAY)]
    alice.keeper.heard(route, PathId(B))
    async with asyncio.timeout(5):
        while route.path.id != PathId(relay=RELAY):
            await asyncio.sleep(0.02)
            alice.keeper.sent(route, [b"\x40" * 1000])


async def test_acknowledgements_alone_raise_no_doubt(alice: Kept) -> None:
    route = alice.keeper.adopt(BOB.peer_id, Route(alice.wire.direct(B)), restarted=False)
    alice.wire.disco.clear()
    alice.keeper.sent(route, [b"\x40" * 40])
    assert route.sent_at == float("-inf")


async def test_a_ping_measures_the_path_in_use(alice: Kept, bob: Kept) -> None:
    alice.keeper.adopt(BOB.peer_id, Route(alice.wire.direct(B)), restarted=False)
    asking = asyncio.ensure_future(alice.keeper.ping(BOB.peer_id, 2.0))
    await asyncio.sleep(0.01)
    deliver(alice, bob, PathId(A))
    deliver(bob, alice, PathId(B))
    path, rtt = await asking
    assert path.id == PathId(B)
    assert 0 < rtt < 1
    with pytest.raises(TimeoutError):
        await alice.keeper.ping(BOB.peer_id, 0.05)


async def test_a_lost_ping_is_followed_by_another(alice: Kept, bob: Kept) -> None:
    alice.keeper.adopt(BOB.peer_id, Route(alice.wire.direct(B)), restarted=False)
    asking = asyncio.ensure_future(alice.keeper.ping(BOB.peer_id, 5.0))
    await asyncio.sleep(0.01)
    alice.wire.disco.clear()
    async with asyncio.timeout(4):
        while not asking.done():
            await asyncio.sleep(0.02)
            deliver(alice, bob, PathId(A))
            deliver(bob, alice, PathId(B))
    assert asking.result()[1] < 0.5  # the time of the one that was answered


@pytest.mark.parametrize("known", [False, True])
async def test_who_waits_for_a_path_is_told_when_all_is_over(alice: Kept, known: bool) -> None:
    if known:
        alice.keeper.adopt(BOB.peer_id, Route(alice.wire.direct(B)), restarted=False)
    asking = asyncio.ensure_future(alice.keeper.ping(BOB.peer_id, 5.0))
    await asyncio.sleep(0.01)
    alice.keeper.close()
    with pytest.raises(EndpointClosed):
        await asking
