"""Files that replace those of a folder together: they are made in a folder within it, and moved at the end.

    FOLDER/.swarmnode-making-XXXXXXXX/    what is being made; `lock` in it is held by the process that makes it

What was in the folder stays as it is until everything is there. Moving is renaming: it takes no room and no time. What
a process left that was killed is removed by the next one that makes something there; where it was moving, that is
brought to its end. Caller: `onboard.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from swarmnode.errors import ModelError
from swarmnode.model.atomic_file import sync_folder
from swarmnode.model.folder_lock import FolderLock

_PREFIX = ".swarmnode-making-"
_OLD = "old"


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A folder to make files in, within `folder` (which is made too); it is gone when the block ends.

    So is a `folder` that was made for it and has nothing in it. Raises ModelError where it cannot be written.
    """
    try:
        is_new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        made = folder / f"{_PREFIX}{secrets.token_hex(4)}"
        made.mkdir()
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        lock = FolderLock(made)
        try:
            yield made
        finally:
            lock.release()
    finally:
        shutil.rmtree(made, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # something is in it
                folder.rmdir()


def sweep(folder: Path) -> None:
    """Remove what a process left that died while it made something here, or end what it began to move."""
    for left in folder.glob(f"{_PREFIX}*"):
        if not (left / "lock").is_file():  # not ours, or made this moment
            continue
        try:
            lock = FolderLock(left)
        except ModelError:  # somebody is at it, or it is not ours to remove
            continue
        with contextlib.suppress(OSError):
            if (left / _OLD).is_dir():
                for file in left.iterdir():
                    if file.name not in (_OLD, "lock"):
                        file.replace(folder / file.name)
        lock.release()
        shutil.rmtree(left, ignore_errors=True)


def replace_together(made: Path, folder: Path, names: Sequence[str], gone: Sequence[str] = ()) -> None:
    """Move the files `names` from `made` into `folder`, in this order, in place of those there; remove those in `gone`.

    All else in `made` goes when its block ends. What was there is put aside first, the last name first, and comes back
    where anything fails: no moment has an old file beside a new one. Raises ModelError.
    """
    old = made / _OLD
    aside: list[str] = []
    placed: list[str] = []
    try:
        old.mkdir()
        for name in (*reversed(names), *gone):
            if os.path.lexists(folder / name):
                (folder / name).rename(old / name)
                aside.append(name)
        for name in names:
            (made / name).rename(folder / name)
            placed.append(name)
        sync_folder(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            for name in placed:
                (folder / name).rename(made / name)
            for name in reversed(aside):
                (old / name).rename(folder / name)
        raise ModelError(f"{folder}: cannot be written ({error.strerror})") from error
