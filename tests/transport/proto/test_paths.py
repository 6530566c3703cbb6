"""The numbers that people feel, shown in the simulator: how soon direct, how soon around a failure, at what cost."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.proto.path_simulator import RELAY, Link, Node, Simulation, behind, public
from transport.proto.addresses import Candidate, CandidateSource, NatKind, PathId, PathKind
from transport.proto.disco_frames import Call, CallStage
from transport.proto.path_policy import PathState
from transport.proto.paths import PathConfig, PeerPaths, SendPing

DIRECT_KINDS = (PathKind.PUBLIC, PathKind.PUNCHED, PathKind.LAN)
OTHER_RELAY = "https://other.example"


def easy_pair() -> tuple[Node, Node]:
    return behind("a", NatKind.EASY, "8.1.1.1"), behind("b", NatKind.EASY, "8.2.2.2")


def running(seconds: float = 60.0, size: int = 1200, **kwargs: float) -> Simulation:
    """Two easy NATs, three seconds after the start: direct, with a request every 20 ms."""
    simulation = Simulation(*easy_pair(), **kwargs)  # type: ignore[arg-type]
    simulation.start()
    simulation.traffic(seconds, size=size)
    simulation.run(3.0)
    assert kind(simulation.a) is PathKind.PUNCHED
    assert kind(simulation.b) is PathKind.PUNCHED
    return simulation


def kind(node: Node) -> PathKind | None:
    primary = node.paths.decision.primary
    if primary is None:
        return None
    return next(view.kind for view in node.paths.views(0.0) if view.path == primary)


def rtts(node: Node, now: float) -> list[float]:
    """Of all paths that have ever been measured, seconds."""
    return [view.rtt for view in node.paths.views(now) if view.rtt is not None]


def time_to_direct(simulation: Simulation, limit: float = 30.0) -> float:
    start = simulation.now
    while simulation.now < start + limit:
        simulation.run(0.01)
        if all(kind(node) in DIRECT_KINDS for node in (simulation.a, simulation.b)):
            return simulation.now - start
    return limit


# Opening a direct path.


def test_two_easy_nats_are_direct_after_two_relay_round_trips() -> None:
    simulation = Simulation(*easy_pair())
    simulation.start()
    assert time_to_direct(simulation) <= 2 * 0.05 + 0.02 + 0.1
    assert simulation.a.paths.counters.relay_bytes + simulation.b.paths.counters.relay_bytes < 1000
    simulation.run(2.0)
    assert simulation.a.paths.decision.reason == "punched: 20 ms, relay 50 ms"
    assert simulation.a.paths.size(simulation.a.paths.decision.primary or PathId()) == 1452


def test_a_direct_candidate_is_enough_without_a_relay() -> None:
    simulation = Simulation(public("a", "8.1.1.1"), public("b", "8.2.2.2"), relays=())
    simulation.a.paths.want(simulation.now)
    simulation.a.paths.candidate(PathId(simulation.b.inside(0)), PathKind.PUBLIC, simulation.now)
    simulation.run(0.5)
    assert kind(simulation.a) is PathKind.PUBLIC
    assert kind(simulation.b) is PathKind.PUBLIC  # our ping told it
    assert simulation.a.paths.decision.reason == "direct: 20 ms"


def test_a_candidate_that_came_before_anyone_wanted_is_tried_when_wanted() -> None:
    simulation = Simulation(public("a", "8.1.1.1"), public("b", "8.2.2.2"), relays=())
    simulation.a.paths.candidate(PathId(simulation.b.inside(0)), PathKind.PUBLIC, simulation.now)
    simulation.run(5.0)
    assert simulation.a.paths.counters.pings == 0
    simulation.a.paths.want(simulation.now)
    simulation.run(0.1)
    assert kind(simulation.a) is PathKind.PUBLIC


def test_a_lan_wins_over_everything() -> None:
    a, b = behind("a", NatKind.EASY, "8.1.1.1", lan="x"), behind("b", NatKind.EASY, "8.1.1.2", lan="x")
    simulation = Simulation(a, b)
    simulation.start()
    simulation.run(2.0)
    assert kind(a) is PathKind.LAN
    assert a.paths.decision.reason.startswith("lan: 1 ms")


MATRIX = {
    "none": ("none", NatKind.NONE, 0, "port"),
    "cone": ("cone", NatKind.EASY, 0, "open"),
    "restricted": ("restricted", NatKind.EASY, 0, "address"),
    "easy": ("easy", NatKind.EASY, 0, "port"),
    "hard": ("hard", NatKind.HARD, 0, "port"),
    "steps": ("steps", NatKind.HARD, 1, "port"),
    "blocked": ("blocked", NatKind.BLOCKED, 0, "port"),
}


def node_of(name: str, which: str, host: str) -> Node:
    _, nat, step, filters = MATRIX[which]
    return public(name, host) if nat is NatKind.NONE else behind(name, nat, host, step=step, filters=filters)


@pytest.mark.parametrize("left", MATRIX)
@pytest.mark.parametrize("right", MATRIX)
def test_every_pair_of_nats(left: str, right: str) -> None:
    simulation = Simulation(node_of("a", left, "8.1.1.1"), node_of("b", right, "8.2.2.2"))
    simulation.start()
    took = time_to_direct(simulation, 18.0)
    hard = {"hard", "steps"}
    possible = "blocked" not in (left, right) and not (left in hard and right in hard)
    assert (took < 18.0) == possible
    if not possible:
        assert "relay only" in simulation.a.paths.decision.reason
        why = "UDP is blocked" if "blocked" in (left, right) else "both NATs are hard"
        assert why in simulation.a.paths.decision.reason
    elif {left, right} != {"easy", "hard"}:
        assert took < 0.5  # plain or predicted, no birthday
    spent = simulation.a.paths.counters.relay_bytes + simulation.b.paths.counters.relay_bytes
    assert spent < 4096


def test_two_hard_nats_are_told_within_a_second() -> None:
    simulation = Simulation(node_of("a", "hard", "8.1.1.1"), node_of("b", "hard", "8.2.2.2"))
    simulation.start()
    simulation.run(1.0)
    assert simulation.a.paths.decision.reason == "relay only: both NATs are hard"
    calls = simulation.a.paths.counters.calls
    for _ in range(60):
        simulation.a.paths.want(simulation.now)
        simulation.run(1.0)
    assert simulation.a.paths.counters.calls == calls  # nothing changed: nothing is tried again


@pytest.mark.parametrize("hard_calls", [True, False])
def test_the_birthday_keeps_one_socket_and_comes_once(hard_calls: bool) -> None:
    hard, easy = behind("h", NatKind.HARD, "8.1.1.1"), behind("e", NatKind.EASY, "8.2.2.2")
    simulation = Simulation(hard, easy) if hard_calls else Simulation(easy, hard)
    simulation.start()
    assert 1.0 < time_to_direct(simulation) < 16.5
    simulation.run(1.0)
    assert hard.count["OpenSockets"] == 1
    assert len(hard.sockets) >= 1
    primary = hard.paths.decision.primary
    assert primary is not None
    assert primary.socket in hard.sockets
    assert len(hard.sockets) <= 3
    simulation.black_hole()
    simulation.run(60.0)
    assert hard.count["OpenSockets"] == 1


def test_both_call_at_once_and_one_session_wins() -> None:
    simulation = Simulation(*easy_pair())
    simulation.start()
    simulation.b.paths.want(simulation.now)
    assert time_to_direct(simulation) < 0.25
    assert simulation.a.count["SendCall"] == 2  # CALL, GO: the lower key's
    assert simulation.b.count["SendCall"] == 2  # CALL in vain, ANSWER


def test_a_lossy_relay_only_delays_the_punch() -> None:
    slow = 0
    for seed in range(60):
        simulation = Simulation(*easy_pair(), seed=seed)
        simulation.relay_links[RELAY].loss = 0.2
        simulation.start()
        slow += time_to_direct(simulation) > 6.5
    assert slow <= 2  # seven calls or answers in a row were lost


def test_a_punch_that_fails_is_repeated_once_and_then_only_when_something_changes() -> None:
    simulation = Simulation(*easy_pair())
    simulation.black_hole()
    simulation.start()
    for _ in range(40):
        simulation.a.paths.want(simulation.now)
        simulation.run(1.0)
    assert simulation.a.count["SendCall"] == 4  # two sessions: CALL and GO
    assert simulation.a.paths.decision.reason == "relay only: no direct address answered"
    assert simulation.a.paths.counters.relay_bytes + simulation.b.paths.counters.relay_bytes < 4096
    simulation.black_hole(up=True)
    simulation.tell(simulation.a, Candidate(("8.1.1.1", 5555), CandidateSource.MAPPED))
    assert time_to_direct(simulation) < 0.3


def test_an_outage_that_cost_both_mappings_is_over_within_half_a_minute() -> None:
    simulation = running(60.0)
    simulation.black_hole()
    for node in (simulation.a, simulation.b):
        assert node.nat is not None
        node.nat.renumber()
        simulation.tell(node)
    simulation.run(20.0)
    assert "relay" in simulation.a.paths.decision.reason
    simulation.black_hole(up=True)
    assert time_to_direct(simulation) < 31.0  # nothing told us; but it had worked before


# Around a failure.


def test_a_dead_path_costs_a_third_of_a_second() -> None:
    simulation = running(10.0)
    start = simulation.now
    simulation.black_hole()
    simulation.run(1.5)
    assert kind(simulation.a) is PathKind.RELAY
    assert simulation.a.paths.decision.duplicate is None
    assert simulation.a.paths.decision.reason == "relay: the direct path does not answer"
    doubted = next(at for at, text in simulation.a.log if text.startswith("duplicated") and at >= start)
    assert doubted - start <= 0.3
    simulation.run(3.0)
    assert not simulation.late(start, simulation.now - 0.5, 0.36)
    back = simulation.now
    simulation.black_hole(up=True)
    assert time_to_direct(simulation) < 5.0
    assert simulation.a.count["Replay"] == 1
    simulation.run(1.0)
    assert not simulation.late(back, simulation.now - 0.5, 0.1)


@pytest.mark.parametrize("direction", ["a to b", "b to a"])
def test_one_direction_dead(direction: str) -> None:
    """From b to a: b hears everything; only that a asks the relay tells it that something is wrong."""
    simulation = running(20.0)
    start = simulation.now
    nodes = (simulation.a, simulation.b) if direction == "a to b" else (simulation.b, simulation.a)
    simulation.link(*nodes).up = False
    simulation.run(5.0)
    assert kind(simulation.a) is PathKind.RELAY
    assert kind(simulation.b) is PathKind.RELAY
    assert not simulation.late(start, simulation.now - 1.0, 0.55)
    assert len(simulation.late(start, simulation.now - 1.0, 0.1)) < 30  # for about half a second
    simulation.run(5.0)
    assert kind(simulation.a) is PathKind.RELAY  # it does not flap


def test_a_peer_that_prefers_the_relay_for_good_is_asked_and_left() -> None:
    """B's packets get lost and A's do not: A sends directly, B answers by the relay."""
    simulation = running(100.0)
    a, b = simulation.a, simulation.b
    for _ in range(8):
        simulation.run(0.75)
        primary = b.paths.decision.primary
        assert primary is not None
        b.paths.sample(primary, 50, 8, None, simulation.now)
        assert a.paths.decision.primary is not None
        a.paths.sample(a.paths.decision.primary, 50, 0, None, simulation.now)
    assert kind(b) is PathKind.RELAY
    assert kind(a) is PathKind.PUNCHED
    pings, start = a.paths.counters.pings, simulation.now
    simulation.run(20.0)
    assert kind(a) is PathKind.PUNCHED
    assert kind(b) is PathKind.RELAY
    assert a.count["Replay"] == 0
    assert a.paths.counters.switches == 1
    assert (a.paths.counters.pings - pings) / (simulation.now - start) <= 2.5


def test_random_loss_of_two_percent_never_leaves_the_direct_path() -> None:
    simulation = running(60.0)
    for link in simulation.links.values():
        link.loss, link.jitter = 0.02, 0.2
    simulation.run(55.0)
    assert kind(simulation.a) is PathKind.PUNCHED
    assert simulation.a.paths.counters.switches == 1


def test_a_send_that_needs_no_answer_costs_few_pings_and_no_doubt() -> None:
    simulation = running(1.0)
    primary = simulation.a.paths.decision.primary
    assert primary is not None
    for _ in range(20):
        pings = simulation.a.paths.counters.pings
        simulation.a.paths.sent(primary, 40, simulation.now)  # an acknowledgement: nothing answers it
        simulation.run(1.0)
        assert simulation.a.paths.counters.pings - pings <= 3  # one of them asks the relay
    assert simulation.a.count["Replay"] == 0


def test_a_peer_that_answers_by_another_path_causes_no_doubt() -> None:
    simulation = running(0.5)
    a = simulation.a
    direct = a.paths.decision.primary
    assert direct is not None
    pings, start = a.paths.counters.pings, simulation.now
    for _ in range(500):
        a.paths.sent(direct, 1200, simulation.now)
        a.paths.heard(PathId(relay=RELAY), simulation.now)
        simulation.run(0.02)
    assert a.count["Replay"] == 0
    assert a.paths.decision.primary == direct
    assert (a.paths.counters.pings - pings) / (simulation.now - start) <= 4.0


@pytest.mark.parametrize("stopped", [0.4, 1.0, 3.0])
def test_our_own_stall_is_not_the_paths_fault(stopped: float) -> None:
    simulation = running(20.0)
    a = simulation.a
    simulation.pause(a, stopped)
    simulation.run(stopped + 0.001)
    assert a.count["Replay"] == 0
    simulation.run(3.0)
    assert a.count["Replay"] == 0
    assert kind(a) is PathKind.PUNCHED
    for node in (simulation.a, simulation.b):  # pongs that waited in a socket do not tell how far the peer is
        assert max(rtts(node, simulation.now)) < 0.06


def test_a_peer_that_was_stopped_is_no_farther_away_afterwards() -> None:
    """All that was asked meanwhile is answered at once, seconds late."""
    simulation = running(30.0)
    simulation.pause(simulation.b, 3.0)
    simulation.run(6.0)
    assert kind(simulation.a) is PathKind.PUNCHED
    assert max(rtts(simulation.a, simulation.now)) < 0.06


def test_idle_paths_are_asked_rarely_and_a_silent_death_is_noticed() -> None:
    simulation = running(1.0)
    a, b = simulation.a, simulation.b
    simulation.run(10.0)
    pings = a.paths.counters.pings
    simulation.run(60.0)
    assert 12 <= a.paths.counters.pings - pings <= 20  # direct every 5 s, relay every 15 s
    simulation.black_hole()
    simulation.run(7.5)
    assert kind(a) is PathKind.RELAY
    simulation.run(100.0)
    before = a.paths.counters.pings, b.paths.counters.pings
    simulation.run(300.0)  # nobody spoke for two minutes: left alone
    assert (a.paths.counters.pings, b.paths.counters.pings) == before


def test_what_is_sent_into_a_long_silence_is_duplicated_until_an_answer() -> None:
    simulation = running(1.0)
    simulation.run(300.0)  # far beyond lingering: nothing is asked any more
    simulation.black_hole()
    start = simulation.now
    simulation.traffic(3.0)
    simulation.run(0.01)
    assert simulation.a.paths.decision.duplicate == PathId(relay=RELAY)
    simulation.run(4.0)
    assert not simulation.late(start, simulation.now - 1, 0.1)


def test_a_rebinding_nat_is_followed() -> None:
    simulation = running(20.0)
    start = simulation.now
    assert simulation.a.nat is not None
    before = simulation.b.paths.decision.primary
    simulation.a.nat.renumber()
    simulation.b.nat.filters = "open"  # type: ignore[union-attr]
    simulation.run(3.0)
    assert simulation.b.paths.decision.primary != before
    assert kind(simulation.b) in DIRECT_KINDS
    assert not simulation.late(start, simulation.now - 1, 0.4)


def test_a_rebinding_behind_strict_filters_is_punched_anew() -> None:
    simulation = running(20.0)
    start = simulation.now
    assert simulation.a.nat is not None
    simulation.a.nat.renumber()
    simulation.tell(simulation.a)
    simulation.run(4.0)
    assert kind(simulation.a) is PathKind.PUNCHED
    assert kind(simulation.b) is PathKind.PUNCHED
    assert not simulation.late(start, simulation.now - 1, 0.4)


def test_another_network_is_direct_again_soon() -> None:
    simulation = running(20.0)
    a, start = simulation.a, simulation.now
    assert a.nat is not None
    a.nat.host, a.host = "8.1.1.77", "192.168.7.7"
    a.nat.renumber()
    a.paths.network_changed(simulation.now)
    simulation.tell(a)
    simulation.run(0.4)
    assert kind(a) is PathKind.PUNCHED
    simulation.run(2.0)
    assert a.paths.decision.duplicate is None
    assert not simulation.late(start, simulation.now - 1, 0.4)


def test_a_network_change_that_changed_nothing_costs_nothing() -> None:
    simulation = running(20.0)
    primary, start = simulation.a.paths.decision.primary, simulation.now
    simulation.a.paths.network_changed(simulation.now)
    simulation.run(2.0)
    assert simulation.a.paths.decision.primary == primary
    assert not simulation.late(start, simulation.now - 1, 0.1)


# Names.


@pytest.mark.parametrize("left", ["none", "easy", "hard"])
@pytest.mark.parametrize("right", ["none", "cone", "easy"])
def test_both_sides_call_a_path_the_same(left: str, right: str) -> None:
    simulation = Simulation(node_of("a", left, "8.1.1.1"), node_of("b", right, "8.2.2.2"))
    a, b = simulation.a, simulation.b
    simulation.start()
    assert time_to_direct(simulation, 18.0) < 18.0
    expected = PathKind.PUBLIC if "none" in (left, right) else PathKind.PUNCHED
    for node in (a, b):
        kinds = {view.kind for view in node.paths.views(simulation.now) if view.direct and view.proven}
        assert kinds == {expected}
    before = b.paths.decision.primary
    assert before is not None
    assert b.paths.kind(before) is expected
    if a.nat is not None and right in ("none", "cone"):  # a new port, which b first hears of from a ping
        a.nat.renumber()
        simulation.traffic(3.0)
        simulation.run(3.0)
        after = b.paths.decision.primary
        assert after not in (before, None)
        assert {kind(a), kind(b)} == {expected}


def test_a_handshake_over_a_path_comes_before_anyone_knows_the_nats() -> None:
    simulation = Simulation(node_of("a", "easy", "8.1.1.1"), node_of("b", "cone", "8.2.2.2"))
    a, b = simulation.a, simulation.b
    assert a.nat is not None
    assert b.nat is not None
    there = PathId(b.nat.out(b.inside(0), ("192.0.9.1", 3478)))
    back = PathId(a.nat.out(a.inside(0), there.address))
    a.paths.confirmed(there, PathKind.PUBLIC, simulation.now)
    b.paths.confirmed(back, PathKind.PUBLIC, simulation.now)
    assert (kind(a), kind(b)) == (PathKind.PUBLIC, PathKind.PUBLIC)
    simulation.start()
    simulation.b.paths.on_call(
        Call(CallStage.CALL, bytes(8), bytes(8), 1, NatKind.EASY, 0, (), (RELAY,)), RELAY, simulation.now
    )
    simulation.run(1.0)
    assert kind(b) is PathKind.PUNCHED  # both are told now


def test_ipv6_needs_no_nat() -> None:
    machine = PeerPaths(b"a" * 32, b"b" * 32, PathConfig(), bytes, 0.0)
    machine.local((), NatKind.HARD, 0, (RELAY,), 0.0)
    machine.relay_up(RELAY, 0.0)
    path = PathId(("2606:1100::1", 4433))
    machine.on_call(Call(CallStage.CALL, bytes(8), bytes(8), 1, NatKind.HARD, 0, (), (RELAY,)), RELAY, 0.0)
    machine.poll(0.0)
    machine.confirmed(path, PathKind.PUBLIC, 0.0)
    assert machine.kind(path) is PathKind.PUBLIC
    machine.confirmed(PathId(("8.2.2.2", 4433)), PathKind.PUBLIC, 0.0)
    assert machine.kind(PathId(("8.2.2.2", 4433))) is PathKind.PUNCHED


# Relays.


def test_a_relay_that_dies_is_replaced_by_the_second() -> None:
    a, b = node_of("a", "hard", "8.1.1.1"), node_of("b", "hard", "8.2.2.2")
    simulation = Simulation(a, b, relays=(RELAY, OTHER_RELAY))
    simulation.start()
    simulation.traffic(20.0)
    simulation.run(3.0)
    first = a.paths.decision.primary
    assert first is not None
    start = simulation.now
    simulation.relay_links[first.relay].up = False
    simulation.run(2.0)
    second = a.paths.decision.primary
    assert second is not None
    assert second != first
    assert not simulation.late(start, simulation.now - 1, 0.4)
    simulation.detach(a, second.relay)
    assert a.paths.decision.primary in (first, None)


def test_a_relay_where_the_peer_is_not_is_left_for_two_seconds() -> None:
    a, b = node_of("a", "hard", "8.1.1.1"), node_of("b", "hard", "8.2.2.2")
    simulation = Simulation(a, b, relays=(RELAY, OTHER_RELAY))
    simulation.attach(a)
    simulation.attach(b, OTHER_RELAY)
    a.paths.want(simulation.now)
    simulation.run(1.0)
    assert a.paths.decision.primary == PathId(relay=OTHER_RELAY)
    pings = a.count["SendPing"]
    simulation.run(10.0)
    assert a.count["SendPing"] - pings < 20


def test_the_home_relay_of_the_peer_goes_first() -> None:
    a, b = node_of("a", "hard", "8.1.1.1"), node_of("b", "hard", "8.2.2.2")
    simulation = Simulation(a, b, relays=(RELAY, OTHER_RELAY))
    simulation.relay_links[OTHER_RELAY].delay = 0.035
    simulation.start()
    b.paths.local((), NatKind.HARD, 0, (OTHER_RELAY, RELAY), simulation.now)
    a.paths.local((), NatKind.HARD, 0, (OTHER_RELAY, RELAY), simulation.now)
    simulation.run(3.0)
    assert a.paths.decision.primary == PathId(relay=OTHER_RELAY)


@pytest.mark.parametrize("seed", range(3))
def test_jitter_of_a_fifth_switches_at_most_once_a_minute(seed: int) -> None:
    a, b = node_of("a", "hard", "8.1.1.1"), node_of("b", "hard", "8.2.2.2")
    simulation = Simulation(a, b, relays=(RELAY, OTHER_RELAY), seed=seed)
    for url, delay in ((RELAY, 0.025), (OTHER_RELAY, 0.024)):
        simulation.relay_links[url].delay, simulation.relay_links[url].jitter = delay, 0.2
    simulation.start()
    simulation.traffic(300.0, gap=0.5)
    simulation.run(5.0)
    switches = a.paths.counters.switches
    simulation.run(300.0)
    assert a.paths.counters.switches - switches <= 2


def test_two_similar_direct_paths_with_jitter_for_half_an_hour() -> None:
    """Node a has two sockets, so there are two paths, 20 and 21 ms long; jitter is a fifth of each packet's way."""
    simulation = Simulation(public("a", "8.1.1.1"), public("b", "8.2.2.2"))
    a, b = simulation.a, simulation.b
    a.sockets = {1}
    for link in simulation.links.values():
        link.jitter = 0.2
    simulation.lanes[a.port + 1] = Link(0.0105, jitter=0.2)
    simulation.relay_links[RELAY].jitter = 0.2
    simulation.start()
    a.paths.candidate(PathId(b.inside(0), socket=1), PathKind.PUBLIC, simulation.now)
    simulation.traffic(1830.0, gap=0.25)
    simulation.run(10.0)
    live = [view for view in a.paths.views(simulation.now) if view.direct and view.state is PathState.LIVE]
    assert len(live) == 2
    for node in (a, b):
        node.switched_at = []
    simulation.run(1800.0)
    for node in (a, b):
        assert kind(node) is PathKind.PUBLIC
        assert len(node.switched_at) <= 3, node.switched_at
        assert all(after - before >= 60 for before, after in pairwise(node.switched_at))


# Quality.


def sampled(simulation: Simulation, seconds: int, loss: float, goodput: float | None = None) -> None:
    for _ in range(seconds):
        simulation.run(1.0)
        primary = simulation.a.paths.decision.primary
        if primary is not None and not primary.relay:
            simulation.a.paths.sample(primary, 50, round(50 * loss), goodput, simulation.now)


def test_a_path_that_loses_too_much_loses_its_tier_and_comes_back() -> None:
    simulation = running(200.0)
    sampled(simulation, 10, 0.02)
    assert kind(simulation.a) is PathKind.PUNCHED
    for link in simulation.links.values():
        link.loss = 0.05
    sampled(simulation, 6, 0.1)
    assert kind(simulation.a) is PathKind.RELAY
    assert simulation.a.paths.decision.reason.startswith("relay: direct path loses ")
    for link in simulation.links.values():
        link.loss = 0.0
    pings = simulation.a.paths.counters.pings
    simulation.run(25.0)
    assert kind(simulation.a) is PathKind.RELAY
    simulation.run(20.0)
    assert kind(simulation.a) is PathKind.PUNCHED
    assert simulation.a.paths.counters.pings - pings < 130


def lossy_seconds(simulation: Simulation, seconds: float, loss: float, *nodes: Node) -> None:
    """QUIC reports this share of lost packets on whatever path it sends, at these nodes (both, when none is named)."""
    end = simulation.now + seconds
    while simulation.now < end:
        simulation.run(0.75)
        for node in nodes or (simulation.a, simulation.b):
            primary = node.paths.decision.primary
            if primary is not None:
                node.paths.sample(primary, 100, round(100 * loss), None, simulation.now)


@pytest.mark.parametrize("event", ["black hole", "short black hole", "moved", "rebound", "nothing changed"])
def test_losses_of_a_disturbance_say_nothing_of_the_path(event: str) -> None:
    """QUIC finds them up to two seconds later, when the path is in order again or another one is used."""
    simulation = running(60.0)
    a, b = simulation.a, simulation.b
    assert a.nat is not None
    assert b.nat is not None
    losers = {"rebound": (b,), "nothing changed": (a,)}.get(event, (a, b))  # whose packets got lost
    lossy_seconds(simulation, 3.0, 0.0)
    if event == "moved":
        a.nat.host, a.host = "8.1.1.77", "192.168.7.7"
        a.nat.renumber()
        lossy_seconds(simulation, 0.75, 0.4)
        a.paths.network_changed(simulation.now)
        simulation.tell(a)
    elif event == "nothing changed":
        a.paths.network_changed(simulation.now)
    elif event == "rebound":
        a.nat.renumber()
        b.nat.filters = "open"
    else:
        simulation.black_hole()
        lossy_seconds(simulation, 0.75 if event.startswith("short") else 3.0, 0.4)
        simulation.black_hole(up=True)
    deadline = simulation.now + 10.0
    while not all(kind(node) in DIRECT_KINDS for node in (a, b)) and simulation.now < deadline:
        lossy_seconds(simulation, 0.75, 0.3, *losers)
    lossy_seconds(simulation, 1.5, 0.3, *losers)
    lossy_seconds(simulation, 10.0, 0.0)
    for node in (a, b):
        assert kind(node) in DIRECT_KINDS
        assert not any("loses" in text for _, text in node.log), node.log


def test_a_path_that_loses_after_a_disturbance_still_loses_its_tier() -> None:
    simulation = running(60.0)
    simulation.black_hole()
    simulation.run(3.0)
    simulation.black_hole(up=True)
    assert time_to_direct(simulation) < 5.0
    for link in simulation.links.values():
        link.loss = 0.08
    lossy_seconds(simulation, 8.0, 0.15)
    assert kind(simulation.a) is PathKind.RELAY


@pytest.mark.parametrize("seed", range(6))
def test_a_pair_leaves_a_lossy_path_together(seed: int) -> None:
    """Who leaves says so: the other one would take the silence for a disturbance, and what it lost for the same."""
    simulation = running(60.0, seed=seed)
    a, b = simulation.a, simulation.b
    for link in simulation.links.values():
        link.loss = 0.2
    while kind(a) in DIRECT_KINDS:
        lossy_seconds(simulation, 0.75, 0.2, a)
        assert simulation.now < 115.0
    lossy_seconds(simulation, 1.5, 0.2, b)
    assert kind(b) is PathKind.RELAY
    for node in (a, b):
        assert node.paths.decision.reason.startswith("relay: direct path loses")
    simulation.run(30.0)
    assert not simulation.late(simulation.now - 30.0, simulation.now - 1.0, 0.2)


@pytest.mark.parametrize("loss", [0.1, 0.2, 0.35, 0.5])
def test_a_very_lossy_path_is_left_for_the_relay(loss: float) -> None:
    """However often it is doubted and answers again meanwhile."""
    for seed in range(5):
        simulation = running(60.0, seed=seed)
        for link in simulation.links.values():
            link.loss = loss
        lossy_seconds(simulation, 15.0, loss)
        away = 0
        for _ in range(40):
            simulation.run(0.25)
            away += kind(simulation.a) is PathKind.RELAY
        assert away >= 20, simulation.a.log


@pytest.mark.parametrize("loss", [0.35, 0.5])
def test_a_path_that_dies_of_loss_does_not_flap(loss: float) -> None:
    """Too little is sent to measure the loss. Three pongs in a row bring it back by luck; ever more are asked for."""
    for seed in range(5):
        simulation = Simulation(*easy_pair(), seed=seed)
        simulation.start()
        simulation.traffic(700.0, gap=1.0)
        simulation.run(3.0)
        for link in simulation.links.values():
            link.loss = loss
        simulation.run(300.0)
        for node in (simulation.a, simulation.b):
            assert node.paths.counters.switches <= 6, node.log
        for link in simulation.links.values():
            link.loss = 0.0
        simulation.run(300.0)
        assert kind(simulation.a) in DIRECT_KINDS  # the loss is over, and that shows


def test_a_path_that_still_loses_is_held_down_twice_as_long() -> None:
    simulation = running(300.0)
    sampled(simulation, 6, 0.1)
    assert kind(simulation.a) is PathKind.RELAY
    for link in simulation.links.values():
        link.loss = 0.06
    pings = simulation.a.paths.counters.pings
    simulation.run(85.0)
    assert kind(simulation.a) is PathKind.RELAY
    assert simulation.a.paths.counters.pings - pings < 250


def test_a_path_that_carries_less_than_half_of_the_relay_loses_its_tier() -> None:
    simulation = Simulation(*easy_pair())
    simulation.start()
    simulation.black_hole()
    simulation.run(2.0)
    for _ in range(3):
        simulation.run(1.0)
        simulation.a.paths.sample(PathId(relay=RELAY), 5000, 0, 6e6, simulation.now)
    simulation.black_hole(up=True)
    simulation.tell(simulation.a, Candidate(("8.1.1.1", 5555), CandidateSource.MAPPED))
    simulation.a.paths.want(simulation.now)
    assert time_to_direct(simulation) < 6
    sampled(simulation, 6, 0.0, 2e6)
    assert kind(simulation.a) is PathKind.RELAY
    assert simulation.a.paths.decision.reason == "relay: direct path carries 2.0 MB/s, the relay 6.0 MB/s"


# Size.


def test_a_narrow_path_is_used_at_its_size() -> None:
    simulation = Simulation(*easy_pair())
    for link in simulation.links.values():
        link.mtu = 1400
    simulation.start()
    simulation.run(3.0)
    primary = simulation.a.paths.decision.primary
    assert primary is not None
    assert simulation.a.paths.size(primary) == 1372


def test_a_black_hole_for_big_datagrams_is_found_within_two_seconds() -> None:
    simulation = running(60.0, size=1452)
    start = simulation.now
    for link in simulation.links.values():
        link.mtu = 1300
    simulation.run(2.0)
    primary = simulation.a.paths.decision.primary
    assert primary is not None
    assert simulation.a.paths.size(primary) == 1200
    assert kind(simulation.a) is PathKind.PUNCHED  # the path itself is fine
    simulation.run(2.0)
    assert not simulation.late(start + 2.0, simulation.now - 1.0, 0.1)
    simulation.run(32.0)
    assert simulation.a.paths.size(primary) == 1200  # 1280 and its headers exceed 1300


# Bounds.

ADDRESSES = st.sampled_from([("8.2.2.2", 4000 + n) for n in range(100)] + [("192.168.1.9", 1), ("127.0.0.1", 9)])
PATHS = st.one_of(
    st.builds(PathId, address=ADDRESSES),
    st.builds(PathId, address=ADDRESSES, socket=st.integers(0, 3)),
    st.builds(PathId, relay=st.sampled_from([RELAY, OTHER_RELAY])),
)
NATS = st.sampled_from(NatKind)
CALLS = st.builds(
    Call,
    stage=st.sampled_from(CallStage),
    session=st.sampled_from([bytes(8), b"1" * 8]),
    boot=st.just(bytes(8)),
    number=st.integers(0, 9),
    nat=NATS,
    port_delta=st.integers(-32768, 32767),
    candidates=st.lists(st.builds(Candidate, ADDRESSES, st.sampled_from(CandidateSource)), max_size=16).map(tuple),
    relays=st.lists(st.sampled_from([RELAY, OTHER_RELAY]), max_size=3).map(tuple),
)
INPUTS = st.one_of(
    st.tuples(st.just("want")),
    st.tuples(st.just("candidate"), PATHS),
    st.tuples(st.just("confirmed"), PATHS),
    st.tuples(st.just("ping"), PATHS),
    st.tuples(st.just("pong"), st.booleans()),
    st.tuples(st.just("call"), CALLS, st.sampled_from([RELAY, OTHER_RELAY])),
    st.tuples(st.just("up"), st.sampled_from([RELAY, OTHER_RELAY])),
    st.tuples(st.just("down"), st.sampled_from([RELAY, OTHER_RELAY])),
    st.tuples(st.just("gone"), st.sampled_from([RELAY, OTHER_RELAY])),
    st.tuples(st.just("heard"), PATHS),
    st.tuples(st.just("sent"), PATHS, st.integers(0, 9000)),
    st.tuples(st.just("hint"), PATHS),
    st.tuples(st.just("sample"), PATHS, st.integers(0, 500), st.integers(0, 600)),
    st.tuples(st.just("network")),
    st.tuples(st.just("sockets"), st.integers(-1, 300)),
    st.tuples(st.just("local"), NATS, st.integers(-70000, 70000)),
    st.tuples(st.just("wait"), st.floats(0, 400)),
    st.tuples(st.just("wait"), st.floats(0, 0.5)),
)


class Fuzzed:
    """A machine in a world without order; it must stay sane."""

    def __init__(self) -> None:
        self.now = 10.0
        self.counter = 0
        self.paths = PeerPaths(b"a" * 32, b"b" * 32, PathConfig(), self._random, self.now)
        self.pings: list[SendPing] = []
        self.sent_at: list[float] = []

    def _random(self, count: int) -> bytes:
        self.counter += 1
        return self.counter.to_bytes(count, "big")

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(20_000):
            due = self.paths.timer()
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            actions = self.paths.poll(self.now)
            self.pings += [action for action in actions if isinstance(action, SendPing)]
            self.sent_at += [self.now for action in actions if isinstance(action, SendPing)]
            self.check()
        else:
            raise AssertionError("busy for ever")
        self.now = end

    def check(self) -> None:
        decision, views = self.paths.decision, self.paths.views(self.now)
        by_path = {view.path: view for view in views}
        assert len(views) <= 64
        assert decision.reason
        if decision.primary is None:
            assert decision.duplicate is None
            assert all(view.standing is None for view in views)
        else:
            assert by_path[decision.primary].standing is not None
            assert decision.primary != decision.duplicate
        if decision.duplicate is not None:
            assert by_path[decision.duplicate].standing is not None

    def feed(self, name: str, *args: object) -> None:
        paths, now = self.paths, self.now
        match name, args:
            case "wait", (float(seconds),):
                self.wait(seconds)
            case "want", ():
                paths.want(now)
            case "candidate", (PathId() as path,):
                paths.candidate(path, self.kind(path), now)
            case "confirmed", (PathId() as path,):
                paths.confirmed(path, self.kind(path), now)
            case "ping", (PathId() as path,):
                paths.on_ping(path, self.kind(path), now)
            case "pong", (bool(right),):
                if self.pings:
                    ping = self.pings.pop()
                    paths.on_pong(ping.path, ping.tx if right else bytes(12), None, now)
            case "call", (Call() as call, str(relay)):
                paths.on_call(call, relay, now)
            case "up", (str(relay),):
                paths.relay_up(relay, now)
            case "down", (str(relay),):
                paths.relay_down(relay, now)
            case "gone", (str(relay),):
                paths.relay_gone(relay, now)
            case "heard", (PathId() as path,):
                paths.heard(path, now)
            case "sent", (PathId() as path, int(size)):
                paths.sent(path, size, now)
            case "hint", (PathId() as path,):
                paths.hint(path, self.kind(path), now)
            case "sample", (PathId() as path, int(sent), int(lost)):
                paths.sample(path, sent, lost, 1e6 * sent, now)
            case "network", ():
                paths.network_changed(now)
            case "sockets", (int(count),):
                paths.sockets_ready(count, now)
            case "local", (NatKind() as nat, int(delta)):
                paths.local((), nat, delta, (RELAY,), now)
            case _:
                raise AssertionError(name)
        self.check()

    @staticmethod
    def kind(path: PathId) -> PathKind:
        return PathKind.RELAY if path.relay else PathKind.PUBLIC


@settings(max_examples=150, deadline=None)
@given(st.lists(INPUTS, max_size=40))
def test_no_order_of_inputs_breaks_it(inputs: list[tuple[object, ...]]) -> None:
    machine = Fuzzed()
    for name, *args in inputs:
        assert isinstance(name, str)
        machine.feed(name, *args)
    machine.wait(60.0)
    birthday = 1500 + 4 * 256
    last = [at for at in machine.sent_at if at > machine.now - 60]
    assert len(last) <= birthday + 60 * 8  # left alone, it grows quiet


def test_a_peer_that_floods_us_with_paths_is_bounded() -> None:
    machine = Fuzzed()
    machine.paths.relay_up(RELAY, machine.now)
    machine.paths.want(machine.now)
    for number in range(1000):
        path = PathId(("8.3.3.3", 1000 + number % 5000))
        machine.feed("ping", path)
        machine.feed("hint", path)
        machine.wait(0.01)
    assert machine.paths.counters.strangers > 800
    assert len(machine.sent_at) / 10 < 40  # pings per second
    assert len(machine.paths.views(machine.now)) <= 64


def test_a_peer_that_floods_us_with_calls_is_bounded() -> None:
    machine = Fuzzed()
    machine.paths.relay_up(RELAY, machine.now)
    candidates = tuple(Candidate(("8.3.3.3", 1000 + n), CandidateSource.REFLECTED) for n in range(16))
    for number in range(200):
        call = Call(CallStage.CALL, number.to_bytes(8, "big"), bytes(8), 1, NatKind.EASY, 0, candidates, (RELAY,))
        machine.feed("call", call, RELAY)
        machine.wait(0.1)
    assert machine.paths.counters.calls < 16
    assert len(machine.sent_at) / 20 < 50


def test_an_unanswered_peer_is_not_stormed() -> None:
    machine = Fuzzed()
    for number in range(20):
        machine.paths.candidate(PathId(("8.3.3.3", 1000 + number)), PathKind.PUBLIC, machine.now)
    for _ in range(600):
        machine.paths.want(machine.now)
        machine.wait(1.0)
    last = [at for at in machine.sent_at if at > machine.now - 60]
    assert len(machine.sent_at) < 20 * 4 * 9
    assert len(last) <= 20 * 4


def test_pongs_that_nobody_asked_for_change_nothing() -> None:
    machine = Fuzzed()
    path = PathId(("8.2.2.2", 4000))
    machine.paths.candidate(path, PathKind.PUBLIC, machine.now)
    machine.paths.want(machine.now)
    machine.wait(0.0)
    other = PathId(("6.6.6.6", 6))
    for ping in list(machine.pings):
        machine.paths.on_pong(other, ping.tx, None, machine.now)  # right transaction, wrong path
        machine.paths.on_pong(path, bytes(12), None, machine.now)
    assert machine.paths.decision.primary is None
    assert machine.paths.counters.unknown_pongs == 2 * len(machine.pings)
    machine.paths.on_pong(path, machine.pings[0].tx, None, machine.now)
    assert machine.paths.decision.primary == path
    machine.paths.on_pong(path, machine.pings[0].tx, None, machine.now)  # replayed
    assert machine.paths.counters.pongs == 1


def test_states_are_shown() -> None:
    simulation = running(1.0)
    states = {view.path: view.state for view in simulation.a.paths.views(simulation.now)}
    assert states[PathId(relay=RELAY)] is PathState.LIVE


def quiet_paths(now: float = 0.0) -> PeerPaths:
    """A machine whose random bytes are no two times the same."""
    counter = itertools.count()
    return PeerPaths(b"a" * 32, b"b" * 32, PathConfig(), lambda n: next(counter).to_bytes(n, "big"), now)


def let_pass(paths: PeerPaths, start: float, end: float) -> list[SendPing]:
    """Poll whenever it is due; every ping that goes out."""
    pings: list[SendPing] = []
    now = start
    while now < end:
        pings += [action for action in paths.poll(now) if isinstance(action, SendPing)]
        due = paths.timer()
        now = max(now + 0.001, end if due is None else min(end, due))
    return pings


def test_relays_that_came_and_went_leave_room_for_a_path_that_was_proven() -> None:
    paths = quiet_paths()
    for number in range(200):
        paths.relay_up(f"https://r{number}", float(number))
        paths.relay_down(f"https://r{number}", number + 0.5)
    paths.relay_up("https://own", 300.0)
    paths.confirmed(PathId(("192.0.2.1", 5)), PathKind.PUBLIC, 300.0)
    assert paths.decision.primary == PathId(("192.0.2.1", 5))
    paths.confirmed(PathId(relay="https://own"), PathKind.RELAY, 300.0)
    assert {view.path for view in paths.views(300.0)} >= {PathId(relay="https://own"), PathId(("192.0.2.1", 5))}


def test_addresses_that_the_user_gave_outlive_those_that_strangers_show() -> None:
    paths = quiet_paths()
    given = PathId(("192.0.2.1", 5))
    paths.candidate(given, PathKind.PUBLIC, 0.0)
    for number in range(3000):
        paths.hint(PathId(("198.51.100.1", number + 1)), PathKind.PUBLIC, number * 0.2)
    assert given in [view.path for view in paths.views(600.0)]


def test_a_slow_path_that_breaks_is_given_up_and_not_doubted_for_ever() -> None:
    paths = quiet_paths()
    slow = PathId(("192.0.2.1", 5))
    paths.confirmed(slow, PathKind.PUBLIC, 0.0)
    now = 0.0
    for _ in range(6):  # a round trip of two and a half seconds
        for ping in let_pass(paths, now, now + 2.5):
            paths.on_pong(ping.path, ping.tx, None, now + 2.5)
        now += 2.5
    paths.sent(slow, 1000, now)
    pings = let_pass(paths, now, now + 60)
    (view,) = paths.views(now + 60)
    assert view.state is PathState.DEAD
    assert len(pings) < 60


def test_a_relay_where_the_peer_never_is_is_asked_ever_more_rarely() -> None:
    paths = quiet_paths()
    paths.relay_up("https://r", 0.0)
    paths.want(0.0)
    pings = 0
    for second in range(300):
        sent = [ping for ping in let_pass(paths, float(second), second + 1.0) if ping.path.relay]
        pings += len(sent)
        if sent:
            paths.relay_gone("https://r", second + 1.0)
        if second % 20 == 0:
            paths.want(second + 1.0)
    assert 5 <= pings <= 120  # four per question; 600 without the pause that grows


def test_who_is_heard_at_a_new_address_is_asked_there_with_one_ping() -> None:
    """It may be a third party that somebody who repeats the peer's datagrams wants us to bother."""
    paths = quiet_paths()
    victim = PathId(("198.51.100.1", 5))
    paths.on_ping(victim, PathKind.PUBLIC, 0.0)
    assert len([ping for ping in let_pass(paths, 0.0, 0.9) if ping.path == victim]) == 1
