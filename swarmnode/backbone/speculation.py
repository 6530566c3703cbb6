"""Speculative decoding: guesses of the next tokens are verified by the model in one step instead of one step each.

Pure. A session makes one `Drafter` per generation and asks it before every step. `Speculator` is the one that needs no
second model: `ngram_lookup.py` guesses from the text, `draft_policy.py` says how many guesses pay.

What the session does with a draft d₁…d_k after the last certain token t: it decodes t, d₁, …, d_k in one batch, which
gives k + 1 rows of logits, and samples row 0, then row 1, … each as a plain step would, until a sampled token differs
from the draft's or the draft ends. All sampled tokens are certain; what was decoded behind the last of them is rolled
back.

**Why the output is the plain one.** Row i holds the logits after t, d₁, …, d_i. It is sampled only if d₁, …, d_i are
the tokens that rows 0 … i − 1 gave, so it is the row that a plain step would have had there, and its token is drawn
from it, by the same sampler, whatever the draft said: a draft decides which rows exist already, never what is drawn.
(The rule of Leviathan et al. 2023, accept with min(1, p/q) and else draw from the rest, is for drafts that are drawn
from a distribution q; a draft that is one given token has q = 1, and then it is the same as drawing from p and
comparing.) By induction every token has the plain run's conditional distribution, and so has the text. Rows behind a
difference are never sampled: the sampler draws one random number per token and its penalties see the tokens in order,
so equal logits and an equal seed give equal tokens. Kernels may round a batch of k + 1 tokens differently from one
token; a near-tie can flip by that, with or without speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swarmnode.backbone.draft_policy import MOST, DraftPolicy, DraftPriors, kind_of_habit, kind_of_match
from swarmnode.backbone.ngram_lookup import NgramLookup
from swarmnode.backbone.ngram_memory import ORDERS

LONG_MATCH = 2  # tokens: what rests on more is not compared with habits
DOZE_AFTER, DOZE_EVERY = 32, 4  # steps without a draft, after which only one step in so many is looked at


class Drafter(Protocol):
    """Guesses the next tokens of one generation. Every method is called on the session's thread.

    The order of calls: `accept(prompt)`; `stepped` after each chunk of the prompt; then per step `accept` with the
    tokens that the step made certain, `draft`, the decode, `stepped`. (`stepped` and `accept` of one decode may come
    in either order.) What `draft` returned is what the next decode verifies, all of it.
    """

    def accept(self, tokens: Sequence[int]) -> None:
        """Take tokens that are now certain: the prompt's, or a step's (accepted drafts, then the sampled one)."""
        ...

    def draft(self, room: int) -> list[int]:
        """Return at most `room` tokens that may follow what was accepted, empty for a plain step."""
        ...

    def stepped(self, n_tokens: int, seconds: float, generations: int = 1, batch_tokens: int = 0) -> None:
        """Note a decode: this generation had `n_tokens` in it (1 + its draft, or a chunk of its prompt).

        Where several generations share a decode: how many had tokens in it, and how many tokens it had in all (0: only
        this generation's).
        """
        ...


class Speculator:
    """The `Drafter` without a second model: n-gram lookup, and a draft length that is 0 where guessing does not pay."""

    def __init__(self, priors: DraftPriors | None = None, most: int = MOST) -> None:
        """`priors` is what the node's generations share, new by default; at most `most` guesses per step."""
        priors = priors if priors is not None else DraftPriors()
        self._lookup = NgramLookup()
        self._memory = priors.memory
        self._policy = DraftPolicy(priors, most)
        self._tail: list[int] = []  # the last tokens, for the memory
        self._most = most
        self._draft: Sequence[int] = ()  # what the decode in progress verifies
        self._guess: Sequence[int] = ()  # what is scored: the draft and what would have followed it, or a shadow
        self._kind = self._place = 0
        self._generating = False  # whether the prompt is behind: what comes before the first `draft` is the prompt's
        self._undrafted = 0  # steps since the last draft

    def accept(self, tokens: Sequence[int]) -> None:
        """Take tokens that are now certain, and score the guesses against them."""
        if self._guess:
            self._score(tokens)
        if self._draft:
            right = 0
            for guess, token in zip(self._draft, tokens, strict=False):
                if guess != token:
                    break
                right += 1
            self._draft = ()
            self._policy.note_gained(right)
        self._lookup.extend(tokens)
        if self._memory is not None and self._generating:  # the prompt is no output of the model
            self._memory.learn(self._tail, tokens)
        self._tail = [*self._tail, *tokens[-ORDERS:]][-ORDERS:]

    def draft(self, room: int) -> list[int]:
        """Return at most `room` guesses, empty where a plain step is better.

        The guess is made either way: what is not drafted is scored as a shadow, as far as it goes on being right.
        """
        self._generating = True
        self._draft = ()
        self._undrafted += 1
        if self._undrafted > DOZE_AFTER and self._undrafted % DOZE_EVERY:
            return []
        guess, kind = self._best_guess()
        if not guess:
            return []
        guesses = self._policy.choose(kind, room).guesses
        if guesses or not self._guess:
            self._guess, self._kind, self._place = guess, kind, 0
        if not guesses:
            return []
        self._undrafted = 0
        self._draft = guess[:guesses]
        return list(self._draft)

    def stepped(self, n_tokens: int, seconds: float, generations: int = 1, batch_tokens: int = 0) -> None:
        """Note a decode; those before the first `draft` are the prompt's."""
        prompt = not self._generating
        self._policy.note_step(n_tokens, seconds, prompt=prompt, generations=generations, batch_tokens=batch_tokens)

    def _best_guess(self) -> tuple[Sequence[int], int]:
        """Return the surest guess and its kind: from the text, or from what often follows such tokens."""
        proposal = self._lookup.propose(self._most)
        kind = kind_of_match(proposal.match, proposal.count, proposal.rivals)
        if self._memory is not None and proposal.match <= LONG_MATCH:
            _, order, votes = self._memory.best(self._tail)
            if order:
                habit, sure = kind_of_habit(order, votes), self._policy.acceptance.first
                if not proposal.tokens or sure(habit) > sure(kind):
                    return self._memory.guess(self._tail), habit
        return proposal.tokens, kind

    def _score(self, tokens: Sequence[int]) -> None:
        """Compare the guess with what came, token by token up to the first that differs."""
        guess, place = self._guess, self._place
        for token in tokens:
            right = guess[place] == token
            self._policy.acceptance.note(self._kind, place, right)
            place += 1
            if not right or place == len(guess):
                self._guess = ()
                return
        self._place = place
