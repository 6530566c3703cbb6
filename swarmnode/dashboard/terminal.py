"""A terminal's modes, keys and writes. A shell; used by the thread of `live.py` alone.

Nothing here waits for the terminal: it is opened once more without blocking, in a description of its own, so that one
that is stopped (Ctrl-S), or that nobody reads, takes what it can and the rest stays with us. Signals stay on: Ctrl-C
and Ctrl-Z mean what they always mean.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

FALLBACK = (80, 24)
_CHUNK = 1024


class TerminalGone(Exception):
    """The terminal was closed."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a wait has brought."""

    keys: bytes = b""
    writable: bool = False


class Terminal(Protocol):
    """What the thread that draws needs of a terminal."""

    encoding: str

    def size(self) -> tuple[int, int]:
        """Columns and rows."""

    def is_ours(self) -> bool:
        """Are we in the foreground?"""

    def take_keys(self) -> None:
        """From now on a key comes as soon as it is pressed, and is not shown."""

    def give_back(self) -> None:
        """The modes that were there before."""

    def write(self, data: bytes | bytearray) -> int:
        """Write what it takes now; how much that was. Raises TerminalGone."""

    def wait(self, timeout: float, *, writing: bool, reading: bool) -> Ready:
        """Until a key comes (`reading`), it takes more (`writing`), `wake` is called, or the time is over.

        Raises TerminalGone.
        """

    def wake(self) -> None:
        """End a wait, from any thread."""

    def close(self) -> None:
        """Let it go."""


def open_terminal() -> Terminal | None:
    """The terminal that standard output is; None where it is none, or one that cannot move its cursor."""
    try:
        if not os.isatty(1) or os.environ.get("TERM", "" if os.name == "posix" else "windows") in ("", "dumb"):
            return None
    except OSError:
        return None
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    if sys.platform == "win32":
        return WindowsTerminal(encoding)
    else:  # each exists on its own system alone
        return PosixTerminal(encoding)


if sys.platform == "win32":
    import msvcrt

    class WindowsTerminal:
        """A console. It is never stopped for long, so writes may wait; keys are looked for twenty times a second."""

        def __init__(self, encoding: str) -> None:
            self.encoding = encoding
            self._woken = False
            os.system("")  # turns escape sequences on

        def size(self) -> tuple[int, int]:
            with contextlib.suppress(OSError):
                columns, rows = os.get_terminal_size(1)
                return columns, rows
            return FALLBACK

        def is_ours(self) -> bool:
            return True

        def take_keys(self) -> None:
            pass

        def give_back(self) -> None:
            pass

        def write(self, data: bytes | bytearray) -> int:
            try:
                return os.write(1, bytes(data[:8192]))
            except OSError:
                raise TerminalGone from None

        def wait(self, timeout: float, *, writing: bool, reading: bool) -> Ready:
            end = time.monotonic() + timeout
            while not self._woken and not (reading and msvcrt.kbhit()):
                if writing or time.monotonic() >= end:
                    return Ready(writable=True)
                time.sleep(min(0.05, max(0.0, end - time.monotonic())))
            self._woken = False
            keys = b""
            while reading and msvcrt.kbhit():
                keys += _windows_key(msvcrt.getwch())
            return Ready(keys, True)

        def wake(self) -> None:
            self._woken = True

        def close(self) -> None:
            pass

    _WINDOWS_KEYS = {"H": b"\x1b[A", "P": b"\x1b[B", "G": b"\x1b[H", "O": b"\x1b[F", "I": b"\x1b[5~", "Q": b"\x1b[6~"}

    def _windows_key(first: str) -> bytes:
        if first in ("\x00", "\xe0"):
            return _WINDOWS_KEYS.get(msvcrt.getwch(), b"")
        return first.encode("utf-8", "replace")

else:
    import termios
    import tty

    class PosixTerminal:
        """See the module. Keys come from standard input where that is a terminal too, else there are none."""

        def __init__(self, encoding: str) -> None:
            self.encoding = encoding
            self._out = _own_description(1)
            self._keys = 0 if os.isatty(0) else None
            self._before: list[Any] | None = None  # as termios gives it: numbers and a list of bytes
            self._wake_read, self._wake_write = os.pipe()
            for fd in (self._wake_read, self._wake_write):
                os.set_blocking(fd, False)

        def size(self) -> tuple[int, int]:
            with contextlib.suppress(OSError):
                columns, rows = os.get_terminal_size(1)
                if columns > 0 and rows > 0:
                    return columns, rows
            return FALLBACK

        def is_ours(self) -> bool:
            try:
                return os.tcgetpgrp(1) == os.getpgrp()
            except OSError:  # not our controlling terminal: there are no jobs then
                return True

        def take_keys(self) -> None:
            if self._keys is None:
                return
            with contextlib.suppress(termios.error):
                if self._before is None:
                    self._before = termios.tcgetattr(self._keys)
                tty.setcbreak(self._keys, termios.TCSANOW)

        def give_back(self) -> None:
            if self._keys is not None and self._before is not None and self.is_ours():
                with contextlib.suppress(termios.error):
                    termios.tcsetattr(self._keys, termios.TCSANOW, self._before)
            self._before = None

        def write(self, data: bytes | bytearray) -> int:
            try:
                return os.write(self._out, data)
            except BlockingIOError:
                return 0
            except OSError:
                raise TerminalGone from None

        def wait(self, timeout: float, *, writing: bool, reading: bool) -> Ready:
            watched = [self._wake_read] + ([self._keys] if reading and self._keys is not None else [])
            readable, writable, _ = select.select(watched, [self._out] if writing else [], [], max(0.0, timeout))
            if self._wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, _CHUNK)
            keys = b""
            if self._keys is not None and self._keys in readable:
                with contextlib.suppress(OSError):
                    keys = os.read(self._keys, _CHUNK)
                if not keys and self.is_ours():
                    raise TerminalGone
            return Ready(keys, bool(writable))

        def wake(self) -> None:
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"\0")

        def close(self) -> None:
            self.give_back()
            for fd in (self._out, self._wake_read, self._wake_write):
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _own_description(fd: int) -> int:
        """The same terminal, opened again: that it does not block is nobody else's business."""
        try:
            return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # another user's terminal: then the thread that draws may wait, and only it
            return os.dup(fd)
