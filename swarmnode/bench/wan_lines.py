"""Rows of `bench wan` in a file of JSON lines, so that what was measured outlives an interruption.

    {"about": {"model": …, "seconds": …, …}}     the first line: what all rows have in common
    {"rtt_ms": 80.0, …}                          a row per line, appended as soon as it is measured

A file goes on only where `about` is the same. A last line without an end was cut off while it was written: it is left
out, and overwritten by what comes next. Called by `wan.py`; nothing is measured here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmnode.bench.wan_swarm import PathName
from swarmnode.bench.wan_text import TextClass
from swarmnode.errors import UsageError

MAX_BYTES = 64 << 20  # of a file: a full grid has 0.1 MB
Row = dict[str, Any]  # JSON: numbers, texts, lists of texts; see `wan.py`
Key = tuple[Any, ...]  # the values of AXES

AXES = ("path", "mbit", "rtt_ms", "levers", "text", "temperature", "streams")

_Number = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Line(msgspec.Struct, frozen=True):
    """What a row must have to be shown; the others of its fields are taken as they come."""

    path: PathName
    mbit: _Number | None
    rtt_ms: _Number
    levers: Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=32)]
    text: TextClass
    temperature: _Number
    streams: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    tokens_per_s: _Number
    steps_per_s: _Number
    accepted_per_step: _Number
    blocking_round_trips_per_token: _Number
    bound_tokens_per_s: _Number | None
    ratio_to_bound: _Number | None
    bytes_per_token: _Count
    tokens: _Count


class _About(msgspec.Struct, frozen=True):
    about: dict[str, Any]  # compared and shown, nothing else


def key_of(row: Mapping[str, Any]) -> Key:
    """What a row is a measurement of; equal for the same cell of two runs."""
    return tuple(tuple(row[axis]) if axis == "levers" else row[axis] for axis in AXES)


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What a file says all rows have in common, and its rows. UsageError where it is not such a file."""
    about, rows, _end = _read(path)
    return about, rows


class RowFile:
    """A file that rows are appended to. `rows` are those it had already."""

    def __init__(self, path: Path, about: Mapping[str, Any], *, resume: bool) -> None:
        """Begin a file, or with `resume` go on with it. UsageError where there is one already, or one of other rows."""
        self._path = path
        self.rows: list[Row] = []
        try:
            self._begin(about, resume=resume)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None

    def _begin(self, about: Mapping[str, Any], *, resume: bool) -> None:
        path = self._path
        if path.exists() and path.stat().st_size:
            if not resume:
                raise UsageError(f"{path}: is there already; go on with it by --resume, or give another --out")
            before, self.rows, end = _read(path)
            if different := sorted(name for name in {*before, *about} if before.get(name) != about.get(name)):
                name = different[0]
                raise UsageError(
                    f"{path}: was measured with {name} {before.get(name)}, not {about.get(name)}; give another --out"
                )
            with path.open("r+b") as file:
                file.truncate(end)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"about": dict(about)})

    def add(self, row: Row) -> None:
        """Keep a row, on disk when this returns."""
        self._append(row)
        self.rows.append(row)

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UsageError(f"{self._path}: cannot be written ({error.strerror})") from None


def _read(path: Path) -> tuple[dict[str, Any], list[Row], int]:
    """About, rows, and how many bytes of the file are whole lines."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: has more than {MAX_BYTES} bytes; that is no file of bench wan")
    end = data.rfind(b"\n") + 1
    lines = data[:end].splitlines()
    if not lines:
        raise UsageError(f"{path}: has no line that bench wan wrote; give a file that --out made")
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        try:
            if number == 1:
                about = msgspec.json.decode(line, type=_About).about
                continue
            row = msgspec.json.decode(line, type=Row)
            msgspec.convert(row, _Line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path}: line {number} is none of bench wan: {error}") from None
        rows.append(row)
    return about, rows, end
