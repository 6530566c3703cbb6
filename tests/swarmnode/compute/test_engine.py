"""ExpertEngine against the graph that llama.cpp itself would run, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from swarmnode.bench.local_graph import LocalGraph
from swarmnode.bench.synthetic import random_stacks, swiglu_site
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.engine_api import F32Array, I32Array
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.errors import BadCall, NobodyHolds

N_EXPERT, N_USED = 16, 4
TYPES = [
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q2_K",
    "Q3_K",
    "IQ4_XS",
    "IQ4_NL",
    "MXFP4",
]


def routed(n_tokens: int, seed: int = 0, n_expert: int = N_EXPERT, n_used: int = N_USED) -> npt.NDArray[np.int32]:
    """n_used different experts for every token: (n_tokens, n_used)."""
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(n_expert)[:n_used] for _ in range(n_tokens)]).astype(np.int32)


def rows_of(n_tokens: int, width: int, seed: int = 0) -> F32Array:
    return np.random.default_rng((seed, 9)).standard_normal((n_tokens, width), np.float32)


def pairs_of(ids: npt.NDArray[np.int32]) -> tuple[I32Array, I32Array]:
    """Every (token, expert) pair in token and rank order: rows, experts."""
    tokens = np.repeat(np.arange(len(ids), dtype=np.int32), ids.shape[1])
    return tokens, ids.reshape(-1)


def local_rows(bank: ExpertBank, x: F32Array, ids: npt.NDArray[np.int32], threads: int = 1) -> F32Array:
    graph = LocalGraph(bank.sites[0], len(ids), bank.device, threads=threads)
    graph.set_inputs(x, ids)
    graph.compute()
    out = graph.output()
    graph.close()
    return out


@pytest.fixture(scope="module")
def demo() -> Iterator[ExpertBank]:
    """The shape of the demo model: d 256, ff 256, Q4_K and Q6_K."""
    kinds = (TYPE_BY_NAME["Q4_K"].id, TYPE_BY_NAME["Q4_K"].id, TYPE_BY_NAME["Q6_K"].id)
    site, shapes = swiglu_site(256, 256, N_EXPERT, N_USED, types=kinds)
    bank = ExpertBank([site], {0: random_stacks(shapes, range(N_EXPERT))}, "cpu")
    yield bank
    bank.close()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("upload", [False, True])
def test_rows_equal_a_local_run_for_every_type(kind: str, upload: bool) -> None:
    number = TYPE_BY_NAME[kind].id
    site, shapes = swiglu_site(256, 512, N_EXPERT, N_USED, types=(number, number, number))
    stacks = random_stacks(shapes, range(N_EXPERT), distinct=3)  # some types are slow to quantise
    bank = ExpertBank([site], {0: stacks}, "cpu", upload=upload)
    engine = ExpertEngine(bank)
    for n_tokens in (1, 3, 40):  # at 40 tokens some experts get 8 rows and more, others fewer: two kernels
        ids, x = routed(n_tokens), rows_of(n_tokens, 256)
        expected = local_rows(bank, x, ids)
        rows, experts = pairs_of(ids)
        assert engine.raw_rows(0, x, rows, experts).tobytes() == expected.tobytes()
    engine.close()
    bank.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads_or_on_the_order_of_pairs(demo: ExpertBank, threads: int) -> None:
    ids, x = routed(30), rows_of(30, 256)
    expected = local_rows(demo, x, ids).reshape(-1, 256)
    rows, experts = pairs_of(ids)
    shuffled = np.random.default_rng(5).permutation(len(rows))
    engine = ExpertEngine(demo, threads=threads)
    answer = engine.raw_rows(0, x, rows[shuffled], experts[shuffled])
    engine.close()
    assert answer.tobytes() == expected[shuffled].tobytes()


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 1, 0], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 2, 2], [0, 0, 2, 2], [1], []])
def test_pairs_may_name_rows_in_any_way(demo: ExpertBank, rows: list[int]) -> None:
    x = rows_of(3, 256)
    experts = np.arange(len(rows), dtype=np.int32)
    engine = ExpertEngine(demo)
    answer = engine.raw_rows(0, x, np.array(rows, np.int32), experts)
    for i, row in enumerate(rows):
        alone = engine.raw_rows(0, x[row : row + 1], np.zeros(1, np.int32), experts[i : i + 1])
        assert answer[i].tobytes() == alone.tobytes()
    engine.close()


def test_two_workers_with_half_the_experts_each_give_the_rows_of_one_local_run() -> None:
    kind = TYPE_BY_NAME["Q4_K"].id
    site, shapes = swiglu_site(256, 256, N_EXPERT, N_USED, types=(kind, kind, kind))
    whole = ExpertBank([site], {0: random_stacks(shapes, range(N_EXPERT))}, "cpu")
    ids, x = routed(40), rows_of(40, 256)
    expected = local_rows(whole, x, ids).reshape(-1, 256)
    rows, experts = pairs_of(ids)
    answer = np.empty_like(expected)
    for held in ((9, 1, 3, 5, 7, 15, 11, 13), (0, 2, 4, 6, 8, 10, 12, 14)):  # slots in any order
        bank = ExpertBank([site], {0: random_stacks(shapes, held)}, "cpu")
        engine = ExpertEngine(bank)
        mine = np.isin(experts, held)
        answer[mine] = engine.raw_rows(0, x, rows[mine], experts[mine])
        assert engine.holdings == {0: held}
        engine.close()
        bank.close()
    whole.close()
    assert answer.tobytes() == expected.tobytes()


def test_a_call_too_large_for_one_graph_has_the_bits_of_one_batch(
    demo: ExpertBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, x = routed(120, n_expert=8), rows_of(120, 256)  # 480 pairs on 8 experts, about 60 each
    ids[:5] = [8, 9, 10, 11]  # and four experts below the tiled kernel's threshold
    expected = local_rows(demo, x, ids).reshape(-1, 256)
    rows, experts = pairs_of(ids)
    monkeypatch.setattr("swarmnode.compute.engine.chunk_rows", lambda row_bytes: 33)
    engine = ExpertEngine(demo)
    answer = engine.raw_rows(0, x, rows, experts)
    weights = np.random.default_rng(4).random(len(rows), np.float32)
    sums = engine.partial_sums(0, x, rows, experts, weights, rows, 120)
    again = engine.partial_sums(0, x, rows, experts, weights, rows, 120)
    engine.close()
    assert answer.tobytes() == expected.tobytes()
    exact = (expected.astype(np.float64) * weights[:, None]).reshape(120, N_USED, 256).sum(axis=1)
    np.testing.assert_allclose(sums, exact, rtol=1e-5, atol=1e-5)
    assert sums.tobytes() == again.tobytes()


def test_partial_sums_of_all_experts_have_the_bits_of_ggmls_combine(demo: ExpertBank) -> None:
    ids, x = routed(6), rows_of(6, 256)
    weights = np.random.default_rng(3).random((6, N_USED), np.float32)
    rows_out = local_rows(demo, x, ids) * weights[:, :, None]
    expected = rows_out[:, 0]
    for rank in range(1, N_USED):
        expected = expected + rows_out[:, rank]
    rows, experts = pairs_of(ids)
    engine = ExpertEngine(demo)
    sums = engine.partial_sums(0, x, rows, experts, weights.reshape(-1), rows, 6)
    again = engine.partial_sums(0, x, rows, experts, weights.reshape(-1), rows, 6)
    engine.close()
    assert sums.dtype == np.float32
    np.testing.assert_array_equal(sums, expected)
    assert sums.tobytes() == again.tobytes()


def test_tokens_without_a_pair_get_zero(demo: ExpertBank) -> None:
    engine = ExpertEngine(demo)
    x = rows_of(2, 256)
    one = np.array([1], np.int32)
    sums = engine.partial_sums(0, x, one, one, None, np.array([2], np.int32), 4)
    nothing = np.array([], np.int32)
    empty = engine.partial_sums(0, x, nothing, nothing, None, nothing, 3)
    assert engine.raw_rows(0, x, nothing, nothing).shape == (0, 256)
    engine.close()
    assert not sums[[0, 1, 3]].any()
    assert sums[2].any()
    assert empty.shape == (3, 256)
    assert not empty.any()


def test_an_expert_that_is_not_held_is_named_with_its_layer() -> None:
    kind = TYPE_BY_NAME["F32"].id
    site, shapes = swiglu_site(32, 32, N_EXPERT, N_USED, types=(kind, kind, kind), index=7)
    bank = ExpertBank([site], {7: random_stacks(shapes, (2, 3))}, "cpu")
    engine = ExpertEngine(bank)
    with pytest.raises(NobodyHolds) as raised:
        engine.raw_rows(7, rows_of(1, 32), np.zeros(3, np.int32), np.array([2, 9, 4], np.int32))
    engine.close()
    bank.close()
    assert (raised.value.layer, raised.value.experts) == (7, [4, 9])


@pytest.mark.parametrize("expert", [-1, N_EXPERT, 2**31 - 1, -(2**31)])
def test_ids_out_of_range_never_reach_ggml(demo: ExpertBank, expert: int) -> None:
    engine = ExpertEngine(demo)
    with pytest.raises(BadCall, match="outside 0"):
        engine.raw_rows(0, rows_of(1, 256), np.zeros(1, np.int32), np.array([expert], np.int32))
    engine.close()


def test_arguments_of_the_wrong_form_are_refused_by_name(demo: ExpertBank) -> None:
    engine = ExpertEngine(demo)
    x, one = rows_of(2, 256), np.zeros(1, np.int32)
    wrong: list[Any] = [x.astype(np.float64), x[:, :255], x[0], np.zeros((2, 257), np.float32)]
    for bad in wrong:
        with pytest.raises(BadCall, match="x must be float32"):
            engine.raw_rows(0, bad, one, one)
    for row in (2, -1):
        with pytest.raises(BadCall, match="does not have"):
            engine.raw_rows(0, x, np.array([row], np.int32), one)
    with pytest.raises(BadCall, match="experts must be contiguous int32"):
        engine.raw_rows(0, x, one, one.astype(np.int64))
    with pytest.raises(BadCall, match="experts must be contiguous int32"):
        engine.raw_rows(0, x, one, np.zeros(2, np.int32))
    with pytest.raises(BadCall, match="token outside"):
        engine.partial_sums(0, x, one, one, None, np.array([1], np.int32), 1)
    with pytest.raises(BadCall, match="weights must be contiguous float32"):
        engine.partial_sums(0, x, one, one, np.zeros(1), one, 1)  # type: ignore[arg-type]
    with pytest.raises(BadCall, match="no such site"):
        engine.raw_rows(3, x, one, one)
    engine.close()
    with pytest.raises(BadCall, match="closed"):
        engine.raw_rows(0, x, one, one)
    engine.close()


def test_nan_and_infinity_in_one_row_stay_in_that_row(demo: ExpertBank) -> None:
    engine = ExpertEngine(demo)
    clean = rows_of(20, 256)
    dirty = clean.copy()
    dirty[3, 5], dirty[4, 7], dirty[5] = np.nan, np.inf, -np.inf
    rows, experts = pairs_of(routed(20))
    expected, answer = engine.raw_rows(0, clean, rows, experts), engine.raw_rows(0, dirty, rows, experts)
    engine.close()
    untouched = ~np.isin(rows, (3, 4, 5))
    assert answer[untouched].tobytes() == expected[untouched].tobytes()
    # what becomes of them is ggml's affair (quantising a row may swallow a NaN), as in a local run
    assert answer.tobytes() == local_rows(demo, dirty, routed(20)).tobytes()


def test_calls_of_changing_size_and_site_do_not_disturb_each_other() -> None:
    kind = TYPE_BY_NAME["Q8_0"].id
    sites, stacked = [], {}
    for index, (d_model, n_ff) in enumerate(((64, 32), (256, 512), (96, 64))):
        site, shapes = swiglu_site(d_model, n_ff, 8, 2, types=(kind, kind, kind), index=index)
        sites.append(site)
        stacked[index] = random_stacks(shapes, range(8), seed=index)
    bank = ExpertBank(sites, stacked, "cpu")
    engine, fresh = ExpertEngine(bank), {}
    calls = [(i, n) for n in (1, 2, 30, 5, 200) for i in (0, 1, 2)]
    for site_index, n in calls:  # each in an engine of its own
        alone = ExpertEngine(bank)
        rows, experts = pairs_of(routed(n, seed=n, n_expert=8, n_used=2))
        fresh[site_index, n] = alone.raw_rows(site_index, rows_of(n, sites[site_index].d_in), rows, experts)
        alone.close()
    for site_index, n in [*calls, *reversed(calls), *calls]:
        rows, experts = pairs_of(routed(n, seed=n, n_expert=8, n_used=2))
        answer = engine.raw_rows(site_index, rows_of(n, sites[site_index].d_in), rows, experts)
        assert answer.tobytes() == fresh[site_index, n].tobytes()
    engine.close()
    bank.close()
