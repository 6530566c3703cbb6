"""Sites, keys and requests that the dispatch tests share."""

from __future__ import annotations

from typing import Literal

import numpy as np

from swarmnode.compute.null_engine import NullEngine
from swarmnode.compute.recipe import Recipe, Site, Step
from swarmnode.dispatch.codec import F32
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.request import I32

D_IN, D_OUT, N_EXPERT, N_USED = 48, 40, 16, 4
MODEL = ModelKey("11" * 32, "22" * 32, "null 1", "tiny")


def make_site(
    index: int = 0, *, weights: Literal["after", "before"] = "after", n_expert: int = N_EXPERT, n_used: int = N_USED
) -> Site:
    recipe = Recipe((Step("MUL_MAT_ID", ("t0", "x")),), weights)
    return Site(index, index + 10, D_IN, D_OUT, n_expert, n_used, (f"blk.{index + 10}.ffn_up_exps.weight",), recipe)


SITES = (make_site(0), make_site(1), make_site(2, weights="before", n_used=2))


def everything(sites: tuple[Site, ...] = SITES) -> dict[int, tuple[int, ...]]:
    return {site.index: tuple(range(site.n_expert)) for site in sites}


def full_engine(sites: tuple[Site, ...] = SITES) -> NullEngine:
    return NullEngine(sites, everything(sites))


def make_input(site: Site, n: int, seed: int = 0) -> tuple[F32, I32, F32]:
    """x, ids and weights as the hook hands them over."""
    random = np.random.default_rng((seed, site.index, n))
    rows = n * site.n_used if site.recipe.weights == "before" else n
    x = random.standard_normal((rows, site.d_in)).astype(np.float32)
    ids = np.array([random.permutation(site.n_expert)[: site.n_used] for _ in range(n)], np.int32)
    weights = random.random((n, site.n_used)).astype(np.float32)
    return x, ids.reshape(n, site.n_used), weights


def local_rows(site: Site, x: F32, ids: I32, weights: F32) -> F32:
    """What one engine that holds everything makes of it, combined as ggml does: one rank after the other."""
    n, k = ids.shape
    engine = full_engine()
    total = np.zeros((n, site.d_out), np.float32)
    for token in range(n):
        for rank in range(k):
            row = token * k + rank if site.recipe.weights == "before" else token
            one = np.zeros(1, np.int32)
            out = engine.raw_rows(site.index, x[row : row + 1], one, ids[token, rank : rank + 1])[0]
            if site.recipe.weights == "after":
                out = out * weights[token, rank]
            total[token] = out if rank == 0 else total[token] + out
    return total
