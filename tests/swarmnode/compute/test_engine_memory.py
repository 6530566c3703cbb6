"""Nothing is left behind: by thousands of calls of changing shape, nor by engines that come and go."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest

from swarmnode.bench.synthetic import random_stacks, swiglu_site
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank

N_EXPERT = 8
ALLOWED_GROWTH = 4 << 20  # a leaked graph is 10 KB and more: 2,000 of them are 20 MB


def resident() -> int:
    gc.collect()
    size: int = psutil.Process().memory_info().rss
    return size


def make_bank() -> ExpertBank:
    sites, stacked = [], {}
    for index in range(3):
        site, shapes = swiglu_site(64, 64 * (index + 1), N_EXPERT, 2, types=(8, 8, 8), index=index)
        sites.append(site)
        stacked[index] = random_stacks(shapes, range(N_EXPERT), distinct=1)
    return ExpertBank(sites, stacked, "cpu")


def call(engine: ExpertEngine, number: int, most: int = 60) -> None:
    n_pairs = 1 + number * 7 % most
    experts = (np.arange(n_pairs, dtype=np.int32) * 3) % N_EXPERT
    rows = np.zeros(n_pairs, np.int32)
    x = np.ones((1, 64), np.float32)
    if number % 2:
        engine.raw_rows(number % 3, x, rows, experts)
    else:
        engine.partial_sums(number % 3, x, rows, experts, None, rows, 1)


def test_two_thousand_calls_of_changing_shape() -> None:
    bank = make_bank()
    engine = ExpertEngine(bank)
    for number in range(400):
        call(engine, number)
    before = resident()
    for number in range(2000):
        call(engine, number)
    growth = resident() - before
    engine.close()
    bank.close()
    assert growth < ALLOWED_GROWTH


def test_the_graph_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.compute.engine.MAX_GRAPHS", 20)
    bank = make_bank()
    engine = ExpertEngine(bank)
    for number in range(300):
        call(engine, number, most=200)
    before = resident()
    for number in range(1000):
        call(engine, number, most=200)
        assert len(engine._graphs) <= 20
    growth = resident() - before
    engine.close()
    bank.close()
    assert growth < ALLOWED_GROWTH


def test_engines_and_banks_that_come_and_go() -> None:
    def once() -> None:
        bank = make_bank()
        engines = [ExpertEngine(bank, threads=threads) for threads in (1, 2)]
        for number, engine in enumerate(engines):
            call(engine, number)
            engine.close()
        bank.close()

    for _ in range(30):
        once()
    before = resident()
    for _ in range(200):
        once()
    assert resident() - before < ALLOWED_GROWTH
