"""How fast and how reliable one worker has been: the figures that replica choice and deadlines rest on.

Pure: `now` is an argument. Not the decisions: those are in `replicas.py` and `call.py`. Owned by
`remote_worker.py`, one per attached worker.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW = 64  # answers remembered per size class: a few seconds of decoding
MIN_SAMPLES = 8  # below this a percentile says nothing
CLASS_SLACK = 1.25  # how far outside its class an estimate must be before the class follows: no flapping
DECODE_PAIRS = 64  # calls up to this size show the round trip, larger ones the compute
RECENT = 15  # decode answers whose median is the estimate: a few late ones are the scheduler's, not the worker's
CHANGE = 1.5  # times as fast or as slow as usual: a speed of its own
FASTER = 4  # such answers in a row are a new speed when they are fast; slow ones may be the scheduler's
SMOOTHING = 0.25  # weight of a new sample of what a pair of a large call costs: there are few of them
FAR_FACTOR = 1.6  # a lost packet at the end of an answer costs about half a round trip more than the round trip
LEAST_FACTOR = 1.25  # no deadline is nearer to the p95 than this, whatever the ceiling: half of the calls would miss it


@dataclass(frozen=True, slots=True)
class Deadlines:
    """When an answer counts as late. Seconds, except `factor`.

    `factor` × the worker's p95, but at least `floor_s` (a busy machine's scheduler) and at most FAR_FACTOR × the p95 +
    `slack_s`: a far worker's silence must not cost more than two round trips and half a second. While nothing is known
    of the worker: FAR_FACTOR × the path's round trip + `unknown_s` for calls of decode size. Never more than
    `ceiling_s`, unless its p95 says so.

    Over emulated links of 20 to 300 ms with jitter and up to 2 % loss, a factor of 2.5 hedged 0 to 0.8 % of the answers
    of a healthy worker in vain, 2 hedged 0 to 2.3 %, 1.5 hedged 0 to 3.5 %.
    """

    factor: float = 2.5
    floor_s: float = 0.1
    slack_s: float = 0.25
    unknown_s: float = 0.4
    ceiling_s: float = 5.0


class Latency:
    """Round-trip times of one worker's answers, by size of the call (powers of two of its pairs). Seconds."""

    def __init__(self, near_s: float, distance_s: float = 0.0) -> None:
        self._near_s, self._distance_s = near_s, distance_s  # distance: of the path, when it was attached
        self._windows: dict[int, _Window] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._pairs: deque[int] = deque(maxlen=RECENT)  # of those
        self._faster = 0  # answers in a row that were faster by a speed of their own
        self._median: float | None = None
        self._class = 0
        self.pair_s = 0.0  # what a pair of a large call has taken, 0 before there was one

    def add(self, n_pairs: int, seconds: float) -> None:
        """Note one answer."""
        size = n_pairs.bit_length()
        window = self._windows.get(size)
        if window is None:
            window = self._windows[size] = _Window()
        window.add(seconds)
        if n_pairs <= DECODE_PAIRS:
            self._recent.append(seconds)
            self._pairs.append(n_pairs)
            self._faster = self._faster + 1 if self._median is not None and self._exceeds(self._median, seconds) else 0
            if self._faster == FASTER:  # no accident: what was before is over
                for past in (self._recent, self._pairs):
                    while len(past) > FASTER:
                        past.popleft()
            self._follow()
        else:
            pair_s = seconds / n_pairs
            self.pair_s += (pair_s - self.pair_s) * (SMOOTHING if self.pair_s else 1.0)

    @property
    def recent_s(self) -> float | None:
        """The median of the last answers of decode size, None before there was one. Any thread."""
        return self._median

    @property
    def recent_pairs(self) -> float:
        """The mean size of those calls, in pairs. Any thread."""
        pairs = self._pairs.copy()
        return sum(pairs) / len(pairs) if pairs else 0.0

    @property
    def changing(self) -> bool:
        """Whether the last answer was of another speed than those before it, so that more of them should be seen."""
        if self._median is None:
            return True
        last = self._recent[-1]
        return self._exceeds(last, self._median) or self._exceeds(self._median, last)

    def _exceeds(self, long_s: float, short_s: float) -> bool:
        return long_s > CHANGE * short_s + self._near_s

    @property
    def latency_class(self) -> int | None:
        """0 below `near_s`, one more for each doubling; changes only for a clear reason. None without answers."""
        return None if self._median is None else self._class

    def class_of(self, seconds: float) -> int:
        """Return the class of a latency."""
        return max(0, math.ceil(math.log2(max(seconds, 1e-9) / self._near_s)))

    def thin(self, distance_s: float) -> bool:
        """Whether a decode call takes so long for another reason than a round trip of `distance_s`."""
        return self._class > 0 and self._median is not None and self._median > 2 * distance_s + self._near_s

    def late_after(self, n_pairs: int, deadlines: Deadlines) -> float:
        """Return how long an answer of this size may take before another replica is asked too."""
        known = self._expected_p95(n_pairs)
        if known is None:
            first = FAR_FACTOR * self._distance_s + deadlines.unknown_s
            return min(first, deadlines.ceiling_s) if n_pairs <= DECODE_PAIRS else deadlines.ceiling_s
        p95, measured = known
        late = min(max(p95 * deadlines.factor, deadlines.floor_s), p95 * FAR_FACTOR + deadlines.slack_s)
        least = p95 * LEAST_FACTOR
        return max(min(late, deadlines.ceiling_s), least if measured else min(least, deadlines.ceiling_s))

    def _expected_p95(self, n_pairs: int) -> tuple[float, bool] | None:
        """The p95 of this size, and whether it is more than a guess: where it is unknown, it comes from the nearest
        smaller size known, as if time grew with it.
        """
        for size in range(n_pairs.bit_length(), 0, -1):
            window = self._windows.get(size)
            if window is not None and len(window.samples) >= MIN_SAMPLES:
                grown = n_pairs.bit_length() - max(size, DECODE_PAIRS.bit_length())
                return window.p95() * 2.0 ** max(0, grown), grown <= 0 or size == n_pairs.bit_length()
        for size in range(n_pairs.bit_length() + 1, DECODE_PAIRS.bit_length() + 1):
            window = self._windows.get(size)
            if window is not None and len(window.samples) >= MIN_SAMPLES:
                return window.p95(), True
        return None

    def percentile(self, percent: int) -> float | None:
        """Return a percentile over the recent calls of decode size, None before there are any."""
        small = [w for size, w in self._windows.copy().items() if size <= DECODE_PAIRS.bit_length()]
        samples = sorted(s for window in small for s in window.samples.copy())
        return _percentile(samples, percent) if samples else None

    def _follow(self) -> None:
        median = sorted(self._recent)[len(self._recent) // 2]
        if self._median is None:
            self._class = self.class_of(median)
        self._median = median
        low, high = self._near_s * 2.0 ** (self._class - 1), self._near_s * 2.0**self._class
        if median > high * CLASS_SLACK or (self._class and median < low / CLASS_SLACK):
            self._class = self.class_of(median)


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
