"""Gives back what clients took, when most of them have left. SHELL: the only file that knows how CPython keeps memory.

Freed objects alone give nothing back. The interpreter's own allocator returns memory in arenas of 1 MB, and one small
object that lives in an arena holds all of it: two thousand clients that came and went left two thirds of what
they had taken, for good. So the relay runs with the C library's allocator (it costs the relay nothing that could be
measured), and once it has been quiet for a while, what holds memory without use is emptied:

- cycles and free lists: a full collection does both. asyncio's transports are cycles;
- the interpreter's cache of methods, which holds the names that C code looked up: "dst", once per HTTP date;
- free pages of the C library: malloc_trim, which only glibc has.

`run_with_system_malloc` is called by __main__, `look` once a second by the server.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable

WORTH = 100  # connections at least, of which half have left
QUIET_SECONDS = 5.0  # their number stays so low: after a crash of a front, all come back within seconds

_SETTING = "PYTHONMALLOC"


def run_with_system_malloc() -> None:
    """Start this very command anew with the C library's allocator, in the same process, where that helps.

    Returns where it does not: not glibc, or somebody has chosen an allocator.
    """
    if _malloc_trim() is not None and sys.executable and _SETTING not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _SETTING: "malloc"})


class Reclaimer:
    """Collects at most once each time the number of connections has halved."""

    def __init__(self) -> None:
        self._most = 0
        self._low_since: float | None = None
        self._trim = _malloc_trim()
        self.times = 0

    def look(self, connections: int, most: int, now: float) -> None:
        """There are so many connections now, and were at most `most` since the last look; `now` in seconds.

        Takes 10 ms and more when it collects.
        """
        self._most = max(self._most, most)
        if self._most < WORTH or connections > self._most // 2:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= QUIET_SECONDS:
            self._most, self._low_since = connections, None
            self.times += 1
            self._collect()

    def _collect(self) -> None:
        clear_caches = getattr(sys, "_clear_internal_caches", None) or getattr(sys, "_clear_type_cache", None)
        if clear_caches is not None:
            clear_caches()
        gc.collect()
        if self._trim is not None:
            self._trim(0)


def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # Windows: no library without a name; musl, macOS: no such function
        return None
