"""From a plan of experts to the pairs that each worker gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.assignment import Assignment
from swarmnode.dispatch.call_actions import CallPolicy
from swarmnode.dispatch.hello import mask_of
from swarmnode.dispatch.replicas import LOCAL, Candidate
from tests.swarmnode.dispatch.test_call import FakeSwarm


def assignment(swarm: FakeSwarm, experts: list[int], kept: int = 0, per_token: int = 0) -> Assignment:
    return Assignment(experts, 16, swarm, CallPolicy(), kept, per_token)


@given(
    experts=st.lists(st.integers(0, 15), min_size=1, max_size=200),
    owners=st.lists(st.sets(st.integers(0, 15)), min_size=1, max_size=3),
    per_token=st.sampled_from([0, 1]),
)
def test_each_pair_goes_once_to_a_worker_that_holds_its_expert(
    experts: list[int], owners: list[set[int]], per_token: int
) -> None:
    owners[0] |= set(experts).difference(*owners[1:])
    swarm = FakeSwarm({number: sorted(held) for number, held in enumerate(owners)})
    made = assignment(swarm, experts, per_token=per_token)
    everything = made.everything()
    plan = made.plan(everything, frozenset())
    assert not plan.uncovered
    given_out: list[int] = []
    for candidate, pairs, _ in made.parts(plan, everything):
        assert all(candidate.held >> experts[pair] & 1 for pair in pairs)
        given_out += list(pairs)
    assert sorted(given_out) == list(range(len(experts)))


def test_who_was_tried_is_not_asked_again_nor_is_this_node() -> None:
    made = assignment(FakeSwarm({1: range(16), 2: range(8)}, local=range(16)), [3, 9])
    assert [candidate.worker for candidate, _ in made.plan([0, 1], frozenset({2})).shares] == [1]
    assert [candidate.worker for candidate, _ in made.plan([0, 1], frozenset({1, 2})).shares] == [LOCAL]
    assert made.plan([0, 1], frozenset({1, LOCAL})).uncovered == mask_of([9])


def test_what_is_kept_here_is_asked_of_nobody() -> None:
    made = assignment(FakeSwarm({1: range(16)}, local=range(16)), [3, 9], kept=mask_of([9]))
    parts = list(made.parts(made.plan([0, 1], frozenset()), [0, 1]))
    assert [(candidate.worker, list(pairs)) for candidate, pairs, _ in parts] == [(1, [0]), (LOCAL, [1])]


@pytest.mark.parametrize("held", [range(16), range(8), ()])
def test_whether_a_worker_still_holds_what_is_wanted(held: range) -> None:
    made = assignment(FakeSwarm({1: held}), [3, 9])
    assert made.holds(Candidate(1, "w1", 0), [0, 1]) == (9 in held)
    assert not made.holds(Candidate(2, "w2", 0xFFFF), [0])
