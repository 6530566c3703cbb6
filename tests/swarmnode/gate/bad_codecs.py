"""Codecs that nobody should use: what the gate is there to find."""

from __future__ import annotations

import numpy as np

from swarmnode.dispatch.codec import F32, Buffer, WireType, decode_rows, encode_rows
from swarmnode.gate.coding import Codec


def _encode_coarsely(rows: F32, wire: WireType) -> tuple[WireType, Buffer]:
    if wire is not WireType.INT8 or not np.isfinite(rows).all():
        return encode_rows(rows, WireType.F32 if wire is WireType.INT8 else wire)
    scale = np.float32(max(float(np.abs(rows).max(initial=0.0)) / 127, 1e-30))
    return wire, scale.tobytes() + np.rint(rows / scale).astype(np.int8).tobytes()


def _decode_coarsely(data: Buffer, wire: WireType, n: int, d: int) -> F32:
    if wire is not WireType.INT8:
        return decode_rows(data, wire, n, d)
    codes = np.frombuffer(data, np.int8, offset=4).reshape(n, d)
    return codes.astype(np.float32) * np.frombuffer(data, np.float32, 1)


ONE_SCALE = Codec(_encode_coarsely, _decode_coarsely)  # INT8 with one scale for the whole tensor
