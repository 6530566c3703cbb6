"""The recipe of an expert FFN: which ggml operations turn a row x into one expert's output row.

It is read off llama.cpp's own graph (`backbone/graph_trace.py`), stored in the manifest, and is all a
worker needs to compute: there is no per-model code. Pure data; `recipe_check.py` holds the checks,
`graph.py` builds the ggml graph.

A recipe that came over the network or from a file is hostile until `check_site` has passed it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One ggml operation.

    `op` is ggml's own name of it. `sources` are "x" (the input rows), "s<i>" (the result of step i) or
    "t<i>" (expert tensor i of the site); the expert ids of MUL_MAT_ID, ADD_ID and GET_ROWS are implied.
    `params` are ggml's op_params as int32 words, trailing zeros cut, floats bit-cast; for VIEW they are
    (first element, length) along dimension 0.
    """

    op: str
    sources: tuple[str, ...]
    params: tuple[int, ...] = ()


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The steps of one expert FFN; the last one yields the output row of each (token, expert) pair.

    `weights` says where the router weight comes in: "after" multiplies that row when the experts are
    combined; "before" means that the x rows are already weighted (llama4), one x row per pair.
    """

    steps: tuple[Step, ...]
    weights: Literal["after", "before"]


class Site(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One MoE call in a model's graph. `tensors[i]` is the GGUF name that "t<i>" of the recipe stands for."""

    index: int
    layer: int
    d_in: int
    d_out: int
    n_expert: int
    n_used: int
    tensors: tuple[str, ...]
    recipe: Recipe


def check_site(site: Site, shapes: Mapping[str, tuple[tuple[int, ...], int]]) -> None:
    """Refuse a site that the engine could not compute: op whitelist, every shape, every size.

    `shapes`: name -> (ne of ONE expert's slice, ggml type). Whatever passes builds and computes without a
    failed GGML_ASSERT (which would end the process). Raises RecipeError.
    """
    from swarmnode.compute.recipe_check import check  # noqa: PLC0415  the checks need these structs

    check(site, shapes)


def recipes_hash(sites: Sequence[Site]) -> str:
    """SHA-256 (hex) over the canonical encoding of all sites in order: equal hashes, equal computation."""
    return hashlib.sha256(msgspec.msgpack.encode(list(sites))).hexdigest()
