"""Runs generations of a session in a decode thread and hands their events to asyncio: one at a time, in order.

Called by `node.py`. llama_decode releases the GIL while it computes; the network stays in the loop's thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from swarmnode.backbone.session import GenerateRequest, GenerateResult, Session, TokenEvent

_QUEUED_EVENTS = 4096  # a reader that is further behind than this ends its own generation


class GenerationRunner:
    """Owns the decode thread of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "decode")
        self.active = False
        self.tokens = 0
        self.last_tokens_per_s = 0.0

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | GenerateResult, None]:
        """Token events, then the result. Closing the iterator (or cancelling its task) ends the generation."""
        self.session.prompt_tokens(request)
        async with self._turn:
            loop = asyncio.get_running_loop()
            events: asyncio.Queue[TokenEvent | None] = asyncio.Queue()
            cancelled = threading.Event()

            def deliver(event: TokenEvent | None) -> None:
                if events.qsize() >= _QUEUED_EVENTS:
                    cancelled.set()
                events.put_nowait(event)

            def work() -> GenerateResult:
                try:
                    return self.session.generate(
                        request, lambda event: _call(loop, deliver, event), cancelled=cancelled
                    )
                finally:
                    _call(loop, deliver, None)

            self.active = True
            running = loop.run_in_executor(self._thread, work)
            try:
                while (event := await events.get()) is not None:
                    self.tokens += event.token >= 0
                    yield event
                result = await asyncio.shield(running)
                self.last_tokens_per_s = result.tokens_per_s
                yield result
            finally:
                cancelled.set()
                if not running.done():
                    self.session.interrupt()
                    await asyncio.wait({running})
                self.active = False

    async def close(self) -> None:
        """End the running generation and the thread."""
        self.session.interrupt()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)


def _call(loop: asyncio.AbstractEventLoop, function: object, event: TokenEvent | None) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, event)  # type: ignore[arg-type]  # one concrete callable
