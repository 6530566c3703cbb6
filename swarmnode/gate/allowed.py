"""Whether a node may run its model, and with which wire types: asked by `parts.py` before any worker is called.

Exact mode and F16 need no verdict, INT8 and FP8 do. Where there is one, F16 is held to it too, and a model that failed
is not run. A member of a swarm goes by its founder's verdict where it has none of its own (`told_verdict.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmnode.dispatch.codec import WireName
from swarmnode.errors import GateFailed, UsageError
from swarmnode.gate.coding import Pair, pair_name
from swarmnode.gate.told_verdict import Source, ruling_verdict
from swarmnode.gate.verdict import Verdict
from swarmnode.onboard import ModelPack

_GATED: tuple[WireName, ...] = ("int8", "fp8")
_GATES: Mapping[Source, str] = {"own": "this model's gate", "founder": "the founder's gate"}
_NAMED = 6  # layers of a note, before it only counts them


def gate_failure(pack: ModelPack, *, force: bool) -> str:
    """ "" where nothing is known against the model; with `force`, a line that says what is.

    Raises GateFailed where its gate failed. A verdict on something else (another engine, another file) says nothing.
    """
    verdict, source = ruling_verdict(pack)
    if isinstance(verdict, str) or not verdict.failure:
        return ""
    gate = "its gate" if source == "own" else "the founder's gate"
    if force:
        return f"{verdict.name} failed {gate} ({verdict.failure}); used all the same, as --force says"
    if verdict.identical is False:
        where = "" if source == "own" else ", here and on the founder's machine"
        what = f"update swarmnode and llama-cpp-python{where}"
    else:
        what = f"gate it again with another --text ({_how(pack)})"
    raise GateFailed(f"{verdict.name} failed {gate}: {verdict.failure}; {what}, or give --force to use it all the same")


def wires_allowed(pack: ModelPack, out: WireName, back: WireName) -> tuple[Mapping[int, Pair], list[str]]:
    """The types (out, back) of the sites that cannot have the wanted ones, and one line per reason why.

    Nothing of both where all is as wanted. Raises UsageError where INT8 or FP8 is wanted and no verdict counts.
    """
    verdict, source = ruling_verdict(pack)
    gated = [wire for wire in (out, back) if wire in _GATED]
    if isinstance(verdict, str):
        if gated:
            raise UsageError(
                f"{gated[0].upper()} on the wire needs a gate that this model passed: {_how(pack)} ({verdict})"
            )
        return {}, []
    wanted = (out, back)
    wires = {site: pair for site, pair in verdict.site_wires(out, back).items() if pair != wanted}
    return wires, _notes(verdict, source, wanted, wires)


def best_wires(pack: ModelPack) -> tuple[Mapping[int, Pair], list[str]]:
    """The cheapest types that the model passed, for every site; F16 both ways and a line that says why otherwise."""
    verdict, source = ruling_verdict(pack)
    if isinstance(verdict, str):
        note = f"F16 on the wire ({verdict}); for less, {_how(pack)}"
        return dict.fromkeys(range(len(pack.manifest.sites)), ("f16", "f16")), [note]
    wires = verdict.best()
    found = sorted({pair_name(pair) for pair in wires.values()})
    return wires, [f"{' and '.join(found)} on the wire, as {_GATES[source]} allows"]


def whose_verdict(pack: ModelPack) -> str:
    """Whose verdict a node goes by: "own", "founder", or "" for none; behind a colon why the model fails by it."""
    verdict, source = ruling_verdict(pack)
    if isinstance(verdict, str):
        return ""
    return f"{source}: {verdict.failure}" if verdict.failure else source


def _how(pack: ModelPack) -> str:
    """What to do for a verdict: a node that has the model from a swarm has not the experts that the gate computes."""
    if pack.source is not None:
        return f"run swarmnode gate {pack.source}"
    if pack.told_verdict is not None:
        return "run swarmnode gate on the founder's machine, then start the founder again, and this node"
    return f"run swarmnode gate where the model's GGUF is, and copy that pack's verdict.json to {pack.verdict_file}"


def _notes(verdict: Verdict, source: Source, wanted: Pair, wires: Mapping[int, Pair]) -> list[str]:
    notes = []
    used = verdict.used(wanted)
    if used != wanted:
        notes.append(f"{pair_name(wanted)} does not pass {_GATES[source]} ({verdict.objection(wanted)})")
    for pair in sorted(set(wires.values())):
        sites = [index for index, one in wires.items() if one == pair]
        if len(sites) == len(verdict.sites):
            where = "every layer"
        elif len(sites) > _NAMED:
            where = f"{len(sites)} of {len(verdict.sites)} layers"
        else:
            where = ("layer " if len(sites) == 1 else "layers ") + ", ".join(str(verdict.sites[i].layer) for i in sites)
        why = ""
        if used == wanted:
            lowest = min(verdict.sites[i].lowest_of(wanted) for i in sites)
            why = f": layer cosine down to {lowest:.5f} with {pair_name(wanted)}"
        notes.append(f"{pair_name(pair)} on the wire at {where}{why}")
    return notes
