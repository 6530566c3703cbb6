"""Runs text through a model piece by piece and gives all its logits: one llama context, one hook, no sampling.

Called by the gate and by `bench/fidelity.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmnode.backbone.graph_trace import GraphPlan
from swarmnode.backbone.hook import F32, EvalHook, Experts
from swarmnode.backbone.llama import LlamaContext, LlamaModel

CHUNK = 128  # tokens evaluated together, each chunk a text of its own


class Forward:
    """Experts answer through the hook, or a `hook` of the caller's; with neither, the model is evaluated plainly."""

    def __init__(
        self,
        model: LlamaModel,
        plan: GraphPlan | None = None,
        experts: Experts | None = None,
        *,
        hook: EvalHook | None = None,
        threads: int = 1,
    ) -> None:
        self._hook = EvalHook(plan, experts) if plan is not None and experts is not None else hook
        self._context = LlamaContext(model, n_context=CHUNK, n_batch=CHUNK, threads=threads, callback=self._hook)
        self._n_vocab = model.n_vocab

    def logits(self, tokens: Sequence[int], at: int = 0) -> F32:
        """Logits [n, n_vocab] of tokens evaluated in one batch: a new text, or, from `at` on, more of the last one.

        A text has up to CHUNK tokens. Raises what the experts raise, ComputeError, TraceError.
        """
        if not at:
            self._context.clear()
        if self._hook is not None:
            self._hook.begin()
        try:
            self._context.decode(tokens, at, all_logits=True)
        finally:
            if self._hook is not None:
                self._hook.check()
        out = np.empty((len(tokens), self._n_vocab), np.float32)
        for i in range(len(tokens)):
            out[i] = self._context.logits(i)
        return out

    def close(self) -> None:
        """Free the context. The model stays."""
        self._context.close()
