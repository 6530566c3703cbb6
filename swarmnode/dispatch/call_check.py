"""The worker's judgement of a CALL before its engine may see it: every number, against what is really there.

Pure. Called by `worker.py` for each CALL. What passes here cannot make an engine read outside its arrays or
its slices.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from swarmnode.compute.recipe import Site
from swarmnode.dispatch.admission import AdmissionLimits
from swarmnode.dispatch.codec import WireType, rows_size
from swarmnode.dispatch.frames import CallFrame, RefuseCode
from swarmnode.dispatch.hello import experts_of, mask_of

Refusal = tuple[RefuseCode, str]
_WIRES = frozenset(map(int, WireType))


def check_call(frame: CallFrame, sites: Mapping[int, Site], held: int, limits: AdmissionLimits) -> Refusal | None:
    """Return why a call cannot be computed, None if it can. `held` is the bitmap of the experts here of its site."""
    site = sites.get(frame.site)
    if site is None:
        return _bad(f"the model has no site {frame.site}")
    before = site.recipe.weights == "before"
    if frame.row_per_pair != before:
        return _bad(f"site {site.index} takes one row of x per {'pair' if before else 'token'}")
    if not 1 <= frame.n_pairs <= limits.max_pairs:
        return _bad(f"{frame.n_pairs} pairs; 1 to {limits.max_pairs} are taken")
    if not 1 <= frame.n_tokens <= frame.n_pairs:
        return _bad(f"{frame.n_tokens} tokens for {frame.n_pairs} pairs")
    if frame.n_rows != (frame.n_pairs if before else frame.n_tokens):
        return _bad(f"{frame.n_rows} rows of x for {frame.n_tokens} tokens and {frame.n_pairs} pairs")
    if frame.wire_out not in _WIRES or frame.wire_back not in _WIRES:
        return _bad(f"wire types {frame.wire_out} and {frame.wire_back}; {sorted(_WIRES)} are known")
    size = rows_size(WireType(frame.wire_out), frame.n_rows, site.d_in)
    if len(frame.rows) != size:
        return _bad(f"{len(frame.rows)} bytes of x where {frame.n_rows} rows of {site.d_in} take {size}")
    n_back = frame.n_tokens if frame.partial else frame.n_pairs
    largest = max(size, rows_size(WireType.F32, n_back, site.d_out))
    if largest > limits.max_bytes:
        return _bad(f"{largest} bytes one way; {limits.max_bytes} are taken")
    # Lists and bitmaps: for the few pairs of a decode step numpy costs several times as much.
    if (token := max(frame.tokens.tolist())) >= frame.n_tokens:
        return _bad(f"token {token} of {frame.n_tokens}")
    if frame.weights is not None and not np.isfinite(frame.weights).all():
        return _bad("a router weight is NaN or infinite")
    experts = set(frame.experts.tolist())
    if (expert := max(experts)) >= site.n_expert:
        return _bad(f"expert {expert} of {site.n_expert}")
    if missing := experts_of(mask_of(experts) & ~held):
        ids = ", ".join(map(str, missing))
        return RefuseCode.NOT_HELD, f"expert{'s'[: len(missing) > 1]} {ids} not held here"
    return None


def _bad(why: str) -> Refusal:
    return RefuseCode.BAD_REQUEST, why
