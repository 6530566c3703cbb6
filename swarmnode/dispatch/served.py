"""Which experts a worker announces and which calls it takes, while what its engine holds changes.

Pure. Owned by `worker.py`, loop thread only. Per expert a drop goes through three states, in this order, so that a
client which hears of it in time never asks in vain and one which does not is told "not held", which is no fault:

    served     announced, and calls for it are taken
    doomed     announced no more; calls that clients sent before they heard of it are still computed
    cut        calls are refused as NOT_HELD, those too that wait already: `version` tells that they must be looked at
               again; the engine is about to let go

An added expert is served once the engine has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarmnode.compute.recipe import Site
from swarmnode.dispatch.frames import Holdings, SiteHoldings
from swarmnode.dispatch.hello import mask_of
from swarmnode.errors import BadCall


class ServedExperts:
    """See the module. All masks are bitmaps, bit e for expert e of a site. `version` counts the cuts."""

    def __init__(self, sites: Mapping[int, Site]) -> None:
        self._sites = sites
        self._engine: dict[int, int] = {}  # what the engine holds, as far as is known here
        self._doomed: dict[int, int] = {}
        self._cut: dict[int, int] = {}
        self.version = 0

    def read(self, holdings: Mapping[int, Iterable[int]]) -> None:
        """Take over what the engine holds at all sites (site -> experts). Doomed and cut experts stay so."""
        self._engine = {site: mask for site, experts in holdings.items() if (mask := mask_of(experts))}

    def held(self, site: int) -> int:
        """Return the experts of a site that the engine holds, whatever is to become of them."""
        return self._engine.get(site, 0)

    def taken(self, site: int) -> int:
        """Return the experts of a site for which calls are taken."""
        return self._engine.get(site, 0) & ~self._cut.get(site, 0)

    def announced(self) -> Holdings:
        """Return what clients are told: the sites with experts that are neither doomed nor cut, in order."""
        masks = ((site, self.taken(site) & ~self._doomed.get(site, 0)) for site in sorted(self._engine))
        return tuple(SiteHoldings(site, self._sites[site].n_expert, mask) for site, mask in masks if mask)

    def dropped_by(self, site: int, experts: Iterable[int]) -> int:
        """Return what a site loses when it is to hold exactly these experts. Raises BadCall for what does not exist."""
        described = self._sites.get(site)
        if described is None:
            raise BadCall(f"site {site}: this model has no such site")
        ids = set(experts)
        if wrong := sorted(e for e in ids if not 0 <= e < described.n_expert):
            raise BadCall(f"site {site}: expert {wrong[0]} does not exist, there are {described.n_expert}")
        return self.held(site) & ~mask_of(ids)

    def doom(self, experts: Mapping[int, int]) -> None:
        """Announce these no more (site -> mask)."""
        for site, mask in experts.items():
            self._doomed[site] = self._doomed.get(site, 0) | mask

    def cut(self, site: int, mask: int) -> None:
        """Take no more calls for these, and look again at those that wait."""
        if mask:
            self._cut[site] = self._cut.get(site, 0) | mask
            self.version += 1

    def settle(self, site: int, experts: Iterable[int]) -> None:
        """End the change of a site, made or given up: the engine holds exactly these, and they are served."""
        self._doomed.pop(site, None)
        self._cut.pop(site, None)
        mask = mask_of(experts)
        if mask:
            self._engine[site] = mask
        else:
            self._engine.pop(site, None)
