"""Rows of numbers as bytes on the wire, one encoding per wire type.

Pure. Not the frame around them (`frames.py`) and not what the rows mean (`request.py`). Called by both ends:
the client encodes x and decodes the answers, the worker the other way round.

    F32   n × d little-endian IEEE 754 binary32, row by row. Lossless: the only type that exact mode may claim bits for.
    F16   n × d little-endian IEEE 754 binary16, row by row.

A value outside binary16 (|x| > 65504) would become infinity without a word. `encode_rows` does not let it: it
sends those rows as F32 instead and says so in the type it returns, which every frame carries beside its rows.
So a receiver accepts F32 wherever F16 was agreed on. The same happens to NaN and infinity: they arrive as
they are, and the receiver judges them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from swarmnode.errors import BadFrame

F32 = NDArray[np.float32]
Buffer = bytes | bytearray | memoryview
WireName = Literal["f32", "f16"]


class WireType(IntEnum):
    """The number of each encoding in a frame. Numbers are never reused; 2 and 3 are kept for INT8 and FP8."""

    F32 = 0
    F16 = 1

    @classmethod
    def of(cls, name: WireName) -> WireType:
        """Return the type that options and flags call `name`."""
        return cls[name.upper()]


_F32, _F16 = np.dtype("<f4"), np.dtype("<f2")
F16_MAX = 65504.0  # the largest finite binary16
_ITEM_SIZE = {WireType.F32: 4, WireType.F16: 2}


def rows_size(wire: WireType, n: int, d: int) -> int:
    """Return the bytes that n rows of d values take."""
    return n * d * _ITEM_SIZE[wire]


def encode_rows(rows: F32, wire: WireType) -> tuple[WireType, memoryview]:
    """Encode float32[n, d]; return the type used and the bytes (a view where nothing had to change)."""
    if wire is WireType.F16 and np.abs(rows).max(initial=0.0) <= F16_MAX:  # false for NaN too
        return WireType.F16, _bytes_of(rows.astype(_F16))
    return WireType.F32, _bytes_of(np.ascontiguousarray(rows, dtype=_F32))


def decode_rows(data: Buffer, wire: WireType, n: int, d: int) -> F32:
    """Decode n rows of d values into float32[n, d]; F32 is a read-only view of `data` where its alignment allows.

    Raises BadFrame unless `data` is exactly as long as such rows are; nothing is allocated before that.
    """
    size = rows_size(wire, n, d)
    if len(data) != size:
        raise BadFrame(f"{n} rows of {d} values as {wire.name} take {size} bytes, but {len(data)} came")
    if wire is WireType.F16:
        return np.frombuffer(data, _F16).reshape(n, d).astype(np.float32)
    rows = np.frombuffer(data, _F32).reshape(n, d)
    if not rows.flags.aligned:
        return rows.astype(np.float32)  # a frame inside a larger chunk begins anywhere
    rows.flags.writeable = False
    return rows


def _bytes_of(array: F32 | NDArray[np.float16]) -> memoryview:
    return array.reshape(-1).data.cast("B") if array.size else memoryview(b"")
