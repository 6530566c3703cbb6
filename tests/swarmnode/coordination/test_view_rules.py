"""Who may see whom, how often, and which member a name means."""

from __future__ import annotations

import pytest

from swarmnode.coordination.view_rules import (
    ALLOW_VIEW,
    ASKER_BPS,
    MAX_ASKERS,
    PAUSE_S,
    TOTAL_AHEAD_S,
    TOTAL_BPS,
    AllowView,
    Pace,
    chosen_member,
    why_not_shown,
)
from swarmnode.errors import ControlError, UsageError
from transport.identity import Identity

OWN, DESK, LAPTOP, SHED = (Identity.generate(bytes([i]) * 32).peer_id for i in range(4))
MEMBERS = [(DESK, "desk"), (LAPTOP, "Laptop"), (SHED, "laptop")]

MATRIX = {
    ("members", True): True,
    ("members", False): True,
    ("founder", True): True,
    ("founder", False): False,
    ("nobody", True): False,
    ("nobody", False): False,
}


@pytest.mark.parametrize("allow", ALLOW_VIEW)
@pytest.mark.parametrize("is_founder", [True, False])
def test_who_may_see_a_node(allow: AllowView, is_founder: bool) -> None:
    why = why_not_shown(allow, is_founder)
    assert (why is None) is MATRIX[allow, is_founder]
    assert why is None or f"--allow-view {allow}" in why


def test_a_member_is_answered_once_a_second_and_for_large_answers_less_often() -> None:
    pace = Pace()
    assert pace.wait_s(DESK, 100.0) == 0.0
    assert pace.answered(DESK, 1000, 100.0) == PAUSE_S
    assert pace.wait_s(DESK, 100.4) == pytest.approx(PAUSE_S - 0.4)
    assert pace.wait_s(LAPTOP, 100.4) == 0.0
    assert pace.answered(DESK, 2 * ASKER_BPS, 101.0) == pytest.approx(2.0)
    assert pace.wait_s(DESK, 103.0) == 0.0


def test_one_question_that_came_too_early_is_refused_in_words_and_no_other() -> None:
    pace = Pace()
    pace.answered(DESK, 10, 0.0)
    assert [pace.warns(DESK) for _ in range(3)] == [True, False, False]
    pace.answered(DESK, 10, 1.0)
    assert pace.warns(DESK)


def test_all_members_together_have_a_budget() -> None:
    pace = Pace()
    askers = [Identity.generate(i.to_bytes(2, "big") * 16).peer_id for i in range(100)]
    size = TOTAL_BPS // 4
    answered = 0
    for asker in askers:
        if pace.wait_s(asker, 50.0) == 0.0:
            pace.answered(asker, size, 50.0)
            answered += 1
    assert answered == TOTAL_AHEAD_S * 4 + 1
    assert 0 < pace.wait_s(askers[-1], 50.0) <= 1.0
    assert pace.wait_s(askers[-1], 51.0) == 0.0


def test_what_is_remembered_is_bounded() -> None:
    pace = Pace()
    for i in range(MAX_ASKERS + 100):
        pace.answered(Identity.generate(i.to_bytes(4, "big") * 8).peer_id, 0, i * 0.01)
    assert len(pace._next) <= MAX_ASKERS


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("desk", DESK), (" DESK ", DESK), (str(LAPTOP), LAPTOP), (LAPTOP.short, LAPTOP), (str(SHED).upper(), SHED)],
)
def test_a_member_is_named_by_its_name_or_its_id(wanted: str, found: object) -> None:
    assert chosen_member(wanted, MEMBERS, OWN, "here") == found


def test_a_whole_id_goes_before_a_name() -> None:
    assert chosen_member(str(DESK), [*MEMBERS, (SHED, str(DESK))], OWN, "here") == DESK


def test_a_name_of_two_members_is_refused_with_their_ids() -> None:
    with pytest.raises(UsageError, match=f"2 members: give the id of one: {LAPTOP.short}, {SHED.short}"):
        chosen_member("laptop", MEMBERS, OWN, "here")
    with pytest.raises(UsageError, match=f"{OWN.short} .this node., {DESK.short}"):
        chosen_member("desk", MEMBERS, OWN, "Desk")


@pytest.mark.parametrize("wanted", ["here", str(OWN)])
def test_this_node_itself_is_asked_without_a_name(wanted: str) -> None:
    with pytest.raises(UsageError, match="this node itself: leave it out"):
        chosen_member(wanted, MEMBERS, OWN, "here")


@pytest.mark.parametrize("wanted", ["", "  ", "attic", "desk\x1b[2J", "x" * 10_000])
def test_who_is_not_here_is_said_in_one_line(wanted: str) -> None:
    with pytest.raises(ControlError) as no:
        chosen_member(wanted, MEMBERS, OWN, "here")
    assert str(no.value).isprintable()
    assert len(str(no.value)) < 300
    assert "there are desk" in str(no.value)
    with pytest.raises(ControlError, match="nobody is"):
        chosen_member("desk", [], OWN, "here")
