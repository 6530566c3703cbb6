"""A pipe that takes nothing more, as one whose reader has stopped."""

from __future__ import annotations

import contextlib
import os


def fill(write: int) -> None:
    """Fill a pipe until a write to it would wait."""
    import fcntl  # POSIX alone

    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"\n" * 256)
    os.set_blocking(write, True)
