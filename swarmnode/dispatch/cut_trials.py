"""Whether large calls are better cut or whole: by how long both have really taken.

What `pieces.py` reckons with is measured too, but not all that a piece costs is in it: frames, changes of thread, a
busy machine, a congestion window. So of each kind of call the first are made in turns, cut and whole; then the better
way is taken, and now and then the other one, since links and machines change. Pure. Owned by `piece_queue.py`.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

FIRST = 4  # of each way, before anything is decided
KEPT = 5  # of each way: the last ones count
AGAIN_EVERY = 32  # calls, of which one goes the other way
CLEARLY = 0.97  # what is not so much better is noise
MAX_KINDS = 64


@dataclass(slots=True)
class _Kind:
    cut: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    whole: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    begun: int = 0
    cuts: bool = True


class CutTrials:
    """See the module. A kind is what calls of much the same cost have in common."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def should_cut(self, kind: Hashable) -> bool:
        """Say how the next call of a kind is to go, of which the model thinks that it should be cut."""
        known = self._known(kind)
        known.begun += 1
        if known.begun <= 2 * FIRST:
            return known.begun % 2 == 1
        return known.cuts is not (known.begun % AGAIN_EVERY == 0)

    def took(self, kind: Hashable, seconds: float, *, cut: bool) -> None:
        """Note what a call took, for each of its units."""
        known = self._known(kind)
        (known.cut if cut else known.whole).append(seconds)
        if min(len(known.cut), len(known.whole)) < FIRST - 1:  # one may have failed
            return
        ours, other = (known.cut, known.whole) if known.cuts else (known.whole, known.cut)
        if statistics.median(other) < CLEARLY * statistics.median(ours):
            known.cuts = not known.cuts

    def _known(self, kind: Hashable) -> _Kind:
        known = self._kinds.setdefault(kind, _Kind())
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return known
