"""Runs generations of a session in a decode thread and hands their events to asyncio: one at a time, in order.

Called by `node.py`. llama_decode releases the GIL while it computes; the network stays in the loop's thread. A reader
that is slow or stops does not keep others waiting: its generation ends by itself, its events wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from swarmnode.backbone.session import GenerateRequest, GenerateResult, Session, TokenEvent
from swarmnode.errors import Cancelled

MAX_WAITING_EVENTS = 4096  # a reader that is further behind than this loses its generation
Event = TokenEvent | GenerateResult | Exception


class GenerationRunner:
    """Owns the decode thread of one session. Use from one event loop."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "decode")
        self._running: threading.Event | None = None  # set to cancel the generation in the thread
        self._closed = False
        self.active = False
        self.tokens = 0
        self.last_tokens_per_s = 0.0

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | GenerateResult, None]:
        """Token events, then the result. Closing the iterator (or cancelling its task) ends the generation.

        Raises what `Session.generate` raises, and Cancelled when the runner is closed.
        """
        cancelled = threading.Event()
        events: asyncio.Queue[Event] = asyncio.Queue()
        work = asyncio.create_task(self._work(request, events, cancelled), name="generation")
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, GenerateResult):
                    return
        finally:
            cancelled.set()
            if self._running is cancelled:
                self.session.interrupt()
            await asyncio.wait({work})

    async def _work(self, request: GenerateRequest, events: asyncio.Queue[Event], cancelled: threading.Event) -> None:
        """Wait for the turn and generate; the last event is the result or the error. Cancelled by its event only."""
        loop = asyncio.get_running_loop()

        def deliver(event: TokenEvent) -> None:
            if events.qsize() >= MAX_WAITING_EVENTS:
                cancelled.set()
            self.tokens += event.token >= 0
            events.put_nowait(event)

        async with self._turn:
            if self._closed or cancelled.is_set():
                events.put_nowait(Cancelled("this node is shutting down" if self._closed else "cancelled"))
                return
            self._running, self.active = cancelled, True
            try:
                result = await loop.run_in_executor(
                    self._thread,
                    lambda: self.session.generate(
                        request, lambda event: _hand_over(loop, deliver, event), cancelled=cancelled
                    ),
                )
            except Exception as error:  # it belongs to the reader
                events.put_nowait(error)
            else:
                self.last_tokens_per_s = result.tokens_per_s
                events.put_nowait(result)
            finally:
                self._running, self.active = None, False

    async def close(self) -> None:
        """End the running generation, refuse those that wait, and end the thread."""
        self._closed = True
        if self._running is not None:
            self._running.set()
            self.session.interrupt()
        async with self._turn:
            await asyncio.to_thread(self._thread.shutdown)


def _hand_over(loop: asyncio.AbstractEventLoop, deliver: object, event: TokenEvent) -> None:
    """From the decode thread; before the result, which takes the same way."""
    loop.call_soon_threadsafe(deliver, event)  # type: ignore[arg-type]  # one concrete callable
