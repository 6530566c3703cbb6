from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.recipe import Recipe, Site
from swarmnode.errors import UsageError
from swarmnode.experts_spec import format_holdings, format_ids, parse_experts


def site(index: int, layer: int, n_expert: int) -> Site:
    return Site(index, layer, 8, 8, n_expert, 2, (), Recipe((), "after"))


SITES = [site(0, 1, 16), site(1, 2, 16), site(2, 2, 4)]  # layer 2 has two sites


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", {0: tuple(range(16)), 1: tuple(range(16)), 2: tuple(range(4))}),
        ("2/3", {0: (5, 6, 7, 8, 9), 1: (5, 6, 7, 8, 9), 2: (1,)}),
        ("0-2, 3", {0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (0, 1, 2, 3)}),
        ("1:5,7-8", {0: (5, 7, 8)}),
        ("1:1/2;2:0", {0: tuple(range(8)), 1: (0,), 2: (0,)}),
    ],
)
def test_parse(text: str, expected: dict[int, tuple[int, ...]]) -> None:
    assert parse_experts(text, SITES) == expected


@pytest.mark.parametrize(
    "text", ["", "x", "1-", "-1", "5-4", "0/3", "4/3", "1:99", "7:1", "1/0", "0-3;1", "1:2:3", "1:0;1:1", "١"]
)
def test_what_is_not_meant(text: str) -> None:
    with pytest.raises(UsageError, match="--experts"):
        parse_experts(text, SITES)


@given(st.integers(1, 9))
def test_equal_shares_cover_everything_once(of: int) -> None:
    shares = [parse_experts(f"{part}/{of}", SITES).get(0, ()) for part in range(1, of + 1)]
    assert [e for share in shares for e in share] == list(range(16))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.sets(st.integers(0, 15), min_size=1))
def test_format_is_what_parse_reads(ids: set[int]) -> None:
    assert parse_experts(f"1:{format_ids(ids)}", SITES) == {0: tuple(sorted(ids))}


def test_format_holdings() -> None:
    assert format_holdings({0: (0, 1, 2, 9), 1: (), 2: (3,)}, SITES) == {"1": "0-2,9", "2": "3"}
