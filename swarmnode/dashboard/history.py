"""What changes over time: one value per second, and figures per token over the last seconds. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swarmnode.status import NodeStatus, SiteStatus

SECONDS = 120  # kept of a series: more than any sparkline shows
WINDOW_S = 5.0  # over which figures per token and per second are taken: calm, and soon right
_MAX_SAMPLES = 64  # in the window, however often somebody looks


class Series:
    """One value per second. Within a second the last one counts."""

    __slots__ = ("_second", "values")

    def __init__(self) -> None:
        self._second = -1
        self.values: list[float] = []

    def add(self, now: float, value: float) -> None:
        """Take a value; `now` in seconds of any clock that only runs forwards."""
        second = int(now)
        if second == self._second and self.values:
            self.values[-1] = value
            return
        self._second = second
        self.values.append(value)
        if len(self.values) > 2 * SECONDS:
            del self.values[:-SECONDS]


@dataclass(frozen=True, slots=True)
class Figures:
    """What generating has cost lately, prompts included. Per second, per token, per token and layer; 0 where unknown.

    `slowest` is the layer that was waited for longest, `wait_ms` per round trip; `waits` is that of every layer;
    `waits_for` the id of the worker that answers slowest of those that hold the layer, "" where none is known.
    """

    tokens_per_s: float = 0.0
    tokens_per_step: float = 0.0
    trips_per_token: float = 0.0
    bytes_per_token_layer: float = 0.0
    slowest: int = -1
    wait_ms: float = 0.0
    waits_for: str = ""
    waits: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    tokens: int
    sites: list[SiteStatus]


class GenerationFigures:
    """Differences of the counters between snapshots. What is not per second stays until the next generation; before
    the first one it is that of everything since the node started."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_MAX_SAMPLES)
        self.figures = Figures()

    def take(self, status: NodeStatus, now: float) -> None:
        """Take a snapshot."""
        sample = _Sample(now, status.generation.tokens, status.sites)
        samples = self._samples
        if samples and sample.tokens < samples[-1].tokens:
            samples.clear()
        if len(samples) > 1 and samples[-1].tokens == samples[-2].tokens < sample.tokens:
            last = samples[-1]
            samples.clear()  # it was idle: that is not part of what follows
            samples.append(last)
        if len(samples) > 1 and now - samples[-1].at < WINDOW_S / _MAX_SAMPLES:
            samples.pop()
        is_first = not samples
        samples.append(sample)
        while len(samples) > 2 and samples[1].at <= now - WINDOW_S:
            samples.popleft()
        first = samples[0]
        elapsed, tokens = now - first.at, sample.tokens - first.tokens
        per_s = tokens / elapsed if elapsed > 0 else 0.0
        if is_first and sample.tokens:
            self.figures = _figures(_Sample(now, 0, []), sample, status, 0.0)
        elif tokens > 0:
            self.figures = _figures(first, sample, status, per_s)
        elif self.figures.tokens_per_s != per_s:
            self.figures = _with_rate(self.figures, per_s)


def _with_rate(old: Figures, per_s: float) -> Figures:
    return Figures(
        per_s,
        old.tokens_per_step,
        old.trips_per_token,
        old.bytes_per_token_layer,
        old.slowest,
        old.wait_ms,
        old.waits_for,
        old.waits,
    )


def _figures(first: _Sample, last: _Sample, status: NodeStatus, per_s: float) -> Figures:
    tokens = last.tokens - first.tokens
    before = first.sites if len(first.sites) == len(last.sites) else [None] * len(last.sites)
    trips = sent = steps = 0
    waits: list[tuple[int, float]] = []
    for old, new in zip(before, last.sites, strict=True):
        calls = new.round_trips - (old.round_trips if old else 0)
        trips += calls
        sent += new.bytes_out + new.bytes_back - (old.bytes_out + old.bytes_back if old else 0)
        steps = max(steps, new.evaluations - (old.evaluations if old else 0))
        if calls > 0:
            waits.append((new.layer, (new.wait_ms - (old.wait_ms if old else 0.0)) / calls))
    slowest, wait = max(waits, key=lambda one: one[1], default=(-1, 0.0))
    return Figures(
        tokens_per_s=per_s,
        tokens_per_step=tokens / steps if steps else 0.0,
        trips_per_token=trips / tokens,
        bytes_per_token_layer=sent / tokens / max(1, len(last.sites)),
        slowest=slowest,
        wait_ms=wait,
        waits_for=_slowest_holder(status, slowest),
        waits=tuple(waits),
    )


def _slowest_holder(status: NodeStatus, layer: int) -> str:
    key = str(layer)
    holders = [peer for peer in status.peers if key in peer.holdings and peer.path != "none"]
    return max(holders, key=lambda peer: peer.latency_ms).peer if holders else ""
