"""Cut or whole: what has really taken less time."""

from __future__ import annotations

from swarmnode.dispatch.cut_trials import AGAIN_EVERY, FIRST, MAX_KINDS, CutTrials


def run(trials: CutTrials, calls: int, cut_s: float, whole_s: float, kind: str = "a") -> list[bool]:
    """So many calls that take what they take in each way."""
    ways = []
    for _ in range(calls):
        cut = trials.should_cut(kind)
        trials.took(kind, cut_s if cut else whole_s, cut=cut)
        ways.append(cut)
    return ways


def test_the_first_go_in_turns_and_then_the_better_way() -> None:
    ways = run(CutTrials(), 2 * FIRST + 20, cut_s=2.0, whole_s=1.0)
    assert ways[: 2 * FIRST] == [True, False] * FIRST
    assert not any(ways[2 * FIRST :])
    assert all(run(CutTrials(), 2 * FIRST + 20, cut_s=1.0, whole_s=2.0)[2 * FIRST :])


def test_what_is_hardly_better_changes_nothing() -> None:
    assert all(run(CutTrials(), 2 * FIRST + 20, cut_s=1.0, whole_s=0.98)[2 * FIRST :])


def test_the_other_way_is_tried_now_and_then_and_taken_when_things_change() -> None:
    trials = CutTrials()
    ways = run(trials, 10 * AGAIN_EVERY, cut_s=2.0, whole_s=1.0)
    assert 5 <= sum(ways[2 * FIRST :]) <= 15
    run(trials, 6 * AGAIN_EVERY, cut_s=0.5, whole_s=1.0)
    assert sum(run(trials, AGAIN_EVERY, cut_s=0.5, whole_s=1.0)) >= AGAIN_EVERY - 1


def test_one_slow_call_decides_nothing() -> None:
    trials = CutTrials()
    run(trials, 2 * FIRST + 5, cut_s=1.0, whole_s=2.0)
    trials.took("a", 9.0, cut=True)
    assert trials.should_cut("a")


def test_kinds_are_judged_apart_and_are_not_kept_without_end() -> None:
    trials = CutTrials()
    run(trials, 3 * FIRST, cut_s=2.0, whole_s=1.0, kind="a")
    assert all(run(trials, 3 * FIRST, cut_s=1.0, whole_s=2.0, kind="b")[2 * FIRST :])
    assert not trials.should_cut("a")
    for number in range(10 * MAX_KINDS):
        trials.should_cut(number)
    assert trials.should_cut("a")  # begins anew
