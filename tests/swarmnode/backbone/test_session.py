from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from swarmnode.backbone.hook import F32, I32
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, GenerateResult, Message, Session, TokenEvent
from swarmnode.compute.engine import ExpertEngine
from swarmnode.errors import CallFailed, UsageError
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack

from .helpers import InProcessExperts, hooked_session, local_session

PROMPT = "import os\nimport sys\n\nclass Parser:\n    def __init__(self, filename):\n"


@pytest.fixture
def experts(demo_engine: ExpertEngine) -> InProcessExperts:
    return InProcessExperts(demo_engine)


@pytest.fixture
def swarm(demo_pack: ModelPack, experts: InProcessExperts) -> Iterator[Session]:
    session = hooked_session(demo_pack, experts)
    yield session
    session.close()


@pytest.fixture(scope="module")
def local(demo_pack: ModelPack) -> Iterator[Session]:
    session = local_session(demo_pack)
    yield session
    session.close()


def run(session: Session, request: GenerateRequest) -> tuple[list[TokenEvent], GenerateResult]:
    events: list[TokenEvent] = []
    return events, session.generate(request, events.append)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8, seed=1),
        Sampling(temperature=1.1, top_k=20, top_p=0.9, min_p=0.02, repeat_penalty=1.2, seed=7),
        Sampling(presence_penalty=0.5, frequency_penalty=0.5, logit_bias={10: 3.0, 11: float("-inf")}),
    ],
)
def test_text_and_every_logit_row_are_those_of_the_local_run(
    swarm: Session, local: Session, sampling: Sampling
) -> None:
    request = GenerateRequest(prompt=PROMPT, max_tokens=40, sampling=sampling, digests=True)
    events, result = run(swarm, request)
    expected_events, expected = run(local, request)
    assert events == expected_events
    assert result.text == expected.text
    assert result.tokens == len([e for e in events if e.token >= 0]) > 10


def test_a_prompt_longer_than_a_batch_goes_in_chunks_with_the_same_bits(
    demo_pack: ModelPack, experts: InProcessExperts
) -> None:
    request = GenerateRequest(prompt=PROMPT * 4, max_tokens=4, digests=True)
    sessions = hooked_session(demo_pack, experts, n_batch=16), local_session(demo_pack, n_batch=16)
    try:
        first, second = run(sessions[0], request), run(sessions[1], request)
    finally:
        for session in sessions:
            session.close()
    assert first[0] == second[0]
    assert first[1].prompt_tokens > 16 * 3


def test_a_chunk_without_logits_asks_nothing_of_the_last_layer(swarm: Session, experts: InProcessExperts) -> None:
    swarm.context.clear()
    tokens = swarm.model.tokenize(PROMPT)
    for i in range(len(tokens)):
        swarm.context._batch.logits[i] = 0
    swarm.evaluate(tokens, 0)
    last = max(site for site, _ in experts.calls)
    assert {site: n for site, n in experts.calls if site != last} == dict.fromkeys(range(last), len(tokens))
    assert dict(experts.calls)[last] == 1  # only the one row that has logits


def test_counts_round_trips_per_step(swarm: Session) -> None:
    _, result = run(swarm, GenerateRequest(prompt=PROMPT, max_tokens=9))
    assert result.steps == 8
    assert result.blocking_round_trips_per_token == 4.0
    assert result.stopped_by == "length"


def test_ignore_end_goes_on_where_the_model_would_stop(local: Session) -> None:
    ends = GenerateRequest(
        prompt="import os\n\nclass Parser:\n    def __init__(self, filename):\n",
        max_tokens=5,
        sampling=Sampling(temperature=0.7, seed=5),
    )
    assert run(local, ends)[1].stopped_by == "end"
    goes_on = run(local, msgspec.structs.replace(ends, ignore_end=True))[1]
    assert (goes_on.stopped_by, goes_on.tokens) == ("length", 5)


def test_an_empty_stop_string_is_refused(local: Session) -> None:
    with pytest.raises(UsageError, match="stop strings of 1 to 1024"):
        local.generate(GenerateRequest(prompt=PROMPT, stop=("",)))


def test_stop_string_ends_the_text_before_it(swarm: Session) -> None:
    request = GenerateRequest(prompt=PROMPT, max_tokens=40, sampling=Sampling(temperature=0.8, seed=1))
    _, whole = run(swarm, request)
    cut = whole.text[12:15]
    events, result = run(swarm, GenerateRequest(prompt=PROMPT, max_tokens=40, sampling=request.sampling, stop=(cut,)))
    assert result.stopped_by == "stop"
    assert result.text == whole.text[: whole.text.index(cut)]
    assert "".join(e.text for e in events) == result.text


def test_ends_where_the_context_ends(demo_pack: ModelPack, experts: InProcessExperts) -> None:
    session = hooked_session(demo_pack, experts, n_context=256, n_batch=64)
    try:
        prompt = session.model.tokenize(PROMPT)
        _, result = run(session, GenerateRequest(prompt=PROMPT, max_tokens=1000))
    finally:
        session.close()
    assert result.stopped_by == "context"
    assert result.tokens == 256 - len(prompt) + 1


def test_cancel_between_and_inside_steps(demo_pack: ModelPack, demo_engine: ExpertEngine) -> None:
    cancelled = threading.Event()

    def cancel_in_the_third_step(site: int, _x: F32, _ids: I32) -> None:
        if len(experts.calls) > 10:
            cancelled.set()
            session.interrupt()

    experts = InProcessExperts(demo_engine, cancel_in_the_third_step)  # the fixture is not meant here
    session = hooked_session(demo_pack, experts)
    try:
        result = session.generate(GenerateRequest(prompt=PROMPT, max_tokens=50), cancelled=cancelled)
        assert result.stopped_by == "cancelled"
        assert len(experts.calls) == 11
        experts.on_call = lambda _site, _x, _ids: None
        after = session.generate(GenerateRequest(prompt=PROMPT, max_tokens=5))
        assert after.tokens == 5
    finally:
        session.close()


def test_a_failed_call_raises_its_own_error_and_the_session_goes_on(
    demo_pack: ModelPack, demo_engine: ExpertEngine
) -> None:
    def fail(site: int, _x: F32, _ids: I32) -> None:
        if site == 2:
            raise CallFailed("layer 2: all failed")

    experts = InProcessExperts(demo_engine, fail)
    session = hooked_session(demo_pack, experts)
    try:
        with pytest.raises(CallFailed, match="layer 2"):
            session.generate(GenerateRequest(prompt=PROMPT, max_tokens=5))
        assert [site for site, _ in experts.calls] == [0, 1, 2]
        experts.on_call = lambda _site, _x, _ids: None
        assert session.generate(GenerateRequest(prompt=PROMPT, max_tokens=5)).tokens == 5
    finally:
        session.close()


def test_long_tokens_are_not_dropped(local: Session) -> None:
    # token 895 is a line feed and 32 spaces; llama-cpp-python's own detokenizer has a buffer of 32 bytes
    assert local.model.piece(895) == b"\n" + b" " * 32
    text = "x = 1\n" + " " * 40 + "y = 2\n" + " " * 200 + "é 漢字 🙂"
    pieces = b"".join(local.model.piece(t) for t in local.model.tokenize(text))
    assert pieces.decode() == text


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest(), "empty prompt"),
        (GenerateRequest(prompt="a", messages=(Message("user", "b"),)), "not both"),
        (GenerateRequest(messages=(Message("user", "hi"),)), "no chat template"),
        (GenerateRequest(prompt="a", max_tokens=0), "max tokens 0"),
        (GenerateRequest(prompt="a " * 600), "the context 256"),
        (GenerateRequest(prompt="a", sampling=Sampling(temperature=-1.0)), "temperature -1.0 is out of range"),
        (GenerateRequest(prompt="a", sampling=Sampling(temperature=float("nan"))), "temperature nan"),
        (GenerateRequest(prompt="a", sampling=Sampling(logit_bias={99999: 1.0})), "logit_bias 99999"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_computed(
    local: Session, request_: GenerateRequest, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        local.generate(request_)


def test_chat_messages_go_through_the_models_own_template(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'king' %}{{ raise_exception('no kings') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (path,) = write_random_model(RandomModel(chat_template=template), tmp_path / "chat.gguf")
    model = LlamaModel(path, remote_experts=False)
    session = Session(model, LlamaContext(model, n_context=128, n_batch=64, threads=1))
    try:
        asked = GenerateRequest(messages=(Message("system", "be brief"), Message("user", "hi")), max_tokens=3)
        plain = GenerateRequest(prompt="<system>be brief<user>hi<assistant>", max_tokens=3)
        assert session.prompt_tokens(asked) == session.prompt_tokens(plain)  # the template's BOS is not doubled
        assert session.generate(asked).text == session.generate(plain).text
        with pytest.raises(UsageError, match="refuses these messages: no kings"):
            session.generate(GenerateRequest(messages=(Message("king", "hi"),)))
    finally:
        session.close()


def test_logits_callback_sees_every_row(local: Session) -> None:
    rows: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = []
    local.generate(GenerateRequest(prompt=PROMPT, max_tokens=3), on_logits=lambda _i, row: rows.append(row.copy()))
    assert [row.shape for row in rows] == [(2048,)] * 3
    assert all(np.isfinite(row).all() for row in rows)
