"""Who is slow when it is used and fast when it is not is tried ever more seldom; who serves well starts afresh."""

from __future__ import annotations

from itertools import pairwise

import pytest

from swarmnode.coordination.coordinator import QUICK_REVIEW_S, REVIEW_S, SPEED_S, Coordinator
from swarmnode.coordination.orders import Standing
from swarmnode.coordination.second_chance import FIRST_S, GOOD_S, MAX_WAIT_S, WAIT_S, SecondChances
from tests.swarmnode.coordination.test_coordinator import EXPERTS, SITES, SIZE, request
from tests.swarmnode.coordination.test_slow_members import Slowing

GOOD, SLOW = (0.01, 0.001), (0.01, 0.01)


def chances() -> SecondChances:
    return SecondChances(lambda then, now: now > 1.5 * then)


def disappoint(one: SecondChances, now: float, served_s: float = 10.0) -> float:
    """Used, slow, left out; returns for how long it is taken for slow."""
    one.planned("a", 20, 0.014, 0.014, GOOD, now)
    now += served_s
    one.planned("a", 0, 0.05, 0.014, SLOW, now)
    waited = 0.0
    while one.believed("a", *GOOD, now + waited) != GOOD:
        waited += 1.0
    return waited


def test_every_disappointment_takes_longer_to_be_forgotten() -> None:
    one, now, waits = chances(), 0.0, []
    for _ in range(10):
        waits.append(disappoint(one, now))
        now += 10.0 + waits[-1]
    assert waits[:4] == [FIRST_S, WAIT_S, 2 * WAIT_S, 4 * WAIT_S]
    assert waits[-1] == MAX_WAIT_S


def test_who_serves_well_starts_afresh() -> None:
    one = chances()
    for number in range(4):
        disappoint(one, number * 1000.0)
    assert disappoint(one, 10_000.0, served_s=max(GOOD_S, 4 * WAIT_S)) == FIRST_S


def test_who_is_left_out_for_another_reason_is_believed() -> None:
    one = chances()
    one.planned("a", 20, 0.014, 0.014, GOOD, 0.0)
    one.planned("a", 0, 0.015, 0.014, GOOD, 10.0)  # another one is nearer now
    assert one.believed("a", 0.002, 0.0, 10.0) == (0.002, 0.0)
    one.planned("b", 20, 0.014, 0.014, GOOD, 0.0)
    one.gone("b")
    one.planned("b", 0, 0.05, 0.014, SLOW, 10.0)
    assert one.believed("b", *GOOD, 10.0) == GOOD
    one.planned("c", 20, 0.0, 0.014, (0.01, 0.0), 0.0)  # how fast it computes was not known
    one.planned("c", 0, 0.05, 0.014, SLOW, 10.0)
    assert one.believed("c", *GOOD, 10.0) == GOOD
    one.planned("d", 20, 0.014, 0.014, GOOD, 0.0)
    one.planned("d", 0, 0.05, 0.04, SLOW, 10.0)  # all are slow now: one machine has much to do
    assert one.believed("d", *GOOD, 10.0) == GOOD


@pytest.mark.parametrize("share", [20, 5])
def test_a_plan_that_knows_no_speed_takes_nothing_back(share: int) -> None:
    one = chances()
    one.planned("a", 20, 0.014, 0.014, GOOD, 0.0)
    one.planned("a", share, 0.0, 0.014, (0.01, 0.0), 5.0)  # it started anew and has not computed yet
    one.planned("a", 0, 0.05, 0.014, SLOW, 10.0)
    assert one.believed("a", *GOOD, 10.0) == SLOW


def test_whose_computing_is_not_known_is_nobody_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, heard = Coordinator(request()), dict[str, tuple[float, float]]()

    def planned(peer: str, share: int, call_s: float, others_s: float, *_: object) -> None:
        heard[peer] = (call_s, others_s)

    monkeypatch.setattr(coordinator._chances, "planned", planned)
    row_s = {"a": 0.01, "b": 0.02, "c": 0.03, "d": 0.0, "e": 0.0, "f": 0.0}
    for peer, seconds in row_s.items():
        coordinator.report(Standing(peer, 100 * SIZE, {}, row_s=seconds, rtt_s=0.001), 0.0)
    coordinator.step(REVIEW_S)
    calls = {peer: 0.001 + 4 * seconds if seconds else 0.0 for peer, seconds in row_s.items()}
    assert {peer: call_s for peer, (call_s, _) in heard.items()} == pytest.approx(calls)
    others = {"a": "b", "b": "a", "c": "a", "d": "b", "e": "b", "f": "b"}  # the median, the lower one of two
    assert {peer: others_s for peer, (_, others_s) in heard.items()} == pytest.approx(
        {peer: calls[other] for peer, other in others.items()}
    )


def test_who_is_alone_is_compared_with_itself() -> None:
    for row_s in (0.0, 0.01):
        coordinator = Coordinator(request())
        coordinator.report(Standing("a", 100 * SIZE, {}, row_s=row_s, rtt_s=0.001), 0.0)
        coordinator.step(REVIEW_S)
        assert coordinator.placement is not None


def test_a_smaller_share_is_left_out_too_and_worse_figures_count_at_once() -> None:
    one = chances()
    one.planned("a", 20, 0.014, 0.014, GOOD, 0.0)
    one.planned("a", 5, 0.05, 0.014, SLOW, 10.0)
    assert one.believed("a", 0.3, 0.0, 11.0) == (0.3, SLOW[1])
    assert one.believed("a", *GOOD, 10.0 + FIRST_S) == GOOD
    assert one.believed("never seen", *GOOD, 0.0) == GOOD


class TwoFaced(Slowing):
    """`near` computes fast while it has next to nothing to do, and slowly otherwise."""

    is_two_faced = True

    def report(self, peer: str) -> None:
        held = sum(mask.bit_count() for mask in self.held["near"].values())
        self.rtt_s["near"] = 0.300 if held > EXPERTS and self.is_two_faced else 0.005
        super().report(peer)


def test_who_is_fast_only_while_it_is_idle_does_not_drag_for_long() -> None:
    swarm = TwoFaced()
    swarm.run(REVIEW_S)
    uses, dragged = [], 0.0
    for second in range(3600):
        before = swarm.share("near")
        swarm.run(1.0)
        if swarm.share("near") > EXPERTS:
            dragged += 1.0
            if before <= EXPERTS:
                uses.append(second)
    assert 3 <= len(uses) <= 8
    assert all(later - earlier > WAIT_S for earlier, later in pairwise(uses[1:]))
    assert dragged < 3600 * 0.05
    assert swarm.is_whole()
    assert swarm.gaps == 0
    swarm.is_two_faced = False  # its owner has found out why
    swarm.run(MAX_WAIT_S + REVIEW_S)
    assert swarm.share("near") >= SITES * EXPERTS // 4


@pytest.mark.parametrize("room", [3 * SIZE, SIZE])
def test_whoever_is_idle_keeps_what_fits_to_be_measured_with(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Slowing()
    swarm.run(REVIEW_S)
    swarm.rtt_s["near"] = 0.300
    swarm.run(SPEED_S + QUICK_REVIEW_S + 1)
    budget, swarm.budget = swarm.budget, room
    swarm.report("near")
    swarm.budget = budget
    reported = swarm.report
    monkeypatch.setattr(swarm, "report", lambda peer: None if peer == "near" else reported(peer))
    targets = swarm.coordinator._wanted_of_each()
    assert sum(mask.bit_count() for mask in targets["near"].values()) == room // SIZE
