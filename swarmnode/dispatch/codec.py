"""Rows of numbers as bytes on the wire, one encoding per wire type.

Pure. Not the frame around them (`frames.py`) and not what the rows mean (`request.py`). Called by both ends:
the client encodes x and decodes the answers, the worker the other way round.

    F32   n × d little-endian IEEE 754 binary32, row by row. Lossless: the only type that exact mode may claim bits for.
    F16   n × d little-endian IEEE 754 binary16, row by row.
    INT8  n × ⌈d/128⌉ u16 scales | n × d i8 codes
    FP8   n × ⌈d/128⌉ u16 scales | n × d u8 codes, OCP E4M3 "fn": sign, 4 bits of exponent (bias 7), 3 of mantissa; no
          infinities, the largest is 448, codes 0x7f and 0xff are NaN and never sent

INT8 and FP8 cut each row into blocks of 128 values, the last one may be shorter. A value is its code × the scale of its
block. A scale is a bfloat16 (the upper half of a binary32), block by block, row by row: the largest magnitude of the
block ÷ the largest code (127 or 448), rounded up, so that no value exceeds the codes. INT8 rounds to nearest, ties to
even; FP8 to nearest, ties away from zero. A block of zeros has scale 0 and codes 0; so has one whose scale no binary32
holds, which takes magnitudes below 448 × 2^-150 (3.1e-43).

A value outside binary16 (|x| > 65504), or for INT8 and FP8 one above 2^127, would become infinity without a word.
`encode_rows` does not let it: it sends those rows as F32 instead and says so in the type it returns, which every
frame carries beside its rows. So a receiver accepts F32 wherever another type was agreed on. The same happens to NaN
and infinity: they arrive as they are, and the receiver judges them. INT8 and FP8 cannot express either; scales and
codes that no encoder makes are refused.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from swarmnode.errors import BadFrame

F32 = NDArray[np.float32]
Buffer = bytes | bytearray | memoryview
WireName = Literal["f32", "f16", "int8", "fp8"]


class WireType(IntEnum):
    """The number of each encoding in a frame, from fine to coarse. Numbers are never reused."""

    F32 = 0
    F16 = 1
    INT8 = 2
    FP8 = 3

    @classmethod
    def of(cls, name: WireName) -> WireType:
        """Return the type that options and flags call `name`."""
        return cls[name.upper()]


BLOCK = 128  # values under one scale: 32 are no better on real rows and take four times the scales
F16_MAX = 65504.0  # the largest finite binary16
_U8, _I8, _U16 = np.dtype("u1"), np.dtype("i1"), np.dtype("<u2")
_F32, _F16 = np.dtype("<f4"), np.dtype("<f2")
_ITEM_SIZE = {WireType.F32: 4, WireType.F16: 2, WireType.INT8: 1, WireType.FP8: 1}
_MAX_CODE = {WireType.INT8: np.float32(127), WireType.FP8: np.float32(448)}
_FP8_NAN = (b"\x7f", b"\xff")
_AT_A_TIME = 1 << 15  # values: what is made in between stays in the cache
# Magnitudes are compared as the integers that their bits are: the order is the same, and NaN is above infinity.
_MAGNITUDE = np.int32(0x7FFFFFFF)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _rounded_up(scales: F32) -> NDArray[np.uint32]:
    """Return the upper halves of the smallest bfloat16 that are not below these positive numbers."""
    bits: NDArray[np.uint32] = scales.view(np.uint32) + 0xFFFF
    bits >>= 16
    return bits


_F16_MOST = _bits(F16_MAX)
_BLOCK_MOST = _bits(2.0**127)  # twice the room above it that rounding needs
# What an encoder makes of a block with that magnitude; a code times this is still finite.
_MAX_SCALE = {wire: int(_rounded_up(np.array([2.0**127], np.float32) / most)[0]) for wire, most in _MAX_CODE.items()}


def _fp8_values() -> F32:
    """Return what each of the 256 codes stands for."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values[0x7F::0x80] = np.nan
    return np.where(codes < 0x80, values, -values).astype(np.float32)


def _fp8_codes() -> NDArray[np.uint8]:
    """Return the code nearest to every binary32, by its upper 16 bits.

    Half-way between two codes is a number of few bits. So all numbers with the same upper half are on the same side of
    it, and where the upper half is the half-way point itself they are above it, or it: the code of greater magnitude.
    """
    magnitudes = (np.arange(0x8000, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    values = _FP8_VALUES[:0x7F]
    half_way = (values[:-1] + values[1:]) / 2
    codes = np.searchsorted(half_way, np.nan_to_num(magnitudes, nan=0.0), side="right").astype(np.uint8)
    return np.concatenate((codes, codes | np.uint8(0x80)))


_FP8_VALUES = _fp8_values()
_FP8_CODES = _fp8_codes()


def rows_size(wire: WireType, n: int, d: int) -> int:
    """Return the bytes that n rows of d values take."""
    size = n * d * _ITEM_SIZE[wire]
    return size + 2 * n * -(-d // BLOCK) if wire in _MAX_CODE else size


def encode_rows(rows: F32, wire: WireType) -> tuple[WireType, memoryview]:
    """Encode float32[n, d]; return the type used and the bytes (a view where nothing had to change)."""
    rows = np.ascontiguousarray(rows, dtype=_F32)
    if wire is WireType.F16:
        halves = _halves(rows)
        if halves is not None:
            return wire, _bytes_of(halves)
    elif wire is not WireType.F32:
        data = np.empty(rows_size(wire, *rows.shape), _U8)
        if _encode_blocks(rows, wire, *_scales_and_codes(data, *rows.shape)):
            return wire, data.data
    return WireType.F32, _bytes_of(rows)


def decode_rows(data: Buffer, wire: WireType, n: int, d: int) -> F32:
    """Decode n rows of d values into float32[n, d]; F32 is a read-only view of `data` where its alignment allows.

    Raises BadFrame as `check_rows` does; nothing is allocated before that.
    """
    check_rows(data, wire, n, d)
    if wire is WireType.F16:
        return np.frombuffer(data, _F16).reshape(n, d).astype(np.float32)
    if wire is not WireType.F32:
        return _decode_blocks(wire, *_scales_and_codes(np.frombuffer(data, _U8), n, d))
    rows = np.frombuffer(data, _F32).reshape(n, d)
    if not rows.flags.aligned:
        return rows.astype(np.float32)  # a frame inside a larger chunk begins anywhere
    rows.flags.writeable = False
    return rows


def check_rows(data: Buffer, wire: WireType, n: int, d: int) -> None:
    """Raise BadFrame unless `data` is as long as n rows of d values are, with scales and codes that an encoder makes.

    F32 and F16 may hold NaN and infinity after this, INT8 and FP8 hold neither.
    """
    size = rows_size(wire, n, d)
    if len(data) != size:
        raise BadFrame(f"{n} rows of {d} values as {wire.name} take {size} bytes, but {len(data)} came")
    if wire is WireType.F32 or wire is WireType.F16:
        return
    at = size - n * d
    most = int(np.frombuffer(data, _U16, at // 2).max(initial=0))
    if most > _MAX_SCALE[wire]:  # so are infinity, NaN and all that is negative
        raise BadFrame(f"{wire.name} rows with the scale {most:#06x}; at most {_MAX_SCALE[wire]:#06x} is allowed")
    if wire is WireType.FP8:
        codes = memoryview(data)[at:]
        for begin in range(0, len(codes), _AT_A_TIME):  # other threads have their turn in between
            part = bytes(codes[begin : begin + _AT_A_TIME])
            if any(nan in part for nan in _FP8_NAN):
                raise BadFrame("FP8 rows with a NaN code")


def _scales_and_codes(data: NDArray[np.uint8], n: int, d: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Return the two parts of INT8 or FP8 rows as views: u16[n, blocks] and u8[n, d]."""
    blocks = -(-d // BLOCK)
    at = 2 * n * blocks
    return data[:at].view(_U16).reshape(n, blocks), data[at:].reshape(n, d)


def _halves(rows: F32) -> NDArray[np.float16] | None:
    """Return the rows as binary16; None if a magnitude is too large, or NaN."""
    n, d = rows.shape
    if rows.size <= _AT_A_TIME:
        return rows.astype(_F16) if (rows.view(np.int32) & _MAGNITUDE).max(initial=0) <= _F16_MOST else None
    halves, step = np.empty(rows.shape, _F16), max(1, _AT_A_TIME // d)
    for at in range(0, n, step):
        part = rows[at : at + step]
        if (part.view(np.int32) & _MAGNITUDE).max() > _F16_MOST:
            return None
        halves[at : at + step] = part
    return halves


def _encode_blocks(rows: F32, wire: WireType, scales: NDArray[np.uint16], codes: NDArray[np.uint8]) -> bool:
    """Write the scales and codes of the rows; False if a magnitude is too large for any scale, or NaN."""
    n, d = rows.shape
    step = max(1, _AT_A_TIME // max(1, d))
    for at in range(0, n if d else 0, step):
        blocks = _whole_blocks(rows[at : at + step])
        largest = (blocks.view(np.int32) & _MAGNITUDE).max(axis=1)
        if largest.max() > _BLOCK_MOST:
            return False
        upper = _rounded_up(largest.view(np.float32) / _MAX_CODE[wire])
        part = scales[at : at + step]
        part[...] = upper.reshape(part.shape)
        # Where a scale is 0 everything decodes to 0: any divisor does.
        exact = blocks / (np.maximum(upper, 1) << 16).view(np.float32)[:, np.newaxis]
        out = codes[at : at + step]
        if wire is WireType.INT8:
            np.rint(exact, out=exact)
            np.copyto(out.view(_I8), exact.reshape(len(out), -1)[:, :d], casting="unsafe")
        else:
            out[...] = _FP8_CODES.take(exact.view(np.uint32) >> 16).reshape(len(out), -1)[:, :d]
    return True


def _decode_blocks(wire: WireType, scales: NDArray[np.uint16], codes: NDArray[np.uint8]) -> F32:
    n, d = codes.shape
    rows = np.empty((n, d), np.float32)
    step = max(1, _AT_A_TIME // max(1, d))
    for at in range(0, n if d else 0, step):
        part, out = codes[at : at + step], rows[at : at + step]
        if wire is WireType.INT8:
            np.copyto(out, part.view(_I8))
        else:
            _FP8_VALUES.take(part, out=out, mode="clip")
        blocks = _whole_blocks(out)
        blocks *= (scales[at : at + step].astype(np.uint32) << 16).view(np.float32).reshape(-1, 1)
        if d % BLOCK:
            out[...] = blocks.reshape(len(out), -1)[:, :d]
    return rows


def _whole_blocks(rows: F32) -> F32:
    """Return the rows cut into [blocks, BLOCK]: of the same memory, or a copy with zeros where the last is short."""
    n, d = rows.shape
    if short := d % BLOCK:
        padded = np.zeros((n, d - short + BLOCK), np.float32)
        padded[:, :d] = rows
        rows = padded
    return rows.reshape(-1, BLOCK)


def _bytes_of(array: F32 | NDArray[np.float16]) -> memoryview:
    return array.reshape(-1).data.cast("B") if array.size else memoryview(b"")
