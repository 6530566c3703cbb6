"""Who passes, and what a layer falls back to."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.fidelity import LogitComparison
from swarmnode.gate.bounds import (
    LEAST_COSINE,
    LEAST_ROW,
    MOST_KL,
    STEPS,
    fallbacks,
    fit,
    most_kl,
    objection,
    passes_layer,
    row_objection,
)
from swarmnode.gate.coding import WIRES, Pair, pair_bytes

GOOD = LogitComparison(positions=4096, confident=4000, argmax=0.98, argmax_confident=0.9995, kl=3e-4, dnll=1e-4)
PAIRS: list[Pair] = list(product(WIRES, WIRES))


def cosines(**worse: float) -> dict[Pair, float]:
    """Of each pair, as if errors added up; `worse` are single directions, such as int8_back=0.9."""
    error = {"f32": 0.0, "f16": 1e-5, "int8": 2e-4, "fp8": 9e-4}
    return {
        (out, back): 1
        - (1 - worse.get(f"{out}_out", 1 - error[out]))
        - (1 - worse.get(f"{back}_back", 1 - error[back]) if back != "f32" else 0)
        for out, back in PAIRS
    }


class TestFit:
    def test_what_passes_stays(self) -> None:
        kept: list[Pair] = [("f32", "f32"), ("f16", "f16"), ("int8", "int8"), ("int8", "f16"), ("fp8", "int8")]
        for wanted in kept:
            assert fit(cosines(), wanted, 256, 256) == wanted

    def test_the_direction_that_fails_falls_back(self) -> None:
        assert fit(cosines(int8_back=0.98), ("int8", "int8"), 256, 256) == ("int8", "f16")
        assert fit(cosines(int8_out=0.98), ("int8", "int8"), 256, 256) == ("f16", "int8")
        assert fit(cosines(int8_out=0.98, f16_out=0.99), ("int8", "int8"), 256, 256) == ("f32", "int8")
        assert fit(cosines(int8_out=0.98, int8_back=0.98), ("int8", "int8"), 256, 256) == ("f16", "f16")
        assert fit(cosines(f16_back=0.9), ("f16", "f16"), 256, 256) == ("f16", "f32")

    def test_both_ways_together_may_fail_where_each_alone_passes(self) -> None:
        """The cheaper of the two repairs is taken, of equal ones the closer."""
        found = cosines(fp8_out=0.9990, fp8_back=0.9991)
        assert fit(found, ("fp8", "fp8"), 256, 256) == ("f16", "fp8")
        assert fit(found, ("fp8", "fp8"), 1024, 256) == ("fp8", "f16")

    def test_f32_is_left_when_nothing_passes(self) -> None:
        assert fit(dict.fromkeys(PAIRS, -1.0), ("int8", "fp8"), 256, 256) == ("f32", "f32")
        assert fit(dict.fromkeys(PAIRS, float("nan")), ("int8", "fp8"), 256, 256) == ("f32", "f32")

    @given(
        st.fixed_dictionaries({pair: st.floats(0.99, 1.0) for pair in PAIRS}),
        st.sampled_from(PAIRS),
        st.integers(1, 9000),
        st.integers(1, 9000),
    )
    def test_never_coarser_never_failing_never_dearer(
        self, lowest: dict[Pair, float], wanted: Pair, d_in: int, d_out: int
    ) -> None:
        chosen = fit(lowest, wanted, d_in, d_out)
        assert chosen[0] in STEPS[wanted[0]]
        assert chosen[1] in STEPS[wanted[1]]
        assert chosen == ("f32", "f32") or lowest[chosen] >= LEAST_COSINE
        for other in fallbacks(wanted):
            if passes_layer(lowest[other]):
                assert pair_bytes(chosen, d_in, d_out) <= pair_bytes(other, d_in, d_out)


class TestObjection:
    def test_a_good_model_has_none(self) -> None:
        assert objection(GOOD, MOST_KL) == ""

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"argmax_confident": 0.9979}, "clear argmax 0.9979 < 0.998 (8 of 4000 differ)"),
            ({"kl": 1.1e-3}, "KL 1.10e-03 > 1.00e-03"),
            ({"dnll": 0.0031}, "ΔNLL +0.0031"),
            ({"dnll": -0.0031}, "ΔNLL -0.0031"),
            ({"broken": 1}, "NaN or infinity"),
            ({"kl": float("nan")}, "KL"),
            ({"dnll": float("nan")}, "ΔNLL"),
            ({"argmax_confident": float("nan")}, "clear argmax"),
            ({"confident": 511, "argmax_confident": 1.0}, "only 511 of 4096 positions have a clear argmax, 512 are"),
        ],
    )
    def test_each_bound(self, change: dict[str, float], why: str) -> None:
        assert why in objection(replace(GOOD, **change), MOST_KL)  # type: ignore[arg-type]  # floats, and one count

    def test_plain_argmax_is_not_judged(self) -> None:
        assert objection(replace(GOOD, argmax=0.5), MOST_KL) == ""

    def test_the_bound_for_kl_follows_what_quantisation_costs(self) -> None:
        assert most_kl(None) == MOST_KL
        assert most_kl(4.8e-3) == pytest.approx(7.2e-4)
        assert objection(GOOD, most_kl(1e-3)) != ""


def test_the_lowest_row() -> None:
    good = dict(LEAST_ROW)
    assert row_objection(good, "row") == ""
    assert row_objection({**good, "int8": 0.9984}, "row") == "row cosine 0.9984000 with int8, 0.9985 is the least"
    assert "layer cosine nan with f16" in row_objection({**good, "f16": float("nan")}, "layer")
    assert "with partial_f32" in row_objection({}, "layer")
