"""A worker that cheats, or whose hardware errs: an engine whose rows are now and then not what they should be.

A test double for whatever checks answers. Where it does not tamper, every bit is that of the engine it wraps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from swarmnode.compute.engine_api import Engine, F32Array, I32Array, Stack, Swap


class TamperingEngine:
    """Implements `Engine`: on average one row in `one_in` has noise of `noise` times its own norm added, seeded.

    A row is that of one (token, expert) pair; in partial sums the noise is weighted like the row. `tampered` has
    (site, expert) of every row changed so far, `rows` counts all.
    """

    def __init__(self, engine: Engine, *, one_in: float = 50.0, noise: float = 0.3, seed: int = 0) -> None:
        self._engine = engine
        self._chance, self._noise = 1.0 / one_in, noise
        self._random = np.random.default_rng(seed)
        self.tampered: list[tuple[int, int]] = []
        self.rows = 0

    @property
    def holdings(self) -> Mapping[int, tuple[int, ...]]:
        return self._engine.holdings

    def prepare(self, site: int, stacks: Mapping[str, Stack]) -> Swap:
        return self._engine.prepare(site, stacks)

    def raw_rows(self, site: int, x: F32Array, rows: I32Array, experts: I32Array) -> F32Array:
        out = self._engine.raw_rows(site, x, rows, experts)
        for pair in self._choose(site, experts):
            out[pair] += self._noise_of(out[pair])
        return out

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
        out = self._engine.partial_sums(site, x, rows, experts, weights, tokens, n_tokens)
        for pair in self._choose(site, experts):
            [row] = self._engine.raw_rows(site, x, rows[pair : pair + 1], experts[pair : pair + 1])
            out[tokens[pair]] += self._noise_of(row) * (np.float32(1) if weights is None else weights[pair])
        return out

    def close(self) -> None:
        self._engine.close()

    def _choose(self, site: int, experts: I32Array) -> list[int]:
        chosen = np.flatnonzero(self._random.random(len(experts)) < self._chance).tolist()
        self.rows += len(experts)
        self.tampered += [(site, int(experts[pair])) for pair in chosen]
        return chosen

    def _noise_of(self, row: F32Array) -> F32Array:
        noise = self._random.standard_normal(len(row)).astype(np.float32)
        noise *= np.float32(self._noise * np.linalg.norm(row) / np.linalg.norm(noise))
        return noise
