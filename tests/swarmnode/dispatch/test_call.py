"""One layer's call: whatever happens, every pair is counted once or the call says why not."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.dispatch.call import Call
from swarmnode.dispatch.call_actions import Action, CallPolicy, Cancel, Fail, Finish, Late, RunLocal, Send
from swarmnode.dispatch.cutting import Shared
from swarmnode.dispatch.hello import mask_of
from swarmnode.dispatch.pieces import equal_cut
from swarmnode.dispatch.replicas import LOCAL, Candidate
from swarmnode.errors import CallFailed, NobodyHolds

POLICY = CallPolicy(give_up_s=10.0, queue_s=3.0, overloaded_retry_s=0.5)


class FakeSwarm:
    def __init__(self, held: dict[int, Sequence[int]], local: Sequence[int] | None = None) -> None:
        self.workers = {n: Candidate(n, f"w{n}", mask_of(experts)) for n, experts in held.items()}
        self.own = None if local is None else Candidate(LOCAL, "here", mask_of(local))
        self.largest = 1 << 30  # piece of a large call, in tokens or pairs
        self.heard_at: dict[int, float] = {}  # when a worker last answered whatever call
        self.busy_until: dict[int, float] = {}  # what it was sent is not late before

    def candidates(self) -> list[Candidate]:
        return list(self.workers.values())

    def local(self) -> Candidate | None:
        return self.own

    def late_after(self, worker: int, n_pairs: int, attempt: int) -> float:
        return 1.0

    def heard(self, worker: int) -> float:
        return self.heard_at.get(worker, -math.inf)

    def answering_until(self, worker: int) -> float:
        return self.busy_until.get(worker, -math.inf)

    def cut(self, loads: Sequence[Shared], units: int, most: int) -> Sequence[int]:
        return equal_cut(units, min(most, self.largest))


class Driver:
    """Carries actions out on paper and checks that they make sense."""

    def __init__(
        self,
        swarm: FakeSwarm,
        experts: Sequence[int],
        n_expert: int = 16,
        policy: CallPolicy = POLICY,
        kept: int = 0,
        per_token: int = 0,
        sends: bool = True,
    ) -> None:
        self.swarm = swarm
        self.experts = list(experts)
        count = itertools.count(1)
        self.call = Call(7, self.experts, n_expert, swarm, lambda: next(count), policy, kept, per_token)
        self.sends = sends  # whether what is asked leaves at once
        self.asked: dict[int, tuple[int, list[int]]] = {}  # attempt -> worker, pairs
        self.open: set[int] = set()
        self.late: list[int] = []
        self.finished: tuple[int, ...] | None = None
        self.error: Exception | None = None
        self.take(self.call.start(0.0), 0.0)

    def take(self, actions: list[Action], now: float) -> None:
        for action in actions:
            assert self.finished is None
            assert self.error is None
            match action:
                case Send(attempt, worker, pairs):
                    held = self.swarm.workers[worker].held
                    assert all(held >> self.experts[pair] & 1 for pair in pairs)
                    self._ask(attempt, worker, list(pairs))
                    assert self.call.wants(attempt) or self.call.done
                    if self.sends:
                        self.call.sent(attempt, now)
                case RunLocal(attempt, pairs):
                    self._ask(attempt, LOCAL, list(pairs))
                case Cancel(attempt, worker):
                    assert self.asked[attempt][0] == worker
                    self.open.discard(attempt)
                case Late(attempt, _):
                    self.late.append(attempt)
                case Finish(attempts):
                    self.finished = attempts
                case Fail(error):
                    self.error = error

    def _ask(self, attempt: int, worker: int, pairs: list[int]) -> None:
        assert attempt not in self.asked
        assert pairs
        self.asked[attempt] = worker, pairs
        self.open.add(attempt)

    def attempt_of(self, worker: int) -> int:
        return next(attempt for attempt in sorted(self.open) if self.asked[attempt][0] == worker)

    def answer(self, worker: int, now: float = 0.0) -> None:
        attempt = self.attempt_of(worker)
        self.open.discard(attempt)
        self.take(self.call.answered(attempt, now), now)

    def fail(self, worker: int, why: str, now: float = 0.0, *, overloaded: bool = False) -> None:
        attempt = self.attempt_of(worker)
        self.open.discard(attempt)
        self.take(self.call.failed(attempt, why, now, overloaded=overloaded), now)

    def tick(self, now: float) -> None:
        self.take(self.call.tick(now), now)

    def counted(self) -> list[int]:
        assert self.finished is not None
        return sorted(itertools.chain.from_iterable(self.asked[attempt][1] for attempt in self.finished))


def test_one_worker_answers() -> None:
    driver = Driver(FakeSwarm({0: range(16)}), [3, 5, 3])
    driver.answer(0)
    assert driver.counted() == [0, 1, 2]
    assert driver.call.done


def test_nobody_holds_says_which_layer_and_experts_and_asks_nobody() -> None:
    driver = Driver(FakeSwarm({0: [1, 2]}), [1, 5, 2, 9])
    assert isinstance(driver.error, NobodyHolds)
    assert "layer 7" in str(driver.error)
    assert driver.error.experts == [5, 9]
    assert not driver.asked


def test_no_pairs_finish_at_once() -> None:
    assert Driver(FakeSwarm({}), []).finished == ()


def test_a_failed_worker_is_replaced_by_several_others() -> None:
    driver = Driver(FakeSwarm({0: [1, 2, 3], 1: [1], 2: [2, 3]}), [1, 2, 3])
    driver.fail(0, "broken")
    assert {driver.asked[a][0] for a in driver.open} == {1, 2}
    driver.answer(2)
    driver.answer(1)
    assert driver.counted() == [0, 1, 2]


def test_the_local_engine_is_the_last_resort_and_then_the_reasons_are_named() -> None:
    driver = Driver(FakeSwarm({0: [1], 1: [1]}, local=[1]), [1])
    driver.fail(0, "answered NaN")
    driver.fail(1, "refused")
    driver.fail(LOCAL, "disk gone")
    assert isinstance(driver.error, CallFailed)
    assert str(driver.error) == "layer 7: no answer for expert 1 (w0: answered NaN; w1: refused; here: disk gone)"


def test_a_late_worker_is_hedged_and_the_first_answer_counts_once() -> None:
    for first in (0, 1):
        driver = Driver(FakeSwarm({0: [1, 2], 1: [1, 2]}), [1, 2])
        driver.tick(0.9)
        assert not driver.late
        driver.tick(1.0)
        assert driver.late == [1]
        driver.answer(first, 1.1)
        assert driver.counted() == [0, 1]
        assert not driver.open  # the loser was cancelled


def test_lateness_without_a_replica_waits_and_takes_one_that_comes_later() -> None:
    swarm = FakeSwarm({0: [1]})
    driver = Driver(swarm, [1])
    driver.tick(1.0)
    assert driver.open == {1}
    swarm.workers[5] = Candidate(5, "w5", mask_of([1]))
    driver.tick(driver.call.next_due())
    driver.answer(5, 5.0)
    assert driver.counted() == [0]


def test_silence_ends_the_call() -> None:
    driver = Driver(FakeSwarm({0: [1]}), [1])
    for now in (1.0, 4.0, 7.0, 9.9):
        driver.tick(now)
    assert driver.error is None
    driver.tick(10.0)
    assert isinstance(driver.error, CallFailed)
    assert "w0: no answer in 10 s" in str(driver.error)


def test_silence_does_not_end_what_the_local_engine_still_computes() -> None:
    driver = Driver(FakeSwarm({}, local=[1]), [1])
    driver.tick(1000.0)
    assert driver.error is None
    assert driver.call.next_due() == float("inf")
    driver.answer(LOCAL, 2000.0)
    assert driver.counted() == [0]


def test_workers_have_their_time_again_when_the_local_engine_is_done() -> None:
    driver = Driver(FakeSwarm({0: [2]}, local=[1]), [1, 2])
    driver.tick(1000.0)
    driver.answer(LOCAL, 2000.0)
    driver.tick(2009.9)
    assert driver.error is None
    driver.tick(2010.0)
    assert isinstance(driver.error, CallFailed)
    assert "w0: no answer in 10 s" in str(driver.error)


def test_a_slow_disk_that_fails_at_last_leaves_the_others_their_time() -> None:
    policy = dataclasses.replace(POLICY, local_first=True)
    driver = Driver(FakeSwarm({0: [1]}, local=[1]), [1], policy=policy)
    driver.tick(1000.0)
    driver.fail(LOCAL, "disk gone", 2000.0)
    driver.tick(2000.5)
    driver.answer(0, 2000.6)
    assert driver.counted() == [0]


def test_a_lost_worker_loses_all_its_attempts_at_once() -> None:
    swarm = FakeSwarm({0: [1, 2], 1: [1, 2]})
    swarm.workers[0] = Candidate(0, "w0", mask_of([1, 2]), max_pairs=16)
    driver = Driver(swarm, [1] * 40 + [2] * 20)
    assert len(driver.open) > 3
    del swarm.workers[0]
    driver.open = set()
    driver.take(driver.call.worker_lost(0, "connection lost", 0.1), 0.1)
    assert {driver.asked[a][0] for a in driver.open} == {1}
    while driver.finished is None:
        driver.answer(1, 0.2)
    assert driver.counted() == list(range(60))


def test_an_overloaded_worker_without_replica_is_asked_again_later_each_time() -> None:
    driver = Driver(FakeSwarm({0: [1]}), [1])
    now = 0.0
    for wait in (0.5, 1.0, 1.0):
        driver.fail(0, "busy", now, overloaded=True)
        assert not driver.open
        assert driver.call.next_due() == now + wait
        now += wait
        driver.tick(now)
    driver.answer(0, now)
    assert driver.counted() == [0]


def test_an_overloaded_worker_with_a_replica_is_left_alone() -> None:
    driver = Driver(FakeSwarm({0: [1], 1: [1]}), [1])
    driver.fail(0, "busy", overloaded=True)
    driver.answer(1)
    assert driver.counted() == [0]


def test_large_calls_are_cut_and_no_expert_changes_sides_of_the_engines_threshold() -> None:
    swarm = FakeSwarm({0: range(4)})
    swarm.workers[0] = Candidate(0, "w0", 0b1111, max_pairs=32)
    experts = [0] * 100 + [1] * 7 + [2] * 8 + [3] * 33
    driver = Driver(swarm, experts)
    for _, pairs in driver.asked.values():
        assert len(pairs) <= 32
        assert pairs == sorted(pairs)
        counts = np.bincount(np.array(experts)[pairs], minlength=4)
        assert all(count == 0 or (count >= 8) == (experts.count(e) >= 8) for e, count in enumerate(counts))
    while driver.finished is None:
        driver.answer(0)
    assert driver.counted() == list(range(len(experts)))


# Large calls: 40 tokens of two pairs each.

PAIRS = [0, 1] * 40


def large(held: dict[int, Sequence[int]], local: Sequence[int] | None = None, *, sends: bool = True) -> Driver:
    swarm = FakeSwarm(held, local)
    swarm.largest = 10
    return Driver(swarm, PAIRS, per_token=2, sends=sends)


def test_partial_sums_are_cut_between_tokens_and_all_workers_get_the_same_ranges() -> None:
    driver = large({0: [0], 1: [1]})
    assert [worker for worker, _ in driver.asked.values()] == [0, 1] * 4  # nobody's second piece before all first ones
    ranges = [{pair // 2 for pair in pairs} for _, pairs in driver.asked.values()]
    assert ranges == [set(range(10 * (i // 2), 10 * (i // 2) + 10)) for i in range(8)]
    assert driver.call.cells == [(1, 2), (3, 4), (5, 6), (7, 8)]
    for attempt in (8, 1, 5, 2, 3, 7, 6, 4):
        driver.take(driver.call.answered(attempt, 0.1), 0.1)
    assert driver.finished == (1, 2, 3, 4, 5, 6, 7, 8)


def test_a_worker_that_takes_less_gets_smaller_pieces_of_its_own() -> None:
    swarm = FakeSwarm({0: [0], 1: [1]})
    swarm.workers[0] = Candidate(0, "w0", 0b01, max_pairs=8)  # four tokens with all of their pairs
    swarm.largest = 20
    driver = Driver(swarm, PAIRS, per_token=2)
    assert sorted(len(pairs) for _, pairs in driver.asked.values()) == [4] * 10 + [20] * 2
    assert [len(cell) for cell in driver.call.cells] == [6, 6]


def test_a_token_may_have_more_pairs_than_a_call() -> None:
    swarm = FakeSwarm({0: range(40)})
    swarm.workers[0] = Candidate(0, "w0", mask_of(range(40)), max_pairs=16)
    driver = Driver(swarm, list(range(40)) * 2, 40, per_token=40)
    assert [len(pairs) for _, pairs in driver.asked.values()] == [16, 16, 8] * 2
    while driver.finished is None:
        driver.answer(0)
    assert driver.counted() == list(range(80))


def test_what_is_kept_here_is_not_cut() -> None:
    driver = large({0: [1]}, [0])
    assert [len(pairs) for worker, pairs in driver.asked.values() if worker == LOCAL] == [40]
    assert [len(pairs) for worker, pairs in driver.asked.values() if worker == 0] == [10] * 4


def test_exact_rows_are_cut_by_experts_and_no_expert_is_split() -> None:
    swarm = FakeSwarm({0: range(4)})
    swarm.largest = 30
    driver = Driver(swarm, [0] * 40 + [1] * 20 + [2] * 10 + [3] * 9)
    assert sorted(len(pairs) for _, pairs in driver.asked.values()) == [39, 40]
    assert driver.call.cells == []


def test_a_piece_is_not_late_before_it_could_begin() -> None:
    driver = large({0: [0, 1]})  # an answer is late after 1 s
    for i in range(4):
        assert driver.call.next_due() == 0.9 * i + 1.0
        driver.tick(0.9 * i + 0.8)
        driver.answer(0, 0.9 * (i + 1))
    assert driver.late == []
    assert driver.counted() == list(range(80))


def test_a_refused_piece_and_one_under_check_let_the_next_begin() -> None:
    driver = large({0: [0, 1], 1: [5]})
    driver.take(driver.call.checking(1, 0.5, 9.0), 0.5)
    assert driver.call.next_due() == 1.5
    driver.open.discard(1)
    driver.fail(0, "busy", 0.7, overloaded=True)  # asked again after 0.5 s
    assert driver.call.next_due() == 1.2
    driver.tick(1.2)
    driver.tick(1.69)
    assert driver.late == []
    driver.tick(1.7)
    assert len(driver.late) == 1


def test_behind_a_late_piece_everything_is_asked_elsewhere_too() -> None:
    driver = large({0: [0, 1], 1: [0, 1]})
    driver.answer(0, 0.5)
    driver.tick(1.5)
    assert driver.late == [2]  # one silence is one fault
    assert [driver.asked[a][0] for a in sorted(driver.open)] == [0] * 3 + [1] * 3
    driver.answer(1, 1.6)
    driver.answer(0, 1.7)
    driver.answer(1, 1.8)
    assert driver.counted() == list(range(80))


def test_what_a_silent_worker_was_sent_is_late_at_once_and_one_fault() -> None:
    driver = large({0: [0, 1], 1: [0, 1]})
    driver.answer(0, 0.5)
    driver.take(driver.call.silent(1, 0.6), 0.6)
    assert driver.late == []
    driver.take(driver.call.silent(0, 0.7), 0.7)
    assert driver.late == [2]
    assert [driver.asked[a][0] for a in sorted(driver.open)] == [0] * 3 + [1] * 3
    driver.take(driver.call.silent(0, 0.8), 0.8)
    assert driver.late == [2]


def test_behind_a_late_piece_that_nobody_else_holds_it_goes_on_when_it_is_answered() -> None:
    driver = large({0: [0, 1]})
    driver.tick(1.0)
    driver.tick(1.1)
    assert driver.late == [1]
    driver.answer(0, 1.2)
    assert driver.call.next_due() == 2.2
    driver.swarm.workers[1] = Candidate(1, "w1", 0b11)
    driver.tick(2.2)
    assert driver.late == [1, 2]
    assert [driver.asked[a][0] for a in sorted(driver.open)] == [0] * 3 + [1] * 3


def test_pieces_in_this_nodes_own_queue_are_not_late() -> None:
    driver = large({0: [0, 1], 1: [0, 1]}, sends=False)
    driver.call.sent(1, 2.0)
    driver.call.sent(2, 2.1)
    assert driver.call.next_due() == 3.0
    driver.answer(0, 2.9)
    assert driver.call.next_due() == 3.9
    driver.answer(0, 3.0)
    assert driver.call.next_due() == 3.0 + POLICY.queue_s  # not sent yet, and nothing is before it
    driver.tick(6.0)
    assert driver.late == []
    assert {driver.asked[a][0] for a in driver.open} == {0, 1}
    assert driver.call.wants(3)
    driver.answer(1, 6.1)
    assert not driver.call.wants(3)
    driver.answer(1, 6.2)
    assert driver.counted() == list(range(80))


def test_answers_out_of_turn_leave_no_piece_without_a_deadline() -> None:
    driver = large({0: [0, 1]})
    driver.take(driver.call.answered(3, 0.1), 0.1)
    driver.take(driver.call.answered(1, 0.2), 0.2)
    assert driver.call.next_due() == 1.2  # of the second
    driver.take(driver.call.answered(2, 0.3), 0.3)
    assert driver.call.next_due() == 1.3  # of the fourth
    driver.tick(1.2)
    assert driver.late == []
    driver.tick(1.3)
    assert driver.late == [4]


def test_a_piece_that_fails_lets_the_next_one_begin_only_where_it_was_the_first() -> None:
    driver = large({0: [0, 1]})
    driver.take(driver.call.failed(2, "busy", 0.5, overloaded=True), 0.5)
    driver.take(driver.call.answered(1, 0.9), 0.9)
    driver.tick(1.8)
    assert driver.late == []
    driver.tick(1.9)
    assert driver.late == [3]


def test_a_refused_piece_that_is_asked_again_takes_no_other_ones_time() -> None:
    driver = large({0: [0, 1]}, sends=False)
    driver.call.sent(1, 0.1)
    driver.fail(0, "busy", 0.2, overloaded=True)
    driver.tick(0.7)
    again = max(driver.open)
    assert driver.asked[again][1] == driver.asked[1][1]
    driver.call.sent(2, 0.8)  # now nothing is before it
    assert driver.call.next_due() == 1.8
    driver.call.sent(again, 0.9)
    driver.call.sent(3, 0.9)
    driver.call.sent(4, 0.9)
    for now in (1.7, 2.6, 3.5, 4.4):  # well after queue_s from the refusal
        driver.tick(now - 0.05)
        driver.answer(0, now)
    assert driver.late == []
    assert driver.counted() == list(range(80))


@pytest.mark.parametrize("per_token", [0, 2])
def test_what_waits_here_for_a_worker_that_is_busy_with_other_calls_is_not_given_to_others(per_token: int) -> None:
    swarm = FakeSwarm({0: [0, 1], 1: [0, 1]})
    swarm.largest = 10
    driver = Driver(swarm, PAIRS, per_token=per_token, sends=False)
    asked = len(driver.asked)
    for now in (3.0, 6.0, 9.0):
        swarm.busy_until[0] = now + 3.0
        swarm.heard_at[0] = now
        driver.tick(now)
        assert len(driver.asked) == asked
        assert driver.call.next_due() == min(now + 3.0, POLICY.give_up_s)
    driver.tick(12.0)  # it does not answer any more
    assert {driver.asked[attempt][0] for attempt in sorted(driver.open)[asked:]} == {1}
    assert driver.late == []


def test_a_small_call_that_waits_here_for_a_busy_worker_is_not_given_to_others() -> None:
    driver = Driver(FakeSwarm({0: [0], 1: [0]}), [0], sends=False)
    driver.swarm.busy_until[0] = 4.0
    driver.tick(POLICY.queue_s)
    assert len(driver.asked) == 1
    driver.tick(4.0)
    assert len(driver.asked) == 2


def test_what_is_given_to_another_worker_stands_in_line_there_too() -> None:
    driver = large({0: [0, 1], 1: [0, 1]})
    driver.tick(1.0)
    assert [driver.asked[a][0] for a in sorted(driver.open)] == [0] * 4 + [1] * 4
    for i in range(4):
        driver.tick(1.0 + 0.9 * i + 0.8)
        driver.answer(1, 1.0 + 0.9 * (i + 1))
    assert driver.late == [1]
    assert driver.counted() == list(range(80))


def test_what_is_given_to_a_worker_with_pieces_of_its_own_stands_behind_them() -> None:
    driver = large({0: [0], 1: [1]})
    driver.swarm.workers[1] = Candidate(1, "w1", 0b11)
    for i in range(3):
        driver.answer(1, 0.5 + 0.1 * i)
    driver.tick(1.0)  # worker 0 is late with four
    for i in range(5):
        driver.tick(1.0 + 0.5 * i + 0.4)
        driver.answer(1, 1.0 + 0.5 * (i + 1))
    assert driver.late == [1]
    assert driver.counted() == list(range(80))


def test_what_begins_anew_stands_in_line() -> None:
    driver = large({0: [0, 1], 1: [0, 1]})
    driver.take(driver.call.distrust(0, "wrong", 0.5), 0.5)
    for i in range(4):
        driver.tick(0.5 + 0.9 * i + 0.8)
        driver.answer(1, 0.5 + 0.9 * (i + 1))
    assert driver.late == []
    assert driver.counted() == list(range(80))


def test_a_call_that_waits_behind_others_is_not_given_up_while_its_worker_answers_them() -> None:
    driver = large({0: [0, 1]}, sends=False)
    for now in (9.0, 18.0, 27.0):
        driver.swarm.heard_at[0] = now
        driver.swarm.busy_until[0] = now + 2.0
        driver.tick(now)
        driver.tick(now + 1.0)
    assert driver.error is None
    assert driver.call.next_due() <= 37.0
    driver.tick(36.9)
    assert driver.error is None
    driver.tick(37.0)
    assert isinstance(driver.error, CallFailed)


def test_a_call_is_given_up_where_its_worker_answers_others_but_not_what_it_was_sent() -> None:
    driver = large({0: [0, 1]}, sends=False)
    driver.call.sent(1, 0.5)
    for i in range(1, 11):
        driver.swarm.heard_at[0] = driver.swarm.busy_until[0] = float(i)
        driver.tick(float(i))
    assert isinstance(driver.error, CallFailed)


def test_a_lost_worker_loses_all_its_pieces() -> None:
    driver = large({0: [0, 1], 1: [0, 1]})
    driver.answer(0)
    del driver.swarm.workers[0]
    driver.open = set()
    driver.take(driver.call.worker_lost(0, "gone", 0.2), 0.2)
    assert {driver.asked[a][0] for a in driver.open} == {1}
    while driver.finished is None:
        driver.answer(1, 0.3)
    assert driver.counted() == list(range(80))


def test_cancel_withdraws_everything() -> None:
    driver = Driver(FakeSwarm({0: [1], 1: [2]}), [1, 2])
    driver.take(driver.call.cancel(), 0.0)
    assert driver.call.done
    assert not driver.open
    assert driver.call.answered(1, 0.0) == []
    assert driver.call.tick(99.0) == []


worlds = st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 7)), max_size=6)
events = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "answer",
                "check",
                "fail",
                "overloaded",
                "lost",
                "distrust",
                "reject",
                "tick",
                "sent",
                "stray",
                "join",
                "heard",
            ]
        ),
        st.integers(0, 1 << 16),
        st.floats(0, 2),
    ),
    max_size=60,
)


def test_an_overloaded_worker_that_lost_the_experts_meanwhile_is_not_asked_again() -> None:
    driver = Driver(FakeSwarm({1: [0, 1]}, [0, 1]), [0, 1])
    driver.swarm.own = None
    driver.fail(1, "busy", overloaded=True)
    driver.swarm.workers[1] = Candidate(1, "w1", mask_of([5]))
    driver.tick(driver.call.next_due())
    assert isinstance(driver.error, CallFailed)
    assert "does not hold these experts any more" in str(driver.error)


@settings(max_examples=400)
@given(
    worlds,
    st.one_of(st.none(), st.sets(st.integers(0, 7))),
    st.lists(st.integers(0, 7), max_size=60),
    st.sampled_from([16, 20, 1 << 20]),
    st.integers(0, 255),
    st.booleans(),
    st.sampled_from([(0, 1, True), (0, 2, True), (0, 2, False), (2, 2, True), (3, 3, True), (3, 3, False)]),
    events,
)
def test_every_call_ends_and_counts_each_pair_once(
    held: dict[int, set[int]],
    local: set[int] | None,
    experts: list[int],
    max_pairs: int,
    kept: int,
    patient: bool,
    shape: tuple[int, int, bool],
    history: list[tuple[str, int, float]],
) -> None:
    per_token, times, sends = shape
    experts = experts * times  # more than 64 are a large call
    if per_token:
        experts = experts[: len(experts) // per_token * per_token]
    swarm = FakeSwarm({n: sorted(e) for n, e in held.items()}, None if local is None else sorted(local))
    swarm.workers = {n: Candidate(n, f"w{n}", c.held, max_pairs=max_pairs) for n, c in swarm.workers.items()}
    swarm.largest = 9
    driver = Driver(swarm, experts, 8, dataclasses.replace(POLICY, patient=patient), kept, per_token, sends)
    checked: set[int] = set()
    distrusted: set[int] = set()
    rejected: set[int] = set()
    now = 0.0
    for kind, choice, pause in history:
        now += pause
        if driver.call.done:
            break
        open_attempts = sorted(driver.open)
        attempt = open_attempts[choice % len(open_attempts)] if open_attempts else None
        if kind == "tick":
            driver.tick(now)
        elif kind == "stray":
            driver.take(driver.call.answered(choice + 1000, now), now)
        elif kind == "heard" and swarm.workers:
            number = sorted(swarm.workers)[choice % len(swarm.workers)]
            swarm.heard_at[number], swarm.busy_until[number] = now, now + choice % 7
        elif kind == "join":
            if (number := 100 + choice % 3) not in distrusted:
                swarm.workers[number] = Candidate(number, "new", choice & 0xFF)
        elif kind == "lost" and swarm.workers:
            gone = sorted(swarm.workers)[choice % len(swarm.workers)]
            del swarm.workers[gone]
            driver.open = {a for a in driver.open if driver.asked[a][0] != gone}
            driver.take(driver.call.worker_lost(gone, "lost", now), now)
        elif kind == "reject" and driver.asked:
            wrong = sorted(driver.asked)[choice % len(driver.asked)]
            if driver.asked[wrong][0] != LOCAL:
                driver.open.discard(wrong)
                driver.take(driver.call.reject(wrong, "wrong", now), now)
                rejected.add(wrong)
        elif kind == "distrust" and swarm.workers:
            guilty = sorted(swarm.workers)[choice % len(swarm.workers)]
            del swarm.workers[guilty]
            distrusted.add(guilty)
            driver.take(driver.call.distrust(guilty, "wrong", now), now)
            driver.open = {a for a in driver.open if driver.asked[a][0] != guilty}
        elif kind == "sent" and attempt is not None:
            driver.call.sent(attempt, now)
        elif attempt is not None:
            driver.open.discard(attempt)
            if kind == "check" and driver.asked[attempt][0] != LOCAL:
                checked.add(attempt)
                driver.take(driver.call.checking(attempt, now, now + choice % 4), now)
            elif kind == "answer":
                driver.take(driver.call.answered(attempt, now), now)
            elif driver.asked[attempt][0] == LOCAL:
                driver.take(driver.call.failed(attempt, "broken", now), now)
            else:
                driver.take(driver.call.failed(attempt, "no", now, overloaded=kind == "overloaded"), now)
    for _ in range(10_000):  # from here on no worker answers: time alone must end it, once the engine here has ended
        if driver.call.done:
            break
        if any(driver.asked[a][0] == LOCAL for a in driver.open):
            driver.fail(LOCAL, "broken", now)
            continue
        now = max(now, driver.call.next_due())
        driver.tick(now)
    assert driver.call.done
    assert (driver.finished is None) != (driver.error is None)
    if driver.finished is not None:
        assert driver.counted() == list(range(len(experts)))
        assert not distrusted & {driver.asked[attempt][0] for attempt in driver.finished}
        assert not rejected & set(driver.finished)
    assert not driver.open or driver.asked[min(driver.open)][0] == LOCAL  # what runs here cannot be withdrawn
    assert driver.call.next_due() == float("inf")


@pytest.mark.parametrize("late", [False, True])
def test_a_rescue_that_cannot_cover_everything_is_not_begun(late: bool) -> None:
    driver = Driver(FakeSwarm({0: [1, 2], 1: [1]}), [1, 2])
    if late:
        driver.tick(1.0)
        assert driver.open == {1}
        driver.answer(0, 1.5)
        assert driver.counted() == [0, 1]
    else:
        driver.fail(0, "gone")
        assert isinstance(driver.error, CallFailed)
        assert "experts 1, 2" in str(driver.error)


def test_what_is_kept_here_is_computed_here_while_the_rest_travels() -> None:
    swarm = FakeSwarm({0: range(4)}, local=range(4))
    driver = Driver(swarm, [0, 1, 2, 3], kept=0b0110)
    assert dict(driver.asked.values()) == {LOCAL: [1, 2], 0: [0, 3]}
    driver.answer(LOCAL)
    driver.answer(0)
    assert driver.counted() == [0, 1, 2, 3]
    driver = Driver(swarm, [1, 2], kept=0b0110)
    assert [worker for worker, _ in driver.asked.values()] == [LOCAL]
    driver.fail(LOCAL, "disk gone")  # and then the swarm is asked after all
    driver.answer(0)
    assert driver.counted() == [0, 1]


def test_an_answer_under_check_counts_when_it_is_found_right() -> None:
    driver = Driver(FakeSwarm({0: [1], 1: [1]}), [1])
    driver.take(driver.call.checking(1, 0.5, 2.0), 0.5)
    driver.tick(1.5)  # its deadline as an answer is long over
    assert not driver.late
    assert driver.finished is None
    driver.take(driver.call.answered(1, 1.6), 1.6)
    assert driver.finished == (1,)


def test_an_answer_whose_check_does_not_come_counts_unchecked() -> None:
    driver = Driver(FakeSwarm({0: [1]}), [1])
    driver.take(driver.call.checking(1, 0.5, 2.0), 0.5)
    assert driver.call.next_due() == 2.0
    driver.tick(2.0)
    assert driver.finished == (1,)


def test_an_answer_under_check_survives_its_worker_but_not_a_conviction() -> None:
    swarm = FakeSwarm({0: [1], 1: [1]})
    driver = Driver(swarm, [1])
    driver.take(driver.call.checking(1, 0.5, 2.0), 0.5)
    driver.take(driver.call.worker_lost(0, "gone", 0.6), 0.6)
    assert driver.open == {1}
    del swarm.workers[0]
    driver.take(driver.call.distrust(0, "answers wrongly", 0.7), 0.7)
    driver.take(driver.call.answered(1, 0.8), 0.8)
    assert driver.finished is None
    driver.answer(1, 0.9)
    assert driver.finished == (2,)


def test_what_was_found_wrong_is_replaced_although_its_worker_is_gone_and_its_time_is_over() -> None:
    for counts in (False, True):
        driver = Driver(FakeSwarm({1: [0], 2: [1]}), [0, 1])
        attempt = driver.attempt_of(1)
        driver.take(driver.call.checking(attempt, 0.1, 0.5), 0.1)
        driver.open.discard(attempt)
        driver.take(driver.call.worker_lost(1, "closed", 0.2), 0.2)
        del driver.swarm.workers[1]
        if counts:
            driver.tick(0.6)  # it counts unchecked, and the call goes on for the other half
        driver.swarm.workers[3] = Candidate(3, "w3", mask_of([0]))
        driver.take(driver.call.distrust(1, "a row is wrong", 0.7), 0.7)
        driver.answer(3, 0.8)
        driver.answer(2, 0.8)
        assert driver.finished is not None
        assert attempt not in driver.finished


def test_an_answer_that_is_rejected_after_it_counted_is_replaced_by_somebody_else_s() -> None:
    driver = Driver(FakeSwarm({1: [0], 2: [1], 3: [0]}), [0, 1])
    attempt = driver.attempt_of(1)
    driver.answer(1)
    driver.take(driver.call.reject(attempt, "a row is wrong", 0.1), 0.1)
    driver.answer(3, 0.2)
    driver.answer(2, 0.2)
    assert driver.finished is not None
    assert attempt not in driver.finished
    alone = Driver(FakeSwarm({1: [0], 2: [1]}), [0, 1])
    attempt = alone.attempt_of(1)
    alone.answer(1)
    alone.take(alone.call.reject(attempt, "a row is wrong", 0.1), 0.1)
    assert "w1: a row is wrong" in str(alone.error)


def test_whatever_rests_on_a_distrusted_worker_is_done_anew() -> None:
    swarm = FakeSwarm({0: [1, 2, 3], 1: [1, 2, 3], 2: [4]})
    swarm.workers[0] = Candidate(0, "w0", 0b1110, max_pairs=16)
    experts = [1] * 20 + [2] * 20 + [4]
    driver = Driver(swarm, experts)
    driver.answer(0)  # one answered, the others still to come
    driver.answer(2)
    del swarm.workers[0]
    driver.take(driver.call.distrust(0, "answers wrongly", 0.1), 0.1)
    assert {driver.asked[attempt][0] for attempt in driver.open} == {1}
    while driver.finished is None:
        driver.answer(1, 0.2)
    assert driver.counted() == list(range(41))
    assert {driver.asked[attempt][0] for attempt in driver.finished} == {1, 2}


def test_a_hedge_won_by_a_distrusted_worker_is_undone() -> None:
    swarm = FakeSwarm({0: [1, 2], 1: [1], 2: [2], 3: [1]})
    driver = Driver(swarm, [1, 2])
    driver.tick(1.0)
    assert {driver.asked[attempt][0] for attempt in driver.open} == {0, 1, 2}
    driver.answer(1, 1.1)
    del swarm.workers[1]
    driver.take(driver.call.distrust(1, "answers wrongly", 1.2), 1.2)
    driver.answer(0, 1.3)  # the first one is asked once more: nothing was wrong with it
    assert driver.counted() == [0, 1]
    assert 1 not in {driver.asked[attempt][0] for attempt in driver.finished or ()}


def test_a_distrusted_worker_that_nobody_replaces_is_named() -> None:
    swarm = FakeSwarm({0: [1]})
    driver = Driver(swarm, [1])
    del swarm.workers[0]
    driver.take(driver.call.distrust(0, "a row is wrong", 0.1), 0.1)
    assert isinstance(driver.error, CallFailed)
    assert "w0: a row is wrong" in str(driver.error)


PATIENT = dataclasses.replace(POLICY, patient=True)


def test_in_a_swarm_experts_that_nobody_holds_are_waited_for() -> None:
    driver = Driver(FakeSwarm({0: [0, 1]}), [0, 4, 1, 5], policy=PATIENT)
    driver.answer(0)
    driver.tick(1.0)
    assert driver.error is None
    driver.swarm.workers[1] = Candidate(1, "w1", mask_of([4]))
    driver.tick(2.0)
    driver.swarm.workers[2] = Candidate(2, "w2", mask_of([5]))
    driver.tick(driver.call.next_due())
    driver.answer(1, 3.0)
    driver.answer(2, 3.0)
    assert driver.counted() == [0, 1, 2, 3]


def test_a_worker_that_took_experts_with_it_may_come_back() -> None:
    driver = Driver(FakeSwarm({0: [0], 1: [1]}), [0, 1], policy=PATIENT)
    driver.answer(0)
    del driver.swarm.workers[1]
    driver.open.discard(driver.attempt_of(1))
    driver.take(driver.call.worker_lost(1, "gone", 1.0), 1.0)
    assert driver.error is None
    driver.swarm.workers[2] = Candidate(2, "w1", mask_of([1]))
    driver.tick(driver.call.next_due())
    driver.answer(2, 5.0)
    assert driver.counted() == [0, 1]


def test_patience_ends_and_says_what_for() -> None:
    driver = Driver(FakeSwarm({0: [0]}), [0, 3], policy=PATIENT)
    driver.answer(0)
    driver.tick(POLICY.give_up_s + 0.1)
    assert "expert 3 (this swarm: nobody holds what is wanted for 10 s)" in str(driver.error)


def test_holders_that_all_failed_are_not_waited_for() -> None:
    driver = Driver(FakeSwarm({0: [0]}), [0], policy=PATIENT)
    driver.fail(0, "broken")
    assert isinstance(driver.error, CallFailed)
