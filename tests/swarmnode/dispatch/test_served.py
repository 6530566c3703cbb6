"""What is announced and what is taken while experts come and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.frames import SiteHoldings
from swarmnode.dispatch.served import ServedExperts
from swarmnode.errors import BadCall
from tests.swarmnode.dispatch.samples import N_EXPERT, SITES

SITE_OF = {site.index: site for site in SITES}


def served(**held: int) -> ServedExperts:
    made = ServedExperts(SITE_OF)
    made.read({int(name[1:]): tuple(e for e in range(N_EXPERT) if mask >> e & 1) for name, mask in held.items()})
    return made


def test_a_drop_is_announced_before_calls_are_refused() -> None:
    experts = served(s0=0b1111, s1=0b1)
    assert experts.announced() == (SiteHoldings(0, N_EXPERT, 0b1111), SiteHoldings(1, N_EXPERT, 0b1))
    assert experts.dropped_by(0, (0, 1, 9)) == 0b1100
    experts.doom({0: 0b1100, 1: 0b1})
    assert experts.announced() == (SiteHoldings(0, N_EXPERT, 0b0011),)
    assert (experts.taken(0), experts.taken(1), experts.version) == (0b1111, 0b1, 0)
    experts.cut(0, 0b1100)
    assert (experts.taken(0), experts.held(0), experts.version) == (0b0011, 0b1111, 1)
    experts.settle(0, (0, 1, 9))
    assert experts.taken(0) == 0b10_0000_0011
    experts.settle(1, ())
    assert experts.announced() == (SiteHoldings(0, N_EXPERT, 0b10_0000_0011),)


def test_a_drop_that_was_given_up_is_served_again() -> None:
    experts = served(s0=0b11)
    experts.doom({0: 0b10})
    experts.cut(0, 0b10)
    experts.settle(0, (0, 1))
    assert experts.taken(0) == 0b11
    assert experts.announced() == (SiteHoldings(0, N_EXPERT, 0b11),)


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(BadCall, match="site 77: this model has no such site"):
        served().dropped_by(77, ())
    for expert in (-1, N_EXPERT, 1 << 70):
        with pytest.raises(BadCall, match=f"site 0: expert {expert} does not exist, there are {N_EXPERT}"):
            served().dropped_by(0, (0, expert))


MASKS = st.integers(0, (1 << N_EXPERT) - 1)
STEPS = st.lists(st.tuples(st.sampled_from(("read", "doom", "cut", "settle")), st.integers(0, 2), MASKS))


@given(STEPS)
def test_nothing_is_announced_that_is_not_taken_and_nothing_taken_that_is_not_held(
    steps: list[tuple[str, int, int]],
) -> None:
    experts = served(s0=0b1111)
    for what, site, mask in steps:
        ids = [e for e in range(N_EXPERT) if mask >> e & 1]
        match what:
            case "read":
                experts.read({site: ids})
            case "doom":
                experts.doom({site: mask})
            case "cut":
                experts.cut(site, mask)
            case "settle":
                experts.settle(site, ids)
        for held in experts.announced():
            assert held.mask
            assert not held.mask & ~experts.taken(held.site)
        for index in SITE_OF:
            assert not experts.taken(index) & ~experts.held(index)
