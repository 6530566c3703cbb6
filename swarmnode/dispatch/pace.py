"""How fast a worker and the way to it are with large calls: measured by those that it answers.

Pure: `now` is an argument. Not what follows from it: how calls are cut is in `pieces.py`, who gets what in
`replicas.py`. Owned by `piece_queue.py`, one per attached worker. Decode calls are measured in `health.py`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from swarmnode.dispatch.health import MIN_SAMPLES, Deadlines, Latency

# What an expert costs a call besides its rows, in rows. Measured (ggml's CPU kernels, 3,072 × 1,024, Q4_K), where a row
# of 64 or more costs 1: of 43 1.14, of 32 1.2, of 16 1.65, of 8 2.7.
SETUP_ROWS = 12
SMOOTHING = 0.25  # weight of a new measurement of the engine
SAMPLES = 16  # of the link: those of the last two to ten calls
MEASURED_BYTES = 1 << 16  # smaller calls say more of the scheduler than of the link
TOGETHER = 0.5  # two calls left together if the way drew them apart to more than twice that
LEAST_BYTE_S = 1e-12
SLOWED = 2.0  # times as slow: what was measured before is over


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a worker and the way to it have been, seconds; 0: nothing measured.

    byte_s: a byte, one way. pair_s: a (token, expert) row of the engine. rtt_s: the path's round trip.
    """

    byte_s: float = 0.0
    pair_s: float = 0.0
    rtt_s: float = 0.0

    def per_pair(self, row_bytes: float) -> float:
        """Return what a further (token, expert) row costs that takes so many bytes each way; 0 while unknown.

        What it costs where it costs most: the engine, or the link. Replica choice spreads large calls by it.
        """
        return max(self.pair_s, row_bytes * self.byte_s) if self.pair_s else 0.0

    def coarse(self) -> Pace:
        """Return this in steps of 1.4, so that the cut of a call does not change with every measurement."""
        return Pace(_step(self.byte_s), _step(self.pair_s), _step(self.rtt_s))


def _step(seconds: float) -> float:
    return 2.0 ** (round(2 * math.log2(seconds)) / 2) if seconds > 1e-12 else 0.0


@dataclass(slots=True)
class _Sent:
    pairs: int
    size: int
    back: int  # bytes of the answer
    at: float
    number: int
    alone: bool  # nothing of the same worker was under way


@dataclass(frozen=True, slots=True)
class _Arrival:
    """When a call left, and when it came to its worker but for a time that is the same for all."""

    number: int
    sent: float
    came: float


class PaceMeter:
    """Measures the `Pace` of one worker by calls that are larger than decode size. `now` in seconds.

    The link is measured by calls that leave one right behind the other, the moment of each one's arrival being that of
    its answer less what the worker says that it stood and was computed there; without such, by calls that were alone.

    Deadlines rest on the latter: a call that queues behind others does not tell how long it takes.
    """

    def __init__(self, near_s: float, rtt_s: float) -> None:
        self._latency = Latency(near_s, rtt_s)
        self._alone: Counter[int] = Counter()  # calls behind it, by size in powers of two as there
        self._pace = Pace(rtt_s=rtt_s)
        self._line, self._trip = _Median(), _Median()  # seconds per byte, by either measure
        self._trip_then_s = 0.0
        self._count = 0
        self._answered_at = -math.inf
        self._last: _Arrival | None = None
        self._busy_pair_s = 0.0  # the engine's time for a pair, the weights that it reads included
        self._open: OrderedDict[int, _Sent] = OrderedDict()

    @property
    def under_way(self) -> int:
        """How many of these calls have left and are not answered."""
        return len(self._open)

    @property
    def pace(self) -> Pace:
        """What has been measured."""
        return self._pace

    def ahead(self, attempt: int) -> float:
        """Return what the worker takes, as far as is known, for all that was sent before an attempt, until the last
        byte of its answers is here; s, without a round trip. One sends while another is computed or comes back.

        Calls that have nothing to do with each other queue at a worker too, and that is not its fault. What was sent
        and is not one of these calls stands behind all of them.
        """
        out = computed = back = 0.0
        for other, sent in self._open.items():
            if other == attempt:
                break
            out += sent.size * self._pace.byte_s
            computed = max(computed, out) + sent.pairs * self._busy_pair_s
            back = max(back, computed) + sent.back * self._pace.byte_s
        return back

    def answering_until(self, deadlines: Deadlines, otherwise: Latency) -> float:
        """Return when the first of these calls that is under way will be late; -inf where there is none."""
        first = next(iter(self._open.values()), None)
        if first is None:
            return -math.inf
        return max(first.at, self._answered_at) + self.late_after(first.pairs, deadlines, otherwise)

    def late_after(self, n_pairs: int, deadlines: Deadlines, otherwise: Latency) -> float:
        """Return how long an answer may take; by `otherwise` while too few of its size or smaller are known here."""
        size = n_pairs.bit_length()
        known = any(count >= MIN_SAMPLES and of <= size for of, count in self._alone.items())
        return (self._latency if known else otherwise).late_after(n_pairs, deadlines)

    def sent(self, attempt: int, pairs: int, size: int, now: float, back: int = 0) -> None:
        """Note a CALL of `size` bytes that left; its answer will have `back`."""
        self._count += 1
        self._open[attempt] = _Sent(pairs, size, back, now, self._count, not self._open)

    def dropped(self, attempt: int) -> None:
        """Note that there will be no answer, or none that matters."""
        self._open.pop(attempt, None)

    def answered(
        self, attempt: int, experts: int, size: int, *, busy_s: float, queued_s: float, rtt_s: float, now: float
    ) -> None:
        """Note an ANSWER of `size` bytes: the worker says what it computed and how long the call stood there."""
        sent = self._open.pop(attempt, None)
        if sent is None:
            return
        self._answered_at, took = now, now - sent.at
        busy_s = min(busy_s, took)  # whatever it says
        queued_s = min(queued_s, took - busy_s)
        pair_s = _mean(self._pace.pair_s, busy_s / (sent.pairs + SETUP_ROWS * experts))
        self._busy_pair_s = _mean(self._busy_pair_s, busy_s / sent.pairs)
        if sent.alone:
            self._latency.add(sent.pairs, took)
            self._alone[sent.pairs.bit_length()] += 1
            if size + sent.size >= MEASURED_BYTES:
                self._note_trip(max(took - rtt_s - busy_s - queued_s, 0.0) / (size + sent.size))
        arrival = _Arrival(sent.number, sent.at, now - busy_s - queued_s)
        if self._last is not None and sent.number == self._last.number + 1 and sent.size >= MEASURED_BYTES:
            self._note_gap(arrival.sent - self._last.sent, arrival.came - self._last.came, max(size, sent.size))
        self._last = arrival
        self._pace = Pace(self._line.value or self._trip.value, pair_s, rtt_s)

    def _note_trip(self, byte_s: float) -> None:
        """A call that was alone: what it took beside the round trip and the engine, which is more than the line's time.

        While a congestion window grows, whole round trips are in it.
        """
        self._trip.add(max(byte_s, LEAST_BYTE_S))
        if self._line.value and self._trip.value > SLOWED * self._trip_then_s:
            self._line = _Median()

    def _note_gap(self, sent_s: float, came_s: float, size: int) -> None:
        """Two calls, the second right behind the first: when they came to the worker tells the line's own time."""
        if came_s <= 0:
            return
        byte_s = came_s / size
        if sent_s <= TOGETHER * came_s or byte_s < self._line.value:  # else they left as far apart
            self._line.add(byte_s)
            self._trip_then_s = self._trip.value


class _Median:
    """Of the last samples: some contain a whole round trip that a growing congestion window took."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self.value = 0.0  # 0: none

    def add(self, sample: float) -> None:
        self._samples.append(sample)
        self.value = sorted(self._samples)[len(self._samples) // 2]


def _mean(known: float, new: float) -> float:
    return known + (new - known) * SMOOTHING if known else new
