"""A member that becomes slow is planned around soon, and used again when it is fast; nothing is lost meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.coordination.coordinator import QUICK_REVIEW_S, REVIEW_S, SPEED_S, Coordinator
from swarmnode.coordination.lead import pace
from swarmnode.coordination.orders import Order, Outcome, Planned, Standing
from swarmnode.placement.request import Holdings
from tests.swarmnode.coordination.test_coordinator import EVERYTHING, EXPERTS, SITES, SIZE, request

SOON = SPEED_S + QUICK_REVIEW_S + 1


class Slowing:
    """Workers that carry orders out at once; `near` answers in 5 ms until told otherwise, the others in 10 ms."""

    def __init__(self, room: int = 24) -> None:
        self.coordinator = Coordinator(request())
        self.now = 0.0
        self.budget = room * SIZE
        self.rtt_s = {"near": 0.005, "b": 0.010, "c": 0.010, "d": 0.010}
        self.held: dict[str, Holdings] = {peer: {} for peer in self.rtt_s}
        self.done: dict[str, int] = dict.fromkeys(self.rtt_s, 0)
        self.gaps = 0

    def report(self, peer: str) -> None:
        standing = Standing(peer, self.budget, self.held[peer], row_s=1e-4, rtt_s=self.rtt_s[peer])
        self.coordinator.report(replace(standing, assignment=self.done[peer]), self.now)

    def run(self, seconds: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for peer in self.rtt_s:
                self.report(peer)
            was_whole = self.is_whole()
            for outcome in self.coordinator.step(self.now):
                outcomes.append(outcome)
                if isinstance(outcome, Order):
                    assert sum(mask.bit_count() for mask in outcome.hold.values()) * SIZE <= self.budget
                    # What it has to give up goes first, as where there is no room for both.
                    before = self.held[outcome.peer]
                    self.held[outcome.peer] = {s: before.get(s, 0) & mask for s, mask in outcome.hold.items()}
                    self.gaps += was_whole and not self.is_whole()
                    self.held[outcome.peer] = dict(outcome.hold)
                    self.done[outcome.peer] = outcome.number
        return outcomes

    def is_whole(self) -> bool:
        held = dict.fromkeys(EVERYTHING, 0)
        for masks in self.held.values():
            for site, mask in masks.items():
                held[site] |= mask
        return held == EVERYTHING

    def share(self, peer: str) -> int:
        placement = self.coordinator.placement
        assert placement is not None
        return sum(mask.bit_count() for mask in placement.holdings.get(peer, {}).values())


def test_a_member_that_becomes_slow_is_planned_around_soon_and_nothing_is_lost_on_the_way() -> None:
    swarm = Slowing()
    swarm.run(REVIEW_S)
    assert swarm.share("near") >= SITES * EXPERTS // 4
    swarm.rtt_s["near"] = 0.300
    swarm.run(SOON)
    assert swarm.share("near") == 0
    assert swarm.is_whole()
    assert swarm.gaps == 0


def test_a_member_without_use_keeps_something_to_be_measured_with_and_is_used_when_it_is_fast_again() -> None:
    swarm = Slowing()
    swarm.run(REVIEW_S)
    swarm.rtt_s["near"] = 0.300
    swarm.run(REVIEW_S)
    assert 0 < sum(mask.bit_count() for mask in swarm.held["near"].values()) <= EXPERTS
    swarm.rtt_s["near"] = 0.005
    swarm.run(SOON)
    assert swarm.share("near") >= SITES * EXPERTS // 4
    assert swarm.is_whole()
    assert swarm.gaps == 0


def test_the_scheduler_moves_nothing() -> None:
    swarm = Slowing()
    swarm.run(REVIEW_S)
    for number in range(20):
        swarm.rtt_s["near"] = 0.005 + 0.002 * (number % 2)
        assert not any(isinstance(outcome, Planned) for outcome in swarm.run(3.0))


def test_full_workers_that_must_exchange_get_there_all_the_same() -> None:
    swarm = Slowing(room=SITES * EXPERTS // 4)  # not one free place anywhere
    swarm.run(REVIEW_S)
    assert swarm.is_whole()
    swarm.rtt_s["near"] = 0.300
    swarm.run(2 * REVIEW_S)
    assert swarm.is_whole()


def test_what_an_answer_takes_is_its_rows_and_the_rest() -> None:
    assert pace(0.010, 0.001, 0.030, 4.0) == pytest.approx((0.026, 0.001))  # a thin line
    assert pace(0.010, 0.001, 0.012, 4.0) == pytest.approx((0.010, 0.001))
    assert pace(0.002, 0.005, 0.004, 2.0) == pytest.approx((0.002, 0.002))  # it was slow, and says so still
