"""The seconds of a decode by its tokens, learned from steps as links really give them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.backbone.step_cost import StepCost


def taught(plain: float, per_token: float) -> StepCost:
    """What is known after some plain steps and some with drafts."""
    cost = StepCost()
    for n in range(40):
        cost.note(1, plain)
        cost.note(2 + n % 8, plain + per_token * (1 + n % 8))
    return cost


def test_the_cost_of_a_step_is_learned_from_noisy_steps() -> None:
    cost, chance = StepCost(), random.Random(2)
    for n in range(400):
        tokens = 1 if n % 3 else 1 + chance.randrange(1, 10)
        stray = 3.0 if n % 50 == 49 else 0.0  # a lost datagram now and then
        cost.note(tokens, (0.33 + 0.01 * (tokens - 1)) * chance.gauss(1.0, 0.05) + stray)
    assert cost.plain == pytest.approx(0.33, rel=0.1)
    assert cost.per_token == pytest.approx(0.01, rel=0.4)


@pytest.mark.parametrize(("before", "after"), [(0.33, 0.81), (0.81, 0.03), (0.03, 0.33)])
def test_a_link_that_changed_is_noticed_within_a_few_steps(before: float, after: float) -> None:
    cost = taught(before, 0.01)
    for n in range(8):
        cost.note(1 + n % 2 * 4, after + 0.01 * (n % 2 * 4))
    assert cost.plain == pytest.approx(after, rel=0.15)


def test_one_stray_step_moves_little() -> None:
    cost = taught(0.33, 0.01)
    cost.note(1, 30.0)
    assert cost.plain < 0.4


def test_a_prompt_gives_an_idea_of_a_tokens_cost_until_drafts_were_timed() -> None:
    cost = StepCost()
    cost.note_prompt(512, 0.33 + 511 * 0.01)
    assert not cost.known
    cost.note(1, 0.33)
    cost.note(1, 0.33)
    assert cost.known
    assert cost.per_token == pytest.approx(0.01, rel=0.05)
    for _ in range(30):
        cost.note(1, 0.33)
        cost.note(5, 0.33 + 4 * 0.03)
    cost.note_prompt(512, 0.33 + 511 * 0.01)
    assert cost.per_token == pytest.approx(0.03, rel=0.1)


def test_a_draft_before_any_plain_step_tells_nothing() -> None:
    cost = StepCost()
    cost.note(5, 0.4)
    assert (cost.plain, cost.known) == (0.0, False)


def test_steps_of_several_generations_count_as_plain_without_guesses() -> None:
    cost = StepCost()
    for _ in range(30):
        cost.note(4, 0.36, generations=4)
    assert cost.known
    assert cost.draft_steps == 0
    assert cost.seconds(4) == pytest.approx(0.36, rel=0.02)


SECONDS = st.one_of(st.floats(), st.floats(1e-12, 1e9), st.floats(0.1, 1.0))


@given(st.lists(st.tuples(st.integers(-1, 70), SECONDS, st.integers(-1, 9), st.booleans()), max_size=60))
def test_no_figures_break_it(steps: list[tuple[int, float, int, bool]]) -> None:
    cost = StepCost()
    for tokens, seconds, generations, prompt in steps:
        if prompt:
            cost.note_prompt(tokens, seconds)
        else:
            cost.note(tokens, seconds, generations)
        assert cost.plain >= 0.0
        assert cost.per_token >= 0.0
