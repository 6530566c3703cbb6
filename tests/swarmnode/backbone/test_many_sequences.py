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


def step_of(session: Session) -> list[Future[GenerateResult]]:
    """Whose step is evaluated; on the decode thread."""
    return [job.future for job in session._in_step]


def test_who_fails_alone_too_ends_and_nobody_else(
    demo_pack: ModelPack, demo_engine: ExpertEngine, alone: Session
) -> None:
    steps: list[int] = []

    def fail(site: int, _x: F32, _ids: I32) -> None:
        step = step_of(session)
        if site == 2 and futures and futures[1] in step:
            steps.append(len(step))
            if len(steps) > 6:
                raise CallFailed("layer 2: all failed")

    session = hooked_session(demo_pack, InProcessExperts(demo_engine, fail), n_seq=4)
    asked = requests(4)
    futures: list[Future[GenerateResult]] = []
    events: list[list[TokenEvent]] = [[] for _ in asked]
    rows: list[list[F32]] = [[] for _ in asked]

    def submit(number: int) -> Future[GenerateResult]:
        drafter = RandomDrafter(seed=number) if number % 2 else None
        return session.submit(
            asked[number],
            events[number].append,
            lambda _index, row: rows[number].append(row.copy()),
            drafter=lambda: drafter,
        )

    try:
        for number in range(4):
            futures.append(submit(number))
        with pytest.raises(CallFailed, match="layer 2"):
            futures[1].result(20)
        for i in (0, 2, 3):
            result = futures[i].result(20)
            assert (result.stopped_by, result.tokens) == ("length", asked[i].max_tokens)
            assert_plain(alone, asked[i], [event for event in events[i] if event.token >= 0], rows[i])
    finally:
        session.close()
    assert len(steps) == 8  # with the others, then alone, and no third time
    assert (steps[-2] > 1, steps[-1]) == (True, 1)


def test_a_call_that_fails_once_ends_nobody(demo_pack: ModelPack, demo_engine: ExpertEngine) -> None:
    failed = threading.Event()

    def fail_once(site: int, _x: F32, _ids: I32) -> None:
        if site == 2 and len(step_of(session)) == 3 and not failed.is_set():
            failed.set()
            raise CallFailed("layer 2: all failed")

    session = hooked_session(demo_pack, InProcessExperts(demo_engine, fail_once), n_seq=3)
    try:
        futures = [session.submit(request) for request in requests(4)]
        assert [future.result(20).stopped_by for future in futures] == ["length"] * 4
        assert failed.is_set()
    finally:
        session.close()


def test_where_nothing_answers_all_end_with_the_error_and_those_that_wait_have_their_turn(
    demo_pack: ModelPack, demo_engine: ExpertEngine
) -> None:
    def fail(site: int, _x: F32, _ids: I32) -> None:
        if (len(step_of(session)) == 2 or broken.is_set()) and not set(step_of(session)) & set(futures[2:]):
            broken.set()
            raise CallFailed("layer 2: all failed")

    broken = threading.Event()
    session = hooked_session(demo_pack, InProcessExperts(demo_engine, fail), n_seq=2)
    futures: list[Future[GenerateResult]] = []
    try:
        futures += [session.submit(request) for request in requests(3)]
        for future in futures[:2]:
            with pytest.raises(CallFailed, match="layer 2"):
                future.result(20)
        assert futures[2].result(20).stopped_by == "length"
    finally:
        session.close()


def test_who_is_cancelled_while_others_are_tried_again_ends_as_cancelled(
    demo_pack: ModelPack, demo_engine: ExpertEngine
) -> None:
    cancelled = threading.Event()

    def fail(_site: int, _x: F32, _ids: I32) -> None:
        if len(step_of(session)) == 2:
            cancelled.set()
            raise CallFailed("layer 2: all failed")

    session = hooked_session(demo_pack, InProcessExperts(demo_engine, fail), n_seq=2)
    try:
        stays = session.submit(requests(1)[0])
        leaves = session.submit(requests(1)[0], cancelled=cancelled)
        assert leaves.result(20).stopped_by == "cancelled"
        assert stays.result(20).stopped_by == "length"
    finally:
        session.close()


def test_what_wakes_a_step_that_nobody_ended_is_an_error(demo_pack: ModelPack, demo_engine: ExpertEngine) -> None:
    """Experts that are shared with other contexts may be told to give up on all that they do."""

    def give_up(site: int, _x: F32, _ids: I32) -> None:
        if site == 1:
            raise Cancelled("the node is shutting down")

    session = hooked_session(demo_pack, InProcessExperts(demo_engine, give_up), n_seq=2)
    try:
        for future in [session.submit(request) for request in requests(2)]:
            with pytest.raises(Cancelled, match="shutting down"):
                future.result(20)
    finally:
        session.close()


class ClosingDrafter(RandomDrafter):
    """Knows whether it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("error", [ValueError("a mistake"), SystemExit("a mistake")])
@pytest.mark.parametrize("where", ["_plan", "_broken_off", "_drop_cancelled"])
def test_a_mistake_ends_what_runs_and_nothing_that_comes_later(
    demo_pack: ModelPack, demo_engine: ExpertEngine, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    def fail(_site: int, _x: F32, _ids: I32) -> None:
        if where == "_broken_off" and both.is_set():
            raise CallFailed("layer 0: all failed")

    def mistaken(*arguments: object) -> object:
        if both.is_set():
            monkeypatch.setattr(session, where, working)
            experts.on_call = lambda _site, _x, _ids: None
            raise error
        return working(*arguments)

    both = threading.Event()
    experts = InProcessExperts(demo_engine, fail)
    session = hooked_session(demo_pack, experts, n_seq=2)
    working: Callable[..., object] = getattr(session, where)
    drafters = [ClosingDrafter(), ClosingDrafter()]
    try:
        monkeypatch.setattr(session, where, mistaken)
        first = session.submit(requests(1)[0], drafter=lambda: drafters[0])
        second = session.submit(requests(2)[1], lambda _event: both.set(), drafter=lambda: drafters[1])
        waits = session.submit(requests(3)[2])
        for future in (first, second):
            with pytest.raises(type(error), match="a mistake"):
                future.result(20)
        assert [drafter.closed for drafter in drafters] == [1, 1]
        assert waits.result(20).stopped_by == "length"
        assert [session.submit(request).result(20).stopped_by for request in requests(4)] == ["length"] * 4
        assert sorted(session._free) == [0, 1]
    finally:
        session.close()


@pytest.mark.parametrize("error", [ValueError("no more"), SystemExit("no more")])
def test_a_callback_that_fails_ends_its_own_generation(demo_pack: ModelPack, error: BaseException) -> None:
    def fail(event: TokenEvent) -> None:
        if event.index == 5:
            raise error

    session = local_session(demo_pack, n_seq=2)
    try:
        stays = session.submit(requests(1)[0])
        with pytest.raises(type(error), match="no more"):
            session.generate(requests(1)[0], fail)
        assert stays.result(20).stopped_by == "length"
    finally:
        session.close()


def test_a_callback_that_fails_at_the_very_end_frees_what_it_had(demo_pack: ModelPack) -> None:
    def fail_at_the_end(event: TokenEvent) -> None:
        if event.token < 0:
            raise SystemExit("no more")

    session = local_session(demo_pack)
    drafter = ClosingDrafter()
    request = GenerateRequest(prompt=PROMPTS[0], max_tokens=12, ignore_end=True)
    try:
        text = session.generate(request).text
        held = GenerateRequest(prompt=PROMPTS[0], max_tokens=12, ignore_end=True, stop=(text[-1] + "\0",))
        with pytest.raises(SystemExit, match="no more"):
            session.generate(held, fail_at_the_end, drafter=lambda: drafter)
        assert drafter.closed == 1
        assert session.generate(request).text == text
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


def test_a_prompt_goes_in_the_chunks_that_suit_the_link(demo_pack: ModelPack, demo_engine: ExpertEngine) -> None:
    experts = InProcessExperts(demo_engine)
    chunks = iter((64, 8, 1000))
    session = hooked_session(demo_pack, experts, prompt_chunk=lambda most: next(chunks, most))
    request = GenerateRequest(prompt="import os\n" * 30, max_tokens=2, ignore_end=True)
    try:
        n_prompt = len(session.prompt_tokens(request))
        session.generate(request)
    finally:
        session.close()
    assert [n for site, n in experts.calls if site == 0] == [64, 8, n_prompt - 72, 1]
