"""Gives requests to sessions and their events to asyncio: the least loaded session, and beyond that first come first.

Called by `node.py`. The sessions are lanes: contexts of one model, each with its own decode thread, so that the layers
of one lane run during the round trips of another; within a lane, generations share every step. llama_decode releases
the GIL while it computes; the network stays in the loop's thread. A reader that is slow or stops does not keep others
waiting: its generation ends by itself, its events wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from swarmnode.backbone.sequence import GenerationTotals
from swarmnode.backbone.session import GenerateRequest, GenerateResult, MakeDrafter, Session, TokenEvent
from swarmnode.errors import Cancelled

MAX_WAITING_EVENTS = 4096  # a reader that is further behind than this loses its generation
Event = TokenEvent | GenerateResult | Exception


@dataclass(eq=False, slots=True)
class _Lane:
    """A session and the `cancelled` events of what it generates."""

    session: Session
    running: set[threading.Event] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.session.n_seq


@dataclass(eq=False, slots=True)
class _Turn:
    """One request's place: it waits until it has a lane, or is woken without one."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    lane: _Lane | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class GenerationRunner:
    """Owns who generates where. Use from one event loop; whoever made the sessions closes them, after `close`.

    `drafter` makes what drafts for each generation, in place of the sessions' own.
    """

    def __init__(self, sessions: Session | Sequence[Session], drafter: MakeDrafter | None = None) -> None:
        self._lanes = [_Lane(one) for one in (sessions if isinstance(sessions, Sequence) else [sessions])]
        self._drafter = drafter
        self._queue: deque[_Turn] = deque()
        self._work: set[asyncio.Task[None]] = set()
        self._closed = False
        self.tokens = 0
        self.ended: Counter[str] = Counter()  # generations, by what stopped them: StoppedBy, or "error"
        self.last_tokens_per_s = 0.0

    @property
    def active(self) -> bool:
        """Is anything being generated?"""
        return self.running > 0

    @property
    def running(self) -> int:
        """How many generations are under way."""
        return sum(len(lane.running) for lane in self._lanes)

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._queue)

    def totals(self) -> GenerationTotals:
        """What all lanes have done since they were made; close to now, as they go on meanwhile."""
        lanes = [dataclasses.astuple(lane.session.totals) for lane in self._lanes]
        return GenerationTotals(*map(sum, zip(*lanes, strict=True)))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | GenerateResult, None]:
        """Token events, then the result. Closing the iterator (or cancelling its task) ends the generation.

        Raises what `Session.generate` raises, and Cancelled when the runner is closed.
        """
        turn = _Turn()
        events: asyncio.Queue[Event] = asyncio.Queue()
        work = asyncio.create_task(self._generate(request, events, turn), name="generation")
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, GenerateResult):
                    return
        finally:
            self._end(turn)
            await asyncio.wait({work})

    async def close(self) -> None:
        """End the running generations and refuse those that wait."""
        self._closed = True
        for turn in list(self._queue):
            self._end(turn)
        for lane in self._lanes:
            for cancelled in lane.running:
                cancelled.set()
            if lane.running:
                lane.session.interrupt()
        if self._work:
            await asyncio.wait(set(self._work))

    async def _generate(self, request: GenerateRequest, events: asyncio.Queue[Event], turn: _Turn) -> None:
        """Wait for a lane and generate; the last event is the result or the error. Ended by its turn's event only."""
        loop = asyncio.get_running_loop()
        cancelled = turn.cancelled

        def deliver(event: TokenEvent) -> None:
            if events.qsize() >= MAX_WAITING_EVENTS:
                cancelled.set()
            self.tokens += event.token >= 0
            events.put_nowait(event)

        def hand_over(event: TokenEvent) -> None:  # on the decode thread; before the result, which takes the same way
            loop.call_soon_threadsafe(deliver, event)

        self._queue.append(turn)
        self._assign()
        if turn.lane is None:  # what cannot be is refused at once, not when its turn comes
            try:
                await asyncio.to_thread(self._lanes[0].session.prompt_tokens, request)
            except Exception as error:
                self._give_back(turn)
                events.put_nowait(error)
                return
        await turn.woken.wait()
        lane = turn.lane
        if lane is None:
            events.put_nowait(Cancelled("this node is shutting down" if self._closed else "cancelled"))
            return
        try:
            future = await asyncio.to_thread(  # tokenizing a long prompt takes a while
                lane.session.submit,
                request,
                hand_over,
                cancelled=cancelled,
                drafter=self._drafter,
            )
            result = await asyncio.wrap_future(future)
            if self._closed and result.stopped_by == "cancelled":
                raise Cancelled("this node is shutting down")
        except Exception as error:  # it belongs to the reader
            self.ended["cancelled" if isinstance(error, Cancelled) else "error"] += 1
            events.put_nowait(error)
        else:
            self.ended[result.stopped_by] += 1
            self.last_tokens_per_s = result.tokens_per_s
            events.put_nowait(result)
        finally:
            self._give_back(turn)

    def _assign(self) -> None:
        """Give lanes with room to those that wait longest, the least loaded first."""
        while self._queue and not self._closed:
            lane = min(self._lanes, key=lambda one: len(one.running) if one.has_room else 1 << 30)
            if not lane.has_room:
                return
            turn = self._queue.popleft()
            turn.lane = lane
            lane.running.add(turn.cancelled)
            turn.woken.set()
        while self._queue and self._closed:
            self._queue.popleft().woken.set()

    def _give_back(self, turn: _Turn) -> None:
        """This turn needs its place no more, in a lane or in the queue."""
        if turn.lane is not None:
            turn.lane.running.discard(turn.cancelled)
        elif turn in self._queue:
            self._queue.remove(turn)
        self._assign()

    def _end(self, turn: _Turn) -> None:
        """Nobody wants this turn's generation any more."""
        turn.cancelled.set()
        if turn.lane is None:
            if turn in self._queue:
                self._queue.remove(turn)
            turn.woken.set()
        elif turn.cancelled in turn.lane.running:
            turn.lane.session.interrupt()
