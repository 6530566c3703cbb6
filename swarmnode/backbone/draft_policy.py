"""How many guessed tokens a step should verify, 0 where guessing does not pay: from measured acceptance and cost alone.

Pure: seconds come in, nothing is timed here. `speculation.py` makes one `DraftPolicy` per generation; all generations
of a node share one `DraftPriors`, so that the second one starts where the first ended.

A step that verifies k guesses costs about plain + k × per token; over a WAN the plain step is nearly all round trips,
so guesses are cheap (0.33 s and 0.01 s at 80 ms and four remote layers), on one machine they are dear. It yields
1 + Σᵢ Π_{j≤i} pⱼ tokens on average (Leviathan, Kalman and Matias 2023, section 3.3, with p by kind of guess and place
in the draft). The k with the highest yield per second is taken if it beats a plain step by MARGIN.

**Never a loss.** A belief can be wrong, so each generation has a purse, in seconds: it starts with START of a plain
step, gets ALLOWED of every second that passes and what accepted guesses saved, and pays for verifying. No draft is made
whose cost, if all of it is rejected, the purse does not cover. So whatever is believed, a generation ends at most
ALLOWED + START ÷ steps behind plain decoding (as far as the seconds of a plain step are known). Of what the node's
generations have gained up to CARRIED of a plain step is added: one that begins with bad luck is not stopped at once.

**Acceptance for free.** Guesses are scored against what really came whether they were verified or not, so that drafting
finds out while it is off that it would pay.
"""

from __future__ import annotations

from typing import NamedTuple

from swarmnode.backbone.ngram_memory import NgramMemory
from swarmnode.backbone.step_cost import CLIPPED, LARGEST, StepCost, is_time

__all__ = ["Acceptance", "Choice", "DraftPolicy", "DraftPriors", "StepCost", "kind_of_habit", "kind_of_match"]

MOST = 16  # guesses: at 0.9 acceptance the 16th is reached by one in five, and the batch stays small for every engine

# How sure must it be.
MARGIN = 0.02  # the predicted gain below which a plain step is taken: what prediction errors would eat
START = 0.25  # plain steps: lets the first guesses of a generation of 50 tokens cost 0.5 % of it
CARRIED = 1.0  # plain steps: 1 % of 100 tokens, and gained before by others
ALLOWED = 0.01  # of the time: what being wrong may cost, half of the 2 % that would be noticed
PURSE = 8.0  # plain steps: profit beyond this is kept, not staked
FIRST_TRIES, FIRST_MOST = 3, 2  # until so many drafts were timed, they are short:
CARE = 3.0  # … a guess may cost so many times what prompts suggest
REFERENCE = 64  # steps × gain²: after so many without a plain one, one is taken, so that plain steps stay known
STALE = 32  # steps without a draft, after which guesses are tried again at half the believed cost

# Acceptance: what guesses rest on ("kind"), and the prior of the first guess of each, measured on held-out Python and
# English docstrings. By the match's length and its places: one; several, all alike; most, or few, of them as guessed.
_BY_MATCH = (
    (0.50, 0.50, 0.50, 0.50),  # an edited copy continued
    (0.20, 0.45, 0.32, 0.13),
    (0.43, 0.73, 0.38, 0.22),
    (0.54, 0.79, 0.42, 0.27),
    (0.58, 0.84, 0.48, 0.26),
    (0.74, 0.93, 0.58, 0.28),
)
# By the order of a habit (`ngram_memory`) and its votes: 1, 2–3, 4 and more.
_BY_HABIT = ((0.11, 0.24, 0.37), (0.19, 0.38, 0.54))
_LONE, _AGREED, _MAJORITY, _CONTESTED = range(4)
_LONGEST_MATCH = len(_BY_MATCH) - 1
_MATCH_KINDS = len(_BY_MATCH) * 4
_KINDS = _MATCH_KINDS + 2 * 3
_PLACES = (0, 1, 2, 2, 3, 3, 3, 3)  # class of a place in the draft, later ones are of the last class
_N_PLACES = 5
_PRIOR_WEIGHT = 20.0  # trials that the prior counts for against this node's own
_SHARED_WEIGHT = 6.0  # trials that the node's figure counts for against this generation's
_NODE_DECAY, _GENERATION_DECAY = 0.999, 0.97  # per trial of a class: memories of 1000 and 33 trials
_UNLIKELY = 0.02  # a guess that is reached less often is not worth computing with


class Acceptance:
    """How often guesses were right, by kind and place in the draft, of those whose predecessors were right.

    The newest trials count most. A kind without trials of its own has what `above` says, and at last the prior.
    """

    def __init__(self, above: Acceptance | None = None) -> None:
        self._above = above
        self._weight = _PRIOR_WEIGHT if above is None else _SHARED_WEIGHT
        self._decay = _NODE_DECAY if above is None else _GENERATION_DECAY
        self._right = [0.0] * len(_PRIORS)
        self._trials = [0.0] * len(_PRIORS)

    def note(self, kind: int, place: int, right: bool) -> None:
        """Note one trial, here and above."""
        index = kind * _N_PLACES + (_PLACES[place] if place < len(_PLACES) else _N_PLACES - 1)
        self._right[index] = self._right[index] * self._decay + right
        self._trials[index] = self._trials[index] * self._decay + 1.0
        if self._above is not None:
            self._above.note(kind, place, right)

    def first(self, kind: int) -> float:
        """Return the expected share of right guesses of a kind at the first place of a draft."""
        index = kind * _N_PLACES
        above = _PRIORS[index] if self._above is None else self._above.first(kind)
        return (self._right[index] + self._weight * above) / (self._trials[index] + self._weight)

    def by_place(self, kind: int) -> list[float]:
        """Return the expected share of right guesses of a kind, 0 to 1, by class of place."""
        start, weight = kind * _N_PLACES, self._weight
        end = start + _N_PLACES
        above = _PRIORS[start:end] if self._above is None else self._above.by_place(kind)
        return [
            (right + weight * p) / (trials + weight)
            for right, trials, p in zip(self._right[start:end], self._trials[start:end], above, strict=True)
        ]


class DraftPriors:
    """What the generations of one node know together: what a step costs, how often guesses are right, and habits.

    `memory` False: no generation's output helps another's guesses. Outputs are the same with and without, but how fast
    tokens come then says nothing about what others have generated.
    """

    def __init__(self, *, memory: bool = True) -> None:
        self.cost = StepCost()
        self.acceptance = Acceptance()
        self.memory = NgramMemory() if memory else None
        self.gained = 0.0  # plain steps, 0 to CARRIED: what the latest drafts have saved beyond their cost


class Choice(NamedTuple):
    """How many guesses to verify, and the tokens per second expected of it relative to a plain step."""

    guesses: int
    gain: float


PLAIN = Choice(0, 1.0)


class DraftPolicy:
    """The draft length of one generation, step by step. Not thread safe; `priors` may be shared between threads."""

    def __init__(self, priors: DraftPriors, most: int = MOST) -> None:
        """At most `most` guesses per step."""
        self.cost = priors.cost
        self._priors = priors
        self._start = START + priors.gained  # plain steps; their seconds may not be known yet
        self.acceptance = Acceptance(priors.acceptance)
        self._most = most
        self._purse = 0.0  # seconds, beyond that
        self._generations = 1
        self._since_plain = 0
        self._since_draft = 0

    def choose(self, kind: int, room: int) -> Choice:
        """Return how many guesses of this kind (`kind_of_match`, `kind_of_habit`) to verify, at most `room`."""
        cost = self.cost
        if room <= 0 or not cost.known:
            return PLAIN
        others = self._generations - 1  # their tokens come more slowly too when this one's step grows
        base = cost.seconds(self._generations)
        each = cost.per_token
        stake = max(each, 1e-9) * self._generations
        room = min(room, self._most)
        if cost.draft_steps < FIRST_TRIES or self._since_draft >= STALE:
            stake *= CARE
            room = min(room, FIRST_MOST)
        if self._since_draft >= STALE:
            each *= 0.5
        if self.acceptance.first(kind) * base <= each * (1 + others):
            return PLAIN  # no guess is reached more often than the first is right
        room = min(room, int((self._purse + self._start * cost.plain) / stake))
        probabilities = self.acceptance.by_place(kind)
        reached, yielded = 1.0, 1.0
        best, best_rate = 0, (1.0 + others) / base * (1.0 + MARGIN)
        for guesses in range(1, room + 1):
            place = guesses - 1
            reached *= probabilities[_PLACES[place] if place < len(_PLACES) else _N_PLACES - 1]
            if reached < _UNLIKELY:
                break
            yielded += reached
            rate = (yielded + others) / (base + each * guesses)
            if rate > best_rate:
                best, best_rate = guesses, rate
        if not best:
            return PLAIN
        gain = best_rate * base / (1.0 + others)
        if self._since_plain > REFERENCE * gain * gain:
            return PLAIN
        return Choice(best, gain)

    def note_step(
        self, tokens: int, seconds: float, *, prompt: bool = False, generations: int = 1, batch_tokens: int = 0
    ) -> None:
        """Note a decode in which this generation had `tokens` (1 + guesses, or a chunk of its prompt).

        `generations` had tokens in it, `batch_tokens` together (0: this one's alone).
        """
        in_all = max(batch_tokens, tokens)
        if prompt:
            if generations == 1:
                self.cost.note_prompt(in_all, seconds)
            return
        self._generations = max(1, generations)
        guesses = tokens - 1
        if guesses > 0:
            self._since_plain += 1
            self._since_draft = 0
        else:
            self._since_plain = 0
            self._since_draft += 1
        expected = self.cost.per_token * guesses
        over = 0.0
        if is_time(seconds) and in_all <= LARGEST * self._generations:
            self.cost.note(in_all, seconds, self._generations)
            plain, expected = self.cost.plain, self.cost.per_token * guesses
            self._purse = min(self._purse + ALLOWED * min(seconds, CLIPPED * plain), PURSE * plain)
            bound = 2.0 * expected + 0.05 * plain  # a step may stray for other reasons than its guesses
            over = min(max(seconds - self.cost.seconds(in_all), -bound), bound)
        if guesses > 0:
            self._earn(-(expected + over) * self._generations)

    def note_gained(self, guesses: int) -> None:
        """Note that so many verified guesses were right: each saved a plain step."""
        self._earn(guesses * self.cost.seconds(self._generations))

    def _earn(self, seconds: float) -> None:
        plain, priors = self.cost.plain, self._priors
        self._purse = min(self._purse + seconds, PURSE * plain)
        if plain > 0:
            priors.gained = min(max(priors.gained + seconds / plain, 0.0), CARRIED)


def kind_of_match(match: int, count: int = 1, rivals: int = 0) -> int:
    """Return the kind of a guess that rests on a match of so many tokens, with places for it and against it."""
    if rivals:
        agreement = _MAJORITY if count > rivals else _CONTESTED
    elif count > 1:
        agreement = _AGREED
    else:
        agreement = _LONE
    return min(max(match, 0), _LONGEST_MATCH) * 4 + agreement


def kind_of_habit(order: int, votes: int) -> int:
    """Return the kind of a guess that rests on a habit: 1 or 2 tokens of context, and its votes."""
    return _MATCH_KINDS + (min(order, 2) - 1) * 3 + (votes > 1) + (votes > 3)


def _priors() -> list[float]:
    """Return the acceptance before any trial, by kind and class of place.

    The guesses of a copy that were right so far have matched more of the text; those of a habit are no surer.
    """
    result: list[float] = []
    for kind in range(_KINDS):
        if kind >= _MATCH_KINDS:
            result += [_BY_HABIT[(kind - _MATCH_KINDS) // 3][(kind - _MATCH_KINDS) % 3]] * _N_PLACES
            continue
        match, agreement = divmod(kind, 4)
        later = _AGREED if agreement == _AGREED else _LONE
        result.append(_BY_MATCH[match][agreement])
        result += [_BY_MATCH[min(_LONGEST_MATCH, match + place)][later] for place in range(1, _N_PLACES)]
    return result


_PRIORS = _priors()
