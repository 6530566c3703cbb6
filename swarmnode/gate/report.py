"""A verdict as data for machines: the JSON of the `gate` command, which its tables for people show too."""

from __future__ import annotations

import dataclasses
from typing import Any

from swarmnode.compute.ggml_types import BLOCK_TYPES
from swarmnode.dispatch.codec import WireName
from swarmnode.gate.coding import WIRES, Pair, pair_bytes, pair_name
from swarmnode.gate.verdict import SAFE, PairFigures, SiteFigures, Verdict
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import Manifest
from swarmnode.onboard import ModelPack
from swarmnode.sizing.needs import ModelNeeds, memory_of, needs_of
from swarmnode.sizing.plan import remote_speed

Json = dict[str, Any]
CONTEXT = 4096  # tokens of context in the estimate of memory, or what the model was trained for if that is less
ROUND_TRIPS_MS = (20, 80, 100)
_PARTIAL = "partial_f32"  # what F32 both ways is: sums added up in another order


def report(manifest: Manifest, verdict: Verdict, needs: ModelNeeds | None = None) -> Json:
    """Everything of a verdict. Cosines are those at the lowest 0.1 % of rows; of the model, those of its worst layer,
    None where no layer has any.

    What stands under a type's name is that type both ways, `partial_f32` partial sums without any other type; `bytes…`
    are one token's rows, out and back, over all layers with one worker. `not_exact`: why exact mode was not compared.
    `needs` adds what it takes to run the model:
    memory in bytes, and at most so many tokens/s with every expert so far away, as `swarmnode plan` has it.
    """
    best = verdict.best()
    both: dict[str, PairFigures] = {found.out: found for found in verdict.pairs if found.out == found.back}
    # Bits that differ are no matter of a wire, and no wire makes them good.
    failed = verdict.failure if verdict.identical is False else ""
    why = {wire: failed or verdict.passed(both[wire].out) for wire in both}
    quantised = sorted({BLOCK_TYPES[one.ggml_type].name for one in manifest.tensors if one.name.endswith(".weight")})
    measured = [site for site in verdict.sites if site.measured]
    first = verdict.first_differing
    figures = both if verdict.partial is None else {_PARTIAL: verdict.partial} | both
    slices = [manifest.expert_bytes(site.index) for site in manifest.sites]
    return {
        "model": verdict.name,
        "variant": "+".join(quantised),
        "architecture": manifest.architecture,
        "sites": len(verdict.sites),
        "experts": manifest.n_expert,
        "k": manifest.n_used,
        "shared_expert": manifest.shared_expert,
        "identical": verdict.identical,
        "exact_positions": verdict.exact_positions,
        "not_exact": verdict.not_exact,
        "local_differ": verdict.local_differ,
        "first_differing_layer": None if first is None else first.layer,
        "layers_measured": [site.layer for site in measured],
        "layers_not_measured": [site.layer for site in verdict.sites if not site.measured],
        "layer_cosine": {_named(w): min((s.lowest_of((w, w)) for s in measured), default=None) for w in WIRES},
        "layer_cosine_mean": {_named(w): min((s.mean[f"{w}/{w}"] for s in measured), default=None) for w in WIRES},
        "argmax": {name: found.argmax for name, found in figures.items()},
        "argmax_confident": {name: found.argmax_confident for name, found in figures.items()},
        "kl": {name: found.kl for name, found in figures.items()},
        "dnll": {name: found.dnll for name, found in figures.items()},
        "bytes_per_expert": mean_expert_bytes(manifest),
        "smallest_slice": min(slices),
        "largest_slice": max(slices),
        "experts_bytes": sum(site.n_expert * slices[site.index] for site in manifest.sites),
        "passed": not (verdict.failure or verdict.unverified),
        "error": verdict.failure or verdict.unverified,
        "wires": {wire: {"passed": not text, "why": text} for wire, text in why.items()},
        "positions": verdict.positions,
        "text": verdict.text,
        "seconds": verdict.seconds,
        "version": verdict.version,
        "engine": verdict.bound.engine,
        "bytes_exact": sum(_exact_bytes(site, manifest.n_used) for site in verdict.sites),
        "bytes_f32": verdict.row_bytes(dict.fromkeys(best, SAFE)),
        "bytes_best": verdict.row_bytes(best),
        "needs": None if needs is None else _needs(needs),
        "pairs": [_pair(verdict, found, failed) for found in verdict.pairs],
        "rows": [_site(manifest, site, index, best[index]) for index, site in enumerate(verdict.sites)],
    }


def mean_expert_bytes(manifest: Manifest) -> int:
    """Of all experts of all sites, as `sizing.needs` has it, rounded down."""
    total = sum(site.n_expert * manifest.expert_bytes(site.index) for site in manifest.sites)
    return total // sum(site.n_expert for site in manifest.sites)


def pack_needs(pack: ModelPack) -> ModelNeeds:
    """What it takes to run a pack's model: the backbone's figures from its file, the experts' from the manifest.

    Raises ModelError where the backbone file cannot be read.
    """
    manifest = pack.manifest
    total = sum(site.n_expert * manifest.expert_bytes(site.index) for site in manifest.sites)
    return dataclasses.replace(
        needs_of(GgufFile.open(pack.backbone)),
        name=manifest.name,
        n_sites=len(manifest.sites),
        n_expert=manifest.n_expert,
        n_used=manifest.n_used,
        expert_bytes=mean_expert_bytes(manifest),
        experts_total_bytes=total,
    )


def _needs(needs: ModelNeeds) -> Json:
    context = min(needs.context_length or CONTEXT, CONTEXT)
    return {
        "context": context,
        "backbone_bytes": memory_of(needs, context).total,
        "experts_bytes": needs.experts_total_bytes,
        "tokens_per_s": {str(ms): remote_speed(needs, ms / 1000).tokens_s[0] for ms in ROUND_TRIPS_MS},
    }


def _exact_bytes(site: SiteFigures, k: int) -> int:
    return 4 * (site.d_in + k * site.d_out)


def _named(wire: WireName) -> str:
    return _PARTIAL if wire == "f32" else wire


def _pair(verdict: Verdict, found: PairFigures, failed: str) -> Json:
    pair: Pair = (found.out, found.back)
    why = failed or verdict.objection(pair)
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


def _site(manifest: Manifest, site: SiteFigures, index: int, best: Pair) -> Json:
    row: Json = {"site": index, "layer": site.layer, "measured": site.measured}
    row |= {"local_rows": site.local.rows, "local_differ": site.local.differ, "local_error": site.local.error}
    row |= {"exact_rows": site.exact_rows, "differ": site.differ, _PARTIAL: _lowest(site, SAFE)}
    for wire in WIRES[1:]:
        row |= {
            f"{wire}_out": _lowest(site, (wire, "f32")),
            f"{wire}_back": _lowest(site, ("f32", wire)),
            wire: _lowest(site, (wire, wire)),
        }
    bytes_of = {_named(wire): pair_bytes((wire, wire), site.d_in, site.d_out) for wire in WIRES}
    return row | {
        "bytes": {"exact": _exact_bytes(site, manifest.n_used)} | bytes_of,
        "experts": manifest.sites[index].n_expert,
        "expert_bytes": manifest.expert_bytes(index),
        "best": pair_name(best).lower(),
    }


def _lowest(site: SiteFigures, pair: Pair) -> float | None:
    return site.lowest_of(pair) if site.measured else None
