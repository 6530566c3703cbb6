"""Files that appear whole or not at all: a temporary file beside the target, flushed, then renamed over it.

Callers: `manifest.py`, `store.py` (its index), `backbone_file.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from swarmnode.errors import ModelError

TEMPORARY_SUFFIX = ".partial"


@contextlib.contextmanager
def atomic_writer(target: Path) -> Iterator[IO[bytes]]:
    """A file to write; when the block ends well it becomes `target`, otherwise it is removed.

    OSError in the block becomes a ModelError with one line (disk full, read-only folder).
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise ModelError(f"{target}: cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(target: Path, data: bytes) -> None:
    """Make `target` hold exactly `data`."""
    with atomic_writer(target) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Flush a rename to disk. Windows has no such call and keeps renames in its journal."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
