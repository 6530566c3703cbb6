"""A pack's verdict on disk: PACK/verdict.json. Written by the gate, read by whoever is to use a cheaper wire."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import msgspec

from swarmnode.compute.ggml import engine_build
from swarmnode.compute.recipe import recipes_hash
from swarmnode.errors import ModelError
from swarmnode.gate.coding import Codec
from swarmnode.gate.verdict import Bound, Verdict
from swarmnode.gate.verdict_bytes import MAX_BYTES, check_verdict
from swarmnode.model.atomic_file import write_atomically
from swarmnode.onboard import ModelPack


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
    found = read_verdict(pack.verdict_file, pack)
    if found is None:
        return "not gated yet"
    return f"its verdict {found}" if isinstance(found, str) else found


def read_verdict(file: Path, pack: ModelPack) -> Verdict | str | None:
    """The verdict on a pack's model in this file, what is wrong with it ("is damaged"), or None for no file."""
    try:
        data = _read(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    found = check_verdict(data, bound_of(pack), pack.manifest.sites)
    return f"is {found}" if isinstance(found, str) else found


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
