"""The event log: the newest lines, oldest of them first. Pure."""

from __future__ import annotations

from rich.segment import Segment

from swarmnode.dashboard import look as looks
from swarmnode.dashboard.cells import Line, pad, wrap
from swarmnode.dashboard.look import clock
from swarmnode.dashboard.model import Model
from swarmnode.event_lines import TROUBLE

_INDENT = 11  # cells: the time of day and a space on both sides


def event_log(model: Model, width: int, height: int, *, whole: bool = False) -> list[Line]:
    """The last `height` lines; with `whole` an event may take several, else it is cut."""
    lines: list[Line] = []
    for one in reversed(model.events):
        style = looks.WARN if one.event in TROUBLE else looks.PLAIN
        pieces = wrap(one.text, width - _INDENT) if whole else [one.text]
        block = [
            pad([Segment(f" {clock(one.at, model.utc_offset_s)}  " if i == 0 else " " * _INDENT, looks.DIM),
                 Segment(piece, style)], width)
            for i, piece in enumerate(pieces or [""])
        ]  # fmt: skip
        lines = block + lines
        if len(lines) >= height:
            break
    if not lines:
        lines = [pad([Segment(" nothing has happened yet", looks.DIM)], width)]
    return lines[-height:] if height > 0 else []
