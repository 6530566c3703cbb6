"""What rows become on their way through the codec, and a fingerprint of it.

Pure. Not the codec (`dispatch/codec.py`); a deliberately bad one can be put in its place, which is how the gate itself
is tested. Called by `experts.py` and `verdict_file.py`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from swarmnode.dispatch.codec import F32, Buffer, WireName, WireType, decode_rows, encode_rows, rows_size
from swarmnode.errors import BadFrame

Pair = tuple[WireName, WireName]  # wire types: on the way out, on the way back
WIRES: tuple[WireName, ...] = ("f32", "f16", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class Codec:
    """Both ends of a wire, as `encode_rows` and `decode_rows` have them."""

    encode: Callable[[F32, WireType], tuple[WireType, Buffer]] = encode_rows
    decode: Callable[[Buffer, WireType, int, int], F32] = decode_rows

    def through(self, rows: F32, wire: WireName) -> F32:
        """What arrives of float32[n, d] that is sent as `wire`; NaN for rows that the receiver refuses.

        One row that does not fit the type makes its whole batch go as F32. So that the others are judged too, such a
        batch is sent row by row.
        """
        n, d = rows.shape
        used, data = self.encode(rows, WireType.of(wire))
        if used is not WireType.of(wire) and n > 1:
            return np.concatenate([self.through(rows[i : i + 1], wire) for i in range(n)])
        try:
            return self.decode(data, used, n, d)
        except BadFrame:
            return np.full((n, d), np.nan, np.float32)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of a few rows in every type, encoded and decoded: another codec, another fingerprint."""
        return _fingerprint(self)


@functools.cache
def _fingerprint(codec: Codec) -> str:
    digest = hashlib.sha256()
    for wire in WIRES:
        for row in _sample():
            used, data = codec.encode(row, WireType.of(wire))
            digest.update(bytes([used]) + bytes(data) + codec.through(row, wire).tobytes())
    return digest.hexdigest()


def _sample() -> list[F32]:
    """Rows that touch every rule of a codec: a short last block, zeros, every size of number, ties, what fits not."""
    noise = np.arange(300, dtype=np.uint64) * 2654435761 % (1 << 32)
    wide = (noise.astype(np.float64) / (1 << 31) - 1).astype(np.float32)
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    ties = ((np.arange(256) - 127.5) / 2).astype(np.float32)
    rows: list[F32] = [wide, powers, ties, np.zeros(130, np.float32), np.array([1.0, np.inf, np.nan], np.float32)]
    return [*(row.reshape(1, -1) for row in rows), wide.reshape(2, 150) * np.float32(1e-3)]


def pair_bytes(pair: Pair, d_in: int, d_out: int) -> int:
    """Bytes of one row out and one row back."""
    return rows_size(WireType.of(pair[0]), 1, d_in) + rows_size(WireType.of(pair[1]), 1, d_out)


def pair_name(pair: Pair) -> str:
    """INT8/F16: what people and the verdict's file call it, there in lower case."""
    return f"{pair[0]}/{pair[1]}".upper()
