"""docs/status.md names every field that `status --json` prints, and no other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from swarmnode import status
from swarmnode.coordination.lead import summary

PAGE = Path(__file__).parents[2] / "docs" / "status.md"
SHAPES = {name: shape for name, shape in vars(status).items() if name.endswith("Status")}


def sections() -> dict[str, list[list[str]]]:
    """Struct → rows of its table, each (field, type, what)."""
    parts = re.split(r"^## (\w+)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {
        name: [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def test_every_shape_has_a_section_and_no_other_has_one() -> None:
    assert len(SHAPES) >= 8
    assert set(sections()) == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_every_field_has_its_row_in_order_with_its_type(name: str) -> None:
    rows = sections()[name]
    fields = msgspec.structs.fields(SHAPES[name])
    assert [row[0].strip("`") for row in rows] == [field.name for field in fields]
    assert all(len(row) == 3 and len(row[2]) > 3 for row in rows)
    simple = {str: "text", int: "integer", float: "number", bool: "boolean"}
    for row, field in zip(rows, fields, strict=True):
        if field.type in simple:
            assert row[1] == simple[field.type], field.name
        elif getattr(field.type, "__origin__", None) is dict:
            assert row[1] == "object", field.name


def test_the_counters_and_the_plan_are_spelt_out() -> None:
    text = PAGE.read_text("utf-8")
    told = status.TransportStatus.__doc__ or ""
    for name in re.findall(r"`([a-z_]+)`", told):
        assert f"`{name}`" in text, name
    keys = re.findall(r'^        "(\w+)":', inspect.getsource(summary), flags=re.MULTILINE)
    assert {"why", "workers", "uncovered"} <= set(keys)
    for key in keys:
        assert f"`{key}`" in text, key
