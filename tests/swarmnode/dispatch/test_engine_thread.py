"""The engine's thread: one result for each call, in order, and nothing that an engine does ends it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from swarmnode.compute.engine_api import Engine
from swarmnode.compute.null_engine import NullEngine
from swarmnode.dispatch.codec import F32, WireType
from swarmnode.dispatch.engine_thread import EngineThread, Result, run_call
from swarmnode.dispatch.frame_decoder import FrameDecoder
from swarmnode.dispatch.frames import Answer, CallFrame, Frame, FrameType, Refuse, RefuseCode
from swarmnode.dispatch.request import I32, make_request
from tests.swarmnode.dispatch.samples import SITES, everything, full_engine, make_input
from tests.swarmnode.dispatch.swarm import GatedEngine

SITE = SITES[0]


def make_call(call_id: int) -> CallFrame:
    request = make_request(SITE, *make_input(SITE, 1), partial=False)
    return request.share(range(len(request.experts))).frame(call_id, WireType.F32, WireType.F32)


def decode(result: Result) -> Frame:
    [frame] = FrameDecoder(FrameType).feed(result.frame)
    return frame


class RaisingEngine(NullEngine):
    """Raises what it is given on its first call, and computes from then on."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(SITES, everything())
        self.error: BaseException | None = error

    def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().raw_rows(site, x, rows, experts)


async def results(engine: Engine, n: int, arrived: Callable[[], float] = time.monotonic) -> list[Result]:
    """Run n calls through a thread of their own; each result must come on this very thread."""
    loop, here = asyncio.get_running_loop(), threading.current_thread()
    got: list[Result] = []
    all_done = loop.create_future()

    def on_done(result: Result) -> None:
        assert threading.current_thread() is here
        got.append(result)
        if len(got) == n:
            all_done.set_result(None)

    thread = EngineThread(loop, engine)
    for call_id in range(1, n + 1):
        thread.run(SITE, make_call(call_id), arrived(), on_done)
    async with asyncio.timeout(20):
        await all_done
    assert thread.close(20)
    return got


async def test_results_come_in_order_on_the_loop() -> None:
    answers = [decode(result) for result in await results(full_engine(), 5)]
    assert [answer.id for answer in answers if isinstance(answer, Answer)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [RuntimeError("device lost"), MemoryError(), SystemExit(3), KeyboardInterrupt()])
async def test_whatever_an_engine_raises_the_call_is_refused_and_the_next_one_served(error: BaseException) -> None:
    first, second = await results(RaisingEngine(error), 2)
    refuse = decode(first)
    assert isinstance(refuse, Refuse)
    assert (refuse.id, refuse.code) == (1, RefuseCode.COMPUTE_FAILED)
    assert type(error).__name__ in refuse.why == first.failed
    assert isinstance(decode(second), Answer)
    assert not second.failed


async def test_an_answer_that_cannot_be_written_down_is_a_refusal() -> None:
    coming = iter([time.monotonic() + 1000.0, time.monotonic()])  # it would have waited for less than nothing
    first, second = await results(full_engine(), 2, lambda: next(coming))
    assert first.failed.startswith("error: ")  # struct's
    assert isinstance(decode(first), Refuse)
    assert isinstance(decode(second), Answer)


def test_the_times_are_those_of_the_call() -> None:
    result = run_call(full_engine(), SITE, make_call(7), time.monotonic() - 2.0)
    answer = decode(result)
    assert isinstance(answer, Answer)
    assert answer.queued_us >= 2_000_000
    assert answer.queued_us == round(result.queued_s * 1e6)
    assert answer.busy_us == round(result.busy_s * 1e6)


async def test_closing_says_whether_the_thread_has_ended() -> None:
    gated = GatedEngine(everything())
    done = asyncio.Event()
    thread = EngineThread(asyncio.get_running_loop(), gated)
    thread.run(SITE, make_call(1), time.monotonic(), lambda result: done.set())
    await gated.wait_entered()
    assert not thread.close(0.0)
    gated.open()
    async with asyncio.timeout(20):
        await done.wait()
    assert await asyncio.to_thread(thread.close, 20)


async def test_an_action_comes_between_the_calls_before_and_after_it_whatever_it_raises() -> None:
    order: list[str] = []
    done = asyncio.Event()
    loop_thread = threading.current_thread()

    class Noting(NullEngine):
        def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
            order.append("call")
            return super().raw_rows(site, x, rows, experts)

    def act() -> object:
        assert threading.current_thread() is not loop_thread
        order.append("action")
        return "before"

    def fail() -> object:
        raise SystemExit(3)

    thread = EngineThread(asyncio.get_running_loop(), Noting(SITES, everything()))
    heard: list[tuple[object, BaseException | None]] = []
    thread.run(SITE, make_call(1), time.monotonic(), lambda result: None)
    thread.run_action(act, lambda *outcome: heard.append(outcome))
    thread.run_action(fail, lambda *outcome: heard.append(outcome))
    thread.run(SITE, make_call(2), time.monotonic(), lambda result: done.set())
    async with asyncio.timeout(20):
        await done.wait()
    assert order == ["call", "action", "call"]
    assert heard[0] == ("before", None)
    assert isinstance(heard[1][1], SystemExit)
    assert thread.close(20)
