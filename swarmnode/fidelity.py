"""How far a cheaper wire is from the exact run: layer cosine, argmax, KL, NLL. Pure numbers, no model, no network.

Plain argmax agreement is no gate: the router's choice is discrete, so the smallest error flips near-ties. What
separates good from bad is the cosine of one layer's output with exact inputs (teacher-forced), at its lowest quantile,
and argmax agreement among positions whose two best logits are clearly apart.

A long text is taken in piece by piece (`CosineTail`, `LogitSums`): the logits of 10,000 positions over a vocabulary of
150,000 would take 6 GB. Called by `gate/` and `bench/fidelity.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

CLEAR_MARGIN = 0.1  # logits: positions whose two best are closer than this are near-ties
LOWEST_SHARE = 0.001  # of all rows: the quantile that a good codec is told from a bad one by


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Agreement with the exact logits over `positions`; `confident` of them have a margin above CLEAR_MARGIN.

    `argmax` and `argmax_confident` are shares (1.0 is all, of none it is 0.0); `kl` is KL(exact ‖ other) and `dnll` the
    change of the mean negative log-likelihood of the text, both in nats per position. `broken` positions had NaN or
    infinity instead of logits: they agree in nothing, and are left out of `kl` and `dnll`.
    """

    positions: int
    confident: int
    argmax: float
    argmax_confident: float
    kl: float
    dnll: float
    broken: int = 0


def row_cosines(a: F32, b: F32) -> F64:
    """Cosine of each row of a with the same row of b, [n]; 1 where both rows are zero, NaN where one is."""
    return RowReference(a).cosines(b)


class RowReference:
    """Rows [n, d] that several others are compared with."""

    def __init__(self, rows: F32) -> None:
        self._rows = rows.astype(np.float64)
        self._norms = np.linalg.norm(self._rows, axis=1)

    def cosines(self, rows: F32) -> F64:
        """See `row_cosines`; NaN too where a row holds NaN or infinity."""
        other = rows.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            norms = self._norms * np.linalg.norm(other, axis=1)
            cosines = np.einsum("ij,ij->i", self._rows, other) / norms
        return np.where((self._norms == 0) & ~other.any(axis=1), 1.0, cosines)


def lowest(values: F64, share: float = LOWEST_SHARE) -> float:
    """The value that `share` of all lie at or below: the nearest-rank quantile, never an interpolation."""
    return float(np.sort(values)[_rank(len(values), share)])


def _rank(count: int, share: float) -> int:
    return max(0, math.ceil(count * share) - 1)


class CosineTail:
    """Mean and lowest quantile of cosines that come piece by piece, `expected` in all. NaN counts as −1."""

    def __init__(self, expected: int, share: float = LOWEST_SHARE) -> None:
        self._share = share
        self._keep = _rank(expected, share) + 1
        self._low: F64 = np.empty(0)
        self._sum = 0.0
        self.count = 0

    def add(self, cosines: F64) -> None:
        """Take in some more, [n]."""
        values = np.where(np.isfinite(cosines), cosines, -1.0)
        self._sum += float(values.sum())
        self.count += len(values)
        self._low = np.sort(np.concatenate([self._low, values]))[: self._keep]

    @property
    def lowest(self) -> float:
        """As `lowest` of all that came; −1 where nothing did."""
        return float(self._low[min(_rank(self.count, self._share), len(self._low) - 1)]) if self.count else -1.0

    @property
    def mean(self) -> float:
        """Of all that came; −1 where nothing did."""
        return self._sum / self.count if self.count else -1.0


class ExactLogits:
    """Logits [n, n_vocab] that several others are compared with; `targets` [n] is what really follows each."""

    def __init__(self, logits: F32, targets: I64) -> None:
        self.targets = targets
        self.argmax = logits.argmax(axis=1)
        top = np.partition(logits, -2, axis=1)[:, -2:]
        self.confident = (top[:, 1] - top[:, 0]) > CLEAR_MARGIN
        self.log_p = _log_softmax(logits)
        self.p = np.exp(self.log_p)


class LogitSums:
    """A `LogitComparison` in the making."""

    def __init__(self) -> None:
        self._positions = self._confident = self._agree = self._agree_confident = self._broken = 0
        self._kl = self._dnll = 0.0

    def add(self, exact: ExactLogits, other: F32) -> None:
        """Take in other logits [n, n_vocab] of the same positions."""
        whole = _finite_rows(other)
        agree = (exact.argmax == other.argmax(axis=1)) & whole
        self._positions += len(agree)
        self._confident += int(exact.confident.sum())
        self._agree += int(agree.sum())
        self._agree_confident += int((agree & exact.confident).sum())
        self._broken += int((~whole).sum())
        rows = np.flatnonzero(whole)
        log_p, p, targets = exact.log_p, exact.p, exact.targets
        if len(rows) < len(whole):
            log_p, p, targets, other = log_p[rows], p[rows], targets[rows], other[rows]
        difference = log_p - _log_softmax(other)
        self._dnll += float(difference[np.arange(len(rows)), targets].sum())
        difference *= p
        self._kl += float(difference.sum())

    def result(self) -> LogitComparison:
        """Of all that came."""
        compared = max(1, self._positions - self._broken)
        return LogitComparison(
            positions=self._positions,
            confident=self._confident,
            argmax=self._agree / max(1, self._positions),
            argmax_confident=self._agree_confident / max(1, self._confident),
            kl=self._kl / compared,
            dnll=self._dnll / compared,
            broken=self._broken,
        )


def compare_logits(exact: F32, other: F32, targets: I64) -> LogitComparison:
    """Compare logits [n, n_vocab] of the same positions; `targets` [n] is the token that really follows each."""
    sums = LogitSums()
    sums.add(ExactLogits(exact, targets), other)
    return sums.result()


def _finite_rows(rows: F32) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(rows).all(axis=1), np.bool_)


def _log_softmax(logits: F32) -> F64:
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
    return z
