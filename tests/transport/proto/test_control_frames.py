from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import BadControlFrame
from transport.proto.control_frames import (
    MAX_BODY,
    MAX_CREDENTIALS,
    MAX_LANE_BYTES,
    Accept,
    Authenticate,
    ConnectionCredit,
    ControlFrame,
    FrameReader,
    Reset,
    StreamCredit,
)

u64 = st.integers(0, 2**64 - 1)
frames = st.one_of(
    st.builds(
        Authenticate,
        version=st.just(1),
        client=st.binary(min_size=32, max_size=32),
        server=st.binary(min_size=32, max_size=32),
        boot_id=st.binary(min_size=16, max_size=16),
        previous=u64,
        stream_window=u64,
        connection_window=u64,
        lane=st.text(max_size=8),
        signature=st.binary(min_size=64, max_size=64),
    ),
    st.builds(
        Accept,
        version=st.integers(0, 255),
        boot_id=st.binary(min_size=16, max_size=16),
        stream_window=u64,
        connection_window=u64,
        credentials=st.binary(max_size=MAX_CREDENTIALS),
    ),
    st.builds(ConnectionCredit, u64),
    st.builds(StreamCredit, u64, u64),
    st.builds(Reset, u64, u64, u64),
)

VECTORS: list[tuple[ControlFrame, str]] = [
    (
        Authenticate(
            1, b"\x11" * 32, b"\x22" * 32, b"\x33" * 16, 5, 0x800000, 0x1000000, "bulk", b"\x44" * 64, b"card"
        ),
        "0100b4"
        "01" + "11" * 32 + "22" * 32 + "33" * 16 + "0000000000000005"
        "0000000000800000"
        "0000000001000000"
        "0462756c6b" + "44" * 64 + "000463617264",
    ),
    (
        Accept(1, b"\x33" * 16, 0x800000, 0x1000000, b"\x07"),
        "02002401" + "33" * 16 + "00000000008000000000000001000000" + "000107",
    ),
    (ConnectionCredit(0x1800000), "0300080000000001800000"),
    (StreamCredit(4, 0xC00000), "04001000000000000000040000000000c00000"),
    (Reset(8, 3, 1000), "050018000000000000000800000000000000030000000000" + "0003e8"),
]


@pytest.mark.parametrize(("frame", "wire"), VECTORS, ids=lambda value: type(value).__name__)
def test_fixed_bytes(frame: ControlFrame, wire: str) -> None:
    assert frame.encode().hex() == wire
    assert FrameReader().feed(bytes.fromhex(wire)) == [frame]


@given(st.lists(frames, max_size=5), st.integers(1, 50))
def test_round_trip_in_pieces_of_any_size(sent: list[ControlFrame], piece: int) -> None:
    wire = b"".join(frame.encode() for frame in sent)
    reader = FrameReader()
    received: list[ControlFrame] = []
    for at in range(0, len(wire), piece):
        received += reader.feed(wire[at : at + piece])
    assert received == sent


@given(st.binary(max_size=2000))
def test_any_bytes_give_frames_or_a_typed_error(data: bytes) -> None:
    with contextlib.suppress(BadControlFrame):
        FrameReader().feed(data)


@given(frames, st.data())
def test_a_changed_byte_gives_frames_or_a_typed_error(frame: ControlFrame, data: st.DataObject) -> None:
    wire = bytearray(frame.encode())
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadControlFrame):
        FrameReader().feed(bytes(wire))


@given(frames, st.binary(max_size=20))
def test_trailing_bytes_are_tolerated(frame: ControlFrame, extra: bytes) -> None:
    wire = frame.encode()
    longer = wire[:1] + (len(wire) - 3 + len(extra)).to_bytes(2, "big") + wire[3:] + extra
    assert FrameReader().feed(longer) == [frame]


def test_unknown_types_are_skipped() -> None:
    assert FrameReader().feed(bytes.fromhex("7f0003aabbcc") + ConnectionCredit(9).encode()) == [ConnectionCredit(9)]


def test_a_frame_that_is_too_long_is_refused_before_it_is_buffered() -> None:
    with pytest.raises(BadControlFrame, match=f"at most {MAX_BODY}"):
        FrameReader().feed(b"\x01" + (MAX_BODY + 1).to_bytes(2, "big"))


@pytest.mark.parametrize("wire", ["030000", "04000800" + "00" * 7, "020001" + "01", "010001" + "01"])
def test_short_bodies_are_refused(wire: str) -> None:
    with pytest.raises(BadControlFrame, match=r"too short"):
        FrameReader().feed(bytes.fromhex(wire))


def test_a_lane_that_does_not_fit_is_refused() -> None:
    frame = Authenticate(1, bytes(32), bytes(32), bytes(16), 0, 0, 0, "x" * (MAX_LANE_BYTES + 1))
    with pytest.raises(BadControlFrame, match="lane of 33 bytes"):
        FrameReader().feed(frame.encode())


def test_another_version_is_told_apart_whatever_follows() -> None:
    frames = FrameReader().feed(bytes.fromhex("01000302ffff"))
    assert isinstance(frames[0], Authenticate)
    assert frames[0].version == 2


def test_the_signature_covers_every_field_and_the_connection() -> None:
    base = Authenticate(1, b"c" * 32, b"s" * 32, b"b" * 16, 1, 2, 3, "lane")
    variants = [
        Authenticate(1, b"C" * 32, b"s" * 32, b"b" * 16, 1, 2, 3, "lane"),
        Authenticate(1, b"c" * 32, b"S" * 32, b"b" * 16, 1, 2, 3, "lane"),
        Authenticate(1, b"c" * 32, b"s" * 32, b"B" * 16, 1, 2, 3, "lane"),
        Authenticate(1, b"c" * 32, b"s" * 32, b"b" * 16, 9, 2, 3, "lane"),
        Authenticate(1, b"c" * 32, b"s" * 32, b"b" * 16, 1, 2, 3, "Lane"),
    ]
    messages = {variant.message(b"binding" * 4) for variant in variants}
    messages.add(base.message(b"binding" * 4))
    messages.add(base.message(b"another" * 4))
    assert len(messages) == len(variants) + 2


def test_credentials_are_bounded_and_may_be_missing() -> None:
    """What a version without them sent is understood; more than is allowed is refused before anybody looks at it."""
    without = bytes.fromhex("02002101" + "33" * 16 + "00000000008000000000000001000000")
    assert FrameReader().feed(without) == [Accept(1, b"\x33" * 16, 0x800000, 0x1000000)]
    with pytest.raises(BadControlFrame, match="credentials of 513 bytes"):
        FrameReader().feed(Accept(1, bytes(16), 0, 0, bytes(MAX_CREDENTIALS + 1)).encode())
    cut = Accept(1, bytes(16), 0, 0, b"1234").encode()
    with pytest.raises(BadControlFrame, match="credentials of 4 bytes"):
        FrameReader().feed(cut[:1] + (len(cut) - 4).to_bytes(2, "big") + cut[3:-1])
