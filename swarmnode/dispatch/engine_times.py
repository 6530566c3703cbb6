"""What the engine's recent calls took: whether the next one is short enough for the loop's own thread, and how fast
this worker is.

Pure. Owned by `worker.py`, which adds every call that succeeded on the loop thread; the figures may be read on any.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, median

from swarmnode.dispatch.health import DECODE_PAIRS

RECENT = 4  # calls: one that met cold slices keeps its kind off the loop for as many, and a first one proves nothing
WINDOW = 32  # calls of a site that its seconds per row rest on: a second of decoding
TEST_GAIN = 1.25  # an idle worker's test counts where it shows so many times the speed: a resting processor is slower


class EngineTimes:
    """Seconds by site and size of the call (powers of two of its pairs, as in `health.Latency`)."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._rows: dict[tuple[int, bool], deque[float]] = {}  # (site, small) -> seconds per row of each call

    def add(self, site: int, n_pairs: int, seconds: float) -> None:
        """Note a call that the engine has computed."""
        self._recent.setdefault((site, n_pairs.bit_length()), deque(maxlen=RECENT)).append(seconds)
        # A step of generation asks small ones; a prompt's batch is cheaper by the row.
        rows = self._rows.setdefault((site, n_pairs <= DECODE_PAIRS), deque(maxlen=WINDOW))
        rows.append(seconds / max(1, n_pairs))

    def expected(self, site: int, n_pairs: int) -> float:
        """Return the longest of the last RECENT calls of this kind; infinity until there were as many."""
        recent = self._recent.get((site, n_pairs.bit_length()), ())
        return max(recent) if len(recent) == RECENT else math.inf

    def changed(self, site: int) -> None:
        """Note that a site holds other slices, which may be cold: the next calls show their length anew."""
        for key in [key for key in self._recent if key[0] == site]:
            del self._recent[key]

    def tested(self, alike: Collection[Sequence[int]], row_s: Mapping[int, float]) -> None:
        """Note what a worker without calls has shown by itself, site -> seconds per row; `alike` as in `row_s`.

        Where it is clearly faster than its calls were, these are too old to count any more.
        """
        known = self.row_s(alike)
        for group in alike:
            shown = {site: row_s[site] for site in group if site in row_s}
            before = [known[site] for site in group if site in known]
            if not shown or (before and fmean(before) < TEST_GAIN * fmean(shown.values())):
                continue
            for key in [key for key in self._rows if key[0] in group]:
                del self._rows[key]
            for site, seconds in shown.items():
                self._rows[site, True] = deque([seconds], maxlen=WINDOW)

    def row_s(self, alike: Iterable[Sequence[int]]) -> dict[int, float]:
        """Return site -> seconds of the engine per (token, expert) row in calls of decode size: the recent median.

        `alike` are groups of sites of one shape: one without calls of its own gets the mean of those of its group,
        and a group without any is left out. Larger calls count only where a site had no small ones.
        """
        measured: dict[int, float] = {}
        for small in (False, True):
            for (site, is_small), rows in self._rows.copy().items():
                if is_small is small:
                    measured[site] = median(rows.copy())
        result: dict[int, float] = {}
        for group in alike:
            known = [measured[site] for site in group if site in measured]
            if known:
                mean = fmean(known)
                result |= {site: measured.get(site, mean) for site in group}
        return result
