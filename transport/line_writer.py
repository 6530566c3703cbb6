"""Writes lines to a stream that may stand still or fail, without ever holding up whoever has something to say.

A terminal is stopped with Ctrl-S, a pipe is full because nobody reads it, a disk is full, a terminal is closed: whoever
serves others goes on. Lines wait in a queue, and one daemon thread per stream writes them, in their order. Where the
queue is full the oldest go; lines that could not be written are counted, and one line in their place says how many.

    LineWriter(sys.stderr, missing=lambda lines: f"({lines} lines are missing here)")

A stream without a descriptor, such as an io.StringIO, never stands still and is written to at once, without a thread.
The thread writes to a duplicate of the descriptor: no lock of Python's own stream is held by a write that does not end,
and libraries that silence standard error for a while do not silence this.

Used by log_format.py for logs and by `swarmnode up` for a node's events. Knows nothing of either.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

MAX_LINES = 10_000  # that wait
MAX_BYTES = 1 << 22  # of them, one line that is longer aside
FLUSH_S = 1.0  # how long the last words may take
_BATCH = 4096  # bytes per write: what a pipe takes whole (PIPE_BUF), so that lines of several processes stay lines
_RETRY_S = 0.25  # between two tries at a descriptor that does not block, is full and cannot be waited for

_Piece = tuple[int, bytes]  # for how many lines it stands, and what is written


class LineWriter:
    """See the module. Any thread; nothing here raises because of the stream, nothing waits but `flush`.

    `missing` makes the line that says how many lines were lost, without its end.
    """

    def __init__(self, stream: TextIO, missing: Callable[[int], str]) -> None:
        self._stream, self._missing = stream, missing
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        errors = getattr(stream, "errors", None) or "strict"
        self._errors = "replace" if errors == "strict" else errors
        self._fd = _duplicate(stream)
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._lost = 0
        self._busy = self._ends = False
        self._torn = False  # a line is half out
        self._thread: threading.Thread | None = None
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # what others have printed comes first

    def write(self, text: str) -> None:
        """Have `text`, whole lines with their ends, written after what was handed over before."""
        if self._fd is None:
            with self._changed, contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()
            return
        data = text.encode(self._encoding, self._errors)
        with self._changed:
            if self._ends:
                return
            self._lines.append(data)
            self._size += len(data)
            while len(self._lines) > 1 and (len(self._lines) > MAX_LINES or self._size > MAX_BYTES):
                self._size -= len(self._lines.popleft())
                self._lost += 1
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def flush(self, timeout: float = FLUSH_S) -> bool:
        """Wait until all is written, for at most `timeout` seconds; whether it is. What was lost counts as written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._busy, timeout)

    def close(self) -> None:
        """Take nothing more; the thread writes what waits, and ends."""
        with self._changed:
            if self._thread is None and not self._ends:
                self._let_go()
            self._ends = True
            self._changed.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads just now: what waits is bounded, and the next line tries again
            return
        self._thread = thread

    # ---- the thread

    def _run(self) -> None:
        if sys.platform != "win32":  # writing to a terminal that another job has must not stop this process
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._lines:
                    if self._ends:
                        self._let_go()
                        return
                    self._changed.wait()
                self._busy = True
                pieces = self._take()
            lost = self._put(pieces)
            with self._changed:
                self._lost += lost

    def _let_go(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)

    def _take(self) -> list[_Piece]:
        """What is written next, in the lock; at least one line."""
        pieces: list[_Piece] = []
        if self._torn:
            pieces.append((0, b"\n"))
        if self._lost:
            pieces.append((self._lost, (self._missing(self._lost) + "\n").encode(self._encoding, self._errors)))
            self._lost = 0
        room, first = _BATCH - sum(len(data) for _, data in pieces), True
        while self._lines and (first or len(self._lines[0]) <= room):
            data = self._lines.popleft()
            self._size -= len(data)
            room -= len(data)
            pieces.append((1, data))
            first = False
        return pieces

    def _put(self, pieces: list[_Piece]) -> int:
        """Write; how many lines were lost, where the stream failed."""
        data, written = b"".join(piece for _, piece in pieces), 0
        try:
            while written < len(data):
                written += self._write_some(data[written:])
        except (OSError, ValueError):
            pass
        lost = end = 0
        for lines, piece in pieces:
            if end < written < end + len(piece):
                self._torn = True
            if end + len(piece) > written:
                lost += lines
            elif piece:
                self._torn = False
            end += len(piece)
        return lost

    def _write_some(self, data: bytes) -> int:
        """As much as goes, at least a byte; waits. Raises OSError, ValueError."""
        assert self._fd is not None
        if sys.platform == "win32" and os.isatty(self._fd):  # a console takes characters
            self._stream.write(data.decode(self._encoding, "replace"))
            self._stream.flush()
            return len(data)
        while True:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:  # somebody made it so, for all who have it
                try:
                    select.select([], [self._fd], [], _RETRY_S)
                except (OSError, ValueError):
                    time.sleep(_RETRY_S)


def _duplicate(stream: TextIO) -> int | None:
    try:
        return os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None
