"""Text that others chose, made harmless, in any encoding, and lines that are exactly as wide as they should be. Pure.

A line is a tuple of rich segments. Nothing here parses markup, and no control character passes `clean`: not an escape
sequence, not a change of direction, not a mark that would pile up on its neighbours. Used by all panels.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

Line = tuple[Segment, ...]

MAX_TEXT = 1024  # characters looked at: nothing wider is ever shown
MAX_MARKS = 2  # combining marks on one character; scripts that need more are rare, towers of them are not
_BAD = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_UNSEEN = frozenset("\u115f\u1160\u2800\u3164\uffa0")  # letters and a symbol that are drawn as nothing
_STAND_INS = {
    "·": "-", "…": "~", "↑": "^", "↓": "v", "–": "-", "—": "-", "−": "-", "×": "x", "›": ">", "→": ">", "≈": "~",
    "“": '"', "”": '"', "’": "'", "─": "-", "━": "=", "╌": ".", "µ": "u",
}  # fmt: skip
_MARKS = frozenset({"Mn", "Me", "Mc"})
_PLAIN = Style()
_SPACES = " " * 512


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """`text` as one line of printable characters; what is not becomes a middle dot, line breaks become spaces."""
    text = text[:MAX_TEXT]
    if text.isascii() and text.isprintable():
        return text
    out: list[str] = []
    marks = 0
    for one in unicodedata.normalize("NFC", text):
        kind = unicodedata.category(one)
        if kind in _MARKS:
            marks += 1
            if marks <= MAX_MARKS and out:
                out.append(one)
            continue
        marks = 0
        if one in "\n\t\r" or kind == "Zs":
            out.append(" ")
        else:
            out.append("·" if kind in _BAD or one in _UNSEEN else one)
    return "".join(out)


def encoded(text: str, encoding: str) -> bytes:
    """For a terminal or a pipe: what the encoding lacks is something similar, or question marks, in as many cells."""
    try:
        return text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(_stand_in(one, encoding) for one in text).encode(encoding, "replace")


@lru_cache(maxsize=4096)
def _stand_in(one: str, encoding: str) -> str:
    try:
        one.encode(encoding)
    except UnicodeEncodeError:
        return _STAND_INS.get(one, "?" * cell_len(one))
    return one


def width_of(text: str) -> int:
    """Cells of a clean text."""
    return len(text) if text.isascii() else cell_len(text)


@lru_cache(maxsize=16384)
def fit(text: str, width: int, right: bool = False) -> str:
    """A clean text in exactly `width` cells: padded, or cut with an ellipsis at the end."""
    if width <= 0:
        return ""
    wide = width_of(text)
    if wide > width:
        dots = "…" if not text.isascii() or width > 1 else ""
        return set_cell_size(text, width - len(dots)) + dots
    return _SPACES[: width - wide] + text if right else text + " " * (width - wide)


def pad(line: Iterable[Segment], width: int) -> Line:
    """A line in exactly `width` cells."""
    out: list[Segment] = []
    left = width
    for segment in line:
        wide = width_of(segment.text)
        if wide > left:
            if left:
                out.append(Segment(fit(segment.text, left), segment.style))
            return tuple(out)
        out.append(segment)
        left -= wide
    if left:
        out.append(Segment(" " * left, _PLAIN))
    return tuple(out)


def text_of(line: Line) -> str:
    """A line's text alone."""
    return "".join(segment.text for segment in line)


def wrap(text: str, width: int) -> list[str]:
    """A clean text in lines of at most `width` cells, broken at spaces where there are some."""
    lines: list[str] = []
    rest = text
    while rest and width > 0:
        if width_of(rest) <= width:
            lines.append(rest)
            break
        piece = set_cell_size(rest, width).rstrip(" ")
        cut = piece.rfind(" ")
        if len(piece) < len(rest) and rest[len(piece)] != " " and cut > 0:
            piece = piece[:cut]
        piece = piece or rest[:1]  # one character that is wider than all there is
        lines.append(piece.rstrip())
        rest = rest[len(piece) :].lstrip(" ")
    return lines
