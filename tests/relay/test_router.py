"""router: the newest login counts; wars end, and a node that comes back often is no war."""

from __future__ import annotations

import pytest

from relay.router import FIGHT_PAUSE, FIGHT_WINDOW, MAX_REMEMBERED, Router

KEY, OTHER = b"k" * 32, b"o" * 32


def test_the_newest_login_speaks_for_the_key() -> None:
    router = Router[str]()
    assert router.login(KEY, "first", 0.0).replaced is None
    outcome = router.login(KEY, "second", 1.0)
    assert outcome.replaced == "first"
    assert not outcome.fight_pause
    assert router.sessions == {KEY: "second"}
    assert not router.logout(KEY, "first")
    assert router.sessions == {KEY: "second"}
    assert router.logout(KEY, "second")
    assert len(router) == 0


def war(router: Router[str], start: float, step: float) -> list[float]:
    """Two nodes replace each other, both alive; the pauses they are told."""
    pauses = []
    for turn in range(4):
        now = start + turn * step
        outcome = router.login(KEY, f"session {turn}", now)
        if outcome.replaced and not outcome.fight_pause:
            router.was_alive(KEY, now + 0.1)
        pauses.append(outcome.fight_pause)
    return pauses


def test_the_third_replacement_of_living_sessions_ends_the_war() -> None:
    router = Router[str]()
    assert war(router, 0.0, 5.0) == [0.0, 0.0, 0.0, FIGHT_PAUSE]
    assert KEY not in router.sessions
    again = router.login(KEY, "too early", 20.0)
    assert again.replaced is None
    assert again.fight_pause == pytest.approx(FIGHT_PAUSE - 5.0)
    assert router.login(OTHER, "not concerned", 20.0).fight_pause == 0
    assert router.login(KEY, "later", 15.0 + FIGHT_PAUSE + 0.1).fight_pause == 0
    assert router.sessions[KEY] == "later"


def test_replacements_that_are_rare_are_no_war() -> None:
    assert war(Router[str](), 0.0, FIGHT_WINDOW / 2 + 1) == [0.0] * 4


def test_one_node_that_comes_back_often_leaves_dead_sessions_and_fights_nobody() -> None:
    router = Router[str]()
    for turn in range(20):
        assert router.login(KEY, f"session {turn}", turn * 1.0).fight_pause == 0
    assert router.sessions[KEY] == "session 19"


def test_memory_of_replacements_is_bounded() -> None:
    router = Router[str]()
    for number in range(MAX_REMEMBERED + 100):
        router.was_alive(number.to_bytes(32, "big"), 0.0)
    assert len(router._alive_when_replaced) == MAX_REMEMBERED
