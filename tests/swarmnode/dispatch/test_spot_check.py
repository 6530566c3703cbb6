"""What is checked, how much of it, and that nobody honest is ever accused."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.backbone.hook import EvalHook
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import GenerateRequest, Session
from swarmnode.backbone.trace import trace_model
from swarmnode.compute.engine import ExpertEngine
from swarmnode.demo import PROMPT
from swarmnode.dispatch.codec import F32, WireType, decode_rows, encode_rows
from swarmnode.dispatch.request import I32, Request, make_request
from swarmnode.dispatch.spot_check import MAX_CHECKED, CheckPolicy, SpotChecks, agrees
from swarmnode.errors import UsageError
from swarmnode.onboard import ModelPack


def rows_of(n: int, d: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def with_cosine(rows: F32, cosine: float, seed: int = 1) -> F32:
    """Rows that have just this cosine with the given ones, by noise across them."""
    noise = np.random.default_rng(seed).standard_normal(rows.shape)
    exact = rows.astype(np.float64)
    unit = exact / np.linalg.norm(exact, axis=1, keepdims=True)
    noise -= (noise * unit).sum(axis=1, keepdims=True) * unit
    noise *= np.linalg.norm(exact, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    return np.asarray(exact + noise * np.sqrt(1 / cosine**2 - 1), np.float32)


@pytest.mark.parametrize("wire", list(WireType))
def test_an_honest_worker_is_not_accused_in_a_hundred_thousand_rows(wire: WireType) -> None:
    for seed in range(10):
        exact = rows_of(10_000, 64, seed)
        rows = with_cosine(exact, [0.9985, 0.9995, 0.99994][seed % 3], seed + 100)
        used, data = encode_rows(rows, wire)
        assert agrees(decode_rows(data, used, len(rows), 64), exact, wire).all()


@pytest.fixture(scope="module")
def demo_calls(demo_pack: ModelPack) -> list[Request]:
    """What the shipped model asks of its experts while it reads its own demo prompt."""
    calls: list[Request] = []
    model = LlamaModel(demo_pack.backbone, remote_experts=True)
    try:
        hook = EvalHook(
            trace_model(model, {t.name: t.ne for t in demo_pack.manifest.tensors}), _Noting(demo_pack, calls)
        )
        context = LlamaContext(model, n_context=512, n_batch=512, threads=1, callback=hook)
        try:
            Session(model, context, hook).generate(GenerateRequest(prompt=PROMPT * 3, max_tokens=1), lambda _: None)
        finally:
            context.close()
    finally:
        model.close()
    return calls


class _Noting:
    """Experts that answer nothing and keep the question."""

    def __init__(self, pack: ModelPack, calls: list[Request]) -> None:
        self._sites, self._calls = {site.index: site for site in pack.manifest.sites}, calls

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> _Nothing:
        request = make_request(self._sites[site], x.copy(), ids.copy(), weights.copy(), partial=False)
        self._calls += [request] if request.n_tokens else []
        return _Nothing(np.zeros((request.n_tokens, request.site.d_out), np.float32))


@dataclass
class _Nothing:
    rows: F32

    def result(self) -> F32:
        return self.rows


def through(rows: F32, wire: WireType) -> F32:
    used, data = encode_rows(rows, wire)
    assert used is wire
    return decode_rows(data, wire, *rows.shape)


@pytest.mark.parametrize("wire", list(WireType))
def test_real_rows_are_honest_and_their_perturbation_is_seen(
    demo_calls: list[Request], demo_engine: ExpertEngine, wire: WireType
) -> None:
    looked_at = 0
    for request in demo_calls:
        pairs = range(len(request.experts))
        exact = request.share(pairs).compute(demo_engine)
        sent = dataclasses.replace(request, x=through(request.x, wire), encoded={})
        rows = sent.share(pairs).compute(demo_engine)
        assert agrees(through(rows, wire), exact, wire).all()
        noise = rows_of(len(rows), request.site.d_out, looked_at)
        noise *= 0.1 * np.linalg.norm(rows, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
        assert not agrees(through(rows + noise, wire), exact, wire).any()
        assert agrees(through(rows * np.float32(1.1), wire), exact, wire).mean() < 0.1
        looked_at += len(rows)
    assert looked_at > 4000


@pytest.mark.parametrize("wire", [WireType.F32, WireType.INT8])
@pytest.mark.parametrize("relative", [0.1, 0.3, 1.0])
def test_a_perturbed_row_is_seen(relative: float, wire: WireType) -> None:
    exact = rows_of(5000, 64)
    noise = rows_of(5000, 64, 9)
    noise *= relative * np.linalg.norm(exact, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    assert agrees(exact + noise, exact, wire).mean() < 0.02
    assert not agrees(exact * np.float32(1 + relative), exact, wire).any()
    assert not agrees(-exact, exact, wire).any()


def test_rows_of_nothing() -> None:
    zero, tiny = np.zeros((1, 8), np.float32), np.full((1, 8), 2.0**-25, np.float32)
    assert agrees(zero, zero, WireType.F32).all()
    assert agrees(zero, tiny, WireType.F16).all()  # F16 has nothing between
    assert not agrees(zero, tiny, WireType.F32).any()
    assert not agrees(zero, rows_of(1, 8), WireType.F16).any()
    assert not agrees(np.full((1, 8), 3e38, np.float32), rows_of(1, 8), WireType.F32).any()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 600), st.integers(1, 8)), max_size=30),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 0.2),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_the_budget_holds_at_every_moment(
    asked: list[tuple[int, int, int]], share: float, new_share: float, budget: float, screened: bool, seed: int
) -> None:
    checks = SpotChecks(
        CheckPolicy(share=share, alone_share=share, new_share=new_share, budget=budget),
        random.Random(seed).random,
        screened=screened,
    )
    seen = spent = 0
    for worker, n_rows, per_row in asked:
        chosen = checks.choose(str(worker), n_rows * per_row, n_rows)
        assert chosen == sorted(set(chosen))
        assert all(0 <= row < n_rows for row in chosen)
        assert len(chosen) <= MAX_CHECKED
        seen += n_rows * per_row
        spent += len(chosen) * per_row + sum(checks.allowed_by_screen(1) for _ in range(5))
        assert spent <= budget * seen + 1e-6


def test_new_workers_are_checked_more_often() -> None:
    policy = CheckPolicy(alone_share=0.01, budget=1.0)
    new = old = 0
    for seed in range(40):
        checks = SpotChecks(policy, random.Random(seed).random)
        new += sum(len(checks.choose("w", 5, 5)) for _ in range(100))
        old += sum(len(checks.choose("w", 5, 5)) for _ in range(400))
    assert 0.04 < new / (40 * 500) < 0.06
    assert 0.008 < old / (40 * 2000) < 0.012


def test_every_row_has_the_same_chance_and_calls_do_not_matter() -> None:
    checks = SpotChecks(CheckPolicy(alone_share=0.1, new_share=0.1, budget=1.0), random.Random(3).random)
    counts = np.zeros(8)
    for _ in range(5000):
        counts[checks.choose("w", 8, 8)] += 1
    assert (np.abs(counts / 5000 - 0.1) < 0.02).all()


def test_off_means_off_and_all_means_all() -> None:
    none = SpotChecks(CheckPolicy(alone_share=0.0, new_share=0.0), random.random)
    assert all(none.choose("w", 100, 100) == [] for _ in range(100))
    full = SpotChecks(CheckPolicy(alone_share=1.0, new_share=1.0, budget=1.0), random.random)
    assert full.choose("w", 8, 4) == [0, 1, 2, 3]
    for bad in ({"share": 1.5}, {"budget": -0.1}, {"bad_answers_allowed": 0}):
        with pytest.raises(UsageError):
            CheckPolicy(**bad)


def chance_of_catching(
    sites: int, k: int, workers: int, *, tokens: int = 200, one_in: int = 50, runs: int = 60
) -> float:
    """By chance alone, in exact mode: one of `workers` equal workers perturbs a row in `one_in`."""
    caught = 0
    for seed in range(runs):
        source = random.Random(seed)
        checks = SpotChecks(CheckPolicy(), source.random)
        for _, _ in itertools.product(range(tokens), range(sites)):
            shares = [0] * workers
            for _ in range(k):
                shares[source.randrange(workers)] += 1
            hits = [checks.choose(str(w), n, n) for w, n in enumerate(shares) if n]
            if shares[0] and any(source.random() < 1 / one_in for _ in hits[0]):
                caught += 1
                break
    return caught / runs


def test_chance_alone_catches_one_row_in_fifty_in_a_large_model() -> None:
    assert chance_of_catching(48, 8, 4, runs=10) > 0.8
