"""Several generations on one context: each is what it would be alone, and none is another's trouble."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from swarmnode.backbone.hook import F32, I32
from swarmnode.backbone.llama import Chunk, LlamaContext, LlamaModel
from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, GenerateResult, Session, TokenEvent
from swarmnode.backbone.speculation import Drafter
from swarmnode.compute.engine import ExpertEngine
from swarmnode.errors import CallFailed, Cancelled, ComputeError, UsageError
from swarmnode.onboard import ModelPack

from .drafters import OracleDrafter, RandomDrafter
from .helpers import Done, InProcessExperts, assert_plain, hooked_session, local_session, run_rows, tokens_of

PROMPTS = (
    "import os\nimport sys\n\nclass Parser:\n    def __init__(self, filename):\n",
    "def main(argv):\n    ",
    "import re\n\n\ndef tokens(text):\n    return",
    '"""Tests of the parser."""\n\nimport unittest\n\n\nclass Tests(unittest.TestCase):\n',
)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(repeat_penalty=1.3),
    Sampling(temperature=0.9, top_k=30, seed=5),
)


@pytest.fixture(scope="module")
def alone(demo_pack: ModelPack) -> Iterator[Session]:
    session = local_session(demo_pack)
    yield session
    session.close()


def requests(count: int, tokens: int = 40) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            prompt=PROMPTS[i % 4], max_tokens=tokens - 7 * (i % 3), sampling=SAMPLINGS[i % 4], ignore_end=True
        )
        for i in range(count)
    ]


def all_at_once(count: int, work: Callable[[int], None]) -> None:
    start = threading.Barrier(count)

    def one(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(one, range(count)))


@pytest.mark.parametrize(("n_seq", "count", "n_batch"), [(2, 2, 128), (4, 4, 16), (2, 5, 128), (1, 3, 128)])
def test_every_one_is_as_if_alone(demo_pack: ModelPack, alone: Session, n_seq: int, count: int, n_batch: int) -> None:
    session = local_session(demo_pack, n_seq=n_seq, n_batch=n_batch)
    asked = requests(count)
    oracles = [tokens_of(run_rows(alone, request)[0]) for request in asked]
    checking = threading.Lock()
    results: dict[int, GenerateResult] = {}

    def generate(number: int) -> None:
        drafters: Sequence[Drafter | None] = (
            None, OracleDrafter(oracles[number], wrong=4), RandomDrafter(seed=number),
        )  # fmt: skip
        events, results[number], rows = run_rows(session, asked[number], drafters[number % 3])
        with checking:
            assert_plain(alone, asked[number], events, rows)

    try:
        all_at_once(count, generate)
    finally:
        session.close()
    assert [results[i].tokens for i in range(count)] == [request.max_tokens for request in asked]


def test_the_swarm_evaluates_all_of_them_in_one_pass(demo_pack: ModelPack, demo_engine: ExpertEngine) -> None:
    experts = InProcessExperts(demo_engine)
    session = hooked_session(demo_pack, experts, n_seq=4)
    results: list[GenerateResult] = []
    try:
        all_at_once(4, lambda number: results.append(session.generate(requests(4, 60)[number])))
    finally:
        session.close()
    passes = len(experts.calls) / 4  # layers
    tokens = sum(result.tokens for result in results)
    assert passes < 60 + 4 * 3  # the longest one's steps, a few before all had begun
    assert tokens > 180
    together = [n for site, n in experts.calls if site == 0]
    assert together.count(4) > 20
    assert sum(result.steps for result in results) == tokens - 4
    assert all(result.blocking_round_trips_per_token == 4.0 for result in results)


def test_a_prompt_longer_than_the_batch_goes_in_while_others_decode(
    demo_pack: ModelPack, demo_engine: ExpertEngine, alone: Session
) -> None:
    experts = InProcessExperts(demo_engine)
    session = hooked_session(demo_pack, experts, n_seq=2, n_batch=16)
    long = GenerateRequest(prompt="".join(PROMPTS) * 2, max_tokens=5)
    short = GenerateRequest(prompt=PROMPTS[1], max_tokens=60, ignore_end=True)
    order: list[str] = []
    decoding = threading.Event()
    rows: dict[str, list[F32]] = {"long": [], "short": []}
    events: dict[str, list[TokenEvent]] = {"long": [], "short": []}

    def submit(name: str, request: GenerateRequest) -> Future[GenerateResult]:
        def note(event: TokenEvent) -> None:
            order.append(name)
            events[name].append(event)
            if len(order) == 5:
                decoding.set()

        return session.submit(request, note, lambda _i, row: rows[name].append(row.copy()))

    try:
        first = submit("short", short)
        assert decoding.wait(10)
        second = submit("long", long)
        assert second.result(20).prompt_tokens > 16 * 4
        first.result(20)
        assert_plain(alone, short, [e for e in events["short"] if e.token >= 0], rows["short"])
        assert_plain(alone, long, [e for e in events["long"] if e.token >= 0], rows["long"])
    finally:
        session.close()
    assert order.index("long") > 5 + 4  # it did not keep the other waiting
    assert [n for site, n in experts.calls if site == 0].count(16) >= 4  # full batches: a chunk and one token


def test_cancelling_one_leaves_the_other_alone(demo_pack: ModelPack, demo_engine: ExpertEngine) -> None:
    both, cancelled = threading.Event(), threading.Event()
    interrupted = threading.Event()

    def interrupt_inside_a_step(_site: int, _x: F32, ids: I32) -> None:
        if both.is_set() and len(ids) == 2 and not interrupted.is_set():
            cancelled.set()
            session.interrupt()
            interrupted.set()

    experts = InProcessExperts(demo_engine, interrupt_inside_a_step)
    session = hooked_session(demo_pack, experts, n_seq=2)
    stays, leaves = requests(2, 60)
    reference = hooked_session(demo_pack, InProcessExperts(demo_engine))
    try:
        staying = session.submit(stays)
        leaving = session.submit(leaves, lambda _event: both.set(), cancelled=cancelled)
        assert leaving.result(20).stopped_by == "cancelled"
        assert leaving.result(20).tokens < 53
        assert interrupted.is_set()
        result = staying.result(20)
        assert (result.stopped_by, result.tokens) == ("length", 60)
        assert session.generate(leaves).tokens == reference.generate(leaves).tokens == 53
    finally:
        session.close()
        reference.close()


def test_a_failed_call_ends_those_that_were_in_the_step(demo_pack: ModelPack, demo_engine: ExpertEngine) -> None:
    steps = 0

    def fail_once(site: int, _x: F32, ids: I32) -> None:
        nonlocal steps
        if site == 2 and len(ids) == 2:
            steps += 1
            if steps == 5:
                raise CallFailed("layer 2: all failed")

    session = hooked_session(demo_pack, InProcessExperts(demo_engine, fail_once), n_seq=2)
    try:
        futures = [session.submit(request) for request in requests(3)]
        for future in futures[:2]:
            with pytest.raises(CallFailed, match="layer 2"):
                future.result(20)
        assert futures[2].result(20).stopped_by == "length"  # it waited, and had its turn
    finally:
        session.close()


def test_a_full_context_ends_its_own_generation(demo_pack: ModelPack) -> None:
    session = local_session(demo_pack, n_context=64, n_batch=64, n_seq=2)
    try:
        long = session.submit(GenerateRequest(prompt=PROMPTS[0], max_tokens=1000, ignore_end=True))
        short = [session.submit(GenerateRequest(prompt=PROMPTS[1], max_tokens=20, ignore_end=True)) for _ in range(4)]
        prompt = len(session.prompt_tokens(GenerateRequest(prompt=PROMPTS[0])))
        assert (long.result(20).stopped_by, long.result(20).tokens) == ("context", 64 - prompt + 1)
        assert [future.result(20).stopped_by for future in short] == ["length"] * 4
    finally:
        session.close()


class Blocked(InProcessExperts):
    """Answers only once it is told to; what waits can be failed, as the dispatch client's rows can."""

    def __init__(self, engine: ExpertEngine) -> None:
        super().__init__(engine)
        self.waits, self.go = threading.Event(), threading.Event()

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> Done:
        done = super().submit(site, x, ids, weights)
        return WaitingRows(self, done.rows)


class WaitingRows(Done):
    def __init__(self, owner: Blocked, rows: F32) -> None:
        super().__init__(rows)
        self._owner = owner
        self._error: Exception | None = None

    def fail(self, error: Exception) -> None:
        self._error = error
        self._owner.go.set()

    def result(self) -> F32:
        self._owner.waits.set()
        assert self._owner.go.wait(20)
        if self._error is not None:
            raise self._error
        return self.rows


def test_a_cancelled_wait_ends_at_once_where_nobody_else_needs_it(
    demo_pack: ModelPack, demo_engine: ExpertEngine
) -> None:
    experts = Blocked(demo_engine)
    session = hooked_session(demo_pack, experts, n_seq=2)
    cancelled = threading.Event()
    try:
        future = session.submit(GenerateRequest(prompt=PROMPTS[0]), cancelled=cancelled)
        assert experts.waits.wait(20)
        cancelled.set()
        session.interrupt()
        assert future.result(20).stopped_by == "cancelled"
        assert len(experts.calls) == 1
    finally:
        session.close()


def test_closing_ends_what_runs_and_what_waits(demo_pack: ModelPack, demo_engine: ExpertEngine) -> None:
    experts = Blocked(demo_engine)
    session = hooked_session(demo_pack, experts)
    runs, waits = (session.submit(GenerateRequest(prompt=prompt)) for prompt in PROMPTS[:2])
    assert experts.waits.wait(20)
    session.close()
    assert runs.result(0).stopped_by == waits.result(0).stopped_by == "cancelled"
    with pytest.raises((Cancelled, ComputeError)):
        session.submit(GenerateRequest(prompt=PROMPTS[0]))


def test_rows_are_addressed_by_their_place_in_the_batch(demo_pack: ModelPack) -> None:
    session = local_session(demo_pack, n_seq=3)
    context = session.context
    try:
        rows = context.decode_chunks(
            [Chunk([1, 2, 3], 0, 0, 2), Chunk([4, 5], 0, 2, 0), Chunk([6, 7, 8, 9], 0, 1, 1)],
        )
        assert rows == [range(1, 3), range(5, 5), range(8, 9)]
        found = [context.logits(row).copy() for row in (1, 2, 8)]
        context.clear()
        context.decode([1, 2, 3], 0, all_logits=True)
        expected = [context.logits(row).copy() for row in (1, 2)]
        context.clear()
        context.decode([6, 7, 8, 9], 0)
        expected.append(context.logits().copy())
        for one, other in zip(found, expected, strict=True):
            assert abs(one - other).max() < 0.2
        with pytest.raises(ComputeError, match="no logits for row 4"):
            context.logits(4)
    finally:
        session.close()


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([Chunk([], 0)], "0 tokens at position 0 do not fit"),
        ([Chunk([1] * 10, 0), Chunk([1] * 7, 0, 1)], "7 tokens .* batch 16, context 64, 10 tokens of other sequences"),
        ([Chunk([1] * 8, 60)], "8 tokens at position 60 do not fit"),
        ([Chunk([1], 0, 2)], "no such sequence or rows: 2 of 2"),
        ([Chunk([1], 0, 0, 2)], "no such sequence or rows: 0 of 2, 2 rows"),
    ],
)
def test_what_does_not_fit_is_refused(demo_pack: ModelPack, chunks: list[Chunk], message: str) -> None:
    session = local_session(demo_pack, n_context=64, n_batch=16, n_seq=2)
    with contextlib.closing(session), pytest.raises(ComputeError, match=message):
        session.context.decode_chunks(chunks)


def test_impossible_numbers_of_sequences_are_refused_and_the_model_outlives_its_contexts(demo_pack: ModelPack) -> None:
    assert demo_pack.source is not None
    model = LlamaModel(demo_pack.source, remote_experts=False)
    for n_seq in (0, 17, 300):
        with pytest.raises(UsageError, match=f"{n_seq} sequences do not fit"):
            LlamaContext(model, n_context=64, n_batch=16, threads=1, n_seq=n_seq)
    contexts = [LlamaContext(model, n_context=64, n_batch=16, threads=1) for _ in range(2)]
    contexts[0].close()
    model.close()
    with pytest.raises(ComputeError, match="the model is closed"):
        model.tokenize("x")
    contexts[1].decode([1, 2], 0)  # the weights are there as long as somebody computes with them
    contexts[1].close()
