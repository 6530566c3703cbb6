"""Lines of segments → the bytes that turn what a terminal shows into them. Pure.

Only lines that differ from the last ones are sent, within a synchronized update (terminals that do not know it ignore
it), so nothing flickers. The bytes of a line are remembered: most lines come again.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.color import ColorSystem
from rich.style import Style

from swarmnode.dashboard.cells import Line, encoded

ENTER = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # alternate screen, no cursor, no wrapping, empty
LEAVE = b"\x1b[?2026l\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
MARK_PASTES = b"\x1b[?2004h"  # what is pasted comes between brackets, not as keys
LEAVE_PASTES = b"\x1b[?2004l"
_BEGIN, _END = b"\x1b[?2026h", b"\x1b[?2026l"
_REMEMBERED = 4096  # lines


class Screen:
    """What a terminal shows. `colour` off keeps bold, dim and reverse: NO_COLOR is about colours."""

    def __init__(self, *, colour: bool = True, encoding: str = "utf-8") -> None:
        self._colour, self._encoding = colour, encoding
        self._shown: list[Line] = []
        self._size = (0, 0)
        self._bytes: dict[Line, bytes] = {}
        self._styles: dict[Style, tuple[str, str]] = {}

    def forget(self) -> None:
        """The terminal may show anything now: the next frame is sent whole."""
        self._shown = []
        self._size = (0, 0)

    def update(self, lines: Sequence[Line], width: int) -> bytes:
        """What to send so that `lines` are seen; b"" where they are already."""
        parts: list[bytes] = []
        if (width, len(lines)) != self._size:
            self._size = width, len(lines)
            self._shown = []
            parts.append(b"\x1b[0m\x1b[2J")
        old = self._shown
        for i, line in enumerate(lines):
            if i < len(old) and (line is old[i] or line == old[i]):
                continue
            parts.append(b"\x1b[%d;1H" % (i + 1))
            parts.append(self._encoded(line))
        self._shown = list(lines)
        return b"".join([_BEGIN, *parts, _END]) if parts else b""

    def _encoded(self, line: Line) -> bytes:
        known = self._bytes.get(line)
        if known is None:
            if len(self._bytes) >= _REMEMBERED:
                self._bytes.clear()
            text = "".join(self._dressed(segment.text, segment.style) for segment in line)
            known = self._bytes[line] = encoded(text, self._encoding)
        return known

    def _dressed(self, text: str, style: Style | None) -> str:
        if style is None or not style:
            return text
        around = self._styles.get(style)
        if around is None:
            plain = style if self._colour else style.without_color
            before, _, after = plain.render("\0", color_system=ColorSystem.STANDARD).partition("\0")
            around = self._styles[style] = before, after
        return around[0] + text + around[1]
