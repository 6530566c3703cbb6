"""ggml's own kernels behind the wire: the rows of several workers have the bits of one engine with all experts.

Prompts are the hard case: ggml picks its kernel by how many rows an expert gets in one batch, so neither the
split over workers nor the cut to their limits may move an expert across that threshold.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from swarmnode.bench.synthetic import random_stacks, swiglu_site
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.dispatch.admission import AdmissionLimits
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.request import combine, make_request
from tests.swarmnode.dispatch.swarm import swarm

KINDS = (TYPE_BY_NAME["Q4_K"].id, TYPE_BY_NAME["Q4_K"].id, TYPE_BY_NAME["Q6_K"].id)
SITE, SHAPES = swiglu_site(256, 256, 16, 4, types=KINDS)


def engine_of(experts: range) -> ExpertEngine:
    return ExpertEngine(ExpertBank((SITE,), {0: random_stacks(SHAPES, experts)}))


@pytest.fixture(scope="module")
def whole() -> Iterator[ExpertEngine]:
    engine = engine_of(range(16))
    yield engine
    engine.close()


@pytest.mark.parametrize("n", [1, 3, 100])
async def test_exact_mode_is_bit_equal(whole: ExpertEngine, n: int) -> None:
    random = np.random.default_rng(n)
    x = random.standard_normal((n, 256)).astype(np.float32)
    ids = np.array([random.permutation(16)[:4] for _ in range(n)], np.int32)
    weights = random.random((n, 4)).astype(np.float32)
    request = make_request(SITE, x, ids, weights, partial=False)
    share = request.share(range(4 * n))
    expected = combine(request, [(share, share.compute(whole))])
    parts = [engine_of(part) for part in (range(3), range(3, 9), range(9, 16))]
    try:
        async with swarm(sites=(SITE,)) as s:
            for engine in parts:
                await s.add({}, engine=engine, limits=AdmissionLimits(max_pairs=50))
            assert (await s.call(0, x, ids, weights)).tobytes() == expected.tobytes()
            if n == 100:
                assert s.client.site_stats()[0].requests >= 400 / 50
        async with swarm(DispatchOptions(mode="partial"), sites=(SITE,)) as s:
            for engine in parts:
                await s.add({}, engine=engine)
            assert np.allclose(await s.call(0, x, ids, weights), expected, rtol=1e-4, atol=1e-5)
    finally:
        for engine in parts:
            engine.close()
