"""Does a range of a file come fast enough to be waited for? Pure: the time is an argument. Caller: `http_file.py`.

Only time spent on the network counts: not what the reader does with the bytes, nor a wait that the server asked for.
A link of 5 kB/s that six requests share gives each about 50 kB in a window, six times what is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0
LEAST_BYTES: Final = 8 * 1024  # in a window
SLOW_WINDOWS: Final = 3  # of one range, after which it is given up; no later speed makes up for one
TELL_EVERY_S: Final = 10.0  # of waiting, between two times that `is_slow` is asked for
SLOW_RATE: Final = 16 * 1024.0  # bytes/s: slower than this is told


@dataclass(slots=True)
class Pace:
    """Of one range, with all its attempts."""

    waited_s: float = 0.0
    received: int = 0
    slow_windows: int = 0
    _mark: float = 0.0
    _window_s: float = 0.0
    _window_bytes: int = 0

    def resume(self, now: float) -> None:
        """Waiting for the network begins (again)."""
        self._mark = now

    def count(self, now: float, n_bytes: int) -> bool:
        """Waiting has lasted until now and has brought this much. True: a window has ended with too little."""
        waited, self._mark = max(0.0, now - self._mark), now
        self.waited_s += waited
        self.received += n_bytes
        self._window_s += waited
        self._window_bytes += n_bytes
        if self._window_s < WINDOW_S:
            return False
        is_slow = self._window_bytes * WINDOW_S < LEAST_BYTES * self._window_s
        self.slow_windows += is_slow
        self._window_s, self._window_bytes = 0.0, 0
        return is_slow

    @property
    def is_hopeless(self) -> bool:
        """Whether it is to be given up."""
        return self.slow_windows >= SLOW_WINDOWS

    @property
    def rate(self) -> float:
        """bytes/s so far."""
        return self.received / self.waited_s if self.waited_s > 0 else 0.0
