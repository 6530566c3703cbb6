"""A verdict as data for machines: the JSON of the `gate` command, which its tables for people show too."""

from __future__ import annotations

from typing import Any

from swarmnode.compute.ggml_types import BLOCK_TYPES
from swarmnode.dispatch.codec import WireName
from swarmnode.gate.coding import WIRES, Pair, pair_name
from swarmnode.gate.verdict import SAFE, PairFigures, SiteFigures, Verdict
from swarmnode.model.manifest import Manifest

Json = dict[str, Any]
_PARTIAL = "partial_f32"  # what F32 both ways is: sums added up in another order


def report(manifest: Manifest, verdict: Verdict) -> Json:
    """Everything of a verdict. Cosines are those at the lowest 0.1 % of rows; of the model, those of its worst layer.

    What stands under a type's name is that type both ways; bytes are one token's rows, out and back, over all layers
    with one worker.
    """
    best = verdict.best()
    both: dict[WireName, PairFigures] = {found.out: found for found in verdict.pairs if found.out == found.back}
    why = {wire: verdict.passed(wire) for wire in both}
    quantised = sorted({BLOCK_TYPES[one.ggml_type].name for one in manifest.tensors if one.name.endswith(".weight")})
    return {
        "model": verdict.name,
        "variant": "+".join(quantised),
        "sites": len(verdict.sites),
        "experts": manifest.n_expert,
        "k": manifest.n_used,
        "shared_expert": manifest.shared_expert,
        "identical": verdict.identical,
        "layer_cosine": {_named(w): min(s.lowest_of((w, w)) for s in verdict.sites) for w in WIRES},
        "layer_cosine_mean": {_named(w): min(s.mean[f"{w}/{w}"] for s in verdict.sites) for w in WIRES},
        "argmax": {wire: found.argmax for wire, found in both.items()},
        "argmax_confident": {wire: found.argmax_confident for wire, found in both.items()},
        "kl": {wire: found.kl for wire, found in both.items()},
        "dnll": {wire: found.dnll for wire, found in both.items()},
        "bytes_per_expert": manifest.expert_bytes(0),
        "passed": not why.get("f16", "not measured"),
        "error": why.get("f16", "not measured"),
        "wires": {wire: {"passed": not text, "why": text} for wire, text in why.items()},
        "positions": verdict.positions,
        "text": verdict.text,
        "seconds": verdict.seconds,
        "bytes_f32": verdict.row_bytes(dict.fromkeys(best, SAFE)),
        "bytes_best": verdict.row_bytes(best),
        "pairs": [_pair(verdict, found) for found in verdict.pairs],
        "rows": [_site(site, index, best[index]) for index, site in enumerate(verdict.sites)],
    }


def _named(wire: WireName) -> str:
    return _PARTIAL if wire == "f32" else wire


def _pair(verdict: Verdict, found: PairFigures) -> Json:
    pair: Pair = (found.out, found.back)
    why = verdict.objection(pair)
    return {
        "out": found.out,
        "back": found.back,
        "layer_cosine": min(site.lowest_of(pair) for site in verdict.sites),
        "argmax": found.argmax,
        "argmax_confident": found.argmax_confident,
        "confident": found.confident,
        "kl": found.kl,
        "dnll": found.dnll,
        "finer_layers": sum(wires != pair for wires in found.wires),
        "bytes": verdict.row_bytes(dict(enumerate(found.wires))),
        "passed": not why,
        "why": why,
    }


def _site(site: SiteFigures, index: int, best: Pair) -> Json:
    row: Json = {"site": index, "layer": site.layer}
    for wire in WIRES[1:]:
        row |= {
            f"{wire}_out": site.lowest_of((wire, "f32")),
            f"{wire}_back": site.lowest_of(("f32", wire)),
            wire: site.lowest_of((wire, wire)),
        }
    return row | {"best": pair_name(best).lower()}
