"""Whether weights are finite, block by block, as they are read: an expert with a NaN anywhere answers nothing but NaN.

A quantised weight is finite where its block's half-float scales are; where those lie is ggml's layout (ggml-common.h),
and a test compares with `ggml_validate_row_data`, which prints to the terminal and so is not called here. Pure.
Callers: `digests.py`, `http_model.py`, `gguf_check.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from swarmnode.compute.ggml_types import BLOCK_TYPES
from swarmnode.errors import BrokenModel

# Byte offsets of a block's half floats. IQ1_M spreads its one over bits, NVFP4 has none that can be NaN or infinite.
_HALVES: dict[str, tuple[int, ...]] = {
    "F16": (0,), "Q1_0": (0,), "Q2_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}  # fmt: skip
_MXFP4_NAN = 0xFF  # an E8M0 scale
_IQ1_M_SCALES = slice(48, 56)  # four words; the upper four bits of each are a quarter of the half float, lowest first


def first_not_finite(ggml_type: int, data: npt.NDArray[np.uint8]) -> int | None:
    """The first block of uint8 `data` (whole blocks) that holds NaN or infinity, None where all are finite."""
    block = BLOCK_TYPES[ggml_type]
    blocks = data.reshape(-1, block.bytes)
    match block.name:
        case "F32":
            bad = _has_exponent(blocks.view("<u4"), 0x7F800000)
        case "BF16":
            bad = _has_exponent(blocks.view("<u2"), 0x7F80)
        case "MXFP4":
            bad = blocks[:, :1] == _MXFP4_NAN
        case "IQ1_M":
            quarters = np.ascontiguousarray(blocks[:, _IQ1_M_SCALES]).view("<u2") & np.uint16(0xF000)
            bad = _has_exponent(quarters[:, 2:3] >> np.uint16(4) | quarters[:, 3:4], 0x7C00)
        case name:
            bad = np.zeros((len(blocks), 1), np.bool_)
            for at in _HALVES.get(name, ()):
                bad = bad | _has_exponent(blocks[:, at : at + 2].view("<u2"), 0x7C00)
    return int(np.argmax(bad)) if bad.any() else None


def checked(pieces: Iterable[memoryview], ggml_type: int, what: Callable[[int], str]) -> Iterator[memoryview]:
    """The same pieces of a tensor that begins with a whole block, each looked at before it is passed on.

    Raises BrokenModel, with what `what(block)` says of a block that is not finite.
    """
    size = BLOCK_TYPES[ggml_type].bytes
    rest, done = b"", 0
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        if rest:  # a piece ended within a block
            missing = size - len(rest)
            rest, data = rest + data[:missing].tobytes(), data[missing:]
            if len(rest) == size:
                _refuse_if(first_not_finite(ggml_type, np.frombuffer(rest, np.uint8)), done, what)
                rest, done = b"", done + 1
        if len(data):
            whole = len(data) // size
            _refuse_if(first_not_finite(ggml_type, data[: whole * size]), done, what)
            rest, done = data[whole * size :].tobytes(), done + whole
        yield piece


def _refuse_if(bad: int | None, done: int, what: Callable[[int], str]) -> None:
    if bad is not None:
        raise BrokenModel(what(done + bad))


def _has_exponent(values: npt.NDArray[np.unsignedinteger], ones: int) -> npt.NDArray[np.bool_]:
    """Which floats, given as integers, have an exponent of all ones: infinite or NaN."""
    found: npt.NDArray[np.bool_] = (values & values.dtype.type(ones)) == ones
    return found
