"""How things look: styles by meaning, glyphs with and without Unicode, numbers with units in few cells. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style

PLAIN = Style()
DIM = Style(dim=True)
BOLD = Style(bold=True)
TITLE = Style(bold=True, color="cyan")
GOOD = Style(color="green")
WARN = Style(color="yellow")
BAD = Style(color="red", bold=True)
HEAD = Style(bold=True, underline=True)
SELECTED = Style(reverse=True)
SPARK = Style(color="cyan")
HEAT = tuple(Style(color=name) for name in ("blue", "cyan", "green", "yellow", "red"))  # seldom … most


@dataclass(frozen=True, slots=True)
class Look:
    """`ramp` are levels from nothing to full, `rule` draws titles, `full`/`empty` are a bar's cells."""

    ramp: str
    rule: str
    full: str
    empty: str
    mark: str
    down: str
    up: str


UNICODE = Look(" ▁▂▃▄▅▆▇█", "─", "━", "╌", "›", "↓", "↑")
ASCII = Look(" .:-=+*#@", "-", "#", ".", ">", "v", "^")


def spark(values: Sequence[float], width: int, look: Look) -> str:
    """The last `width` values, one cell each, newest at the right; a value that hardly changes is a low line."""
    shown = values[-width:] if width > 0 else []
    if not shown:
        return " " * max(0, width)
    low, high = min(shown), max(shown)
    span = max(high - low, 0.25 * abs(low), 1e-9)
    steps = len(look.ramp) - 2
    cells = [look.ramp[1 + round((value - low) / span * steps)] for value in shown]
    return "".join(cells).rjust(width)


def bar(share: float, width: int, look: Look) -> str:
    """A bar of `width` cells, `share` of it full."""
    full = round(max(0.0, min(1.0, share)) * width)
    return look.full * full + look.empty * (width - full)


def amount(n: float) -> str:
    """At most five cells: 0, 912, 1.3k, 13k, 1.3M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(n) < 999.5:
            return f"{n:.1f}{unit}" if unit and abs(n) < 9.95 else f"{n:.0f}{unit}"
        n /= 1000
    return f"{n:.0f}P"


def millis(ms: float) -> str:
    """At most five cells: 0.35, 12.4, 812, 1.3s."""
    if ms <= 0:
        return "–"
    if ms < 0.995:
        return f"{ms:.2f}"
    if ms < 99.95:
        return f"{ms:.1f}"
    return f"{ms:.0f}" if ms < 9999.5 else f"{ms / 1000:.0f}s"


def span(seconds: float) -> str:
    """A time in words of two units: 12 s, 3 m 05 s, 5 h 12 m, 3 d 4 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole // 60 % 60:02d} m"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def clock(at: float, utc_offset_s: int) -> str:
    """The time of day, 13:05:59."""
    second = int(at + utc_offset_s) % 86400
    return f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"


def size(n: float) -> str:
    """Bytes with a unit: 912 B, 1.3 MB."""
    short = amount(n)
    return f"{short[:-1]} {short[-1]}B" if short[-1].isalpha() else f"{short} B"
