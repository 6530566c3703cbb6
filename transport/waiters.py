"""Tasks that wait for a condition on the loop: a list of futures, woken together, each looks again for itself.

Not a queue and not fair: whoever finds the condition gone waits again. Called by stream, stream_table, endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib

Waiters = list[asyncio.Future[None]]


async def wait(waiters: Waiters) -> None:
    """Wait until the next `wake` of this list."""
    waiter = asyncio.get_running_loop().create_future()
    waiters.append(waiter)
    try:
        await waiter
    finally:
        with contextlib.suppress(ValueError):
            waiters.remove(waiter)


def wake(waiters: Waiters) -> None:
    """Have everybody on the list look again."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
