from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.bulk.schedule import MAX_FAILURES, FetchSchedule, Held, Order

ALL = {0: 0xFFFF, 1: 0xFFFF}
SIZES = {0: 1000, 1: 1000}
PLENTY = 1 << 30


def schedule(wanted: Mapping[int, int] = ALL, in_flight: int = PLENTY, seed: int = 0) -> FetchSchedule:
    return FetchSchedule(wanted, SIZES, in_flight_bytes=in_flight, seed=seed)


def deliver(plan: FetchSchedule, order: Order, now: float) -> None:
    plan.received(order, now)
    plan.stored(order)


@dataclass
class Simulation:
    """Sources with fixed rates (bytes/s) that send one expert after the other, until everything is stored."""

    plan: FetchSchedule
    held: dict[str, Held]
    rates: dict[str, float]
    asked: list[Order] = field(default_factory=list)

    def run(self, limit: float = 1e6) -> float:
        now = 0.0
        queues: dict[str, list[Order]] = {name: [] for name in self.rates}
        ready: dict[str, float] = {}
        self.plan.offer(self.held)
        while not self.plan.is_done:
            for order in self.plan.next(now):
                self.asked.append(order)
                queues[order.source].append(order)
            for name, queue in queues.items():
                if queue and name not in ready:
                    ready[name] = now + queue[0].size / self.rates[name]
            assert ready, "nothing is asked of anybody"
            name = min(ready, key=lambda n: ready[n])
            now = ready.pop(name)
            deliver(self.plan, queues[name].pop(0), now)
            assert now < limit
        return now

    def shares(self) -> Counter[str]:
        return Counter(order.source for order in self.asked)


def test_one_source_gives_everything_once() -> None:
    simulation = Simulation(schedule(), {"a": None}, {"a": 1000.0})
    assert simulation.run() == pytest.approx(32.0)
    assert len({(o.site, o.expert) for o in simulation.asked}) == len(simulation.asked) == 32


def test_faster_sources_get_more_and_nobody_drags() -> None:
    sizes = dict.fromkeys(range(16), 100_000)
    plan = FetchSchedule(dict.fromkeys(range(16), 0xFFFF), sizes, in_flight_bytes=PLENTY)
    simulation = Simulation(plan, {"fast": None, "mid": None, "slow": None}, {"fast": 4e6, "mid": 1e6, "slow": 1e5})
    took = simulation.run()
    ideal = 256 * 100_000 / 5.1e6
    assert took < 1.35 * ideal + 1
    shares = simulation.shares()
    assert shares["fast"] > 2.5 * shares["mid"] > 5 * shares["slow"] > 0


def test_a_source_that_would_drag_gets_nothing_at_the_end() -> None:
    plan = schedule()
    plan.offer({"fast": None, "slow": None})
    first = {order.source: order for order in plan.next(0.0)}
    deliver(plan, first["fast"], 0.001)  # 1 MB/s
    deliver(plan, first["slow"], 100.0)  # 10 B/s
    orders = plan.next(100.0)
    assert {order.source for order in orders} == {"fast"}
    plan.failed(orders[0], 100.0, "later", busy=True)
    assert {order.source for order in plan.next(100.5)} == {"slow"}
    assert {order.source for order in plan.next(101.5)} == {"fast"}


def test_the_rarest_come_first() -> None:
    plan = schedule(in_flight=1)
    plan.offer({"a": {0: 0xFFFF, 1: 0xFFFF}, "b": {0: 0xFFFF}, "c": {0: 0x00FF, 1: 0x8000}})
    order = plan.next(0.0)[0]
    assert (order.site, order.source) == (1, "a")
    assert order.expert != 15


def test_a_second_node_begins_elsewhere() -> None:
    begun = set()
    for seed in (3, 10):
        plan = schedule(seed=seed)
        plan.offer({"a": None})
        [order] = plan.next(0.0)
        begun.add((order.site, order.expert))
    assert begun == {(1, 3), (0, 10)}


def test_in_flight_is_bounded_until_stored() -> None:
    plan = schedule(in_flight=2500)
    plan.offer({"a": None, "b": None, "c": None})
    orders = plan.next(0.0)
    assert len(orders) == 2
    plan.received(orders[0], 1.0)
    assert plan.next(1.0) == []
    plan.stored(orders[0])
    assert len(plan.next(1.0)) == 1


def test_one_expert_larger_than_the_bound_is_allowed() -> None:
    plan = schedule(in_flight=10)
    plan.offer({"a": None, "b": None})
    [order] = plan.next(0.0)
    assert plan.next(0.0) == []
    deliver(plan, order, 0.1)
    assert len(plan.next(0.1)) == 1


def test_a_new_source_is_asked_for_one_and_then_ever_more() -> None:
    plan = schedule()
    plan.offer({"a": None})
    sizes = []
    for now in range(1, 4):
        orders = plan.next(now)
        sizes.append(len(orders))
        for order in orders:
            deliver(plan, order, now + 0.1)
    assert sizes == [1, 2, 4]


def test_a_failure_goes_elsewhere_and_backs_off() -> None:
    plan = schedule({0: 1})
    plan.offer({"a": None, "b": None})
    [order] = plan.next(0.0)
    plan.failed(order, 0.0, "lost")
    [again] = plan.next(0.0)
    assert again.source != order.source
    plan.failed(again, 0.0, "lost")
    assert plan.next(0.5) == []
    assert plan.next(1.1) != []
    assert not plan.banned


def test_many_failures_in_a_row_are_a_ban() -> None:
    plan = schedule({0: 1})
    plan.offer({"a": None})
    now = 0.0
    for n in range(MAX_FAILURES):
        [order] = plan.next(now)
        assert plan.failed(order, now, "it broke") == (n == MAX_FAILURES - 1)
        now += 20.0
    assert plan.banned == {"a": "failed 8 times in a row, last: it broke"}
    assert plan.next(now) == []
    assert plan.unobtainable() == {0: 1}


def test_failures_at_one_moment_count_once() -> None:
    plan = schedule()
    plan.offer({"a": None})
    [order] = plan.next(0.0)
    deliver(plan, order, 0.1)
    orders = plan.next(0.1)
    deliver(plan, orders[0], 0.2)
    orders = [orders[1], *plan.next(0.2)]
    assert len(orders) == 3
    for order in orders:
        plan.failed(order, 0.3, "lost")
    assert len(plan.next(1.5)) == 1  # 0.3 s + 1 s


def test_a_corrupt_expert_bans_its_source() -> None:
    plan = schedule({0: 3})
    plan.offer({"a": None})
    [order] = plan.next(0.0)
    plan.received(order, 0.1)
    assert plan.corrupt(order, "wrong bytes")
    assert plan.banned == {"a": "wrong bytes"}
    plan.offer({"a": None})
    assert plan.next(1.0) == []
    plan.offer({"a": None, "b": None})
    assert [o.source for o in plan.next(1.0)] == ["b"]


def test_absent_is_no_fault_the_first_time() -> None:
    plan = schedule({0: 3})
    plan.offer({"a": None})
    [order] = plan.next(0.0)
    plan.failed(order, 0.0, "gone", not_held=True)
    [other] = plan.next(0.0)
    assert other.expert != order.expert
    plan.failed(other, 0.0, "gone", not_held=True)
    [again] = plan.next(0.0)
    plan.failed(again, 0.0, "gone", not_held=True)  # it still claims to have it
    assert plan.next(0.1) == []


def test_sources_come_and_go() -> None:
    plan = schedule({0: 3})
    plan.offer({})
    assert plan.next(0.0) == []
    assert plan.unobtainable() == {0: 3}
    plan.offer({"a": {0: 1}})
    [order] = plan.next(0.0)
    assert plan.unobtainable() == {0: 2}
    plan.offer({"b": {0: 3}})
    plan.failed(order, 1.0, "lost")
    assert [o.source for o in plan.next(1.0)] == ["b"]


def test_overdue_only_where_somebody_else_has_it() -> None:
    plan = schedule({0: 1})
    plan.offer({"a": None})
    [order] = plan.next(0.0)
    assert plan.overdue(1000.0) == []
    plan.offer({"a": None, "b": None})
    assert plan.overdue(30.0) == []
    assert plan.overdue(1000.0) == [order]


@given(
    st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)), min_size=1, max_size=6),
    st.lists(st.floats(1e2, 1e6), min_size=6, max_size=6),
    st.integers(1, 40_000),
    st.integers(0, 1 << 40),
)
def test_everything_is_asked_exactly_once(
    held: list[tuple[int, int]], rates: list[float], in_flight: int, seed: int
) -> None:
    """Whoever has what: what somebody has is fetched, once, from one who has it; the rest is named."""
    wanted = {0: 0x7FFF, 1: 0x0FF0}
    available = {site: wanted[site] & ~0 for site in wanted}
    for site in wanted:
        union = 0
        for masks in held:
            union |= masks[site]
        available[site] &= union
    offers: dict[str, Held] = {f"s{n}": {0: a, 1: b} for n, (a, b) in enumerate(held)}
    full = FetchSchedule(wanted, SIZES, in_flight_bytes=in_flight, seed=seed)
    full.offer(offers)
    assert full.unobtainable() == {s: wanted[s] & ~available[s] for s in wanted if wanted[s] & ~available[s]}
    plan = FetchSchedule(available, SIZES, in_flight_bytes=in_flight, seed=seed)
    simulation = Simulation(plan, offers, {f"s{n}": rates[n] for n in range(len(held))})
    simulation.run(limit=1e9)
    assert len({(o.site, o.expert) for o in simulation.asked}) == len(simulation.asked)
    assert len(simulation.asked) == sum(mask.bit_count() for mask in available.values())
    for order in simulation.asked:
        offered = offers[order.source]
        assert offered is not None
        assert offered[order.site] >> order.expert & 1


@settings(max_examples=40)
@given(st.data())
def test_any_order_of_events_loses_nothing(data: st.DataObject) -> None:
    """Deliveries, failures, corruption, departures in any order: every expert is pending, in flight or stored."""
    plan = schedule({0: 0xFF, 1: 0x0F}, in_flight=data.draw(st.sampled_from([1, 3000, PLENTY])))
    names = ["a", "b", "c"]
    open_orders: list[Order] = []
    received: list[Order] = []
    stored: set[tuple[int, int]] = set()
    now = 0.0
    for _ in range(data.draw(st.integers(0, 60))):
        now += data.draw(st.floats(0, 5))
        match data.draw(st.integers(0, 6)):
            case 0:
                plan.offer(dict.fromkeys(data.draw(st.sets(st.sampled_from(names)))))
            case 1 | 2:
                open_orders += plan.next(now)
            case 3 if open_orders:
                order = open_orders.pop(data.draw(st.integers(0, len(open_orders) - 1)))
                plan.received(order, now)
                received.append(order)
            case 4 if open_orders:
                not_held, busy = data.draw(st.tuples(st.booleans(), st.booleans()))
                plan.failed(open_orders.pop(), now, "x", not_held=not_held, busy=busy)
            case 5 if received:
                order = received.pop()
                plan.stored(order)
                stored.add((order.site, order.expert))
            case 6 if received:
                plan.corrupt(received.pop(), "bad")
        pending = {(s, e) for s, mask in plan.pending().items() for e in range(16) if mask >> e & 1}
        flying = [(o.site, o.expert) for o in open_orders + received]
        assert len(flying) == len(set(flying)) == plan.in_flight
        assert sorted([*pending, *flying, *stored]) == [(0, e) for e in range(8)] + [(1, e) for e in range(4)]
        assert plan.is_done == (len(stored) == 12)
