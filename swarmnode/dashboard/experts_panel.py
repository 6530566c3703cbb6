"""The heat map: which experts the router has chosen lately, layer by layer. Pure.

`status.selected` has one hexadecimal digit per expert; where there is less room than experts or layers, a cell shows
the most chosen one of its group.
"""

from __future__ import annotations

from rich.segment import Segment

from swarmnode.dashboard import look as looks
from swarmnode.dashboard.cells import Line, clean, fit, pad
from swarmnode.dashboard.look import Look
from swarmnode.dashboard.model import Model

_WIDEST = 3  # cells of one expert
_LABEL = 6  # cells: "12-13 "
_DIGITS = {digit: value for value, digit in enumerate("0123456789abcdef")}


def has_heat(model: Model) -> bool:
    """Has any choice been counted?"""
    return model.status is not None and bool(model.status.selected)


def heat_lines(model: Model, width: int, height: int, look: Look) -> list[Line]:
    """At most `height` lines of layers, a scale below them where there is room."""
    if model.status is None or not model.status.selected:
        text = "no choices counted here: the founder of a swarm counts them, 64 tokens at a time"
        return [pad([Segment(f" {text}", looks.DIM)], width)][:height]
    rows = list(model.status.selected.items())
    with_scale = height > len(rows)
    groups = _split(len(rows), max(1, height - with_scale))
    lines = []
    for first, last in groups:
        label = rows[first][0] if last == first + 1 else f"{rows[first][0]}-{rows[last - 1][0]}"
        digits = [digits for _, digits in rows[first:last]]
        lines.append(
            pad(
                [Segment(fit(clean(label), _LABEL - 1, right=True) + " ", looks.DIM), *_cells(digits, width, look)],
                width,
            )
        )
    if with_scale:
        experts = max(len(digits) for _, digits in rows)
        text = f"{experts} experts, seldom {look.ramp[1:]} most chosen of its layer"
        lines.append(pad([Segment(" " * _LABEL + text, looks.DIM)], width))
    return lines[:height]


def _cells(rows: list[str], width: int, look: Look) -> list[Segment]:
    count = max(1, *(len(row) for row in rows))
    out: list[Segment] = []
    room = max(1, width - _LABEL - 1)
    wide = max(1, min(_WIDEST, room // count))
    for first, last in _split(count, room):
        most = max((_DIGITS.get(digit, 0) for row in rows for digit in row[first:last]), default=0)
        step = -(-most * (len(look.ramp) - 1) // 15)
        style = looks.HEAT[min(len(looks.HEAT) - 1, most // 3)] if most else looks.DIM
        glyph = look.ramp[step] if most else ("·" if look is looks.UNICODE else " ")
        glyph *= wide
        if out and out[-1].style is style:
            out[-1] = Segment(out[-1].text + glyph, style)
        else:
            out.append(Segment(glyph, style))
    return out


def _split(count: int, most: int) -> list[tuple[int, int]]:
    """`count` things in at most `most` groups of nearly the same size."""
    groups = min(count, most)
    return [(i * count // groups, (i + 1) * count // groups) for i in range(groups)]
