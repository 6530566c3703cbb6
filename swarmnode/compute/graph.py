"""Builds the ggml graph of one site for a fixed number of pairs: the recipe, step by step.

Pairs are flattened: each is a row of its own with one expert, unless every row of x serves the same number
of pairs, which saves quantising it once for each. No padding and no dummy experts, and each pair's bits are
those of a local run, because ggml computes a row of MUL_MAT_ID the same whatever the shape of the ids.
Sites have passed `check_site`; nothing is checked here. Called by `engine.py`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from swarmnode.compute import ggml
from swarmnode.compute.device import Device
from swarmnode.compute.engine_api import F32Array, I32Array
from swarmnode.compute.expert_bank import HeldSite
from swarmnode.compute.ggml_enums import F32, I32
from swarmnode.compute.recipe import Step
from swarmnode.compute.recipe_check import float_param
from swarmnode.errors import ComputeError

FLOAT_BYTES = 4

# a memoryview of foreign memory, ten times faster than a ctypes array of that size and without a new type for each
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype, _memory.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


class SiteGraph:
    """A graph and its three ends: x [d_in, 1, n_rows], ids [per_row, n_rows], out [d_out, per_row, n_rows].

    Each row of x serves `per_row` pairs; 1 where the pairs are irregular and every one brings its own row.

    Owns its ggml context (tensor headers only). The numbers live in memory that `engine.py` assigns; after
    that `bind` gives numpy views of the ends where that memory is the host's.
    """

    def __init__(self, held: HeldSite, n_rows: int, per_row: int, device: Device) -> None:
        site = held.site
        n_steps = len(site.recipe.steps)
        n_nodes = 3 * n_steps + len(held.tensors) + 8  # GET_ROWS makes three tensors, VIEW two
        size = n_nodes * ggml.tensor_overhead() + ggml.graph_overhead_custom(n_nodes, False)
        self.context: int | None = ggml.init(ggml.InitParams(size, None, True))
        if not self.context:
            raise ComputeError("out of memory for a graph")
        n_pairs = n_rows * per_row
        self.n_rows, self.per_row = n_rows, per_row
        self.host: tuple[F32Array, I32Array, F32Array] | None = None
        self._shapes = (n_rows, site.d_in), (n_pairs,), (n_pairs, site.d_out)
        self.x = ggml.new_tensor_3d(self.context, F32, site.d_in, 1, n_rows)
        self.ids = ggml.new_tensor_2d(self.context, I32, per_row, n_rows)
        ggml.set_input(self.x)
        ggml.set_input(self.ids)
        self.out = self._build(site.recipe.steps, held.tensors)
        ggml.set_output(self.out)
        self.graph: int = ggml.new_graph_custom(self.context, n_nodes, False)
        ggml.build_forward_expand(self.graph, self.out)
        self._check_support(device)

    def _build(self, steps: Sequence[Step], tensors: Sequence[int]) -> int:
        results: list[int] = []
        for step in steps:
            sources = []
            for source in step.sources:
                if source == "x":
                    sources.append(self.x)
                else:
                    sources.append((tensors if source[0] == "t" else results)[int(source[1:])])
            results.append(BUILDERS[step.op](self, step.params, sources))
        return results[-1]

    def _check_support(self, device: Device) -> None:
        """Close and raise ComputeError where the device lacks an operation; it would abort later."""
        for i in range(ggml.graph_n_nodes(self.graph)):
            node = ggml.graph_node(self.graph, i)
            if not ggml.backend_dev_supports_op(device.address, node):
                name = ggml.op_name(ggml.TensorStruct.from_address(node).op)
                self.close()
                raise ComputeError(f"{device.name} cannot compute {name} of this model; use the CPU backend")

    def bind(self) -> None:
        """Map the ends as numpy arrays if they lie in host memory, until memory is assigned anew."""
        ends = [ggml.TensorStruct.from_address(end) for end in (self.x, self.ids, self.out)]
        if all(ggml.backend_buffer_is_host(end.buffer) for end in ends):
            x, ids, out = (_array(e.data, s) for e, s in zip(ends, self._shapes, strict=True))
            self.host = x, ids.view(np.int32), out

    def close(self) -> None:
        """Free the headers."""
        if self.context:
            self.host = None
            ggml.free(self.context)
            self.context = None


def _array(address: int, shape: tuple[int, ...]) -> F32Array:
    memory = _memory(address, FLOAT_BYTES * math.prod(shape), _WRITABLE)
    return np.frombuffer(memory, np.float32).reshape(shape)


class GraphEnds(Protocol):
    """What a builder needs of the graph it builds in."""

    @property
    def context(self) -> int | None:
        """The ggml context for new tensors."""

    @property
    def ids(self) -> int:
        """The tensor of expert slots."""


Builder: TypeAlias = Callable[[GraphEnds, Sequence[int], Sequence[int]], int]


def _with_params(tensor: int, params: Sequence[int]) -> int:
    """Copy op_params that the constructor of an operation does not take."""
    fields = ggml.TensorStruct.from_address(tensor)
    for i, word in enumerate(params):
        fields.op_params[i] = word
    return tensor


def _floats(params: Sequence[int]) -> tuple[float, float]:
    """Two float params, zero where they were cut."""
    words = (*params, 0, 0)
    return float_param(words[0]), float_param(words[1])


def _mul_mat_id(g: GraphEnds, params: Sequence[int], sources: Sequence[int]) -> int:
    return _with_params(ggml.mul_mat_id(g.context, sources[0], sources[1], g.ids), params)


def _add_id(g: GraphEnds, params: Sequence[int], sources: Sequence[int]) -> int:
    tensor: int = ggml.add_id(g.context, sources[0], sources[1], g.ids)
    return tensor


def _get_rows(g: GraphEnds, params: Sequence[int], sources: Sequence[int]) -> int:
    per_row, n_rows = ggml.TensorStruct.from_address(g.ids).ne[:2]
    flat = ggml.get_rows(g.context, sources[0], ggml.reshape_1d(g.context, g.ids, per_row * n_rows))
    width = ggml.TensorStruct.from_address(flat).ne[0]
    tensor: int = ggml.reshape_3d(g.context, flat, width, per_row, n_rows)
    return tensor


def _glu(g: GraphEnds, params: Sequence[int], sources: Sequence[int]) -> int:
    op, swapped = (*params, 0, 0)[:2]
    if len(sources) == 1:
        tensor = ggml.glu(g.context, sources[0], op, bool(swapped))
    else:
        tensor = ggml.glu_split(g.context, sources[0], sources[1], op)
    return _with_params(tensor, params)


def _unary(g: GraphEnds, params: Sequence[int], sources: Sequence[int]) -> int:
    tensor: int = ggml.unary(g.context, sources[0], (*params, 0)[0])
    return tensor


def _clamp(g: GraphEnds, params: Sequence[int], sources: Sequence[int]) -> int:
    tensor: int = ggml.clamp(g.context, sources[0], *_floats(params))
    return tensor


def _scale(g: GraphEnds, params: Sequence[int], sources: Sequence[int]) -> int:
    tensor: int = ggml.scale_bias(g.context, sources[0], *_floats(params))
    return tensor


def _view(g: GraphEnds, params: Sequence[int], sources: Sequence[int]) -> int:
    """A part of each row, made contiguous: with one expert a row, ggml's GLU aborts on a strided view."""
    first, length = (*params, 0)[:2]
    fields = ggml.TensorStruct.from_address(sources[0])
    ne, nb = fields.ne, fields.nb
    view = ggml.view_3d(g.context, sources[0], length, ne[1], ne[2], nb[1], nb[2], first * FLOAT_BYTES)
    tensor: int = ggml.cont(g.context, view)
    return tensor


def _plain(name: str) -> Builder:
    function = getattr(ggml, name)

    def build(g: GraphEnds, params: Sequence[int], sources: Sequence[int]) -> int:
        tensor: int = function(g.context, *sources)
        return tensor

    return build


BUILDERS: dict[str, Builder] = {
    "MUL_MAT_ID": _mul_mat_id,
    "ADD_ID": _add_id,
    "GET_ROWS": _get_rows,
    "GLU": _glu,
    "ADD": _plain("add"),
    "SUB": _plain("sub"),
    "MUL": _plain("mul"),
    "DIV": _plain("div"),
    "UNARY": _unary,
    "CLAMP": _clamp,
    "SCALE": _scale,
    "VIEW": _view,
    "CONT": _plain("cont"),
    "SQR": _plain("sqr"),
}
