"""Where one expert's slice lies in a stacked tensor, for every ggml type, and what a stack of slices is.

GGUF stacks the experts of a layer along the outermost dimension: ne = (…, n_expert). A slice is always whole
rows, so it is whole blocks as soon as the tensor is; only a tensor of one value per expert, ne = (n_expert),
could cut a block. Pure arithmetic over buffers the caller holds; files are read by `gguf_file.SourceReader`.
Callers: `manifest.py`, `source_bank.py`, `store.py`, and the expert engine through `StackedTensor`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.compute.ggml_types import BLOCK_TYPES, tensor_bytes
from swarmnode.errors import ModelError

# ggml's tensor alignment on the CPU (TENSOR_ALIGNMENT in ggml-impl.h): where a mapped tensor must begin.
DATA_ALIGNMENT = 32

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class SliceShape:
    """The shape of one expert's slice: `ne` (ne[0] innermost, at least one dimension) and its bytes."""

    ne: tuple[int, ...]
    stride: int
    n_expert: int

    def span(self, expert: int) -> tuple[int, int]:
        """Byte range (start, end) of an expert in the stack. Raises ModelError for one that is not there."""
        if not 0 <= expert < self.n_expert:
            raise ModelError(f"expert {expert} does not exist; the tensor has {self.n_expert}")
        return expert * self.stride, (expert + 1) * self.stride


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """Slices of some experts, one after the other, as ggml wants them: nb[2] = `stride`.

    `ne` is one expert's slice; `experts[i]` is the global id of slot i; `data` is uint8 of shape
    (len(experts) × stride,), read-only, its address a multiple of DATA_ALIGNMENT, usually a mapped file.
    """

    name: str
    ggml_type: int
    ne: tuple[int, ...]
    stride: int
    experts: tuple[int, ...]
    data: npt.NDArray[np.uint8]


def slice_shape(name: str, ggml_type: int, ne: Sequence[int]) -> SliceShape:
    """The slice of a stack of shape `ne` (outermost last).

    Raises ModelError where it cannot be cut at blocks.
    """
    block = BLOCK_TYPES.get(ggml_type)
    if block is None or not ne or min(ne) < 1:
        raise ModelError(f"{name}: a stack of ggml type {ggml_type} and shape {list(ne)} cannot be cut into experts")
    one = tuple(ne[:-1]) or (1,)
    try:
        stride = tensor_bytes(ggml_type, one)
    except ValueError:
        raise ModelError(
            f"{name}: one expert is {one[0]} values a row, not whole {block.name} blocks of {block.elements}"
        ) from None
    return SliceShape(one, stride, ne[-1])


def cut(data: Buffer, shape: SliceShape, expert: int) -> memoryview:
    """An expert's slice of the whole stack's bytes, without copying."""
    start, end = shape.span(expert)
    if len(data) != shape.n_expert * shape.stride:
        raise ModelError(f"the stack has {len(data)} bytes, {shape.n_expert * shape.stride} expected")
    return memoryview(data)[start:end]


def expert_digest(slices: Iterable[Buffer]) -> str:
    """SHA-256, as hex, over one expert's slices (or pieces of them) in the order of its site's tensors."""
    digest = hashlib.sha256()
    for piece in slices:
        digest.update(piece)
    return digest.hexdigest()


def is_aligned(data: npt.NDArray[np.uint8]) -> bool:
    """Whether ggml can use the array's memory in place."""
    return data.ctypes.data % DATA_ALIGNMENT == 0


def aligned_empty(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory of `n_bytes` that begins at a multiple of DATA_ALIGNMENT."""
    room = np.empty(n_bytes + DATA_ALIGNMENT, dtype=np.uint8)
    skip = -room.ctypes.data % DATA_ALIGNMENT
    return room[skip : skip + n_bytes]
