"""A file that the user names to be written: `dashboard --svg FILE`, `bench wan --out FILE`. A shell.

What is there is not replaced by something else: a link is followed, and a device, a pipe or a terminal is written to. A
file appears whole or not at all, with the permissions that it had. No folder is made: one that is missing is a typing
error more often than a wish. `model/atomic_file.py` is for files that are this program's own.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from swarmnode.errors import ModelError, UsageError
from swarmnode.model.atomic_file import atomic_writer

MAX_PATH = 4096
_AS_IT_IS = getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


def output_path(text: str, option: str) -> Path:
    """The path, where a file could be written; nothing is touched yet. With `option` in its line otherwise UsageError
    (no path) or ModelError (what is there, or may be done there)."""
    if not text or "\0" in text or len(text) > MAX_PATH:
        raise UsageError(f"{option} {text[:80]!r}: no file has such a name")
    path = Path(text)
    with _told(f"{option} {text}"):
        there = _stat(path)
        if there is not None and stat.S_ISDIR(there.st_mode):
            raise ModelError(f"{option} {text}: a folder; give the name of a file")
        if there is not None and not os.access(path, os.W_OK):
            raise ModelError(f"{option} {text}: may not be written by you")
        folder = Path(os.path.realpath(path)).parent
        if there is None and not folder.is_dir():
            raise ModelError(f"{option} {text}: there is no folder {folder}")
    return path


def write_output(path: Path, data: bytes) -> None:
    """Write it. ModelError with one line where that fails."""
    with _told(str(path)):
        there = _stat(path)
        if there is None or (stat.S_ISREG(there.st_mode) and not _is_standard_output(there)):
            _replace(Path(os.path.realpath(path)), data, there)
            return
        # Not made, not cut: this is no file, or one that the shell has opened and may be appending to.
        handle = os.dup(1) if _is_standard_output(there) else os.open(path, os.O_WRONLY | _AS_IT_IS)
        with open(handle, "wb") as file:
            file.write(data)


def _replace(target: Path, data: bytes, there: os.stat_result | None) -> None:
    if not target.parent.is_dir():
        raise ModelError(f"{target}: there is no such folder")
    with atomic_writer(target) as file:
        file.write(data)
        if there is not None:
            os.chmod(file.name, stat.S_IMODE(there.st_mode))


def _is_standard_output(there: os.stat_result) -> bool:
    try:
        return os.path.samestat(there, os.fstat(1))
    except OSError:  # it is closed
        return False


def _stat(path: Path) -> os.stat_result | None:
    """Of what the path leads to; None where nothing is there."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"{what}: cannot be written ({error.strerror or error})") from None
