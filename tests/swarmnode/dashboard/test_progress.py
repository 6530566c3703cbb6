from __future__ import annotations

from swarmnode.dashboard.look import UNICODE
from swarmnode.dashboard.progress import FORGOTTEN_S, Stages


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_transfer_has_a_bar_a_rate_and_the_time_left() -> None:
    clock = Clock()
    stages = Stages(clock)
    for second in range(6):
        clock.now = 100.0 + second
        stages.update("slices", {"done": 10_000_000 * second, "total": 100_000_000})
    (line,) = stages.lines(UNICODE)
    assert line == "slices ━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌  50 %  50 MB of 100 MB  10 MB/s  5 s left"
    stages.update("slices", {"done": 100_000_000, "total": 100_000_000})
    assert stages.lines(UNICODE) == []


def test_stages_of_onboarding_and_a_load_without_bytes() -> None:
    clock = Clock()
    stages = Stages(clock)
    stages.update("onboard", {"stage": "digests", "done": 1, "total": 4})
    stages.update("onboard", {"stage": "trace", "done": 0, "total": 1})
    stages.update("load", {"done": 0.25})
    names = [line.split(" ━")[0].split(" ╌")[0] for line in stages.lines(UNICODE)]
    assert names == ["onboarding: digests", "onboarding: trace", "loading"]
    assert " of " not in stages.lines(UNICODE)[2]
    clock.now += FORGOTTEN_S + 1  # given up
    assert stages.lines(UNICODE) == []


def test_one_that_begins_anew_begins_at_nothing() -> None:
    stages = Stages(Clock())
    stages.update("slices", {"done": 100, "total": 100})
    stages.update("slices", {"done": 10, "total": 1000})
    assert "  1 %" in stages.lines(UNICODE)[0]
