"""What the gate found out about a model, and which wire types follow from it.

Pure. Measured by `wires.py`, kept in a pack by `verdict_file.py`, asked by `allowed.py`. It holds figures, never
judgements: those are made from the figures whenever somebody asks (`bounds.py`), so a file that was edited, or written
under other bounds, allows nothing that its figures do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Annotated

import msgspec

from swarmnode.dispatch.codec import WireName
from swarmnode.fidelity import LogitComparison
from swarmnode.gate.bounds import (
    LEAST_COSINE,
    LEAST_PARTIAL,
    MAX_OWN_KL,
    MIN_POSITIONS,
    MOST_ERROR,
    STEPS,
    fallbacks,
    most_kl,
    objection,
    passes_layer,
)
from swarmnode.gate.coding import WIRES, Pair, pair_bytes, pair_name

FORMAT = 3
MAX_SITES = 4096
# What is run as a whole. F32 in place of F16 loses nothing, so pairs with F32 are covered by those with F16.
VERIFIED: tuple[Pair, ...] = tuple(product(WIRES[1:], WIRES[1:]))
SAFE: Pair = ("f32", "f32")
FINEST: Pair = ("f16", "f16")  # of those that are measured

Hash = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
MAX_TEXT = 300  # characters
MOST_FIGURE = 1e6  # what is further off is told from it by nobody
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
Cosine = Annotated[float, msgspec.Meta(ge=-1.001, le=1.001)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a verdict is about: for any other model, recipes, engine build or codec it says nothing.

    `backbone` is the SHA-256 of the backbone file, "" where the manifest does not know it; `codec` a fingerprint.
    """

    model: Hash
    backbone: Hash
    recipes: Hash
    engine: Text
    codec: Hash


class LocalFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer's experts beside llama.cpp's own, on the inputs that those had in a plain local run.

    `differ` of `rows` rows are other bytes; `error`: |ours - theirs| / |theirs| over all of them. No rows where there
    was no plain local run.
    """

    rows: Count = 0
    differ: Count = 0
    error: Annotated[float, msgspec.Meta(ge=0, le=MOST_FIGURE)] = 0.0


class SiteFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer with exact inputs: its cosines, `lowest` at the lowest 0.1 % of rows, by the name of each pair.

    Empty where it was not measured, which is a layer that did not fit into memory, or that lies behind such a one.
    `differ` of `exact_rows` rows from a worker process in exact mode were not this machine's own bytes; `local` is how
    this machine's own compare with llama.cpp's.
    """

    layer: Count
    d_in: Count
    d_out: Count
    lowest: dict[Text, Cosine]
    mean: dict[Text, Cosine]
    exact_rows: Count = 0
    differ: Count = 0
    local: LocalFigures = LocalFigures()

    @property
    def measured(self) -> bool:
        """Whether there are figures of its wires."""
        return bool(self.lowest)

    def lowest_of(self, pair: Pair) -> float:
        """NaN where it was not measured."""
        return self.lowest.get(pair_name(pair).lower(), float("nan"))


class PairFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole model with the types `wires` at its sites, which is what `out`/`back` came to.

    See LogitComparison; `broken` also counts rows that a receiver would have refused at any site.
    """

    out: WireName
    back: WireName
    wires: tuple[tuple[WireName, WireName], ...]
    positions: Count
    confident: Count
    argmax: Share
    argmax_confident: Share
    kl: Annotated[float, msgspec.Meta(ge=-1, le=1e6)]
    dnll: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
    broken: Count

    @property
    def comparison(self) -> LogitComparison:
        """The figures."""
        return LogitComparison(
            self.positions, self.confident, self.argmax, self.argmax_confident, self.kl, self.dnll, self.broken
        )


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module. `sites` are in the model's order; `own_kl`: what the model's own quantisation costs, if known.

    version: of swarmnode. exact_positions: tokens that a worker process was asked for in exact mode, 0 if none was;
    `local_differ` of them had other logits than a plain local run, None where not every layer took part. pairs: none
    where not every layer was measured. partial: partial sums in F32, as a whole. not_exact: why exact mode was not
    tried, "" where it was; not_local: why there was no plain local run.
    """

    format: int
    version: Text
    bound: Bound
    name: Text
    text: Text
    positions: Count
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    own_kl: Annotated[float, msgspec.Meta(gt=0, le=MAX_OWN_KL)] | None
    exact_positions: Count
    local_differ: Count | None
    sites: Annotated[tuple[SiteFigures, ...], msgspec.Meta(min_length=1, max_length=MAX_SITES)]
    pairs: Annotated[tuple[PairFigures, ...], msgspec.Meta(max_length=len(VERIFIED))]
    partial: PairFigures | None = None
    not_exact: Text = ""
    not_local: Text = ""

    @property
    def identical(self) -> bool | None:
        """Whether exact mode gave the bits of a plain local run, None if that is not known.

        False too where exact mode was not tried, and a layer's experts are not llama.cpp's at all.
        """
        if self.first_differing is not None or self.first_unlike is not None or self.local_differ:
            return False
        return True if self.exact_positions and self.local_differ == 0 and not self.unverified else None

    @property
    def unverified(self) -> str:
        """Why nobody knows whether this is what llama.cpp computes, "" where it was compared."""
        if all(site.local.rows for site in self.sites if site.measured):
            return ""
        return "not compared with llama.cpp" + (f": {self.not_local}" if self.not_local else "")

    @property
    def possible(self) -> bool:
        """Whether no figure contradicts another, and every text can be shown as it is."""
        texts = (self.version, self.name, self.text, self.not_exact, self.not_local, self.bound.engine)
        runs = self.pairs if self.partial is None else (*self.pairs, self.partial)
        return (
            all(text.isprintable() for text in texts)
            and all(site.differ <= site.exact_rows for site in self.sites)
            and all(site.local.differ <= site.local.rows for site in self.sites)
            and (self.local_differ or 0) <= self.exact_positions
            and all(run.confident <= run.positions <= self.positions for run in runs)
            and len({(run.out, run.back) for run in self.pairs}) == len(self.pairs)
            and all((run.out, run.back) in VERIFIED for run in self.pairs)
        )

    def less_than(self, earlier: Verdict) -> str:
        """What an earlier verdict on the same model had measured and this one has not; "" where this says as much."""
        for now, before in zip(self.sites, earlier.sites, strict=True):
            if before.measured and not now.measured:
                return f"layer {before.layer} was not measured"
            if before.differ and not now.exact_rows:
                return f"exact mode was not compared at layer {before.layer}"
            if before.local.rows and not now.local.rows:
                return f"layer {before.layer} was not compared with llama.cpp"
        if earlier.local_differ and self.local_differ is None:
            return "the logits were not compared"
        if any(self._figures((found.out, found.back)) is None for found in earlier.pairs):
            return "fewer pairs of types were measured"
        if earlier.partial is not None and self.partial is None:
            return "partial sums were not measured as a whole"
        if self.positions < earlier.positions:
            return f"only {self.positions} of {earlier.positions} positions were measured"
        return ""

    @property
    def first_differing(self) -> SiteFigures | None:
        """The first layer whose rows in exact mode were not this machine's own."""
        return next((site for site in self.sites if site.differ), None)

    @property
    def first_unlike(self) -> SiteFigures | None:
        """The first layer whose experts are not llama.cpp's: other bits; where exact mode was not tried, too far."""
        return next(
            (s for s in self.sites if s.local.differ and (self.exact_positions or s.local.error > MOST_ERROR)), None
        )

    @property
    def failure(self) -> str:
        """Why the model should not be run at all, "" where nothing that was measured says so."""
        if (first := self.first_differing) is not None:
            return (
                f"exact mode does not give the local run's bits: layer {first.layer} is the first that differs, in "
                f"{first.differ} of {first.exact_rows} rows"
            )
        if (unlike := self.first_unlike) is not None:
            return (
                f"the experts of layer {unlike.layer} do not give llama.cpp's own rows: {unlike.local.differ} of "
                f"{unlike.local.rows} differ, by {100 * unlike.local.error:.2g} %"
            )
        if self.local_differ:
            return (
                f"exact mode does not give the local run's bits: the logits differ at {self.local_differ} of "
                f"{self.exact_positions} positions, with every layer the same"
            )
        for site in self.sites:
            if site.measured and not site.lowest_of(SAFE) >= LEAST_PARTIAL:
                return f"layer {site.layer}: cosine {site.lowest_of(SAFE):.7f} of partial sums in F32 < {LEAST_PARTIAL}"
        if self._figures(FINEST) is not None and (why := self.objection(FINEST)):
            return why
        if self.partial is not None and (why := objection(self.partial.comparison, most_kl(self.own_kl))):
            return f"partial sums in F32: {why}"
        whole = self.pairs or self.partial is not None or all(site.measured for site in self.sites)
        return self.objection(FINEST) if whole else ""

    def objection(self, pair: Pair) -> str:
        """Why the whole model does not pass with this pair of types, "" where it does.

        Nothing coarser passes where F16 does not: then the text says nothing, or chance has let a coarser one through.
        """
        if pair == SAFE:
            return ""
        if self.unverified and not set(pair) <= {"f32", "f16"}:
            return self.unverified
        if self._figures(pair) != self._figures(FINEST) and (why := self._objection(FINEST)):
            return f"F16 does not pass either: {why}"
        return self._objection(pair)

    def _objection(self, pair: Pair) -> str:
        found = self._figures(pair)
        if found is None:
            return "not measured"
        if min(self.positions, found.positions) < MIN_POSITIONS:
            return f"measured on {found.positions} positions only, {MIN_POSITIONS} are needed"
        if len(found.wires) != len(self.sites):
            return "not measured at every layer"
        for site, wires in zip(self.sites, found.wires, strict=True):
            if wires != SAFE and not passes_layer(site.lowest_of(wires)):
                return f"layer {site.layer}: cosine {site.lowest_of(wires):.5f} with {pair_name(wires)}"
            if any(one not in STEPS[most] for one, most in zip(wires, (found.out, found.back), strict=True)):
                return f"layer {site.layer}: {pair_name(wires)} was measured in its place"
        return objection(found.comparison, most_kl(self.own_kl))

    def passed(self, wire: WireName) -> str:
        """Why the model does not pass with this type both ways, "" where it does at one layer at least."""
        both: Pair = (wire, wire)
        found = self._figures(both)
        if found is not None and both != SAFE and both not in found.wires:
            best = max((site.lowest_of(both) for site in self.sites if site.measured), default=float("nan"))
            return f"no layer's cosine is {LEAST_COSINE} both ways (best {best:.5f})"
        return self.objection(both)

    def site_wires(self, out: WireName, back: WireName) -> Mapping[int, Pair]:
        """The types per site where somebody wants `out`/`back`: never coarser; finer where that does not pass.

        Falls back as a whole where the model's logits are too far off, layer by layer where its cosine is.
        """
        return self._wires(self.used((out, back)), (out, back))

    def used(self, wanted: Pair) -> Pair:
        """The pair that serves `wanted` as a whole: itself, or the cheapest that passes with a type made finer."""
        if not self.pairs:  # as without a verdict, but for layers that were found to be bad
            return _finer(wanted)
        if not self.objection(wanted):
            return wanted
        passing = [pair for pair in fallbacks(wanted) if not self.objection(pair)]
        return min(passing, key=lambda pair: self.row_bytes(self._wires(pair, pair)))

    def best(self) -> Mapping[int, Pair]:
        """The cheapest types per site with which the whole model passes; of equal ones those with the least KL."""
        if not self.pairs:
            return self._unverified(FINEST)
        passing = [found for found in self.pairs if not self.objection((found.out, found.back))]
        if not passing:
            return dict.fromkeys(range(len(self.sites)), SAFE)
        best = min(passing, key=lambda found: (self.row_bytes(dict(enumerate(found.wires))), found.kl))
        return dict(enumerate(best.wires))

    def row_bytes(self, wires: Mapping[int, Pair]) -> int:
        """Bytes of one token's rows out and back over all sites, with one worker."""
        return sum(pair_bytes(wires[i], site.d_in, site.d_out) for i, site in enumerate(self.sites))

    def _unverified(self, pair: Pair) -> dict[int, Pair]:
        """Of layers alone: those that were measured and do not pass have F32."""
        bad = {i for i, site in enumerate(self.sites) if site.measured and not passes_layer(site.lowest_of(pair))}
        return {i: SAFE if i in bad else pair for i in range(len(self.sites))}

    def _wires(self, pair: Pair, wanted: Pair) -> dict[int, Pair]:
        if not self.pairs:
            return self._unverified(pair)
        found = self._figures(pair)
        if pair == SAFE or found is None:
            return dict.fromkeys(range(len(self.sites)), SAFE)
        chosen: dict[int, Pair] = {}
        for index, (out, back) in enumerate(found.wires):  # F16 was measured in place of F32
            chosen[index] = ("f32" if wanted[0] == "f32" else out, "f32" if wanted[1] == "f32" else back)
        return chosen

    def _figures(self, pair: Pair) -> PairFigures | None:
        measured = tuple("f16" if wire == "f32" else wire for wire in pair)
        return next((found for found in self.pairs if (found.out, found.back) == measured), None)


def printable(text: str) -> str:
    """As a verdict has it: without control characters, and not too long."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])


def _finer(pair: Pair) -> Pair:
    """What needs no verdict: F16 at most."""
    return "f32" if pair[0] == "f32" else "f16", "f32" if pair[1] == "f32" else "f16"
