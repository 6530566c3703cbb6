"""DeepSeek's expert-parallel load balancer (EPLB): equal devices, equal numbers of experts, copies of the hot ones.

Pure numpy, with the results of the published implementation (github.com/deepseek-ai/EPLB), which DeepSeek-V3's report
describes: sums and quotients in float32, ties to the lower index. Its assumptions (equal memory, equal speed, a fixed
number of slots) do not hold in a swarm: there `planner` decides, and this is what it is compared with.

Three steps: whole groups of experts are packed onto nodes, the hottest experts of each node are copied, and the copies
are packed onto the node's GPUs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swarmnode.errors import BadPlacement

Index = NDArray[np.int64]
F32 = NDArray[np.float32]

MAX_SLOTS = 1 << 20  # physical experts in one layer; nothing real comes near


def balanced_packing(weight: ArrayLike, num_packs: int) -> tuple[Index, Index]:
    """Pack each row's n items into `num_packs` packs of n / num_packs items, their weights as even as greed gets them.

    weight [rows, n] → the pack of each item and its rank within the pack, both [rows, n]. Raises BadPlacement.
    """
    loads = _table(weight)
    rows, n = loads.shape
    _check_count("num_packs", num_packs, n)
    _check_divides("num_packs", num_packs, "items", n)
    size = n // num_packs
    pack, rank = np.empty((rows, n), np.int64), np.zeros((rows, n), np.int64)
    if size == 1:
        pack[:] = np.arange(n)
        return pack, rank
    each = np.arange(rows)
    taken, filled = np.zeros((rows, num_packs), np.float32), np.zeros((rows, num_packs), np.int64)
    for item in np.argsort(-loads, axis=1, kind="stable").T:  # the heaviest first, a column for all rows at once
        lightest = np.argmin(np.where(filled < size, taken, np.inf), axis=1)
        pack[each, item], rank[each, item] = lightest, filled[each, lightest]
        taken[each, lightest] += loads[each, item]
        filled[each, lightest] += 1
    return pack, rank


def replicate_experts(weight: ArrayLike, num_phy: int) -> tuple[Index, Index, Index]:
    """Give each row's experts `num_phy` slots: one each, every further one to the expert with most load per copy.

    weight [rows, n] → the expert of each slot [rows, num_phy], the slot's number among that expert's copies (same
    shape), the number of copies of each expert [rows, n]. Raises BadPlacement.
    """
    loads = _table(weight)
    rows, n = loads.shape
    if not n <= num_phy <= MAX_SLOTS:
        raise BadPlacement(f"{num_phy} slots for {n} experts: give {n} to {MAX_SLOTS}")
    each = np.arange(rows)
    expert = np.empty((rows, num_phy), np.int64)
    rank = np.zeros((rows, num_phy), np.int64)
    copies = np.ones((rows, n), np.int64)
    expert[:, :n] = np.arange(n)
    for slot in range(n, num_phy):
        hottest = np.argmax(loads / copies.astype(np.float32), axis=1)
        expert[:, slot], rank[:, slot] = hottest, copies[each, hottest]
        copies[each, hottest] += 1
    return expert, rank, copies


def rebalance_experts(
    weight: ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Index, Index, Index]:
    """Place `num_replicas` physical experts on `num_gpus` devices of `num_nodes` nodes, for each layer.

    weight [layers, experts] ≥ 0, the load of each expert. Groups stay on one node where num_nodes divides num_groups,
    else the nodes are ignored. Device g holds the slots g × num_replicas / num_gpus and following.

    Returns phy2log [layers, num_replicas], the expert of each slot; log2phy [layers, experts, most copies], the slots
    of each expert, −1 where it has fewer; logcnt [layers, experts], its copies. Raises BadPlacement.
    """
    loads = _table(weight)
    layers, n = loads.shape
    for what, count, most in (
        ("num_groups", num_groups, n),
        ("num_nodes", num_nodes, MAX_SLOTS),
        ("num_gpus", num_gpus, MAX_SLOTS),
        ("num_replicas", num_replicas, MAX_SLOTS),
    ):
        _check_count(what, count, most)
    if num_replicas < n:
        raise BadPlacement(f"num_replicas {num_replicas} is fewer than the {n} experts: each needs a slot")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    _check_divides("num_groups", num_groups, "experts", n)
    _check_divides("num_nodes", num_nodes, "num_gpus", num_gpus)
    _check_divides("num_gpus", num_gpus, "num_replicas", num_replicas)
    phy2log, rank, logcnt = _hierarchical(loads, num_replicas, num_groups, num_nodes, num_gpus)
    log2phy = np.full((layers, n, int(logcnt.max())), -1, np.int64)
    log2phy[np.arange(layers)[:, None], phy2log, rank] = np.arange(num_replicas)
    return phy2log, log2phy, logcnt


def _hierarchical(loads: F32, slots: int, groups: int, nodes: int, gpus: int) -> tuple[Index, Index, Index]:
    layers, n = loads.shape
    group_size, node_size = n // groups, n // nodes
    # 1. Groups to nodes. "Node order" lists the experts node by node.
    by_group = loads.reshape(layers, groups, group_size).sum(-1, dtype=np.float32)
    node, place = balanced_packing(by_group, nodes)
    first = (node * (groups // nodes) + place) * group_size
    in_node_order = (first[:, :, None] + np.arange(group_size)).reshape(layers, n)
    expert_at = _inverse(in_node_order)
    # 2. Copies, within each node.
    node_loads = np.take_along_axis(loads, expert_at, 1).reshape(layers * nodes, node_size)
    slot_expert, slot_rank, copies = replicate_experts(node_loads, slots // nodes)
    # 3. Slots to the node's GPUs.
    per_copy = np.take_along_axis(node_loads / copies.astype(np.float32), slot_expert, 1)
    gpu, place = balanced_packing(per_copy, gpus // nodes)
    slot_at = _inverse(gpu * (slots // gpus) + place)
    placed = np.take_along_axis(slot_expert, slot_at, 1).reshape(layers, nodes, -1)
    placed = (placed + (np.arange(nodes) * node_size)[:, None]).reshape(layers, slots)
    phy2log = np.take_along_axis(expert_at, placed, 1)
    rank = np.take_along_axis(slot_rank, slot_at, 1).reshape(layers, slots)
    logcnt = np.take_along_axis(copies.reshape(layers, n), in_node_order, 1)
    return phy2log, rank, logcnt


def _inverse(permutations: Index) -> Index:
    inverse = np.empty_like(permutations)
    np.put_along_axis(inverse, permutations, np.arange(permutations.shape[1])[None, :], 1)
    return inverse


def _table(weight: ArrayLike) -> F32:
    try:
        loads = np.asarray(weight, np.float32)
    except (TypeError, ValueError, OverflowError):
        raise BadPlacement("weights must be a table of numbers, one row for each layer") from None
    if loads.ndim != 2 or 0 in loads.shape:
        raise BadPlacement(f"weights must be a table [layers, experts], not of shape {loads.shape}")
    if not np.isfinite(loads).all() or (loads < 0).any():
        raise BadPlacement("weights must be finite and not negative")
    return loads


def _check_count(what: str, count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise BadPlacement(f"{what} {count} is out of range: give 1 to {most}")


def _check_divides(what: str, count: int, of: str, total: int) -> None:
    if total % count:
        raise BadPlacement(f"{what} {count} does not divide {of} {total}")
