"""The block layout of every ggml tensor type that a GGUF file can hold: elements and bytes per block.

The figures are ggml's own (`type_traits` in ggml.c) and a test compares them with the installed library: the
`gguf` package's table says 40 bytes for Q8_1 where ggml has 36, does not know Q2_0, and takes a tenth of a
second to import. Not a quantiser, and nothing here touches a file. Everything in `swarmnode.model` that turns
a shape into bytes calls it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class BlockType(NamedTuple):
    """A ggml type: `elements` consecutive values along ne[0] are stored in `bytes` bytes."""

    name: str
    id: int
    elements: int
    bytes: int


_TABLE = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("Q4_0", 2, 32, 18),
    BlockType("Q4_1", 3, 32, 20),
    BlockType("Q5_0", 6, 32, 22),
    BlockType("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34),
    BlockType("Q8_1", 9, 32, 36),
    BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110),
    BlockType("Q4_K", 12, 256, 144),
    BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210),
    BlockType("Q8_K", 15, 256, 292),
    BlockType("IQ2_XXS", 16, 256, 66),
    BlockType("IQ2_XS", 17, 256, 74),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50),
    BlockType("IQ4_NL", 20, 32, 18),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    BlockType("IQ4_XS", 23, 256, 136),
    BlockType("I8", 24, 1, 1),
    BlockType("I16", 25, 1, 2),
    BlockType("I32", 26, 1, 4),
    BlockType("I64", 27, 1, 8),
    BlockType("F64", 28, 1, 8),
    BlockType("IQ1_M", 29, 256, 56),
    BlockType("BF16", 30, 1, 2),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockType("MXFP4", 39, 32, 17),
    BlockType("NVFP4", 40, 64, 36),
    BlockType("Q1_0", 41, 128, 18),
    BlockType("Q2_0", 42, 64, 18),
)

BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType({t.id: t for t in _TABLE})
TYPE_BY_NAME: Mapping[str, BlockType] = MappingProxyType({t.name: t for t in _TABLE})


def tensor_bytes(ggml_type: int, ne: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor of shape `ne` (ne[0] innermost), as `ggml_nbytes`.

    Raises KeyError for a type that no GGUF of today holds, ValueError where ne[0] is not whole blocks.
    """
    block = BLOCK_TYPES[ggml_type]
    if not ne or ne[0] % block.elements:
        raise ValueError(f"ne {list(ne)} is not whole blocks of {block.elements} ({block.name})")
    return math.prod(ne) // block.elements * block.bytes
