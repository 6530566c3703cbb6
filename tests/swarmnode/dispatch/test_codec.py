"""Rows and bytes: what goes out comes back, nothing becomes infinity without a word, and no lie gets through."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnode.dispatch.codec import BLOCK, F32, WireType, check_rows, decode_rows, encode_rows, rows_size
from swarmnode.errors import BadFrame

BLOCKWISE = [WireType.INT8, WireType.FP8]
rows_2d = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9))


def there_and_back(rows: F32, wire: WireType) -> F32:
    used, data = encode_rows(rows, wire)
    assert used is wire
    assert len(data) == rows_size(wire, *rows.shape)
    return decode_rows(data, wire, *rows.shape)


def test_vectors() -> None:
    rows = np.array([[1.0, -2.0], [0.5, 65504.0]], np.float32)
    assert encode_rows(rows, WireType.F32)[1].hex() == "0000803f000000c00000003f00e07f47"
    assert encode_rows(rows, WireType.F16)[1].hex() == "003c00c00038ff7b"


def test_vectors_of_blocks() -> None:
    # Two blocks: 127 and its neighbours under scale 1, then one value under a scale of its own; a second row of zeros.
    rows = np.zeros((2, BLOCK + 2), np.float32)
    rows[0, :4] = 127, -126.4, 0.5, 1.5
    rows[0, BLOCK:] = -254, 2.9
    scales, codes = bytes(encode_rows(rows, WireType.INT8)[1][:8]), bytes(encode_rows(rows, WireType.INT8)[1][8:])
    assert scales.hex() == "803f0040" + "00000000"  # bfloat16 1 and 2
    assert codes[:4].hex() == "7f820002"  # ties go to the even code
    assert codes[BLOCK : BLOCK + 2].hex() == "8101"
    assert codes[BLOCK + 2 :] == bytes(BLOCK + 2)

    rows[0, :4] = 448, -432, 2.0**-9, 1.0625  # half-way between two codes goes up
    rows[0, BLOCK:] = -896, 3.5
    data = bytes(encode_rows(rows, WireType.FP8)[1])
    assert data[:8].hex() == "803f0040" + "00000000"
    assert data[8:12].hex() == "7efe0139"
    assert data[8 + BLOCK : 8 + BLOCK + 2].hex() == "fe3e"


def test_fp8_codes_are_ocp_e4m3() -> None:
    # OFP8 1.0, table 1: the largest, the smallest normal and the two ends of the subnormals.
    codes = {0x7E: 448.0, 0x08: 2.0**-6, 0x07: 0.875 * 2.0**-6, 0x01: 2.0**-9, 0x38: 1.0, 0xB8: -1.0, 0x80: 0.0}
    data = np.array([0x3F80], "<u2").tobytes() + bytes(codes)
    assert decode_rows(data, WireType.FP8, 1, len(codes)).tolist() == [list(codes.values())]


@given(rows_2d)
def test_f32_keeps_every_bit(rows: F32) -> None:
    wire, data = encode_rows(rows, WireType.F32)
    assert len(data) == rows_size(wire, *rows.shape)
    back = decode_rows(data, wire, *rows.shape)
    assert back.tobytes() == rows.tobytes()


@given(hnp.arrays(np.float32, (2, 5), elements=st.floats(-65504, 65504, width=32)))
def test_f16_is_the_nearest_half(rows: F32) -> None:
    assert np.array_equal(there_and_back(rows, WireType.F16), rows.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("wire", BLOCKWISE)
@example(np.array([[1.64e-43]], np.float32))  # of more than half of the least step, but no binary32 holds its scale
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 127, 128, 129, 256, 300])),
        elements=st.floats(-(2.0**127), 2.0**127, width=32),
        fill=st.just(0.0),
    )
)
def test_a_code_is_the_nearest_and_nothing_is_cut_off(wire: WireType, rows: F32) -> None:
    back = there_and_back(rows, wire).astype(np.float64)
    for start in range(0, rows.shape[1], BLOCK):
        block, got = rows[:, start : start + BLOCK].astype(np.float64), back[:, start : start + BLOCK]
        largest = np.abs(block).max(axis=1, keepdims=True)
        # Scales are at most 2^-7 larger than needed, and one bfloat16 subnormal.
        scale = largest / (127 if wire is WireType.INT8 else 448) * (1 + 2.0**-7) + 2.0**-133
        step = scale if wire is WireType.INT8 else np.maximum(scale * 2.0**-9, np.abs(block) * 2.0**-3)
        vanishes = largest <= (127 if wire is WireType.INT8 else 448) * 2.0**-150  # a scale of 0
        assert (np.abs(got - block) <= np.where(vanishes, largest, step * 0.5001)).all()
        assert not got[np.broadcast_to(vanishes, got.shape)].any()
        assert (np.signbit(got) == np.signbit(block))[got != 0].all()


@pytest.mark.parametrize("wire", BLOCKWISE)
@pytest.mark.parametrize("shape", [(1, 256), (700, 64), (3, 200), (40, 3072), (2, 70_000)])
def test_many_rows_are_what_each_is_alone(wire: WireType, shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(1).standard_t(3, shape).astype(np.float32)
    together = there_and_back(rows, wire)
    assert together.flags.c_contiguous
    for i in {0, len(rows) // 2, len(rows) - 1}:
        assert np.array_equal(there_and_back(rows[i : i + 1], wire)[0], together[i])
    cosine = np.vdot(rows, together) / (np.linalg.norm(rows) * np.linalg.norm(together))
    assert cosine > (0.9999 if wire is WireType.INT8 else 0.9995)


@pytest.mark.parametrize("wire", BLOCKWISE)
def test_what_was_decoded_is_encoded_without_loss(wire: WireType) -> None:
    rows = there_and_back(np.random.default_rng(2).standard_normal((5, 384)).astype(np.float32), wire)
    again = there_and_back(rows, wire)
    assert np.allclose(again, rows, rtol=2.0**-4 if wire is WireType.FP8 else 0.02, atol=0.02)


@pytest.mark.parametrize("value", [65520.0, -1e30, np.inf, np.nan])
def test_what_does_not_fit_a_half_travels_as_f32(value: float) -> None:
    rows = np.array([[1.0, value]], np.float32)
    wire, data = encode_rows(rows, WireType.F16)
    assert wire is WireType.F32
    assert decode_rows(data, wire, 1, 2).tobytes() == rows.tobytes()


@pytest.mark.parametrize("wire", BLOCKWISE)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("at", [0, 130, 299])
def test_what_no_scale_can_express_travels_as_f32(wire: WireType, value: float, at: int) -> None:
    rows = np.zeros((200, 300), np.float32)
    rows[150, at] = value
    used, data = encode_rows(rows, wire)
    assert used is WireType.F32
    assert decode_rows(data, used, 200, 300).tobytes() == rows.tobytes()


@pytest.mark.parametrize("wire", BLOCKWISE)
def test_the_largest_and_the_smallest_values_stay_what_they_are(wire: WireType) -> None:
    rows = np.array([[2.0**127, -(2.0**127), 0], [1e-37, -1e-37, 0], [1e-45, 0, 0]], np.float32)
    back = there_and_back(rows, wire)
    assert np.isfinite(back).all()
    assert np.allclose(back[:2] / rows[:2, :1], [[1, -1, 0]] * 2, atol=0.07)
    assert not back[2].any()


@pytest.mark.parametrize("wire", BLOCKWISE)
@pytest.mark.parametrize("scale", [0x7F80, 0xFF80, 0x7FC0, 0x8000, 0xBF80, 0x7F00], ids=hex)
def test_a_scale_that_no_encoder_makes_is_refused(wire: WireType, scale: int) -> None:
    data = np.array([0x3F80, scale], "<u2").tobytes() + bytes(2 * 5)
    with pytest.raises(BadFrame, match=f"{wire.name} rows with the scale {scale:#06x}"):
        decode_rows(data, wire, 2, 5)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_is_refused(code: int) -> None:
    data = np.array([0x3F80], "<u2").tobytes() + bytes([1, code, 2])
    with pytest.raises(BadFrame, match="FP8 rows with a NaN code"):
        decode_rows(data, WireType.FP8, 1, 3)
    assert decode_rows(data, WireType.INT8, 1, 3).tolist() == [[1, code if code < 128 else code - 256, 2]]


@given(st.binary(max_size=64), st.sampled_from(WireType), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_any_bytes_are_rows_or_bad_frame(data: bytes, wire: WireType, n: int, d: int) -> None:
    try:
        rows = decode_rows(data, wire, n, d)
    except BadFrame:
        assert len(data) != rows_size(wire, n, d) or wire in BLOCKWISE
    else:
        assert rows.shape == (n, d)
        assert rows.dtype == np.float32


@pytest.mark.parametrize("wire", BLOCKWISE)
@given(st.data(), st.integers(0, 3), st.sampled_from([0, 1, 5, 128, 131]))
def test_bytes_of_the_right_length_are_finite_or_bad_frame(wire: WireType, data: st.DataObject, n: int, d: int) -> None:
    size = rows_size(wire, n, d)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    try:
        check_rows(raw, wire, n, d)
    except BadFrame:
        with pytest.raises(BadFrame):
            decode_rows(raw, wire, n, d)
    else:
        rows = decode_rows(memoryview(b"\0" + raw)[1:], wire, n, d)  # wherever it begins
        assert np.isfinite(rows).all()
        assert rows.tobytes() == decode_rows(raw, wire, n, d).tobytes()


def test_f32_is_decoded_without_a_copy_and_unaligned_bytes_with_one() -> None:
    data = np.arange(6, dtype="<f4").tobytes()
    whole = decode_rows(memoryview(data), WireType.F32, 2, 3)
    assert not whole.flags.owndata
    assert not whole.flags.writeable
    shifted = decode_rows(memoryview(b"\0" + data)[1:], WireType.F32, 2, 3)
    assert shifted.flags.aligned
    assert np.array_equal(whole, shifted)


@pytest.mark.parametrize("wire", list(WireType))
def test_a_strided_array_is_encoded_row_by_row(wire: WireType) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    assert np.allclose(decode_rows(encode_rows(rows, wire)[1], wire, 3, 2), rows, rtol=0.07, atol=0.05)
