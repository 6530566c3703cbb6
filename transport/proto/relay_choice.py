"""Which relay is a node's home, and which one it keeps warm. PURE.

The home is where peers reach a node: it is told to others, so it must not flap. It changes when it is down, or when
another relay was clearly nearer in two measurements in a row; one is enough while everything is new (`settled` false:
the first seconds, or after the network changed), since then peers must be told anyway.
Called by relay_pool with what its links measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Tailscale's rule (facts of the field): a home changes for less than two thirds of its round trip …
BETTER_RATIO = 2 / 3
# … and at least 10 ms, since between near relays two thirds are noise …
BETTER_SECONDS = 0.010
# … seen so many times in a row.
BETTER_TIMES = 2


@dataclass(frozen=True, slots=True)
class HomeCandidate:
    """One of our own relays. rtt: seconds, None before the first answer; measured: how many answers so far."""

    url: str
    up: bool
    rtt: float | None = None
    measured: int = 0


class HomeChoice:
    """The home and the second, as chosen by the last `update`; "" while there is none."""

    def __init__(self) -> None:
        self.home = self.second = ""
        self._streak: dict[str, tuple[int, int]] = {}  # challenger: (answers seen, how often in a row it was better)

    def update(self, views: Sequence[HomeCandidate], settled: bool = True) -> bool:
        """Choose anew from all relays that may be a home, in the user's order. True when home or second changed."""
        before = (self.home, self.second)
        known = {view.url: view for view in views}
        self.home = self._choose_home(views, known.get(self.home), settled)
        rest = [view for view in views if view.url != self.home]
        self.second = _choose_second(rest, known.get(self.second))
        return before != (self.home, self.second)

    def _choose_home(self, views: Sequence[HomeCandidate], home: HomeCandidate | None, settled: bool) -> str:
        nearest = _nearest(views)
        if nearest is None:  # nothing is up: stay where peers last knew us
            self._streak.clear()
            return home.url if home is not None else (views[0].url if views else "")
        if home is None or not home.up:
            self._streak.clear()
            return nearest.url
        better = [view for view in views if view.up and is_better(view, home)]
        streak = {}
        for view in better:
            seen, times = self._streak.get(view.url, (-1, 0))
            streak[view.url] = (view.measured, times + (view.measured != seen))
        self._streak = streak
        needed = BETTER_TIMES if settled else 1
        proven = _nearest([view for view in better if streak[view.url][1] >= needed])
        if proven is None:
            return home.url
        self._streak = {}
        return proven.url


def is_better(one: HomeCandidate, other: HomeCandidate) -> bool:
    """Whether `one` is so much nearer that a change is worth it."""
    if one.rtt is None or other.rtt is None:
        return False
    return one.rtt < other.rtt * BETTER_RATIO and other.rtt - one.rtt >= BETTER_SECONDS


def _choose_second(rest: Sequence[HomeCandidate], second: HomeCandidate | None) -> str:
    if second not in rest:  # it is the home now, or gone
        second = None
    nearest = _nearest(rest)
    if second is not None and (nearest is None or (second.up and not is_better(nearest, second))):
        return second.url
    if nearest is not None:
        return nearest.url
    return rest[0].url if rest else ""


def _nearest(views: Sequence[HomeCandidate]) -> HomeCandidate | None:
    """The one that is up with the lowest round trip; of those without one, the first."""
    up = [view for view in views if view.up]
    return min(up, key=lambda view: (view.rtt is None, view.rtt or 0.0), default=None)
