"""Guesses the next tokens of a text from the text itself: where its last few tokens stood before, and what followed.

Prompt lookup decoding (Saxena 2023; the n-gram pool of lookahead decoding, Fu et al. 2024): code, edits and answers
that quote repeat themselves, and a guess costs microseconds.

Pure. `speculation.py` owns one `NgramLookup` per generation, feeds it what is certain and asks it for drafts. Whether a
draft is worth verifying is not decided here, see `draft_policy.py`.

Layout
------
The text, and per n = 1…5 the hash chains of LZ77 compressors (zlib's `deflate`): `heads[slot]` is the latest position
whose preceding n tokens hash to that slot, `links[position]` the one before it. Positions are those of the token that
FOLLOWS the n-gram, so the text's own end is found only once it has a continuation. Chains may mix n-grams of one hash:
what is found is compared with the text. Everything is int32; heads keep 1.5 to 3 slots per token at growth and at least
one later.

    text 4 + links 5 × 4 + heads 5 × 4 × (1 to 3)  =  44 to 84 bytes per token, 84 MB at a context of 1 M

While an index grows, a passing 30 bytes per token. One token costs O(1) per n; growth and long prompts are numpy's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

LONGEST = 5  # tokens: code and edits gain up to here (4.5 → 4.9 accepted per step from 3 to 5), little beyond
KEPT = 4  # latest occurrences that are compared: as good as 16 or 64, and the walk is short
WALK = 12  # chain entries that are looked at for them: bounds what colliding n-grams can cost
TRUSTED_RUN = 8  # tokens copied in a row, after which one differing token is taken for an edit of that one
NEAR_BACK, NEAR_AHEAD = 4, 16  # tokens around the expected place of an edited copy: what an edit inserts or deletes

_FEW_SLOTS = 64
_MULTIPLIER = 0x9E3779B1  # 2^32 ÷ the golden ratio (Knuth, The Art of Computer Programming 6.4), odd
_MASK = 0xFFFFFFFF
_NEAR = sorted(range(-NEAR_BACK, NEAR_AHEAD), key=abs)
_NONE = -1

_INT = array("i").typecode


class Proposal(msgspec.Struct, frozen=True):
    """A guess and what it rests on.

    `match`: how many of the text's last tokens stood before `tokens` elsewhere, 0 for a copy continued past one edited
    token. `count`: how many of the latest such places go on as the guess does; `rivals`: how many do not.
    """

    tokens: tuple[int, ...] = ()
    match: int = 0
    count: int = 0
    rivals: int = 0


NOTHING = Proposal()


class NgramLookup:
    """The n-grams of one text that grows at its end."""

    def __init__(self) -> None:
        self._text = array(_INT)
        self._links = [array(_INT) for _ in range(LONGEST)]
        self._heads: list[array[int]] = []
        self._bits = 0
        self._keys = [0] * LONGEST  # hash of the last n tokens; those with n above the text's length mean nothing
        # What is being copied: where its next token stands, and how many have come as they stand there.
        self._source, self._run = _NONE, 0
        self._guess, self._guess_run = _NONE, 0  # the latest proposal's place: becomes the source once two were right
        self._one_edit = False  # a long copy was broken by one token, and nothing has been proposed for that yet
        self._resize(_FEW_SLOTS)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens (0 to 2^31 − 1) to the text. O(1) per token and n; a long prompt goes through numpy."""
        if len(tokens) >= 1024 and len(tokens) * 4 >= len(self._text):
            self._text.extend(tokens)
            self._source = self._guess = _NONE
            self._resize(len(self._text) + len(self._text) // 2)
            return
        for token in tokens:
            self._append(token)
        if len(self._text) > 1 << self._bits:
            self._resize(len(self._text) + len(self._text) // 2)

    def propose(self, most: int) -> Proposal:
        """Guess up to `most` tokens: fewer, namely none, only where nothing matches.

        The longest n-gram that stood before decides; among its latest places the most frequent continuation, then the
        latest, and of equal ones a place that a full draft follows. A guess that reaches the end of the text goes on
        through itself, as an overlapping copy does. Where the n-gram is short or its places disagree, a copy in
        progress goes on: the edit of a text keeps its order.
        """
        size = len(self._text)
        if not size or most <= 0:
            return NOTHING
        match, places = self._places()
        count = rivals = 0
        start = _NONE
        if match:
            start, count = self._most_frequent(places, most)
            rivals = len(places) - count
        if self._source != _NONE and (match <= 2 or rivals):
            near, agreed = self._near_source(min(match, 2))
            if near != _NONE:
                start, match, count, rivals = near, agreed, 1, 0
            elif self._one_edit and match <= 1 and self._source < size:
                self._one_edit = False
                start, match, count, rivals = self._source, 0, 1, 0
        if start == _NONE:
            return NOTHING
        if start != self._guess:
            self._guess, self._guess_run = start, self._run if start == self._source else 0
        return Proposal(self._copy(start, most), match, count, rivals)

    def _append(self, token: int) -> None:
        """Index the n-grams that now have a continuation, then the token."""
        text, keys = self._text, self._keys
        position = len(text)
        shift = 32 - self._bits
        for n, (links, heads) in enumerate(zip(self._links, self._heads, strict=True)):
            if n < position:
                slot = keys[n] >> shift
                links.append(heads[slot])
                heads[slot] = position
            else:
                links.append(_NONE)
        text.append(token)
        key = 0
        for n in range(min(LONGEST, position + 1)):
            key = keys[n] = (key ^ (text[position - n] + 1)) * _MULTIPLIER & _MASK
        if self._source != _NONE or self._guess != _NONE:
            self._follow(token, position)

    def _follow(self, token: int, position: int) -> None:
        """Keep track of the place that is being copied. A token that differs is taken for a replaced one."""
        text = self._text
        if self._guess != _NONE:
            if text[self._guess] == token:
                self._guess_run += 1
                self._guess += 1
                if self._guess_run >= 2:
                    self._source, self._run = self._guess - 1, self._guess_run - 1
            else:
                self._guess = _NONE
        if self._source != _NONE:
            if text[self._source] == token:
                self._run += 1
            else:
                self._one_edit = self._run >= TRUSTED_RUN
                self._run = 0
            self._source += 1
            if self._source > position:
                self._source = _NONE

    def _places(self) -> tuple[int, list[int]]:
        """Return the longest n with an earlier occurrence, and the latest places that follow one, newest first."""
        text = self._text
        size = len(text)
        shift = 32 - self._bits
        for n in range(min(LONGEST, size - 1), 0, -1):
            position = self._heads[n - 1][self._keys[n - 1] >> shift]
            if position == _NONE:
                continue
            links = self._links[n - 1]
            last = text[size - n :]
            places: list[int] = []
            for _ in range(WALK):
                if text[position - n : position] == last:
                    places.append(position)
                    if len(places) == KEPT:
                        break
                position = links[position]
                if position == _NONE:
                    break
            if places:
                return n, places
        return 0, []

    def _most_frequent(self, places: list[int], most: int) -> tuple[int, int]:
        """Return the place to copy from, and how many places go on with the same token."""
        text = self._text
        following = [text[place] for place in places]
        if following.count(following[0]) == len(following):
            chosen, count = following[0], len(following)
        else:
            chosen = max(following, key=following.count)  # the first of equals: the latest place
            count = following.count(chosen)
        latest = _NONE
        for place, token in zip(places, following, strict=True):
            if token == chosen:
                if place + most <= len(text):
                    return place, count
                if latest == _NONE:
                    latest = place
        return latest, count

    def _near_source(self, least: int) -> tuple[int, int]:
        """Return the place nearest to the expected one that the text's last token precedes, and the match's length.

        At least `least` tokens must agree; (_NONE, 0) where nothing near does.
        """
        text, source = self._text, self._source
        size = len(text)
        token = text[size - 1]
        for offset in _NEAR:
            place = source + offset
            if 0 < place < size and text[place - 1] == token:
                agreed = 1
                while agreed < LONGEST and place > agreed and text[place - 1 - agreed] == text[size - 1 - agreed]:
                    agreed += 1
                if agreed >= least:
                    return place, agreed
        return _NONE, 0

    def _copy(self, start: int, most: int) -> tuple[int, ...]:
        """Return `most` tokens from `start` on, running on through themselves at the text's end."""
        tokens = self._text[start : start + most].tolist()
        known = len(tokens)
        while len(tokens) < most:
            tokens += tokens[len(tokens) - known : len(tokens) - known + most - len(tokens)]
        return tuple(tokens)

    def _resize(self, slots: int) -> None:
        """Index the whole text anew, with a power of two of at least `slots` slots per n."""
        self._bits = max(slots, _FEW_SLOTS).bit_length()
        size = len(self._text)
        text = np.frombuffer(self._text, np.int32) if size else np.zeros(0, np.int32)
        links, heads = [], []
        key = np.zeros(size, np.uint32)  # of the n tokens that end at each position
        for n in range(1, LONGEST + 1):
            later = key[n - 1 :] if n > 1 else key
            token = text[: size - n + 1].astype(np.uint32) + np.uint32(1)
            key = np.zeros(size, np.uint32)
            if size >= n:
                key[n - 1 :] = (later ^ token) * np.uint32(_MULTIPLIER)
                self._keys[n - 1] = int(key[-1])
            link, head = _chains(key[n - 1 : size - 1] >> np.uint32(32 - self._bits), n, size, 1 << self._bits)
            links.append(link)
            heads.append(head)
        self._links, self._heads = links, heads


def _chains(slots: NDArray[np.uint32], n: int, size: int, n_slots: int) -> tuple[array[int], array[int]]:
    """Return (links, heads) for positions n…size − 1, whose preceding n-grams have these slots."""
    link = np.full(size, _NONE, np.int32)
    head = np.full(n_slots, _NONE, np.int32)
    if len(slots):
        order = np.argsort(slots, kind="stable").astype(np.int32)
        ordered = slots[order]
        same = ordered[1:] == ordered[:-1]
        link[order[1:][same] + n] = order[:-1][same] + n
        last = np.append(~same, True)
        head[ordered[last]] = order[last] + n
    return _array(link), _array(head)


def _array(values: NDArray[np.int32]) -> array[int]:
    """Return the same int32 as an `array`, whose single elements Python reads three times as fast as numpy's."""
    result = array(_INT)
    result.frombytes(values.tobytes())
    return result
