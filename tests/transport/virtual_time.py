"""An event loop whose clock jumps to the next timer when nothing else is to be done: hours in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: says how long it should have waited."""

    jumped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing will ever happen: the test waits for something without a timer")
            self.jumped += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's loop with a clock of its own, which begins at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.jumped


def run_in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
