"""A pack's verdict on disk: PACK/verdict.json. Written by the gate, read by whoever is to use a cheaper wire."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from itertools import product
from pathlib import Path

import msgspec

from swarmnode.compute.ggml import engine_build
from swarmnode.compute.recipe import recipes_hash
from swarmnode.errors import ModelError
from swarmnode.gate.coding import WIRES, Codec, pair_name
from swarmnode.gate.verdict import FORMAT, Bound, Verdict
from swarmnode.model.atomic_file import write_atomically
from swarmnode.onboard import ModelPack

MAX_BYTES = 16 << 20  # 4,096 layers with all their figures take 6 MiB, and 100 layers 150 kB


def bound_of(pack: ModelPack, codec: Codec | None = None) -> Bound:
    """What a verdict on this pack is bound to, here and now."""
    manifest = pack.manifest
    return Bound(
        model=manifest.model_hash,
        backbone=manifest.backbone_sha256,
        recipes=recipes_hash(manifest.sites),
        engine=engine_build(),
        codec=(codec or Codec()).fingerprint(),
    )


def check_writable(pack: ModelPack) -> None:
    """Whether a verdict can be put into a pack; asked before anything is measured. Raises ModelError."""
    try:
        with tempfile.TemporaryFile(dir=pack.path, prefix=".verdict.", buffering=0) as file:
            file.write(b" ")
    except OSError as error:
        raise ModelError(
            f"{pack.path}: cannot be written ({error.strerror}), and the verdict is to be kept there: make room or "
            "permit it, or give a copy of that folder"
        ) from None


def save_verdict(pack: ModelPack, verdict: Verdict) -> None:
    """Put a verdict into a pack. Raises ModelError where it cannot be written."""
    write_atomically(pack.verdict_file, msgspec.json.format(msgspec.json.encode(verdict), indent=1))


def load_verdict(pack: ModelPack) -> Verdict | str:
    """The pack's verdict, or why there is none that counts: a few words. Raises nothing."""
    try:
        data = _read(pack.verdict_file)
    except FileNotFoundError:
        return "not gated yet"
    except OSError as error:
        return f"its verdict cannot be read: {error.strerror}"
    if len(data) > MAX_BYTES:
        return "its verdict is too large to be one"
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            return f"its verdict is of another version (format {found}, not {FORMAT})"
        verdict = msgspec.json.decode(data, type=Verdict)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return "its verdict is damaged"
    if not verdict.possible:
        return "its verdict is damaged"
    for what, ours in msgspec.structs.asdict(bound_of(pack)).items():
        if getattr(verdict.bound, what) != ours:
            return f"its verdict is of another {_NAMES[what]}"
    sites = pack.manifest.sites
    figures = [(site.layer, site.d_in, site.d_out) for site in verdict.sites]
    if figures != [(site.layer, site.d_in, site.d_out) for site in sites]:
        return "its verdict is of other layers"
    for site in verdict.sites:
        if site.lowest.keys() != site.mean.keys() or site.lowest.keys() not in (_KEYS, set()):
            return "its verdict is incomplete"
        if verdict.pairs and not site.measured:
            return "its verdict is incomplete"
    return verdict


def _read(path: Path) -> bytes:
    """Of a regular file alone: a pipe would have us wait for somebody who writes."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        with open(handle, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    finally:
        os.close(handle)


class _Format(msgspec.Struct, frozen=True):
    """What every version's verdict has."""

    format: int


_KEYS = {pair_name(pair).lower() for pair in product(WIRES, WIRES)}
_NAMES = {"model": "model", "backbone": "backbone file", "recipes": "graph", "engine": "engine build", "codec": "codec"}
