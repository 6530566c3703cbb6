"""What a decode takes by its number of tokens: plain + per_token × (tokens − 1) seconds, learned from decodes.

Pure: seconds come in, nothing is timed here. `draft_policy.py` and `draft_model.py` decide by it how much to draft.

A filter with two states (Kalman 1960). The plain step follows a link that changes, the tokens' part moves slowly, so
the seconds of drafts alone tell what a plain step would take now. A single stray step counts for CLIPPED standard
deviations; several in a row on one side mean that the link has changed, and both states are open again.
"""

from __future__ import annotations

import math

LEAST_PLAIN = 2  # plain steps that must have been timed before they can be compared with
LARGEST = 32  # tokens per generation: above it, a prompt's chunk is in the decode, and it tells nothing about drafts
CLIPPED = 3.0  # standard deviations

_DRIFT_PLAIN, _DRIFT_TOKEN = 0.02, 0.02  # of the value, per step
_FIRST_NOISE, _LEAST_NOISE = 0.1, 0.01  # of a plain step, standard deviation
_NOISE_MEMORY = 0.05  # weight of a step in the noise's mean
_SURPRISES = 3  # strays in a row on one side: the link has changed
_PROMPT = 16  # tokens: shorter chunks of a prompt say too little
_LEAST_TOKEN, _MOST_TOKEN = 0.002, 1.0  # of a plain step: what prompts may make of a guess's cost
_DOUBT = 0.1  # of a plain step: how far they may be wrong, besides by their own figure


class StepCost:
    """Seconds of a decode as plain + per_token × (tokens − 1), learned from decodes; shared by all of a node's lanes.

    Its state is replaced as a whole: threads that note steps at once lose a step, nothing else.
    """

    def __init__(self) -> None:
        self.plain_steps = 0
        self.draft_steps = 0
        self._state = (0.0, 0.0, 0.0, 0.0, 0.0)  # plain, per_token, and their covariance: pp, pt, tt
        self._noise = 0.0
        self._surprise = 0
        self._prompt: tuple[int, float] | None = None

    @property
    def plain(self) -> float:
        """Seconds of a decode of one token, 0 while unknown."""
        return self._state[0]

    @property
    def per_token(self) -> float:
        """Seconds of each further token."""
        return self._state[1]

    @property
    def known(self) -> bool:
        """Whether plain steps were timed."""
        return self.plain_steps >= LEAST_PLAIN

    def seconds(self, tokens: int) -> float:
        """Return what a decode of so many tokens is expected to take."""
        plain, per_token = self._state[:2]
        return plain + per_token * (tokens - 1)

    def note_prompt(self, tokens: int, seconds: float) -> None:
        """Note a chunk of a prompt: an idea of a token's cost until drafts have been timed."""
        if tokens >= _PROMPT and is_time(seconds) and not self.draft_steps:
            self._prompt = tokens, seconds
            self._use_prompt()

    def note(self, tokens: int, seconds: float, generations: int = 1) -> None:
        """Note a decode of `tokens` in all, of so many generations: those beyond one each are guesses.

        Nothing where it is a prompt's, or where seconds cannot be meant.
        """
        further, guesses = tokens - 1, max(tokens - generations, 0)
        if not 1 <= tokens <= LARGEST * max(generations, 1) or not is_time(seconds):
            return
        if not self.plain_steps and guesses:
            return  # nothing to compare it with yet
        if not self.plain_steps:
            self._state = seconds, 0.05 * seconds, (0.3 * seconds) ** 2, 0.0, (0.05 * seconds) ** 2
            self._noise = (_FIRST_NOISE * seconds) ** 2
        else:
            self._update(further, seconds)
        if guesses:
            self.draft_steps += 1
        else:
            self.plain_steps += 1
        if not self.draft_steps:
            self._use_prompt()

    def _use_prompt(self) -> None:
        if self._prompt is None or not self.plain_steps:
            return
        tokens, seconds = self._prompt
        plain, _, pp, _, _ = self._state
        per_token = min(max((seconds - plain) / (tokens - 1), _LEAST_TOKEN * plain), _MOST_TOKEN * plain)
        self._state = plain, per_token, pp, 0.0, (per_token + _DOUBT * plain) ** 2

    def _update(self, further: int, seconds: float) -> None:
        plain, per_token, pp, pt, tt = self._state
        pp += (_DRIFT_PLAIN * plain) ** 2
        tt += (_DRIFT_TOKEN * per_token + _LEAST_TOKEN * 0.1 * plain) ** 2
        error = seconds - plain - per_token * further
        spread = pp + 2 * further * pt + further * further * tt + self._noise
        bound = CLIPPED * math.sqrt(spread)
        if abs(error) <= bound:
            self._surprise = 0
        else:
            self._surprise = max(self._surprise, 0) + 1 if error > 0 else min(self._surprise, 0) - 1
            if abs(self._surprise) >= _SURPRISES:
                self._surprise = 0
                pp += error * error
                tt += (error / further) ** 2 if further else 0.0
                spread = pp + 2 * further * pt + further * further * tt + self._noise
            else:
                error = math.copysign(bound, error)
        self._noise += _NOISE_MEMORY * (min(error * error, bound * bound) - self._noise)
        self._noise = max(self._noise, (_LEAST_NOISE * plain) ** 2)
        gain_p, gain_t = (pp + further * pt) / spread, (pt + further * tt) / spread
        row_p, row_t = pp + further * pt, pt + further * tt
        self._state = (
            max(plain + gain_p * error, 0.05 * plain),
            max(per_token + gain_t * error, 0.0),
            max(pp - gain_p * row_p, 0.0),
            pt - gain_p * row_t,
            max(tt - gain_t * row_t, 0.0),
        )


def is_time(seconds: float) -> bool:
    """Whether this can have been measured: between a nanosecond and some days, and no NaN."""
    return 1e-9 < seconds < 1e6
