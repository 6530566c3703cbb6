"""The deadline of a slot runs from when those before it at the same worker are done."""

from __future__ import annotations

import math

from swarmnode.dispatch.call_slot import Slot
from swarmnode.dispatch.pipeline import Pipelines
from swarmnode.dispatch.replicas import Candidate
from tests.swarmnode.dispatch.test_call import FakeSwarm

QUEUE_S = 3.0


def line(*, sent: bool, n: int = 3) -> tuple[Pipelines, list[Slot]]:
    pipelines = Pipelines(FakeSwarm({}), QUEUE_S)
    slots = [Slot(attempt, Candidate(1, "w1", 1), [attempt], frozenset({1}), was_sent=sent) for attempt in range(n)]
    for slot in slots:
        pipelines.enter(slot)
    return pipelines, slots


def test_only_the_first_does_not_wait() -> None:
    pipelines, slots = line(sent=True)
    assert [slot.waits_in_line for slot in slots] == [False, True, True]
    pipelines.leave(slots[0], 10.0)
    assert [slot.due for slot in slots[1:]] == [11.0, math.inf]  # one second: see FakeSwarm
    pipelines.leave(slots[2], 10.5)
    assert list(slots[1].line()) == [slots[1]]
    pipelines.leave(slots[1], 11.0)
    after = Slot(9, slots[0].candidate, [9], frozenset({1}))
    pipelines.enter(after)
    assert not after.waits_in_line


def test_who_leaves_from_the_middle_hurries_nobody() -> None:
    pipelines, slots = line(sent=True)
    pipelines.leave(slots[1], 10.0)
    assert slots[2].due == math.inf
    assert slots[2].waits_in_line
    pipelines.leave(slots[0], 12.0)
    assert slots[2].due == 13.0


def test_what_has_not_left_this_node_may_wait_here_for_a_while() -> None:
    pipelines, slots = line(sent=False)
    pipelines.leave(slots[0], 10.0)
    assert slots[1].due == 10.0 + QUEUE_S


def test_behind_a_late_one_that_answers_all_wait_as_before() -> None:
    pipelines, slots = line(sent=True)
    for slot in slots:
        slot.was_late, slot.due = True, 10.1
    pipelines.leave(slots[0], 10.0)
    assert [slot.was_late for slot in slots[1:]] == [False, False]
    assert [slot.due for slot in slots[1:]] == [11.0, math.inf]


def test_each_worker_has_a_line_of_its_own() -> None:
    pipelines, slots = line(sent=True)
    other = Slot(9, Candidate(2, "w2", 1), [9], frozenset({2}))
    pipelines.enter(other)
    assert not other.waits_in_line
    pipelines.leave(other, 10.0)
    assert slots[1].waits_in_line
