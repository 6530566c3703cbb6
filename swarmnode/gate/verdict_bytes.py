"""A verdict's bytes: JSON in a pack, the same compressed on its way to a member; and whether it counts here. Pure.

Bytes told:  zlib (RFC 1950) of a Verdict's JSON; at most MAX_VERDICT bytes, MAX_PLAIN unpacked.

What comes from a file or from another node is hostile until it is checked: bounded before it is unpacked or parsed,
of this FORMAT, of exactly the model, graph, engine and codec of this node, with figures of exactly its layers. A
Verdict that passes allows what its figures do (`verdict.py`). Called by `verdict_file.py` and `told_verdict.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import product

import msgspec

from swarmnode.compute.recipe import Site
from swarmnode.coordination.messages import MAX_VERDICT
from swarmnode.errors import BadMessage
from swarmnode.gate.coding import WIRES, pair_name
from swarmnode.gate.verdict import FORMAT, Bound, Verdict

MAX_BYTES = 16 << 20  # 4,096 layers with all their figures take 6 MiB, and 100 layers 150 kB
MAX_PLAIN = 1 << 21  # of one that is told: as many layers as fit into MAX_VERDICT, about 900


def check_verdict(data: bytes, bound: Bound, sites: Sequence[Site]) -> Verdict | str:
    """The verdict, or what it is instead: a few words that go on from "it is". Raises nothing."""
    if len(data) > MAX_BYTES:
        return "too large to be one"
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            return f"of another version (format {found}, not {FORMAT})"
        verdict = msgspec.json.decode(data, type=Verdict)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return "damaged"
    if not verdict.possible:
        return "damaged"
    for what, ours in msgspec.structs.asdict(bound).items():
        if getattr(verdict.bound, what) != ours:
            return f"of another {_NAMES[what]}"
    figures = [(site.layer, site.d_in, site.d_out) for site in verdict.sites]
    if figures != [(site.layer, site.d_in, site.d_out) for site in sites]:
        return "of other layers"
    for one in verdict.sites:
        if one.lowest.keys() != one.mean.keys() or one.lowest.keys() not in (_KEYS, set()):
            return "incomplete"
        if verdict.pairs and not one.measured:
            return "incomplete"
    return verdict


def pack_verdict(verdict: Verdict) -> bytes:
    """A verdict as it is told, without what may name files of this machine. Raises BadMessage where it is too large."""
    plain = msgspec.json.encode(msgspec.structs.replace(verdict, text="", not_exact="", not_local=""))
    packed = zlib.compress(plain)
    if len(plain) > MAX_PLAIN or len(packed) > MAX_VERDICT:
        raise BadMessage(f"a verdict of {len(packed)} bytes, packed; at most {MAX_VERDICT} are told")
    return packed


def unpack_verdict(packed: bytes) -> bytes:
    """The JSON that was told, for `check_verdict`. Raises BadMessage."""
    if len(packed) > MAX_VERDICT:
        raise BadMessage(f"it has {len(packed)} bytes; at most {MAX_VERDICT} are taken")
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(packed, MAX_PLAIN)
    except zlib.error:
        raise BadMessage("it is damaged") from None
    if not unpacking.eof or unpacking.unused_data:
        raise BadMessage(f"it is cut short, or of more than {MAX_PLAIN} bytes")
    return plain


class _Format(msgspec.Struct, frozen=True):
    """What every version's verdict has."""

    format: int


_KEYS = {pair_name(pair).lower() for pair in product(WIRES, WIRES)}
_NAMES = {"model": "model", "backbone": "backbone file", "recipes": "graph", "engine": "engine build", "codec": "codec"}
