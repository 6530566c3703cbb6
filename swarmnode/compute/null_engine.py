"""An engine without ggml: a cheap deterministic function of (site, expert, x) in numpy.

For tests of everything around an engine, and for measuring dispatch alone. It holds no weights and its rows
mean nothing, but the same call gives the same bits on every machine, whoever computes it and however it is
batched.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from swarmnode.compute.engine_api import (
    F32Array,
    I32Array,
    Stack,
    Swap,
    add_weighted_rows,
    check_pairs,
    check_sums,
    refuse_site,
    slot_table,
)
from swarmnode.compute.recipe import Site
from swarmnode.errors import BadCall, RecipeError


class NullEngine:
    """Implements `Engine`. An expert maps x to a·x[j mod d_in] + b[j]; a and b are drawn from the seed."""

    def __init__(self, sites: Sequence[Site], holdings: Mapping[int, Sequence[int]], seed: int = 0) -> None:
        self._sites = {site.index: site for site in sites}
        self.holdings: Mapping[int, tuple[int, ...]] = {site: tuple(experts) for site, experts in holdings.items()}
        self._slots = {
            index: slot_table(self._sites[index].n_expert, experts) for index, experts in self.holdings.items()
        }
        self._seed = seed
        self._parameters: dict[tuple[int, int], tuple[np.float32, F32Array]] = {}
        self._closed = False

    def prepare(self, site: int, stacks: Mapping[str, Stack]) -> Swap:
        """See `Engine.prepare`. Of the stacks only `experts` counts."""
        described = self._sites.get(site)
        if described is None:
            raise BadCall(f"site {site}: this model has no such site")
        lists = {stack.experts for stack in stacks.values()}
        if len(lists) > 1 or any(len(set(ids)) != len(ids) for ids in lists):
            raise RecipeError(f"site {site}: the stacks name an expert twice, or hold different experts")
        experts = next(iter(lists), ())
        if not all(0 <= expert < described.n_expert for expert in experts):
            raise RecipeError(f"site {site}: the slots name an expert that does not exist")
        return functools.partial(self._swap, described, experts)

    def raw_rows(self, site: int, x: F32Array, rows: I32Array, experts: I32Array) -> F32Array:
        """See `Engine.raw_rows`."""
        described = self._site(site, experts)
        check_pairs(described, self._slots[site], x, rows, experts)
        out = np.empty((len(rows), described.d_out), np.float32)
        for i in range(len(rows)):
            factor, offset = self._expert(described, int(experts[i]))
            out[i] = np.resize(x[rows[i]], described.d_out) * factor + offset
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
        """See `Engine.partial_sums`."""
        described = self._site(site, experts)
        check_pairs(described, self._slots[site], x, rows, experts)
        check_sums(described, weights, tokens, n_tokens, len(rows))
        out = np.zeros((n_tokens, described.d_out), np.float32)
        add_weighted_rows(out, self.raw_rows(site, x, rows, experts), weights, tokens)
        return out

    def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True

    def _swap(self, site: Site, experts: tuple[int, ...]) -> None:
        if experts:
            self._slots[site.index] = slot_table(site.n_expert, experts)
        holdings = {index: others for index, others in self.holdings.items() if index != site.index}
        self.holdings = {**holdings, site.index: experts} if experts else holdings

    def _site(self, index: int, experts: I32Array) -> Site:
        if self._closed:
            raise BadCall("the engine is closed")
        if index not in self.holdings:
            refuse_site(index, self._sites.get(index), experts)
        return self._sites[index]

    def _expert(self, site: Site, expert: int) -> tuple[np.float32, F32Array]:
        key = (site.index, expert)
        if key not in self._parameters:
            random = np.random.default_rng((self._seed, *key))
            factor = np.float32(random.uniform(0.5, 1.5))
            self._parameters[key] = factor, random.uniform(-1, 1, site.d_out).astype(np.float32)
        return self._parameters[key]
