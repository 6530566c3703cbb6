"""The last matrix of an expert is the one its engine multiplies with."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from swarmnode.bench.synthetic import random_stacks, swiglu_site
from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.compute.recipe import Recipe, Step
from swarmnode.model.last_matrix import LastMatrices


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_K", "Q6_K"])
def test_the_values_are_those_that_were_quantised(kind: str) -> None:
    types = (TYPE_BY_NAME["F32"].id, TYPE_BY_NAME["F32"].id, TYPE_BY_NAME[kind].id)
    site, shapes = swiglu_site(256, 512, 4, 2, types=types)
    stacks = random_stacks(shapes, range(1, 4))
    matrix = LastMatrices({0: site}, lambda index, experts: stacks)(0, 2)
    assert matrix is not None
    exact = np.random.default_rng((0, 2, 2)).standard_normal((256, 512), np.float32) / np.sqrt(512)
    tolerance = 0.12 if kind == "Q4_K" else 0.03
    assert np.linalg.norm(matrix - exact) < tolerance * np.linalg.norm(exact)
    assert LastMatrices({0: site}, lambda index, experts: stacks)(0, 0) is None  # not held


def test_what_ends_otherwise_or_cannot_be_read_has_none() -> None:
    site, shapes = swiglu_site(256, 256, 4, 2, types=(0, 0, 0))
    stacks = random_stacks(shapes, range(4))
    steps = (*site.recipe.steps, Step("ADD_ID", ("s3", "t2")))
    biased = msgspec.structs.replace(site, recipe=Recipe(steps, "after"))
    assert LastMatrices({0: biased}, lambda index, experts: stacks)(0, 1) is None
    unknown = {name: dataclasses.replace(tensor, ggml_type=31) for name, tensor in stacks.items()}
    assert LastMatrices({0: site}, lambda index, experts: unknown)(0, 1) is None
    assert LastMatrices({0: site}, lambda index, experts: {})(0, 1) is None
