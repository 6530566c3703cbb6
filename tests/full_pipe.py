"""A pipe that takes nothing more, as one whose reader has stopped."""

from __future__ import annotations

import contextlib
import os


def narrow(write: int) -> None:
    """Leave a pipe as little room as there can be."""
    import fcntl  # POSIX alone

    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)


def fill(write: int) -> None:
    """Fill a pipe, made narrow, until a write to it would wait."""
    narrow(write)
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"\n" * 256)
    os.set_blocking(write, True)
