"""A small model that drafts for a large one: right whatever it guesses, and of the same vocabulary or refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarmnode.backbone.draft_model import DraftModel, ModelDrafter
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, Session
from swarmnode.errors import ModelError, UsageError
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack

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


def test_a_closed_model_drafts_nothing_more(target: Session, own_double: DraftModel) -> None:
    drafter = far(own_double)
    own_double.close()
    assert own_double() is None
    result = target.generate(GenerateRequest(prompt=PROMPT, max_tokens=20), drafter=lambda: drafter)
    assert (result.tokens, result.drafted) == (20, 0)
