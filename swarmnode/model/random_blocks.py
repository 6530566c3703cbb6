"""Random blocks of a ggml type: valid, finite, and of a chosen size once dequantised.

Where a block's scales lie is ggml's layout (ggml-common.h); every other byte of a block may be anything.
Types with scales spread over bits (IQ1_M), with invalid values (TQ2_0), and types that hold no weights (Q8_K,
integers) are not offered. Caller: `random_model.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from swarmnode.compute.ggml_types import BLOCK_TYPES


@dataclass(frozen=True, slots=True)
class _Scales:
    """Where a block has its half-float scale and, in some types, its offset: a multiple of the scale.

    `rms` is what random blocks of scale 1 dequantise to, root mean square.
    """

    rms: float
    at: int = 0
    offset_at: int | None = None
    offset_ratio: float = 0.0


# The ratios put the mean of random blocks at zero: Q4_1 is d·q + m with q in 0…15, Q4_K is d·sc·q − dmin·mn.
_SCALES = {
    "Q4_0": _Scales(4.7),
    "Q4_1": _Scales(4.6, 0, 2, -7.5),
    "Q5_0": _Scales(9.3),
    "Q5_1": _Scales(9.2, 0, 2, -15.5),
    "Q8_0": _Scales(74.0),
    "Q2_K": _Scales(13.9, 80, 82, 1.5),
    "Q3_K": _Scales(43.0, 108),
    "Q4_K": _Scales(259.0, 0, 2, 7.5),
    "Q5_K": _Scales(531.0, 0, 2, 15.5),
    "Q6_K": _Scales(1361.0, 208),
    "IQ4_NL": _Scales(68.0),
    "IQ4_XS": _Scales(1243.0),
    "IQ3_S": _Scales(141.0),
    "Q1_0": _Scales(1.0),
}


def supported_types() -> tuple[str, ...]:
    """Names of the types that can be made."""
    return ("F32", "F16", "BF16", "MXFP4", *_SCALES)


def random_blocks(ggml_type: int, n_bytes: int, size: float, rng: np.random.Generator) -> bytes:
    """`n_bytes` of whole blocks whose values have mean 0 and root mean square about `size`.

    Raises ValueError for a type that is not among `supported_types`.
    """
    block = BLOCK_TYPES[ggml_type]
    if block.name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(n_bytes // block.bytes, dtype=np.float32) * np.float32(size)
        if block.name == "BF16":
            return (values.view("<u4") >> 16).astype("<u2").tobytes()
        return values.astype("<f4" if block.name == "F32" else "<f2").tobytes()
    blocks = np.frombuffer(bytearray(rng.bytes(n_bytes)), dtype=np.uint8).reshape(-1, block.bytes)
    if block.name == "MXFP4":  # one power of two, biased by 127 and halved, over values of root mean square 6.5
        blocks[:, 0] = max(1, round(128 + np.log2(size / 6.5)))
        return blocks.tobytes()
    scales = _SCALES.get(block.name)
    if scales is None:
        raise ValueError(f"no random blocks of type {block.name}; choose one of {', '.join(supported_types())}")
    scale = size / scales.rms
    blocks[:, scales.at : scales.at + 2] = _half(scale)
    if scales.offset_at is not None:
        blocks[:, scales.offset_at : scales.offset_at + 2] = _half(scale * scales.offset_ratio)
    return blocks.tobytes()


@functools.lru_cache(maxsize=64)
def _half(value: float) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(np.array([value], dtype="<f2").tobytes(), dtype=np.uint8)
