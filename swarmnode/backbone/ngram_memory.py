"""Which token most often followed one or two others in what this node has generated: guesses where a text does not
repeat itself.

Sampled prose rarely repeats, but a language has habits: after ` self` comes `.`. The model's own output shows them, for
nothing. With it sampled text of the demo model came to 1.10–1.16 tokens per step instead of 1.07–1.14, after some two
thousand tokens.

Pure. `draft_policy.DraftPriors` holds one for all generations of a node, `speculation.py` feeds and asks it. It knows
no texts and no prompts: per context of one or two generated tokens one token and a small count. Its size is fixed
(ENTRIES × 7 bytes per n: 1.8 MB), whatever is generated. Threads that write at once lose a count, nothing else.

An entry is a majority vote (Boyer and Moore 1981): the kept token's own arrival adds one, another's takes one, and at
zero the newcomer has the place. So old habits and contexts that share a slot give way by themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

ORDERS = 2  # tokens of context: a third gains nothing here, and where a text repeats itself `ngram_lookup` knows more
ENTRIES = 1 << 17
MOST_SURE = 15  # a vote's bound: a habit of yesterday is outvoted in so many tokens
CHAIN = 4  # guesses in a row: at 0.4 each, the fifth would be reached once in 40 steps

_MULTIPLIER = 0x9E3779B1  # 2^32 ÷ the golden ratio (Knuth, The Art of Computer Programming 6.4), odd
_MASK = 0xFFFFFFFF
_SHIFT = 32 - ENTRIES.bit_length() + 1
_TAG = 0x7FFF


class NgramMemory:
    """Majority votes by context. Token ids are 0 to 2^31 − 1."""

    def __init__(self) -> None:
        self._tokens = [array("i", bytes(4 * ENTRIES)) for _ in range(ORDERS)]
        self._votes = [bytearray(ENTRIES) for _ in range(ORDERS)]
        self._tags = [array("H", bytes(2 * ENTRIES)) for _ in range(ORDERS)]

    def learn(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        """Note generated tokens; `before` are the tokens ahead of them, of which the last ORDERS matter."""
        context = list(before[-ORDERS:])
        for token in tokens:
            key = 0
            for order in range(min(ORDERS, len(context))):
                key = (key ^ (context[-1 - order] + 1)) * _MULTIPLIER & _MASK
                slot = key >> _SHIFT
                votes = self._votes[order]
                sure = votes[slot]
                if sure and self._tags[order][slot] == key & _TAG and self._tokens[order][slot] == token:
                    votes[slot] = min(sure + 1, MOST_SURE)
                elif sure > 1:
                    votes[slot] = sure - 1
                else:
                    self._tags[order][slot] = key & _TAG
                    self._tokens[order][slot] = token
                    votes[slot] = 1
            context.append(token)
            if len(context) > ORDERS:
                del context[0]

    def best(self, before: Sequence[int]) -> tuple[int, int, int]:
        """Return (token, order, votes) for the longest known context at the end of `before`, order 0 for none."""
        best = 0, 0, 0
        key = 0
        for order in range(min(ORDERS, len(before))):
            key = (key ^ (before[-1 - order] + 1)) * _MULTIPLIER & _MASK
            slot = key >> _SHIFT
            if (sure := self._votes[order][slot]) and self._tags[order][slot] == key & _TAG:
                best = self._tokens[order][slot], order + 1, sure
        return best

    def guess(self, before: Sequence[int], most: int = CHAIN) -> list[int]:
        """Return at most `most` tokens, each the best after those before it."""
        context = list(before[-ORDERS:])
        known = len(context)
        while len(context) - known < most:
            token, order, _ = self.best(context)
            if not order:
                break
            context.append(token)
        return context[known:]
