"""How far the peer is on one path, from the pongs of pings. PURE. Called by path.py.

A pong is never early, but it may be late: it waits in the socket of a process that stands still, in a queue, in a
Wi-Fi that sleeps. So the least of the last four samples counts, smoothed as in RFC 6298 (a plain mean until there are
a few, which converges faster). When it is beyond twice or under half of what was known, the way has become another
one: believed at once, and, when farther, looked at again soon.
"""

from __future__ import annotations

from collections import deque

from transport.proto.path_config import PathConfig


class RttEstimate:
    """value: seconds, None before the first sample. samples: so far. wanted: how many more are wanted soon."""

    __slots__ = ("_config", "_recent", "samples", "value", "wanted")

    def __init__(self, config: PathConfig) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=config.rtt_window)
        self.value: float | None = None
        self.samples = 0
        self.wanted = config.burst

    def restart(self) -> None:
        """What was measured holds no more; it remains as a guess."""
        self._recent.clear()
        self.samples = 0
        self.look_again()

    def look_again(self) -> None:
        """A few samples are wanted soon."""
        self.wanted = self._config.burst

    def add(self, rtt: float, fresh: bool) -> None:
        """A pong came back after `rtt` seconds. fresh: its ping was sent since the last `look_again` of the caller."""
        self.samples += 1
        self._recent.append(rtt)
        self.wanted -= fresh and self.wanted > 0
        least, known, step = min(self._recent), self.value, self._config.rtt_step
        if known is None or self.samples == 1 or least < known / step:
            self.value = least
        elif least > known * step:
            self.value = least
            self.look_again()
        else:
            self.value = known + (least - known) * max(1 / 8, 1 / self.samples)
