"""What may be sent before a server has let its client in: little, and the same at both ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import PeerFault, ProtocolViolation, TooMuchEarly
from transport.proto.early import EARLY_BYTES, EARLY_STREAMS, EarlyAllowance


def test_it_is_counted_over_all_streams() -> None:
    early = EarlyAllowance()
    assert not early.is_used
    early.take(4, EARLY_BYTES - 10)
    early.take(8, 10)
    assert early.is_used
    with pytest.raises(
        TooMuchEarly, match="16385 bytes on 2 streams before it was let in, at most 16384 on 4"
    ) as caught:
        early.take(4, 1)
    assert (caught.value.size, caught.value.streams) == (EARLY_BYTES + 1, 2)
    assert isinstance(caught.value, ProtocolViolation)
    assert isinstance(caught.value, PeerFault)
    assert early.size == EARLY_BYTES


def test_streams_without_bytes_count() -> None:
    early = EarlyAllowance()
    for number in range(EARLY_STREAMS):
        early.take(4 * number, 0)
    assert not early.fits(0)
    early.take(0, 0)
    with pytest.raises(TooMuchEarly, match="on 5 streams"):
        early.take(4 * EARLY_STREAMS, 0)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9000)), max_size=60))
def test_any_sequence_stays_within_the_limits_and_a_sender_that_asks_first_never_exceeds_them(
    taken: list[tuple[int, int]],
) -> None:
    early, kept, streams = EarlyAllowance(), 0, set[int]()
    for stream, size in taken:
        asked = stream not in streams and early.fits(size)
        try:
            early.take(stream, size)
        except TooMuchEarly:
            assert not asked
        else:
            kept += size
            streams.add(stream)
        assert early.size == kept <= EARLY_BYTES
        assert len(streams) <= EARLY_STREAMS
