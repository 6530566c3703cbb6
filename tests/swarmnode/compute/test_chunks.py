"""Cutting calls: every pair once, bounded chunks, and no expert changes sides of the kernel threshold."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.chunks import MAX_CHUNK, MIN_CHUNK, TILED_ROWS, chunk_rows, plan_chunks


@given(st.lists(st.integers(0, 5), min_size=1, max_size=300), st.integers(MIN_CHUNK, 64))
def test_chunks(slots_list: list[int], limit: int) -> None:
    slots = np.array(slots_list, np.int32)
    chunks = plan_chunks(slots, limit)
    assert sorted(np.concatenate(chunks).tolist()) == list(range(len(slots)))
    total = np.bincount(slots, minlength=6)
    for chunk in chunks:
        assert 0 < len(chunk) <= limit
        for slot, count in enumerate(np.bincount(slots[chunk], minlength=6)):
            assert count == 0 or (count >= TILED_ROWS) == (total[slot] >= TILED_ROWS)


def test_the_chunk_size_is_bounded_both_ways() -> None:
    assert chunk_rows(1) == MAX_CHUNK
    assert chunk_rows(1 << 40) == MIN_CHUNK
    assert MIN_CHUNK < chunk_rows(100_000) < MAX_CHUNK
