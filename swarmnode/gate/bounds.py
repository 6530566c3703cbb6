"""When a wire type is good enough for a model: policy only.

Pure. Two judgements, because neither alone will do (figures: the demo model at Q4_K_M, 3,072 positions).

Of one layer, with exact inputs (teacher-forced): the cosine of its output with the exact one. Its lowest 0.1 % is
0.99994 for F16, 0.9998 for INT8 and 0.9990 for FP8 with a scale per block of 128, and 0.979 for INT8 with one scale for
a whole tensor, which is bad: that one is not told from the good ones by its mean (0.9991), nor by its argmax.

Of the whole model, with every layer's errors together: what comes out. Plain argmax agreement is only shown, never
judged: the router's choice is discrete, so even F16 flips near-ties (99.2 %).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from swarmnode.dispatch.codec import WireName
from swarmnode.fidelity import LogitComparison
from swarmnode.gate.coding import Pair, pair_bytes

LEAST_COSINE = 0.9985  # of a layer's rows, at the lowest 0.1 %; other backends of ggml are accepted from 0.998 on
LEAST_PARTIAL = 0.999999  # the same where nothing but the order of addition differs (F32 both ways)
LEAST_CONFIDENT = 0.998  # argmax agreement where the two best logits are more than 0.1 apart
MOST_KL = 1e-3  # nats per position, where the next is not known
MOST_KL_SHARE = 0.15  # of what the model's own quantisation costs against its unquantised weights
MOST_DNLL = 0.003  # nats per position, either way: a gain that large is noise too
MOST_ERROR = 0.063  # of a layer's rows beside llama.cpp's own, where bits may differ (a GPU): |a - b| / |b|, all rows
# together. Two rows of one length are so far apart at a cosine of 0.998, which is what other backends are held to.
MAX_OWN_KL = 0.5  # nats: a quantisation that costs more has left nothing of the model
MIN_POSITIONS = 1024  # the lowest 0.1 % of fewer rows is the lowest row
MIN_CONFIDENT = 512  # positions with a clear argmax: of fewer than 500 a single one that differs is more than 0.2 %
# Of small models and single layers: the least that any row may have, by what is measured.
LEAST_ROW: Mapping[str, float] = {"partial_f32": LEAST_PARTIAL, "f16": 0.9999, "int8": 0.9985, "fp8": 0.9985}

# What to fall back to where a type fails, one direction of one layer at a time.
STEPS: Mapping[WireName, tuple[WireName, ...]] = {
    "f32": ("f32",),
    "f16": ("f16", "f32"),
    "int8": ("int8", "f16", "f32"),
    "fp8": ("fp8", "f16", "f32"),
}


def most_kl(own_kl: float | None) -> float:
    """The bound for KL; `own_kl` is what the model's own quantisation costs, None where nobody knows."""
    return MOST_KL if own_kl is None else MOST_KL_SHARE * own_kl


def fit(lowest: Mapping[Pair, float], wanted: Pair, d_in: int, d_out: int) -> Pair:
    """The cheapest types for one layer that are no coarser than `wanted` and pass; F32 both ways always does.

    `lowest`: the layer cosine at the lowest 0.1 % of each pair. It is the pair that is judged: FP8 may pass each way
    alone, and fail both ways.
    """
    passing = [pair for pair in fallbacks(wanted) if passes_layer(lowest[pair])]
    return min(passing, key=lambda pair: (pair_bytes(pair, d_in, d_out), -lowest[pair]), default=("f32", "f32"))


def fallbacks(wanted: Pair) -> list[Pair]:
    """`wanted`, and every pair with one or both of its types replaced by finer ones."""
    return list(product(STEPS[wanted[0]], STEPS[wanted[1]]))


def passes_layer(lowest: float) -> bool:
    """Whether one layer may use a pair of types. False for NaN."""
    return lowest >= LEAST_COSINE


def objection(found: LogitComparison, kl_bound: float) -> str:
    """Why these logits are too far from the exact ones; "" where they are not. NaN never passes."""
    if found.broken:
        return f"NaN or infinity in {found.broken} rows"
    if found.confident < MIN_CONFIDENT:
        return (
            f"only {found.confident} of {found.positions} positions have a clear argmax, {MIN_CONFIDENT} are needed to "
            "judge it: give another text, or more --positions"
        )
    if not found.argmax_confident >= LEAST_CONFIDENT:
        differ = f"{found.confident * (1 - found.argmax_confident):.0f} of {found.confident} differ"
        return f"clear argmax {found.argmax_confident:.4f} < {LEAST_CONFIDENT} ({differ})"
    if not found.kl <= kl_bound:
        return f"KL {found.kl:.2e} > {kl_bound:.2e}"
    if not abs(found.dnll) <= MOST_DNLL:
        return f"ΔNLL {found.dnll:+.4f} beyond ±{MOST_DNLL}"
    return ""


def row_objection(cosines: Mapping[str, float], what: str) -> str:
    """Why the lowest cosines of any row, by the names of LEAST_ROW, do not pass; "" where they do. NaN never passes.

    What is missing does not pass either. `what` they are the cosines of, for the text.
    """
    for name, least in LEAST_ROW.items():
        found = cosines.get(name, 0.0)
        if not found >= least:
            return f"{what} cosine {found:.7f} with {name}, {least} is the least"
    return ""
