from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from transport.proto.relay_choice import HomeCandidate, HomeChoice

NEAR, FAR, FARTHER = "https://near.example", "https://far.example", "https://farther.example"


def view(url: str, rtt_ms: float | None = None, measured: int = 1, up: bool = True) -> HomeCandidate:
    return HomeCandidate(url, up, None if rtt_ms is None else rtt_ms / 1000, measured)


def test_the_first_that_is_up_is_home_until_a_clearly_nearer_one_is_measured() -> None:
    choice = HomeChoice()
    assert choice.update([view(FAR), view(NEAR, up=False)], settled=False)
    assert choice.home == FAR
    choice.update([view(FAR, 50), view(NEAR, 10)], settled=False)
    assert (choice.home, choice.second) == (NEAR, FAR)


def test_while_nothing_is_up_the_users_first_is_home() -> None:
    choice = HomeChoice()
    choice.update([view(FAR, up=False), view(NEAR, up=False)])
    assert (choice.home, choice.second) == (FAR, NEAR)
    assert not choice.update([view(FAR, up=False), view(NEAR, up=False)])


def test_without_relays_there_is_no_home() -> None:
    choice = HomeChoice()
    assert not choice.update([])
    assert (choice.home, choice.second) == ("", "")


def test_a_home_changes_only_after_two_measurements() -> None:
    choice = HomeChoice()
    choice.update([view(FAR, 50, 1)])
    assert choice.home == FAR
    choice.update([view(FAR, 50, 1), view(NEAR, 10, 1)])
    assert choice.home == FAR
    choice.update([view(FAR, 50, 2), view(NEAR, 10, 1)])  # only the home answered again
    assert choice.home == FAR
    choice.update([view(FAR, 50, 2), view(NEAR, 10, 2)])
    assert (choice.home, choice.second) == (NEAR, FAR)


def test_the_two_measurements_must_be_in_a_row() -> None:
    choice = HomeChoice()
    choice.update([view(FAR, 50)])
    choice.update([view(FAR, 50), view(NEAR, 10, 1)])
    choice.update([view(FAR, 50), view(NEAR, 45, 2)])
    choice.update([view(FAR, 50), view(NEAR, 10, 3)])
    assert choice.home == FAR


def test_a_little_nearer_is_not_enough() -> None:
    choice = HomeChoice()
    choice.update([view(FAR, 12)])
    for measured in range(10):
        choice.update([view(FAR, 12, measured), view(NEAR, 3, measured)])  # 9 ms
    assert choice.home == FAR
    choice.update([view(FAR, 90)])
    for measured in range(10):
        choice.update([view(FAR, 90, measured), view(NEAR, 65, measured)])  # more than two thirds
    assert choice.home == FAR


def test_a_home_that_is_down_is_replaced_at_once_and_not_taken_back_without_need() -> None:
    choice = HomeChoice()
    both = [view(NEAR, 10), view(FAR, 19)]
    choice.update(both)
    assert choice.home == NEAR
    choice.update([view(NEAR, 10, up=False), view(FAR, 19)])
    assert (choice.home, choice.second) == (FAR, NEAR)
    for measured in range(5):
        choice.update([view(NEAR, 10, measured), view(FAR, 19, measured)])
    assert choice.home == FAR  # 9 ms nearer


def test_when_everything_is_down_the_home_stays() -> None:
    choice = HomeChoice()
    choice.update([view(FAR, 50), view(NEAR, 10)])
    choice.update([view(FAR, 50, up=False), view(NEAR, 10, up=False)])
    assert choice.home == NEAR


def test_the_second_is_kept_while_it_is_good_enough() -> None:
    choice = HomeChoice()
    choice.update([view(NEAR, 10), view(FAR, 50), view(FARTHER, 60)])
    assert choice.second == FAR
    assert not choice.update([view(NEAR, 10), view(FAR, 50), view(FARTHER, 45)])
    choice.update([view(NEAR, 10), view(FAR, 50, up=False), view(FARTHER, 60)])
    assert choice.second == FARTHER


def test_twenty_per_cent_of_noise_change_nothing() -> None:
    random, choice, changes = Random(7), HomeChoice(), 0
    for measured in range(1000):
        noisy = [view(url, rtt * random.uniform(0.8, 1.2), measured) for url, rtt in ((NEAR, 50), (FAR, 55))]
        before = choice.home
        choice.update(noisy)
        changes += choice.home != before
    assert changes == 1  # the first


VIEWS = st.lists(
    st.builds(
        HomeCandidate,
        st.sampled_from([NEAR, FAR, FARTHER, "http://127.0.0.1:1"]),
        st.booleans(),
        st.none() | st.floats(0, 10),
        st.integers(0, 5),
    ),
    max_size=4,
    unique_by=lambda view: view.url,
)


@given(st.lists(st.tuples(VIEWS, st.booleans()), max_size=20))
def test_home_and_second_are_two_of_those_that_are_known(rounds: list[tuple[list[HomeCandidate], bool]]) -> None:
    choice = HomeChoice()
    for views, settled in rounds:
        choice.update(views, settled)
        known = {view.url: view for view in views}
        assert (choice.home in known) if known else choice.home == ""
        assert (choice.second in known) if len(known) > 1 else choice.second == ""
        assert choice.home != choice.second or not known
        if any(view.up for view in views):
            assert known[choice.home].up
