"""Cutting a request up and adding the shares' rows together again gives what one engine gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.recipe import Site
from swarmnode.dispatch.codec import F32, WireType, encode_rows
from swarmnode.dispatch.frames import Answer
from swarmnode.dispatch.request import Share, combine, make_request
from swarmnode.errors import BadAnswer, DispatchError
from tests.swarmnode.dispatch.samples import D_OUT, SITES, full_engine, local_rows, make_input


def cut(n_pairs: int, owners: list[int]) -> list[list[int]]:
    owner = np.resize(np.array(owners), n_pairs)
    return [np.flatnonzero(owner == o).tolist() for o in sorted(set(owner.tolist()))]


@pytest.mark.parametrize("site", SITES, ids=lambda s: f"{s.index}-{s.recipe.weights}")
@given(n=st.integers(1, 7), owners=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_any_shares_add_up(site: Site, n: int, owners: list[int]) -> None:
    x, ids, weights = make_input(site, n)
    expected = local_rows(site, x, ids, weights)
    for partial in (False, True):
        request = make_request(site, x, ids, weights, partial=partial)
        shares = [request.share(pairs) for pairs in cut(len(request.experts), owners)]
        rows = combine(request, [(share, share.compute(full_engine())) for share in shares])
        if partial:
            assert np.allclose(rows, expected, rtol=1e-5, atol=1e-6)
        else:
            assert rows.tobytes() == expected.tobytes()


def test_no_tokens_make_no_rows() -> None:
    site = SITES[0]
    request = make_request(site, *make_input(site, 0), partial=False)
    assert combine(request, []).shape == (0, D_OUT)


def one_share(*, partial: bool = False) -> Share:
    request = make_request(SITES[0], *make_input(SITES[0], 2), partial=partial)
    return request.share(range(3))


def answer_of(rows: F32) -> Answer:
    wire, data = encode_rows(rows, WireType.F32)
    return Answer(1, wire, len(rows), 0, 0, data)


def test_answers_are_judged() -> None:
    share, good = one_share(), np.ones((3, D_OUT), np.float32)
    assert np.array_equal(share.read(answer_of(good)), good)
    with pytest.raises(BadAnswer, match="answered 2 rows where 3 were asked for"):
        share.read(answer_of(good[:2]))
    with pytest.raises(BadAnswer, match=f"3 rows of {D_OUT} values as F32 take 480 bytes, but 468 came"):
        share.read(answer_of(good[:, :-1]))
    with pytest.raises(BadAnswer, match="unknown wire type 77"):
        share.read(dataclasses.replace(answer_of(good), wire=77))
    for poison in (np.nan, np.inf, -np.inf):
        bad = good.copy()
        bad[1, 2] = poison
        with pytest.raises(BadAnswer, match="NaN or infinity"):
            share.read(answer_of(bad))


def test_a_partial_answer_has_a_row_per_token_touched() -> None:
    assert one_share(partial=True).n_rows_back == 1
    assert one_share(partial=False).n_rows_back == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.zeros((2, 3), np.int32)}, "layer 10: ids (2, 3)"),
        ({"weights": np.zeros((1, 4), np.float32)}, "and weights (1, 4)"),
        ({"x": np.zeros((3, 48), np.float32)}, "layer 10: x is (3, 48); it must be [2, 48]"),
        ({"ids": np.full((2, 4), 16, np.int32)}, "an expert outside 0…15"),
        ({"ids": np.full((2, 4), -1, np.int32)}, "an expert outside 0…15"),
        ({"x": np.full((2, 48), np.nan, np.float32)}, "x holds NaN"),
    ],
)
def test_what_the_hook_cannot_mean_is_refused(
    change: dict[str, np.ndarray[tuple[int], np.dtype]], message: str
) -> None:
    x, ids, weights = make_input(SITES[0], 2)
    arguments = {"x": x, "ids": ids, "weights": weights} | change
    with pytest.raises(DispatchError) as caught:
        make_request(SITES[0], partial=False, **arguments)
    assert message in str(caught.value)


def test_calls_are_sized_so_that_neither_way_exceeds_the_limit() -> None:
    x, ids, weights = make_input(SITES[0], 100)
    exact = make_request(SITES[0], x, ids, weights, partial=False)
    assert exact.pairs_in(1 << 30) == 400
    assert exact.pairs_in(100 * 48 * 4) == 100 * 48 // D_OUT  # every pair comes back
    partial = make_request(SITES[0], x, ids, weights, partial=True)
    assert partial.pairs_in(100 * 48 * 4) == 400  # never more rows than tokens
    assert partial.pairs_in(50 * 48 * 4) == 50 * SITES[0].n_used  # as many tokens, with all of their pairs
