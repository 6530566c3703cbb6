"""Habits: the token that most often followed one or two others."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.backbone.ngram_memory import MOST_SURE, NgramMemory

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=50)


def test_what_followed_before_is_guessed_in_a_chain() -> None:
    memory = NgramMemory()
    memory.learn([], [1, 2, 3, 4, 5])
    assert memory.guess([9, 1]) == [2, 3, 4, 5]
    assert memory.guess([9, 1], 2) == [2, 3]
    assert memory.best([9, 1]) == (2, 1, 1)
    assert memory.best([1, 2]) == (3, 2, 1)
    assert memory.guess([8]) == []
    assert memory.guess([]) == []


def test_a_longer_context_goes_before_a_shorter_one() -> None:
    memory = NgramMemory()
    for _ in range(5):
        memory.learn([], [2, 30])
    memory.learn([], [1, 2, 40])
    assert memory.best([7, 2])[0] == 30
    assert memory.best([1, 2])[0] == 40


def test_the_majority_wins_and_an_old_habit_is_outvoted() -> None:
    memory = NgramMemory()
    for token in [10, 11, 10, 12, 10]:
        memory.learn([1], [token])
    assert memory.best([1]) == (10, 1, 1)
    for _ in range(100):
        memory.learn([1], [10])
    assert memory.best([1]) == (10, 1, MOST_SURE)
    for _ in range(MOST_SURE + 1):
        memory.learn([1], [20])
    assert memory.best([1])[0] == 20


@settings(max_examples=50)
@given(TOKENS, TOKENS, TOKENS)
def test_any_tokens_are_taken_and_only_learned_ones_are_guessed(
    before: list[int], learned: list[int], at: list[int]
) -> None:
    memory = NgramMemory()
    memory.learn(before, learned)
    assert set(memory.guess(at)) <= set(learned)
