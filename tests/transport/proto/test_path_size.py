from __future__ import annotations

import pytest

from transport.proto.path_config import NARROW_SIZE, PathConfig
from transport.proto.path_size import SizeSearch

CONFIG = PathConfig()


def search(sizes: SizeSearch, carries: int, now: float) -> list[list[int]]:
    """Answer what fits until the search rests; the rounds of padded pings."""
    rounds = []
    while sizes.due <= now:
        sent = sizes.poll(now, False)
        rounds.append(sent)
        for size in sent:
            if size <= carries:
                sizes.answered(size, now)
        for size in sent:
            if size > carries:
                sizes.missed(size, now, now)
    return rounds


@pytest.mark.parametrize(
    ("carries", "found", "rounds"),
    [(9000, 1452, 1), (1452, 1452, 1), (1400, 1372, 3), (1300, 1280, 3), (1200, 1200, 3), (700, NARROW_SIZE, 3)],
)
def test_the_ladder(carries: int, found: int, rounds: int) -> None:
    sizes = SizeSearch(1452, CONFIG)
    sizes.search(0.0)
    sent = search(sizes, carries, 0.0)
    assert sizes.size == found
    assert len(sent) == rounds
    assert sent[0] == [1200, 1280, 1372, 1452]
    assert all(size > found for tries in sent[1:] for size in tries)


def test_a_narrow_path_that_widens_is_found_again() -> None:
    sizes = SizeSearch(1452, CONFIG)
    sizes.search(0.0)
    search(sizes, 700, 0.0)
    assert sizes.size == NARROW_SIZE
    search(sizes, 1452, sizes.due)
    assert sizes.size == 1452


def test_jumbo_only_when_allowed() -> None:
    sizes = SizeSearch(8900, CONFIG)
    sizes.search(0.0)
    search(sizes, 9000, 0.0)
    assert sizes.size == 8900
    small = SizeSearch(1452, CONFIG)
    small.search(0.0)
    search(small, 9000, 0.0)
    small.allow(8900, 1.0)
    search(small, 9000, 1.0)
    assert small.size == 8900


def test_what_was_not_found_is_looked_for_again_ever_more_rarely() -> None:
    sizes = SizeSearch(1452, CONFIG)
    sizes.search(0.0)
    now, gaps = 0.0, []
    for _ in range(7):
        search(sizes, 1400, now)
        gaps.append(sizes.due - now)
        now = sizes.due
    assert gaps == [30, 60, 120, 240, 480, 600, 600]


def known(now: float = 0.0) -> SizeSearch:
    sizes = SizeSearch(1452, CONFIG)
    sizes.search(now)
    search(sizes, 1452, now)
    sizes.sent_big(now)
    return sizes


def test_two_lost_checks_while_small_ones_pass_are_a_black_hole() -> None:
    sizes = known()
    assert sizes.poll(0.5, True) == [1452]
    sizes.missed(1452, 0.5, 0.75)
    assert sizes.wants_small
    assert not sizes.small_answered(0.76, 0.8)
    assert sizes.poll(1.0, True) == [1452]
    sizes.missed(1452, 1.0, 1.25)
    assert not sizes.small_answered(0.4, 1.26)  # sent before the loss: proves nothing
    assert sizes.small_answered(1.2, 1.3)
    assert sizes.size == 1200
    assert sizes.due == pytest.approx(31.3)
    search(sizes, 1300, 31.4)
    assert sizes.size == 1280
    assert sizes.due == pytest.approx(31.4 + 60)


def test_one_lost_check_is_an_accident() -> None:
    sizes = known()
    for now in (0.5, 1.5, 2.5):
        assert sizes.poll(now, True) == [1452]
        sizes.missed(1452, now, now + 0.25)
        assert sizes.poll(now + 0.5, True) == [1452]
        sizes.answered(1452, now + 0.52)
        assert not sizes.small_answered(now + 0.55, now + 0.6)
    assert sizes.size == 1452


def test_nothing_is_checked_while_nothing_big_is_sent() -> None:
    sizes = known()
    assert sizes.poll(0.5, False) == []
    assert sizes.due == float("inf")
