"""Every frame's bytes: fixed vectors, and round trips of any frame in any pieces."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.codec import WireType, rows_size
from swarmnode.dispatch.frame_decoder import FrameDecoder
from swarmnode.dispatch.frames import (
    U8,
    U16,
    Answer,
    CallFrame,
    Cancel,
    Frame,
    FrameType,
    Goodbye,
    Hello,
    HoldingsUpdate,
    Key,
    Limits,
    Refuse,
    RefuseCode,
    SiteHoldings,
    Welcome,
)

KEY = Key(bytes(range(32)), bytes(range(32, 64)), "m", "engine", "é")
KEY_HEX = "0200" + bytes(range(64)).hex() + "016d" + "06656e67696e65" + "02c3a9"
EXACT = CallFrame(
    7, 3, False, False, 0, 1, 2, 2, np.array([0, 1, 1], np.uint16), np.array([5, 6, 300], np.uint16), None, b"abcd"
)
PARTIAL = dataclasses.replace(EXACT, partial=True, weights=np.array([1, 0.5, -1], np.float32))
NARROW = dataclasses.replace(PARTIAL, wire_out=2, wire_back=3, experts=np.array([5, 6, 255], np.uint8))
DECODE = dataclasses.replace(NARROW, n_tokens=1, n_rows=1, tokens=np.zeros(3, np.uint16))

VECTORS: list[tuple[Frame, str]] = [
    (Hello(KEY), "4f00000001" + KEY_HEX),
    (
        Welcome(KEY, Limits(4096, 1 << 22, 8), (SiteHoldings(2, 12, 0b1000_0000_0101),)),
        "6100000002" + KEY_HEX + "00100000" + "00004000" + "0800" + "0100" + "02000c000508",
    ),
    (
        HoldingsUpdate((SiteHoldings(0, 1, 1), SiteHoldings(1, 8, 0))),
        "0d00000003" + "0200" + "0000010001" + "0100080000",
    ),
    (
        EXACT,
        "2f00000004" + "0700000000000000" + "0300" + "00000100" + "02000000" + "02000000" + "03000000" + "04000000"
        "000001000100" + "050006002c01" + "61626364",
    ),
    (
        PARTIAL,
        "3b00000004" + "0700000000000000" + "0300" + "01000100" + "02000000" + "02000000" + "03000000" + "04000000"
        "000001000100" + "050006002c01" + "0000803f0000003f000080bf" + "61626364",
    ),
    (
        NARROW,
        "3800000004" + "0700000000000000" + "0300" + "05020300" + "02000000" + "02000000" + "03000000" + "04000000"
        "000001000100" + "0506ff" + "0000803f0000003f000080bf" + "61626364",
    ),
    (
        DECODE,
        "3200000004" + "0700000000000000" + "0300" + "05020300" + "01000000" + "01000000" + "03000000" + "04000000"
        "0506ff" + "0000803f0000003f000080bf" + "61626364",
    ),
    (
        Answer(9, 1, 2, 3, 4, b"\1\2"),
        "1f00000005" + "0900000000000000" + "01000000" + "02000000" + "03000000" + "04000000" + "02000000" + "0102",
    ),
    (Refuse(1, RefuseCode.OVERLOADED, "busy"), "0f00000006" + "0100000000000000" + "02" + "0462757379"),
    (Cancel(1 << 63), "0900000007" + "0000000000000080"),
    (Goodbye("bye"), "0500000008" + "03627965"),
]


def fields(frame: Frame) -> dict[str, object]:
    """A frame as plain values, so that arrays and views compare."""
    values = {f.name: getattr(frame, f.name) for f in dataclasses.fields(frame)}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            values[name] = value.tolist()
        elif isinstance(value, memoryview):
            values[name] = bytes(value)
    return {"type": frame.type, **values}


def decode(data: bytes) -> list[dict[str, object]]:
    return [fields(frame) for frame in FrameDecoder(FrameType).feed(data)]


@pytest.mark.parametrize(("frame", "expected"), VECTORS, ids=lambda v: getattr(getattr(v, "type", None), "name", "hex"))
def test_vector(frame: Frame, expected: str) -> None:
    assert frame.encode().hex() == expected
    assert decode(bytes.fromhex(expected)) == [fields(frame)]


def test_every_frame_type_has_a_vector() -> None:
    assert {frame.type for frame, _ in VECTORS} == set(FrameType)


@pytest.mark.parametrize("frame", [frame for frame, _ in VECTORS], ids=lambda f: f.type.name)
def test_bytes_after_the_known_fields_are_ignored(frame: Frame) -> None:
    data = frame.encode()
    longer = (int.from_bytes(data[:4], "little") + 3).to_bytes(4, "little") + data[4:] + b"new"
    assert decode(longer) == [fields(frame)]


def test_token_indices_are_wide_only_for_many_tokens() -> None:
    few = dataclasses.replace(EXACT, n_tokens=65536)
    many = dataclasses.replace(EXACT, n_tokens=65537, tokens=np.array([0, 1, 65536], np.uint32))
    assert len(many.encode()) == len(few.encode()) + 2 * 3
    assert decode(many.encode()) == [fields(many)]


def test_wide_experts_of_one_token() -> None:
    frame = dataclasses.replace(EXACT, n_tokens=1, n_rows=1, tokens=np.zeros(3, np.uint16))
    assert len(frame.encode()) == len(EXACT.encode()) - 2 * 3
    assert decode(frame.encode()) == [fields(frame)]


def test_a_token_costs_what_is_said_of_it() -> None:
    def size(call_rows: int, answer_rows: int) -> int:
        call = dataclasses.replace(
            DECODE,
            tokens=np.zeros(8, np.uint16),
            experts=np.zeros(8, np.uint8),
            weights=np.zeros(8, np.float32),
            rows=bytes(call_rows),
        )
        return len(call.encode()) + len(Answer(1, 0, 1, 0, 0, bytes(answer_rows)).encode())

    half, eighth = (rows_size(wire, 1, 3072) for wire in (WireType.F16, WireType.INT8))
    assert size(half, half) <= 12_400
    assert size(eighth, half) <= 9_400
    assert size(eighth, eighth) <= 6_700


def test_long_texts_are_cut_between_characters() -> None:
    [frame] = FrameDecoder(FrameType).feed(Goodbye("é" * 200).encode())
    assert frame == Goodbye("é" * 127)


def test_a_welcome_of_another_version_is_read_up_to_its_key() -> None:
    other = dataclasses.replace(KEY, version=9)
    data = Welcome(other, Limits(1, 1, 1), (SiteHoldings(0, 8, 1),)).encode()
    assert decode(data) == [fields(Welcome(other, Limits(0, 0, 0), ()))]


u8, u16, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
texts = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=40)
keys = st.builds(Key, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), texts, texts, texts)


@st.composite
def holdings(draw: st.DrawFn) -> tuple[SiteHoldings, ...]:
    sites = draw(st.lists(st.integers(0, 0xFFFF), unique=True, max_size=4))
    made = []
    for site in sites:
        n_expert = draw(st.integers(0, 70))
        made.append(SiteHoldings(site, n_expert, draw(st.integers(0, (1 << n_expert) - 1))))
    return tuple(made)


@st.composite
def call_frames(draw: st.DrawFn) -> CallFrame:
    n = draw(st.integers(0, 9))
    partial, row_per_pair = draw(st.booleans()), draw(st.booleans())
    n_tokens = draw(st.one_of(st.just(1), u32))
    token = np.uint16 if n_tokens <= 65536 else np.uint32
    highest = 0 if n_tokens == 1 else np.iinfo(token).max
    expert = draw(st.sampled_from([U8, U16]))
    weights = draw(st.lists(st.floats(width=32, allow_nan=False), min_size=n, max_size=n))
    return CallFrame(
        draw(u64),
        draw(u16),
        partial,
        row_per_pair,
        draw(u8),
        draw(u8),
        n_tokens,
        draw(u32),
        np.array(draw(st.lists(st.integers(0, highest), min_size=n, max_size=n)), token),
        np.array(draw(st.lists(st.integers(0, 256**expert.itemsize - 1), min_size=n, max_size=n)), expert),
        np.array(weights, np.float32) if partial and not row_per_pair else None,
        draw(st.binary(max_size=40)),
    )


frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, keys),
    st.builds(Welcome, keys, st.builds(Limits, u32, u32, u16), holdings()),
    st.builds(HoldingsUpdate, holdings()),
    call_frames(),
    st.builds(Answer, u64, u8, u32, u32, u32, st.binary(max_size=40)),
    st.builds(Refuse, u64, st.sampled_from(RefuseCode), texts),
    st.builds(Cancel, u64),
    st.builds(Goodbye, texts),
)


@given(st.lists(frames, max_size=5), st.lists(st.integers(1, 30), max_size=60))
def test_any_frames_in_any_pieces_come_out_as_they_went_in(sent: list[Frame], cuts: list[int]) -> None:
    data = b"".join(frame.encode() for frame in sent)
    decoder, got, at = FrameDecoder(FrameType), [], 0
    for cut in [*cuts, len(data)]:
        got += [fields(frame) for frame in decoder.feed(data[at : at + cut])]
        at += cut
    assert got == [fields(frame) for frame in sent]
