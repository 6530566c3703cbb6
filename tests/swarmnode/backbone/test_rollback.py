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
from swarmnode.backbone.session import GenerateRequest, TokenEvent
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.errors import CallFailed, ComputeError
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
        other_past = rows_of(context, Chunk([tokens[0], *[7] * 4, *tokens[5:]], 0, outputs=40))
        assert np.abs(other_past[5] - expected[5]).max() > 1e-2 * np.abs(expected[5]).max()  # it would be seen


def test_a_whole_evaluation_is_not_taken_back(packs: Packs) -> None:
    """llama.cpp would take another state for the one before it, and say nothing."""
    with context_of(packs("qwen35moe"), TAKE_BACK) as context:
        rows_of(context, Chunk([5, 6, 7], 0))
        rows_of(context, Chunk([8, 9], 3))
        with pytest.raises(ComputeError, match="cannot take back a whole evaluation: sequence 0 from 3"):
            context.forget(0, 3)
        context.forget(0, 4)
        context.forget(0)


def test_more_than_is_kept_is_refused(packs: Packs) -> None:
    with context_of(packs("qwen35moe"), 2, n_batch=2) as context:  # a batch smaller than what is kept needs
        for at in range(0, 8, 2):
            rows_of(context, Chunk([5, 6], at))
        with pytest.raises(ComputeError, match="cannot take back a whole evaluation: sequence 0 from 2"):
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


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3next"])
@pytest.mark.parametrize("error", [None, CallFailed("layer 1: all failed")])
def test_what_ends_a_step_ends_nobody_who_has_evaluated_nothing(
    packs: Packs, arch: str, error: CallFailed | None
) -> None:
    """A state may have been moved by the step, or be half written; there is none where nothing was evaluated."""
    pack = packs(arch)
    request = GenerateRequest(prompt="x" * 20, max_tokens=10, sampling=SAMPLING, ignore_end=True, digests=True)
    long = GenerateRequest(prompt="The quick brown fox", max_tokens=10, ignore_end=True)
    cancelled, asked = threading.Event(), threading.Event()

    def end_the_second_chunk(_site: int, _x: object, _ids: object) -> None:
        assert asked.wait(20)
        if len(session._active) == 2 and session._in_step[0].future is leaves:
            if error is not None:
                raise error
            cancelled.set()
            session.interrupt()

    with engine_of(pack) as engine:
        experts = InProcessExperts(engine, end_the_second_chunk)
        session = hooked_session(pack, experts, n_seq=2, n_batch=8)
        reference = hooked_session(pack, InProcessExperts(engine), n_seq=2, n_batch=8)
        events: list[TokenEvent] = []
        with contextlib.closing(session), contextlib.closing(reference):
            leaves = session.submit(long, cancelled=cancelled)
            stays = session.submit(request, events.append)
            asked.set()
            if error is None:
                assert leaves.result(20).stopped_by == "cancelled"
            else:
                with pytest.raises(CallFailed):
                    leaves.result(20)
            assert (stays.result(20).stopped_by, stays.result(20).tokens) == ("length", 10)
            expected, _, _ = run_rows(reference, request)
            assert [event for event in events if event.token >= 0] == expected


def test_who_has_evaluated_something_ends_with_the_error_of_the_step(packs: Packs) -> None:
    together = threading.Event()

    def fail(_site: int, _x: object, _ids: object) -> None:
        if len(session._in_step) == 2:
            together.set()
            raise CallFailed("layer 1: all failed")

    with engine_of(packs("qwen35moe")) as engine:
        session = hooked_session(packs("qwen35moe"), InProcessExperts(engine, fail), n_seq=2)
        with contextlib.closing(session):
            request = GenerateRequest(prompt="The quick", max_tokens=60, ignore_end=True)
            for future in [session.submit(request) for _ in range(2)]:
                with pytest.raises(CallFailed, match="layer 1"):
                    future.result(20)
            assert together.is_set()
            assert session.generate(request).stopped_by == "length"


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


@pytest.mark.parametrize("arch", ["bailingmoe3", "lfm2moe", "nemotron_h_moe", "deepseek4"])
def test_several_at_once_where_the_graph_depends_on_the_number_of_tokens(packs: Packs, arch: str) -> None:
    pack = packs(arch)
    lengths = (20, 30, 12)

    def generate(number: int) -> int:
        request = GenerateRequest(
            prompt="a prompt " * (1 + number), max_tokens=lengths[number], sampling=SAMPLING, ignore_end=True
        )
        return run_rows(session, request, RandomDrafter(VOCAB, seed=number))[1].tokens

    with engine_of(pack) as engine:
        session = hooked_session(pack, InProcessExperts(engine), n_seq=3, n_batch=32, take_back=TAKE_BACK)
        with contextlib.closing(session), ThreadPoolExecutor(3) as pool:
            assert tuple(pool.map(generate, range(3))) == lengths


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
