"""The enumerations of ggml that recipes refer to, and the types the engine multiplies with. Pure tables.

Order and values are ggml's own; `ggml.check_layout` compares them with the installed library. Block sizes
of types are in `compute/ggml_types.py`. Called by `recipe.py` and `ggml.py`.
"""

from __future__ import annotations

F32, F16, I32 = 0, 1, 26

# Every tensor type that the CPU backend multiplies a float row with (`vec_dot` is set in its
# `type_traits_cpu`).
MATMUL_TYPES = frozenset(
    {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 29, 30, 34, 35, 39, 40, 41, 42}
)

UNARY_OPS = (
    "ABS", "SGN", "NEG", "STEP", "TANH", "ELU", "RELU", "SIGMOID", "GELU", "GELU_QUICK", "SILU", "HARDSWISH",
    "HARDSIGMOID", "EXP", "EXPM1", "SOFTPLUS", "GELU_ERF", "XIELU", "FLOOR", "CEIL", "ROUND", "TRUNC",
)  # fmt: skip
GLU_OPS = ("REGLU", "GEGLU", "SWIGLU", "SWIGLU_OAI", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_CLAMP")

# enum ggml_prec: the accumulator and source precision that a MUL_MAT_ID may ask for
PRECISIONS = frozenset({0, 10, 15, 20, 30, 40})

# enum ggml_tensor_flag
FLAG_INPUT, FLAG_OUTPUT, FLAG_COMPUTE = 1, 2, 16
