"""Two ends that do not fit say so, with both values."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.dispatch.frames import SiteHoldings
from swarmnode.dispatch.hello import ModelKey, check_key, experts_of, mask_of, pack_holdings, unpack_holdings
from swarmnode.errors import BadFrame, HelloMismatch, UsageError
from tests.swarmnode.dispatch.samples import MODEL, SITES

SITE_OF = {site.index: site for site in SITES}


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"version": 3}, ("dispatch protocol version", "here 2", "there 3")),
        ({"model_hash": b"\x33" * 32, "model": "big"}, ("model", "11" * 32 + " (tiny)", "33" * 32 + " (big)")),
        ({"recipes_hash": b"\x44" * 32}, ("recipes hash", "22" * 32, "44" * 32)),
        ({"engine": "other 2"}, ("engine build", "null 1", "other 2")),
    ],
)
def test_each_mismatch_names_both_values(change: dict[str, object], both: tuple[str, ...]) -> None:
    ours = MODEL.key("here")
    theirs = dataclasses.replace(ours, **change)  # type: ignore[arg-type]  # fields of several types
    with pytest.raises(HelloMismatch) as caught:
        check_key(ours, theirs)
    for part in both:
        assert part in str(caught.value)


def test_names_may_differ() -> None:
    check_key(MODEL.key("here"), dataclasses.replace(MODEL, name="alias").key("there"))


@pytest.mark.parametrize("value", ["", "11", "zz" * 32, " " * 64])
def test_a_key_is_a_sha256(value: str) -> None:
    with pytest.raises(UsageError, match="model_hash"):
        ModelKey(value, "22" * 32, "x")


@given(st.sets(st.integers(0, 300)))
def test_masks_and_experts(experts: set[int]) -> None:
    assert set(experts_of(mask_of(experts))) == experts


def test_holdings_round_trip_and_are_judged_by_the_model() -> None:
    holdings = pack_holdings({1: (0, 15), 0: (3,)}, SITE_OF)
    assert unpack_holdings(holdings, SITE_OF) == {0: 1 << 3, 1: 1 | 1 << 15}
    for wrong in (SiteHoldings(9, 16, 1), SiteHoldings(0, 17, 1)):
        with pytest.raises(BadFrame, match=f"{wrong.n_expert} experts at site {wrong.site}"):
            unpack_holdings((wrong,), SITE_OF)
