"""Counting what the router chooses, forgetting it slowly, and keeping it over a restart."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import BadPlacement
from swarmnode.placement.routing import FOLD, SAMPLES, RoutingStats
from tests.swarmnode.placement.traces import clustered, stats_of

# Two sites; what site 0 was told: experts 0 and 2 together, then 2 and 1.
VECTOR = (
    "53525331 0000000000006940 02000000"  # SRS1, half-life 200, two sites
    "00000000 03000000 02000000 0000000000000040 0200000000000000 02000000 01 0000803f"  # 2 tokens, 2 samples
    "0000803f 0000803f 00000040 0000 003c 003c 0000 0200 0200 0100"
    "07000000 02000000 00000000 0000000000000000 0000000000000000 00000000 01 0000803f"
    "00000000 00000000 0000"
)


def test_counts_pairs_and_samples() -> None:
    stats = RoutingStats({0: 4, 3: 2}, half_life=1e12)
    stats.note(0, np.array([[0, 2], [2, 1]], np.int32))
    stats.note(0, np.array([[2, 0]], np.int32))
    stats.note(3, np.array([[1]], np.int32))
    stats.flush()
    assert stats.weights(0) == pytest.approx([2, 1, 3, 0])
    assert stats.pairs(0) == pytest.approx(np.array([[0, 0, 2, 0], [0, 0, 1, 0], [2, 1, 0, 0], [0, 0, 0, 0]]))
    assert stats.tokens(0) == pytest.approx(3)
    assert stats.samples(0).tolist() == [[0, 2], [2, 1], [2, 0]]
    assert stats.weights(3) == pytest.approx([0, 1])


def test_the_array_may_be_reused_after_note() -> None:
    stats = RoutingStats({0: 4})
    ids = np.array([[0, 1]], np.int32)
    stats.note(0, ids)
    ids[:] = 3
    stats.flush()
    assert stats.weights(0)[3] == 0


def test_counted_by_itself_after_a_while() -> None:
    stats = RoutingStats({0: 4})
    for _ in range(FOLD):
        stats.note(0, np.array([[1, 2]], np.int32))
    assert stats.weights(0)[1] == pytest.approx(FOLD)


def test_old_choices_lose_half_their_weight_each_half_life() -> None:
    stats = RoutingStats({0: 4}, half_life=1000)
    stats.note(0, np.tile(np.array([[0, 1]], np.int32), (500, 1)))
    for _ in range(3000 // 100):
        stats.note(0, np.tile(np.array([[2, 3]], np.int32), (100, 1)))
    assert stats.weights(0)[0] == pytest.approx(500 / 8)
    pairs = stats.pairs(0)
    assert pairs is not None
    assert pairs[0, 1] == pytest.approx(500 / 8, rel=1e-5)
    for _ in range(100_000 // 100):  # far beyond where the unit of the counts is renewed
        stats.note(0, np.tile(np.array([[2, 3]], np.int32), (100, 1)))
    assert stats.weights(0)[2] == pytest.approx(1000 / np.log(2), rel=0.05)
    assert stats.weights(0)[0] < 1e-20
    stats.note(0, np.tile(np.array([[1, 3]], np.int32), (90_000, 1)))
    assert np.isfinite(stats.weights(0)).all()


def test_samples_are_bounded_and_reach_back() -> None:
    stats = RoutingStats({0: 8})
    for token in range(3 * SAMPLES):
        stats.note(0, np.array([[token % 7, 7]], np.int32))
    assert stats.samples(0).shape == (SAMPLES, 2)
    assert sorted(set(stats.samples(0)[:, 0].tolist())) == list(range(7))


@pytest.mark.parametrize(
    "ids",
    [[[4, 0]], [[-1, 0]], [[0, 1, 2]], [[]], [0, 1], np.empty((0, 2))],
    ids=["too high", "negative", "another number", "no experts", "flat", "no tokens"],
)
def test_what_does_not_fit_is_left_out(ids: object) -> None:
    stats = RoutingStats({0: 4})
    stats.note(0, np.array([[0, 1]], np.int32))
    stats.note(0, np.array(ids, np.int32))
    stats.note(9, np.array([[0, 1]], np.int32))
    stats.flush()
    assert stats.weights(0).tolist() == pytest.approx([1, 1, 0, 0])


def test_sites_of_very_many_experts_have_no_pairs() -> None:
    stats = RoutingStats({0: 5000})
    stats.note(0, np.array([[4999, 1]], np.int32))
    stats.flush()
    assert stats.pairs(0) is None
    assert RoutingStats.from_bytes(stats.to_bytes(), {0: 5000}).weights(0)[4999] == 1


def test_bad_constructions() -> None:
    with pytest.raises(BadPlacement, match="0 experts"):
        RoutingStats({0: 0})
    with pytest.raises(BadPlacement, match="half-life"):
        RoutingStats({0: 4}, half_life=float("nan"))
    with pytest.raises(BadPlacement, match="no routing statistics of site 1"):
        RoutingStats({0: 4}).weights(1)


def test_the_file_survives_a_restart() -> None:
    stats = stats_of({0: clustered(32, 4, 4, noise=0.1), 5: clustered(32, 4, 8, noise=0.5, seed=1)}, 32)
    again = RoutingStats.from_bytes(stats.to_bytes(), {0: 32, 5: 32})
    for site in (0, 5):
        assert again.weights(site) == pytest.approx(stats.weights(site), rel=1e-5)
        assert again.pairs(site) == pytest.approx(stats.pairs(site), rel=1e-3, abs=1e-2)
        assert (again.samples(site) == stats.samples(site)).all()
        assert again.tokens(site) == stats.tokens(site)
    again.note(0, np.array([[1, 2, 3, 4]], np.int32))
    again.flush()
    assert again.tokens(0) == pytest.approx(stats.tokens(0) + 1, rel=1e-3)


def test_the_layout_of_the_file() -> None:
    body = bytes.fromhex(VECTOR)
    data = body + struct.pack("<I", zlib.crc32(body))
    stats = RoutingStats.from_bytes(data, {0: 3, 7: 2})
    assert stats.weights(0).tolist() == [1, 1, 2]
    assert stats.pairs(0) == pytest.approx(np.array([[0, 0, 1], [0, 0, 1], [1, 1, 0]]))
    assert stats.samples(0).tolist() == [[0, 2], [2, 1]]
    assert stats.to_bytes() == data


@pytest.mark.parametrize("sites", [{0: 3}, {0: 3, 7: 3}, {0: 3, 8: 2}, {0: 3, 7: 2, 8: 2}])
def test_the_file_of_another_model(sites: dict[int, int]) -> None:
    body = bytes.fromhex(VECTOR)
    with pytest.raises(BadPlacement):
        RoutingStats.from_bytes(body + struct.pack("<I", zlib.crc32(body)), sites)


@given(st.binary(max_size=300))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadPlacement):
        RoutingStats.from_bytes(data, {0: 3, 7: 2})


@given(st.integers(0, len(bytes.fromhex(VECTOR)) - 1), st.binary(min_size=1, max_size=8), st.integers(0, 40))
def test_a_damaged_file_is_refused_or_makes_sense(at: int, junk: bytes, cut: int) -> None:
    body = bytearray(bytes.fromhex(VECTOR))
    body[at : at + len(junk)] = junk
    body = body[: len(body) - cut]
    try:
        stats = RoutingStats.from_bytes(bytes(body) + struct.pack("<I", zlib.crc32(body)), {0: 3, 7: 2})
    except BadPlacement:
        return
    for site, n in ((0, 3), (7, 2)):
        weights, pairs, samples = stats.weights(site), stats.pairs(site), stats.samples(site)
        assert pairs is not None
        assert np.isfinite(weights).all()
        assert np.isfinite(pairs).all()
        assert samples.size == 0 or samples.max() < n
    stats.note(0, np.array([[1, 2]], np.int32))
    stats.flush()
    RoutingStats.from_bytes(stats.to_bytes(), {0: 3, 7: 2})
