"""The experts a node holds, as ggml tensors on one device: a stack of slots per expert tensor of a site.

On the CPU the stack is used where it is mapped (zero copy); on other devices it is uploaded once. The plain
buffer type of the device is used, never a repacking one: repacked kernels add in another order than a plain
local run. Knows nothing of graphs. Built by `parts.py` from a slice store or from the GGUF itself;
`ExpertEngine` computes with it.

A site's stacks change as a whole and at once, while engines compute: each call works on the `HeldSite` that it
found, and the memory of one goes with the last reference to it.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.device import Device, choose_device
from swarmnode.compute.engine_api import SlotArray, Stack, Swap, slot_table
from swarmnode.compute.ggml_types import tensor_bytes
from swarmnode.compute.recipe import Site
from swarmnode.compute.recipe_check import check
from swarmnode.errors import BadCall, ComputeError, EngineError, RecipeError


class _Memory:
    """A site's ggml buffers and headers, and the arrays that they lie in: freed when the last reference goes.

    Not at the exit of the process, where an engine's thread may still compute.
    """

    def __init__(self, n_tensors: int) -> None:
        self.context: int = ggml.init(ggml.InitParams(n_tensors * ggml.tensor_overhead(), None, True))
        if not self.context:
            raise ComputeError("out of memory for tensor headers")
        self.buffers: list[int] = []
        self.data: list[npt.NDArray[np.uint8]] = []
        self.nbytes = 0
        weakref.finalize(self, _free, self.context, self.buffers, self.data).atexit = False


def _free(context: int, buffers: list[int], data: list[npt.NDArray[np.uint8]]) -> None:
    for buffer in buffers:
        ggml.backend_buffer_free(buffer)
    ggml.free(context)
    data.clear()


@dataclass(frozen=True, slots=True)
class HeldSite:
    """A site with its ggml tensors (addresses, in the order of site.tensors) and the slot of each expert
    held.

    `row_bytes` bounds the memory that one pair takes while a graph of the site runs. `generation` tells it from
    what the bank held of the site before and after. The tensors live as long as this object.
    """

    site: Site
    tensors: tuple[int, ...]
    experts: tuple[int, ...]
    slots: SlotArray
    row_bytes: int
    generation: int
    memory: _Memory = field(repr=False)


class ExpertBank:
    """Holds the stacks and keeps the arrays behind them alive. `sites` are those with experts here, `known` all.

    `backend` is "auto", "cpu" or ggml's name of a device; with `upload` the weights are copied even on the
    CPU. Rows have the bits of a local run only on the kind of device that the local run would use.
    Raises RecipeError for a site that `check_site` refuses or a stack that does not fit it,
    EngineError for an unknown device, ComputeError when the device has no room.

    Any thread may change it and any number of engines compute with it: `sites` is never changed but replaced.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        stacked: Mapping[int, Mapping[str, Stack]],
        backend: str = "auto",
        *,
        upload: bool = False,
    ) -> None:
        self.device: Device = choose_device(backend)
        self.known: dict[int, Site] = {site.index: site for site in sites}
        self.sites: Mapping[int, HeldSite] = {}
        self._upload = upload or not self.device.is_cpu
        self._generations = itertools.count(1)
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._freed = False
        try:
            for index in self.known:
                self.prepare(index, stacked.get(index, {}))()
        except BaseException:
            self.close()
            raise

    @property
    def holdings(self) -> Mapping[int, tuple[int, ...]]:
        """Site index -> global ids of the experts held, in slot order."""
        return {index: held.experts for index, held in self.sites.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks held; of what was replaced nothing counts, also while a call still uses it."""
        return sum(held.memory.nbytes for held in self.sites.values())

    def prepare(self, site: int, stacks: Mapping[str, Stack]) -> Swap:
        """See `Engine.prepare`; here the change too may be made on any thread, at any time.

        Between the two both exist, the old stacks and the new ones; mapped slices share their pages.
        """
        described = self.known.get(site)
        if described is None:
            raise BadCall(f"site {site}: this model has no such site")
        held: HeldSite | None = None
        if any(len(stack.experts) for stack in stacks.values()):
            held = self._hold(described, stacks)
        return functools.partial(self._swap, site, held)

    def acquire(self) -> None:
        """An engine starts to use the tensors; they stay until as many `release` calls."""
        with self._lock:
            if self._closed:
                raise EngineError("the expert bank is closed")
            self._users += 1

    def release(self) -> None:
        """An engine is done with the tensors."""
        with self._lock:
            self._users -= 1
        self._free_unused()

    def close(self) -> None:
        """Free the tensors, now or when the last engine that uses them closes."""
        self._closed = True
        self._free_unused()

    def _swap(self, site: int, held: HeldSite | None) -> HeldSite | None:
        with self._lock:
            if self._freed:
                raise EngineError("the expert bank is closed")
            before = self.sites.get(site)
            sites = {index: other for index, other in self.sites.items() if index != site}
            if held is not None:
                sites[site] = held
            self.sites = dict(sorted(sites.items()))
        return before

    def _hold(self, site: Site, stacks: Mapping[str, Stack]) -> HeldSite:
        shapes = {name: (stack.ne, stack.ggml_type) for name, stack in stacks.items()}
        widths = check(site, shapes)
        experts = stacks[site.tensors[0]].experts
        if len(set(experts)) != len(experts) or not all(0 <= e < site.n_expert for e in experts):
            raise RecipeError(f"site {site.index}: the slots name an expert twice, or one that does not exist")
        memory = _Memory(len(site.tensors))
        tensors = tuple(self._tensor(memory, site, name, stacks[name], experts) for name in site.tensors)
        # per pair: x, the rows of all steps, and ggml's list of rows per expert (8 bytes each, in mul_mat_id)
        row_bytes = 4 * (site.d_in + sum(widths)) + 8 * len(experts)
        slots = slot_table(site.n_expert, experts)
        return HeldSite(site, tensors, experts, slots, row_bytes, next(self._generations), memory)

    def _tensor(self, memory: _Memory, site: Site, name: str, stack: Stack, experts: tuple[int, ...]) -> int:
        ne = stack.ne or (1,)
        size = tensor_bytes(stack.ggml_type, ne) * len(experts)
        data = stack.data
        if stack.experts != experts:
            raise RecipeError(f"site {site.index}: {name} and {site.tensors[0]} hold different experts")
        if data.dtype != np.uint8 or data.ndim != 1 or len(data) != size or not data.flags.c_contiguous:
            raise RecipeError(
                f"site {site.index}: {name} should be {size} bytes in a row for {len(experts)} experts, "
                f"is {data.dtype} {data.shape}"
            )
        new_tensor = ggml.new_tensor_2d if len(ne) == 1 else ggml.new_tensor_3d
        tensor: int = new_tensor(memory.context, stack.ggml_type, *ne, len(experts))
        ggml.set_name(tensor, name.encode())
        in_place = not self._upload and data.ctypes.data % ggml.TENSOR_ALIGNMENT == 0
        if in_place:
            buffer = ggml.backend_dev_buffer_from_host_ptr(self.device.address, data.ctypes.data, size, size)
            memory.data.append(data)
        else:
            kind = ggml.backend_dev_buffer_type(self.device.address)
            buffer = ggml.backend_buft_alloc_buffer(kind, ggml.backend_buft_get_alloc_size(kind, tensor))
        if not buffer:
            raise ComputeError(f"{self.device.name} has no room for {name} ({size >> 20} MiB); hold fewer experts")
        memory.buffers.append(buffer)
        ggml.backend_buffer_set_usage(buffer, ggml.BUFFER_USAGE_WEIGHTS)
        if ggml.backend_tensor_alloc(buffer, tensor, ggml.backend_buffer_get_base(buffer)) != 0:
            raise ComputeError(f"{self.device.name} refused tensor {name}")
        if not in_place:
            ggml.backend_tensor_set(tensor, data.ctypes.data, 0, size)
        memory.nbytes += size
        return tensor

    def _free_unused(self) -> None:
        with self._lock:
            if not self._closed or self._users:
                return
            self._freed = True
            sites, self.sites = self.sites, {}
        del sites  # not under the lock: this may take long
