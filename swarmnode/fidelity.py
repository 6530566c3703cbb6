"""How far a cheaper wire is from the exact run: layer cosine, argmax, KL, NLL. Pure numbers, no model, no network.

Plain argmax agreement is no gate: the router's choice is discrete, so the smallest error flips near-ties. What
separates good from bad is the cosine of one layer's output with exact inputs (teacher-forced), at its lowest quantile,
and argmax agreement among positions whose two best logits are clearly apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

CLEAR_MARGIN = 0.1  # logits: positions whose two best are closer than this are near-ties


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Agreement with the exact logits over `positions`; `confident` of them have a margin above CLEAR_MARGIN.

    `argmax` and `argmax_confident` are shares (1.0 is all); `kl` is KL(exact ‖ other) and `dnll` the change of the mean
    negative log-likelihood of the text, both in nats per position.
    """

    positions: int
    confident: int
    argmax: float
    argmax_confident: float
    kl: float
    dnll: float


def row_cosines(a: F32, b: F32) -> F64:
    """Cosine of each row of a with the same row of b, [n]; 1 where both rows are zero."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    same = (x == y).all(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(same, 1.0, np.einsum("ij,ij->i", x, y) / norms)


def lowest(values: F64, share: float = 0.001) -> float:
    """The value that `share` of all lie at or below: the nearest-rank quantile, never an interpolation."""
    return float(np.sort(values)[max(0, int(np.ceil(len(values) * share)) - 1)])


def compare_logits(exact: F32, other: F32, targets: NDArray[np.int64]) -> LogitComparison:
    """Compare logits [n, n_vocab] of the same positions; `targets` [n] is the token that really follows each."""
    top = np.sort(exact, axis=1)[:, -2:]
    confident = (top[:, 1] - top[:, 0]) > CLEAR_MARGIN
    agree = exact.argmax(axis=1) == other.argmax(axis=1)
    p, q = _log_softmax(exact), _log_softmax(other)
    rows = np.arange(len(targets))
    return LogitComparison(
        positions=len(agree),
        confident=int(confident.sum()),
        argmax=float(agree.mean()),
        argmax_confident=float(agree[confident].mean()) if confident.any() else 1.0,
        kl=float((np.exp(p) * (p - q)).sum(axis=1).mean()),
        dnll=float((p[rows, targets] - q[rows, targets]).mean()),
    )


def _log_softmax(logits: F32) -> F64:
    z = logits.astype(np.float64)
    z -= z.max(axis=1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis=1, keepdims=True)))
