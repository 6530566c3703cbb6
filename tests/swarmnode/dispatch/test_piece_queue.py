"""Pieces that wait for a worker: whose turn it is, and until when they wait rightly."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swarmnode.dispatch.call_actions import CallPolicy, Send
from swarmnode.dispatch.codec import WireType
from swarmnode.dispatch.frames import Answer
from swarmnode.dispatch.health import Latency
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.pending import PendingRows
from swarmnode.dispatch.piece_queue import PieceQueues
from swarmnode.dispatch.request import Share, make_request
from swarmnode.dispatch.views import SiteStats
from tests.swarmnode.dispatch.samples import SITES, make_input

OPTIONS = DispatchOptions(mode="partial", call=CallPolicy(queue_s=2.0))


def pending(n: int = 100) -> PendingRows:
    request = make_request(SITES[0], *make_input(SITES[0], n), partial=True)
    nobody: Any = None  # these calls do not end
    return PendingRows(request, SiteStats(), nobody)


class Queues:
    """PieceQueues with one worker, number 0; what is handed over is sent."""

    def __init__(self, rtt_s: float = 0.04) -> None:
        self.handed: list[tuple[PendingRows, int]] = []
        self.unwanted: set[PendingRows] = set()
        self.queues = PieceQueues(asyncio.get_running_loop(), OPTIONS, self._hand_over)
        connection: Any = SimpleNamespace(stats=lambda: SimpleNamespace(min_rtt_s=rtt_s))  # all it asks of one
        self.queues.attached(0, connection, 8)

    def _hand_over(self, pending: PendingRows, send: Send) -> bool:
        if pending in self.unwanted:
            return False
        self.handed.append((pending, send.attempt))
        self.left(pending, send.attempt)
        return True

    def left(self, pending: PendingRows, attempt: int, ago_s: float = 0.0) -> Share:
        share = pending.request.share(range(len(pending.request.experts)))
        self.queues.sent(0, attempt, share, 20_000, time.monotonic() - ago_s)
        return share

    def begin(self, pending: PendingRows, attempts: range) -> None:
        for attempt in attempts:
            if self.queues.may_go(pending, Send(attempt, 0, np.arange(400))):
                self.left(pending, attempt)

    async def all_of_it(self) -> list[tuple[PendingRows, int]]:
        """Have everything that is under way dropped, one after the other, until nothing comes any more."""
        self.queues.settled(0, 0)
        seen = -1
        while seen < len(self.handed):
            seen = len(self.handed)
            for _, attempt in self.handed[-1:]:
                self.queues.settled(0, attempt)
            await asyncio.sleep(0)
        return self.handed


async def test_calls_take_turns() -> None:
    s, first, second, third = Queues(), pending(), pending(), pending()
    s.begin(first, range(0, 5))
    s.begin(second, range(10, 13))
    s.begin(third, range(20, 21))
    assert await s.all_of_it() == [
        (first, 1),
        (second, 10),
        (third, 20),
        (first, 2),
        (second, 11),
        (first, 3),
        (second, 12),
        (first, 4),
    ]


async def test_a_call_that_is_given_up_keeps_nobody_waiting() -> None:
    s, first, second = Queues(), pending(), pending()
    s.begin(first, range(0, 5))
    s.begin(second, range(10, 12))
    s.unwanted.add(first)
    assert await s.all_of_it() == [(second, 10), (second, 11)]


async def test_what_waits_does_so_rightly_until_what_was_sent_is_late() -> None:
    s, call, decode = Queues(), pending(), Latency(0.002)
    assert s.queues.answering_until(0, 7.0, decode) == 9.0  # nothing large is under way: queue_s
    now = time.monotonic()
    s.left(call, 1)
    assert s.queues.answering_until(0, now, decode) == pytest.approx(now + OPTIONS.late_ceiling_s, abs=0.5)
    s.queues.settled(0, 1)
    assert s.queues.answering_until(0, 7.0, decode) == 9.0
    s.queues.lost(0)
    assert s.queues.answering_until(0, 7.0, decode) == 9.0


async def test_the_answer_of_a_piece_is_waited_for_too() -> None:
    s, call = Queues(), pending(5000)
    share = s.left(call, 1, ago_s=1.0)
    answer = Answer(1, WireType.F32, 5000, 0, 100_000, b"")
    s.queues.answered(0, 1, share, answer, 5000 * 40 * 4)
    known = Latency(0.002, 0.04)
    alone = s.queues.late_after(0, 4, 9, known)
    s.left(call, 2)
    behind = s.queues.late_after(0, 4, 9, known) - alone
    assert 0.9 < behind < 1.1  # 0.1 s in the engine, the rest of the second on the line, nearly all on the way back


async def test_a_prompts_step_outweighs_the_round_trip() -> None:
    s, call = Queues(rtt_s=0.04), pending(1000)
    assert s.queues.prompt_chunk(SITES[:1], 3000) == 3000
    share = s.left(call, 1, ago_s=1.04)
    s.queues.answered(0, 1, share, Answer(1, WireType.F32, 1000, 0, 1_000_000, b""), 1000 * 40 * 4)
    assert s.queues.prompt_chunk(SITES[:1], 3000) == 512  # 8 × 40 ms at 1 ms a token
    assert s.queues.prompt_chunk(SITES[:1], 300) == 300
    assert s.queues.prompt_chunk((), 3000) == 3000
    s.queues.lost(0)
    assert s.queues.prompt_chunk(SITES[:1], 3000) == 3000
