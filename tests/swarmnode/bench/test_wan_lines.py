"""The file of rows is read as what somebody may have edited: a clear line, never a crash."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.bench.wan_lines import RowFile, key_of, load
from swarmnode.errors import UsageError

ABOUT = {"model": "demo", "seconds": 4.0}


def row(**other: Any) -> dict[str, Any]:
    axes = {"path": "direct", "mbit": None, "rtt_ms": 80.0, "levers": ["f16"], "text": "code", "temperature": 0.0}
    figures = {"tokens_per_s": 2.9, "steps_per_s": 2.9, "accepted_per_step": 1.0, "bound_tokens_per_s": 3.125}
    more = {
        "ratio_to_bound": 0.93,
        "bytes_per_token": 3450,
        "tokens": 15,
        "streams": 1,
        "blocking_round_trips_per_token": 4.0,
    }
    return {**axes, **figures, **more, **other}


def test_rows_outlive_the_run_that_measured_them(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "rows.jsonl"
    file = RowFile(path, ABOUT, resume=True)
    file.add(row())
    file.add(row(streams=4))
    again = RowFile(path, ABOUT, resume=True)
    assert again.rows == file.rows == load(path)[1]
    assert load(path)[0] == ABOUT
    assert key_of(again.rows[0]) != key_of(again.rows[1])


def test_a_line_that_was_cut_off_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, ABOUT, resume=False).add(row())
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"path": "dir')
    file = RowFile(path, ABOUT, resume=True)
    assert len(file.rows) == 1
    assert path.read_bytes() == whole
    file.add(row(streams=4))
    assert [one["streams"] for one in load(path)[1]] == [1, 4]


def test_a_file_of_other_rows_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, ABOUT, resume=False).add(row())
    before = path.read_bytes()
    with pytest.raises(UsageError, match="--resume"):
        RowFile(path, ABOUT, resume=False)
    with pytest.raises(UsageError, match="measured with model demo, not other"):
        RowFile(path, {**ABOUT, "model": "other"}, resume=True)
    assert path.read_bytes() == before
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "none.jsonl")


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "full").write_bytes(b"x")
    for path, said in ((tmp_path / "file" / "rows.jsonl", "written"), (tmp_path / "folder", "read")):
        with pytest.raises(UsageError, match=f"cannot be {said}") as caught:
            RowFile(path, ABOUT, resume=True)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["[1]", "{}", json.dumps(row(rtt_ms="far")), json.dumps(row(streams=0)), json.dumps(row(path="by air")), "\udcff"],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, ABOUT, resume=False).add(row())
    with path.open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(UsageError, match="line 3 is none of bench wan"):
        load(path)


@settings(deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_rows_or_one_clear_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    path.write_bytes(b'{"about": {}}\n' + data)
    with contextlib.suppress(UsageError):
        assert all(isinstance(one, dict) for one in load(path)[1])
