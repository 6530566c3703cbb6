"""Taking tokens back where layers keep a running state, found out by trying."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from swarmnode.backbone.llama import Chunk, LlamaContext, LlamaModel
from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.errors import ComputeError
from swarmnode.model.source_bank import SourceBank
from swarmnode.onboard import ModelPack, onboard

from .drafters import OracleDrafter, RandomDrafter
from .helpers import InProcessExperts, assert_plain, hooked_session, local_session, run_rows, tokens_of
from .hybrid_model import CANNOT, TAKES_BACK, VOCAB, write_hybrid_model

Packs = Callable[[str], ModelPack]
TAKE_BACK = 6
SAMPLING = Sampling(temperature=0.5, seed=3)  # of random weights, greedy goes round in circles


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelPack]:
    folder = tmp_path_factory.mktemp("hybrid")

    @functools.cache
    def pack(arch: str) -> ModelPack:
        return onboard(write_hybrid_model(folder / f"{arch}.gguf", arch), folder / arch)

    return pack


@contextlib.contextmanager
def engine_of(pack: ModelPack) -> Iterator[ExpertEngine]:
    assert pack.source is not None
    bank = SourceBank(pack.source, pack.manifest)
    stacked = {site.index: bank.stacked(site.index) for site in pack.manifest.sites}
    with contextlib.closing(ExpertEngine(ExpertBank(pack.manifest.sites, stacked))) as engine:
        yield engine


@contextlib.contextmanager
def context_of(pack: ModelPack, take_back: int, n_batch: int = 64) -> Iterator[LlamaContext]:
    assert pack.source is not None
    model = LlamaModel(Path(pack.source), remote_experts=False, take_back=take_back)
    with contextlib.closing(model):
        context = LlamaContext(model, n_context=128, n_batch=n_batch, threads=1)
        with contextlib.closing(context):
            yield context


def rows_of(context: LlamaContext, chunk: Chunk) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    return [context.logits(row).copy() for row in context.decode_chunks([chunk])[0]]


@pytest.mark.parametrize("arch", TAKES_BACK)
def test_a_state_taken_back_is_the_state_before(packs: Packs, arch: str) -> None:
    tokens = np.random.default_rng(0).integers(3, VOCAB, 40).tolist()
    with context_of(packs(arch), TAKE_BACK) as context:
        assert (context.model.is_recurrent, context.take_back) == (True, TAKE_BACK)
        expected = rows_of(context, Chunk(tokens, 0, outputs=40))
        for back in (1, 3, TAKE_BACK):
            context.clear()
            rows_of(context, Chunk(tokens[:20], 0))
            found = []
            for at in range(20, 40):  # one token further each time, with `back` wrong ones after it
                found += rows_of(context, Chunk([tokens[at], *[7] * back], at, outputs=back + 1))[:1]
                context.forget(0, at + 1)
            for one, other in zip(found, expected[20:], strict=True):
                assert np.abs(one - other).max() < 3e-3 * np.abs(other).max()
        context.clear()
        other_past = rows_of(context, Chunk([tokens[0], 7, *tokens[2:]], 0, outputs=40))
        assert np.abs(other_past[5] - expected[5]).max() > 1e-2 * np.abs(expected[5]).max()  # it would be seen


def test_more_than_is_kept_is_refused(packs: Packs) -> None:
    with context_of(packs("qwen35moe"), 2, n_batch=2) as context:  # a batch smaller than what is kept needs
        for at in range(0, 8, 2):
            rows_of(context, Chunk([5, 6], at))
        with pytest.raises(ComputeError, match="cannot forget the tokens of sequence 0 from 2"):
            context.forget(0, 2)
        context.forget(0)


@pytest.mark.parametrize(("arch", "wrong"), [("qwen35moe", 0), *((arch, 7) for arch in TAKES_BACK[:4])])
def test_drafts_change_nothing(packs: Packs, arch: str, wrong: int) -> None:
    session = local_session(packs(arch), take_back=TAKE_BACK)
    try:
        request = GenerateRequest(prompt="The quick brown fox", max_tokens=60, sampling=SAMPLING, ignore_end=True)
        plain, _, _ = run_rows(session, request)
        drafter = OracleDrafter(tokens_of(plain), most=16, wrong=wrong, vocabulary=VOCAB)
        events, result, rows = run_rows(session, request, drafter)
        assert_plain(session, request, events, rows)
        assert result.drafts_accepted > 10
        assert max(tokens for tokens, *_ in drafter.steps[1:]) == 1 + TAKE_BACK
    finally:
        session.close()


def test_in_one_sequence_while_others_go_on(packs: Packs) -> None:
    session = local_session(packs("qwen35moe"), take_back=TAKE_BACK, n_seq=3)
    alone = local_session(packs("qwen35moe"), take_back=TAKE_BACK)
    requests = [
        GenerateRequest(prompt=p, max_tokens=n, sampling=SAMPLING, ignore_end=True)
        for p, n in (("one", 40), ("and another prompt", 60), ("a third one", 25))
    ]
    start = threading.Barrier(3)

    def generate(number: int) -> None:
        drafter = None if number == 2 else RandomDrafter(VOCAB, seed=number)
        start.wait()
        events, _, rows = run_rows(session, requests[number], drafter)
        with checking:
            assert_plain(alone, requests[number], events, rows)

    checking = threading.Lock()
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(generate, range(3)))
    finally:
        session.close()
        alone.close()


@pytest.mark.parametrize("arch", TAKES_BACK)
def test_the_swarm_has_the_local_runs_bits(packs: Packs, arch: str) -> None:
    pack = packs(arch)
    request = GenerateRequest(
        prompt="The quick brown fox", max_tokens=20, sampling=SAMPLING, ignore_end=True, digests=True
    )
    with (
        engine_of(pack) as engine,
        contextlib.closing(hooked_session(pack, InProcessExperts(engine), take_back=TAKE_BACK)) as swarm,
        contextlib.closing(local_session(pack, take_back=TAKE_BACK)) as local,
    ):
        there, here = (run_rows(session, request, RandomDrafter(VOCAB)) for session in (swarm, local))
    assert there[0] == here[0]
    assert there[1].drafted > 20


@pytest.mark.parametrize(("arch", "take_back"), [("qwen35moe", 0), *((arch, TAKE_BACK) for arch in CANNOT)])
def test_what_cannot_take_back_is_not_drafted_for_and_says_so(packs: Packs, arch: str, take_back: int) -> None:
    session = local_session(packs(arch), take_back=take_back)
    try:
        request = GenerateRequest(prompt="The quick", max_tokens=10, ignore_end=True)
        _, result, _ = run_rows(session, request, RandomDrafter(VOCAB))
    finally:
        session.close()
    assert result.speculation == f"the recurrent layers of {arch} cannot take back a draft"
    assert (result.drafted, result.steps) == (0, 9)
