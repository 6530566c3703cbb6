"""Runs blocking work so that Ctrl-C ends it: in a thread, because a signal inside one of llama.cpp's callbacks is lost.

Called by commands that work in the foreground without an event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from swarmnode.errors import Cancelled

T = TypeVar("T")
_LOOK = 0.1  # seconds: how soon a signal is noticed while waiting, on systems that cannot interrupt a wait


def run_interruptible(work: Callable[[Callable[[], None]], T]) -> T:
    """`work(check)` calls `check` now and then, which raises Cancelled after Ctrl-C. Raises KeyboardInterrupt then."""
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise Cancelled("interrupted")

    with ThreadPoolExecutor(1) as pool:
        running: Future[T] = pool.submit(work, check)
        try:
            while True:
                try:
                    return running.result(timeout=_LOOK)
                except TimeoutError:
                    if running.done():
                        raise  # the work's own
        except KeyboardInterrupt:
            stop.set()
            raise
