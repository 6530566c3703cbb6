from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from transport.proto.addresses import Candidate, CandidateSource, NatKind
from transport.proto.birthday import Shot
from transport.proto.disco_frames import SEAL_OVERHEAD, Call, CallStage, encode
from transport.proto.path_config import PathConfig
from transport.proto.paths import kind_of
from transport.proto.punch import Aim, OpenSockets, Plan, Punch, PunchAction, SendCall, plan_for

CONFIG = PathConfig()
LOW, HIGH = b"\x01" * 32, b"\x02" * 32
NONE, EASY, HARD, BLOCKED, UNKNOWN = NatKind.NONE, NatKind.EASY, NatKind.HARD, NatKind.BLOCKED, NatKind.UNKNOWN
INTERFACE, REFLECTED, MAPPED = CandidateSource.INTERFACE, CandidateSource.REFLECTED, CandidateSource.MAPPED
RELAY = "https://relay.example"
LAN = Candidate(("192.168.1.5", 4433), INTERFACE)
SEEN = Candidate(("8.8.1.1", 40001), REFLECTED)
SIX = Candidate(("2a00:1450::5", 4433), INTERFACE)
MAPPED_ONE = Candidate(("8.8.1.1", 4433), MAPPED)


def counted() -> object:
    numbers = iter(range(1, 10**9))
    return lambda count: (next(numbers) * 2654435761 % 2 ** (8 * count)).to_bytes(count, "big")


def punch(me: bytes = LOW, nat: NatKind = EASY, delta: int = 0, *candidates: Candidate) -> Punch:
    made = Punch(me, HIGH if me == LOW else LOW, CONFIG, counted(), kind_of)  # type: ignore[arg-type]
    made.local(candidates or (LAN, SEEN), nat, delta, (RELAY,), 0.0)
    return made


def calls(actions: list[PunchAction]) -> list[Call]:
    return [action.call for action in actions if isinstance(action, SendCall)]


def aims(actions: list[PunchAction]) -> list[Aim]:
    return [action for action in actions if isinstance(action, Aim)]


def answered(mine: Punch, theirs: Punch, relay_rtt: float = 0.1) -> tuple[list[Aim], list[Aim]]:
    """A whole session; what each aims at."""
    mine.start(RELAY, 0.0)
    (call,) = calls(mine.poll(0.0))
    theirs.on_call(call, RELAY, relay_rtt / 2)
    (answer,) = calls(theirs.poll(relay_rtt / 2))
    mine.on_call(answer, RELAY, relay_rtt)
    out = mine.poll(relay_rtt)
    (go,) = calls(out)
    theirs.on_call(go, RELAY, 1.5 * relay_rtt)
    return aims(out), aims(theirs.poll(1.5 * relay_rtt))


@pytest.mark.parametrize(
    ("mine", "theirs", "plan"),
    [
        (NONE, NONE, Plan.PLAIN),
        (NONE, HARD, Plan.PLAIN),
        (HARD, NONE, Plan.PLAIN),
        (EASY, EASY, Plan.PLAIN),
        (UNKNOWN, UNKNOWN, Plan.PLAIN),
        (EASY, HARD, Plan.SPRAY),
        (UNKNOWN, HARD, Plan.SPRAY),
        (HARD, EASY, Plan.OPEN),
        (HARD, HARD, Plan.LOCAL),
        (BLOCKED, NONE, Plan.LOCAL),
        (NONE, BLOCKED, Plan.LOCAL),
    ],
)
def test_plans(mine: NatKind, theirs: NatKind, plan: Plan) -> None:
    assert plan_for(mine, theirs) is plan


def test_both_fire_at_the_same_time_whatever_the_relay_takes() -> None:
    for relay_rtt in (0.01, 0.1, 0.4):
        first, second = answered(punch(LOW), punch(HIGH), relay_rtt)
        fires = relay_rtt + first[0].delay, 1.5 * relay_rtt + second[0].delay
        assert fires[0] == pytest.approx(fires[1])


def test_lan_first_and_all_within_a_tenth_of_a_second() -> None:
    many = [Candidate(("8.8.1.1", 1000 + n), REFLECTED) for n in range(15)]
    first, _ = answered(punch(LOW), punch(HIGH, EASY, 0, *many, LAN))
    assert len(first) == 16
    assert first[0].path.address == LAN.address
    assert first[-1].delay - first[0].delay <= 0.1


def test_addresses_where_nobody_can_be_are_not_aimed_at() -> None:
    hosts = ("224.0.0.1", "0.0.0.0", "169.254.1.1", "fe80::1", "not an address")
    useless = [Candidate((host, 4433), INTERFACE) for host in hosts]
    first, _ = answered(punch(LOW), punch(HIGH, EASY, 0, SEEN))
    other = punch(HIGH, EASY, 0, *useless[:4], SEEN)
    assert [aim.path.address for aim in answered(punch(LOW), other)[0]] == [aim.path.address for aim in first]


def test_two_hard_nats_try_only_what_needs_no_punch() -> None:
    mine = punch(LOW, HARD)
    first, _ = answered(mine, punch(HIGH, HARD, 0, LAN, SEEN, SIX, MAPPED_ONE))
    assert [aim.path.address for aim in first] == [LAN.address, SIX.address, MAPPED_ONE.address]
    assert mine.verdict == "relay only: both NATs are hard"
    alone = punch(LOW, HARD)
    first, _ = answered(alone, punch(HIGH, HARD, 0, SEEN))
    assert first == []
    assert alone.idle


@pytest.mark.parametrize("delta", [1, 2, -1])
def test_predicted_ports_come_before_the_plain_ones(delta: int) -> None:
    seen = [Candidate(("8.8.1.1", 40000), REFLECTED), Candidate(("8.8.1.1", 40000 + delta), REFLECTED)]
    first, second = answered(punch(LOW, EASY), punch(HIGH, HARD, delta, LAN, *seen))
    ports = [aim.path.address[1] for aim in first]
    assert ports[0] == LAN.address[1]
    assert ports[1:17] == [40000 + delta * step for step in range(2, 18)]
    assert first[-1].delay - first[0].delay <= 0.1
    assert [aim.path.address for aim in second] == [LAN.address, SEEN.address]


def shots(machine: Punch, until: float, now: float) -> list[tuple[float, Shot]]:
    found = []
    while (due := machine.due) <= until:
        now = max(now, due)
        found += [(now, action) for action in machine.poll(now) if isinstance(action, Shot)]
    return found


def test_the_birthday_after_a_second() -> None:
    easy, hard = punch(LOW, EASY), punch(HIGH, HARD)
    answered(easy, hard)
    fan_out: list[OpenSockets] = []
    while not fan_out:
        fan_out = [action for action in hard.poll(hard.due) if isinstance(action, OpenSockets)]
    assert fan_out == [OpenSockets(256)]
    hard.sockets_ready(256, 1.2)
    fan = shots(hard, 20.0, 1.2)
    assert {shot.path.socket for _, shot in fan} == set(range(1, 257))
    assert {shot.path.address for _, shot in fan} == {SEEN.address}
    assert 3 * 256 < len(fan) <= 4 * 256  # every four seconds
    spray = shots(easy, 20.0, 0.1)
    assert 1400 < len(spray) <= 1500
    assert spray[0][0] == pytest.approx(1.15)
    assert spray[-1][0] - spray[0][0] <= 15.0
    assert min(later - at for (at, _), (later, _) in pairwise(spray)) >= 0.0099
    ports = [shot.path.address[1] for _, shot in spray]
    assert len(set(ports)) == len(ports)
    assert all(1024 <= port < 65536 for port in ports)
    assert easy.verdict == "relay only: one NAT is hard, and no port of it was hit"
    assert easy.idle
    assert hard.idle


def test_the_lower_key_wins_when_both_call() -> None:
    low, high = punch(LOW), punch(HIGH)
    low.start(RELAY, 0.0)
    high.start(RELAY, 0.0)
    (from_low,), (from_high,) = calls(low.poll(0.0)), calls(high.poll(0.0))
    low.on_call(from_high, RELAY, 0.1)
    high.on_call(from_low, RELAY, 0.1)
    assert calls(low.poll(0.1)) == []
    (answer,) = calls(high.poll(0.1))
    assert answer.stage is CallStage.ANSWER
    assert answer.session == from_low.session


def test_a_call_without_an_answer_is_repeated_and_given_up() -> None:
    machine, sent, now = punch(), 0, 0.0
    machine.start(RELAY, now)
    while machine.due < 10:
        now = max(now, machine.due)
        sent += len(calls(machine.poll(now)))
    assert sent == CONFIG.call_tries
    assert machine.verdict == "relay only: the peer does not answer calls"
    assert not machine.may_start(4.0)
    assert machine.may_start(5.0)


def test_a_lost_go_only_delays_the_called() -> None:
    mine, theirs = punch(LOW), punch(HIGH)
    mine.start(RELAY, 0.0)
    theirs.on_call(calls(mine.poll(0.0))[0], RELAY, 0.0)
    theirs.poll(0.0)
    assert theirs.due == 1.0
    assert aims(theirs.poll(1.0))


def test_answers_and_gos_of_other_sessions_are_ignored() -> None:
    machine = punch()
    machine.start(RELAY, 0.0)
    (call,) = calls(machine.poll(0.0))
    for stage in (CallStage.ANSWER, CallStage.GO):
        machine.on_call(replace(call, stage=stage, session=b"x" * 8), RELAY, 0.1)
    machine.on_call(replace(call, stage=CallStage.GO), RELAY, 0.1)
    assert machine.poll(0.1) == []


def test_sessions_are_rationed_even_if_everything_changes() -> None:
    machine, started, now = punch(), 0, 0.0
    for _ in range(600):
        now += 0.1
        machine.poll(now)
        machine.changed(network=True)
        if machine.may_start(now):
            machine.start(RELAY, now)
            machine.on_direct()
            started += 1
    assert started <= 3 + 60 / 5


def test_relay_bytes_of_the_largest_punch() -> None:
    many = [Candidate((f"2a00:1450::{n}", 4433), INTERFACE) for n in range(16)]
    mine, theirs = punch(LOW, EASY, 0, *many), punch(HIGH, EASY, 0, *many)
    mine.start(RELAY, 0.0)
    (call,) = calls(mine.poll(0.0))
    theirs.on_call(call, RELAY, 0.0)
    (answer,) = calls(theirs.poll(0.0))
    mine.on_call(answer, RELAY, 0.1)
    (go,) = calls(mine.poll(0.1))
    size = sum(len(encode(message)) + SEAL_OVERHEAD + 35 for message in (call, answer, go))
    assert 2 * size <= 4096  # two sessions
