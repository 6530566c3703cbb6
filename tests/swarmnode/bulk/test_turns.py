from __future__ import annotations

from swarmnode.bulk.turns import IDLE_S, MAX_SOURCES, Turns
from transport.identity import Identity, PeerId


def peer(number: int) -> PeerId:
    return Identity.generate(number.to_bytes(32, "big")).peer_id


WORKERS = [peer(number) for number in range(1, 31)]
OWN, BACKBONE = peer(90), peer(91)


def test_who_generates_comes_first_then_who_is_connected_and_no_member_is_everybody_s_choice() -> None:
    holders = dict.fromkeys(WORKERS, False) | {BACKBONE: True}
    chosen = Turns(OWN).choose(holders, WORKERS[:3])
    assert chosen[0] == BACKBONE
    assert set(chosen[1:4]) == set(WORKERS[:3])
    assert len(chosen) == MAX_SOURCES
    asked = {one for own in WORKERS for one in Turns(own).choose(dict.fromkeys(WORKERS, False), ())}
    assert asked == set(WORKERS)


def test_everybody_has_a_turn_and_who_gives_stays() -> None:
    turns, holders = Turns(OWN), dict.fromkeys(WORKERS, False) | {BACKBONE: True}
    received: dict[PeerId, int] = {}
    asked: set[PeerId] = set()
    giver: PeerId | None = None
    for look in range(20):
        for one in turns.choose(holders, received):
            received.setdefault(one, 0)
            asked.add(one)
        giver = giver or next(one for one in received if one != BACKBONE)
        received[giver] += 1
        for one in turns.ended(holders, received, look * IDLE_S):
            del received[one]
        assert {giver, BACKBONE} <= received.keys()
        assert len(received) <= MAX_SOURCES
    assert asked == set(holders)


def test_who_cannot_be_reached_keeps_nobody_from_being_asked() -> None:
    turns, holders = Turns(OWN), dict.fromkeys(WORKERS, False)
    asked: set[PeerId] = set()
    for _ in range(4):
        chosen = turns.choose(holders, ())
        asked.update(chosen)
        for one in chosen:
            turns.failed(one)
    assert asked == set(WORKERS)


def test_the_only_holders_are_never_let_go() -> None:
    turns, few = Turns(OWN), dict.fromkeys(WORKERS[:MAX_SOURCES], False)
    for look in range(5):
        assert turns.ended(few, dict.fromkeys(few, 0), look * IDLE_S) == []
