"""Settings that cannot be meant are refused where they are made."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnode.dispatch.codec import WireType
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.errors import UsageError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fast"}, "dispatch mode 'fast' is unknown; use exact or partial"),
        ({"wire_out": "int3"}, "wire type 'int3' is unknown; use f32, f16, int8, fp8"),
        ({"site_wires": {3: ("f16", "f8")}}, "wire type 'f8' is unknown"),
        ({"wire_back": ""}, "wire type '' is unknown"),
        ({"late_floor_s": 9.0}, "late_floor_s 9 must be in"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        DispatchOptions(**settings)  # wrong on purpose
    assert message in str(caught.value)


def test_a_site_may_have_wires_of_its_own() -> None:
    options = DispatchOptions(wire_out="int8", wire_back="f16", site_wires={2: ("f16", "f32")})
    assert options.wires(0) == (WireType.INT8, WireType.F16)
    assert options.wires(2) == (WireType.F16, WireType.F32)
    assert options.coarsest_wire(0) is WireType.INT8
    assert options.coarsest_wire(2) is WireType.F16
    assert DispatchOptions(site_wires={0: ("f32", "fp8")}).coarsest_wire(0) is WireType.FP8
    assert DispatchOptions(site_wires={0: ("f32", "fp8")}).coarsest_wire(1) is WireType.F32
