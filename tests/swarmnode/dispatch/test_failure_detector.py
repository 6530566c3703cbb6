"""A worker that computes is asked whether it is there; one that says nothing is done without."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest

from swarmnode.dispatch.call_actions import CallPolicy
from swarmnode.dispatch.failure_detector import (
    FORGIVEN,
    GONE_S,
    IDLE_GONE_S,
    QUIET_S,
    FailureDetector,
    Sign,
    unheard,
)
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.request import make_request
from tests.swarmnode.dispatch.samples import SITES, everything, local_rows, make_input
from tests.swarmnode.dispatch.swarm import GatedEngine, eventually, swarm
from transport.config import TransportConfig

SLACK_S = 0.25


def test_who_speaks_is_not_asked() -> None:
    detector = FailureDetector(SLACK_S)
    assert all(detector.look(at / 10, at / 10 - 0.05, 0.0) is Sign.NONE_NEEDED for at in range(100))


@pytest.mark.parametrize(("rtt_s", "limit"), [(0.0, 0.25), (0.2, 0.57)])
def test_silence_is_asked_about_once_and_then_said_once(rtt_s: float, limit: float) -> None:
    detector = FailureDetector(SLACK_S)
    assert detector.look(10.0, 9.99 - QUIET_S, rtt_s) is Sign.ASK
    assert detector.look(10.0 + limit - 0.01, 9.9, rtt_s) is Sign.NONE_NEEDED
    assert detector.look(10.0 + limit + 0.01, 9.9, rtt_s) is Sign.SILENT
    assert detector.look(99.0, 9.9, rtt_s) is Sign.NONE_NEEDED


def test_a_worker_that_answers_the_ping_is_asked_again_when_it_is_quiet_again() -> None:
    detector = FailureDetector(SLACK_S)
    assert detector.look(10.0, 9.0, 0.0) is Sign.ASK
    assert detector.look(10.2, 10.19, 0.0) is Sign.NONE_NEEDED
    assert detector.look(10.3, 10.19, 0.0) is Sign.ASK
    assert detector.look(10.6, 10.19, 0.0) is Sign.SILENT


def test_who_was_only_busy_is_given_longer_but_not_for_ever() -> None:
    detector = FailureDetector(SLACK_S)
    now, waits = 10.0, []
    for _ in range(6):
        assert detector.look(now, now - 1.0, 0.0) is Sign.ASK
        asked = now
        while detector.look(now, asked - 1.0, 0.0) is not Sign.SILENT:
            now += 0.01
        waits.append(round(now - asked, 2))
        assert detector.look(now + 0.05, now + 0.04, 0.0) is Sign.NONE_NEEDED
        now += 5.0
    assert waits == pytest.approx([0.25, 0.5, 1.0, 2.0, 2.0, 2.0], abs=0.02)


def test_who_answers_in_time_again_is_trusted_again() -> None:
    detector = FailureDetector(SLACK_S)
    assert detector.look(10.0, 9.0, 0.0) is Sign.ASK
    assert detector.look(10.3, 9.0, 0.0) is Sign.SILENT
    assert detector.look(11.0, 10.95, 0.0) is Sign.NONE_NEEDED  # twice as long from now on
    for number in range(FORGIVEN):
        now = 20.0 + number
        assert detector.look(now, now - 0.5, 0.0) is Sign.ASK
        assert detector.look(now + 0.1, now + 0.05, 0.0) is Sign.NONE_NEEDED
    assert detector.look(50.0, 49.0, 0.0) is Sign.ASK
    assert detector.look(50.3, 49.0, 0.0) is Sign.SILENT


def test_what_was_asked_long_ago_says_nothing_of_a_new_call() -> None:
    detector = FailureDetector(SLACK_S)
    assert detector.look(10.0, 9.0, 0.0) is Sign.ASK
    detector.rest()
    assert detector.look(20.0, 9.0, 0.0) is Sign.ASK


@pytest.mark.parametrize("mode", ["exact", "partial"])
async def test_a_worker_that_dies_without_a_word_in_a_prompt_costs_half_a_second(mode: str) -> None:
    options = DispatchOptions(mode="partial" if mode == "partial" else "exact", late_ceiling_s=20.0)
    async with swarm(options) as s:
        engine = GatedEngine(everything())
        victim = await s.add({}, engine=engine)
        x, ids, weights = make_input(SITES[0], 300)
        calling = asyncio.create_task(s.call(0, x, ids, weights))
        await engine.wait_entered()
        await s.add(everything())
        victim.endpoint.socket.udp.close()
        began = time.monotonic()
        rows = await calling
        assert np.allclose(rows, local_rows(SITES[0], x, ids, weights), rtol=1e-5, atol=1e-5)
        assert time.monotonic() - began < 5.0  # a busy machine; alone it is 0.4 s
        assert s.client.site_stats()[0].late >= 1
        engine.open()


async def test_a_worker_that_computes_for_long_is_not_given_up() -> None:
    options = DispatchOptions(mode="partial", late_ceiling_s=20.0, call=CallPolicy(give_up_s=20.0))
    async with swarm(options) as s:
        engine = GatedEngine(everything())
        await s.add({}, engine=engine)
        x, ids, weights = make_input(SITES[0], 300)
        calling = asyncio.create_task(s.call(0, x, ids, weights))
        await engine.wait_entered()
        other = await s.add(everything())
        await asyncio.sleep(1.0)
        engine.open()
        rows = await calling
        assert np.allclose(rows, local_rows(SITES[0], x, ids, weights), rtol=1e-5, atol=1e-5)
        assert s.client.site_stats()[0].late == 0
        assert other.real.stats().calls == 0


@pytest.mark.parametrize(("rtt_s", "limit"), [(0.0, GONE_S), (0.2, GONE_S + 0.6)])
def test_who_acknowledges_no_ping_is_unheard_after_a_second_and_three_round_trips(rtt_s: float, limit: float) -> None:
    assert not unheard(10.0 + limit - 0.01, heard_at=9.9, pinged_at=10.0, rtt_s=rtt_s)
    assert unheard(10.0 + limit + 0.01, heard_at=9.9, pinged_at=10.0, rtt_s=rtt_s)
    assert not unheard(10.0 + limit + 0.01, heard_at=10.1, pinged_at=10.0, rtt_s=rtt_s)  # slow, and there


def test_who_is_asked_nothing_is_unheard_when_a_keep_alive_has_brought_nothing() -> None:
    assert not unheard(10.0 + IDLE_GONE_S - 0.01, heard_at=10.0, pinged_at=math.inf, rtt_s=0.0)
    assert unheard(10.0 + IDLE_GONE_S + 0.01, heard_at=10.0, pinged_at=math.inf, rtt_s=0.0)


async def test_a_worker_that_died_without_a_word_is_known_to_be_gone_long_before_its_connection_ends() -> None:
    async with swarm(DispatchOptions()) as s:
        victim = await s.add(everything())
        peer = str(victim.endpoint.peer_id)
        for seed in range(3):
            await s.check(seed=seed)
        await s.add(everything())
        assert s.client.recent(peer) is not None
        victim.endpoint.socket.udp.close()
        began = time.monotonic()
        await s.check(seed=3)
        await eventually(lambda: s.client.recent(peer) is None)
        assert time.monotonic() - began < 0.6 * TransportConfig().idle_timeout
        assert len(s.client.workers()) == 2  # its connection does not know


async def test_a_worker_that_is_late_and_lives_is_not_taken_for_gone() -> None:
    async with swarm(DispatchOptions(late_unknown_s=0.1)) as s:
        engine = GatedEngine(everything())
        slow = await s.add({}, engine=engine)
        peer = str(slow.endpoint.peer_id)
        calling = asyncio.create_task(s.call(0, *make_input(SITES[0], 1)))
        await engine.wait_entered()
        await s.add(everything())
        await calling
        assert s.client.site_stats()[0].late == 1
        await asyncio.sleep(GONE_S + 0.3)
        assert s.client.recent(peer) is not None
        engine.open()


async def test_who_answers_no_check_is_asked_last() -> None:
    """Nobody waits for some checks: a worker that died would collect them, and real calls wait behind them."""
    async with swarm(DispatchOptions(late_unknown_s=0.1)) as s:
        engine = GatedEngine(everything())
        await s.add({}, engine=engine)
        (remote,) = s.client._roster.attached.values()
        share = make_request(SITES[0], *make_input(SITES[0], 1), partial=False).share(range(2))
        remote.ask(1 << 40, share)  # as a check does
        await engine.wait_entered()
        assert not s.client.workers()[0].suspect
        await eventually(lambda: s.client.workers()[0].suspect)
        engine.open()
        await eventually(lambda: not s.client.workers()[0].suspect)
