"""One layer's call: whatever happens, every pair is counted once or the call says why not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.dispatch.call import Action, Call, CallPolicy, Cancel, Fail, Finish, Late, RunLocal, Send
from swarmnode.dispatch.hello import mask_of
from swarmnode.dispatch.replicas import LOCAL, Candidate
from swarmnode.errors import CallFailed, NobodyHolds

POLICY = CallPolicy(give_up_s=10.0, queue_s=3.0, overloaded_retry_s=0.5)


class FakeSwarm:
    def __init__(self, held: dict[int, Sequence[int]], local: Sequence[int] | None = None) -> None:
        self.workers = {n: Candidate(n, f"w{n}", mask_of(experts)) for n, experts in held.items()}
        self.own = None if local is None else Candidate(LOCAL, "here", mask_of(local))

    def candidates(self) -> list[Candidate]:
        return list(self.workers.values())

    def local(self) -> Candidate | None:
        return self.own

    def late_after(self, worker: int, n_pairs: int) -> float:
        return 1.0


class Driver:
    """Carries actions out on paper and checks that they make sense."""

    def __init__(
        self,
        swarm: FakeSwarm,
        experts: Sequence[int],
        n_expert: int = 16,
        policy: CallPolicy = POLICY,
        kept: int = 0,
    ) -> None:
        self.swarm = swarm
        self.experts = list(experts)
        count = itertools.count(1)
        self.call = Call(7, self.experts, n_expert, swarm, lambda: next(count), policy, kept)
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
            ["answer", "check", "fail", "overloaded", "lost", "distrust", "reject", "tick", "stray", "join"]
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
    events,
)
def test_every_call_ends_and_counts_each_pair_once(
    held: dict[int, set[int]],
    local: set[int] | None,
    experts: list[int],
    max_pairs: int,
    kept: int,
    patient: bool,
    history: list[tuple[str, int, float]],
) -> None:
    swarm = FakeSwarm({n: sorted(e) for n, e in held.items()}, None if local is None else sorted(local))
    swarm.workers = {n: Candidate(n, f"w{n}", c.held, max_pairs=max_pairs) for n, c in swarm.workers.items()}
    driver = Driver(swarm, experts, 8, dataclasses.replace(POLICY, patient=patient), kept)
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
