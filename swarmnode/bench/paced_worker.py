"""A worker that computes nothing and takes as long as one would that needs so many seconds for a row.

    python -m swarmnode.bench.paced_worker up --paced=SECONDS …     as `swarmnode up …`

A process of its own, started by `prefill.py`.
"""

from __future__ import annotations

import runpy
import sys
import time

import numpy as np

import swarmnode.parts  # patched here alone
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.engine_api import F32Array, I32Array
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.pace import SETUP_ROWS

PACED = "--paced="


class PacedEngine(ExpertEngine):
    """Takes its time, and answers with its x. `pace_s` is set where it is installed."""

    pace_s = 0.0

    def raw_rows(self, site: int, x: F32Array, rows: I32Array, experts: I32Array) -> F32Array:
        """See `Engine.raw_rows`."""
        self._pass(len(rows), experts)
        return _as_wide(x, self._bank.known[site])[rows]

    def partial_sums(
        self,
        site: int,
        x: F32Array,
        rows: I32Array,
        experts: I32Array,
        weights: F32Array | None,
        tokens: I32Array,
        n_tokens: int,
    ) -> F32Array:
        """See `Engine.partial_sums`."""
        self._pass(len(rows), experts)
        return _as_wide(x, self._bank.known[site])[:n_tokens]

    def _pass(self, n_rows: int, experts: I32Array) -> None:
        took = self.pace_s * (n_rows + SETUP_ROWS * len(np.unique(experts)))
        self._kernel_s += took
        time.sleep(took)


def _as_wide(x: F32Array, site: Site) -> F32Array:
    return x if site.d_out == site.d_in else np.resize(x, (len(x), site.d_out))


def main() -> int:
    """`up` of a node whose engine is paced."""
    arguments = sys.argv[1:]
    PacedEngine.pace_s = next(float(one.removeprefix(PACED)) for one in arguments if one.startswith(PACED))
    vars(swarmnode.parts)["ExpertEngine"] = PacedEngine
    sys.argv = ["swarmnode", *(one for one in arguments if not one.startswith(PACED))]
    runpy.run_module("swarmnode", run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
