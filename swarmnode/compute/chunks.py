"""How a large call is cut into graphs that fit in memory without changing a bit of the answer. Pure.

ggml's CPU backend picks its kernel per expert, by the number of rows that the batch routes to it: from
TILED_ROWS rows on, quantised types go through a tiled kernel that adds in another order
(`ggml_tiled_min_batch` in ggml-cpu/tiled). So the rows of one expert stay together, and an expert with more
rows than a chunk holds is cut into pieces that are all on the same side of that threshold. Called by
`engine.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarmnode.compute.engine_api import SlotArray

TILED_ROWS = 8
MIN_CHUNK = 2 * TILED_ROWS  # halves of an expert with more rows than this still have TILED_ROWS
MAX_CHUNK = 4096
CHUNK_BYTES = 64 << 20  # intermediate rows of one graph; larger chunks were not measurably faster


def chunk_rows(row_bytes: int) -> int:
    """Pairs per graph, when the intermediate rows of one pair take `row_bytes`."""
    return max(MIN_CHUNK, min(MAX_CHUNK, CHUNK_BYTES // max(1, row_bytes)))


def plan_chunks(slots: SlotArray, limit: int) -> list[npt.NDArray[np.intp]]:
    """Cut pairs into chunks of at most `limit` (≥ MIN_CHUNK): for each chunk the indices of its pairs."""
    order = np.argsort(slots, kind="stable")
    grouped = slots[order]
    cuts = np.flatnonzero(grouped[1:] != grouped[:-1]) + 1
    chunks: list[list[npt.NDArray[np.intp]]] = [[]]
    room = limit
    for group in np.split(order, cuts):
        for piece in np.array_split(group, -(-len(group) // limit)):
            if len(piece) > room:
                chunks.append([])
                room = limit
            chunks[-1].append(piece)
            room -= len(piece)
    return [np.concatenate(pieces) for pieces in chunks]
