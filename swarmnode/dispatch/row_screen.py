"""Whether a row can be an output of its expert at all: a test that costs a few dot products, for every row.

Pure. An expert ends in a matrix product y = D·h. Where D is taller than wide, y lies in D's column space whatever h is;
where it is square, some directions of y are hardly ever reached (the left singular vectors of D's smallest singular
values). Energy in those directions is the trace of something that D did not make: noise of a tenth of a row's length
stands out of honest rows by more than an order of magnitude, also after the rounding to F16. It proves nothing (whoever
knows D can stay within), so what stands out is only computed once more; see `spot_check.py`.

Only whoever has the weights can have a screen: the backbone, with the model's own file. Rows of single experts can be
screened, sums of several cannot; so a node makes a screen in exact mode only, whose rows are F32. Sites whose rows
travel as INT8 or FP8 are not screened (`checks.py`): their rounding is some 2e-4 and 1e-3 of a row's energy, thousands
of times F16's, and what stood out would be that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from swarmnode.dispatch.codec import F32, WireType

DIRECTIONS = 8  # more say less: the smallest singular values are the emptiest directions
MAX_SQUARE = 1024  # rows of a matrix whose singular vectors are worth working out
WIRE_ENERGY = 1e-7  # of a row in F16: what rounding puts everywhere
COARSEST_SCREENED = WireType.F16  # see above


class Screen(Protocol):
    """What the client asks of a screen. Loop thread; must return within microseconds."""

    def score(self, site: int, experts: NDArray[np.int32], rows: F32) -> F32 | None:
        """Return for each row [n, d_out] of its expert [n] how little it looks like an output of it, or None."""


class RowScreen:
    """A screen from the experts' last matrices.

    `down(site, expert)` returns D as float32[d_out, d_ff], or None where the expert does not end in a plain product;
    it is called once per expert, from `prepare`, on whichever thread that runs on.
    """

    def __init__(self, down: Callable[[int, int], F32 | None]) -> None:
        self._down = down
        self._directions: dict[tuple[int, int], F32 | None] = {}

    def prepare(self, site: int, expert: int) -> None:
        """Work out the directions of one expert: a fraction of a second for a large one. Not on the loop thread."""
        matrix = self._down(site, expert)
        self._directions[site, expert] = None if matrix is None else empty_directions(matrix)

    def score(self, site: int, experts: NDArray[np.int32], rows: F32) -> F32 | None:
        """See `Screen`. Rows of experts that are not prepared score 0; None where no expert of these is."""
        scores = np.zeros(len(rows), np.float32)
        known = False
        for i, expert in enumerate(experts.tolist()):
            directions = self._directions.get((site, expert))
            if directions is None:
                continue
            known = True
            row = rows[i]
            within = directions @ row
            energy = float(row @ row)
            scores[i] = float(within @ within) / energy if energy > 0 else np.inf
        return scores if known else None


def empty_directions(matrix: F32) -> F32 | None:
    """Return float32[m, d_out]: directions that outputs of `matrix` [d_out, d_ff] hardly have, or None.

    Scaled so that an output of white input scores about 1, whichever expert it is of.
    """
    d_out, d_ff = matrix.shape
    total = float(np.square(matrix, dtype=np.float64).sum())
    if not np.isfinite(total) or total <= 0:
        return None
    if d_ff + DIRECTIONS <= d_out and d_out > MAX_SQUARE:
        basis, _ = np.linalg.qr(matrix)
        seeds = np.random.default_rng(d_ff).standard_normal((d_out, DIRECTIONS)).astype(np.float32)
        for _ in range(2):  # once leaves what rounding leaves
            seeds -= basis @ (basis.T @ seeds)
        chosen, _ = np.linalg.qr(seeds)
        reached = 0.0
    elif d_out <= MAX_SQUARE:
        values, vectors = np.linalg.eigh(matrix.astype(np.float64) @ matrix.T.astype(np.float64))
        chosen, reached = vectors[:, :DIRECTIONS], float(np.maximum(values[:DIRECTIONS], 0).sum()) / total
    else:
        return None
    usual = reached + WIRE_ENERGY * chosen.shape[1] / d_out
    return np.ascontiguousarray(chosen.T / np.sqrt(usual), np.float32)
