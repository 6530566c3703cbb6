"""Whether the machine, or this process, stood still. PURE: the clocks are arguments. Called by interfaces."""

from __future__ import annotations

# A clock that ran ahead of another one by more was not running: a loop that is merely busy, and a wall clock that NTP
# steers, do not come near it.
SLEEP_SECONDS = 5.0
STOPPED_SECONDS = 10.0  # ticks this late: the process was stopped, or its loop was blocked as long


class WakeDetector:
    """Compares clocks at every tick.

    CLOCK_BOOTTIME runs through suspension and the monotonic clock does not (Linux, macOS). The wall clock shows the
    suspension of a virtual machine; it may also have been set, which costs one look at the network. A stopped process
    sees all clocks run, but misses its ticks.
    """

    def __init__(self, interval: float) -> None:
        """`interval`: seconds between ticks."""
        self._interval = interval
        self._last: tuple[float, float, float] | None = None

    def tick(self, wall: float, monotonic: float, boot: float | None) -> float:
        """Seconds that passed unnoticed since the last tick, 0 when none did. `boot` is None where there is no such."""
        now = (wall, monotonic, monotonic if boot is None else boot)
        last, self._last = self._last, now
        if last is None:
            return 0.0
        wall_passed, passed, boot_passed = (after - before for after, before in zip(now, last, strict=True))
        asleep = max(wall_passed - passed, boot_passed - passed)
        stopped = passed - self._interval
        return (asleep if asleep > SLEEP_SECONDS else 0.0) + (stopped if stopped > STOPPED_SECONDS else 0.0)
