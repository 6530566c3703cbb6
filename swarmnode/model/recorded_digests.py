"""Digests of experts that came from a web server without anybody knowing them before: PACK/digests.json.

    {"model_hash": HEX, "sites": {"SITE": {"EXPERT": SHA-256 HEX}}}

The first reading of an expert is taken on the server's word; from then on this machine knows what it was, and notices
where a server hands out something else. Only for this machine. A file that is damaged or of another model counts as
empty. From any thread. Caller: `http_source.py`.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from swarmnode.model.atomic_file import write_atomically
from swarmnode.model.manifest import MAX_MANIFEST_BYTES, Digest, Manifest

SAVE_EVERY = 256  # new digests


class _File(msgspec.Struct, frozen=True):
    model_hash: Digest
    sites: dict[int, dict[int, Digest]]


class RecordedDigests:
    """See the module. Without a path: in memory only."""

    def __init__(self, manifest: Manifest, path: Path | None) -> None:
        self._manifest, self._path = manifest, path
        self._lock = threading.Lock()
        self._unsaved = 0
        self._known: dict[int, dict[int, str]] = self._load()

    def note(self, site: int, expert: int, digest: str) -> bool:
        """Record what an expert's bytes were; False where they were something else before. ModelError if the disk
        does not take it."""
        with self._lock:
            known = self._known.setdefault(site, {}).setdefault(expert, digest)
            if known != digest:
                return False
            self._unsaved += 1
            if self._unsaved >= SAVE_EVERY:
                self._save()
        return True

    def get(self, site: int, expert: int) -> str:
        """The digest, "" where none is known."""
        with self._lock:
            return self._known.get(site, {}).get(expert, "")

    def save(self) -> None:
        """Write what is new. ModelError."""
        with self._lock:
            if self._unsaved:
                self._save()

    def _save(self) -> None:
        self._unsaved = 0
        if self._path is not None:
            write_atomically(self._path, msgspec.json.encode(_File(self._manifest.model_hash, self._known)))

    def _load(self) -> dict[int, dict[int, str]]:
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
            saved = msgspec.json.decode(data, type=_File, strict=False)
        except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
            return {}
        sites = self._manifest.sites
        whole = all(
            0 <= site < len(sites) and all(0 <= expert < sites[site].n_expert for expert in experts)
            for site, experts in saved.sites.items()
        )
        return saved.sites if saved.model_hash == self._manifest.model_hash and whole else {}
