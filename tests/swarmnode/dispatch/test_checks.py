"""Answers that are computed once more: who cheats is found, named and done without; the rest lose nothing by it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from swarmnode.bench.synthetic import random_stacks, swiglu_site
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.compute.null_engine import NullEngine
from swarmnode.dispatch.codec import F32
from swarmnode.dispatch.frames import Answer, CallFrame
from swarmnode.dispatch.health import FASTER
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.request import I32
from swarmnode.dispatch.row_screen import RowScreen
from swarmnode.dispatch.spot_check import CheckPolicy
from swarmnode.errors import CallFailed
from swarmnode.model.last_matrix import LastMatrices
from tests.swarmnode.dispatch.samples import D_OUT, SITES, everything, full_engine, local_rows, make_input
from tests.swarmnode.dispatch.swarm import BrokenEngine, GatedEngine, Holdings, Swarm, eventually, swarm
from tests.swarmnode.dispatch.tampering import TamperingEngine
from transport.stream import Stream

ALL = everything()
EVERY_ROW = CheckPolicy(share=1.0, alone_share=1.0, new_share=1.0, budget=1.0)


def options(check: CheckPolicy = EVERY_ROW, **more: Any) -> DispatchOptions:
    return DispatchOptions(near_s=10.0, check=check, **more)  # however busy this machine is


class Quarantine:
    """What the owner of the client hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def __call__(self, peer: str, why: str) -> None:
        self.heard.append((peer, why))


def tampering(holdings: Holdings, *, one_in: float = 1.0, noise: float = 0.3) -> TamperingEngine:
    return TamperingEngine(NullEngine(SITES, holdings), one_in=one_in, noise=noise)


def holders(s: Swarm) -> dict[str, str]:
    return {view.name: view.quarantined for view in s.client.workers()}


def suspects(s: Swarm) -> list[str]:
    return [view.name for view in s.client.workers() if view.suspect]


@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("site", [0, 2])
async def test_a_cheat_is_convicted_by_this_nodes_own_engine_and_its_rows_are_replaced(mode: str, site: int) -> None:
    heard = Quarantine()
    async with swarm(options(mode=mode), full_engine(), on_quarantine=heard) as s:
        cheat = await s.add(ALL, engine=tampering(ALL))
        x, ids, weights = make_input(SITES[site], 3)
        rows = await s.call(site, x, ids, weights)
        assert np.allclose(rows, local_rows(SITES[site], x, ids, weights), rtol=1e-5, atol=1e-5)
        assert len(heard.heard) == 1
        peer, why = heard.heard[0]
        assert peer == str(cheat.endpoint.peer_id)
        assert f"layer {10 + site}: a row is wrong (cosine 0." in why
        assert "by this node's own computation" in why
        [view] = s.client.workers()
        assert view.quarantined == why
        assert view.suspect
        assert view.checked_rows > 0
        assert s.client.quarantined() == {peer: why}
        assert s.client.site_stats()[site].mismatches == 1
        await s.call(site, *make_input(SITES[site], 3, 1))
        assert cheat.real.stats().calls == 1  # never asked again


async def test_quarantine_outlives_the_connection() -> None:
    async with swarm(options(), full_engine()) as s:
        cheat = await s.add(ALL, engine=tampering(ALL))
        await s.check()
        assert cheat.remote is not None
        await s.client.detach(cheat.remote)
        await s.client.attach(await s.dial(cheat))
        for seed in range(3):
            await s.check(seed=seed)
        assert holders(s)["w0"]
        assert s.client.site_stats()[0].local_calls == 4


@pytest.mark.parametrize("mode", ["exact", "partial"])
async def test_a_cheat_that_disconnects_before_it_is_found_out_is_put_out_all_the_same(mode: str) -> None:
    heard = Quarantine()
    gated = GatedEngine(ALL)
    async with swarm(options(mode=mode), gated, on_quarantine=heard) as s:
        cheat = await s.add(ALL, engine=tampering(ALL))
        peer = str(cheat.endpoint.peer_id)
        x, ids, weights = make_input(SITES[0], 3)
        pending = s.client.submit(0, x, ids, weights)
        await gated.wait_entered()  # its check is under way
        await eventually(lambda: s.client.workers()[0].calls == 1)
        assert cheat.remote is not None
        await s.client.detach(cheat.remote)
        assert s.client.workers() == []
        gated.open()
        rows = await asyncio.to_thread(pending.result)
        assert np.allclose(rows, local_rows(SITES[0], x, ids, weights), rtol=1e-5, atol=1e-5)
        assert [who for who, _ in heard.heard] == [peer]
        await s.client.attach(await s.dial(cheat))
        await s.check(seed=1) if mode == "exact" else await s.call(0, *make_input(SITES[0], 1, 1))
        assert holders(s)["w0"]
        assert cheat.real.stats().calls == 1


async def test_who_reconnects_is_no_witness_for_itself() -> None:
    """Its second connection would agree with its first one, and the honest worker would stand alone."""
    gated = GatedEngine(ALL)
    async with swarm(options(late_floor_s=20.0, late_unknown_s=20.0, late_ceiling_s=20.0)) as s:
        cheat = await s.add(ALL, engine=tampering(ALL))
        await s.add(ALL, engine=gated)
        pending = s.client.submit(0, *make_input(SITES[0], 1))
        await gated.wait_entered()
        await eventually(lambda: s.client.workers()[0].calls == 1)
        assert cheat.remote is not None
        await s.client.detach(cheat.remote)
        await s.client.attach(await s.dial(cheat))
        gated.open()
        await asyncio.to_thread(pending.result)
        assert cheat.real.stats().calls == 1
        assert suspects(s) == []


async def test_two_who_collude_put_no_honest_worker_out() -> None:
    class Same(NullEngine):
        """Wrong, and the same for both."""

        def raw_rows(self, site: int, x: F32, rows: I32, experts: I32) -> F32:
            return super().raw_rows(site, x, rows, experts)[:, ::-1].copy()

    heard = Quarantine()
    async with swarm(options(), on_quarantine=heard, random=random.Random(4).random) as s:
        await s.add(ALL)
        await s.add(ALL, engine=Same(SITES, ALL))
        await s.add(ALL, engine=Same(SITES, ALL))
        for seed in range(12):
            await s.call(0, *make_input(SITES[0], 2, seed))
        assert heard.heard == []
        assert s.client.quarantined() == {}
        assert suspects(s) == ["w0"]  # asked last, not out
        for member in s.members[1:]:
            await member.kill()
        await eventually(lambda: len(s.client.workers()) == 1)
        await s.check(seed=20)


@pytest.mark.parametrize("cheats", [0, 1, 2])
async def test_without_an_engine_here_the_one_who_stands_alone_is_suspected(cheats: int) -> None:
    heard = Quarantine()
    async with swarm(options(), on_quarantine=heard, random=random.Random(cheats).random) as s:
        for number in range(3):
            await s.add(ALL, engine=tampering(ALL) if number == cheats else None)
        for seed in range(12):
            await s.check(n=2, seed=seed)
        assert suspects(s) == [f"w{cheats}"]
        assert s.client.quarantined() == {}
        assert heard.heard == []
        calls = s.client.workers()[cheats].calls
        for seed in range(12, 16):
            await s.check(n=2, seed=seed)
        assert s.client.workers()[cheats].calls == calls


async def test_two_who_disagree_are_both_trusted_but_a_cheat_at_odds_with_two_is_not() -> None:
    async with swarm(options()) as s:
        await s.add({0: range(8)}, engine=tampering({0: range(8)}))
        await s.add({0: range(8)})
        x, _, weights = make_input(SITES[0], 1)
        for seed in range(4):
            ids = np.random.default_rng(seed).permutation(8)[None, :4].astype(np.int32)
            await s.call(0, x, ids, weights)
        assert suspects(s) == []
    async with swarm(options()) as s:
        await s.add({0: range(16)}, engine=tampering({0: range(16)}))
        await s.add({0: range(8)})
        await s.add({0: range(8, 16)})
        for seed in range(8):
            await s.call(0, *make_input(SITES[0], 1, seed))
        assert suspects(s) == ["w0"]


@pytest.mark.parametrize("mode", ["exact", "partial"])
@pytest.mark.parametrize("wire", ["f32", "f16"])
async def test_honest_workers_are_checked_and_never_accused(mode: str, wire: str) -> None:
    for local in (full_engine(), None):
        async with swarm(options(mode=mode, wire_out=wire, wire_back=wire), local) as s:
            await s.add(ALL)
            await s.add(ALL)
            for site in SITES:
                for seed in range(15):
                    await s.call(site.index, *make_input(site, 1 + seed % 4, seed))
            assert set(holders(s).values()) == {""}
            stats = s.client.site_stats().values()
            assert sum(one.checked_rows for one in stats) == sum(one.pairs for one in stats) > 100
            assert sum(one.mismatches for one in stats) == 0


MIXED = {1: ("fp8", "fp8")}  # the other sites have F16


async def test_one_site_in_a_coarse_type_loosens_the_checks_of_no_other() -> None:
    """A row with 9 % of noise is within what FP8 may do to it, and outside what F16 may."""
    opts = options(wire_out="f16", wire_back="f16", site_wires=MIXED)
    for seed in range(5):
        async with swarm(opts, full_engine(), seed=seed) as s:
            await s.add(ALL, engine=TamperingEngine(NullEngine(SITES, ALL), one_in=1.0, noise=0.09, seed=seed))
            await s.call(0, *make_input(SITES[0], 4, seed))
            assert "cosine 0.99" in holders(s)["w0"]


async def test_workers_agree_or_not_by_the_types_of_the_site_too() -> None:
    opts = options(wire_out="f16", wire_back="f16", site_wires=MIXED)
    async with swarm(opts, random=random.Random(1).random) as s:
        for number in range(3):
            noisy = TamperingEngine(NullEngine(SITES, ALL), one_in=1.0, noise=0.09, seed=7)
            await s.add(ALL, engine=noisy if number == 1 else None)
        for seed in range(12):
            await s.call(0, *make_input(SITES[0], 2, seed))
        assert suspects(s) == ["w1"]


@pytest.mark.parametrize("local", [True, False])
async def test_honest_workers_are_not_accused_where_types_are_mixed(local: bool) -> None:
    opts = options(wire_out="f16", wire_back="f16", site_wires=MIXED | {2: ("int8", "f16")})
    async with swarm(opts, full_engine() if local else None) as s:
        await s.add(ALL)
        await s.add(ALL)
        for site in SITES:
            for seed in range(15):
                await s.call(site.index, *make_input(site, 1 + seed % 4, seed))
        assert set(holders(s).values()) == {""}
        assert suspects(s) == []
        assert all(stats.mismatches == 0 for stats in s.client.site_stats().values())


async def test_checks_by_chance_stay_within_their_share_and_cost_no_round_trip_more() -> None:
    async with swarm(options(CheckPolicy()), full_engine()) as s:
        await s.add(ALL)
        for seed in range(60):
            await s.check(0, 8, seed)
        stats = s.client.site_stats()[0]
        assert 0 < stats.checked_rows <= 0.02 * stats.pairs
        assert stats.requests == 60


async def test_an_answer_whose_check_never_comes_counts_unchecked() -> None:
    async with swarm(options(late_floor_s=0.05, late_unknown_s=0.05, late_ceiling_s=0.05)) as s:
        await s.add(ALL)
        gated = GatedEngine(ALL)
        await s.add(ALL, engine=gated)
        for seed in range(3):
            await s.check(seed=seed)
        gated.open()


async def test_a_check_that_cannot_be_computed_is_dropped() -> None:
    async with swarm(options(), BrokenEngine(SITES, ALL)) as s:
        await s.add(ALL)
        for seed in range(3):
            await s.check(seed=seed)
        assert holders(s) == {"w0": ""}
    async with swarm(options()) as s:
        await s.add(ALL)
        await s.add(ALL, engine=BrokenEngine(SITES, ALL))
        for seed in range(3):
            await s.check(seed=seed)
        assert set(holders(s).values()) == {""}


async def test_a_checker_that_vanishes_holds_nothing_up() -> None:
    async with swarm(options()) as s:
        await s.add(ALL)
        gated = GatedEngine(ALL)
        checker = await s.add(ALL, engine=gated)
        pending = s.client.submit(0, *make_input(SITES[0], 1))
        await gated.wait_entered()
        await checker.kill()
        await eventually(lambda: pending.done)
        gated.open()


async def test_the_only_holder_that_cheats_fails_the_call_by_name() -> None:
    async with swarm(options(), NullEngine(SITES, {0: range(8)})) as s:
        await s.add({0: range(16)}, engine=tampering({0: range(16)}))
        x, _, weights = make_input(SITES[0], 1)
        ids = np.array([[1, 2, 8, 9]], np.int32)  # nobody else has the last two
        with pytest.raises(CallFailed, match=r"layer 10: no answer for experts .* \(w0 .*a row is wrong"):
            await s.call(0, x, ids, weights)


@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_answers_that_are_none_end_the_trust_after_three(value: float) -> None:
    calls: list[int] = []

    def not_a_number(frame: CallFrame, stream: Stream) -> None:
        calls.append(frame.id)
        rows = np.full((frame.n_pairs, D_OUT), value, np.float32)
        stream.write_nowait(Answer(frame.id, 0, frame.n_pairs, 0, 0, rows.tobytes()).encode())

    heard = Quarantine()
    async with swarm(options(CheckPolicy(), faults_allowed=100), full_engine(), on_quarantine=heard) as s:
        await s.add_scripted({0: range(16)}, not_a_number)
        for seed in range(6):
            await s.check(seed=seed)
        assert len(calls) == 3
        assert [why for _, why in heard.heard] == ["answered NaN or infinity, 3 times"]


async def test_a_callback_that_fails_changes_nothing() -> None:
    def broken(peer: str, why: str) -> None:
        raise RuntimeError("the owner's own bug")

    async with swarm(options(), full_engine(), on_quarantine=broken) as s:
        await s.add(ALL, engine=tampering(ALL))
        await s.check()
        assert s.client.quarantined()


# ggml's own kernels, the screen, and the policy as it comes.

KINDS = (TYPE_BY_NAME["Q4_K"].id, TYPE_BY_NAME["Q4_K"].id, TYPE_BY_NAME["Q6_K"].id)
SITE, SHAPES = swiglu_site(256, 256, 16, 4, types=KINDS)


def ggml_engine(experts: range) -> ExpertEngine:
    return ExpertEngine(ExpertBank((SITE,), {0: random_stacks(SHAPES, experts)}))


def screen() -> RowScreen:
    stacks = random_stacks(SHAPES, range(16))
    made = RowScreen(LastMatrices({0: SITE}, lambda site, experts: stacks))
    for expert in range(16):
        made.prepare(0, expert)
    return made


async def test_one_row_in_fifty_is_caught_within_two_hundred_tokens_of_a_small_model() -> None:
    """Four layers of top-4, as 800 calls of one: a quarter of the experts lies with one who cheats."""
    local = ggml_engine(range(16))
    opts = options(CheckPolicy(), wire_out="f16", wire_back="f16")
    async with swarm(opts, local, sites=(SITE,), screen=screen(), random=random.Random(1).random) as s:
        cheat = TamperingEngine(ggml_engine(range(4)), one_in=50, noise=0.3, seed=2)
        await s.add({}, engine=cheat)
        await s.add({}, engine=ggml_engine(range(4, 16)))
        source = np.random.default_rng(0)
        calls = 0
        while not s.client.quarantined() and calls < 800:
            ids = source.permutation(16)[None, :4].astype(np.int32)
            x = source.standard_normal((1, 256)).astype(np.float32)
            await s.call(0, x, ids, np.full((1, 4), 0.25, np.float32))
            calls += 1
        stats = s.client.site_stats()[0]
        assert calls < 800
        assert stats.checked_rows <= 0.02 * stats.pairs
        assert [name for name, why in holders(s).items() if why] == ["w0"]
    local.close()


class Noting:
    """A screen to which all rows are alike, but for chance; notes the sites it was asked about."""

    def __init__(self) -> None:
        self.sites: set[int] = set()
        self._random = np.random.default_rng(0)

    def score(self, site: int, experts: I32, rows: F32) -> F32:
        self.sites.add(site)
        return self._random.random(len(rows)).astype(np.float32)


@pytest.mark.parametrize("wire", ["int8", "fp8"])
async def test_rows_whose_noise_is_the_wires_are_not_screened(wire: str) -> None:
    screen = Noting()
    opts = options(CheckPolicy(share=0.0, new_share=0.0), wire_out="f16", wire_back="f16", site_wires={1: (wire, wire)})
    async with swarm(opts, full_engine(), screen=screen) as s:
        await s.add(ALL)
        for site in (0, 1):
            for seed in range(40):
                await s.call(site, *make_input(SITES[site], 8, seed))
        stats = s.client.site_stats()
        assert screen.sites == {0}
        assert stats[0].checked_rows > 0
        assert stats[1].checked_rows == 0


# What this node keeps for itself.


async def test_a_site_whose_experts_are_all_kept_costs_no_round_trip() -> None:
    async with swarm(options(CheckPolicy()), full_engine()) as s:
        await s.add(ALL)
        s.client.keep_local({site.index: 0xFFFF for site in SITES})
        for site in SITES:
            for n in (1, 5):
                await s.check(site.index, n)
            stats = s.client.site_stats()[site.index]
            assert (stats.calls, stats.local_calls, stats.requests) == (0, 2, 0)
            assert stats.local_pairs == stats.pairs == 6 * site.n_used
            assert stats.tokens == 6
        s.client.keep_local({})
        await s.check()
        assert s.client.site_stats()[0].requests == 1


async def test_kept_experts_are_computed_here_and_the_others_asked_for() -> None:
    async with swarm(options(CheckPolicy(share=0, new_share=0)), full_engine()) as s:
        await s.add(ALL)
        s.client.keep_local({0: 0x00FF, 7: 3})
        for seed in range(6):
            await s.check(0, 4, seed)
        stats = s.client.site_stats()[0]
        assert 0 < stats.local_pairs < stats.pairs
        chosen = np.concatenate([make_input(SITES[0], 4, seed)[1].reshape(-1) for seed in range(6)])
        assert stats.local_pairs == int((chosen < 8).sum())


async def test_what_is_kept_but_not_held_is_asked_for() -> None:
    async with swarm(options(), NullEngine(SITES, {0: range(4)})) as s:
        await s.add(ALL)
        s.client.keep_local({site.index: 0xFFFF for site in SITES})
        for site in SITES:
            await s.check(site.index, 3)


async def test_kept_experts_whose_engine_fails_are_asked_for() -> None:
    async with swarm(options(), BrokenEngine(SITES, ALL)) as s:
        await s.add(ALL)
        s.client.keep_local({0: 0xFFFF})
        for seed in range(3):
            await s.check(seed=seed)
        assert s.client.site_stats()[0].requests == 3


async def test_kept_calls_can_be_cancelled_and_end_with_the_client() -> None:
    gated = GatedEngine(ALL)
    async with swarm(options(), gated) as s:
        s.client.keep_local({0: 0xFFFF})
        pending = s.client.submit(0, *make_input(SITES[0], 1))
        await gated.wait_entered()
        s.client.cancel_all(RuntimeError("stop"))
        with pytest.raises(RuntimeError, match="stop"):
            pending.result()
        gated.open()
        await s.check()


def counted(into: list[tuple[int, tuple[int, ...]]]) -> Callable[[int, Any], None]:
    return lambda site, ids: into.append((site, ids.shape))


async def test_routing_is_reported_once_per_call() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    async with swarm(options(), full_engine(), on_routing=counted(seen)) as s:
        await s.check(0, 3)
        s.client.keep_local({0: 0xFFFF})
        await s.check(0, 2)
        await s.check(2, 1)
        s.client.submit(0, *make_input(SITES[0], 0)).result()
    assert seen == [(0, (3, 4)), (0, (2, 4)), (2, (1, 2))]


async def test_a_failing_statistic_is_not_worth_a_generation() -> None:
    def broken(site: int, ids: Any) -> None:
        raise RuntimeError("no statistics today")

    async with swarm(options(), full_engine(), on_routing=broken) as s:
        await s.check()
        await s.check()


async def test_a_slow_worker_that_nobody_asks_is_asked_a_copy_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.dispatch.prober.PROBE_EVERY_S", 0.0)
    async with swarm(
        DispatchOptions(near_s=0.5, probe_s=0.05, check=CheckPolicy(share=0, alone_share=0, new_share=0))
    ) as s:
        await s.add(ALL)
        slow = await s.add(ALL)
        assert slow.remote is not None
        for _ in range(20):
            slow.remote.latency.add(4, 3.0)  # as it was until now
        assert s.client.workers()[1].p50_s == 3.0
        for seed in range(400):
            await s.check(seed=seed)
            if not slow.remote.latency.latency_class:
                break
        assert slow.remote.latency.latency_class == 0  # it has become fast, and that was seen
        assert s.client.workers()[1].calls >= FASTER
        assert s.client.site_stats()[0].requests == s.client.site_stats()[0].calls


async def test_no_answer_waits_for_a_slower_checker_whose_word_counts_all_the_same() -> None:
    gated = GatedEngine(ALL)
    async with swarm(DispatchOptions(near_s=0.5, check=EVERY_ROW, late_floor_s=5.0, late_unknown_s=5.0)) as s:
        await s.add(ALL, engine=tampering(ALL))
        honest = [await s.add(ALL, engine=engine) for engine in (gated, None)]
        for member in honest:
            assert member.remote is not None
            for _ in range(20):
                member.remote.latency.add(4, 60.0)  # as slow as can be
        await s.call(0, *make_input(SITES[0], 1))  # it does not wait, so it has the cheat's rows
        assert suspects(s) == []
        gated.open()
        await eventually(lambda: suspects(s) == ["w0"])
