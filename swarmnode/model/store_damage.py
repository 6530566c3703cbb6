"""What is wrong with a slot of a slice store, told as precisely as its index allows.

Reads only. Caller: `store.py`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode.errors import CorruptSlice, ModelError, TruncatedFile
from swarmnode.model.manifest import ExpertTensor
from swarmnode.model.slot_files import read_slot


@dataclass(frozen=True, slots=True)
class Slot:
    """One expert's place: slot `number` of each of the site's `files`; `checks` as in `SiteSlots`."""

    number: int
    expert: int
    tensors: Sequence[ExpertTensor]
    files: Sequence[Path]
    checks: Sequence[int]


def find_shortage(slot: Slot) -> TruncatedFile | None:
    """The error where one of the files ends before the slot does."""
    for path, tensor in zip(slot.files, slot.tensors, strict=True):
        size = path.stat().st_size if path.exists() else 0
        start = slot.number * tensor.stride
        if size < start + tensor.stride:
            return TruncatedFile(
                f"{path}: {tensor.name}, expert {slot.expert} at byte {start}: the file has {size} bytes, "
                f"{start + tensor.stride} expected; repair the store or delete {path.parent} to fetch again"
            )
    return None


def find_damage(slot: Slot, digest: str) -> ModelError | None:
    """The same, or the error where the slot's bytes do not have the SHA-256 `digest`, or, where that is "", not the
    slot's checksums. Raises OSError."""
    shortage = find_shortage(slot)
    if shortage is not None:
        return shortage
    found = hashlib.sha256()
    checks = []
    for path, tensor in zip(slot.files, slot.tensors, strict=True):
        check = 0
        for piece in read_slot(path, tensor.stride, slot.number):
            found.update(piece)
            check = zlib.crc32(piece, check)
        checks.append(check)
    good = found.hexdigest() == digest if digest else checks == list(slot.checks)
    return None if good else altered(slot, checks)


def altered(slot: Slot, checks: Sequence[int]) -> CorruptSlice:
    """The error for bytes with these CRC-32s; the first that differs tells the tensor."""
    differing = (n for n, (a, b) in enumerate(zip(checks, slot.checks, strict=True)) if a != b)
    n = next(differing, 0)  # none: the index itself is wrong
    tensor = slot.tensors[n]
    return CorruptSlice(
        f"{slot.files[n]}: {tensor.name}, expert {slot.expert} at byte {slot.number * tensor.stride} "
        f"was altered; repair the store or delete {slot.files[n].parent} to fetch again"
    )
