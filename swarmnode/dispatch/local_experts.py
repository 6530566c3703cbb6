"""The backbone's own engine in a thread of its own, and which experts it computes before anybody is asked.

Owned by `client.py`. `keeps` and `run` may be called on any thread; `done` is called on the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from swarmnode.compute.engine_api import Engine
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.codec import F32
from swarmnode.dispatch.hello import experts_of, mask_of
from swarmnode.dispatch.request import Request, Share


class LocalExperts:
    """See the module. Nobody else may call the engine; its owner closes it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-experts")
        self._held: dict[int, tuple[tuple[int, ...], int]] = {}
        self._kept: Mapping[int, tuple[int, NDArray[np.bool_]]] = {}

    def held(self, site: Site) -> int:
        """Return the bitmap of the experts held at a site; worked out again only when they have changed."""
        experts = self._engine.holdings.get(site.index, ())
        known = self._held.get(site.index)
        if known is None or known[0] is not experts:
            known = self._held[site.index] = (experts, mask_of(experts))
        return known[1]

    def keep(self, masks: Mapping[int, int], sites: Mapping[int, Site]) -> None:
        """Compute these experts here from now on (site -> bitmap), as far as the engine holds them."""
        kept = {}
        for index, mask in masks.items():
            if index in sites and mask:
                chosen = np.zeros(sites[index].n_expert, np.bool_)
                chosen[[expert for expert in experts_of(mask) if expert < len(chosen)]] = True
                kept[index] = (mask_of(np.flatnonzero(chosen).tolist()), chosen)
        self._kept = kept

    def kept(self, site: int) -> int:
        """Return the bitmap of the experts kept at a site, whether or not the engine holds them at this moment."""
        known = self._kept.get(site)
        return 0 if known is None else known[0]

    def keeps_all(self, request: Request) -> bool:
        """Whether nobody else need be asked for this request."""
        known = self._kept.get(request.site.index)
        if known is None or known[0] & ~self.held(request.site):
            return False
        return bool(known[1][request.experts].all())

    def run(self, share: Share, done: Callable[[Future[F32]], None]) -> None:
        """Compute a share in the engine's thread. Raises RuntimeError once this is closed."""
        self._thread.submit(share.compute, self._engine).add_done_callback(done)

    def close(self) -> None:
        """Wait for what is being computed, drop what waits, end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
