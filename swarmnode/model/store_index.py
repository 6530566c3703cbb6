"""The index of a slice store: which expert lies in which slot. JSON, versioned, bound to one model.

Written only after the slots it names are verified and flushed, so what it says is so even after a crash;
slots that it does not name are as good as absent. Caller: `store.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from swarmnode.errors import ManifestMismatch, ModelError
from swarmnode.model.atomic_file import write_atomically
from swarmnode.model.manifest import Count, Digest, Manifest

FORMAT = 1
FILE_NAME = "index.json"
MAX_INDEX_BYTES = 64 << 20


class SiteSlots(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site's slots in order. `checks[slot][tensor]` is the CRC-32 of a slice: tells which one is damaged.

    `generation` is part of the slot files' names: files are rewritten under a new one, never in place.
    """

    site: Count
    generation: Count
    experts: tuple[Count, ...]
    checks: tuple[tuple[Count, ...], ...]


class StoreIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole index."""

    format: int
    model_hash: Digest
    sites: tuple[SiteSlots, ...]


def load_index(folder: Path, manifest: Manifest) -> StoreIndex:
    """The index of `folder`, empty where there is none.

    Raises ManifestMismatch for another model's store, ModelError for an index that cannot be read or is
    nonsense.
    """
    path = folder / FILE_NAME
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INDEX_BYTES + 1)
    except FileNotFoundError:
        return StoreIndex(FORMAT, manifest.model_hash, ())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        if len(data) > MAX_INDEX_BYTES:
            raise ValueError(f"more than {MAX_INDEX_BYTES} bytes")
        index = msgspec.json.decode(data, type=StoreIndex)
        if index.format != FORMAT:
            raise ValueError(f"format {index.format}, this program reads {FORMAT}")
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        reason = str(error)[:200]
        raise ModelError(f"{path}: not a slice store's index ({reason}); delete {folder} to fetch again") from None
    if index.model_hash != manifest.model_hash:
        raise ManifestMismatch(
            f"{folder}: holds slices of model {index.model_hash[:16]}…, the manifest is {manifest.name} "
            f"{manifest.model_hash[:16]}…; give each model a folder of its own"
        )
    for problem in _problems(index, manifest):
        raise ModelError(f"{path}: {problem}; delete {folder} to fetch again")
    return index


def save_index(folder: Path, index: StoreIndex) -> None:
    """Replace the index of `folder`, whole or not at all."""
    write_atomically(folder / FILE_NAME, msgspec.json.encode(index))


def _problems(index: StoreIndex, manifest: Manifest) -> list[str]:
    found = []
    if len({slots.site for slots in index.sites}) != len(index.sites):
        found.append("a site appears twice")
    for slots in index.sites:
        if slots.site >= len(manifest.sites):
            found.append(f"site {slots.site} does not exist")
            continue
        site = manifest.sites[slots.site]
        unique = set(slots.experts)
        if len(unique) != len(slots.experts) or any(expert >= site.n_expert for expert in unique):
            found.append(f"site {slots.site} lists an expert twice or one that does not exist")
        if [len(row) for row in slots.checks] != [len(site.tensors)] * len(slots.experts):
            found.append(f"site {slots.site} has not one checksum per slice")
    return found
