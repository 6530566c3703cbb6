"""The published algorithm: its published example, and what every result must have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import BadPlacement, SwarmnodeError
from swarmnode.placement.eplb import balanced_packing, rebalance_experts, replicate_experts

WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]


def test_the_published_example() -> None:
    phy2log, log2phy, logcnt = rebalance_experts(WEIGHT, 16, 4, 2, 8)
    assert phy2log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert logcnt.tolist() == [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
    assert log2phy.shape == (2, 12, 2)
    assert log2phy[0, 5].tolist() == [0, 2]
    assert log2phy[0, 0].tolist() == [12, -1]


def test_packing_and_copies_by_hand() -> None:
    pack, rank = balanced_packing([[5, 1, 3, 4]], 2)
    assert pack.tolist() == [[0, 0, 1, 1]]
    assert rank.tolist() == [[0, 1, 1, 0]]
    assert balanced_packing([[1, 9, 5]], 3)[0].tolist() == [[0, 1, 2]]
    expert, rank, copies = replicate_experts([[10, 3, 4]], 6)
    assert expert.tolist() == [[0, 1, 2, 0, 0, 2]]
    assert rank.tolist() == [[0, 0, 0, 1, 2, 1]]
    assert copies.tolist() == [[3, 1, 2]]


def test_groups_that_do_not_divide_are_ignored() -> None:
    ignored = rebalance_experts(WEIGHT, 16, 3, 2, 8)
    plain = rebalance_experts(WEIGHT, 16, 1, 1, 8)
    assert all((a == b).all() for a, b in zip(ignored, plain, strict=True))


@given(st.data())
def test_every_expert_has_its_slots_and_every_device_as_many(data: st.DataObject) -> None:
    nodes = data.draw(st.sampled_from([1, 2, 4]))
    groups = nodes * data.draw(st.sampled_from([1, 2]))
    gpus = nodes * data.draw(st.sampled_from([1, 2, 3]))
    n = groups * gpus * data.draw(st.integers(1, 2))
    layers = data.draw(st.integers(1, 3))
    slots = n + gpus * data.draw(st.integers(0, 3))
    weight = np.array(data.draw(st.lists(st.integers(0, 500), min_size=layers * n, max_size=layers * n)))
    phy2log, log2phy, logcnt = rebalance_experts(weight.reshape(layers, n), slots, groups, nodes, gpus)
    assert phy2log.shape == (layers, slots)
    for layer in range(layers):
        assert (np.bincount(phy2log[layer], minlength=n) == logcnt[layer]).all()
        for expert in range(n):
            held = log2phy[layer, expert]
            mine = held[held >= 0]
            assert sorted(mine) == np.flatnonzero(phy2log[layer] == expert).tolist()
            assert (held[len(mine) :] == -1).all()
        by_node = phy2log[layer].reshape(nodes, -1)
        for group in range(groups):  # a group lives on one node
            members = np.arange(n // groups) + group * (n // groups)
            assert sum(bool(np.isin(members, node).any()) for node in by_node) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((WEIGHT, 10, 4, 2, 8), "fewer than the 12 experts"),
        ((WEIGHT, 17, 4, 2, 8), "num_gpus 8 does not divide num_replicas 17"),
        ((WEIGHT, 16, 8, 2, 8), "num_groups 8 does not divide experts 12"),
        ((WEIGHT, 16, 4, 2, 7), "num_nodes 2 does not divide num_gpus 7"),
        ((WEIGHT, 16, 4, 2, 0), "num_gpus 0"),
        ((WEIGHT, 16, 0, 2, 8), "num_groups 0"),
        ((WEIGHT, 1 << 40, 4, 2, 8), "num_replicas 1099511627776"),
        (([1, 2, 3], 4, 1, 1, 1), "table"),
        (([[1, 2], [3]], 4, 1, 1, 1), "table"),
        (([[1, -2]], 2, 1, 1, 1), "negative"),
        (([[1, np.nan]], 2, 1, 1, 1), "finite"),
        (([[]], 2, 1, 1, 1), "table"),
        (("weights", 2, 1, 1, 1), "table"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[object, ...], says: str) -> None:
    with pytest.raises(BadPlacement, match=says) as caught:
        rebalance_experts(*arguments)  # type: ignore[arg-type]  # that is what is tested
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SwarmnodeError)
    assert "\n" not in str(caught.value)


def test_bad_packings() -> None:
    with pytest.raises(BadPlacement, match="num_packs 3 does not divide items 4"):
        balanced_packing([[1, 2, 3, 4]], 3)
    with pytest.raises(BadPlacement, match="2 slots for 3 experts"):
        replicate_experts([[1, 2, 3]], 2)
