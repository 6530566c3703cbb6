"""Making and starting what a benchmark measures, so that whatever breaks this off leaves nothing that writes on.

A benchmark's folder is removed when it ends; a thread or a node that is still at work would make it anew.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from swarmnode.errors import Cancelled
from swarmnode.local_swarm import NodeProcess
from swarmnode.onboard import ModelPack, onboard


async def onboarded(source: Path, pack: Path) -> ModelPack:
    """`onboard` in a thread. Where this is cancelled, the thread ends first. Raises what `onboard` raises."""
    stop = threading.Event()

    def check(_stage: str, _done: int, _total: int) -> None:
        if stop.is_set():
            raise Cancelled("interrupted")

    working = asyncio.ensure_future(asyncio.to_thread(onboard, source, pack, check))
    try:
        return await asyncio.shield(working)
    finally:
        stop.set()
        await asyncio.gather(working, return_exceptions=True)


async def all_started(
    starting: Iterable[Coroutine[Any, Any, NodeProcess]],  # Any: what a coroutine is sent, nothing here
) -> list[NodeProcess]:
    """Nodes that are started at once. Where one is not, or this is cancelled, all have ended when this raises."""
    tasks = [asyncio.create_task(one) for one in starting]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException as error:
        if not isinstance(error, asyncio.CancelledError):  # which has reached them all: a second one would break off
            for task in tasks:
                task.cancel()  # … how they end what they have started
        made = await asyncio.gather(*tasks, return_exceptions=True)
        nodes = [one for one in made if isinstance(one, NodeProcess)]
        for node in nodes:
            node.kill()
        await asyncio.gather(*(node.stop() for node in nodes))
        raise
