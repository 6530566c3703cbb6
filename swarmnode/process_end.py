"""Why another process died, from its exit status and what it wrote: ggml's own assertion, or else its last line.

Pure. llama.cpp ends the process where an assertion of its own fails, so what may do that runs in a process of its own.
Called by whoever started one: `backbone/trace.py`, `architectures/run.py`, `gate/worker_process.py`.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass

TAIL = 1 << 14  # bytes of a log that are enough
_LINE = 300  # characters of one line that are shown
_FATAL = "Fatal Python error: "  # of faulthandler, before the stack: "Bus error" is a mapped file that was cut short
# Nothing of llama.cpp's ends a process with these.
_FROM_OUTSIDE = {-getattr(signal, name, 0) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGBUS")} - {0}
_ABORTS = ("GGML_ASSERT", "GGML_ABORT", "fatal error", "ggml/")  # what a line of ggml_abort has in it


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How it ended ("exit code 1", "killed by SIGKILL") and what it said last, "" for nothing, at most 300 characters.

    `aborted`: that line is an assertion of ggml or llama.cpp, and it ended the process. `traceback`: it was a Python
    error.
    """

    how: str
    said: str
    aborted: bool
    traceback: bool


def process_end(status: int, log: bytes) -> ProcessEnd:
    """What became of a process with this return code (of `subprocess`: negative for a signal) and this end of a log."""
    lines = [_printable(line) for line in log[-TAIL:].decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    aborts = [line for line in lines if any(word in line for word in _ABORTS)]
    fatal = [line for line in lines if line.startswith(_FATAL)]
    # ggml names its own source file with the path of the machine that compiled it.
    said = aborts[-1].rpartition("llama.cpp/")[2] if aborts else (fatal or lines)[-1] if lines else ""
    traceback = any(line.startswith("Traceback (most recent call last)") for line in lines)
    return ProcessEnd(_how(status), said[:_LINE], bool(aborts) and status not in _FROM_OUTSIDE, traceback)


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line).strip()


def _how(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
