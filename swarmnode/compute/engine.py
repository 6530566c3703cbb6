"""Computes the experts of a bank with llama.cpp's own kernels, bit for bit as a local run would.

Graphs are cached per (site, number of pairs, pairs per row of x) and share one piece of memory.
`dispatch/worker.py` calls this for others, the backbone for the experts it keeps itself; each engine has
its own threads, so several on a machine must share out the cores. Not thread safe: one thread at a time.

Bits: an answer equals the rows of a local run when the call contains all pairs that the local batch routes
to each of its experts. Ggml chooses its kernel per expert by their number (see `chunks.py`), so one
expert's pairs of one batch must not be spread over several calls, nor the pairs of several batches merged
into one.

What the bank holds of a site may be replaced while a call computes, by another engine over the same bank too: a call
keeps the `HeldSite` that it began with, and graphs of an earlier one are dropped, not run.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.chunks import chunk_rows, plan_chunks
from swarmnode.compute.device import Backend
from swarmnode.compute.engine_api import (
    F32Array,
    I32Array,
    SlotArray,
    Stack,
    Swap,
    add_weighted_rows,
    check_pairs,
    check_sums,
    refuse_site,
)
from swarmnode.compute.expert_bank import ExpertBank, HeldSite
from swarmnode.compute.graph import SiteGraph
from swarmnode.errors import BadCall, ComputeError

# A cached graph is about 10 KB of tensor headers and saves about 150 µs. Decode steps of a 100-layer model
# with up to 10 different pair counts per layer fit.
MAX_GRAPHS = 1024


class ExpertEngine:
    """Implements `Engine` on the experts of a bank. Close the engine to free its graphs and threads."""

    def __init__(self, bank: ExpertBank, *, threads: int = 1) -> None:
        bank.acquire()
        self._bank = bank
        self._graphs: OrderedDict[tuple[int, int, int], SiteGraph] = OrderedDict()
        self._generations: dict[int, int] = {}  # site -> the generation of HeldSite that its graphs are of
        self._backend: Backend | None = None
        try:
            self._backend = Backend(bank.device, threads)
        except BaseException:
            bank.release()
            raise
        self._kernel_s = 0.0
        self._allocator: int = ggml.gallocr_new(ggml.backend_dev_buffer_type(bank.device.address))

    @property
    def holdings(self) -> Mapping[int, tuple[int, ...]]:
        """See `Engine.holdings`."""
        return self._bank.holdings

    @property
    def kernel_s(self) -> float:
        """Seconds that ggml's kernels have computed so far: what a local run would have spent too."""
        return self._kernel_s

    def prepare(self, site: int, stacks: Mapping[str, Stack]) -> Swap:
        """See `Engine.prepare`."""
        return self._bank.prepare(site, stacks)

    def replace(self, site: int, stacks: Mapping[str, Stack] | None) -> None:
        """Hold exactly these stacks of a site from now on, nothing without them. Raises as `prepare` does."""
        self.prepare(site, stacks or {})()
        self._forget_graphs(site)

    def raw_rows(self, site: int, x: F32Array, rows: I32Array, experts: I32Array) -> F32Array:
        """See `Engine.raw_rows`."""
        held = self._held(site, experts)
        slots = check_pairs(held.site, held.slots, x, rows, experts)
        out = np.empty((len(rows), held.site.d_out), np.float32)
        for chosen in self._chunks(held, slots):
            if chosen is None:
                self._compute(held, x, rows, slots, out)
            else:
                part = np.empty((len(chosen), held.site.d_out), np.float32)
                self._compute(held, x, rows[chosen], slots[chosen], part)
                out[chosen] = part
        return out

    def partial_sums(
        self,
        site: int,
        x: F32Array,
        rows: I32Array,
        experts: I32Array,
        weights: F32Array | None,
        tokens: I32Array,
        n_tokens: int,
    ) -> F32Array:
        """See `Engine.partial_sums`. The order of addition is that of the pairs within each chunk."""
        held = self._held(site, experts)
        slots = check_pairs(held.site, held.slots, x, rows, experts)
        check_sums(held.site, weights, tokens, n_tokens, len(rows))
        out = np.zeros((n_tokens, held.site.d_out), np.float32)
        for chosen in self._chunks(held, slots):
            if chosen is None:
                part = np.empty((len(rows), held.site.d_out), np.float32)
                self._compute(held, x, rows, slots, part)
                add_weighted_rows(out, part, weights, tokens)
            else:
                part = np.empty((len(chosen), held.site.d_out), np.float32)
                self._compute(held, x, rows[chosen], slots[chosen], part)
                add_weighted_rows(out, part, None if weights is None else weights[chosen], tokens[chosen])
        return out

    def close(self) -> None:
        """Free graphs, memory and threads, and let go of the bank. Does nothing the second time."""
        if self._backend is None:
            return
        self._drop_graphs()
        ggml.gallocr_free(self._allocator)
        self._backend.close()
        self._backend = None
        self._bank.release()

    def _held(self, site: int, experts: I32Array) -> HeldSite:
        if self._backend is None:
            raise BadCall("the engine is closed")
        held = self._bank.sites.get(site)
        if held is None:
            self._forget_graphs(site)
            refuse_site(site, self._bank.known.get(site), experts)
        if self._generations.get(site) != held.generation:
            self._forget_graphs(site)
            self._generations[site] = held.generation
        return held

    @staticmethod
    def _chunks(held: HeldSite, slots: SlotArray) -> list[npt.NDArray[np.intp] | None]:
        """Indices of the pairs of each graph to run; None stands for all of them as they come."""
        limit = chunk_rows(held.row_bytes)
        if len(slots) <= limit:
            return [None] if len(slots) else []
        return [*plan_chunks(slots, limit)]

    def _compute(self, held: HeldSite, x: F32Array, rows: I32Array, slots: SlotArray, out: F32Array) -> None:
        """Fill out (n_pairs, d_out). All arguments are checked."""
        graph = self._graph(held, len(rows), _pairs_per_row(len(x), rows))
        if graph.host is not None:
            x_end, ids_end, out_end = graph.host
            if graph.per_row > 1:
                x_end[:] = x
            else:
                np.take(x, rows, axis=0, out=x_end, mode="clip")  # "clip" writes into `out` without a copy
            ids_end[:] = slots
            self._run(graph.graph)
            out[:] = out_end
        else:
            gathered = np.ascontiguousarray(x if graph.per_row > 1 else x[rows])
            ggml.backend_tensor_set(graph.x, gathered.ctypes.data, 0, gathered.nbytes)
            ggml.backend_tensor_set(graph.ids, slots.ctypes.data, 0, slots.nbytes)
            self._run(graph.graph)
            ggml.backend_tensor_get(graph.out, out.ctypes.data, 0, out.nbytes)

    def _run(self, graph: int) -> None:
        assert self._backend is not None
        began = time.perf_counter()
        self._backend.compute(graph)
        self._kernel_s += time.perf_counter() - began

    def _graph(self, held: HeldSite, n_pairs: int, per_row: int) -> SiteGraph:
        key = (held.site.index, n_pairs, per_row)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph
        graph = SiteGraph(held, n_pairs // per_row, per_row, self._bank.device)
        try:
            self._assign_memory(graph, held)
        except BaseException:
            graph.close()
            self._drop_graphs()  # their memory may be gone
            raise
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)[1].close()
        return graph

    def _assign_memory(self, graph: SiteGraph, held: HeldSite) -> None:
        """Place the graph's rows in the memory that all graphs share; only one runs at a time.

        When that memory has to grow it moves, and every cached graph points at the old one: they are
        dropped. It grows for the next power of two of rows, so that this happens seldom.
        """
        before = ggml.gallocr_get_buffer_size(self._allocator, 0)
        self._reserve(graph)
        if ggml.gallocr_get_buffer_size(self._allocator, 0) != before:
            self._drop_graphs()
            n_rows = min(1 << (graph.n_rows - 1).bit_length(), chunk_rows(held.row_bytes) // graph.per_row)
            if n_rows > graph.n_rows:
                template = SiteGraph(held, n_rows, graph.per_row, self._bank.device)
                try:
                    self._reserve(template)
                finally:
                    template.close()
                self._reserve(graph)
        if not ggml.gallocr_alloc_graph(self._allocator, graph.graph):
            raise ComputeError("the graph's memory could not be assigned")
        graph.bind()

    def _reserve(self, graph: SiteGraph) -> None:
        """Plan the graph's memory: alloc_graph alone trusts the last plan that had as many nodes."""
        if not ggml.gallocr_reserve(self._allocator, graph.graph):
            raise ComputeError(
                f"{self._bank.device.name}: no memory for {graph.n_rows} rows at once; send smaller batches"
            )

    def _forget_graphs(self, site: int) -> None:
        """Drop the graphs of a site: they name tensors that are there no more."""
        if self._generations.pop(site, None) is None:
            return
        for key in [key for key in self._graphs if key[0] == site]:
            self._graphs.pop(key).close()

    def _drop_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()


def _pairs_per_row(n_rows: int, rows: I32Array) -> int:
    """m where pairs come as m for row 0, m for row 1 … of all n_rows, as in a decode step; 1 otherwise."""
    n_pairs = len(rows)
    if n_rows in (1, n_pairs):
        return n_pairs // n_rows
    m, rest = divmod(n_pairs, n_rows)
    if rest or m < 2 or rows[0] or int(rows[-1]) != n_rows - 1:  # cheap tests first
        return 1
    regular = np.arange(n_rows, dtype=np.int32)[:, None] == rows.reshape(n_rows, m)
    return m if regular.all() else 1
