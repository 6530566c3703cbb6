"""The decode thread's owner, with a session that only counts: who waits for whom, and what ends a generation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import cast

import pytest

from swarmnode.backbone import runner
from swarmnode.backbone.runner import GenerationRunner
from swarmnode.backbone.session import GenerateRequest, GenerateResult, Session, TokenEvent
from swarmnode.errors import Cancelled, UsageError


class CountingSession:
    """Generates max_tokens events; each step waits for `step` where the prompt is "slow", until it is cancelled."""

    def __init__(self) -> None:
        self.step = threading.Semaphore(0)
        self.started = threading.Event()
        self.interrupts = 0

    def generate(
        self, request: GenerateRequest, on_token: Callable[[TokenEvent], None], *, cancelled: threading.Event
    ) -> GenerateResult:
        request.check()
        self.started.set()
        count = 0
        while count < request.max_tokens and not cancelled.is_set():
            if request.prompt == "slow":
                self.step.acquire()
                if cancelled.is_set():
                    break
            on_token(TokenEvent(count, count, "x"))
            count += 1
        return GenerateResult("x" * count, count, 1, 0.0, 0.0, 1.0, count, 1.0, 0.0, "length")

    def interrupt(self) -> None:
        self.interrupts += 1
        self.step.release(1000)


@pytest.fixture
def session() -> CountingSession:
    return CountingSession()


def make(session: CountingSession) -> GenerationRunner:
    return GenerationRunner(cast(Session, session))


async def read(generations: GenerationRunner, request: GenerateRequest) -> list[TokenEvent | GenerateResult]:
    return [event async for event in generations.stream(request)]


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
    assert isinstance((await running)[-1], GenerateResult)
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
