"""A CALL before the engine sees it: what the client really sends passes, and every lie is refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.admission import AdmissionLimits
from swarmnode.dispatch.call_check import check_call
from swarmnode.dispatch.codec import WireType
from swarmnode.dispatch.engine_thread import run_call
from swarmnode.dispatch.frame_decoder import FrameDecoder
from swarmnode.dispatch.frames import Answer, CallFrame, FrameType, RefuseCode
from swarmnode.dispatch.request import make_request
from tests.swarmnode.dispatch.samples import D_IN, SITES, full_engine, make_input

LIMITS = AdmissionLimits()
HELD = (1 << 16) - 1
BY_INDEX = {site.index: site for site in SITES}


def good(site: int = 0, n: int = 3, *, partial: bool = True) -> CallFrame:
    request = make_request(SITES[site], *make_input(SITES[site], n), partial=partial)
    return request.share(range(len(request.experts))).frame(1, WireType.F32, WireType.F32)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("site", [0, 1, 2])
def test_what_the_client_sends_passes(site: int, partial: bool) -> None:
    assert check_call(good(site, partial=partial), BY_INDEX, HELD, LIMITS) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.array([0, 1, 3] * 4, np.uint16)}, "token 3 of 3"),
        ({"experts": np.array([16] + [0] * 11, np.uint16)}, "expert 16 of 16"),
        ({"n_tokens": 0}, "0 tokens for 12 pairs"),
        ({"n_tokens": 13}, "13 tokens for 12 pairs"),
        ({"n_rows": 4}, "4 rows of x for 3 tokens and 12 pairs"),
        ({"rows": bytes(5)}, "5 bytes of x where 3 rows of 48 take 576"),
        ({"wire_out": 9}, "wire types 9 and 0"),
        ({"wire_back": 9}, "wire types 0 and 9"),
        ({"row_per_pair": True}, "site 0 takes one row of x per token"),
        ({"weights": np.array([np.nan] * 12, np.float32)}, "a router weight is NaN or infinite"),
        ({"experts": np.zeros(0, np.uint16)}, f"0 pairs; 1 to {LIMITS.max_pairs} are taken"),
    ],
)
def test_a_lie_is_refused_by_name(change: dict[str, object], message: str) -> None:
    frame = dataclasses.replace(good(), **change)  # type: ignore[arg-type]  # fields of several types
    refusal = check_call(frame, BY_INDEX, HELD, LIMITS)
    assert refusal is not None
    assert refusal[0] is RefuseCode.BAD_REQUEST
    assert message in refusal[1]


def test_what_is_not_held_is_named() -> None:
    frame = dataclasses.replace(good(), experts=np.array([3, 4, 9, 3] * 3, np.uint16))
    held = HELD & ~(1 << 3 | 1 << 9)
    assert check_call(frame, BY_INDEX, held, LIMITS) == (RefuseCode.NOT_HELD, "experts 3, 9 not held here")
    assert check_call(frame, BY_INDEX, 0, LIMITS) == (RefuseCode.NOT_HELD, "experts 3, 4, 9 not held here")


def test_a_site_that_does_not_exist_and_a_call_that_is_too_large() -> None:
    assert check_call(good(), {}, 0, LIMITS) == (RefuseCode.BAD_REQUEST, "the model has no site 0")
    small = AdmissionLimits(max_bytes=500)
    assert check_call(good(), BY_INDEX, HELD, small) == (RefuseCode.BAD_REQUEST, "576 bytes one way; 500 are taken")


@given(st.data())
def test_whatever_passes_the_engine_can_compute(data: st.DataObject) -> None:
    site = SITES[data.draw(st.integers(0, 2))]
    small = st.integers(0, 6)
    n_pairs, n_rows = data.draw(small), data.draw(small)
    partial, row_per_pair = data.draw(st.booleans()), data.draw(st.booleans())
    index = st.integers(0, 7)
    frame = CallFrame(
        1,
        site.index,
        partial,
        row_per_pair,
        data.draw(st.integers(0, 2)),
        data.draw(st.integers(0, 2)),
        data.draw(small),
        n_rows,
        np.array(data.draw(st.lists(index, min_size=n_pairs, max_size=n_pairs)), np.uint16),
        np.array(data.draw(st.lists(st.integers(0, 17), min_size=n_pairs, max_size=n_pairs)), np.uint16),
        np.ones(n_pairs, np.float32) if partial and not row_per_pair else None,
        bytes(n_rows * D_IN * data.draw(st.sampled_from([2, 4]))),
    )
    if check_call(frame, BY_INDEX, HELD, LIMITS) is None:
        [answer] = FrameDecoder(FrameType).feed(run_call(full_engine(), site, frame, 0.0).frame)
        assert isinstance(answer, Answer)
