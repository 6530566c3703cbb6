"""Reports in, orders out: that serving never has to stop for a plan, and that little is moved."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.coordination.coordinator import BACK_S, CARRY_OUT_S, RETURN_S, SETTLE_S, Coordinator
from swarmnode.coordination.orders import KeepLocal, Order, Outcome, Planned, Release, Standing
from swarmnode.placement.request import Holdings, PlanRequest

SITES, EXPERTS, SIZE = 4, 16, 1000
EVERYTHING = dict.fromkeys(range(SITES), (1 << EXPERTS) - 1)


def request(local_budget: int = 0, replicas: int = 1) -> PlanRequest:
    sites = range(SITES)
    return PlanRequest(
        expert_bytes=dict.fromkeys(sites, SIZE),
        n_expert=dict.fromkeys(sites, EXPERTS),
        weights={site: np.ones(EXPERTS) for site in sites},
        workers=(),
        k=dict.fromkeys(sites, 4),
        local_budget=local_budget,
        replicas=replicas,
        d_bytes=1024,
    )


class Swarm:
    """Workers that do at once what they are told."""

    def __init__(self, **budgets: int) -> None:
        self.coordinator = Coordinator(request())
        self.budgets = dict(budgets)
        self.held: dict[str, Holdings] = {peer: {} for peer in budgets}
        self.done: dict[str, int] = dict.fromkeys(budgets, 0)
        self.now = 0.0
        self.outcomes: list[Outcome] = []
        for peer in budgets:
            self.report(peer)

    def report(self, peer: str) -> None:
        self.coordinator.report(
            Standing(peer, self.budgets[peer], self.held[peer], rtt_s=0.001, assignment=self.done[peer]), self.now
        )

    def join(self, peer: str) -> None:
        """A newcomer with room for everything."""
        self.budgets[peer], self.held[peer], self.done[peer] = 64 * SIZE, {}, 0
        self.report(peer)

    def obey(self, order: Order) -> None:
        assert sum(mask.bit_count() for mask in order.hold.values()) * SIZE <= self.budgets[order.peer]
        self.held[order.peer] = dict(order.hold)
        self.done[order.peer] = order.number
        self.report(order.peer)

    def run(self, seconds: float, *, deaf: str = "") -> list[Outcome]:
        """Let time pass; every order is obeyed but those to `deaf`."""
        outcomes = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            for outcome in self.coordinator.step(self.now):
                outcomes.append(outcome)
                if isinstance(outcome, Order) and outcome.peer != deaf and outcome.peer in self.held:
                    self.obey(outcome)
        return outcomes

    def covered(self) -> bool:
        return all(
            mask == _union(held.get(site, 0) for held in self.held.values()) for site, mask in EVERYTHING.items()
        )


def _union(masks: object) -> int:
    union = 0
    for mask in masks:  # type: ignore[attr-defined]
        union |= mask
    return union


def test_workers_that_come_together_are_planned_once() -> None:
    swarm = Swarm(a=32 * SIZE, b=32 * SIZE)
    assert swarm.run(SETTLE_S * 0.5) == []
    plans = [one for one in swarm.run(5.0) if isinstance(one, Planned)]
    assert len(plans) == 1
    assert swarm.covered()


def test_workers_that_come_back_one_after_the_other_keep_what_they_hold() -> None:
    """This node restarted: whoever is there first could hold what the others bring back in a moment."""
    swarm = Swarm(a=32 * SIZE, b=32 * SIZE)
    swarm.run(5.0)
    before = {peer: dict(held) for peer, held in swarm.held.items()}
    again = Swarm()
    again.budgets, again.held, again.done = swarm.budgets, swarm.held, swarm.done
    again.coordinator = Coordinator(again.coordinator._request, after=1000)
    again.report("a")
    assert again.run(BACK_S * 0.5) == []
    again.report("b")
    outcomes = again.run(BACK_S * 2)
    assert len([one for one in outcomes if isinstance(one, Planned)]) == 1
    assert {one.peer: one.hold for one in outcomes if isinstance(one, Order)} == before


def test_nothing_is_ordered_again_while_nothing_changes() -> None:
    swarm = Swarm(a=32 * SIZE, b=32 * SIZE)
    swarm.run(5.0)
    assert [one for one in swarm.run(100.0) if isinstance(one, Order | Planned)] == []


def test_a_third_worker_takes_over_without_a_moment_in_which_an_expert_is_with_nobody() -> None:
    swarm = Swarm(a=32 * SIZE, b=32 * SIZE)
    swarm.run(5.0)
    swarm.budgets["c"], swarm.held["c"], swarm.done["c"] = 32 * SIZE, {}, 0
    swarm.report("c")
    for _ in range(40):
        swarm.run(0.25)
        assert swarm.covered()


def test_room_is_made_by_giving_up_first_what_others_hold() -> None:
    swarm = Swarm(a=32 * SIZE, b=32 * SIZE)
    swarm.run(5.0)
    before = swarm.held["a"]
    swarm.budgets["a"] = (
        16 * SIZE
    )  # its user wants memory back: half of what it holds must go elsewhere, there is no room
    swarm.held["a"] = {}
    swarm.report("a")
    swarm.run(5.0)
    assert sum(mask.bit_count() for mask in swarm.held["a"].values()) == 16
    assert before != swarm.held["a"]


def test_a_lost_worker_whose_experts_nobody_else_has_is_planned_around_at_once() -> None:
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    swarm.run(5.0)
    gone = next(peer for peer in ("a", "b") if any(swarm.held[peer].values()))
    swarm.held.pop(gone)
    swarm.coordinator.gone(gone, swarm.now)
    swarm.run(2.0)
    assert swarm.covered()


def test_a_worker_that_restarted_is_told_again_and_nothing_else_happens() -> None:
    swarm = Swarm(a=32 * SIZE, b=32 * SIZE)
    swarm.run(5.0)
    before = dict(swarm.held["a"])
    swarm.done["a"] = 0  # its process is another one, its slices are on its disk
    swarm.report("a")
    swarm.coordinator.returned("a", swarm.now)
    (order,) = swarm.run(2.0)
    assert isinstance(order, Order)
    assert order.peer == "a"
    assert order.hold == before
    swarm.coordinator.leaving("b", swarm.now)
    assert any(isinstance(one, Release) for one in swarm.run(5.0))


def test_what_this_node_keeps_is_with_workers_too_while_others_generate() -> None:
    swarm = Swarm(a=64 * SIZE)
    swarm.coordinator = Coordinator(request(local_budget=16 * SIZE))
    swarm.report("a")
    swarm.run(5.0)
    assert not swarm.covered()
    swarm.coordinator.others_generate(True, swarm.now)
    swarm.run(5.0)
    assert swarm.covered()
    assert swarm.coordinator.placement is not None
    assert sum(mask.bit_count() for mask in swarm.coordinator.placement.local.values()) == 16
    assert not any(isinstance(one, Planned) for one in swarm.run(100.0))


def test_a_lost_spare_is_given_time_to_come_back() -> None:
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    swarm.coordinator = Coordinator(request(replicas=2))
    for peer in ("a", "b"):
        swarm.report(peer)
    swarm.run(5.0)
    assert swarm.held["a"] == swarm.held["b"] == EVERYTHING
    swarm.held.pop("b")
    swarm.coordinator.gone("b", swarm.now)
    assert swarm.run(RETURN_S - 1) == []
    assert any(isinstance(one, Planned) for one in swarm.run(3.0))


def test_a_leaving_worker_is_released_only_when_others_have_what_it_held() -> None:
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    swarm.run(5.0)
    leaver = next(peer for peer in ("a", "b") if any(swarm.held[peer].values()))
    other = "b" if leaver == "a" else "a"
    swarm.coordinator.leaving(leaver, swarm.now)
    first = swarm.run(1.0, deaf=other)
    assert [one for one in first if isinstance(one, Release)] == []
    order = [one for one in first if isinstance(one, Order) and one.peer == other][-1]
    swarm.obey(order)
    assert Release(leaver) in swarm.run(1.0)
    assert swarm.held[other] == EVERYTHING


def test_the_only_worker_may_go_too() -> None:
    swarm = Swarm(a=64 * SIZE)
    swarm.run(5.0)
    swarm.coordinator.leaving("a", swarm.now)
    assert Release("a") in swarm.run(1.0)


@pytest.mark.parametrize("why", ["trouble", "late", "distrust"])
def test_a_worker_that_cannot_hold_or_is_not_trusted_is_planned_around(why: str) -> None:
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    if why == "late":
        swarm.run(2.0, deaf="a")
        swarm.run(CARRY_OUT_S + 5, deaf="a")
    else:
        swarm.run(5.0)
        bad = next(peer for peer in ("a", "b") if any(swarm.held[peer].values()))
        if why == "trouble":
            swarm.coordinator.report(Standing(bad, 64 * SIZE, swarm.held[bad], trouble="disk full"), swarm.now)
        else:
            swarm.coordinator.stays_out(bad, "wrong answers", swarm.now)
        swarm.held[bad] = {}
        swarm.run(5.0)
    assert swarm.covered()


def test_this_node_keeps_what_its_own_budget_holds() -> None:
    coordinator = Coordinator(request(local_budget=64 * SIZE))
    coordinator.report(Standing("a", 64 * SIZE, {}, rtt_s=0.05), 0.0)
    outcomes = coordinator.step(SETTLE_S + 0.1)
    kept = next(one for one in outcomes if isinstance(one, KeepLocal))
    assert kept.masks == EVERYTHING


def test_pinned_workers_are_left_as_they_are() -> None:
    coordinator = Coordinator(request())
    coordinator.report(Standing("a", 0, EVERYTHING, pinned=True), 0.0)
    outcomes = coordinator.step(SETTLE_S + 0.1)
    assert [one for one in outcomes if isinstance(one, Order)] == []


def test_a_slow_download_is_waited_for_as_long_as_it_goes_on() -> None:
    swarm = Swarm(a=64 * SIZE)
    order = next(one for one in swarm.run(2.0, deaf="a") if isinstance(one, Order))
    for done in range(1, 60):  # of one expert that takes ten minutes
        swarm.coordinator.report(Standing("a", 64 * SIZE, {}, rtt_s=0.001, fetched=done * 10), swarm.now)
        assert [one for one in swarm.run(10.0, deaf="a") if isinstance(one, Planned)] == []
    swarm.obey(order)
    swarm.run(5.0)
    assert swarm.covered()


def test_a_worker_that_was_given_up_is_used_again_when_it_has_what_it_was_told() -> None:
    swarm = Swarm(a=64 * SIZE)
    order = next(one for one in swarm.run(2.0, deaf="a") if isinstance(one, Order))
    swarm.run(CARRY_OUT_S + 10, deaf="a")
    assert swarm.coordinator.placement is not None
    assert swarm.coordinator.placement.holdings == {}
    swarm.obey(order)
    swarm.run(10.0)
    assert swarm.covered()


def test_distrust_is_for_good_whatever_a_worker_says_or_comes_back_as() -> None:
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    swarm.run(5.0)
    swarm.coordinator.stays_out("a", "wrong answers", swarm.now)
    swarm.coordinator.report(Standing("a", 64 * SIZE, swarm.held["a"], trouble="x"), swarm.now)
    swarm.coordinator.report(Standing("a", 64 * SIZE, swarm.held["a"]), swarm.now)
    swarm.run(10.0)
    swarm.coordinator.gone("a", swarm.now)
    swarm.report("a")
    orders = [one for one in swarm.run(60.0) if isinstance(one, Order) and one.peer == "a"]
    assert orders == []


def test_trouble_in_the_first_report_counts() -> None:
    coordinator = Coordinator(request())
    coordinator.report(Standing("a", 64 * SIZE, {}, rtt_s=0.001, trouble="disk full"), 0.0)
    assert [one for one in coordinator.step(SETTLE_S + 0.1) if isinstance(one, Order)] == []
    coordinator.report(Standing("a", 64 * SIZE, {}, rtt_s=0.001), 5.0)
    assert any(isinstance(one, Order) for one in coordinator.step(20.0))


def test_a_worker_that_cannot_be_called_gets_nothing_until_it_can() -> None:
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    swarm.run(5.0)
    swarm.coordinator.reached("a", False, swarm.now)
    swarm.run(5.0)
    assert swarm.coordinator.placement is not None
    assert "a" not in swarm.coordinator.placement.holdings
    swarm.coordinator.reached("b", False, swarm.now)
    swarm.coordinator.reached("a", True, swarm.now)
    swarm.run(10.0)
    assert swarm.held["a"] == EVERYTHING


def test_a_leaver_whose_experts_others_hold_need_not_wait_for_anybody() -> None:
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    swarm.coordinator = Coordinator(request(replicas=2))
    swarm.run(0.0)
    for peer in ("a", "b"):
        swarm.report(peer)
    swarm.run(5.0)
    swarm.budgets["c"], swarm.held["c"], swarm.done["c"] = 64 * SIZE, {}, 0
    swarm.report("c")
    swarm.coordinator.leaving("a", swarm.now)
    assert Release("a") in swarm.run(1.0, deaf="c")


def test_a_leaver_that_comes_back_is_used_again() -> None:
    swarm = Swarm(a=64 * SIZE)
    swarm.run(5.0)
    swarm.coordinator.leaving("a", swarm.now)
    swarm.run(2.0)
    swarm.coordinator.returned("a", swarm.now)
    outcomes = swarm.run(10.0)
    assert [one for one in outcomes if isinstance(one, Release)] == []
    assert swarm.held["a"] == EVERYTHING


def test_a_coordinator_whose_clock_was_set_back_is_obeyed() -> None:
    """Numbers are compared for being the same, not for being larger."""
    swarm = Swarm(a=64 * SIZE)
    swarm.done["a"] = 1 << 60
    swarm.report("a")
    swarm.run(5.0)
    assert swarm.held["a"] == EVERYTHING
    assert swarm.done["a"] < 1 << 60


def test_a_worker_that_loses_slices_is_told_again() -> None:
    swarm = Swarm(a=64 * SIZE)
    swarm.run(5.0)
    swarm.held["a"] = {0: 0xFFFF}
    swarm.report("a")
    swarm.run(3.0)
    assert swarm.held["a"] == EVERYTHING


def test_a_worker_cannot_make_this_node_plan_all_the_time() -> None:
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    swarm.run(5.0)
    swarm.coordinator.took(1.0)
    plans = 0
    for turn in range(100):
        swarm.budgets["a"] = (64 - turn % 2) * SIZE
        swarm.report("a")
        plans += sum(isinstance(one, Planned) for one in swarm.run(1.0))
    assert plans <= 11


def test_a_spare_that_comes_back_with_its_slices_changes_nothing() -> None:
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    swarm.coordinator = Coordinator(request(replicas=2))
    for peer in ("a", "b"):
        swarm.report(peer)
    swarm.run(5.0)
    held = swarm.held.pop("b")
    swarm.coordinator.gone("b", swarm.now)
    swarm.run(RETURN_S - 10)
    swarm.held["b"], swarm.done["b"] = held, 0
    swarm.report("b")
    outcomes = swarm.run(RETURN_S + 5)
    assert [one for one in outcomes if isinstance(one, Planned)] == []
    assert [one.hold for one in outcomes if isinstance(one, Order)] == [held]


def _twins() -> Swarm:
    """Two workers of which each holds everything."""
    swarm = Swarm(a=64 * SIZE, b=64 * SIZE)
    swarm.coordinator = Coordinator(request(replicas=2))
    for peer in ("a", "b"):
        swarm.report(peer)
    swarm.run(5.0)
    assert swarm.held["a"] == swarm.held["b"] == EVERYTHING
    return swarm


def test_nothing_is_given_up_that_only_a_worker_holds_who_is_not_heard() -> None:
    swarm = _twins()
    swarm.coordinator.heard("b", False, swarm.now)
    swarm.join("c")
    assert swarm.run(RETURN_S - 1.0, deaf="b") == []
    assert swarm.coordinator.next_due() > swarm.now  # nobody looks all the time whether there is something to do
    swarm.coordinator.heard("b", True, swarm.now)
    assert [one.why for one in swarm.run(2.0) if isinstance(one, Planned)] == ["a worker came"]


def test_who_is_not_heard_for_long_is_planned_without_until_it_is_heard() -> None:
    swarm = _twins()
    swarm.coordinator.heard("b", False, swarm.now)
    swarm.join("c")
    outcomes = swarm.run(RETURN_S + 5.0, deaf="b")
    assert [one.why for one in outcomes if isinstance(one, Planned)] == ["a worker came"]
    assert all(one.peer != "b" for one in outcomes if isinstance(one, Order))
    assert swarm.held["c"] == EVERYTHING
    swarm.coordinator.heard("b", True, swarm.now)
    assert [one.why for one in swarm.run(5.0) if isinstance(one, Planned)] == ["a worker can be called"]


def test_silence_in_turns_does_not_hold_up_plans_for_ever() -> None:
    swarm = _twins()
    swarm.coordinator.heard("a", False, swarm.now)
    swarm.join("c")
    outcomes = []
    for quiet, heard in ("ba", "ab") * 2:
        outcomes += swarm.run(8.0)
        swarm.coordinator.heard(quiet, False, swarm.now)
        outcomes += swarm.run(0.5)
        swarm.coordinator.heard(heard, True, swarm.now)
    assert "a worker came" in [one.why for one in outcomes if isinstance(one, Planned)]


def test_nobody_waits_for_who_holds_nothing_and_is_given_nothing() -> None:
    swarm = _twins()
    swarm.budgets["d"], swarm.held["d"], swarm.done["d"] = 0, {}, 0
    swarm.report("d")
    swarm.run(5.0)
    swarm.coordinator.heard("d", False, swarm.now)
    swarm.join("c")
    assert "a worker came" in [one.why for one in swarm.run(5.0) if isinstance(one, Planned)]


def test_trouble_that_begins_in_silence_is_planned_for() -> None:
    swarm = _twins()
    swarm.coordinator.heard("b", False, swarm.now)
    swarm.coordinator.report(
        Standing("b", 64 * SIZE, EVERYTHING, rtt_s=0.001, assignment=swarm.done["b"], trouble="disk"), swarm.now
    )
    swarm.coordinator.heard("b", True, swarm.now)
    assert [one.why for one in swarm.run(5.0) if isinstance(one, Planned)] == ["a worker has trouble"]


def test_a_plan_that_waits_for_a_silent_worker_does_not_keep_lost_experts_waiting() -> None:
    swarm = _twins()
    swarm.coordinator.heard("b", False, swarm.now)
    swarm.join("c")
    assert swarm.run(5.0, deaf="b") == []
    for peer in ("a", "b"):
        swarm.held.pop(peer)
        swarm.coordinator.gone(peer, swarm.now)
    outcomes = swarm.run(1.0)
    assert [one.why for one in outcomes if isinstance(one, Planned)] == ["experts were lost"]
    assert swarm.held["c"] == EVERYTHING


def test_a_step_waits_for_a_worker_that_is_not_heard() -> None:
    """What others are to drop at the last step may be what only the silent one has."""
    swarm = _twins()
    swarm.join("c")
    while not any(isinstance(one, Planned) for one in swarm.run(0.25, deaf="c")):
        pass
    swarm.coordinator.heard("b", False, swarm.now)
    swarm.done["c"] = swarm.coordinator._workers["c"].number
    swarm.held["c"] = dict(swarm.coordinator._workers["c"].ordered)
    swarm.report("c")
    assert swarm.run(5.0, deaf="b") == []
    swarm.coordinator.heard("b", True, swarm.now)
    assert [one.peer for one in swarm.run(2.0) if isinstance(one, Order)] == ["b"]
