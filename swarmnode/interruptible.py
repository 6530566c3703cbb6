"""How work in the foreground ends from outside: by Ctrl-C, and by other signals as by Ctrl-C.

Blocking work runs in a thread, because a signal inside one of llama.cpp's callbacks is lost. Called by commands.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from swarmnode.errors import Cancelled

T = TypeVar("T")
_FROM_OUTSIDE = ("SIGTERM", "SIGHUP")  # a service manager, `timeout`; a terminal that is closed
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


@dataclass(slots=True)
class End:
    """What has ended work from outside: a signal's number, 0 where it was Ctrl-C, or nothing so far."""

    signal: int = 0

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return 128 + (self.signal or signal.SIGINT)


@contextmanager
def ended_in_order(end: End) -> Iterator[None]:
    """SIGTERM and SIGHUP do what Ctrl-C does, which leaves no folder and no process: KeyboardInterrupt comes of them.

    `end` learns which it was. Only the first one counts: a terminal that is closed sends SIGHUP more than once, and the
    second would break off the tidying up. In another thread than the main one nothing is changed.
    """
    before = {}

    def interrupt(number: int, frame: FrameType | None) -> None:
        if end.signal:
            return
        end.signal = number
        # An event loop cancels its main task instead of breaking off whatever runs at this moment.
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # ignored, as in the background of a script
            raise KeyboardInterrupt
        handler(number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name, None) for name in _FROM_OUTSIDE):
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    except Exception:
        if not end.signal:
            raise
        raise KeyboardInterrupt from None  # what was cut off says so in its own words
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
