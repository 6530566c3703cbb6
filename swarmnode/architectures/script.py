"""The text that a tiny model is run on, and how: a prompt, steps of one token, and tokens taken back.

Run twice with the same batches, by a plain local model and by one whose experts are elsewhere, so that their bits can
be compared. Called by `check.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from swarmnode.architectures.metadata import VOCAB
from swarmnode.backbone.graph_trace import GraphPlan
from swarmnode.backbone.hook import F32, EvalHook, Experts
from swarmnode.backbone.library import library
from swarmnode.backbone.llama import Chunk, LlamaContext, LlamaModel
from swarmnode.errors import ComputeError, ModelError

PROMPT = 20  # tokens
STEPS = 4  # single ones after it
TAKEN_BACK = 4  # tokens that are evaluated and taken back
KEPT = 2  # tokens evaluated with them that stay: as many as it takes for the shape not to decide bits
AFTER = 4  # tokens evaluated where they were
WRONG = 7
N_BATCH = 32
N_CONTEXT = 64


@dataclass(slots=True)
class Rows:
    """Logits: of every token of the prompt and the steps, and of tokens that follow wrong ones that were taken back.

    `fresh` are those of the same tokens without anything taken back; both empty where the context cannot.
    """

    plain: list[F32] = field(default_factory=list)
    again: list[F32] = field(default_factory=list)
    fresh: list[F32] = field(default_factory=list)

    @property
    def rollback(self) -> str:
        """What taking back came to: "exact", "differs", or "refused" where the context does not offer it."""
        if not self.again:
            return "refused"
        return "exact" if same(self.again, self.fresh) else "differs"


def script_tokens() -> list[int]:
    """The tokens of the script, in order."""
    rng = np.random.default_rng(5)
    tokens: list[int] = rng.integers(3, VOCAB, PROMPT + STEPS + KEPT + AFTER).tolist()
    return tokens


def same(one: list[F32], other: list[F32]) -> bool:
    """Whether these are the same bits."""
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def run_script(model: LlamaModel, plan: GraphPlan | None = None, experts: Experts | None = None) -> Rows:
    """Run the script in a new context of a model, with a hook where there are `experts`.

    Raises ModelError where the logits are none, ComputeError where llama.cpp fails, and what the experts raise.
    """
    runner = _Runner(model, plan, experts)
    try:
        try:
            return runner.run()
        except _NoLogits:
            runner.embed()
            return runner.run()
    finally:
        runner.context.close()


class _NoLogits(Exception):
    """This model computes no logits."""


class _Runner:
    def __init__(self, model: LlamaModel, plan: GraphPlan | None, experts: Experts | None) -> None:
        self.hook = EvalHook(plan, experts) if plan is not None and experts is not None else None
        self.context = LlamaContext(model, n_context=N_CONTEXT, n_batch=N_BATCH, threads=1, callback=self.hook)
        self.tokens = script_tokens()
        self.embeds = False

    def embed(self) -> None:
        """Begin again, for embeddings."""
        self.embeds = True
        library().llama_set_embeddings(self.context.handle, True)
        self.context.clear()

    def run(self) -> Rows:
        rows = Rows(self.start())
        if self.context.take_back < TAKEN_BACK:
            return rows
        at = PROMPT + STEPS
        # Recurrent layers keep no state from before an evaluation, so some of it stays.
        for kept in (KEPT,) if self.context.model.is_recurrent else (KEPT, 0):
            certain, after = self.tokens[at : at + kept], self.tokens[at + kept :]
            self.decode([*certain, *[WRONG] * TAKEN_BACK], at)
            self.context.forget(0, at + kept)
            rows.again += self.decode(after, at + kept)
            self.context.clear()
            self.start()
            if kept:
                self.decode(certain, at)
            rows.fresh += self.decode(after, at + kept)
            self.context.clear()
            self.start()
        return rows

    def start(self) -> list[F32]:
        rows = self.decode(self.tokens[:PROMPT], 0)
        for at in range(PROMPT, PROMPT + STEPS):
            rows += self.decode(self.tokens[at : at + 1], at)
        return rows

    def decode(self, tokens: list[int], at: int) -> list[F32]:
        if self.hook is not None:
            self.hook.begin()
        try:
            found = self.context.decode_chunks([Chunk(tokens, at, 0, len(tokens))])[0]
        except ComputeError:
            if self.hook is not None:
                self.hook.check()  # which knows better
            raise
        if self.hook is not None:
            self.hook.check()
        rows = [self.row(row) for row in found]
        if not all(np.isfinite(row).all() for row in rows):
            raise ModelError("the logits hold NaN or infinity")
        return rows

    def row(self, number: int) -> F32:
        """The logits of a token; of a model that has none (it embeds texts), the token's embedding."""
        if not self.embeds:
            logits = self.context.logits(number).copy()
            if logits.any():
                return logits
            raise _NoLogits
        embedding = library().llama_get_embeddings_ith(self.context.handle, number)
        if not embedding:
            raise ModelError("llama.cpp computes neither logits nor embeddings of it")
        width = library().llama_model_n_embd(self.context.model.handle)
        return np.ctypeslib.as_array(embedding, (width,)).copy()
