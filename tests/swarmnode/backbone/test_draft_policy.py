"""The draft length: follows cost and acceptance, and loses nothing when what it believes is wrong."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import pytest

from swarmnode.backbone.draft_policy import (
    ALLOWED,
    CARRIED,
    MOST,
    REFERENCE,
    START,
    DraftPolicy,
    DraftPriors,
    kind_of_habit,
    kind_of_match,
)

LONE = kind_of_match(5)
RARE = kind_of_match(1, 1, 3)


def taught(plain: float, per_token: float, *, drafts: bool = True) -> DraftPriors:
    """What a node knows after some steps of such a cost."""
    priors = DraftPriors()
    for n in range(40):
        priors.cost.note(1, plain)
        if drafts:
            priors.cost.note(2 + n % 8, plain + per_token * (1 + n % 8))
    return priors


def run(
    policy: DraftPolicy, kind: int, right: Callable[[], bool], seconds: Callable[[int], float], steps: int
) -> float:
    """Play steps of a generation; returns the tokens that plain steps would have given in its time, less its own."""
    took = 0.0
    tokens = 0
    for _ in range(steps):
        guesses = policy.choose(kind, MOST).guesses
        accepted = 0
        while accepted < guesses and right():
            policy.acceptance.note(kind, accepted, True)
            accepted += 1
        if accepted < guesses:
            policy.acceptance.note(kind, accepted, False)
        took += seconds(1 + guesses)
        tokens += 1 + accepted
        policy.note_step(1 + guesses, seconds(1 + guesses))
        policy.note_gained(accepted)
    return took / seconds(1) - tokens


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_seconds_that_cannot_be_meant_change_nothing(seconds: float) -> None:
    policy = DraftPolicy(taught(0.33, 0.01))
    before = policy.cost.plain, policy.cost.per_token, policy.choose(LONE, MOST)
    policy.note_step(1, seconds)
    policy.note_step(500, seconds, prompt=True)
    assert (policy.cost.plain, policy.cost.per_token, policy.choose(LONE, MOST)) == before
    for _ in range(8):
        policy.note_step(5, seconds)  # no figure, but the guesses are paid for
    assert (policy.cost.plain, policy.cost.per_token) == before[:2]
    assert policy.choose(LONE, MOST).guesses == 0


def test_a_prompts_batches_do_not_count_as_steps() -> None:
    priors = taught(0.33, 0.01)
    before = priors.cost.plain
    DraftPolicy(priors).note_step(1, 6.0, generations=2, batch_tokens=513)  # another's prompt was in it
    assert priors.cost.plain == before


def test_nothing_is_drafted_before_plain_steps_are_known() -> None:
    policy = DraftPolicy(DraftPriors())
    policy.note_step(512, 0.33 + 5.11, prompt=True)
    assert policy.choose(LONE, MOST).guesses == 0
    policy.note_step(1, 0.33)
    policy.note_step(1, 0.33)
    assert policy.choose(LONE, MOST).guesses > 0


def test_first_tries_are_short_until_the_cost_is_known() -> None:
    policy = DraftPolicy(DraftPriors())
    policy.note_step(512, 0.33 + 5.11, prompt=True)
    policy.note_step(1, 0.33)
    policy.note_step(1, 0.33)
    assert 1 <= policy.choose(LONE, MOST).guesses <= 3
    run(policy, LONE, lambda: True, lambda n: 0.33 + 0.01 * (n - 1), 20)
    assert policy.choose(LONE, MOST).guesses == MOST


def test_the_next_generation_starts_where_the_last_one_ended() -> None:
    priors = taught(0.33, 0.01)
    assert DraftPolicy(priors).choose(LONE, MOST).guesses >= 6


def test_drafts_are_longer_the_surer_and_the_cheaper() -> None:
    cheap, dear = DraftPolicy(taught(0.33, 0.01)), DraftPolicy(taught(0.33, 0.07))
    sure, rare = cheap.choose(LONE, MOST), cheap.choose(RARE, MOST)
    assert sure.guesses > rare.guesses
    assert sure.gain > rare.gain
    assert sure.guesses > dear.choose(LONE, MOST).guesses > 0
    assert dear.choose(RARE, MOST).guesses == 0


def test_nothing_is_drafted_where_a_guess_costs_a_step() -> None:
    policy = DraftPolicy(taught(0.01, 0.01))
    assert policy.choose(LONE, MOST) == (0, 1.0)
    assert policy.choose(kind_of_match(5, 4), MOST).guesses == 0


def test_room_and_most_are_kept() -> None:
    priors = taught(0.33, 0.001)
    for room in (-1, 0, 1, 3):
        assert DraftPolicy(priors).choose(LONE, room).guesses == max(room, 0)
    assert DraftPolicy(priors, most=2).choose(LONE, MOST).guesses == 2


def test_in_company_a_guess_must_be_worth_everybodys_time() -> None:
    priors = taught(0.33, 0.04)
    kind = kind_of_match(2)
    alone, shared = DraftPolicy(priors), DraftPolicy(priors)
    for _ in range(4):
        alone.note_step(1, priors.cost.seconds(1))
        shared.note_step(1, priors.cost.seconds(8), generations=8, batch_tokens=8)
    assert alone.choose(kind, MOST).guesses > shared.choose(kind, MOST).guesses == 0


def test_plain_steps_in_company_count_too() -> None:
    policy = DraftPolicy(DraftPriors())
    for _ in range(20):
        policy.note_step(1, 0.36, generations=4, batch_tokens=4)
    policy.note_gained(3)
    assert policy.choose(kind_of_match(5, 4), MOST).guesses > 0
    assert policy.cost.seconds(4) == pytest.approx(0.36, rel=0.05)


@pytest.mark.parametrize(("plain", "per_token"), [(0.33, 0.01), (0.33, 0.1), (0.004, 0.002), (0.01, 0.01)])
@pytest.mark.parametrize("claimed", [0.01, 1.0])  # what the prompt made of a token's cost, of the truth
def test_never_more_than_the_allowance_is_lost(plain: float, per_token: float, claimed: float) -> None:
    """Guesses that look certain and are all wrong, or half of them; on a node that has gained nothing so far."""

    def right(chance: random.Random, share: float) -> bool:
        return chance.random() < share

    unknown = 2 * per_token / plain if claimed < 1 else 0.0  # the node's first try meets a cost that nobody knew
    for share in (0.0, 0.3):
        priors = DraftPriors()
        for seed in range(3):
            priors.gained = 0.0
            policy = DraftPolicy(priors)
            policy.note_step(512, plain + 511 * per_token * claimed, prompt=True)
            accepted = functools.partial(right, random.Random(seed), share)
            lost = run(policy, kind_of_match(5, 4), accepted, lambda n: plain + per_token * (n - 1), 300)
            assert lost <= 300 * ALLOWED + START + unknown + 0.1


def test_a_generation_may_stake_a_little_of_what_others_gained() -> None:
    priors = taught(0.33, 0.1)
    assert DraftPolicy(priors).choose(LONE, MOST).guesses == 0  # a quarter of a step does not cover it
    earner = DraftPolicy(priors)
    run(earner, LONE, lambda: True, lambda n: 0.33 + 0.1 * (n - 1), 100)
    assert priors.gained == CARRIED
    assert DraftPolicy(priors).choose(LONE, MOST).guesses > 0


def test_drafting_stops_where_a_guess_costs_more_than_it_seemed() -> None:
    """Cost that rises steeply at first, as on one machine: no straight line fits it."""
    policy = DraftPolicy(DraftPriors())
    seconds = lambda n: 0.0015 * (1.0 if n == 1 else 1.9 + 0.1 * n)  # noqa: E731
    policy.note_step(512, 512 * 0.00015, prompt=True)
    chance = random.Random(4)
    lost = run(policy, kind_of_match(2), lambda: chance.random() < 0.4, seconds, 2000)
    assert lost <= 2000 * ALLOWED + 2


def test_plain_steps_are_taken_now_and_then_so_that_their_cost_stays_known() -> None:
    policy = DraftPolicy(taught(0.33, 0.05))
    chance = random.Random(5)
    plain = 0
    policy.note_gained(8)
    for _ in range(REFERENCE * 20):
        guesses = policy.choose(LONE, MOST).guesses
        plain += not guesses
        right = 0
        while right < guesses and chance.random() < 0.5:
            right += 1
        for place in range(min(right + 1, guesses)):
            policy.acceptance.note(LONE, place, place < right)
        policy.note_step(1 + guesses, 0.33 + 0.05 * guesses)
        policy.note_gained(right)
    assert 2 <= plain <= 20


def test_kinds_are_all_different_and_bounded() -> None:
    matches = {kind_of_match(m, c, r) for m in range(6) for c, r in ((1, 0), (2, 0), (2, 1), (1, 1))}
    habits = {kind_of_habit(order, votes) for order in (1, 2) for votes in (1, 2, 4)}
    assert len(matches) == 24
    assert len(habits) == 6
    assert not matches & habits
    assert kind_of_match(99) == kind_of_match(5)
    assert kind_of_habit(9, 99) == kind_of_habit(2, 4)
