"""A small model that drafts for a large one: right whatever it guesses, and of the same vocabulary or refused."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from swarmnode.backbone import draft_model
from swarmnode.backbone.draft_model import DraftModel, ModelDrafter
from swarmnode.backbone.llama import Chunk, LlamaContext, LlamaModel
from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, Session
from swarmnode.errors import ModelError, UsageError
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack

from .drafters import RandomDrafter
from .helpers import assert_plain, local_session, run_rows, tokens_of
from .hybrid_model import write_hybrid_model

PROMPT = "import os\nimport sys\n\nclass Parser:\n    def __init__(self, filename):\n"
SLOW, TOKEN = 0.3, 0.005  # seconds of a step and of each further token, as over a far link


class FarDrafter(ModelDrafter):
    """Hears of steps that take what they take over a far link."""

    def stepped(self, n_tokens: int, seconds: float, generations: int = 1, batch_tokens: int = 0) -> None:
        far = SLOW + TOKEN * (max(batch_tokens, n_tokens) - 1)
        super().stepped(n_tokens, far, generations, batch_tokens)


@pytest.fixture
def target(demo_pack: ModelPack) -> Iterator[Session]:
    session = local_session(demo_pack, n_seq=3)
    yield session
    session.close()


@pytest.fixture
def own_double(demo_pack: ModelPack, target: Session) -> Iterator[DraftModel]:
    """The demo model as its own draft model: the best guesses there are."""
    assert demo_pack.source is not None
    model = DraftModel(Path(demo_pack.source), target.model, n_context=256, threads=1, drafters=2)
    yield model
    model.close()


def far(model: DraftModel) -> FarDrafter:
    drafter = model()
    assert drafter is not None
    drafter.__class__ = FarDrafter
    assert isinstance(drafter, FarDrafter)
    return drafter


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=1), Sampling(repeat_penalty=1.2)])
def test_drafts_of_a_model_are_accepted_and_change_nothing(
    target: Session, own_double: DraftModel, sampling: Sampling
) -> None:
    request = GenerateRequest(prompt=PROMPT, max_tokens=80, sampling=sampling, ignore_end=True)
    events, result, rows = run_rows(target, request, far(own_double))
    assert_plain(target, request, events, rows)
    if sampling == Sampling():
        assert result.accepted_per_step > 4
        assert result.drafts_accepted > 0.9 * result.drafted
    assert result.accepted_per_step > 1.3
    assert own_double.guess_s > 0


def test_sequences_are_taken_and_given_back(target: Session, own_double: DraftModel) -> None:
    first, second = far(own_double), far(own_double)
    assert own_double() is None
    target.generate(GenerateRequest(prompt=PROMPT, max_tokens=10), drafter=lambda: first)
    third = far(own_double)
    result = target.generate(GenerateRequest(prompt=PROMPT, max_tokens=10), drafter=own_double)
    assert result.speculation == "off"  # all are taken
    asked = GenerateRequest(prompt=PROMPT, max_tokens=10, speculate=True)
    assert "busy with other generations" in target.generate(asked, drafter=own_double).speculation
    second.close()
    third.close()


def test_two_at_once(target: Session, own_double: DraftModel) -> None:
    alone_checks = threading.Lock()
    requests = [GenerateRequest(prompt=PROMPT[:n], max_tokens=50, ignore_end=True) for n in (9, 40)]

    def generate(request: GenerateRequest) -> tuple[list[int], float]:
        events, result, _ = run_rows(target, request, far(own_double))
        with alone_checks:
            return tokens_of(events), result.accepted_per_step

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(generate, requests))
    assert all(len(tokens) == 50 and accepted > 2 for tokens, accepted in found)


def test_a_model_that_guesses_wrong_is_left_alone(tmp_path: Path, target: Session) -> None:
    shape = RandomModel(vocab=target.model.n_vocab, d_model=64, n_ff_expert=64, n_layers=1)
    (path,) = write_random_model(shape, tmp_path / "random.gguf")
    with pytest.raises(UsageError, match=r"its token 0 is .* and the model's is"):
        DraftModel(path, target.model, n_context=256, threads=1)
    same = LlamaModel(path, remote_experts=False)
    small = local_session_of(same)
    model = DraftModel(path, same, n_context=256, threads=1)
    try:
        drafter = model()
        assert drafter is not None
        for sureness in range(7):
            for _ in range(200):
                model.note(sureness, False)
        assert model.chance(6) < 0.05
        request = GenerateRequest(prompt="abc", max_tokens=100, ignore_end=True)
        assert small.generate(request, drafter=lambda: drafter).drafted < 10
    finally:
        model.close()
        small.close()


def local_session_of(model: LlamaModel) -> Session:
    return Session(model, LlamaContext(model, n_context=256, n_batch=64, threads=1))


def test_other_files_are_refused_in_one_line(tmp_path: Path, target: Session) -> None:
    (small,) = write_random_model(RandomModel(vocab=300), tmp_path / "small.gguf")
    with pytest.raises(UsageError, match="has 300 tokens and the model's 2048"):
        DraftModel(small, target.model, n_context=64, threads=1)
    hybrid = write_hybrid_model(tmp_path / "hybrid.gguf", "qwen35moe")
    same = LlamaModel(hybrid, remote_experts=False)
    with pytest.raises(UsageError, match="recurrent layers cannot draft"):
        DraftModel(hybrid, same, n_context=64, threads=1)
    same.close()
    (tmp_path / "none.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"none\.gguf"):
        DraftModel(tmp_path / "none.gguf", target.model, n_context=64, threads=1)


def test_a_model_that_computes_no_numbers_is_refused(tmp_path: Path) -> None:
    (path,) = write_random_model(RandomModel(vocab=300, dense_type="F32"), tmp_path / "nan.gguf")
    gguf = GgufFile.open(path)
    with path.open("r+b") as file:
        file.seek(gguf.tensors["output_norm.weight"].offset)
        file.write(np.full(4, np.nan, np.float32).tobytes())
    same = LlamaModel(path, remote_experts=False)
    with pytest.raises(ModelError, match=r"nan\.gguf: what it computes is no number"):
        DraftModel(path, same, n_context=64, threads=1)
    same.close()


def test_drafts_go_up_to_the_end_of_the_context(demo_pack: ModelPack) -> None:
    assert demo_pack.source is not None
    session = local_session(demo_pack, n_context=64, n_batch=64)
    model = DraftModel(Path(demo_pack.source), session.model, n_context=64, threads=1)
    try:
        request = GenerateRequest(prompt=PROMPT, max_tokens=500, ignore_end=True)
        drafter = far(model)
        _, result, _ = run_rows(session, request, drafter)
        assert result.stopped_by == "context"
        assert result.drafts_accepted > 10
    finally:
        session.close()
        model.close()


@pytest.mark.parametrize(("n_context", "most", "room", "least"), [(64, 16, 10**6, 1), (64, 3, 16, 1), (40, 16, 16, 0)])
def test_no_more_is_drafted_than_fits(
    demo_pack: ModelPack, target: Session, n_context: int, most: int, room: int, least: int
) -> None:
    assert demo_pack.source is not None
    model = DraftModel(Path(demo_pack.source), target.model, n_context=n_context, threads=1, most=most)
    drafter = far(model)
    prompt = target.prompt_tokens(GenerateRequest(prompt=PROMPT))
    try:
        drafter.accept(prompt)
        for _ in range(3):
            drafter.draft(0)
            drafter.stepped(1, SLOW)
        found = []
        for length in range(len(prompt), n_context + 3):
            found.append(len(drafter.draft(room)))
            assert found[-1] <= min(most, max(0, n_context - length))
            drafter.accept([5])
        assert max(found) >= least
        assert not drafter._broken
    finally:
        model.close()


@pytest.fixture
def small_chunks(
    demo_pack: ModelPack, target: Session, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DraftModel, list[int]]]:
    """A double that evaluates 16 tokens at once, and how many it did each time."""
    assert demo_pack.source is not None
    monkeypatch.setattr(draft_model, "BATCH", 16)
    model = DraftModel(Path(demo_pack.source), target.model, n_context=256, threads=1, drafters=2)
    evaluated: list[int] = []
    decode = model.context.decode_chunks

    def note(chunks: Sequence[Chunk]) -> list[range]:
        evaluated.append(len(chunks[0].tokens))
        return decode(chunks)

    monkeypatch.setattr(model.context, "decode_chunks", note)
    yield model, evaluated
    model.close()


def test_a_prompt_is_caught_up_with_one_chunk_a_step(
    target: Session, small_chunks: tuple[DraftModel, list[int]]
) -> None:
    model, evaluated = small_chunks
    request = GenerateRequest(prompt=PROMPT * 4, max_tokens=60, ignore_end=True)
    length = len(target.prompt_tokens(request))
    assert length > 16 * 5
    drafter = far(model)
    asked: list[tuple[int, int]] = []  # evaluations until then, drafts
    draft = drafter.draft

    def note(room: int) -> list[int]:
        drafts = draft(room)
        asked.append((len(evaluated), len(drafts)))
        return drafts

    drafter.draft = note  # type: ignore[method-assign]
    events, result, rows = run_rows(target, request, drafter)
    waited = [before for before, drafts in itertools.takewhile(lambda one: not one[1], asked) if before]
    assert waited[: length // 16] == list(range(1, length // 16 + 1))
    assert max(evaluated) == 16
    assert result.drafts_accepted > 10
    assert_plain(target, request, events, rows)


def test_who_is_cancelled_is_not_caught_up_with(target: Session, small_chunks: tuple[DraftModel, list[int]]) -> None:
    model, evaluated = small_chunks
    cancelled = threading.Event()
    drafter = far(model)
    decode = model.context.decode_chunks

    def cancel(chunks: Sequence[Chunk]) -> list[range]:
        cancelled.set()
        target.interrupt()
        return decode(chunks)

    model.context.decode_chunks = cancel  # type: ignore[method-assign]
    request = GenerateRequest(prompt=PROMPT * 4, max_tokens=60, ignore_end=True)
    result = target.generate(request, cancelled=cancelled, drafter=lambda: drafter)
    assert result.stopped_by == "cancelled"
    assert evaluated == [16]


def test_no_guess_is_made_for_one_who_was_cancelled_during_anothers(target: Session) -> None:
    cancelled, both = threading.Event(), threading.Event()
    late: list[int] = []

    class Cancelling(RandomDrafter):
        def draft(self, room: int) -> list[int]:
            if both.is_set():
                cancelled.set()
            return super().draft(room)

    class Noting(RandomDrafter):
        def draft(self, room: int) -> list[int]:
            if cancelled.is_set():
                late.append(room)
            return super().draft(room)

    request = GenerateRequest(prompt=PROMPT, max_tokens=60, ignore_end=True)
    first = target.submit(request, drafter=Cancelling)
    second = target.submit(request, lambda _event: both.set(), cancelled=cancelled, drafter=Noting)
    assert (second.result(20).stopped_by, first.result(20).stopped_by) == ("cancelled", "length")
    assert not late


def test_what_catching_up_takes_counts(own_double: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 5.0)  # every evaluation takes 5 s: no step is as slow
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    drafter = far(own_double)
    drafter.accept([1, 2, 3])
    for _ in range(3):
        drafter.draft(0)
        drafter.stepped(1, SLOW)
    assert drafter.draft(16) == []
    assert own_double.guess_s == 5.0


def test_a_closed_model_drafts_nothing_more(target: Session, own_double: DraftModel) -> None:
    drafter = far(own_double)
    own_double.close()
    assert own_double() is None
    result = target.generate(GenerateRequest(prompt=PROMPT, max_tokens=20), drafter=lambda: drafter)
    assert (result.tokens, result.drafted) == (20, 0)
