"""A still of the view: plain text, SVG or HTML, of any size. A shell; called by `swarmnode dashboard`.

The pictures are rich's own exports of the very lines that the terminal would show.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from swarmnode.dashboard.cells import Line, text_of
from swarmnode.dashboard.layout import MIN_HEIGHT, MIN_WIDTH
from swarmnode.errors import UsageError
from swarmnode.output_file import write_output

DEFAULT = (120, 40)
_LARGEST = 500


class Lines:
    """Lines as a rich renderable."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            yield from line
            yield Segment.line()


def parse_size(text: str) -> tuple[int, int]:
    """COLUMNSxROWS. Raises UsageError."""
    found = re.fullmatch(r"(\d{1,4})[x×](\d{1,4})", text)
    columns, rows = (int(one) for one in found.groups()) if found else (0, 0)
    if not (MIN_WIDTH <= columns <= _LARGEST and MIN_HEIGHT <= rows <= _LARGEST):
        raise UsageError(f"--size {text}: give COLUMNSxROWS, such as 120x40, {MIN_WIDTH}x{MIN_HEIGHT} at least")
    return columns, rows


def as_text(lines: Sequence[Line]) -> str:
    """Plain text, no styles, no blanks at the ends of lines."""
    return "\n".join(text_of(line).rstrip() for line in lines) + "\n"


def write_svg(path: Path, lines: Sequence[Line], width: int) -> None:
    """A picture for a README. Raises ModelError where it cannot be written."""
    write_output(path, _recorded(lines, width).export_svg(title="swarmnode").encode())


def write_html(path: Path, lines: Sequence[Line], width: int) -> None:
    """A page of its own. Raises ModelError where it cannot be written."""
    write_output(path, _recorded(lines, width).export_html(inline_styles=True).encode())


def _recorded(lines: Sequence[Line], width: int) -> Console:
    console = Console(
        record=True, width=width, height=len(lines), file=io.StringIO(), force_terminal=True, color_system="truecolor",
        legacy_windows=False,
    )  # fmt: skip
    console.print(Lines(lines), end="")
    return console
