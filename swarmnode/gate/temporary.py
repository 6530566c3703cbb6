"""The gate's temporary folders: locked while somebody uses them, so that those of dead processes can be removed.

A process that is killed, or that the system ends (a mapped file was cut under it), leaves its folder behind, with what
layers answered in it. The next gate of the same user removes it. Called by `wires.py`, `architectures/real_shapes.py`
and the `gate` command.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmnode.errors import ModelError
from swarmnode.model.folder_lock import FolderLock

PREFIX = "swarmnode-gate-"
_LOCK = "lock"  # FolderLock's file
_TRIES = 8


@contextmanager
def gate_folder() -> Iterator[Path]:
    """A folder of one's own, removed at the end; before, those that were left behind are removed.

    Raises ModelError where none can be made.
    """
    _sweep(Path(tempfile.gettempdir()))
    folder, lock = _make()
    try:
        yield folder
    finally:
        lock.release()  # Windows removes no file that is open
        shutil.rmtree(folder, ignore_errors=True)


def _make() -> tuple[Path, FolderLock]:
    """A new folder and its lock. Another process's sweep may take it in between: then there is another one."""
    for last in range(_TRIES):
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            try:
                lock = FolderLock(folder)
            except ModelError:
                shutil.rmtree(folder, ignore_errors=True)
                if last == _TRIES - 1:
                    raise
                continue
        except OSError as error:
            where = tempfile.gettempdir()
            raise ModelError(f"{where}: no temporary folder can be made ({error.strerror}); set TMPDIR") from None
        if (folder / _LOCK).exists():
            return folder, lock
        lock.release()
    raise ModelError(f"{tempfile.gettempdir()}: temporary folders vanish as they are made; set TMPDIR")


def _sweep(where: Path) -> None:
    """Remove the folders of this user that no process holds the lock of."""
    for folder in where.glob(f"{PREFIX}*"):
        if not _is_own(folder) or not (folder / _LOCK).is_file():
            continue
        try:
            lock = FolderLock(folder)
        except (ModelError, OSError):  # in use
            continue
        if os.name == "nt":
            lock.release()
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _is_own(folder: Path) -> bool:
    """Whether only this user can have put anything into it: others could lead the lock to any file."""
    try:
        about = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(about.st_mode):
        return False
    return not hasattr(os, "geteuid") or (about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077)
