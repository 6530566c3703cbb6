"""Experts computed in this process: what the dispatch client does over the network, in a dozen lines."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import llama_cpp
import numpy as np

from swarmnode.backbone.hook import F32, I32, EvalHook
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.sampling import SamplerChain
from swarmnode.backbone.session import GenerateRequest, GenerateResult, Session, TokenEvent
from swarmnode.backbone.speculation import Drafter
from swarmnode.backbone.trace import trace_model
from swarmnode.compute.engine import ExpertEngine
from swarmnode.onboard import ModelPack


@dataclass
class Done:
    rows: F32

    def result(self) -> F32:
        return self.rows


@dataclass
class InProcessExperts:
    """Exact mode on a local engine. `on_call` sees every call and may raise."""

    engine: ExpertEngine
    on_call: Callable[[int, F32, I32], None] = lambda _site, _x, _ids: None
    calls: list[tuple[int, int]] = field(default_factory=list)

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> Done:
        self.calls.append((site, len(ids)))
        self.on_call(site, x, ids)
        n, k = ids.shape
        rows = np.repeat(np.arange(n, dtype=np.int32), k)
        pairs = self.engine.raw_rows(site, x, rows, np.ascontiguousarray(ids.reshape(-1)))
        weighted = (pairs * weights.reshape(-1, 1)).reshape(n, k, -1)
        total = weighted[:, 0].copy()
        for rank in range(1, k):
            total += weighted[:, rank]
        return Done(total)


def hooked_session(
    pack: ModelPack,
    experts: InProcessExperts,
    *,
    n_context: int = 256,
    n_batch: int = 128,
    n_seq: int = 1,
    take_back: int = 0,
    prompt_chunk: Callable[[int], int] | None = None,
) -> Session:
    model = LlamaModel(pack.backbone, remote_experts=True, take_back=take_back)
    plan = trace_model(model, {t.name: t.ne for t in pack.manifest.tensors}, n_seq=n_seq)
    hook = EvalHook(plan, experts)
    context = LlamaContext(model, n_context=n_context, n_batch=n_batch, threads=1, callback=hook, n_seq=n_seq)
    return Session(model, context, hook, prompt_chunk=prompt_chunk)


def local_session(
    pack: ModelPack, *, n_context: int = 256, n_batch: int = 128, n_seq: int = 1, take_back: int = 0
) -> Session:
    assert pack.source is not None
    model = LlamaModel(pack.source, remote_experts=False, take_back=take_back)
    return Session(model, LlamaContext(model, n_context=n_context, n_batch=n_batch, threads=1, n_seq=n_seq))


def run_rows(
    session: Session, request: GenerateRequest, drafter: Drafter | None = None
) -> tuple[list[TokenEvent], GenerateResult, list[F32]]:
    """Events, result, and the row of logits that each token was chosen from (and the end, where there is one)."""
    events: list[TokenEvent] = []
    rows: list[F32] = []
    result = session.generate(
        request, events.append, lambda _index, logits: rows.append(logits.copy()), drafter=lambda: drafter
    )
    return [event for event in events if event.token >= 0], result, rows


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [event.token for event in events]


def chosen_from(session: Session, request: GenerateRequest, rows: list[F32]) -> list[int]:
    """What the request's samplers choose from these rows by themselves."""
    lib, n_vocab = llama_cpp.llama_cpp, session.model.n_vocab
    banned = session.model.end_tokens if request.ignore_end else ()
    sampler = SamplerChain(request.sampling, n_vocab, banned)
    table = np.zeros(n_vocab, np.dtype([("id", "i4"), ("logit", "f4"), ("p", "f4")]))
    out = []
    try:
        for token in session.prompt_tokens(request):
            sampler.accept(token)
        for row in rows:
            table["logit"], table["id"] = row, np.arange(n_vocab)
            candidates = (lib.llama_token_data * n_vocab).from_buffer(table)
            array = lib.llama_token_data_array(candidates, n_vocab, -1, False)
            lib.llama_sampler_apply(sampler._chain, ctypes.byref(array))
            out.append(array.data[array.selected].id)
            sampler.accept(out[-1])
    finally:
        sampler.close()
    return out


def forced_rows(session: Session, request: GenerateRequest, tokens: list[int]) -> list[F32]:
    """The logits before each of `tokens`, all evaluated one by one."""
    prompt = session.prompt_tokens(request)
    session.context.clear()
    session.evaluate(prompt, 0)
    rows = [session.context.logits().copy()]
    for at, token in enumerate(tokens[:-1]):
        session.evaluate([token], len(prompt) + at)
        rows.append(session.context.logits().copy())
    return rows


def assert_plain(session: Session, request: GenerateRequest, events: list[TokenEvent], rows: list[F32]) -> None:
    tokens = tokens_of(events)
    assert chosen_from(session, request, rows)[: len(tokens)] == tokens
    forced = forced_rows(session, request, tokens)
    off = [float(np.abs(one - other).max()) for one, other in zip(rows, forced, strict=False)]
    assert np.median(off) < 0.2, off  # rounding, once in the cache, stays; what is simply wrong is off by several
    assert np.quantile(off, 0.9) < 0.6, off
