"""A site's experts as llama.cpp itself lays them out: n_used experts for each of n_tokens rows, in one batch.

What a local run computes and what it costs: the yardstick of the engine's tests (equal bits) and of its
benchmark (equal time). Follows `build_moe_ffn`: strided views of a merged gate_up, REPEAT before GET_ROWS
of the scales. No running node uses it: a worker gets any number of experts per
token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.device import Backend, Device
from swarmnode.compute.engine_api import F32Array
from swarmnode.compute.expert_bank import HeldSite
from swarmnode.compute.ggml_enums import F32, I32
from swarmnode.compute.graph import BUILDERS, FLOAT_BYTES
from swarmnode.compute.recipe import Step
from swarmnode.errors import ComputeError


class LocalGraph:
    """x [d_in, 1 or n_used, n_tokens], ids [n_used, n_tokens] of slots → rows [d_out, n_used, n_tokens]."""

    def __init__(self, held: HeldSite, n_tokens: int, device: Device, *, threads: int = 1) -> None:
        site = held.site
        self._held, self._n_tokens = held, n_tokens
        n_nodes = 4 * len(site.recipe.steps) + len(held.tensors) + 8
        size = n_nodes * ggml.tensor_overhead() + ggml.graph_overhead_custom(n_nodes, False)
        self.context = ggml.init(ggml.InitParams(size, None, True))
        x_rows = site.n_used if site.recipe.weights == "before" else 1
        self._x = ggml.new_tensor_3d(self.context, F32, site.d_in, x_rows, n_tokens)
        self.ids = ggml.new_tensor_2d(self.context, I32, site.n_used, n_tokens)
        ggml.set_input(self._x)
        ggml.set_input(self.ids)
        self._out = self._build(site.recipe.steps)
        ggml.set_output(self._out)
        self._graph = ggml.new_graph_custom(self.context, n_nodes, False)
        ggml.build_forward_expand(self._graph, self._out)
        self._allocator = ggml.gallocr_new(ggml.backend_dev_buffer_type(device.address))
        if not ggml.gallocr_alloc_graph(self._allocator, self._graph):
            raise ComputeError("no memory for the local graph")
        self._backend = Backend(device, threads)

    def set_inputs(self, x: F32Array, slots: npt.NDArray[np.int32]) -> None:
        """x: (n_tokens, d_in), or (n_tokens × n_used, d_in) if weights come first; slots: like ids, transposed."""
        x, slots = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(slots, np.int32)
        ggml.backend_tensor_set(self._x, x.ctypes.data, 0, ggml.nbytes(self._x))
        ggml.backend_tensor_set(self.ids, slots.ctypes.data, 0, ggml.nbytes(self.ids))

    def compute(self) -> None:
        """Run the graph; this alone is the kernels' own time."""
        self._backend.compute(self._graph)

    def output(self) -> F32Array:
        """The rows: float32 (n_tokens, n_used, d_out)."""
        site = self._held.site
        out = np.empty((self._n_tokens, site.n_used, site.d_out), np.float32)
        ggml.backend_tensor_get(self._out, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        """Free everything but the weights."""
        ggml.gallocr_free(self._allocator)
        self._backend.close()
        ggml.free(self.context)

    def _build(self, steps: Sequence[Step]) -> int:
        results: list[int] = []
        for step in steps:
            sources = []
            for source in step.sources:
                if source == "x":
                    sources.append(self._x)
                else:
                    sources.append((self._held.tensors if source[0] == "t" else results)[int(source[1:])])
            if step.op == "VIEW":
                results.append(self._view(step.params, sources[0]))
            elif step.op == "GET_ROWS":
                results.append(self._scales(sources[0]))
            else:
                results.append(BUILDERS[step.op](self, step.params, sources))
        return results[-1]

    def _view(self, params: Sequence[int], source: int) -> int:
        fields = ggml.TensorStruct.from_address(source)
        first, length = (*params, 0)[:2]
        ne, nb = fields.ne, fields.nb
        tensor: int = ggml.view_3d(self.context, source, length, ne[1], ne[2], nb[1], nb[2], first * FLOAT_BYTES)
        return tensor

    def _scales(self, stack: int) -> int:
        width, n_slots = ggml.TensorStruct.from_address(stack).ne[:2]
        table = ggml.reshape_3d(self.context, stack, width, n_slots, 1)
        repeated = ggml.repeat_4d(self.context, table, width, n_slots, self._n_tokens, 1)
        tensor: int = ggml.get_rows(self.context, repeated, self.ids)
        return tensor
