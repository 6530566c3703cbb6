"""What the engine's recent calls took: whether the next one is short enough for the loop's own thread.

Pure. Owned by `worker.py`, which adds every call that succeeded.
"""

from __future__ import annotations

import math
from collections import deque

RECENT = 4  # calls: one that met cold slices keeps its kind off the loop for as many, and a first one proves nothing


class EngineTimes:
    """Seconds by site and size of the call (powers of two of its pairs, as in `health.Latency`)."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}

    def add(self, site: int, n_pairs: int, seconds: float) -> None:
        """Note a call that the engine has computed."""
        self._recent.setdefault((site, n_pairs.bit_length()), deque(maxlen=RECENT)).append(seconds)

    def expected(self, site: int, n_pairs: int) -> float:
        """Return the longest of the last RECENT calls of this kind; infinity until there were as many."""
        recent = self._recent.get((site, n_pairs.bit_length()), ())
        return max(recent) if len(recent) == RECENT else math.inf
