"""What both engines do when the path under them breaks, comes back, changes, or was idle. Virtual time throughout.

These pin what the libraries were measured to do with what the adapters make of it: a failure after an update of
either library means that a trick of its adapter has lost its ground.
"""

from __future__ import annotations

import random

import pytest

from tests.transport.engine_wire import Path, Wire
from transport.aioquic_engine import AioquicEngine
from transport.quic_engine import (
    MAX_HOLD,
    MAX_PROBE_INTERVAL,
    MAX_WINDOW_HINT,
    Termination,
    hold_until,
)

RTT = 0.05
both = pytest.mark.parametrize("name", ["qh3", "aioquic"])


def busy(name: str, *, transferred: int = 2_000_000) -> Wire:
    """A connection in the middle of a transfer from client to server, its window open and full."""
    wire = Wire(name, name, Path(delay=RTT / 2))
    stream = wire.client.open_stream()
    wire.transfer(0, stream, transferred)
    wire.send(0, stream, 6_000_000)
    wire.run(0.1)
    return wire


def fresh_bytes(wire: Wire) -> float:
    """Seconds until the server gets something that it did not have."""
    received = wire.sinks[1].received
    return wire.run(30, until=lambda: wire.sinks[1].received > received)


# -- outages


@both
@pytest.mark.parametrize("outage", [1.0, 8.0])
def test_waking_ends_an_outage_with_the_first_round_trip(name: str, outage: float) -> None:
    wire = busy(name)
    before = wire.client.counters()
    wire.path.up = False
    wire.run(outage)
    wire.path.up = True
    wire.wake()
    # The probe's acknowledgement after a round trip says what is missing, which is there half of one later.
    assert fresh_bytes(wire) < 1.7 * RTT
    wire.run(0.2)
    after = wire.client.counters()
    assert after.congestion_window > before.congestion_window / 3  # neither two packets nor ten
    assert after.rtt is not None
    assert after.rtt < 0.2


@both
def test_a_connection_that_keeps_sending_into_an_outage_resumes_as_well(name: str) -> None:
    wire = Wire(name, name, Path(delay=RTT / 2))
    stream = wire.client.open_stream()
    for _ in range(50):
        wire.send(0, stream, 12_000)
        wire.run(0.02)
    before = wire.client.counters().congestion_window
    wire.path.up = False
    for _ in range(150):  # each of these starts the probe timer of RFC 9002 again
        wire.send(0, stream, 12_000)
        wire.run(0.02)
    wire.path.up = True
    wire.wake()
    assert fresh_bytes(wire) < 1.7 * RTT
    wire.run(0.5)
    assert wire.sinks[1].received == 200 * 12_000
    assert wire.client.counters().congestion_window > before / 3


@both
@pytest.mark.parametrize("outage", [2.0, 6.0])
def test_without_being_woken_it_probes_every_second_and_a_half(name: str, outage: float) -> None:
    wire = busy(name)
    wire.path.up = False
    end = wire.now + outage
    wire.run(0.3)  # acknowledgements that were under way still let something out
    sent = wire.sent[0]
    while wire.now < end:
        due = wire.client.timer()
        assert due is not None
        assert due - wire.now <= MAX_PROBE_INTERVAL + 1e-6
        wire.run(0.25)
    assert wire.sent[0] - sent < 5 + 3 * outage  # a trickle
    wire.path.up = True
    assert fresh_bytes(wire) < MAX_PROBE_INTERVAL + 2 * RTT


@both
def test_a_probe_goes_past_a_full_window_and_stays_small(name: str) -> None:
    wire = busy(name)
    wire.path.up = False
    wire.run(1.0)
    counters = wire.client.counters()
    assert counters.in_flight > counters.congestion_window - 2 * wire.client.datagram_size
    wire.client.wake(wire.now)
    assert 1 <= len(wire.client.datagrams(wire.now)) <= 3
    assert wire.client.datagrams(wire.now) == []


@both
def test_waking_does_nothing_where_nothing_is_under_way(name: str) -> None:
    wire = Wire(name, name)
    wire.wake()
    wire.run(0.2)
    sent = list(wire.sent)
    wire.wake()
    wire.client.switch(wire.now, 0.01)
    assert wire.client.datagrams(wire.now) == []
    assert wire.sent == sent
    wire.client.close(1, "over")
    wire.client.wake(wire.now)
    wire.client.switch(wire.now, 0.01)
    assert len(wire.client.datagrams(wire.now)) == 1


@both
def test_an_outage_longer_than_the_idle_time_out_ends_the_connection(name: str) -> None:
    wire = busy(name)
    wire.path.up = False
    took = wire.run(60, until=lambda: wire.sinks[0].end is not None and wire.sinks[1].end is not None)
    assert 10 <= took < 12
    for sink, engine in zip(wire.sinks, (wire.client, wire.server), strict=True):
        assert sink.end is not None
        assert sink.end.kind == "idle"
        assert engine.datagrams(wire.now) == []
        engine.wake(wire.now)


@pytest.mark.parametrize("client", ["qh3", "aioquic"])
def test_the_shorter_idle_time_out_of_both_ends_counts(client: str) -> None:
    wire = Wire(client, "qh3", idle_timeout=60.0, connect=False)
    wire.settings["idle_timeout"] = 10.0  # the server's
    wire.run(until=lambda: wire.sinks[0].done and wire.sinks[1].done)
    wire.run(0.2)
    wire.path.up = False
    assert 9 < wire.run(90, until=lambda: wire.sinks[0].end is not None) < 12
    end = wire.sinks[0].end
    assert isinstance(end, Termination)
    assert end.kind == "idle"


@both
@pytest.mark.parametrize("outage", [0.0, 2.0])
def test_a_lost_first_flight_is_repeated_soon_and_costs_no_datagram_size(name: str, outage: float) -> None:
    wire = Wire(name, name, Path(delay=RTT / 2, up=False), connect=False)
    wire.run(outage)
    wire.path.up = True
    took = wire.run(10, until=lambda: wire.sinks[0].done and wire.sinks[1].done)
    assert took < 0.6 + 2 * RTT
    wire.run(0.3)
    counters = wire.client.counters()
    assert counters.rtt is not None
    assert counters.rtt < 1.3 * RTT
    wire.client.send(wire.client.open_stream(), bytes(20_000))
    assert max(map(len, wire.client.datagrams(wire.now))) > 1400


@both
@pytest.mark.parametrize("rtt", [0.32, 0.5])
def test_a_far_peer_is_not_taken_for_a_near_one_by_a_repeated_first_flight(name: str, rtt: float) -> None:
    wire = Wire(name, name, Path(delay=rtt / 2))  # further away than the first flight's patience
    stream = wire.client.open_stream()
    for _ in range(3):
        wire.send(0, stream, 1000)
        wire.run(2 * rtt)
    for engine in (wire.client, wire.server):
        least = engine.counters().min_rtt
        assert least is not None
        assert 0.95 * rtt < least < 1.3 * rtt


@both
def test_a_handshake_is_woken_too(name: str) -> None:
    wire = Wire(name, name, Path(delay=RTT / 2, up=False), connect=False)
    wire.run(1.0)
    wire.path.up = True
    wire.wake()
    assert wire.run(10, until=lambda: wire.sinks[0].done) < 2 * RTT


# -- changes of path


@both
@pytest.mark.parametrize("delay", [0.005, 0.0002], ids=["direct", "lan"])
def test_a_faster_path_overtakes_nothing(name: str, delay: float) -> None:
    lost = {}
    for told in (False, True):
        wire = Wire(name, name, Path(delay=0.025))
        stream = wire.client.open_stream()
        for _ in range(60):
            wire.send(0, stream, 12_000)
            wire.run(0.01)
        before = wire.client.counters()
        wire.change(Path(delay=delay), told=told)
        changed = wire.now
        for _ in range(60):
            wire.send(0, stream, 12_000)
            wire.run(0.01)
        after = wire.client.counters()
        lost[told] = after.lost - before.lost
        gaps = [
            b - a for (a, _), (b, _) in zip(wire.sinks[1].times, wire.sinks[1].times[1:], strict=False) if b > changed
        ]
        assert max(gaps) < 0.03
    assert lost[False] > 5
    assert lost[True] == 0
    assert after.congestion_window >= before.congestion_window


@both
def test_a_queue_on_the_old_path_is_waited_for_as_well(name: str) -> None:
    wire = Wire(name, name, Path(delay=0.025, rate=4e6, queue=300_000))
    stream = wire.client.open_stream()
    wire.transfer(0, stream, 3_000_000)
    wire.send(0, stream, 3_000_000)
    wire.run(0.15)
    lost = wire.client.counters().lost
    wire.change(Path(delay=0.005))
    wire.run(0.3)
    assert wire.client.counters().lost == lost


@both
def test_a_slower_path_is_taken_at_once_and_nothing_is_lost(name: str) -> None:
    wire = Wire(name, name, Path(delay=0.0002))
    stream = wire.client.open_stream()
    for _ in range(60):
        wire.send(0, stream, 12_000)
        wire.run(0.01)
    lost = wire.client.counters().lost
    wire.change(Path(delay=0.025))
    sent = wire.sent[0]
    wire.send(0, stream, 1000)
    assert wire.sent[0] == sent + 1
    wire.run(0.5)
    assert wire.client.counters().lost == lost


def collapsed(name: str, seed: int) -> Wire:
    """A connection that has sent both ways for three seconds by a path that loses 15 % of the datagrams."""
    chance = random.Random(seed)
    wire = Wire(name, name, Path(delay=0.02))
    stream = wire.client.open_stream()
    wire.send(0, stream, 100)
    wire.run(0.2)
    wire.path = Path(delay=0.02, chance=lambda: chance.random() < 0.15)
    for _ in range(150):
        for side in (0, 1):
            wire.send(side, stream, 12_000)
        wire.run(0.02)
    assert wire.client.counters().congestion_window < 15_000
    return wire


@both
@pytest.mark.parametrize("seed", range(8))
def test_a_window_that_loss_has_closed_opens_at_once_on_the_next_path(name: str, seed: int) -> None:
    """The libraries would add a packet per round trip: three seconds and a half for what has piled up in three."""
    wire = collapsed(name, seed)
    wire.path = Path(delay=0.031)
    for side, engine in enumerate((wire.client, wire.server)):
        engine.restart(wire.now, 0.062)
        wire.transmit(side)
    lost = wire.client.counters().lost
    for _ in range(50):
        for side in (0, 1):
            wire.send(side, 0, 12_000)
        wire.run(0.02)
    assert [sink.received for sink in wire.sinks] == pytest.approx([2_400_000, 2_400_100], rel=0.03)
    assert wire.client.counters().lost - lost < 20  # those of the old path
    assert wire.sinks[0].end is wire.sinks[1].end is None


@both
@pytest.mark.parametrize("seed", range(4))
def test_the_next_path_may_be_slow_to_answer_at_first(name: str, seed: int) -> None:
    """A relay on a machine that has no time: what the old path has lost is found late, and is still the old path's."""
    wire = collapsed(name, seed)
    wire.path = Path(delay=0.3)
    for side, engine in enumerate((wire.client, wire.server)):
        engine.restart(wire.now, 0.062)
        wire.transmit(side)
    wire.run(0.7)
    wire.path = Path(delay=0.031)
    wire.run(1.3)
    assert [sink.received for sink in wire.sinks] == [1_800_000, 1_800_100]


@both
def test_a_restart_of_an_idle_or_a_closed_connection_does_no_harm(name: str) -> None:
    wire = Wire(name, name)
    wire.client.restart(wire.now, 0.05)
    wire.transmit(0)
    wire.run(1.0)
    due = wire.client.timer()
    assert due is not None
    assert due > wire.now
    took = wire.transfer(0, wire.client.open_stream(), 50_000)
    assert took < 0.3
    wire.send(0, 0, 50_000)
    wire.client.restart(wire.now, 0.05)
    wire.transmit(0)
    wire.client.close(1, "over")
    wire.client.restart(wire.now, 0.05)
    assert len(wire.client.datagrams(wire.now)) == 1


def test_how_long_a_switch_holds() -> None:
    assert hold_until(5.0, 0.05, 0.05, 0.01) == pytest.approx(5.0 + 0.021)
    assert hold_until(5.0, 0.01, 0.01, 0.05) == 0.0
    assert hold_until(5.0, 3.0, 0.05, 0.01) == 5.0 + MAX_HOLD


@both
def test_while_it_holds_only_the_end_of_the_hold_is_due(name: str) -> None:
    wire = busy(name)
    wire.client.switch(wire.now, 0.001)
    due = wire.client.timer()
    assert due is not None
    assert wire.now < due <= wire.now + MAX_HOLD
    wire.client.handle_timer(wire.now)
    assert wire.client.datagrams(wire.now) == []
    wire.client.wake(wire.now)  # the new path broke as well
    assert wire.client.datagrams(wire.now) != []


# -- start and idleness


def answer(wire: Wire, stream: int) -> float:
    """Seconds for 100 KB from the server to the client."""
    took = wire.transfer(1, stream, 100_000)
    wire.run(0.5)
    return took


@both
def test_100_kb_need_one_flight_at_first_and_after_any_idleness(name: str) -> None:
    wire = Wire(name, name, Path(delay=RTT / 2))
    stream = wire.client.open_stream()
    wire.send(0, stream, 100)
    wire.run(0.5)
    assert answer(wire, stream) < 0.045
    for seconds in (3.0, 10.0, 60.0):
        wire.idle(seconds)
        wire.send(0, stream, 100)
        wire.run(0.1)
        assert answer(wire, stream) < 0.045
    for _ in range(300):  # ten seconds in which the server only listens
        wire.send(0, stream, 1000)
        wire.run(0.033)
    assert answer(wire, stream) < 0.045


@both
def test_the_initial_window_is_what_was_asked_for(name: str) -> None:
    small = Wire(name, name, Path(delay=RTT / 2), window=15_000)
    stream = small.client.open_stream()
    small.send(0, stream, 100)
    small.run(0.5)
    assert 14_000 < small.server.counters().congestion_window < 20_000
    assert answer(small, stream) > 0.12
    large = Wire(name, name, Path(delay=RTT / 2), window=100_000)
    assert 99_000 < large.server.counters().congestion_window < 110_000


def test_a_hint_raises_aioquic_s_window_and_nothing_else() -> None:
    wire = Wire("aioquic", "aioquic", window=15_000)
    for hint, expected in ((60_000, 60_000), (20_000, 60_000), (1 << 40, MAX_WINDOW_HINT)):
        wire.client.set_window_hint(hint)
        assert wire.client.counters().congestion_window == expected
    engine = wire.client
    assert isinstance(engine, AioquicEngine)
    engine._quic._loss._cc.ssthresh = 5000
    engine.set_window_hint(40_000)
    assert engine._quic._loss._cc.ssthresh == 40_000
    other = Wire("qh3", "qh3", window=15_000)
    window = other.client.counters().congestion_window
    other.client.set_window_hint(60_000)
    assert other.client.counters().congestion_window == window


# -- figures


@both
def test_losses_and_goodput_can_be_told_from_the_counters(name: str) -> None:
    wire = Wire(name, name, Path(delay=0.01, rate=2e6, queue=200_000))
    stream = wire.client.open_stream()
    wire.send(0, stream, 8_000_000)
    wire.run(1.0)
    before = wire.client.counters()
    wire.run(1.0)
    after = wire.client.counters()
    assert after.ran_dry == before.ran_dry
    assert after.acked - before.acked == pytest.approx(2e6, rel=0.2)
    assert after.sent - before.sent == pytest.approx(2e6 / 1440, rel=0.2)
    wire.run(until=lambda: wire.sinks[1].received == 8_000_000)
    wire.run(0.5)
    end = wire.client.counters()
    assert end.in_flight == 0
    assert end.ran_dry > after.ran_dry
    assert end.acked == 8_000_000


@both
def test_a_path_s_rate_of_loss_is_seen(name: str) -> None:
    wire = Wire(name, name, Path(delay=0.01))
    stream = wire.client.open_stream()
    before = wire.client.counters()
    wire.path.lose = 20
    for _ in range(100):
        wire.send(0, stream, 12_000)
        wire.run(0.02)
    after = wire.client.counters()
    assert 0.03 < (after.lost - before.lost) / (after.sent - before.sent) < 0.08


# -- everything at once


@pytest.mark.parametrize("seed", range(24))
def test_whatever_a_path_does_all_bytes_arrive(seed: int) -> None:
    """Both libraries in both roles, both directions; the wire's bound on steps shows that no timer spins."""
    chance = random.Random(seed)

    def path() -> Path:
        delay = chance.choice([0.0002, 0.005, 0.025, 0.15])
        return Path(delay, chance.choice([1e6, 12.5e6, 1e8]), chance.choice([100_000, 1_000_000]))

    names = chance.choice(["qh3", "aioquic"]), chance.choice(["qh3", "aioquic"])
    wire = Wire(*names, path(), size=chance.choice([1200, 1452, 8900]))
    stream = wire.client.open_stream()
    wire.send(0, stream, 1)
    wire.run(0.5)
    written = [1, 0]
    for _ in range(chance.randrange(4, 20)):
        match chance.choice(["send", "send", "run", "change", "outage", "wake", "restart", "idle", "drop"]):
            case "send":
                side, size = chance.randrange(2), chance.choice([10, 12_000, 300_000])
                written[side] += size
                wire.send(side, stream, size)
            case "run":
                wire.run(chance.choice([0.001, 0.05, 0.5]))
            case "change":
                wire.change(path(), told=chance.random() < 0.7)
            case "outage":
                wire.path.up = False
                wire.run(chance.choice([0.01, 0.3, 2.0, 4.0]))
                wire.path.up = True
                if chance.random() < 0.5:
                    wire.wake()
            case "wake":
                wire.wake()
            case "restart":
                for side, engine in enumerate((wire.client, wire.server)):
                    engine.restart(wire.now, 2 * wire.path.delay)
                    wire.transmit(side)
            case "idle":
                wire.idle(7.0)
            case "drop":
                wire.drop_half()
    wire.run(60, until=lambda: [sink.received for sink in reversed(wire.sinks)] == written)
    assert [sink.end for sink in wire.sinks] == [None, None]
    assert [sink.received for sink in reversed(wire.sinks)] == written
