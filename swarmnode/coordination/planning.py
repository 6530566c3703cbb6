"""What the founder's planner starts from: the model's figures, and the routing that earlier runs have seen.

    STATE/routing.bin   RoutingStats of the model run last (placement/routing.py); lost, it is learned anew

Called by `node.py`.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import numpy as np

from swarmnode.dispatch.options import DispatchOptions
from swarmnode.errors import SwarmnodeError
from swarmnode.model.atomic_file import write_atomically
from swarmnode.model.manifest import Manifest
from swarmnode.placement.request import PlanRequest
from swarmnode.placement.routing import RoutingStats

MAX_FILE = 1 << 30
log = logging.getLogger(__name__)


def plan_request(
    manifest: Manifest, *, partial: bool, value_bytes: int, replicas: int, local_budget: int
) -> PlanRequest:
    """The model as the planner sees it, without workers and routing. `value_bytes`: of one value on the wire."""
    sites = manifest.sites
    return PlanRequest(
        expert_bytes={site.index: manifest.expert_bytes(site.index) for site in sites},
        n_expert={site.index: site.n_expert for site in sites},
        weights={site.index: np.zeros(site.n_expert) for site in sites},
        workers=(),
        k={site.index: max(1, min(manifest.n_used, site.n_expert)) for site in sites},
        local_budget=local_budget,
        replicas=replicas,
        d_bytes=manifest.d_model * value_bytes,
        partial=partial,
        near_s=DispatchOptions().near_s,
    )


class RoutingFile:
    """Routing statistics that survive a restart. `stats` is used at once; `save` when the node ends."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self._model = path, bytes.fromhex(manifest.model_hash)
        sites = {site.index: site.n_expert for site in manifest.sites}
        self.stats = RoutingStats(sites)
        with contextlib.suppress(OSError, SwarmnodeError):
            if path.stat().st_size <= MAX_FILE:
                data = path.read_bytes()
                if data[:32] == self._model:
                    self.stats = RoutingStats.from_bytes(data[32:], sites)

    async def save(self) -> None:
        """Write it down; a disk that is full costs the statistics and nothing else."""
        try:
            self.stats.flush()
            write_atomically(self._path, self._model + self.stats.to_bytes())
        except (OSError, SwarmnodeError) as error:
            log.warning("routing_not_saved why=%r", str(error))
