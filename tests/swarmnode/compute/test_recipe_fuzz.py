"""Invariant: a recipe raises RecipeError, or builds and computes; a failed GGML_ASSERT would end pytest."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.bench.synthetic import random_stacks
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.ggml_enums import GLU_OPS, UNARY_OPS
from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.compute.recipe import Recipe, Site, Step, check_site
from swarmnode.compute.recipe_check import MAX_STEPS, WHITELIST
from swarmnode.errors import RecipeError

Shapes = dict[str, tuple[tuple[int, ...], int]]

N_EXPERT = 3
FLOATS = [TYPE_BY_NAME[name].id for name in ("F32", "F16", "BF16")]
BLOCKS = [*FLOATS, *(TYPE_BY_NAME[name].id for name in ("Q8_0", "Q4_0", "Q5_1", "MXFP4"))]
WIDTHS = st.sampled_from([1, 2, 3, 4, 32, 64])
FINITE = st.floats(-4, 4, width=32)
WORDS = st.one_of(
    st.integers(-1, 8),
    st.sampled_from([0x3F800000, 0x7F800000, -0x800000, 0x7FC00000, 10, 21, 22, 40, 2**31 - 1, -(2**31)]),
    st.integers(-(2**33), 2**33),
)
OPS = st.sampled_from([*sorted(WHITELIST), "MUL_MAT", "SOFT_MAX", "NONE", ""])


def word(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


@st.composite
def good_sites(draw: st.DrawFn) -> tuple[Site, Shapes]:
    """A site that must pass: every step fits, and the last makes the output depend on x and the expert."""
    shapes: Shapes = {}
    steps: list[Step] = []
    rows: list[tuple[str, int]] = [("x", draw(WIDTHS))]
    d_in = rows[0][1]

    def tensor(*ne: int, kind: int | None = None) -> str:
        kinds = BLOCKS if ne[0] % 32 == 0 else FLOATS
        shapes[f"tensor {len(shapes)}"] = (ne, draw(st.sampled_from(kinds)) if kind is None else kind)
        return f"t{len(shapes) - 1}"

    def add(op: str, width: int, sources: tuple[str, ...], *params: int) -> None:
        steps.append(Step(op, sources, params))
        rows.append((f"s{len(steps) - 1}", width))

    for _ in range(draw(st.integers(0, 8))):
        source, width = draw(st.sampled_from(rows))
        partners = [name for name, w in rows if w == width]
        op = draw(st.sampled_from(sorted(WHITELIST)))
        match op:
            case "MUL_MAT_ID":
                wider = draw(WIDTHS)
                add(op, wider, (tensor(width, wider), source), *draw(st.sampled_from([(), (10,), (0, 0, 0, 20)])))
            case "ADD_ID":
                add(op, width, (source, tensor(width, kind=0)))
            case "GET_ROWS":
                narrow = draw(st.sampled_from([1, width]))
                add(op, narrow, (tensor(narrow, kind=0),))
            case "GLU":
                name = draw(st.sampled_from(GLU_OPS))
                words = [GLU_OPS.index(name)]
                limit = word(abs(draw(FINITE)))
                if name.startswith("SWIGLU_"):
                    words += [0, word(draw(FINITE)) if name == "SWIGLU_OAI" else 0, limit]
                if width % 2 == 0 and draw(st.booleans()):
                    words[1:2] = [draw(st.integers(0, 1))]
                    add(op, width // 2, (source,), *words)
                else:
                    add(op, width, (source, draw(st.sampled_from(partners))), *words)
            case "ADD" | "SUB" | "MUL" | "DIV":
                fitting = partners + [name for name, w in rows if w == 1]
                add(op, width, (source, draw(st.sampled_from(fitting))))
            case "UNARY":
                add(op, width, (source,), draw(st.integers(0, len(UNARY_OPS) - 1).filter(lambda i: i != 17)))
            case "CLAMP":
                low, high = sorted([draw(FINITE), draw(st.sampled_from([float("inf"), 0.5, 5.0]))])
                add(op, width, (source,), word(low), word(high))
            case "SCALE":
                add(op, width, (source,), word(draw(FINITE)), word(draw(FINITE)))
            case "VIEW":
                first = draw(st.integers(0, width - 1))
                length = draw(st.integers(1, width - first))
                add(op, length, (source,), first, length)
            case _:
                add(op, width, (source,))
    source, width = rows[-1]
    add("MUL_MAT_ID", width, (tensor(d_in, width), "x"))
    add("ADD", width, (rows[-1][0], source))
    return Site(0, 0, d_in, width, N_EXPERT, 2, tuple(shapes), Recipe(tuple(steps), "after")), shapes


@st.composite
def mutated_sites(draw: st.DrawFn) -> tuple[Site, Shapes]:
    """A good site with one to three things changed: an op, a source, params, a shape, an order, a width."""
    site, shapes = draw(good_sites())
    steps = list(site.recipe.steps)
    names = st.one_of(
        st.sampled_from(["x", *(f"s{i}" for i in range(len(steps) + 1)), *(f"t{i}" for i in range(len(shapes) + 1))]),
        st.sampled_from(["", "x1", "t-1", "s1.0", "s99", "t999999999999"]),
    )
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(steps) - 1))
        step = steps[at]
        match draw(st.sampled_from(["op", "source", "sources", "params", "swap", "shape", "type", "d_in", "d_out"])):
            case "op":
                steps[at] = msgspec.structs.replace(step, op=draw(OPS))
            case "source" if step.sources:
                changed = list(step.sources)
                changed[draw(st.integers(0, len(changed) - 1))] = draw(names)
                steps[at] = msgspec.structs.replace(step, sources=tuple(changed))
            case "sources":
                steps[at] = msgspec.structs.replace(step, sources=tuple(draw(st.lists(names, max_size=3))))
            case "params":
                steps[at] = msgspec.structs.replace(step, params=tuple(draw(st.lists(WORDS, max_size=5))))
            case "swap":
                other = draw(st.integers(0, len(steps) - 1))
                steps[at], steps[other] = steps[other], steps[at]
            case "shape":
                name = draw(st.sampled_from(sorted(shapes)))
                shapes[name] = (tuple(draw(st.lists(WIDTHS, max_size=3))), shapes[name][1])
            case "type":
                name = draw(st.sampled_from(sorted(shapes)))
                shapes[name] = (shapes[name][0], draw(st.integers(-1, 45)))
            case "d_in":
                site = msgspec.structs.replace(site, d_in=draw(WIDTHS))
            case "d_out":
                site = msgspec.structs.replace(site, d_out=draw(WIDTHS))
    return msgspec.structs.replace(site, recipe=Recipe(tuple(steps), "after")), shapes


def compute(site: Site, shapes: Shapes, n_pairs: int) -> None:
    bank = ExpertBank([site], {0: random_stacks(shapes, range(N_EXPERT), distinct=1)}, "cpu")
    engine = ExpertEngine(bank)
    x = np.linspace(-2, 2, n_pairs * site.d_in, dtype=np.float32).reshape(n_pairs, site.d_in)
    pairs = np.arange(n_pairs, dtype=np.int32)
    assert engine.raw_rows(0, x, pairs, pairs % N_EXPERT).shape == (n_pairs, site.d_out)
    engine.close()
    bank.close()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(good_sites(), st.sampled_from([1, 2, 9]))
def test_recipes_that_fit_together_pass_and_compute(made: tuple[Site, Shapes], n_pairs: int) -> None:
    site, shapes = made
    check_site(site, shapes)
    compute(site, shapes, n_pairs)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated_sites(), st.sampled_from([1, 2, 9]))
def test_mutated_recipes_are_refused_or_compute(made: tuple[Site, Shapes], n_pairs: int) -> None:
    site, shapes = made
    try:
        check_site(site, shapes)
    except RecipeError:
        return
    compute(site, shapes, n_pairs)


@pytest.mark.parametrize("step", [Step("GET_ROWS", ("t1",)), Step("VIEW", ("x",), (1, 2)), Step("SQR", ("x",))])
def test_the_longest_recipes_have_room(step: Step) -> None:
    shapes: Shapes = {"w": ((4, 4), 0), "b": ((1,), 0)}
    steps = (step,) * (MAX_STEPS - 1)
    site = Site(0, 0, 4, 4, N_EXPERT, 2, ("w", "b"), Recipe((*steps, Step("MUL_MAT_ID", ("t0", "x"))), "after"))
    check_site(site, shapes)
    compute(site, shapes, 3)
