"""The engine without ggml keeps the protocol: same checks, deterministic rows, sums in pair order."""

from __future__ import annotations

import numpy as np
import pytest

from swarmnode.bench.synthetic import swiglu_site
from swarmnode.compute.engine_api import Engine
from swarmnode.compute.null_engine import NullEngine
from swarmnode.compute.recipe import Site
from swarmnode.errors import BadCall, NobodyHolds, RecipeError
from swarmnode.model.slicing import StackedTensor

SITE: Site = swiglu_site(32, 64, 8, 2, types=(0, 0, 0), index=2)[0]
ROWS, EXPERTS = np.array([0, 0, 1, 2], np.int32), np.array([1, 5, 5, 1], np.int32)
X = np.random.default_rng(0).standard_normal((3, 32), np.float32)


def engine(*held: int, seed: int = 0) -> Engine:
    return NullEngine([SITE], {2: held}, seed)


def test_rows_depend_only_on_seed_site_expert_and_x() -> None:
    whole = engine(1, 5).raw_rows(2, X, ROWS, EXPERTS)
    assert whole.shape == (4, 32)
    assert whole.dtype == np.float32
    one = engine(5, 3).raw_rows(2, X[1:2], np.zeros(1, np.int32), np.array([5], np.int32))
    assert one.tobytes() == whole[2:3].tobytes()
    assert not np.array_equal(whole[0], whole[1])
    assert not np.array_equal(engine(1, 5, seed=1).raw_rows(2, X, ROWS, EXPERTS), whole)


def test_partial_sums_add_up_over_workers() -> None:
    weights = np.array([0.5, 0.25, 1.0, 2.0], np.float32)
    rows = engine(1, 5).raw_rows(2, X, ROWS, EXPERTS) * weights[:, None]
    expected = np.stack([rows[0] + rows[1], rows[2], rows[3], np.zeros(32, np.float32)])
    sums = engine(1, 5).partial_sums(2, X, ROWS, EXPERTS, weights, ROWS, 4)
    np.testing.assert_array_equal(sums, expected)


def test_sums_of_many_pairs_have_the_bits_of_sums_of_few() -> None:
    tokens = np.random.default_rng(1).integers(0, 4, 60).astype(np.int32)
    experts = np.random.default_rng(2).integers(0, 8, 60).astype(np.int32)
    rows = (tokens % 3).astype(np.int32)
    every = engine(*range(8))
    sums = every.partial_sums(2, X, rows, experts, None, tokens, 4)
    for token in range(4):
        total = np.zeros(32, np.float32)
        for row in every.raw_rows(2, X, rows[tokens == token], experts[tokens == token]):
            total += row
        assert sums[token].tobytes() == total.tobytes()


def test_experts_come_and_go() -> None:
    def stacks(*experts: int) -> dict[str, StackedTensor]:
        return {name: StackedTensor(name, 0, (1,), 4, experts, np.empty(0, np.uint8)) for name in SITE.tensors}

    changing, whole = engine(5), engine(1, 5)
    expected = whole.raw_rows(2, X, ROWS, EXPERTS)
    swap = changing.prepare(2, stacks(1, 5))
    assert changing.holdings == {2: (5,)}
    swap()
    assert changing.holdings == {2: (1, 5)}
    assert changing.raw_rows(2, X, ROWS, EXPERTS).tobytes() == expected.tobytes()
    changing.prepare(2, {})()
    assert changing.holdings == {}
    with pytest.raises(NobodyHolds):
        changing.raw_rows(2, X, ROWS, EXPERTS)
    with pytest.raises(BadCall, match="no such site"):
        changing.prepare(0, {})
    for wrong in (stacks(1, 1), stacks(8), stacks(1) | {SITE.tensors[0]: stacks(2)[SITE.tensors[0]]}):
        with pytest.raises(RecipeError):
            changing.prepare(2, wrong)


def test_refusals() -> None:
    held = engine(1)
    with pytest.raises(NobodyHolds, match="layer 2: nobody reachable holds expert 5"):
        held.raw_rows(2, X, ROWS, EXPERTS)
    with pytest.raises(BadCall, match="outside 0"):
        held.raw_rows(2, X, ROWS, EXPERTS + np.int32(7))
    with pytest.raises(BadCall, match="no such site"):
        held.raw_rows(0, X, ROWS, EXPERTS)
    held.close()
    with pytest.raises(BadCall, match="closed"):
        held.raw_rows(2, X, ROWS, EXPERTS)
