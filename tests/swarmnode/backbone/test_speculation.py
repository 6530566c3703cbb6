"""The drafter as a session uses it: nothing changes but the number of steps, and never for the worse."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.backbone.draft_policy import DraftPriors
from swarmnode.backbone.speculation import Drafter, Speculator

WAN = (0.33, 0.01)  # seconds of a plain step, and of each guess: 80 ms, four remote layers
VOCABULARY = 50

Model = Callable[[Sequence[int]], list[float]]  # the text so far → the next token's probabilities


class Counted(Speculator):
    """Counts what became of its drafts: tokens drafted and accepted, and the steps, as a session does."""

    def __init__(self, priors: DraftPriors | None = None) -> None:
        super().__init__(priors)
        self.drafted = self.accepted = self.steps = 0
        self._asked: list[int] = []

    def accept(self, tokens: Sequence[int]) -> None:
        right = [guess == token for guess, token in zip(self._asked, tokens, strict=False)]
        self.accepted += right.index(False) if False in right else len(right)
        self._asked = []
        super().accept(tokens)

    def draft(self, room: int) -> list[int]:
        self._asked = super().draft(room)
        self.drafted += len(self._asked)
        self.steps += 1
        return list(self._asked)


class Oracle:
    """Drafts what it is told will come."""

    def __init__(self, coming: list[int]) -> None:
        self._coming, self._at = coming, 0

    def accept(self, tokens: Sequence[int]) -> None:
        if tokens and self._coming[self._at : self._at + 1] == list(tokens[:1]):
            self._at += len(tokens)

    def draft(self, room: int) -> list[int]:
        return self._coming[self._at : self._at + min(room, 5)]

    def stepped(self, n_tokens: int, seconds: float, generations: int = 1, batch_tokens: int = 0) -> None:
        pass


class Noise(Oracle):
    """Drafts anything."""

    def __init__(self) -> None:
        self._chance = random.Random(9)

    def accept(self, tokens: Sequence[int]) -> None:
        pass

    def draft(self, room: int) -> list[int]:
        return [self._chance.randrange(VOCABULARY) for _ in range(min(room, self._chance.randrange(6)))]


def generate(
    model: Model,
    prompt: list[int],
    count: int,
    seed: int,
    drafter: Drafter | None,
    cost: tuple[float, float] = WAN,
    swapped: bool = False,
) -> tuple[list[int], float]:
    """A session in small: samples row after row while the draft is right. Returns the tokens and the seconds."""
    chance = random.Random(seed)
    text, seconds = list(prompt), 0.0

    def sample() -> int:
        return chance.choices(range(VOCABULARY), model(text))[0]

    if drafter is not None:
        drafter.accept(prompt)
        drafter.stepped(len(prompt), cost[0] + cost[1] * len(prompt))
    text.append(sample())
    if drafter is not None:
        drafter.accept(text[-1:])
    while (left := len(prompt) + count - len(text)) > 0:
        draft = drafter.draft(left - 1) if drafter is not None and left > 1 else []
        assert len(draft) <= max(left - 1, 0)
        fresh: list[int] = []
        for row in range(len(draft) + 1):
            fresh.append(sample())
            text.append(fresh[-1])
            if row == len(draft) or fresh[-1] != draft[row]:
                break
        took = cost[0] + cost[1] * len(draft)
        seconds += took
        if drafter is not None:
            if swapped:
                drafter.accept(fresh)
            drafter.stepped(1 + len(draft), took)
            if not swapped:
                drafter.accept(fresh)
    return text[len(prompt) :], seconds


def markov(sharp: float, seed: int = 1) -> Model:
    """A model whose next token depends on the last two; the higher `sharp`, the surer."""
    chance = random.Random(seed)
    table = [[chance.random() ** sharp for _ in range(VOCABULARY)] for _ in range(211)]
    return lambda text: table[(text[-1] * 31 + (text[-2] if len(text) > 1 else 0)) % 211]


def uniform(text: Sequence[int]) -> list[float]:
    return [1.0] * VOCABULARY


def copying(text: Sequence[int]) -> list[float]:
    """Repeats what it said 30 tokens ago, mostly."""
    result = [0.05 / VOCABULARY] * VOCABULARY
    result[text[-30] if len(text) >= 30 else 0] += 0.95
    return result


PROMPT = [random.Random(0).randrange(VOCABULARY) for _ in range(60)]


@pytest.mark.parametrize("model", [markov(8.0), uniform, copying], ids=["markov", "uniform", "copying"])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_tokens_whatever_is_drafted(model: Model, seed: int) -> None:
    plain, _ = generate(model, PROMPT, 200, seed, None)
    for drafter in (Speculator(), Noise(), Oracle(plain), Oracle(plain[:20] + [1] * 300)):
        assert generate(model, PROMPT, 200, seed, drafter)[0] == plain


@pytest.mark.parametrize("make", [Counted, Noise])
def test_sampled_tokens_keep_their_distribution(make: Callable[[], Drafter]) -> None:
    """Chi-square of what followed each token of a small vocabulary, where drafts are often right and often wrong."""
    weights = [[8, 3, 1, 1], [1, 10, 2, 2], [1, 1, 3, 9], [6, 1, 4, 1]]
    drafter = make()
    tokens, _ = generate(lambda text: [*weights[text[-1]], *[0] * (VOCABULARY - 4)], [0, 1], 6000, 7, drafter)
    if isinstance(drafter, Counted):
        assert 1000 < drafter.accepted < drafter.drafted - 1000
    found = Counter(itertools.pairwise(tokens))
    for before, row in enumerate(weights):
        count = sum(found[before, after] for after in range(4))
        square = 0.0
        for after, weight in enumerate(row):
            expected = count * weight / sum(row)
            square += (found[before, after] - expected) ** 2 / expected
        assert square < 16.3  # three degrees of freedom: one run in a thousand exceeds it


def test_text_that_repeats_itself_comes_in_few_steps() -> None:
    drafter = Counted()
    _, plain = generate(copying, PROMPT, 300, 1, None)
    tokens, seconds = generate(copying, PROMPT, 300, 1, drafter)
    assert plain / seconds > 2.5
    assert drafter.steps + drafter.accepted == len(tokens) - 1
    assert drafter.accepted <= drafter.drafted


@pytest.mark.parametrize("cost", [WAN, (0.33, 0.1), (0.004, 0.002), (0.01, 0.01)])
@pytest.mark.parametrize("model", [uniform, markov(3.0)], ids=["uniform", "markov"])
def test_text_that_does_not_repeat_is_never_slower(model: Model, cost: tuple[float, float]) -> None:
    priors = DraftPriors()
    for seed in range(3):
        _, plain = generate(model, PROMPT, 150, seed, None, cost)
        _, seconds = generate(model, PROMPT, 150, seed, Speculator(priors), cost)
        assert plain / seconds >= 0.98


def test_nothing_is_drafted_where_it_cannot_pay() -> None:
    drafter = Counted()
    generate(copying, PROMPT, 300, 1, drafter, (0.01, 0.01))
    assert drafter.drafted <= 8


def test_drafting_starts_by_itself_once_its_cost_falls() -> None:
    """While nothing was drafted, guesses were scored all the same."""
    priors = DraftPriors()
    generate(copying, PROMPT, 200, 1, Speculator(priors), (0.01, 0.01))
    drafter = Counted(priors)
    generate(copying, PROMPT, 300, 2, drafter, WAN)
    assert drafter.accepted > 150


def test_habits_of_earlier_generations_help_where_a_text_does_not_repeat() -> None:
    model = markov(25.0)
    priors, forgetful = DraftPriors(), DraftPriors(memory=False)
    accepted = []
    for known in (priors, forgetful):
        for seed in range(6):
            drafter = Counted(known)
            generate(model, PROMPT[:3], 120, seed, drafter)
        accepted.append(drafter.accepted / drafter.steps)
    assert accepted[0] > 1.1 * accepted[1]


def test_without_memory_nothing_of_another_text_is_guessed() -> None:
    priors = DraftPriors(memory=False)
    generate(copying, PROMPT, 100, 1, Speculator(priors))
    drafter = Speculator(priors)
    drafter.accept(PROMPT[:20])
    drafter.stepped(20, 0.5)
    drafter.accept([PROMPT[20]])
    assert not set(drafter.draft(16)) - set(PROMPT[:21])


def test_accept_and_stepped_of_a_decode_come_in_either_order() -> None:
    for swapped in (False, True):
        drafter = Counted()
        generate(copying, PROMPT, 200, 1, drafter, WAN, swapped)
        assert drafter.accepted > 100


TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
CALL = st.one_of(
    st.tuples(st.just("accept"), TOKENS),
    st.tuples(st.just("accept"), st.lists(st.integers(0, 2), max_size=20)),
    st.tuples(st.just("draft"), st.integers(-2, 40)),
    st.tuples(
        st.just("stepped"), st.tuples(st.integers(0, 1000), st.floats(), st.integers(-1, 9), st.integers(-1, 900))
    ),
)


@settings(max_examples=100)
@given(st.lists(CALL, max_size=60))
def test_no_order_of_calls_and_no_value_breaks_it(calls: list[tuple[str, object]]) -> None:
    drafter = Speculator()
    for _, value in calls:
        if isinstance(value, list):
            drafter.accept(value)
        elif isinstance(value, tuple):
            drafter.stepped(*value)
        elif isinstance(value, int):
            assert len(drafter.draft(value)) <= max(value, 0)
