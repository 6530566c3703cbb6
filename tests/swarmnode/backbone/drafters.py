"""Drafters that know, guess or lie: what the session must be right with."""

from __future__ import annotations

import random
from collections.abc import Sequence


class OracleDrafter:
    """Knows what will come (`tokens`, from the end of the prompt on); `wrong` of 10 drafts have one wrong token."""

    def __init__(
        self, tokens: Sequence[int], *, most: int = 5, wrong: int = 0, seed: int = 0, vocabulary: int = 2048
    ) -> None:
        self._vocabulary = vocabulary
        self._tokens, self._most, self._wrong = list(tokens), most, wrong
        self._random = random.Random(seed)
        self._seen = -1  # of `tokens`; the first `accept` is the prompt's
        self.accepted: list[list[int]] = []
        self.steps: list[tuple[int, float, int, int]] = []
        self.rooms: list[int] = []

    def accept(self, tokens: Sequence[int]) -> None:
        self._seen = 0 if self._seen < 0 else self._seen + len(tokens)
        self.accepted.append(list(tokens))

    def draft(self, room: int) -> list[int]:
        self.rooms.append(room)
        drafts = self._tokens[self._seen : self._seen + min(room, self._most)]
        if drafts and self._random.randrange(10) < self._wrong:
            at = self._random.randrange(len(drafts))
            drafts[at] = (drafts[at] + 1) % self._vocabulary
        return drafts

    def stepped(self, n_tokens: int, seconds: float, generations: int = 1, batch_tokens: int = 0) -> None:
        self.steps.append((n_tokens, seconds, generations, batch_tokens))


class RandomDrafter:
    """Drafts anything, of any length."""

    def __init__(self, vocabulary: int = 2048, *, most: int = 6, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._vocabulary, self._most = vocabulary, most

    def accept(self, tokens: Sequence[int]) -> None:
        pass

    def draft(self, room: int) -> list[int]:
        count = self._random.randint(0, min(room, self._most))
        return [self._random.randrange(self._vocabulary) for _ in range(count)]

    def stepped(self, n_tokens: int, seconds: float, generations: int = 1, batch_tokens: int = 0) -> None:
        pass
