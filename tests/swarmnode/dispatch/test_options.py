"""Settings that cannot be meant are refused where they are made."""

from __future__ import annotations

import pytest

from swarmnode.dispatch.options import DispatchOptions
from swarmnode.errors import UsageError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fast"}, "dispatch mode 'fast' is unknown; use exact or partial"),
        ({"wire_out": "int3"}, "wire type 'int3' is unknown; use f32, f16"),
        ({"wire_back": ""}, "wire type '' is unknown"),
        ({"late_floor_s": 9.0}, "late_floor_s 9 must be in"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        DispatchOptions(**settings)  # type: ignore[arg-type]  # wrong on purpose
    assert message in str(caught.value)
