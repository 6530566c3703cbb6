"""Measurements, each a module with a command line of its own: `python -m swarmnode.bench.NAME`.

Ctrl-C ends one quietly while it is still importing, too; later that is `command.run_command`'s affair.
"""

from __future__ import annotations

import sys
from types import TracebackType


def _end_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An `excepthook`: of Ctrl-C comes its exit code and no traceback."""
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(130)
    sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # Python's sign, while it looks for the module that it was told to run
    sys.excepthook = _end_quietly
