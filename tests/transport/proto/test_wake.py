from __future__ import annotations

import pytest

from transport.proto.wake import SLEEP_SECONDS, WakeDetector


def test_a_machine_that_slept_is_noticed_by_each_clock() -> None:
    for wall, boot in ((312.0, 312.0), (312.0, None), (0.0, 312.0)):
        detector = WakeDetector(2.0)
        assert detector.tick(1000.0, 50.0, 60.0 if boot is not None else None) == 0
        after = None if boot is None else 62.0 + boot
        assert detector.tick(1002.0 + wall, 52.0, after) == pytest.approx(312.0)
        assert detector.tick(1004.0 + wall, 54.0, None if after is None else after + 2) == 0


def test_a_stopped_process_is_noticed_and_a_busy_loop_or_a_slewed_clock_is_not() -> None:
    detector = WakeDetector(2.0)
    detector.tick(0.0, 0.0, 0.0)
    assert detector.tick(32.0, 32.0, 32.0) == pytest.approx(30.0)
    assert detector.tick(37.0, 37.0, 37.0) == 0  # three seconds late
    assert detector.tick(39.0 + SLEEP_SECONDS / 2, 39.0, 39.0) == 0
    assert detector.tick(20.0, 41.0, 41.0) == 0  # somebody set the clock back
