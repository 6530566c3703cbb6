"""Ctrl-Z, `fg` and `bg` for a process that has a live view: the terminal is left as it was found. A shell.

Used by `serve.py` and `attached.py` on their loop's thread, which is the main one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from swarmnode.dashboard.live import LiveView


@contextlib.contextmanager
def job_control(loop: asyncio.AbstractEventLoop, view: LiveView) -> Iterator[None]:
    """While it lasts, a suspended process gives the terminal back first, and one that goes on draws anew."""
    if sys.platform == "win32":
        yield
        return

    def suspend() -> None:
        view.apart()
        loop.remove_signal_handler(signal.SIGTSTP)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)  # to this thread: it stops here, not a moment later
        loop.add_signal_handler(signal.SIGTSTP, suspend)
        view.resume()

    # A shell without job control has its children ignore it; then so do we.
    is_used = signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN
    if is_used:
        loop.add_signal_handler(signal.SIGTSTP, suspend)
    loop.add_signal_handler(signal.SIGCONT, view.resume)
    try:
        yield
    finally:
        if is_used:
            loop.remove_signal_handler(signal.SIGTSTP)
        loop.remove_signal_handler(signal.SIGCONT)
