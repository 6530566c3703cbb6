"""How fast and how reliable one worker has been: the figures that replica choice and deadlines rest on.

Pure: `now` is an argument. Not the decisions: those are in `replicas.py` and `call.py`. Owned by
`remote_worker.py`, one per attached worker.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW = 64  # answers remembered per size class: a few seconds of decoding
MIN_SAMPLES = 8  # below this a percentile says nothing
CLASS_SLACK = 1.25  # how far outside its class an estimate must be before the class follows: no flapping
DECODE_PAIRS = 64  # calls up to this size show the round trip, larger ones the compute
SMOOTHING = 0.125  # RFC 6298's weight for a new round-trip sample


class Latency:
    """Round-trip times of one worker's answers, by size of the call (powers of two of its pairs). Seconds."""

    def __init__(self, near_s: float) -> None:
        self._near_s = near_s
        self._windows: dict[int, _Window] = {}
        self._smoothed: float | None = None
        self._class = 0

    def add(self, n_pairs: int, seconds: float) -> None:
        """Note one answer."""
        size = n_pairs.bit_length()
        window = self._windows.get(size)
        if window is None:
            window = self._windows[size] = _Window()
        window.add(seconds)
        if n_pairs <= DECODE_PAIRS:
            self._follow(seconds)

    @property
    def latency_class(self) -> int | None:
        """0 below `near_s`, one more for each doubling; changes only for a clear reason. None without answers."""
        return None if self._smoothed is None else self._class

    def class_of(self, seconds: float) -> int:
        """Return the class of a latency."""
        return max(0, math.ceil(math.log2(max(seconds, 1e-9) / self._near_s)))

    def late_after(self, n_pairs: int, *, factor: float, floor_s: float, ceiling_s: float) -> float:
        """Return how long an answer of this size may take before another replica is asked too."""
        window = self._windows.get(n_pairs.bit_length())
        if window is None or len(window.samples) < MIN_SAMPLES:
            return ceiling_s
        return min(max(window.p95() * factor, floor_s), ceiling_s)

    def percentile(self, percent: int) -> float | None:
        """Return a percentile over the recent calls of decode size, None before there are any."""
        small = [w for size, w in self._windows.copy().items() if size <= DECODE_PAIRS.bit_length()]
        samples = sorted(s for window in small for s in window.samples.copy())
        return _percentile(samples, percent) if samples else None

    def _follow(self, seconds: float) -> None:
        if self._smoothed is None:
            self._smoothed, self._class = seconds, self.class_of(seconds)
            return
        self._smoothed += SMOOTHING * (seconds - self._smoothed)
        low, high = self._near_s * 2.0 ** (self._class - 1), self._near_s * 2.0**self._class
        if self._smoothed > high * CLASS_SLACK or (self._class and self._smoothed < low / CLASS_SLACK):
            self._class = self.class_of(self._smoothed)


class Health:
    """Faults of one worker in a row, and whether it is suspended because of them."""

    def __init__(self, *, allowed: int, suspension_s: float, max_suspension_s: float) -> None:
        self._allowed, self._base, self._max = allowed, suspension_s, max_suspension_s
        self._in_row = 0
        self._suspensions = 0
        self._until = -math.inf
        self.failures = 0
        self.last_fault = ""

    def fault(self, why: str, now: float) -> None:
        """Note a failure that is this worker's own; `allowed` in a row suspend it, each time for longer."""
        self.failures += 1
        self._in_row += 1
        self.last_fault = why
        if self._in_row >= self._allowed and now >= self._until:
            self._until = now + min(self._base * 2.0**self._suspensions, self._max)
            self._suspensions = min(self._suspensions + 1, 30)

    def success(self) -> None:
        """Note a good answer: all is forgiven."""
        if self._in_row:
            self._in_row, self._suspensions, self._until = 0, 0, -math.inf

    def suspended(self, now: float) -> bool:
        """Whether the worker should be left alone at this moment. Afterwards one more fault suspends it again."""
        return now < self._until


class _Window:
    """The last samples of one size, with their p95 kept until enough has changed."""

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=WINDOW)
        self._age = 0
        self._cached: float | None = None

    def add(self, seconds: float) -> None:
        self.samples.append(seconds)
        self._age += 1
        if self._age >= MIN_SAMPLES:
            self._age, self._cached = 0, None

    def p95(self) -> float:
        if self._cached is None:
            self._cached = _percentile(sorted(self.samples), 95)
        return self._cached


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
