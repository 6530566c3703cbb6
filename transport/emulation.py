"""Delay, jitter, loss and bandwidth on a link, for benchmarks and tests without root.

`LinkEmulation` is the setting, `LinkModel` the pure model of one direction (takes `now` and a random source),
`DelayLine` the thin shell with a timer. Used by peer_socket, under QUIC, on this node alone: half of the round
trip is added on the way out and half on the way in, so one emulating node gives the whole RTT; loss and rate
act on each direction. Packets keep their order: jitter stretches and squeezes gaps, as a queue does.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Generic, TypeVar

from transport.errors import ConfigError

T = TypeVar("T")

QUEUE_SECONDS = 0.1  # a bottleneck's drop-tail queue: 100 ms at its rate …
MIN_QUEUE_BYTES = 64 * 1024  # … but never less than one send burst
MAX_IN_FLIGHT = 65_536  # datagrams on the wire; bounds memory whatever the settings
TIMER_SLACK = 0.0008  # an idle loop wakes so late: its clock ticks in milliseconds, and waking takes a while too

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES_PER_SECOND = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}


@dataclass(frozen=True, slots=True)
class LinkEmulation:
    """What to add to a link: seconds, probability per datagram, bytes per second per direction."""

    rtt: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    rate: float | None = None
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> LinkEmulation:
        """Read `rtt=80ms,jitter=5ms,loss=1%,rate=20mbit,seed=7` (any subset). Raises ConfigError."""
        setting = cls()
        seen: set[str] = set()
        for part in filter(None, (piece.strip() for piece in text.lower().split(","))):
            name, _, value = part.partition("=")
            if name in seen:
                raise ConfigError(f"emulation: {name} is given twice")
            seen.add(name)
            if name in ("rtt", "jitter"):
                seconds = _read(_DURATION, _SECONDS, name, value, "80ms")
                if seconds > 60:
                    raise ConfigError(f"emulation: {name}={value} is more than 60s")
                setting = replace(setting, rtt=seconds) if name == "rtt" else replace(setting, jitter=seconds)
            elif name == "loss":
                match = _PERCENT.fullmatch(value)
                if match is None or float(match[1]) > 100:
                    raise ConfigError(f"emulation: loss={value} is not a percentage such as 1%")
                setting = replace(setting, loss=float(match[1]) / 100)
            elif name == "rate":
                rate = _read(_RATE, _BYTES_PER_SECOND, name, value, "20mbit")
                if rate <= 0:
                    raise ConfigError("emulation: rate must be above 0")
                setting = replace(setting, rate=rate)
            elif name == "seed":
                if not value.isdecimal():
                    raise ConfigError(f"emulation: seed={value} is not a whole number")
                setting = replace(setting, seed=int(value))
            else:
                raise ConfigError(f"emulation: unknown {name!r}; known are rtt, jitter, loss, rate, seed")
        if text.strip() and not seen:
            raise ConfigError(f"emulation: {text!r} sets nothing; known are rtt, jitter, loss, rate, seed")
        if setting.jitter > setting.rtt:
            raise ConfigError(f"emulation: jitter {setting.jitter:g} s is more than the rtt {setting.rtt:g} s")
        return setting


def _read(pattern: re.Pattern[str], units: dict[str, float], name: str, value: str, example: str) -> float:
    match = pattern.fullmatch(value)
    if match is None:
        raise ConfigError(f"emulation: {name}={value} needs a number and a unit, such as {name}={example}")
    return float(match[1]) * units[match[2]]


class LinkModel:
    """One direction of an emulated link. Pure: the caller brings the time and the random source."""

    def __init__(self, setting: LinkEmulation, random: Random) -> None:
        self._setting = setting
        self._random = random
        self._busy_until = 0.0  # when the bottleneck has sent what it accepted
        self._last_arrival = 0.0
        rate = setting.rate or 0.0
        self._queue_seconds = max(QUEUE_SECONDS, MIN_QUEUE_BYTES / rate) if rate else 0.0

    def offer(self, size: int, now: float) -> float | None:
        """When a datagram of `size` bytes that is sent at `now` arrives; None when the link drops it."""
        setting = self._setting
        if setting.loss and self._random.random() < setting.loss:
            return None
        leaves = now
        if setting.rate:
            starts = max(now, self._busy_until)
            if starts - now > self._queue_seconds:
                return None  # drop tail
            leaves = self._busy_until = starts + size / setting.rate
        delay = setting.rtt / 2
        if setting.jitter:
            delay += (self._random.random() - 0.5) * setting.jitter
        self._last_arrival = max(self._last_arrival, leaves + delay)
        return self._last_arrival


class DelayLine(Generic[T]):
    """Holds items until the model says they arrive. One timer; accurate to about half a millisecond."""

    def __init__(self, loop: asyncio.AbstractEventLoop, model: LinkModel, deliver: Callable[[list[T]], None]) -> None:
        self._loop = loop
        self._model = model
        self._deliver = deliver
        self._waiting: deque[tuple[float, T]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def push(self, item: T, size: int) -> None:
        """Send `item` of `size` bytes into the link; it may be dropped."""
        arrives = self._model.offer(size, self._loop.time())
        if arrives is None or len(self._waiting) >= MAX_IN_FLIGHT:
            return
        self._waiting.append((arrives, item))
        if self._timer is None:
            self._timer = self._loop.call_at(arrives - TIMER_SLACK, self._due)

    def remaining(self) -> float:
        """Seconds until everything has arrived."""
        return max(0.0, self._waiting[-1][0] - self._loop.time()) if self._waiting else 0.0

    def close(self) -> None:
        """Drop everything and stop the timer."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        horizon = self._loop.time() + TIMER_SLACK
        arrived: list[T] = []
        while self._waiting and self._waiting[0][0] <= horizon:
            arrived.append(self._waiting.popleft()[1])
        if self._waiting:
            self._timer = self._loop.call_at(self._waiting[0][0] - TIMER_SLACK, self._due)
        if arrived:
            self._deliver(arrived)
