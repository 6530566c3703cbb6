"""Small private files below STATE/swarm: read bounded, written whole or not at all, readable by their owner only.

Not key files (transport/identity.py). Called by `swarm_books.py` and `member_state.py`, which know what is in them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from swarmnode.errors import ModelError, SwarmFilesDamaged
from swarmnode.model.atomic_file import atomic_writer

T = TypeVar("T")


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter. Raises SwarmFilesDamaged."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SwarmFilesDamaged(f"{folder}: cannot be made ({error.strerror}); give another --state") from error


def version_of(path: Path) -> tuple[int, int, int] | None:
    """What differs after the file was replaced; None where it is missing. Raises SwarmFilesDamaged."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SwarmFilesDamaged(f"{path}: cannot be read ({error.strerror})") from error
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_file(path: Path, kind: type[T], limit: int, *, is_secret: bool) -> T | None:
    """The JSON in `path`, checked against `kind`; None where it is missing.

    Raises SwarmFilesDamaged for anything else than such a file of at most `limit` bytes, and for a secret that others
    can read.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(limit + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SwarmFilesDamaged(f"{path}: cannot be read ({error.strerror})") from error
    if is_secret and os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise SwarmFilesDamaged(f"{path}: can be read by others; run: chmod 600 {path}")
    if len(data) > limit:
        raise damaged(path, f"more than {limit} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise damaged(path, str(error)) from None


def write_file(path: Path, content: msgspec.Struct) -> None:
    """Replace `path` by `content` as JSON. Raises SwarmFilesDamaged; then what was there is still there."""
    try:
        with atomic_writer(path) as file:
            os.chmod(file.name, 0o600)
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=1))
    except ModelError as error:
        raise SwarmFilesDamaged(str(error)) from error


def damaged(path: Path, why: str) -> SwarmFilesDamaged:
    """One line for a file whose content makes no sense."""
    return SwarmFilesDamaged(f"{path}: damaged ({' '.join(why.split())[:200]}); restore it from a copy or move it away")
