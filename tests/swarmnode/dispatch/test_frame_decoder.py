"""Hostile bytes: the decoder returns frames or raises BadFrame, and holds no more than it was fed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.frame_decoder import FrameDecoder
from swarmnode.dispatch.frames import (
    HEADER,
    MAX_CONTROL,
    TO_CLIENT,
    TO_WORKER,
    Answer,
    Cancel,
    FrameType,
    Goodbye,
    HoldingsUpdate,
    SiteHoldings,
)
from swarmnode.errors import BadFrame

bodies = st.builds(
    lambda kind, body: HEADER.pack(1 + len(body), kind) + body, st.sampled_from(FrameType), st.binary(max_size=120)
)


@given(st.lists(st.one_of(bodies, st.binary(max_size=40)), max_size=6), st.integers(1, 50))
def test_arbitrary_bytes_are_frames_or_bad_frame(parts: list[bytes], step: int) -> None:
    data = b"".join(parts)
    decoder = FrameDecoder(FrameType, max_bulk=1000)
    try:
        for at in range(0, len(data), step):
            for frame in decoder.feed(data[at : at + step]):
                assert frame.type in FrameType
    except BadFrame:
        with pytest.raises(BadFrame):
            decoder.feed(b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEADER.pack(9, 99), "frame type 99 is unknown"),
        (HEADER.pack(0, FrameType.CANCEL), "a CANCEL frame of 0 bytes"),
        (HEADER.pack(MAX_CONTROL + 1, FrameType.HELLO), "1 to 1048576 are allowed"),
        (HEADER.pack(1001, FrameType.CALL), "a CALL frame of 1001 bytes; 1 to 1000 are allowed"),
        (HEADER.pack(5, FrameType.CANCEL) + bytes(4), "a CANCEL frame ends 4 bytes before its fields do"),
        (HEADER.pack(31, FrameType.CALL) + bytes(10) + b"\x08" + bytes(19), "unknown flags 0x08"),
        (HEADER.pack(11, FrameType.REFUSE) + bytes(8) + b"\x63\0", "unknown code 99"),
        (HEADER.pack(3, FrameType.GOODBYE) + b"\x01\xff", "not UTF-8"),
    ],
)
def test_bad_bytes_say_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(BadFrame, match=message):
        FrameDecoder(FrameType, max_bulk=1000).feed(data)


def test_a_length_is_judged_before_the_frame_has_come() -> None:
    decoder = FrameDecoder(FrameType, max_bulk=1000)
    decoder.feed(HEADER.pack(1000, FrameType.ANSWER))
    with pytest.raises(BadFrame):
        FrameDecoder(FrameType, max_bulk=1000).feed(HEADER.pack(1 << 31, FrameType.ANSWER))


def test_each_side_accepts_only_what_it_may_be_sent() -> None:
    assert not TO_WORKER & TO_CLIENT
    assert set(FrameType) == TO_WORKER | TO_CLIENT
    with pytest.raises(BadFrame, match="not for this side"):
        FrameDecoder(TO_WORKER).feed(Answer(1, 0, 0, 0, 0, b"").encode())
    with pytest.raises(BadFrame, match="not for this side"):
        FrameDecoder(TO_CLIENT).feed(Cancel(1).encode())


@pytest.mark.parametrize(
    "holdings", [(SiteHoldings(4, 8, 1), SiteHoldings(4, 8, 2)), (SiteHoldings(4, 7, 0x80),)], ids=["twice", "above"]
)
def test_holdings_that_contradict_themselves(holdings: tuple[SiteHoldings, ...]) -> None:
    with pytest.raises(BadFrame, match="site 4 twice, or an expert above its"):
        FrameDecoder(FrameType).feed(HoldingsUpdate(holdings).encode())


def test_a_call_cannot_claim_more_pairs_than_it_carries() -> None:
    body = bytearray(30)
    body[22:26] = (0xFFFFFFFF).to_bytes(4, "little")
    with pytest.raises(BadFrame, match="before its fields do"):
        FrameDecoder(FrameType).feed(HEADER.pack(31, FrameType.CALL) + body)
    body[10], body[14] = 4 | 2, 1  # the least that a pair can take: a narrow expert and nothing else
    with pytest.raises(BadFrame, match="ends 4294967295 bytes before its fields do"):
        FrameDecoder(FrameType).feed(HEADER.pack(31, FrameType.CALL) + body)


def test_texts_cannot_drive_a_terminal() -> None:
    [frame] = FrameDecoder(FrameType).feed(Goodbye("a\x1b[2Jb").encode())
    assert frame == Goodbye("a�[2Jb")


def test_rows_inside_one_chunk_are_not_copied() -> None:
    data = Answer(1, 0, 1, 0, 0, b"rows").encode()
    [frame] = FrameDecoder(FrameType).feed(data)
    assert isinstance(frame, Answer)
    assert isinstance(frame.rows, memoryview)
    assert frame.rows.obj is data
