"""Segments: fixed bytes, any order, and bounded memory whatever comes."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.proto.segments import (
    HEADER_BYTES,
    MAX_AGE,
    MAX_COUNT,
    MAX_TOTAL,
    MIN_SIZE,
    Reassembler,
    SegmentCounters,
    split,
    split_all,
)

DATAGRAM = bytes(range(1, 15))
VECTOR = [
    "21000000070003" + "0102030405",
    "21000000070103" + "060708090a",
    "21000000070203" + "0b0c0d0e",
]  # fmt: skip
PIECES = [bytes.fromhex(wire) for wire in VECTOR]


def segment(index: int, total: int, data: bytes, ident: int = 7) -> bytes:
    return bytes([0x21, 0, 0, 0, ident, index, total]) + data


def test_fixed_bytes() -> None:
    assert [piece.hex() for piece in split(DATAGRAM, 12, 7)] == VECTOR
    reassembler = Reassembler()
    assert [reassembler.add("a", piece, 0.0) for piece in PIECES] == [None, None, DATAGRAM]


@given(st.binary(min_size=1, max_size=MAX_TOTAL), st.integers(MIN_SIZE, 9000), st.integers(0, 2**33), st.data())
def test_round_trip_in_any_order(datagram: bytes, size: int, ident: int, data: st.DataObject) -> None:
    pieces = split(datagram, size, ident)
    assert max(map(len, pieces)) <= size
    assert len({len(piece) for piece in pieces[:-1]}) <= 1
    assert len(pieces) <= MAX_COUNT
    if len(datagram) <= size:
        assert pieces == [datagram]
        return
    assert not any(piece[0] & 0x40 for piece in pieces)
    reassembler = Reassembler()
    shuffled = data.draw(st.permutations(pieces))
    for piece in shuffled[:-1]:
        assert reassembler.add("a", piece, 0.0) is None
    assert reassembler.add("a", shuffled[-1], 0.0) == datagram
    assert (reassembler.held_bytes, reassembler.held_count) == (0, 0)


@pytest.mark.parametrize(("datagram", "carried", "pieces"), [(1452, 1200, 2), (1452, 1372, 2), (8900, 1452, 7)])
def test_a_burst_becomes_segments_of_one_size(datagram: int, carried: int, pieces: int) -> None:
    burst = [bytes([number]) * datagram for number in range(64)]
    cut = split_all(burst, carried, count().__next__)
    assert len(cut) == 64 * pieces
    assert {len(piece) for piece in cut[::pieces]} == {-(-datagram // pieces) + HEADER_BYTES}
    reassembler = Reassembler()
    assert [whole for piece in cut if (whole := reassembler.add("a", piece, 0.0))] == burst


def test_what_fits_is_not_cut_and_keeps_its_place() -> None:
    idents = count(5)
    assert split_all([b"a", DATAGRAM, b"b"], 12, idents.__next__) == [b"a", *split(DATAGRAM, 12, 5), b"b"]
    assert next(idents) == 6


@pytest.mark.parametrize(
    ("length", "size"), [(MAX_TOTAL + 1, 9000), (17 * 100, 107), (100, HEADER_BYTES), (100, 1), (100, 0)]
)
def test_what_cannot_be_cut_is_our_mistake(length: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes"):
        split(bytes(length), size, 0)


def test_datagrams_of_different_sources_and_names_do_not_mix() -> None:
    reassembler = Reassembler()
    other = split(DATAGRAM, 12, 8)
    for piece in PIECES[:2]:
        reassembler.add("a", piece, 0.0)
    assert reassembler.add("b", PIECES[2], 0.0) is None
    assert reassembler.add("a", other[2], 0.0) is None
    assert reassembler.held_count == 3
    assert reassembler.add("a", PIECES[2], 0.0) == DATAGRAM


def test_a_piece_that_comes_twice_counts_once() -> None:
    reassembler = Reassembler()
    assert [reassembler.add("a", PIECES[index], 0.0) for index in (0, 0, 1, 1, 2)] == [None] * 4 + [DATAGRAM]


@pytest.mark.parametrize(
    "pieces",
    [
        (segment(0, 3, b"abc"), segment(1, 4, b"abc")),  # count
        (segment(0, 3, b"abc"), segment(4, 5, b"abc")),
        (segment(0, 3, b"abc"), segment(1, 3, b"ab")),  # length
        (segment(0, 3, b"abc"), segment(0, 3, b"ab")),
        (segment(0, 3, b"abc"), segment(2, 3, b"abcd")),  # the last is longer
        (segment(2, 3, b"abcd"), segment(0, 3, b"abc")),
        (segment(0, 3, b"abc"), segment(0, 3, b"abd")),  # content
        (segment(2, 3, b"abc"), segment(2, 3, b"ab")),
    ],
)
def test_pieces_that_disagree_drop_the_whole(pieces: tuple[bytes, bytes]) -> None:
    reassembler = Reassembler()
    for piece in pieces:
        assert reassembler.add("a", piece, 0.0) is None
    assert (reassembler.held_bytes, reassembler.held_count) == (0, 0)
    assert reassembler.counters == SegmentCounters(conflicting=1)


@pytest.mark.parametrize(
    "piece", [segment(0, 16, bytes(1067)), segment(15, 16, bytes(1001)), segment(1, 2, bytes(8001))]
)
def test_a_datagram_that_would_be_too_long_is_not_begun(piece: bytes) -> None:
    reassembler = Reassembler()
    reassembler.add("a", piece, 0.0)
    assert (reassembler.held_count, reassembler.counters.conflicting) == (0, 1)


@pytest.mark.parametrize(
    "data", [b"", b"\x21", PIECES[0][:7], b"\x22" + PIECES[0][1:], segment(0, 1, b"a"), segment(0, 17, b"a"),
             segment(2, 2, b"a"), segment(0, 0, b"a")],
)  # fmt: skip
def test_what_is_no_segment_is_counted(data: bytes) -> None:
    reassembler = Reassembler()
    assert reassembler.add("a", data, 0.0) is None
    assert (reassembler.held_count, reassembler.counters.malformed) == (0, 1)


def test_old_pieces_are_given_up() -> None:
    reassembler = Reassembler()
    reassembler.add("a", PIECES[0], 0.0)
    reassembler.add("b", PIECES[0], MAX_AGE)
    assert reassembler.held_count == 2
    reassembler.add("c", PIECES[0], MAX_AGE + 0.1)
    assert (reassembler.held_count, reassembler.counters.expired) == (2, 1)
    # a name that comes again, after a restart of the sender, is another datagram
    for index in (1, 2):
        assert reassembler.add("b", PIECES[index], 3 * MAX_AGE) is None
    assert reassembler.add("b", PIECES[0], 3 * MAX_AGE) == DATAGRAM


def test_a_source_gives_up_its_own_oldest_first() -> None:
    reassembler = Reassembler(limit_count=16)
    reassembler.add("quiet", PIECES[0], 0.0)
    for ident in range(100):
        reassembler.add("loud", segment(0, 2, b"a", ident), 0.1)
    assert reassembler.held_count == 5
    assert reassembler.add("loud", segment(1, 2, b"a", 99), 0.1) == b"aa"
    assert reassembler.add("loud", segment(1, 2, b"a", 95), 0.1) is None
    for index in (1, 2):
        whole = reassembler.add("quiet", PIECES[index], 0.2)
    assert whole == DATAGRAM


def test_pieces_that_nobody_completes_leave_nothing() -> None:
    reassembler = Reassembler()
    reassembler.add("a", PIECES[0], 0.0)
    reassembler.add("b", PIECES[0], 0.0)
    assert reassembler.held_count == 2
    reassembler.add("c", PIECES[0], MAX_AGE + 1)
    assert (reassembler.held_count, reassembler.held_bytes) == (1, 5)
    assert reassembler.add("a", PIECES[1], MAX_AGE + 1) is None


def test_many_sources_stay_within_the_limits() -> None:
    reassembler = Reassembler(limit_bytes=0, limit_count=32)  # 64,000 bytes is the least
    for number in range(1000):
        reassembler.add(number, segment(0, 2, bytes(4000)), 0.0)
        assert reassembler.held_bytes <= 64_000
    assert reassembler.held_count == 16
    for number in range(1000):
        reassembler.add(number, segment(0, 2, b"a"), MAX_AGE)
    assert reassembler.held_count == 32


fragments = st.tuples(
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(1, 4),
    st.sampled_from([b"", b"a", b"b", b"ab", bytes(5000), bytes(15_000)]),
    st.sampled_from([0.0, 0.0, 0.5, MAX_AGE + 1]),
)


@given(st.lists(fragments, max_size=80))
def test_fuzz_any_sequence_stays_within_the_limits(sequence: list[tuple[int, int, int, int, bytes, float]]) -> None:
    reassembler, now = Reassembler(limit_bytes=0, limit_count=4), 0.0
    for source, ident, index, total, data, wait in sequence:
        now += wait
        whole = reassembler.add(source, segment(index, total, data, ident), now)
        assert whole is None or 0 < len(whole) <= MAX_TOTAL
        assert reassembler.held_count <= 4
        assert 0 <= reassembler.held_bytes <= 64_000
        assert bool(reassembler.held_count) == bool(reassembler.held_bytes)
    reassembler.add("later", segment(0, 2, b"abc"), now + MAX_AGE + 1)
    assert (reassembler.held_count, reassembler.held_bytes) == (1, 3)


@given(st.binary(max_size=40), st.booleans())
def test_fuzz_any_bytes(data: bytes, marked: bool) -> None:
    reassembler = Reassembler()
    assert reassembler.add("a", b"\x21" + data if marked else data, 0.0) is None
