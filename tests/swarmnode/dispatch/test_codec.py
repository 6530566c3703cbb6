"""Rows and bytes: what goes out comes back, and what does not fit binary16 is never turned into infinity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnode.dispatch.codec import F32, WireType, decode_rows, encode_rows, rows_size
from swarmnode.errors import BadFrame

rows_2d = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9))


def test_vectors() -> None:
    rows = np.array([[1.0, -2.0], [0.5, 65504.0]], np.float32)
    assert encode_rows(rows, WireType.F32)[1].hex() == "0000803f000000c00000003f00e07f47"
    assert encode_rows(rows, WireType.F16)[1].hex() == "003c00c00038ff7b"


@given(rows_2d)
def test_f32_keeps_every_bit(rows: F32) -> None:
    wire, data = encode_rows(rows, WireType.F32)
    assert len(data) == rows_size(wire, *rows.shape)
    back = decode_rows(data, wire, *rows.shape)
    assert back.tobytes() == rows.tobytes()


@given(hnp.arrays(np.float32, (2, 5), elements=st.floats(-65504, 65504, width=32)))
def test_f16_is_the_nearest_half(rows: F32) -> None:
    wire, data = encode_rows(rows, WireType.F16)
    assert wire is WireType.F16
    assert np.array_equal(decode_rows(data, wire, 2, 5), rows.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("value", [65520.0, -1e30, np.inf, np.nan])
def test_what_does_not_fit_a_half_travels_as_f32(value: float) -> None:
    rows = np.array([[1.0, value]], np.float32)
    wire, data = encode_rows(rows, WireType.F16)
    assert wire is WireType.F32
    assert decode_rows(data, wire, 1, 2).tobytes() == rows.tobytes()


@given(st.binary(max_size=64), st.sampled_from(WireType), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_any_bytes_are_rows_or_bad_frame(data: bytes, wire: WireType, n: int, d: int) -> None:
    try:
        rows = decode_rows(data, wire, n, d)
    except BadFrame:
        assert len(data) != rows_size(wire, n, d)
    else:
        assert rows.shape == (n, d)
        assert rows.dtype == np.float32


def test_f32_is_decoded_without_a_copy_and_unaligned_bytes_with_one() -> None:
    data = np.arange(6, dtype="<f4").tobytes()
    whole = decode_rows(memoryview(data), WireType.F32, 2, 3)
    assert not whole.flags.owndata
    assert not whole.flags.writeable
    shifted = decode_rows(memoryview(b"\0" + data)[1:], WireType.F32, 2, 3)
    assert shifted.flags.aligned
    assert np.array_equal(whole, shifted)


def test_a_strided_array_is_encoded_row_by_row() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    assert np.array_equal(decode_rows(encode_rows(rows, WireType.F32)[1], WireType.F32, 3, 2), rows)
