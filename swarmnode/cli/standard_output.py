"""Is there somebody to print to? For commands whose output is what they are run for: they fail where it is lost."""

from __future__ import annotations

import sys


def check_stdout() -> None:
    """Raise SwarmnodeError where the command was started without a standard output (`>&-`).

    Whatever was put in its place since then (`transport/standard_streams.py`) is nobody who reads.
    """
    if sys.__stdout__ is None:  # Python's, where descriptor 1 was closed
        from swarmnode.errors import SwarmnodeError  # noqa: PLC0415

        raise SwarmnodeError("standard output is closed, so nothing could be said: open it, or send it to /dev/null")


def flush_stdout() -> None:
    """Raise OSError where what was printed went nowhere (a full disk, a closed pipe), while that is still told."""
    sys.stdout.flush()
