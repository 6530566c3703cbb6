"""The experts a node holds, as ggml tensors on one device: a stack of slots per expert tensor of a site.

On the CPU the stack is used where it is mapped (zero copy); on other devices it is uploaded once. The plain
buffer type of the device is used, never a repacking one: repacked kernels add in another order than a plain
local run. Knows nothing of graphs. Built by `node.py` from a slice store or from the GGUF itself;
`ExpertEngine` computes with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from swarmnode.compute import ggml
from swarmnode.compute.device import Device, choose_device
from swarmnode.compute.engine_api import SlotArray, slot_table
from swarmnode.compute.ggml_types import tensor_bytes
from swarmnode.compute.recipe import Site
from swarmnode.compute.recipe_check import check
from swarmnode.errors import ComputeError, EngineError, RecipeError


class Stack(Protocol):
    """What the bank needs of a stacked tensor; `model.slicing.StackedTensor` is one."""

    @property
    def ggml_type(self) -> int:
        """ggml's type id."""

    @property
    def ne(self) -> tuple[int, ...]:
        """Extents of one expert's slice, ne[0] innermost."""

    @property
    def experts(self) -> tuple[int, ...]:
        """The global expert id of each slot."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """All slots, one after the other: contiguous uint8 of shape (bytes,)."""


@dataclass(frozen=True, slots=True)
class HeldSite:
    """A site with its ggml tensors (addresses, in the order of site.tensors) and the slot of each expert
    held.

    `row_bytes` bounds the memory that one pair takes while a graph of the site runs.
    """

    site: Site
    tensors: tuple[int, ...]
    experts: tuple[int, ...]
    slots: SlotArray
    row_bytes: int


class ExpertBank:
    """Holds the stacks and keeps the arrays behind them alive. `sites` are those with experts here, `known` all.

    `backend` is "auto", "cpu" or ggml's name of a device; with `upload` the weights are copied even on the
    CPU. Rows have the bits of a local run only on the kind of device that the local run would use.
    Raises RecipeError for a site that `check_site` refuses or a stack that does not fit it,
    EngineError for an unknown device, ComputeError when the device has no room.
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
        self.sites: dict[int, HeldSite] = {}
        self.nbytes = 0
        self._upload = upload or not self.device.is_cpu
        self._buffers: list[int] = []
        self._contexts: list[int] = []
        self._data: list[npt.NDArray[np.uint8]] = []
        self._users = 0
        self._closed = False
        try:
            for site in sites:
                stacks = stacked.get(site.index, {})
                if any(len(stack.experts) for stack in stacks.values()):
                    self.sites[site.index] = self._hold(site, stacks)
        except BaseException:
            self.close()
            raise

    @property
    def holdings(self) -> Mapping[int, tuple[int, ...]]:
        """Site index -> global ids of the experts held, in slot order."""
        return {index: held.experts for index, held in self.sites.items()}

    def acquire(self) -> None:
        """An engine starts to use the tensors; they stay until as many `release` calls."""
        if self._closed:
            raise EngineError("the expert bank is closed")
        self._users += 1

    def release(self) -> None:
        """An engine is done with the tensors."""
        self._users -= 1
        if self._closed:
            self._free_unused()

    def close(self) -> None:
        """Free the tensors, now or when the last engine that uses them closes."""
        self._closed = True
        self._free_unused()

    def _hold(self, site: Site, stacks: Mapping[str, Stack]) -> HeldSite:
        shapes = {name: (stack.ne, stack.ggml_type) for name, stack in stacks.items()}
        widths = check(site, shapes)
        experts = stacks[site.tensors[0]].experts
        if len(set(experts)) != len(experts) or not all(0 <= e < site.n_expert for e in experts):
            raise RecipeError(f"site {site.index}: the slots name an expert twice, or one that does not exist")
        context = ggml.init(ggml.InitParams(len(site.tensors) * ggml.tensor_overhead(), None, True))
        if not context:
            raise ComputeError("out of memory for tensor headers")
        self._contexts.append(context)
        tensors = tuple(self._tensor(context, site, name, stacks[name], experts) for name in site.tensors)
        # per pair: x, the rows of all steps, and ggml's list of rows per expert (8 bytes each, in mul_mat_id)
        row_bytes = 4 * (site.d_in + sum(widths)) + 8 * len(experts)
        return HeldSite(site, tensors, experts, slot_table(site.n_expert, experts), row_bytes)

    def _tensor(self, context: int, site: Site, name: str, stack: Stack, experts: tuple[int, ...]) -> int:
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
        tensor: int = new_tensor(context, stack.ggml_type, *ne, len(experts))
        ggml.set_name(tensor, name.encode())
        in_place = not self._upload and data.ctypes.data % ggml.TENSOR_ALIGNMENT == 0
        if in_place:
            buffer = ggml.backend_dev_buffer_from_host_ptr(self.device.address, data.ctypes.data, size, size)
            self._data.append(data)
        else:
            kind = ggml.backend_dev_buffer_type(self.device.address)
            buffer = ggml.backend_buft_alloc_buffer(kind, ggml.backend_buft_get_alloc_size(kind, tensor))
        if not buffer:
            raise ComputeError(f"{self.device.name} has no room for {name} ({size >> 20} MiB); hold fewer experts")
        self._buffers.append(buffer)
        ggml.backend_buffer_set_usage(buffer, ggml.BUFFER_USAGE_WEIGHTS)
        if ggml.backend_tensor_alloc(buffer, tensor, ggml.backend_buffer_get_base(buffer)) != 0:
            raise ComputeError(f"{self.device.name} refused tensor {name}")
        if not in_place:
            ggml.backend_tensor_set(tensor, data.ctypes.data, 0, size)
        self.nbytes += size
        return tensor

    def _free_unused(self) -> None:
        if self._users:
            return
        for buffer in self._buffers:
            ggml.backend_buffer_free(buffer)
        for context in self._contexts:
            ggml.free(context)
        self._buffers, self._contexts, self._data = [], [], []
        self.sites = {}
