"""Random experts without a model file: sites and quantised stacks for tests and benchmarks.

Not used by a running node. Weights are quantised by ggml itself (`ggml_quantize_chunk`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.ggml_enums import GLU_OPS
from swarmnode.compute.ggml_types import BLOCK_TYPES, tensor_bytes
from swarmnode.compute.recipe import Recipe, Site, Step
from swarmnode.model.slicing import StackedTensor

Shapes = Mapping[str, tuple[tuple[int, ...], int]]

# the most common recipe by far: up, gate, SwiGLU, down
SWIGLU_STEPS = (
    Step("MUL_MAT_ID", ("t0", "x")),
    Step("MUL_MAT_ID", ("t1", "x")),
    Step("GLU", ("s1", "s0"), (GLU_OPS.index("SWIGLU"),)),
    Step("MUL_MAT_ID", ("t2", "s2")),
)


def swiglu_site(
    d_model: int, n_ff: int, n_expert: int, n_used: int, *, types: tuple[int, int, int], index: int = 0
) -> tuple[Site, Shapes]:
    """A site of separate up, gate and down experts of these ggml types, and the shapes for `check_site`."""
    names = tuple(f"blk.{index}.ffn_{part}_exps.weight" for part in ("up", "gate", "down"))
    extents = ((d_model, n_ff), (d_model, n_ff), (n_ff, d_model))
    site = Site(index, index, d_model, d_model, n_expert, n_used, names, Recipe(SWIGLU_STEPS, "after"))
    return site, {name: (ne, kind) for name, ne, kind in zip(names, extents, types, strict=True)}


def random_stacks(
    shapes: Shapes, experts: Sequence[int], *, seed: int = 0, distinct: int | None = None
) -> dict[str, StackedTensor]:
    """Stacks of random slices for these experts; the same seed and expert give the same slice everywhere.

    With `distinct` only so many slices are made and repeated, for large stacks whose content does not matter.
    """
    return {
        name: _random_stack(name, ne or (1,), kind, tuple(experts), (seed, number, distinct or len(experts)))
        for number, (name, (ne, kind)) in enumerate(shapes.items())
    }


def _random_stack(
    name: str,
    ne: tuple[int, ...],
    ggml_type: int,
    experts: tuple[int, ...],
    content: tuple[int, int, int],
) -> StackedTensor:
    *seed, distinct = content
    stride = tensor_bytes(ggml_type, ne)
    data = _aligned(stride * len(experts))
    for slot, expert in enumerate(experts):
        place = data[slot * stride : (slot + 1) * stride]
        if slot >= distinct:
            place[:] = data[(slot % distinct) * stride :][:stride]
            continue
        # 1/√k keeps the rows near unit size, as trained weights do
        values = np.random.default_rng((*seed, expert)).standard_normal(ne[::-1], np.float32) / np.sqrt(ne[0])
        quantize(values.astype(np.float32), ggml_type, place)
    return StackedTensor(name, ggml_type, ne, stride, experts, data)


def quantize(values: npt.NDArray[np.float32], ggml_type: int, out: npt.NDArray[np.uint8]) -> None:
    """Quantise rows of float32 (…, ne[0]) into `out`, which must have exactly their bytes."""
    values = np.ascontiguousarray(values)
    importance = np.ones(values.shape[-1], np.float32)
    needs_importance = ggml.quantize_requires_imatrix(ggml_type)
    written = ggml.quantize_chunk(
        ggml_type,
        values.ctypes.data,
        out.ctypes.data,
        0,
        values.size // values.shape[-1],
        values.shape[-1],
        importance.ctypes.data if needs_importance else None,
    )
    if written != len(out):
        raise ValueError(f"{BLOCK_TYPES[ggml_type].name}: {written} bytes written, {len(out)} expected")


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    raw = np.empty(size + ggml.TENSOR_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ggml.TENSOR_ALIGNMENT
    return raw[start : start + size]
