"""Every pattern of expert FFN that llama.cpp builds: accepted by check_site and bit-equal to a local run."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from swarmnode.bench.local_graph import LocalGraph
from swarmnode.bench.synthetic import Shapes, random_stacks
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.engine_api import F32Array
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.ggml_enums import F32, GLU_OPS, UNARY_OPS
from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.compute.recipe import Recipe, Site, Step
from swarmnode.errors import BadCall

D, FF, N_EXPERT, N_USED = 64, 96, 8, 3
Q = TYPE_BY_NAME["Q8_0"].id
UP, GATE, GATE_UP = ((D, FF), Q), ((D, FF), Q), ((D, 2 * FF), Q)
DOWN = ((FF, D), Q)


def word(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def glu(name: str) -> int:
    return GLU_OPS.index(name)


def unary(name: str) -> tuple[int]:
    return (UNARY_OPS.index(name),)


MM_UP, MM_GATE = Step("MUL_MAT_ID", ("t0", "x")), Step("MUL_MAT_ID", ("t1", "x"))
THREE = {"up": UP, "gate": GATE, "down": DOWN}

# name -> (expert tensors in order, steps)
CASES: dict[str, tuple[Shapes, tuple[Step, ...]]] = {
    **{
        name.lower(): (
            THREE,
            (MM_UP, MM_GATE, Step("GLU", ("s1", "s0"), (glu(name),)), Step("MUL_MAT_ID", ("t2", "s2"))),
        )
        for name in ("SWIGLU", "GEGLU", "REGLU", "GEGLU_ERF", "GEGLU_QUICK")
    },
    "swiglu_clamp": (
        THREE,
        (
            MM_UP,
            MM_GATE,
            Step("GLU", ("s1", "s0"), (glu("SWIGLU_CLAMP"), 0, 0, word(1.25))),
            Step("MUL_MAT_ID", ("t2", "s2")),
        ),
    ),
    "merged gate_up": (
        {"gate_up": GATE_UP, "down": DOWN},
        (
            Step("MUL_MAT_ID", ("t0", "x")),
            Step("VIEW", ("s0",), (0, FF)),
            Step("VIEW", ("s0",), (FF, FF)),
            Step("GLU", ("s1", "s2"), (glu("SWIGLU"),)),
            Step("MUL_MAT_ID", ("t1", "s3")),
        ),
    ),
    "merged, one source": (
        {"gate_up": GATE_UP, "down": DOWN},
        (
            Step("MUL_MAT_ID", ("t0", "x")),
            Step("GLU", ("s0",), (glu("SWIGLU"), 1)),
            Step("MUL_MAT_ID", ("t1", "s1")),
        ),
    ),
    "gpt-oss": (
        {**THREE, "up_b": ((FF,), F32), "gate_b": ((FF,), F32), "down_b": ((D,), F32)},
        (
            MM_UP,
            Step("ADD_ID", ("s0", "t3")),
            MM_GATE,
            Step("ADD_ID", ("s2", "t4")),
            Step("GLU", ("s3", "s1"), (glu("SWIGLU_OAI"), 0, word(1.702), word(7.0))),
            Step("MUL_MAT_ID", ("t2", "s4")),
            Step("ADD_ID", ("s5", "t5")),
        ),
    ),
    "clamped swiglu": (
        THREE,
        (
            MM_UP,
            MM_GATE,
            Step("CLAMP", ("s0",), (word(-0.5), word(0.5))),
            Step("UNARY", ("s1",), unary("SILU")),
            Step("CLAMP", ("s3",), (word(float("-inf")), word(0.25))),
            Step("MUL", ("s4", "s2")),
            Step("MUL_MAT_ID", ("t2", "s5")),
        ),
    ),
    "situ": (
        THREE,
        (
            MM_UP,
            MM_GATE,
            Step("SCALE", ("s1",), (word(0.25),)),
            Step("UNARY", ("s2",), unary("TANH")),
            Step("SCALE", ("s3",), (word(4.0),)),
            Step("UNARY", ("s1",), unary("SIGMOID")),
            Step("MUL", ("s4", "s5")),
            Step("SCALE", ("s0",), (word(0.5), word(0.125))),
            Step("UNARY", ("s7",), unary("TANH")),
            Step("MUL", ("s6", "s8")),
            Step("MUL_MAT_ID", ("t2", "s9")),
        ),
    ),
    "squared relu without gate": (
        {"up": UP, "down": DOWN},
        (
            Step("MUL_MAT_ID", ("t0", "x")),
            Step("UNARY", ("s0",), unary("RELU")),
            Step("SQR", ("s1",)),
            Step("MUL_MAT_ID", ("t1", "s2")),
        ),
    ),
    "per-expert scales": (
        {**THREE, "up_s": ((), F32), "gate_s": ((1,), F32), "down_s": ((1,), F32)},
        (
            MM_UP,
            Step("GET_ROWS", ("t3",)),
            Step("MUL", ("s0", "s1")),
            MM_GATE,
            Step("GET_ROWS", ("t4",)),
            Step("MUL", ("s3", "s4")),
            Step("GLU", ("s5", "s2"), (glu("SWIGLU"),)),
            Step("MUL_MAT_ID", ("t2", "s6"), (10, 0, 0, 10)),
            Step("GET_ROWS", ("t5",)),
            Step("MUL", ("s7", "s8")),
        ),
    ),
    "other arithmetic": (
        THREE,
        (
            MM_UP,
            MM_GATE,
            Step("ADD", ("s0", "s1")),
            Step("SUB", ("s2", "s1")),
            Step("DIV", ("s3", "s1")),
            Step("CONT", ("s4",)),
            Step("MUL_MAT_ID", ("t2", "s5")),
        ),
    ),
}


def make_site(shapes: Shapes, steps: tuple[Step, ...], weights: str = "after") -> Site:
    recipe = Recipe(steps, "before" if weights == "before" else "after")
    return Site(0, 0, D, D, N_EXPERT, N_USED, tuple(shapes), recipe)


def batch(n_tokens: int) -> tuple[F32Array, np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    random = np.random.default_rng(n_tokens)
    ids = np.stack([random.permutation(N_EXPERT)[:N_USED] for _ in range(n_tokens)]).astype(np.int32)
    return random.standard_normal((n_tokens, D), np.float32) * 2, ids


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_rows_equal_a_local_run(name: str, n_tokens: int) -> None:
    shapes, steps = CASES[name]
    bank = ExpertBank([make_site(shapes, steps)], {0: random_stacks(shapes, range(N_EXPERT))}, "cpu")
    x, ids = batch(n_tokens)
    local = LocalGraph(bank.sites[0], n_tokens, bank.device)
    local.set_inputs(x, ids)
    local.compute()
    engine = ExpertEngine(bank)
    rows = np.repeat(np.arange(n_tokens, dtype=np.int32), N_USED)
    answer = engine.raw_rows(0, x, rows, ids.reshape(-1))
    expected = local.output()
    local.close()
    engine.close()
    bank.close()
    assert answer.any()
    assert answer.tobytes() == expected.tobytes()


def test_weights_before_the_experts_take_one_row_per_pair_and_no_weights() -> None:
    shapes, steps = CASES["swiglu"]
    site = make_site(shapes, steps, "before")
    bank = ExpertBank([site], {0: random_stacks(shapes, range(N_EXPERT))}, "cpu")
    x, ids = batch(4)
    weights = np.random.default_rng(1).random((4, N_USED, 1), np.float32)
    weighted = np.ascontiguousarray((x[:, None] * weights).reshape(-1, D))
    local = LocalGraph(bank.sites[0], 4, bank.device)
    local.set_inputs(weighted, ids)
    local.compute()
    expected = local.output()
    local.close()
    engine = ExpertEngine(bank)
    own_row = np.arange(4 * N_USED, dtype=np.int32)
    tokens = np.repeat(np.arange(4, dtype=np.int32), N_USED)
    answer = engine.raw_rows(0, weighted, own_row, ids.reshape(-1))
    sums = engine.partial_sums(0, weighted, own_row, ids.reshape(-1), None, tokens, 4)
    with pytest.raises(BadCall, match="pass no weights"):
        engine.partial_sums(0, weighted, own_row, ids.reshape(-1), weights.reshape(-1), tokens, 4)
    engine.close()
    bank.close()
    assert answer.tobytes() == expected.tobytes()
    np.testing.assert_array_equal(sums, (expected[:, 0] + expected[:, 1]) + expected[:, 2])
