"""A small model of the same vocabulary that guesses, on this node, what the large one will say.

A `DraftModel` is loaded once and makes a `Drafter` (see `speculation.py`) for each generation; they share one context,
a sequence each. A drafter evaluates what has become certain, then goes on greedily, one token at a time, as long as
the next guess is expected to be worth its time. Called by `node.py` (to load) and by sessions.

When a guess pays: with base the seconds of a plain step, each those of one more token in it and of one guess, and p the
share of guesses as sure as this one that were right, a draft goes on while it raises (1 + Σ Π p) ÷ (base + k × each).
All of these are measured; what the small model needs to catch up counts as a guess, since the first guess follows from
it. Where guesses did not pay for a while, the small model is left alone for a while.

A drafter runs between the steps of its lane, so all of the lane's generations wait for it. A prompt is therefore caught
up with chunk by chunk, one each time it is asked, and nothing is drafted until that is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from swarmnode.backbone.draft_policy import MARGIN, MOST
from swarmnode.backbone.llama import Chunk, LlamaContext, LlamaModel
from swarmnode.backbone.step_cost import StepCost
from swarmnode.errors import ComputeError, ModelError, UsageError

BATCH = 128  # tokens of a prompt evaluated at once: a fraction of a far step even where a model makes 1000 a second
_SURENESS = (0.2, 0.4, 0.6, 0.75, 0.9, 0.97)  # bounds of the classes of a guess's own probability
_PRIOR = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)  # right guesses by class until measured, ...
_PRIOR_WEIGHT = 8.0  # ... counting for so many trials
_DECAY = 0.998  # per trial of a class: a memory of 500
_TIME_DECAY = 0.9  # per guess: its seconds are a mean of the last ten
_IDLE_STEPS = 16  # steps in a row in which nothing was worth drafting, until the small model rests for as many
_LONGEST_REST = 256  # steps; each rest is twice the one before


class DraftModel:
    """The small model, the sequences of its context, and what is known of its guesses.

    `target` is the model to guess for. Raises ModelError for a file that cannot be loaded or computes no numbers, and
    UsageError for a model of another vocabulary or one that cannot take tokens back.
    """

    def __init__(
        self, path: Path, target: LlamaModel, *, n_context: int, threads: int, drafters: int = 1, most: int = MOST
    ) -> None:
        model = LlamaModel(path, remote_experts=False)
        try:
            check_vocabulary(model, target)
            context = LlamaContext(
                model,
                n_context=n_context,
                n_batch=max(min(BATCH, n_context), drafters),
                threads=threads,
                n_seq=drafters,
            )
            if not context.take_back:
                context.close()
                raise UsageError(f"{path}: a model with recurrent layers cannot draft; give one without")
            check_numbers(context)
        finally:
            model.close()  # its context keeps it
        self.most = most
        self.context = context
        self.lock = threading.Lock()  # of the context, between the decode threads of several lanes
        self.cost = StepCost()
        self.guess_s = 0.0
        self._right = [0.0] * len(_PRIOR)
        self._trials = [0.0] * len(_PRIOR)
        self._free = list(range(drafters))[::-1]
        self._closed = False

    def __call__(self) -> ModelDrafter | None:
        """A drafter for one generation; None while all sequences are taken."""
        with self.lock:
            return ModelDrafter(self, self._free.pop()) if self._free and not self._closed else None

    def release(self, sequence: int) -> None:
        """A drafter's generation has ended."""
        with self.lock:
            self._free.append(sequence)
            if not self._closed:
                self.context.forget(sequence)

    def chance(self, sureness: int) -> float:
        """The share of guesses of a class (0 to 6, the surest) that were right."""
        right = self._right[sureness] + _PRIOR_WEIGHT * _PRIOR[sureness]
        return right / (self._trials[sureness] + _PRIOR_WEIGHT)

    def note(self, sureness: int, right: bool) -> None:
        """Note what became of a guess whose predecessors were right."""
        self._right[sureness] = self._right[sureness] * _DECAY + right
        self._trials[sureness] = self._trials[sureness] * _DECAY + 1.0

    def note_guess(self, seconds: float) -> None:
        """Note what an evaluation took: a guess, or a chunk of what was certain."""
        self.guess_s = seconds if not self.guess_s else self.guess_s * _TIME_DECAY + seconds * (1 - _TIME_DECAY)

    def close(self) -> None:
        """Free the context and the model. Drafters that are left draft nothing more."""
        with self.lock:
            self._closed = True
            self.context.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called; under `lock`."""
        return self._closed


class ModelDrafter:
    """Drafts for one generation with a sequence of the model's context; see `speculation.Drafter`."""

    def __init__(self, owner: DraftModel, sequence: int) -> None:
        self._owner, self._sequence = owner, sequence
        self._certain: list[int] = []
        self._agreed = 0  # tokens of `_certain` that the context has
        self._ahead: list[int] = []  # what it has after them: guesses
        self._draft: list[tuple[int, int]] = []  # what the next step verifies, with the class of each
        self._generating = self._broken = False
        self._others = 0  # generations that share the steps
        self._idle = self._resting = 0
        self._rest = _IDLE_STEPS

    def accept(self, tokens: Sequence[int]) -> None:
        """Take tokens that are now certain."""
        for (guess, sureness), token in zip(self._draft, tokens, strict=False):
            self._owner.note(sureness, guess == token)
            if guess != token:
                break
        self._draft = []
        self._certain += tokens

    def draft(self, room: int) -> list[int]:
        """Return at most `room` tokens that may follow."""
        self._generating = True
        owner = self._owner
        room = min(room, owner.most, owner.context.n_context - len(self._certain))
        if self._broken or room <= 0 or not owner.cost.known:
            return []
        if self._resting:
            self._resting -= 1
            return []
        try:
            with owner.lock:
                if owner.closed or not self._catch_up():
                    return []
                self._draft = self._guess(room)
        except ComputeError:  # the generation does not need its drafts
            self._broken = True
            return []
        self._idle = 0 if self._draft else self._idle + 1
        if self._draft:
            self._rest = _IDLE_STEPS
        elif self._idle >= _IDLE_STEPS:
            self._idle, self._resting, self._rest = 0, self._rest, min(2 * self._rest, _LONGEST_REST)
        return [token for token, _ in self._draft]

    def stepped(self, n_tokens: int, seconds: float, generations: int = 1, batch_tokens: int = 0) -> None:
        """Note a decode; those before the first `draft` are the prompt's."""
        self._others = max(0, generations - 1)
        cost, tokens = self._owner.cost, max(batch_tokens, n_tokens)
        if self._generating:
            # Several generations may never have a decode of one token: their first steps without drafts stand for it.
            cost.note(1 if tokens == generations and not cost.known else tokens, seconds)
        elif generations == 1:
            cost.note_prompt(n_tokens, seconds)

    def close(self) -> None:
        """Give the sequence back."""
        self._broken = True
        self._owner.release(self._sequence)

    def _guess(self, room: int) -> list[tuple[int, int]]:
        owner = self._owner
        base, each = owner.cost.seconds(1 + self._others), owner.cost.per_token + owner.guess_s
        yielded, reached = 1.0 + self._others, 1.0
        drafts: list[tuple[int, int]] = []
        while True:
            token, sureness = self._surest()
            reached *= owner.chance(sureness)
            if reached * (base + each * len(drafts)) < each * yielded * (1.0 + MARGIN):
                return drafts
            drafts.append((token, sureness))
            yielded += reached
            if len(drafts) == room:
                return drafts
            self._evaluate([token], self._agreed + len(self._ahead))
            self._ahead.append(token)

    def _catch_up(self) -> bool:
        """Evaluate a chunk of what is certain; whether the context now holds all of it, and logits after it."""
        certain = self._certain
        last = len(certain) - 1  # evaluated anew at least, for its logits
        for token in self._ahead:
            if self._agreed == last or certain[self._agreed] != token:
                break
            self._agreed += 1
        self._ahead = []
        self._agreed = min(self._agreed, last)
        self._owner.context.forget(self._sequence, self._agreed)
        chunk = certain[self._agreed : self._agreed + self._owner.context.n_batch]
        self._evaluate(chunk, self._agreed)
        self._agreed += len(chunk)
        return self._agreed == len(certain)

    def _evaluate(self, tokens: list[int], position: int) -> None:
        started = time.perf_counter()
        self._owner.context.decode_chunks([Chunk(tokens, position, self._sequence)])
        self._owner.note_guess(time.perf_counter() - started)

    def _surest(self) -> tuple[int, int]:
        """The likeliest next token, and the class of its probability."""
        logits = self._owner.context.logits()
        token = int(logits.argmax())
        probability = 1.0 / float(np.exp(logits - logits[token]).sum())
        return token, int(np.searchsorted(_SURENESS, probability))


def check_numbers(context: LlamaContext) -> None:
    """Raise ModelError, and close the context, where no guess can come of a model: its logits are NaN."""
    context.decode_chunks([Chunk([0], 0, 0)])
    if not np.isfinite(context.logits().max()):
        path = context.model.path
        context.close()
        raise ModelError(f"{path}: what it computes is no number, so it cannot draft; is the file damaged?")
    context.forget(0)


def check_vocabulary(draft: LlamaModel, target: LlamaModel) -> None:
    """Raise UsageError where a token does not mean the same in both."""
    if draft.n_vocab != target.n_vocab:
        raise UsageError(
            f"{draft.path}: its vocabulary has {draft.n_vocab} tokens and the model's {target.n_vocab}; "
            "a model that drafts needs the same"
        )
    for token in range(target.n_vocab):
        own, other = draft.piece(token, special=True), target.piece(token, special=True)
        if own != other:
            raise UsageError(
                f"{draft.path}: its token {token} is {own!r} and the model's is {other!r}; "
                "a model that drafts needs the same vocabulary"
            )
