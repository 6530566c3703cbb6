"""Which layers are measured together where not all fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ModelError
from swarmnode.gate.memory import group_sites, groups_within


def test_groups() -> None:
    assert group_sites([2, 2, 2], 6) == [range(3)]
    assert group_sites([2, 2, 2], 5) == [range(2), range(2, 3)]
    assert group_sites([2, 5, 2], 4) == [range(1)]  # what lies behind has no exact inputs
    assert group_sites([2, 2, 5], 4) == [range(2)]
    assert group_sites([5, 2], 4) == []
    assert group_sites([5, 2], -4) == []


@given(st.lists(st.integers(1, 10), min_size=1, max_size=20), st.integers(-5, 30))
def test_every_group_fits_and_none_is_left_out_before_the_first_that_does_not(sizes: list[int], room: int) -> None:
    groups = group_sites(sizes, room)
    assert all(sum(sizes[i] for i in group) <= room and len(group) for group in groups)
    assert [i for group in groups for i in group] == list(range(groups[-1].stop if groups else 0))
    end = groups[-1].stop if groups else 0
    assert end == len(sizes) or sizes[end] > room


def test_no_room_at_all_is_one_line() -> None:
    with pytest.raises(ModelError, match=r"m: the gate needs 100 B .* 20 B .* has 110 B.*--memory") as caught:
        groups_within("m", 100, [20, 20], 110)
    assert "\n" not in str(caught.value)
