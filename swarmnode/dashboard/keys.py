"""Bytes from a terminal → keys → actions. Pure.

Takes what terminals send for arrows and such (ECMA-48 and the VT sequences, as xterm sends them); what is not known is
swallowed whole, so that no part of a sequence is taken for a letter. UTF-8 for what is typed. What is pasted comes
between brackets (xterm's mode 2004) and is no key: only the filter takes it.
"""

from __future__ import annotations

import codecs

from swarmnode.dashboard.ui import MAX_FILTER, Action, Overlay, Sort, Ui, apply, typed

MAX_SEQUENCE = 32  # bytes of one escape sequence; longer ones are noise
_PASTE, _PASTED = "[200~", "[201~"
ESCAPE = "escape"

_NAMED = {
    "[A": "up", "[B": "down", "[H": "home", "[F": "end", "[1~": "home", "[4~": "end", "[7~": "home", "[8~": "end",
    "[5~": "page up", "[6~": "page down", "OA": "up", "OB": "down", "OH": "home", "OF": "end",
}  # fmt: skip
_ALWAYS = {
    "up": Action.UP, "down": Action.DOWN, "home": Action.FIRST, "end": Action.LAST,
    "page up": Action.PAGE_UP, "page down": Action.PAGE_DOWN, ESCAPE: Action.BACK, "\r": Action.OPEN, "\n": Action.OPEN,
    "\x7f": Action.ERASE, "\x08": Action.ERASE, "\x15": Action.CLEAR, "\x0c": Action.REDRAW, "\t": Action.PAGE,
}  # fmt: skip
_LETTERS = {
    "s": Action.SORT, "r": Action.REVERSE, "/": Action.FILTER, "f": Action.FILTER, "p": Action.PAUSE,
    " ": Action.PAUSE, "o": Action.OPEN, "t": Action.TICKET, "h": Action.HELP, "?": Action.HELP, "q": Action.QUIT,
    "y": Action.YES, "k": Action.UP, "j": Action.DOWN, "g": Action.FIRST, "G": Action.LAST,
}  # fmt: skip

HELP = (
    ("↑ ↓ j k", "choose a peer; PgUp PgDn Home End too"),
    ("Enter o", "open the peer that is chosen; Esc goes back"),
    ("s  r", f"sort by the next of {', '.join(one.value for one in Sort)}; reverse"),
    ("/ f", "show only peers whose name, id, role, path or reason has this"),
    ("Tab", "all · peers · experts · events"),
    ("p Space", "pause, and go on"),
    ("t", "the ticket that lets devices in, plain, to be copied"),
    ("h ?", "this help"),
    ("q", "quit"),
    ("Ctrl-L", "draw everything anew; Ctrl-Z suspends, Ctrl-C ends"),
)


class Pasted(str):
    """The beginning of the first line of what was pasted, without what is not printable. One of KeyReader's keys."""

    __slots__ = ()


class KeyReader:
    """Puts keys together from bytes as they come."""

    def __init__(self) -> None:
        self._sequence = ""  # after an ESC
        self._in_sequence = False
        self._pasting = False
        self._pasted = ""
        self._line_ended = False  # of what is pasted
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> list[str]:
        """Keys that are complete: a character, a name such as "up", or Pasted. An ESC waits for what follows."""
        keys: list[str] = []
        for one in self._decoder.decode(data):
            if self._in_sequence:
                self._continue(one, keys)
            elif one == "\x1b":
                self._in_sequence, self._sequence = True, ""
            elif self._pasting:
                self._paste(one)
            else:
                keys.append(one)
        return keys

    @property
    def waits(self) -> bool:
        """Is there an ESC of which is not known yet whether it stands alone, or a paste that has not ended?"""
        return self._in_sequence or self._pasting

    @property
    def is_pasting(self) -> bool:
        """Is what comes part of a paste?"""
        return self._pasting

    def pause(self) -> list[str]:
        """Nothing came for a while: an ESC that waits was the key itself; a paste that never ended is dropped."""
        alone = self._in_sequence and not self._sequence and not self._pasting
        self._in_sequence, self._sequence, self._pasting = False, "", False
        return [ESCAPE] if alone else []

    def _paste(self, one: str) -> None:
        if one in "\r\n":
            self._line_ended = self._line_ended or bool(self._pasted)
        elif one.isprintable() and not self._line_ended and len(self._pasted) < MAX_FILTER:
            self._pasted += one

    def _continue(self, one: str, keys: list[str]) -> None:
        if one == "\x1b":  # twice
            if not self._sequence and not self._pasting:
                keys.append(ESCAPE)
            self._sequence = ""
            return
        self._sequence += one
        sequence = self._sequence
        is_whole = sequence[0] not in "[O" or (len(sequence) > 1 and "\x40" <= one <= "\x7e")
        if is_whole or len(sequence) > MAX_SEQUENCE:
            self._in_sequence, self._sequence = False, ""
            if sequence == _PASTED and self._pasting:
                self._pasting = False
                keys.append(Pasted(self._pasted))
            elif self._pasting:
                pass  # a sequence that was pasted
            elif sequence == _PASTE:
                self._pasting, self._pasted, self._line_ended = True, "", False
            elif sequence in _NAMED:
                keys.append(_NAMED[sequence])


def press(ui: Ui, key: str, order: list[str]) -> Ui:
    """`ui` after a key; `order` are the ids of the peers shown."""
    if isinstance(key, Pasted):
        return typed(ui, key) if ui.typing else ui
    if ui.typing and len(key) == 1 and key.isprintable():
        return typed(ui, key)
    action = action_of(key)
    if action is None:
        return apply(ui, Action.BACK, order) if ui.overlay is Overlay.LEAVE else ui
    return apply(ui, action, order)


def action_of(key: str) -> Action | None:
    """What a key asks for, where nothing is typed."""
    return _ALWAYS.get(key) or _LETTERS.get(key)
