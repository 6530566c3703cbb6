"""Experts computed in this process: what the dispatch client does over the network, in a dozen lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from swarmnode.backbone.hook import F32, I32, EvalHook
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import Session
from swarmnode.compute.engine import ExpertEngine
from swarmnode.onboard import ModelPack, trace_model


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


def hooked_session(pack: ModelPack, experts: InProcessExperts, *, n_context: int = 256, n_batch: int = 128) -> Session:
    model = LlamaModel(pack.backbone, remote_experts=True)
    plan = trace_model(model, {t.name: t.ne for t in pack.manifest.tensors})
    hook = EvalHook(plan, experts)
    context = LlamaContext(model, n_context=n_context, n_batch=n_batch, threads=1, callback=hook)
    return Session(model, context, hook, round_trips=lambda: len(experts.calls))


def local_session(pack: ModelPack, *, n_context: int = 256, n_batch: int = 128) -> Session:
    assert pack.source is not None
    model = LlamaModel(pack.source, remote_experts=False)
    return Session(model, LlamaContext(model, n_context=n_context, n_batch=n_batch, threads=1))
