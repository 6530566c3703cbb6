"""The client against real workers on loopback: the local run's bits, whatever the others do."""

from __future__ import annotations

import asyncio
import ctypes
import time

import numpy as np
import pytest

from swarmnode.backbone import hook
from swarmnode.backbone.graph_trace import GraphPlan, SitePlan
from swarmnode.compute import ggml
from swarmnode.compute.null_engine import NullEngine
from swarmnode.dispatch.admission import AdmissionLimits
from swarmnode.dispatch.call_actions import CallPolicy
from swarmnode.dispatch.codec import F32, WireName
from swarmnode.dispatch.frames import Answer, CallFrame, HoldingsUpdate, Refuse, RefuseCode, SiteHoldings
from swarmnode.dispatch.options import DispatchOptions, WorkerOptions
from swarmnode.dispatch.request import I32
from swarmnode.dispatch.spot_check import CheckPolicy
from swarmnode.errors import CallFailed, Cancelled, DispatchError, NobodyHolds, SwarmnodeError
from tests.swarmnode.dispatch.samples import D_OUT, SITES, everything, full_engine, local_rows, make_input
from tests.swarmnode.dispatch.swarm import (
    LIMITS,
    Behaviour,
    GatedEngine,
    Member,
    Swarm,
    cut_up,
    eventually,
    stop_sending,
    swarm,
)
from transport.config import TransportConfig
from transport.emulation import LinkEmulation
from transport.stream import Stream

ALL = everything()
NO_CHECKS = CheckPolicy(share=0.0, alone_share=0.0, new_share=0.0)
HOLDINGS = HoldingsUpdate((SiteHoldings(0, 16, 0xFFFF),)).encode()  # a sign of life
# Lateness within a test's patience; nothing here measures it.
QUICK = DispatchOptions(late_floor_s=0.05, late_ceiling_s=0.05, call=CallPolicy(give_up_s=0.5, queue_s=0.1))


@pytest.mark.parametrize("n_workers", [1, 2, 3, 4, 5, 6, 7, 8])
async def test_any_number_of_workers_with_unequal_shares(n_workers: int) -> None:
    async with swarm() as s:
        for holdings in cut_up(n_workers):
            await s.add(holdings)
        for site in SITES:
            for n in (1, 2, 9):
                await s.check(site.index, n)


async def test_overlapping_holdings_use_the_fewest_workers() -> None:
    async with swarm(DispatchOptions(near_s=10.0)) as s:  # however busy this machine is
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        await s.add({0: range(16)})
        for seed in range(10):
            await s.check(seed=seed)
        assert [view.calls for view in s.client.workers()] == [0, 0, 10]


@pytest.mark.parametrize("wire", ["f32", "f16"])
async def test_partial_sums_are_the_same_value(wire: WireName) -> None:
    options = DispatchOptions(mode="partial", wire_out=wire, wire_back=wire)
    tolerance = 1e-5 if wire == "f32" else 5e-3
    async with swarm(options) as s:
        for holdings in cut_up(3):
            await s.add(holdings)
        for site in SITES:
            x, ids, weights = make_input(site, 5)
            rows = await s.call(site.index, x, ids, weights)
            assert np.allclose(rows, local_rows(site, x, ids, weights), rtol=tolerance, atol=tolerance)
            assert rows.tobytes() == (await s.call(site.index, x, ids, weights)).tobytes()


async def test_a_value_too_large_for_f16_arrives() -> None:
    async with swarm(DispatchOptions(wire_out="f16", wire_back="f16")) as s:
        await s.add(ALL)
        x, ids, weights = make_input(SITES[0], 1)
        x[0, 0] = 1e6
        rows = await s.call(0, x, ids, weights)
        assert np.array_equal(rows, local_rows(SITES[0], x, ids, weights))


async def test_a_prompt_is_cut_to_the_workers_limits_and_keeps_its_bits() -> None:
    async with swarm() as s:
        for holdings in cut_up(3):
            await s.add(holdings, limits=AdmissionLimits(max_pairs=20, max_bytes=4000, calls_per_peer=2))
        await s.check(0, 64)
        await s.check(2, 64)
        assert s.client.site_stats()[0].requests >= 64 * 4 / 20
        assert all(member.real.stats().refused == {} for member in s.members)


PIECES = AdmissionLimits(max_pairs=100, calls_per_peer=3)  # 25 tokens of top-4
MANY_PIECES = AdmissionLimits(max_pairs=100, calls_per_peer=64)


async def prompt_under_way(
    s: Swarm, n: int = 300, limits: AdmissionLimits = PIECES
) -> tuple[GatedEngine, Member, asyncio.Task[F32]]:
    """A worker whose engine is at the first piece of a prompt of n tokens, and the call."""
    engine = GatedEngine(everything())
    member = await s.add({}, engine=engine, limits=limits)
    calling = asyncio.create_task(s.call(0, *make_input(SITES[0], n)))
    await engine.wait_entered()
    return engine, member, calling


async def test_a_large_call_of_partial_sums_goes_in_pieces_and_has_the_same_bits() -> None:
    async with swarm(DispatchOptions(mode="partial")) as s:
        for holdings in cut_up(3):
            await s.add(holdings)
        for site in SITES:
            x, ids, weights = make_input(site, 200)
            whole = await s.call(site.index, x, ids, weights)
            assert np.allclose(whole, local_rows(site, x, ids, weights), rtol=1e-5, atol=1e-5)
    async with swarm(DispatchOptions(mode="partial"), seed=1) as s:
        for holdings in cut_up(3):
            await s.add(holdings, limits=PIECES)
        for site in SITES:
            x, ids, weights = make_input(site, 200)
            for _ in range(3):
                rows = await s.call(site.index, x, ids, weights)
            assert s.client.site_stats()[site.index].requests >= 3 * 3 * 200 // 50
        assert all(member.real.stats().refused == {} for member in s.members)
        x, ids, weights = make_input(SITES[0], 200)
        assert (await s.call(0, x, ids, weights)).tobytes() == (await s.call(0, x, ids, weights)).tobytes()
        assert np.allclose(rows, whole, rtol=1e-6, atol=1e-6)


async def test_a_slow_engine_gets_less_of_a_prompt() -> None:
    class Slow(NullEngine):
        def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
            time.sleep(len(rows) * 1e-3)
            return super().raw_rows(site, x, rows, experts)

    async with swarm(DispatchOptions(mode="partial", check=NO_CHECKS)) as s:
        await s.add(everything())
        await s.add({}, engine=Slow(SITES, everything()))
        x, ids, weights = make_input(SITES[0], 200)
        for _ in range(4):
            await s.call(0, x, ids, weights)
        before = [one.rows for one in s.client.workers()]
        await s.call(0, x, ids, weights)
        fast, slow = (one.rows - rows for one, rows in zip(s.client.workers(), before, strict=True))
        assert fast + slow == 800
        assert slow < 200


async def test_a_small_call_does_not_wait_behind_all_pieces_of_a_large_one() -> None:
    async with swarm(DispatchOptions(mode="partial")) as s:
        engine, member, large = await prompt_under_way(s, 1000, MANY_PIECES)  # 40 of them
        await eventually(lambda: member.real.stats().in_flight > 1)
        assert s.client.workers()[0].in_flight < 16
        x, ids, weights = make_input(SITES[0], 1)
        small = asyncio.create_task(s.call(0, x, ids, weights))
        engine.open()
        await small
        assert not large.done()
        assert (await large).shape == (1000, D_OUT)


async def test_what_a_small_call_takes_behind_pieces_says_nothing_of_the_worker() -> None:
    async with swarm(DispatchOptions(mode="partial", check=NO_CHECKS)) as s:
        engine, member, large = await prompt_under_way(s, 200, MANY_PIECES)
        x, ids, weights = make_input(SITES[0], 1)
        small = asyncio.create_task(s.call(0, x, ids, weights))
        await eventually(lambda: member.real.stats().in_flight > 2)
        engine.open()
        await small
        await large
        assert member.remote is not None
        assert member.remote.latency.recent_s is None
        await s.call(0, x, ids, weights)
        assert member.remote.latency.recent_s is not None


async def test_calls_behind_each_other_on_a_busy_worker_are_not_given_to_another_one() -> None:
    class Slow(NullEngine):
        def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
            time.sleep(0.05)
            return super().raw_rows(site, x, rows, experts)

    options = DispatchOptions(mode="partial", check=NO_CHECKS, call=CallPolicy(queue_s=0.1, give_up_s=0.5))
    async with swarm(options) as s:
        await s.add({}, engine=Slow(SITES, everything()), limits=PIECES)
        x, ids, weights = make_input(SITES[0], 300)
        calls = [s.client.submit(0, x, ids, weights) for _ in range(2)]
        await s.add(everything(), limits=PIECES)
        for pending in calls:
            rows = await asyncio.to_thread(pending.result)
            assert np.allclose(rows, local_rows(SITES[0], x, ids, weights), rtol=1e-5, atol=1e-5)
        assert [view.rows for view in s.client.workers()] == [2 * 1200, 0]
        assert s.client.site_stats()[0].requests == 24
        assert s.client.site_stats()[0].late == 0


async def test_the_tokens_of_a_prompts_step_follow_what_the_workers_have_shown() -> None:
    async with swarm(DispatchOptions(mode="partial", check=NO_CHECKS)) as s:
        assert s.client.prompt_chunk(1000) == 1000  # nobody is there
        member = await s.add(everything())
        assert s.client.prompt_chunk(1000) == 1000  # nothing is known
        x, ids, weights = make_input(SITES[0], 200)
        await s.call(0, x, ids, weights)
        assert 1 <= await asyncio.to_thread(s.client.prompt_chunk, 4096) <= 4096
        assert s.client.prompt_chunk(7) == 7
        await member.kill()
        await eventually(lambda: not s.client.workers())
        assert s.client.prompt_chunk(1000) == 1000


async def test_a_worker_lost_in_the_middle_of_a_prompt_is_replaced() -> None:
    async with swarm(DispatchOptions(mode="partial")) as s:
        engine, first, calling = await prompt_under_way(s)
        engine.permits.release()
        await engine.wait_entered()
        await s.add(everything(), limits=PIECES)
        await first.kill()
        expected = local_rows(SITES[0], *make_input(SITES[0], 300))
        assert np.allclose(await calling, expected, rtol=1e-5, atol=1e-5)
        engine.open()


async def test_a_cancelled_prompt_leaves_nothing_that_waits() -> None:
    async with swarm(DispatchOptions(mode="partial")) as s:
        engine, member, calling = await prompt_under_way(s)
        s.client.cancel_all()
        with pytest.raises(Cancelled):
            await calling
        engine.open()
        await eventually(lambda: member.real.stats().in_flight == 0)
        for _ in range(2):
            assert (await s.call(0, *make_input(SITES[0], 300))).shape == (300, D_OUT)
        assert s.client.workers()[0].in_flight == 0


async def test_no_tokens_need_no_worker() -> None:
    async with swarm() as s:
        x, ids, weights = make_input(SITES[0], 0)
        assert s.client.submit(0, x, ids, weights).result().shape == (0, D_OUT)


async def test_nobody_holds_names_layer_and_experts() -> None:
    async with swarm() as s:
        await s.add({0: [e for e in range(16) if e not in (3, 9)]})
        x, _, weights = make_input(SITES[0], 1)
        with pytest.raises(NobodyHolds, match=r"layer 10: nobody reachable holds experts 3, 9;"):
            await s.call(0, x, np.array([[1, 9, 3, 2]], np.int32), weights)
        with pytest.raises(NobodyHolds, match="layer 11"):
            await s.check(1)


async def test_experts_that_come_and_go_are_followed() -> None:
    async with swarm() as s:
        first = await s.add({0: range(8)})
        with pytest.raises(NobodyHolds):
            await s.check()
        second = await s.add({0: range(8, 16)})
        await s.check()
        await second.kill()
        await eventually(lambda: len(s.client.workers()) == 1)
        with pytest.raises(NobodyHolds):
            await s.check()
        assert first.remote is not None
        await s.client.detach(first.remote)
        assert s.client.workers() == []


async def test_in_a_swarm_a_call_outlives_the_only_holder_of_its_experts() -> None:
    engine = GatedEngine(everything())
    async with swarm(DispatchOptions(call=CallPolicy(patient=True))) as s:
        first = await s.add(everything(), engine=engine)
        calling = asyncio.create_task(s.check(0, 3))
        await engine.wait_entered()
        assert first.remote is not None
        await s.client.detach(first.remote)
        assert s.client.workers() == []
        await s.add(everything())
        await calling
        engine.open()


async def test_the_local_engine_fills_the_gaps_in_parallel() -> None:
    async with swarm(local=full_engine()) as s:
        await s.add({site.index: range(site.n_expert // 2) for site in SITES})
        for site in SITES:
            await s.check(site.index, 6)
        stats = s.client.site_stats()[0]
        assert 0 < stats.local_pairs < stats.pairs == 24


async def test_local_first_asks_nobody_for_what_is_here() -> None:
    options = DispatchOptions(call=CallPolicy(local_first=True))
    async with swarm(options, local=full_engine()) as s:
        await s.add(ALL)
        await s.check()
        assert s.client.site_stats()[0].calls == 0
        assert s.client.site_stats()[0].local_calls == 1


# A worker that misbehaves: its pairs go elsewhere and the bits are the same; alone, it is named in the error.


def nan(frame: CallFrame, stream: Stream) -> None:
    rows = np.full((frame.n_pairs, D_OUT), np.nan, np.float32)
    stream.write_nowait(Answer(frame.id, 0, frame.n_pairs, 0, 0, rows.tobytes()).encode())


def one_row_too_few(frame: CallFrame, stream: Stream) -> None:
    n = frame.n_pairs - 1
    stream.write_nowait(Answer(frame.id, 0, n, 0, 0, bytes(4 * D_OUT * n)).encode())


def narrow_rows(frame: CallFrame, stream: Stream) -> None:
    stream.write_nowait(Answer(frame.id, 0, frame.n_pairs, 0, 0, bytes(4 * frame.n_pairs)).encode())


def wrong_id(frame: CallFrame, stream: Stream) -> None:
    rows = bytes(4 * D_OUT * frame.n_pairs)
    stream.write_nowait(Answer(frame.id + 1000, 0, frame.n_pairs, 0, 0, rows).encode())


def silence(frame: CallFrame, stream: Stream) -> None:
    pass


def garbage(frame: CallFrame, stream: Stream) -> None:
    stream.write_nowait(b"\xff" * 100)


def welcome_again(frame: CallFrame, stream: Stream) -> None:
    stream.write_nowait(HoldingsUpdate((SiteHoldings(0, 99, 1),)).encode())


def reset(frame: CallFrame, stream: Stream) -> None:
    stream.reset(7)


def refuse(frame: CallFrame, stream: Stream) -> None:
    stream.write_nowait(Refuse(frame.id, RefuseCode.COMPUTE_FAILED, "no memory").encode())


def overloaded(frame: CallFrame, stream: Stream) -> None:
    stream.write_nowait(Refuse(frame.id, RefuseCode.OVERLOADED, "busy").encode())


MISBEHAVIOURS = [
    (nan, "answered NaN or infinity"),
    (one_row_too_few, "rows where 4 were asked for"),
    (narrow_rows, "4 rows of 40 values as F32 take 640 bytes, but 16 came"),
    (wrong_id, "no answer in 0.5 s"),
    (silence, "no answer in 0.5 s"),
    (garbage, "frame type 255 is unknown"),
    (welcome_again, "holdings name 99 experts at site 0; the model has 16 experts"),
    (reset, "reset the stream with code 7"),
    (refuse, "refused, compute failed: no memory"),
    (overloaded, "no answer in 0.5 s"),
]


@pytest.mark.parametrize(("behave", "reason"), MISBEHAVIOURS, ids=lambda v: getattr(v, "__name__", ""))
async def test_a_misbehaving_worker(behave: Behaviour, reason: str) -> None:
    async with swarm(QUICK) as s:
        await s.add_scripted({0: range(16)}, behave)
        with pytest.raises(CallFailed) as caught:
            await s.check()
        assert "layer 10: no answer for experts" in str(caught.value)
        assert reason in str(caught.value)
        assert "scripted" in str(caught.value)
    async with swarm(QUICK, local=full_engine()) as s:
        await s.add_scripted({0: range(16)}, behave)
        for seed in range(5):
            await s.check(seed=seed)
    async with swarm(QUICK) as s:
        await s.add_scripted({0: range(16)}, behave)
        await s.add({0: range(0, 16, 2)})
        await s.add({0: range(1, 16, 2)})
        for seed in range(5):
            await s.check(seed=seed, n=3)


async def test_a_second_answer_to_a_call_counts_neither_in_the_sum_nor_for_the_worker() -> None:
    engine = full_engine()

    def twice(frame: CallFrame, stream: Stream) -> None:
        x = np.frombuffer(frame.rows, np.float32).reshape(frame.n_rows, -1)
        rows = engine.raw_rows(0, x, frame.tokens.astype(np.int32), frame.experts.astype(np.int32))
        for _ in range(2):
            stream.write_nowait(Answer(frame.id, 0, len(rows), 0, 0, rows.tobytes()).encode())

    async with swarm() as s:
        await s.add_scripted({0: range(16)}, twice)
        await s.check(seed=1)
        await s.check(seed=2)
        await eventually(lambda: s.client.workers()[0].failures >= 1)
        assert "which is not open" in s.client.workers()[0].last_fault


async def test_a_worker_that_keeps_failing_is_left_alone_for_a_while() -> None:
    calls: list[int] = []

    def failing(frame: CallFrame, stream: Stream) -> None:
        calls.append(frame.id)
        nan(frame, stream)

    options = DispatchOptions(near_s=10.0, faults_allowed=3, suspension_s=60.0)
    async with swarm(options) as s:
        await s.add_scripted({0: range(16)}, failing)
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        for seed in range(8):
            await s.check(seed=seed)
        assert len(calls) == 3
        [view] = [view for view in s.client.workers() if view.name == "scripted"]
        assert view.suspect
        assert view.failures == 3


@pytest.mark.parametrize("code", [RefuseCode.NOT_HELD, RefuseCode.CANCELLED])
async def test_a_worker_whose_refusals_belie_it_is_left_alone_for_a_while(code: RefuseCode) -> None:
    calls: list[int] = []

    def lying(frame: CallFrame, stream: Stream) -> None:
        calls.append(frame.id)
        stream.write_nowait(Refuse(frame.id, code, "not today").encode())

    async with swarm(DispatchOptions(near_s=10.0, faults_allowed=3, suspension_s=60.0)) as s:
        await s.add_scripted({0: range(16)}, lying)
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        for seed in range(6):
            await s.check(seed=seed)
        assert len(calls) == 3


async def test_a_worker_that_has_just_dropped_experts_is_not_blamed() -> None:
    def dropping(frame: CallFrame, stream: Stream) -> None:
        refusal = Refuse(frame.id, RefuseCode.NOT_HELD, "no longer here")
        stream.write_nowait(HoldingsUpdate(()).encode() + refusal.encode())

    async with swarm(DispatchOptions(near_s=10.0)) as s:
        await s.add_scripted({0: range(16)}, dropping)
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        await s.check()
        [view] = [view for view in s.client.workers() if view.name == "scripted"]
        assert (view.failures, view.experts) == (0, 0)


async def test_a_worker_that_refuses_because_it_leaves_is_not_asked_again() -> None:
    calls: list[int] = []

    def leaving(frame: CallFrame, stream: Stream) -> None:
        calls.append(frame.id)
        stream.write_nowait(Refuse(frame.id, RefuseCode.SHUTTING_DOWN, "bye").encode())

    async with swarm(DispatchOptions(near_s=10.0)) as s:
        await s.add_scripted({0: range(16)}, leaving)
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        for seed in range(3):
            await s.check(seed=seed)
        assert len(calls) == 1


async def test_a_worker_that_lets_us_send_no_more_is_given_up() -> None:
    def stopping(frame: CallFrame, stream: Stream) -> None:
        stop_sending(stream)
        overloaded(frame, stream)

    async with swarm(DispatchOptions(near_s=10.0)) as s:
        await s.add_scripted({0: range(16)}, stopping)
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        async with asyncio.timeout(20):
            while len(s.client.workers()) == 3:  # a CALL that meets the stopped stream ends it, and goes elsewhere
                await s.check()


async def test_a_stuck_worker_is_left_alone_before_its_allowance_is_used_up() -> None:
    calls: list[int] = []
    options = DispatchOptions(near_s=10.0, late_floor_s=0.2, late_ceiling_s=0.2, faults_allowed=1000)
    async with swarm(options) as s:

        def alive_but_stuck(frame: CallFrame, stream: Stream) -> None:
            calls.append(frame.id)
            asyncio.get_running_loop().call_later(0.3, stream.write_nowait, HOLDINGS)

        await s.add_scripted({0: range(16)}, alive_but_stuck)
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        for seed in range(LIMITS.max_calls // 2):
            await s.check(seed=seed)
            await eventually(lambda: not s.client.workers()[0].suspect or len(calls) == LIMITS.max_calls // 2)
        await s.check(seed=9)
        assert len(calls) == LIMITS.max_calls // 2
        assert s.client.workers()[0].suspect


async def test_a_worker_that_missed_a_deadline_is_asked_last_until_it_says_something() -> None:
    calls: list[int] = []
    streams: list[Stream] = []

    def silent(frame: CallFrame, stream: Stream) -> None:
        calls.append(frame.id)
        streams.append(stream)

    options = DispatchOptions(near_s=10.0, late_floor_s=0.1, late_ceiling_s=0.1, faults_allowed=1000)
    async with swarm(options) as s:
        await s.add_scripted({0: range(16)}, silent)
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        for seed in range(5):
            await s.check(seed=seed)
        assert len(calls) == 1  # it may be dead: one stall is enough
        assert s.client.workers()[0].suspect
        streams[0].write_nowait(HOLDINGS)
        await eventually(lambda: not s.client.workers()[0].suspect)
        await s.check(seed=9)
        assert len(calls) == 2


async def test_a_worker_killed_in_mid_call_is_replaced_at_once() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        victim = await s.add(ALL, engine=gated)
        call = asyncio.create_task(s.check(n=3))
        await gated.wait_entered()
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        await victim.kill()
        await call
        gated.open()
        assert len(s.client.workers()) == 2


async def test_a_worker_killed_in_mid_call_without_replica_fails_the_call_by_name() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        victim = await s.add(ALL, engine=gated)
        call = asyncio.create_task(s.check())
        await gated.wait_entered()
        await victim.kill()
        with pytest.raises(CallFailed, match=r"layer 10: no answer for experts .* \(w0 \("):
            await call
        gated.open()


async def test_a_slow_worker_is_hedged_and_its_late_answer_does_not_matter() -> None:
    async with swarm(QUICK) as s:
        gated = GatedEngine(ALL)
        await s.add(ALL, engine=gated)
        call = asyncio.create_task(s.check())
        await gated.wait_entered()
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        await call
        gated.open()
        await s.check(seed=1)
        assert s.client.site_stats()[0].late >= 1


class Sleepy(NullEngine):
    """As a processor of a tenth of the speed."""

    def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
        time.sleep(0.05)
        return super().raw_rows(site, x, rows, experts)


@pytest.mark.parametrize("why", ["processor", "bandwidth", "distance"])
async def test_a_slow_worker_is_asked_only_for_what_nobody_else_holds(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.dispatch.worker.INLINE_S", 0.0)  # all share this loop: nobody may sleep on it
    link = {"bandwidth": "rate=1mbit", "distance": "rtt=100ms"}.get(why)
    config = TransportConfig(emulation=LinkEmulation.parse(link)) if link else None
    async with swarm(DispatchOptions(late_floor_s=2.0, check=NO_CHECKS)) as s:
        slow = await s.add(ALL, engine=Sleepy(SITES, ALL) if why == "processor" else None, config=config)
        x, _, weights = make_input(SITES[0], 8)
        for seed in range(12):  # until it is known
            await s.check(0, 8, seed)
        await s.add({0: range(8)})
        await s.add({0: range(8, 15)})
        assert slow.remote is not None
        before = s.client.workers()[0]
        for seed in range(20):
            ids = np.array([np.random.default_rng((seed, n)).permutation(15)[:4] for n in range(8)], np.int32)
            await s.call(0, x, ids, weights)
        assert s.client.site_stats()[0].late == 0
        assert s.client.workers()[0].calls == before.calls
        await s.call(0, x, np.array([[1, 2, 9, 15]] * 8, np.int32), weights)
        after = s.client.workers()[0]
        assert after.calls == before.calls + 1
        assert after.rows == before.rows + (32 if why == "distance" else 8)  # waited for anyway, or each row costs


async def test_a_leaving_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        leaving = await s.add(ALL, engine=gated)
        call = asyncio.create_task(s.check())
        await gated.wait_entered()
        await s.add(ALL)
        closing = asyncio.create_task(leaving.real.close())
        await eventually(lambda: s.client.workers()[0].leaving)
        await s.check(seed=1)
        gated.open()
        await call
        await closing
        assert s.client.workers()[0].calls == 1
        assert s.client.site_stats()[0].failed_calls == 0


async def test_cancel_all_releases_every_waiting_thread_at_once() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated)
        tasks = [asyncio.create_task(s.check(seed=seed)) for seed in range(4)]
        await gated.wait_entered()
        await eventually(lambda: member.real.stats().in_flight == 4)
        s.client.cancel_all(Cancelled("the user pressed stop"))
        for task in tasks:
            with pytest.raises(Cancelled, match="the user pressed stop"):
                await task
        await eventually(lambda: member.real.stats().refused.get("cancelled", 0) == 2)  # those not with the engine
        gated.open()
        await eventually(lambda: member.real.stats().in_flight == 0)
        await s.check(seed=9)
        assert member.real.stats().refused["cancelled"] == 4


# No deadline comes near: whatever happens to these calls, somebody said so.
UNHURRIED = DispatchOptions(
    mode="partial",
    late_floor_s=60.0,
    late_unknown_s=60.0,
    late_ceiling_s=60.0,
    call=CallPolicy(give_up_s=60.0, queue_s=60.0),
    check=NO_CHECKS,
)


@pytest.mark.parametrize("n", [1, 300], ids=["decode", "pieces"])
async def test_a_call_that_its_caller_gives_up_is_withdrawn_at_once(n: int) -> None:
    async with swarm(UNHURRIED) as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated, limits=PIECES)
        calls = [s.client.submit(0, *make_input(SITES[0], n, seed)) for seed in range(3)]
        await gated.wait_entered()
        await eventually(lambda: member.real.stats().in_flight >= (3 if n == 1 else 2))
        for pending in calls:
            await asyncio.to_thread(pending.fail, Cancelled("not wanted any more"))
        await eventually(lambda: not s.client.busy and s.client.workers()[0].in_flight <= 2)  # those with the engine
        sent = s.client.site_stats()[0].requests
        gated.open()
        await eventually(lambda: member.real.stats().in_flight == 0 and s.client.workers()[0].in_flight == 0)
        stats, [view] = s.client.site_stats()[0], s.client.workers()
        assert (stats.requests, stats.late, view.failures, view.suspect) == (sent, 0, 0, False)


async def test_a_call_that_is_given_up_before_it_began_never_begins() -> None:
    async with swarm(UNHURRIED) as s:
        await s.add(ALL)
        pending = s.client.submit(0, *make_input(SITES[0], 1))
        pending.fail(Cancelled("at once"))
        with pytest.raises(Cancelled, match="at once"):
            pending.result()
        await s.call(0, *make_input(SITES[0], 1))
        assert s.client.site_stats()[0].requests == 1


async def test_a_hook_that_is_cancelled_withdraws_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids, weights = make_input(SITES[0], 300)
    nodes = [ctypes.create_string_buffer(ctypes.sizeof(ggml.TensorStruct)) for _ in range(4)]
    routed = ctypes.addressof(nodes[1])
    monkeypatch.setattr(hook, "read_ids", lambda _: ids)
    monkeypatch.setattr(hook, "read_rows", lambda address: weights if address == routed else x)
    plan = GraphPlan(4, (SitePlan(SITES[0], 0, 2, 1, 3, 2, 3),), frozenset(), ("",) * 4)
    async with swarm(UNHURRIED) as s:
        gated = GatedEngine(ALL)
        member = await s.add(ALL, engine=gated, limits=PIECES)
        running = hook.EvalHook(plan, s.client)

        def evaluate() -> None:
            running.begin()
            for node in nodes:
                if running(ctypes.addressof(node), True, None):
                    running(ctypes.addressof(node), False, None)
            running.check()

        evaluating = asyncio.create_task(asyncio.to_thread(evaluate))
        await gated.wait_entered()
        await eventually(lambda: s.client.workers()[0].in_flight >= 2)
        sent = s.client.site_stats()[0].requests
        running.cancel(Cancelled("the user left"))
        with pytest.raises(Cancelled, match="the user left"):
            await evaluating
        await eventually(lambda: not s.client.busy and s.client.workers()[0].in_flight <= 2)
        gated.open()
        await eventually(lambda: member.real.stats().in_flight == 0)
        assert s.client.site_stats()[0].requests == sent


async def test_closing_releases_waiting_threads_and_refuses_new_calls() -> None:
    async with swarm() as s:
        gated = GatedEngine(ALL)
        await s.add(ALL, engine=gated)
        call = asyncio.create_task(s.check())
        await gated.wait_entered()
        await s.client.close()
        with pytest.raises(Cancelled):
            await call
        gated.open()
        with pytest.raises(DispatchError, match="this client is closed"):
            await s.check()


async def test_a_closed_client_closes_the_connection_it_is_given() -> None:
    async with swarm() as s:
        member = await s.add(ALL, attach=False, options=WorkerOptions(hello_timeout_s=100))  # not the worker's doing
        connection = await s.dial(member)
        await s.client.close()
        with pytest.raises(DispatchError, match="this client is closed"):
            await s.client.attach(connection)
        async with asyncio.timeout(20):
            await connection.wait_closed()


async def test_a_greeting_that_went_with_the_dial_is_answered_and_not_said_again() -> None:
    async with swarm() as s:
        member = await s.add(ALL, attach=False)
        address = member.endpoint.address
        connection, stream = await s.endpoint.dial_with(member.endpoint.peer_id, [address], first=s.client.greeting)
        assert stream is not None
        await s.client.attach(connection, stream)
        await s.check()
        assert member.real.stats().last_fault == ""


async def test_a_result_can_be_asked_for_twice_and_much_later() -> None:
    async with swarm() as s:
        await s.add(ALL)
        x, ids, weights = make_input(SITES[0], 2)
        pending = s.client.submit(0, x, ids, weights)
        await eventually(lambda: pending.done)
        first = pending.result()
        assert first.tobytes() == pending.result().tobytes()


async def test_calls_that_make_no_sense_are_refused_before_anything_is_sent() -> None:
    async with swarm() as s:
        await s.add(ALL)
        x, ids, weights = make_input(SITES[0], 1)
        for arguments in ((9, x, ids, weights), (0, x[:, :5], ids, weights), (0, x, ids + 16, weights)):
            with pytest.raises(SwarmnodeError):
                s.client.submit(*arguments)
        assert s.client.site_stats()[0].requests == 0


async def test_two_decode_threads_share_the_workers() -> None:
    async with swarm() as s:
        for holdings in cut_up(3):
            await s.add(holdings)
        await asyncio.gather(*(s.check(site, n, seed) for seed in range(6) for site in range(3) for n in (1, 4)))


async def test_figures_add_up() -> None:
    async with swarm() as s:
        for holdings in cut_up(3):
            await s.add(holdings)
        started = time.monotonic()
        for seed in range(10):
            await s.check(n=2, seed=seed)
        elapsed = time.monotonic() - started
        stats, views = s.client.site_stats()[0], s.client.workers()
        assert stats.calls == 10
        assert (stats.tokens, stats.pairs) == (20, 80)
        assert sum(view.rows for view in views) == 80
        assert sum(view.calls for view in views) == stats.requests
        assert 0 < stats.longest_busy_s <= stats.busy_s < elapsed
        assert stats.longest_busy_s < stats.round_trip_s < elapsed
        workers = [member.real.stats() for member in s.members]
        welcomes = sum(len(member.real.welcome()) for member in s.members)
        assert stats.bytes_back == sum(w.bytes_out for w in workers) - welcomes
        assert sum(w.pairs for w in workers) == 80
        for view in views:
            assert view.path == "loopback"
            assert view.p50_s is not None
            assert view.experts == sum(map(len, view.holdings.values())) > 0
