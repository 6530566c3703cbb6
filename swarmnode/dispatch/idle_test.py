"""How fast an idle worker is: it computes a few rows of experts that it holds, for nobody.

What its last calls took says little about a worker that has had none for a while: one that was given up because it was
slow would be slow for ever. Who has few calls measures itself instead, seldom, and only as long as nobody notices; it
counts where it is faster than what calls have shown (`EngineTimes.tested`). What it says then is a word like any other:
callers have their own measurements (`coordination/lead.pace`), and one that says more than it keeps is tried less and
less (`coordination/second_chance.py`).

Pure: clocks and engines are passed in. Owned by `worker.py`; `due` and `choose` on the loop thread, `seconds_per_row`
on the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from swarmnode.compute.engine_api import Engine
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.engine_times import WINDOW
from swarmnode.dispatch.hello import experts_of

EVERY_S = 15.0
FEW_CALLS = WINDOW  # in EVERY_S: what calls have shown is older than that then
LIMIT_S = 0.02  # of computing per shape of site: a call that comes meanwhile waits so long, and for one cold row
MAX_CALLS = 8

Chosen = Mapping[int, Sequence[int]]  # site -> experts


class IdleTest:
    """Says when it is time, and with which experts."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._calls = 0
        self._turn = 0

    def due(self, now: float, calls: int) -> bool:
        """Whether a test should be made now; `calls` counts all that were computed so far."""
        if self._since is None:
            self._since, self._calls = now, calls
        if now - self._since < EVERY_S:
            return False
        was_idle = calls - self._calls < FEW_CALLS
        self._since, self._calls = now, calls
        return was_idle

    def choose(self, alike: Iterable[Sequence[int]], sites: Mapping[int, Site], held: Callable[[int], int]) -> Chosen:
        """One site of each group of those alike, with as many experts of it as a token selects, others every time.

        `held` gives the bitmap of a site's experts that are served. Groups of which nothing is held are left out.
        """
        self._turn += 1
        chosen: dict[int, Sequence[int]] = {}
        for group in alike:
            served = [site for site in group if held(site)]
            if not served:
                continue
            site = served[self._turn % len(served)]
            experts = experts_of(held(site))
            first = self._turn * sites[site].n_used % len(experts)
            chosen[site] = [*experts[first:], *experts[:first]][: sites[site].n_used]
        return chosen


def seconds_per_row(engine: Engine, site: Site, experts: Sequence[int], clock: Callable[[], float]) -> float:
    """Return seconds of the engine per row in calls of one token with these experts of a site.

    Raises what `Engine.raw_rows` does. The first row of each expert brings its slice in, perhaps from a disk, and is
    not counted: they come one by one, and none begins after LIMIT_S. What is left of that is for calls with all of
    them; where nothing is, the second row of the first expert, which is computed in any case, is the result.
    """
    x = np.linspace(-1.0, 1.0, site.d_in, dtype=np.float32)[None, :]

    def call(*chosen: int) -> float:
        before = clock()
        engine.raw_rows(site.index, x, np.zeros(len(chosen), np.int32), np.array(chosen, np.int32))
        return clock() - before

    began = clock()
    call(experts[0])
    single = call(experts[0])

    def is_time_for(n_rows: int) -> bool:
        return clock() - began + n_rows * single <= LIMIT_S

    for expert in experts[1:]:
        if not is_time_for(1):
            return single
        call(expert)
    took: list[float] = []
    while len(took) <= MAX_CALLS and is_time_for(len(experts)):
        took.append(call(*experts))
    return median(took[1:]) / len(experts) if len(took) > 1 else single  # the first of a size makes its graph
