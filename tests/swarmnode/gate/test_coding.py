"""What arrives of rows, and that another codec has another fingerprint."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarmnode.dispatch.codec import F32, Buffer, WireName, WireType, decode_rows, encode_rows
from swarmnode.errors import BadFrame
from swarmnode.fidelity import row_cosines
from swarmnode.gate.coding import WIRES, Codec, pair_bytes, pair_name
from tests.swarmnode.gate.bad_codecs import ONE_SCALE

rows_2d = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=300).map(lambda s: (min(s[0], 3), s[1])),
    elements=st.floats(-60000, 60000, width=32),
)


@pytest.mark.parametrize(("wire", "cosine"), [("f32", 1.0), ("f16", 0.9999999), ("int8", 0.9999), ("fp8", 0.999)])
def test_each_type_keeps_the_direction(wire: WireName, cosine: float) -> None:
    rows = np.random.default_rng(1).standard_normal((7, 300), np.float32)
    there = Codec().through(rows, wire)
    assert there.dtype == np.float32
    assert row_cosines(rows, there).min() >= cosine - 1e-9


@given(rows_2d)
def test_shapes_stay_and_nothing_becomes_infinite(rows: F32) -> None:
    for wire in WIRES:
        there = Codec().through(rows, wire)
        assert there.shape == rows.shape
        assert np.isfinite(there).all()


def test_one_row_that_does_not_fit_does_not_spare_the_others() -> None:
    rows = np.random.default_rng(2).standard_normal((4, 256), np.float32)
    alone = Codec().through(rows[:1], "f16")
    rows[2, 5] = 1e30  # this one goes as F32
    there = Codec().through(rows, "f16")
    assert np.array_equal(there[:1], alone)
    assert not np.array_equal(there[:1], rows[:1])
    assert np.array_equal(there[2], rows[2])


def test_what_a_receiver_refuses_is_nan() -> None:
    def refuse(data: Buffer, wire: WireType, n: int, d: int) -> F32:
        if wire is WireType.INT8:
            raise BadFrame("a scale that no encoder makes")
        return decode_rows(data, wire, n, d)

    codec = Codec(encode_rows, refuse)
    assert np.isnan(codec.through(np.ones((2, 3), np.float32), "int8")).all()
    assert codec.fingerprint() != Codec().fingerprint()


def test_fingerprints() -> None:
    assert len(bytes.fromhex(Codec().fingerprint())) == 32
    assert Codec().fingerprint() == Codec(partial(encode_rows), decode_rows).fingerprint()  # computed anew
    assert Codec().fingerprint() != ONE_SCALE.fingerprint()
    halved = Codec(encode_rows, lambda data, wire, n, d: decode_rows(data, wire, n, d) * np.float32(0.5))
    assert Codec().fingerprint() != halved.fingerprint()


def test_names_and_sizes() -> None:
    assert pair_name(("int8", "f16")) == "INT8/F16"
    assert pair_bytes(("f32", "f32"), 256, 128) == 4 * (256 + 128)
    assert pair_bytes(("int8", "f16"), 256, 128) == 256 + 2 * 2 + 2 * 128
