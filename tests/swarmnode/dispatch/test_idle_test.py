"""A worker that nobody calls shows its speed all the same: seldom, shortly, with what it holds."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from swarmnode.compute.engine_api import F32Array, I32Array
from swarmnode.compute.null_engine import NullEngine
from swarmnode.dispatch import idle_test
from swarmnode.dispatch.engine_times import WINDOW, EngineTimes
from swarmnode.dispatch.hello import mask_of
from swarmnode.dispatch.idle_test import EVERY_S, FEW_CALLS, LIMIT_S, MAX_CALLS, IdleTest, seconds_per_row
from swarmnode.errors import ComputeError, NobodyHolds
from tests.swarmnode.dispatch.samples import N_USED, SITES, everything, full_engine
from tests.swarmnode.dispatch.swarm import eventually, swarm

ALL = everything()
BY_INDEX = {site.index: site for site in SITES}
ALIKE = [(0, 1), (2,)]


def test_only_who_is_not_called_is_tested_and_seldom() -> None:
    test = IdleTest()
    assert not test.due(100.0, 0)
    assert not test.due(100.0 + EVERY_S - 1, 0)
    assert test.due(100.0 + EVERY_S, 3)
    assert not test.due(101.0 + EVERY_S, 3)
    assert not test.due(100.0 + 2 * EVERY_S, 3 + FEW_CALLS)
    assert test.due(100.0 + 3 * EVERY_S, 3 + FEW_CALLS)


def test_one_site_of_each_shape_is_tested_with_what_is_held_and_others_every_time() -> None:
    test = IdleTest()
    held = {0: mask_of(range(16)), 1: mask_of((3, 5))}
    seen = [test.choose(ALIKE, BY_INDEX, lambda site: held.get(site, 0)) for _ in range(8)]
    assert {site for chosen in seen for site in chosen} == {0, 1}  # nothing of the other shape is held
    assert all(len(chosen) == 1 for chosen in seen)
    assert all(set(chosen[1]) == {3, 5} for chosen in seen if 1 in chosen)
    whole = [tuple(chosen[0]) for chosen in seen if 0 in chosen]
    assert all(len(set(experts)) == N_USED for experts in whole)
    assert len(set(whole)) > 1
    assert test.choose(ALIKE, BY_INDEX, lambda site: 0) == {}


class Clocked(NullEngine):
    """Each row takes so long by its own clock."""

    def __init__(self, row_s: float) -> None:
        super().__init__(SITES, ALL)
        self.row_s, self.now, self.sizes = row_s, 0.0, list[int]()

    def raw_rows(self, site: int, x: F32Array, rows: I32Array, experts: I32Array) -> F32Array:
        self.now += self.row_s * len(experts)
        self.sizes.append(len(experts))
        return super().raw_rows(site, x, rows, experts)


@pytest.mark.parametrize("experts", [(1, 2, 3, 4), (5,)])
@pytest.mark.parametrize("row_s", [1e-5, 1e-3, LIMIT_S / 3, 1.0])
def test_a_test_says_what_a_row_takes_and_takes_no_longer_than_it_may(row_s: float, experts: tuple[int, ...]) -> None:
    engine = Clocked(row_s)
    assert seconds_per_row(engine, BY_INDEX[0], experts, lambda: engine.now) == pytest.approx(row_s)
    assert engine.now <= max(LIMIT_S, 2 * row_s) + 1e-9
    assert len(engine.sizes) <= len(experts) + 2 + MAX_CALLS


class Cold(Clocked):
    """Whatever expert was not computed before is on a disk."""

    def __init__(self, row_s: float, touch_s: float) -> None:
        super().__init__(row_s)
        self.touch_s, self.touched = touch_s, set[int]()

    def raw_rows(self, site: int, x: F32Array, rows: I32Array, experts: I32Array) -> F32Array:
        cold = set(experts.tolist()) - self.touched
        self.now += self.touch_s * len(cold)
        self.touched |= cold
        return super().raw_rows(site, x, rows, experts)


@pytest.mark.parametrize("touch_s", [1e-3, LIMIT_S / 3, 0.9 * LIMIT_S, 0.5])
def test_a_first_touch_is_not_counted_and_no_more_are_made_than_there_is_time_for(touch_s: float) -> None:
    engine = Cold(1e-4, touch_s)
    assert seconds_per_row(engine, BY_INDEX[1], (7, 8, 9, 10), lambda: engine.now) == pytest.approx(1e-4)
    assert engine.now <= LIMIT_S + touch_s
    assert touch_s < LIMIT_S or engine.touched == {7}


def test_what_is_not_held_is_the_engines_to_say() -> None:
    with pytest.raises(NobodyHolds):
        seconds_per_row(NullEngine(SITES, {0: (1,)}), BY_INDEX[0], (2, 3), itertools.count().__next__)


def test_a_faster_test_is_newer_than_all_that_calls_have_shown() -> None:
    times = EngineTimes()
    for site in (0, 1, 2):
        times.add(site, 4, 4.0)
    times.add(0, 4096, 40.0)
    times.tested(ALIKE, {1: 0.001})
    assert times.row_s(ALIKE) == {0: 0.001, 1: 0.001, 2: 1.0}
    for _ in range(2):
        times.add(0, 4, 0.008)
    assert times.row_s(ALIKE) == {0: 0.002, 1: 0.001, 2: 1.0}


def test_a_slower_test_says_nothing_where_calls_have_and_something_where_not() -> None:
    """A processor that rests has a lower clock."""
    times = EngineTimes()
    times.add(0, 4, 0.004)
    times.tested(ALIKE, {0: 0.003, 2: 0.005})
    assert times.row_s(ALIKE) == {0: 0.001, 1: 0.001, 2: 0.005}
    times.tested(ALIKE, {1: 0.0009})  # no clear difference
    assert times.row_s(ALIKE) == {0: 0.001, 1: 0.001, 2: 0.005}


async def test_a_worker_that_was_slow_says_so_no_longer_when_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_test, "EVERY_S", 0.0)
    async with swarm(local=None) as s:
        member = await s.add(ALL)
        worker = member.real
        await s.check()
        for site in BY_INDEX:
            worker._times.changed(site)
            for _ in range(WINDOW):
                worker._times.add(site, 1, 1.0)
        assert max(worker.stats().row_s.values()) == 1.0
        worker.test_speed()
        await eventually(lambda: max(worker.stats().row_s.values()) < 0.5)
        calls = worker.stats().calls
        await s.check(seed=1)  # and serves on
        assert worker.stats().calls == calls + 1


async def test_a_call_that_comes_meanwhile_waits_for_one_shape_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_test, "EVERY_S", 0.0)
    asked, go_on, sites = threading.Event(), threading.Event(), list[int]()

    class Waits(NullEngine):
        def raw_rows(self, site: int, x: F32Array, rows: I32Array, experts: I32Array) -> F32Array:
            sites.append(site)
            asked.set()
            assert go_on.wait(30)
            return super().raw_rows(site, x, rows, experts)

    async with swarm(local=None) as s:
        worker = (await s.add(ALL, engine=Waits(SITES, ALL))).real
        worker.test_speed()
        await asyncio.to_thread(asked.wait, 30)
        call = asyncio.create_task(s.check(site=sites[0]))
        await eventually(lambda: worker.stats().in_flight > 0)
        go_on.set()
        await call
        await eventually(lambda: worker.stats().calls == 1)
    assert len(set(sites)) == 1


async def test_a_test_that_fails_or_comes_at_the_end_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_test, "EVERY_S", 0.0)

    class Fails(NullEngine):
        def raw_rows(self, site: int, x: F32Array, rows: I32Array, experts: I32Array) -> F32Array:
            if len(experts) == 1:
                raise ComputeError("not now")
            return super().raw_rows(site, x, rows, experts)

    async with swarm(local=full_engine()) as s:
        member = await s.add(ALL, engine=Fails(SITES, ALL))
        for seed in range(3):
            member.real.test_speed()
            await s.check(seed=seed)
        assert member.real.stats().calls == 3
        member.real.test_speed()
        await member.real.close()
        member.real.test_speed()
