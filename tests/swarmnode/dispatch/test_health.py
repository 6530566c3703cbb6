"""What is remembered of a worker: percentiles per size, classes that do not flap, suspension that ends."""

from __future__ import annotations

import pytest

from swarmnode.dispatch.health import FASTER, MIN_SAMPLES, Deadlines, Health, Latency

LIMITS = Deadlines(factor=2.0, floor_s=0.05, slack_s=0.25, unknown_s=1.5, ceiling_s=5.0)


def test_late_is_the_ceiling_until_enough_is_known_then_follows_p95() -> None:
    latency = Latency(0.004)
    for _ in range(MIN_SAMPLES - 1):
        latency.add(4, 0.1)
    assert latency.late_after(4, LIMITS) == 1.5
    assert latency.late_after(400, LIMITS) == 5.0
    latency.add(4, 0.1)
    assert latency.late_after(4, LIMITS) == pytest.approx(0.2)
    assert latency.late_after(64, LIMITS) == latency.late_after(1, LIMITS) == pytest.approx(0.2)
    assert latency.late_after(128, LIMITS) == pytest.approx(0.4)  # larger ones are taken to need as much more
    assert latency.late_after(8000, LIMITS) == pytest.approx(5.0)
    for _ in range(100):
        latency.add(4, 0.001)
    assert latency.late_after(4, LIMITS) == 0.05
    for _ in range(100):
        latency.add(4, 60.0)
    assert latency.late_after(4, LIMITS) == 75.0  # not before most answers are there, whatever the ceiling
    for _ in range(100):
        latency.add(4, 0.9)
    assert latency.late_after(4, LIMITS) == pytest.approx(1.69)  # silence of a far one is bounded more tightly


def test_percentiles_are_of_decode_sized_calls() -> None:
    latency = Latency(0.004)
    assert latency.percentile(50) is None
    for milliseconds in range(1, 11):
        latency.add(8, milliseconds / 1000)
    latency.add(5000, 9.0)
    assert latency.percentile(50) == 0.006
    assert latency.percentile(95) == 0.010


def test_the_class_follows_only_a_clear_change() -> None:
    latency = Latency(0.004)
    assert latency.latency_class is None
    assert [latency.class_of(rtt) for rtt in (0.0, 0.004, 0.005, 0.009, 0.08)] == [0, 0, 1, 2, 5]
    latency.add(1, 0.0039)
    for _ in range(50):
        latency.add(1, 0.0045)
        assert latency.latency_class == 0
    for _ in range(50):
        latency.add(1, 0.03)
    assert latency.latency_class == 3
    for _ in range(100):
        latency.add(1, 0.001)
    assert latency.latency_class == 0


def test_faults_in_a_row_suspend_for_longer_each_time_and_success_forgives() -> None:
    health = Health(allowed=2, suspension_s=1.0, max_suspension_s=3.0)
    health.fault("late", 0.0)
    assert not health.suspended(0.0)
    health.fault("late", 0.0)
    assert health.suspended(0.9)
    assert not health.suspended(1.0)
    health.fault("again", 1.0)
    assert health.suspended(2.9)
    assert not health.suspended(3.0)
    health.fault("again", 3.0)
    assert health.suspended(5.9)
    assert not health.suspended(6.0)  # not above the maximum
    health.success()
    health.fault("late", 6.0)
    assert not health.suspended(6.0)
    assert health.failures == 5
    assert health.last_fault == "late"


def test_a_few_late_answers_are_the_schedulers_and_do_not_change_the_class() -> None:
    latency = Latency(0.002)
    for n in range(60):
        latency.add(4, 0.2 if n % 4 == 3 else 0.001)
        assert latency.latency_class == 0


@pytest.mark.parametrize(
    ("rtt_s", "answer_s", "thin"),
    [
        (0.001, 0.001, False),  # near and quick
        (0.3, 0.31, False),  # far
        (0.3, 0.45, False),  # far, and computes a while: most of it is the distance
        (0.001, 0.44, True),  # 110 KB at 2 Mbit/s
        (0.001, 0.02, True),  # a slow processor
    ],
)
def test_slow_for_another_reason_than_distance(rtt_s: float, answer_s: float, thin: bool) -> None:
    latency = Latency(0.002)
    assert not latency.thin(rtt_s)
    for _ in range(MIN_SAMPLES):
        latency.add(8, answer_s)
    assert latency.thin(rtt_s) is thin


def test_the_cost_of_a_pair_is_that_of_large_calls() -> None:
    latency = Latency(0.002)
    latency.add(8, 0.5)
    assert latency.pair_s == 0.0
    latency.add(1000, 1.0)
    assert latency.pair_s == pytest.approx(0.001)
    for _ in range(30):
        latency.add(1000, 2.0)
    assert latency.pair_s == pytest.approx(0.002, rel=0.01)


def test_a_worker_that_has_answered_nothing_yet_is_given_its_round_trip_and_little_more() -> None:
    """One that is killed in its first moments must not cost more than two round trips and half a second either."""
    for rtt in (0.0, 0.04, 0.3):
        late = Latency(0.002, rtt).late_after(4, Deadlines())
        assert rtt < late <= 2 * rtt + 0.5 - 0.05


def test_a_worker_that_has_become_fast_is_believed_after_a_few_answers_a_slow_one_only_by_the_median() -> None:
    latency = Latency(0.002)
    assert latency.recent_s is None
    assert latency.changing
    for _ in range(30):
        latency.add(4, 0.3)
    assert latency.recent_s == 0.3
    assert not latency.changing
    for _ in range(FASTER - 1):
        latency.add(2, 0.01)
        assert latency.changing
    assert latency.recent_s == 0.3
    latency.add(2, 0.01)
    assert latency.recent_s == 0.01
    assert latency.recent_pairs == 2.0
    for _ in range(FASTER - 1):
        latency.add(2, 0.3)  # a busy moment of its machine
    assert latency.recent_s == 0.01
    assert latency.latency_class == 3
