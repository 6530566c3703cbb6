"""Verdicts made up by hand."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import msgspec

from swarmnode.gate.bounds import fit
from swarmnode.gate.coding import WIRES, Pair
from swarmnode.gate.verdict import FORMAT, VERIFIED, Bound, LocalFigures, PairFigures, SiteFigures, Verdict

PAIRS: list[Pair] = list(product(WIRES, WIRES))
BOUND = Bound("a" * 64, "", "b" * 64, "engine 1", "c" * 64)
KL = {"f16": 1e-4, "int8": 2e-4, "fp8": 4e-4}


def site(layer: int = 0, d_in: int = 256, d_out: int = 256, **cosine: float) -> SiteFigures:
    """A layer where all is well but for the types that are named, either way."""
    of = {wire: cosine.get(wire, 1.0 if wire == "f32" else 0.9999) for wire in WIRES}
    lowest = {f"{out}/{back}": min(of[out], of[back]) for out, back in PAIRS}
    mean = {name: (1 + value) / 2 for name, value in lowest.items()}
    return SiteFigures(layer, d_in, d_out, lowest, mean, local=LocalFigures(128, 0, 0.0))


def figures(sites: tuple[SiteFigures, ...], pair: Pair, **other: float) -> PairFigures:
    """What the gate would have found with these layers, but for what is named."""
    wires = tuple(fit({one: where.lowest_of(one) for one in PAIRS}, pair, where.d_in, where.d_out) for where in sites)
    found = PairFigures(
        *pair,
        wires=wires,
        positions=2048,
        confident=2000,
        argmax=0.98,
        argmax_confident=0.9995,
        kl=KL[pair[0]] + KL[pair[1]],
        dnll=1e-4,
        broken=0,
    )
    return msgspec.structs.replace(found, **other)


def unmeasured(layer: int = 0, d_in: int = 256, d_out: int = 256) -> SiteFigures:
    """A layer that did not fit into memory."""
    return SiteFigures(layer, d_in, d_out, {}, {})


def verdict(*sites: SiteFigures, bound: Bound = BOUND, bad: Mapping[Pair, dict[str, float]] | None = None) -> Verdict:
    """Of these layers; `bad` are figures of single pairs, such as {("int8", "int8"): {"kl": 1.0}}."""
    pairs: tuple[PairFigures, ...] = ()
    if all(one.measured for one in sites):
        pairs = tuple(figures(sites, pair, **(bad or {}).get(pair, {})) for pair in VERIFIED)
    return Verdict(FORMAT, "1.2.3", bound, "model", "text", 2048, 1.0, None, 128, 0, sites, pairs)
