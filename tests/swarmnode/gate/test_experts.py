"""In-process experts behind a codec, against sums made by hand: no model, no ggml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from swarmnode.backbone.hook import F32, I32
from swarmnode.compute.engine_api import Stack, Swap
from swarmnode.compute.recipe import Recipe, Site
from swarmnode.dispatch.codec import Buffer, WireType, encode_rows
from swarmnode.errors import ModelError
from swarmnode.fidelity import row_cosines
from swarmnode.gate.coding import WIRES, Codec, Pair
from swarmnode.gate.experts import ALL_PAIRS, CodedExperts, TeacherForced

N, K, D = 5, 3, 256


def make_site(weights: str) -> Site:
    recipe = Recipe((), "before" if weights == "before" else "after")
    return Site(0, 7, D, D, 8, K, ("a", "b", "c"), recipe)


@dataclass
class Scaled:
    """Expert e multiplies x by e + 1."""

    site: Site

    @property
    def holdings(self) -> Mapping[int, tuple[int, ...]]:
        return {self.site.index: tuple(range(self.site.n_expert))}

    def prepare(self, site: int, stacks: Mapping[str, Stack]) -> Swap:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
        assert site == self.site.index
        return x[rows] * (experts + 1).astype(np.float32)[:, None]

    def partial_sums(
        self, site: int, x: F32, rows: I32, experts: I32, weights: F32 | None, tokens: I32, n_tokens: int
    ) -> F32:
        assert (weights is None) == (self.site.recipe.weights == "before")
        out = np.zeros((n_tokens, D), np.float32)
        terms = self.raw_rows(site, x, rows, experts)
        for i, token in enumerate(tokens):
            out[token] += terms[i] if weights is None else terms[i] * weights[i]
        return out


def call(weights: str) -> tuple[F32, I32, F32, F32]:
    """x, ids, weights, and the sum that should come out."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 8, (N, K)).astype(np.int32)
    w = rng.random((N, K)).astype(np.float32)
    if weights == "before":
        x = rng.standard_normal((N * K, D)).astype(np.float32)
        return x, ids, np.ones_like(w), (x.reshape(N, K, D) * (ids + 1)[:, :, None]).sum(axis=1).astype(np.float32)
    x = rng.standard_normal((N, D)).astype(np.float32)
    return x, ids, w, (x[:, None] * ((ids + 1) * w)[:, :, None]).sum(axis=1).astype(np.float32)


@pytest.mark.parametrize("weights", ["before", "after"])
class TestBothPlacesOfTheWeights:
    def test_coded(self, weights: str) -> None:
        site = make_site(weights)
        x, ids, w, total = call(weights)
        experts = CodedExperts(Scaled(site), [site], Codec())
        assert row_cosines(total, experts.submit(0, x, ids, w).result()).min() > 1 - 1e-12
        most: dict[Pair, float] = {
            ("f16", "f16"): 1e-6,
            ("int8", "f32"): 2e-4,
            ("f32", "int8"): 2e-4,
            ("fp8", "fp8"): 2e-3,
        }
        for pair, error in most.items():
            experts.wires = {0: pair}
            assert 0 < 1 - row_cosines(total, experts.submit(0, x, ids, w).result()).min() < error
        assert experts.refused == 0

    def test_teacher_forced(self, weights: str) -> None:
        site = make_site(weights)
        x, ids, w, total = call(weights)
        forced = TeacherForced(Scaled(site), [site], Codec(), N)
        assert row_cosines(total, forced.submit(0, x, ids, w).result()).min() > 1 - 1e-12
        tails = forced.tails[0]
        assert {tail.count for tail in tails.values()} == {N}
        assert tails["f32", "f32"].lowest > 1 - 1e-12
        for wire in WIRES[1:]:
            both = tails[wire, wire].lowest
            assert both < tails["f32", "f32"].lowest
            assert tails["f16", "f16"].lowest >= both
        assert min(tails[pair].lowest for pair in ALL_PAIRS) > 0.997


def test_rows_that_a_client_would_refuse_never_reach_the_model() -> None:
    site = make_site("after")
    x, ids, w, _ = call("after")

    def broken(data: Buffer, wire: WireType, n: int, d: int) -> F32:
        rows = np.ones((n, d), np.float32)
        if wire is WireType.FP8:
            rows[1:2, 3] = np.nan
        return rows

    experts = CodedExperts(Scaled(site), [site], Codec(encode_rows, broken))
    experts.wires = {0: ("f32", "fp8")}
    rows = experts.submit(0, x, ids, w).result()
    assert np.isfinite(rows).all()
    assert not rows[1].any()
    assert experts.refused == 1
    forced = TeacherForced(Scaled(site), [site], Codec(encode_rows, broken), N)
    forced.submit(0, x, ids, w)
    assert forced.tails[0]["f32", "fp8"].lowest == -1.0


def test_a_model_that_makes_nan_by_itself() -> None:
    site = make_site("after")
    x, ids, w, _ = call("after")
    x[2, 2] = np.inf
    with pytest.raises(ModelError, match="layer 7: NaN or infinity without any wire"):
        TeacherForced(Scaled(site), [site], Codec(), N).submit(0, x, ids, w)
