"""One process at a time in a folder, on every system: a file lock that ends with the process.

Callers: `store.py`, `onboard.py`. Not for waiting: a second process gets an error at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from swarmnode.errors import ModelError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOCKED_BYTE = 1 << 20  # Windows locks bytes, and a locked byte cannot be read: keep it off the process id


class FolderLock:
    """Holds `folder`/lock from construction to `release`."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError where another process (or another holder in this one) has it."""
        self._path = folder / "lock"
        try:
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ModelError(f"{self._path}: cannot be opened ({error.strerror})") from error
        try:
            self._lock()
        except OSError as error:
            if not isinstance(error, BlockingIOError | PermissionError):  # Windows says "permission denied"
                os.close(self._handle)
                raise ModelError(f"{self._path}: cannot be locked ({error.strerror})") from error
            holder = os.read(self._handle, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(self._handle)
            raise ModelError(
                f"{folder}: used by another swarmnode (process {holder}); end it or give this one a folder of its own"
            ) from None
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Let others in. The file stays: removing it would race with the next holder."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _lock(self) -> None:
        if sys.platform == "win32":
            os.lseek(self._handle, _LOCKED_BYTE, os.SEEK_SET)
            try:
                msvcrt.locking(self._handle, msvcrt.LK_NBLCK, 1)
            finally:
                os.lseek(self._handle, 0, os.SEEK_SET)
        else:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
