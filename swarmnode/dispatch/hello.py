"""What both ends of a dispatch stream must have in common, and the judgement of the other end's HELLO or WELCOME.

Pure. `client.py` and `worker.py` are built with a `ModelKey` and judge the peer's key by it before anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmnode.compute.recipe import Site
from swarmnode.dispatch.frames import Holdings, Key, SiteHoldings
from swarmnode.errors import BadFrame, HelloMismatch, UsageError


@dataclass(frozen=True, slots=True)
class ModelKey:
    """What decides the bits of an answer. The hashes are SHA-256 as hex; `name` is the model's, for people only."""

    model_hash: str
    recipes_hash: str
    engine_build: str
    name: str = ""

    def __post_init__(self) -> None:
        for what in ("model_hash", "recipes_hash"):
            value = getattr(self, what)
            try:
                known = len(bytes.fromhex(value)) == 32 and len(value) == 64
            except ValueError:
                known = False
            if not known:
                raise UsageError(f"{what} {value!r} is not a SHA-256 in hex; onboard the model again")

    def key(self, node: str) -> Key:
        """Return what this node says of itself in HELLO or WELCOME."""
        hashes = bytes.fromhex(self.model_hash), bytes.fromhex(self.recipes_hash)
        return Key(*hashes, self.name, self.engine_build, node)


def check_key(ours: Key, theirs: Key) -> None:
    """Raise HelloMismatch, which names both values, for the first thing that differs."""
    if ours.version != theirs.version:
        raise HelloMismatch("dispatch protocol version", ours.version, theirs.version)
    if ours.model_hash != theirs.model_hash:
        raise HelloMismatch("model", _named(ours.model_hash, ours.model), _named(theirs.model_hash, theirs.model))
    if ours.recipes_hash != theirs.recipes_hash:
        raise HelloMismatch("recipes hash", ours.recipes_hash.hex(), theirs.recipes_hash.hex())
    if ours.engine != theirs.engine:
        raise HelloMismatch("engine build", ours.engine, theirs.engine)


def pack_holdings(holdings: Mapping[int, Iterable[int]], sites: Mapping[int, Site]) -> Holdings:
    """Return an engine's holdings (site -> experts) as the bitmaps of a frame."""
    return tuple(
        SiteHoldings(site, sites[site].n_expert, mask_of(experts)) for site, experts in sorted(holdings.items())
    )


def unpack_holdings(holdings: Holdings, sites: Mapping[int, Site]) -> dict[int, int]:
    """Return site -> bitmap of a peer's holdings. Raises BadFrame where they do not fit the model's sites."""
    for held in holdings:
        site = sites.get(held.site)
        if site is None or site.n_expert != held.n_expert:
            there = "no such site" if site is None else f"{site.n_expert} experts"
            raise BadFrame(f"holdings name {held.n_expert} experts at site {held.site}; the model has {there}")
    return {held.site: held.mask for held in holdings}


def mask_of(experts: Iterable[int]) -> int:
    """Return the bitmap with a bit for each expert."""
    mask = 0
    for expert in experts:
        mask |= 1 << int(expert)
    return mask


def experts_of(mask: int) -> tuple[int, ...]:
    """Return the experts of a bitmap, ascending."""
    experts = []
    while mask:
        low = mask & -mask
        experts.append(low.bit_length() - 1)
        mask ^= low
    return tuple(experts)


def _named(digest: bytes, name: str) -> str:
    return f"{digest.hex()} ({name})" if name else digest.hex()
