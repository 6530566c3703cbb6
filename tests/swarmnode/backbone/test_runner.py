"""The decode thread's owner, with a session that only counts: who waits for whom, and what ends a generation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import pytest

from swarmnode.backbone import runner
from swarmnode.backbone.runner import GenerationRunner
from swarmnode.backbone.session import GenerateRequest, GenerateResult, MakeDrafter, Session, StoppedBy, TokenEvent
from swarmnode.errors import Cancelled, UsageError


class CountingSession:
    """Generates max_tokens events; each step waits for `step` where the prompt is "slow", until it is cancelled."""

    def __init__(self, n_seq: int = 1) -> None:
        self.n_seq = n_seq
        self.step = threading.Semaphore(0)
        self.started = threading.Event()
        self.interrupts = 0
        self.prompts: list[str] = []
        self._threads = ThreadPoolExecutor(n_seq)

    def prompt_tokens(self, request: GenerateRequest) -> list[int]:
        request.check()
        return [0]

    def submit(
        self,
        request: GenerateRequest,
        on_token: Callable[[TokenEvent], None],
        *,
        cancelled: threading.Event,
        drafter: MakeDrafter | None,
    ) -> Future[GenerateResult]:
        request.check()
        assert drafter is None
        return self._threads.submit(self._generate, request, on_token, cancelled)

    def _generate(
        self, request: GenerateRequest, on_token: Callable[[TokenEvent], None], cancelled: threading.Event
    ) -> GenerateResult:
        self.prompts.append(request.prompt)
        self.started.set()
        count = 0
        while count < request.max_tokens and not cancelled.is_set():
            if request.prompt == "slow":
                self.step.acquire()
                if cancelled.is_set():
                    break
            on_token(TokenEvent(count, count, "x"))
            count += 1
        stopped_by: StoppedBy = "cancelled" if cancelled.is_set() else "length"
        return GenerateResult("x" * count, count, 1, 0.0, 0.0, 1.0, count, 1.0, 0.0, stopped_by)

    def interrupt(self) -> None:
        self.interrupts += 1
        self.step.release(1000)

    def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture
def session() -> Iterator[CountingSession]:
    session = CountingSession()
    yield session
    session.close()


def make(*sessions: CountingSession) -> GenerationRunner:
    return GenerationRunner([cast(Session, session) for session in sessions])


async def read(generations: GenerationRunner, request: GenerateRequest) -> list[TokenEvent | GenerateResult]:
    return [event async for event in generations.stream(request)]


async def turns(generations: GenerationRunner, running: int, waiting: int) -> None:
    """Wait until so many run and wait."""
    async with asyncio.timeout(5):
        while (generations.running, generations.waiting) != (running, waiting):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_events_then_the_result(session: CountingSession) -> None:
    generations = make(session)
    events = await read(generations, GenerateRequest(prompt="p", max_tokens=3))
    assert [type(e) for e in events] == [TokenEvent] * 3 + [GenerateResult]
    assert generations.tokens == 3
    assert not generations.active
    await generations.close()


async def test_a_reader_that_stops_reading_keeps_nobody_waiting(session: CountingSession) -> None:
    generations = make(session)
    stopped = generations.stream(GenerateRequest(prompt="p", max_tokens=3))
    assert isinstance(await anext(stopped), TokenEvent)
    assert len(await asyncio.wait_for(read(generations, GenerateRequest(prompt="q", max_tokens=2)), 5)) == 3
    rest = [event async for event in stopped]
    assert isinstance(rest[-1], GenerateResult)
    await generations.close()


async def test_a_reader_far_behind_loses_its_generation(
    session: CountingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_WAITING_EVENTS", 10)
    generations = make(session)
    behind = generations.stream(GenerateRequest(prompt="p", max_tokens=1 << 20))
    await anext(behind)
    async with asyncio.timeout(10):
        last = [event async for event in behind][-1]
    assert isinstance(last, GenerateResult)
    assert last.tokens < 1 << 20
    await generations.close()


async def test_a_reader_that_leaves_ends_its_generation(session: CountingSession) -> None:
    generations = make(session)
    session.step.release()
    stream = generations.stream(GenerateRequest(prompt="slow", max_tokens=100))
    await anext(stream)
    await asyncio.wait_for(stream.aclose(), 5)
    assert session.interrupts == 1
    assert not generations.active
    await generations.close()


async def test_close_ends_the_running_one_and_refuses_those_that_wait(session: CountingSession) -> None:
    generations = make(session)
    running = asyncio.create_task(read(generations, GenerateRequest(prompt="slow", max_tokens=100)))
    await asyncio.to_thread(session.started.wait)
    waiting = asyncio.create_task(read(generations, GenerateRequest(prompt="p", max_tokens=1)))
    await asyncio.sleep(0)
    await asyncio.wait_for(generations.close(), 5)
    with pytest.raises(Cancelled, match="shutting down"):  # a text that is cut must not look like a whole one
        await running
    with pytest.raises(Cancelled, match="shutting down"):
        await waiting
    with pytest.raises(Cancelled, match="shutting down"):
        await read(generations, GenerateRequest(prompt="p"))


async def test_an_error_belongs_to_its_reader(session: CountingSession) -> None:
    generations = make(session)
    with pytest.raises(UsageError, match="max tokens 0"):
        await read(generations, GenerateRequest(prompt="p", max_tokens=0))
    assert len(await read(generations, GenerateRequest(prompt="p", max_tokens=1))) == 2
    await generations.close()


async def test_requests_go_to_the_least_loaded_lane_and_wait_in_order_beyond_that() -> None:
    lanes = [CountingSession(2), CountingSession(1)]
    generations = make(*lanes)
    try:
        slow = [asyncio.create_task(read(generations, GenerateRequest(prompt="slow", max_tokens=1))) for _ in range(3)]
        await turns(generations, 3, 0)
        later = [asyncio.create_task(read(generations, GenerateRequest(prompt=p, max_tokens=1))) for p in "abc"]
        await turns(generations, 3, 3)
        lanes[1].step.release()
        await asyncio.wait_for(asyncio.gather(*later), 5)
        assert lanes[1].prompts == ["slow", "a", "b", "c"]  # all through the lane that was free first
        lanes[0].step.release(2)
        await asyncio.wait_for(asyncio.gather(*slow), 5)
        assert lanes[0].prompts == ["slow", "slow"]
        assert generations.tokens == 6
        assert not generations.active
    finally:
        await generations.close()
        for lane in lanes:
            lane.close()


async def test_who_leaves_while_waiting_needs_no_lane(session: CountingSession) -> None:
    generations = make(session)
    slow = asyncio.create_task(read(generations, GenerateRequest(prompt="slow", max_tokens=1)))
    await turns(generations, 1, 0)
    waits = asyncio.create_task(read(generations, GenerateRequest(prompt="a", max_tokens=1)))
    await turns(generations, 1, 1)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waits, 5)
    assert (generations.running, generations.waiting, session.interrupts) == (1, 0, 0)
    session.step.release()
    await asyncio.wait_for(slow, 5)
    assert session.prompts == ["slow"]
    await generations.close()


async def test_what_cannot_be_is_refused_at_once_and_not_in_its_turn(session: CountingSession) -> None:
    generations = make(session)
    running = asyncio.create_task(read(generations, GenerateRequest(prompt="slow", max_tokens=1)))
    await asyncio.to_thread(session.started.wait)
    with pytest.raises(UsageError, match="an empty prompt"):
        await asyncio.wait_for(read(generations, GenerateRequest(prompt="")), 10)
    assert (generations.running, generations.waiting) == (1, 0)
    session.step.release()
    await running
    await generations.close()
