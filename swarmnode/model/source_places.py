"""Where a manifest's expert tensors lie in the GGUF files that someone has. Caller: `store.py`.

Files that are the manifest's own by name and size need no look inside: the manifest says where everything
is, and every expert is hashed anyway. Others (another split, a re-export) are opened, and the tensors are
found by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode.errors import ModelError
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import Manifest, check_source


@dataclass(frozen=True, slots=True)
class SourcePlaces:
    """Files, and per tensor name the number of its file and its offset there."""

    paths: tuple[Path, ...]
    tensors: dict[str, tuple[int, int]]


def locate(manifest: Manifest, given: Sequence[Path]) -> SourcePlaces:
    """`given`: all files of the model, or any one of them. Raises as `GgufFile.open` and `check_source`."""
    if not given:
        raise ModelError("no GGUF file given to read experts from")
    folder = given[0].parent
    paths = tuple(folder / source.name for source in manifest.source_files)
    if set(given) <= set(paths) and all(
        _size(path) == source.size for path, source in zip(paths, manifest.source_files, strict=True)
    ):
        return SourcePlaces(paths, {t.name: (t.file, t.offset) for t in manifest.tensors})
    gguf = GgufFile.open(given[0])
    check_source(manifest, gguf)
    tensors = {t.name: gguf.tensors[t.name] for t in manifest.tensors}
    return SourcePlaces(gguf.paths, {name: (tensor.file, tensor.offset) for name, tensor in tensors.items()})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
