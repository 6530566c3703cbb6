"""What the person wants to see, and how an action changes it. Pure. Keys become actions in `keys.py`."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_FILTER = 40  # characters


class Sort(enum.Enum):
    """What decides the order of peers."""

    NAME = "name"
    RTT = "RTT"
    PATH = "path"
    LOSS = "loss"
    RATE = "rate"
    EXPERTS = "experts"
    LOAD = "load"
    SEEN = "last seen"


class Page(enum.Enum):
    """What fills the screen."""

    ALL = "all"
    PEERS = "peers"
    EXPERTS = "experts"
    EVENTS = "events"


class Overlay(enum.Enum):
    """What lies over the page."""

    NONE = ""
    HELP = "help"
    PEER = "peer"
    TICKET = "ticket"
    LEAVE = "leave"


class Action(enum.Enum):
    """What a key can ask for, besides typing."""

    SORT = "sort"
    REVERSE = "reverse"
    FILTER = "filter"
    PAUSE = "pause"
    OPEN = "open"
    TICKET = "ticket"
    HELP = "help"
    QUIT = "quit"
    YES = "yes"
    BACK = "back"
    PAGE = "page"
    UP = "up"
    DOWN = "down"
    PAGE_UP = "page up"
    PAGE_DOWN = "page down"
    FIRST = "first"
    LAST = "last"
    ACCEPT = "accept"
    ERASE = "erase"
    CLEAR = "clear"
    REDRAW = "redraw"


@dataclass(frozen=True, slots=True)
class Ui:
    """`selected` is a peer's id, "" for none; `typing` while the filter is written; `asks_to_leave` for a node's own
    view, whose end is the node's; `has_left` when the person is done."""

    sort: Sort = Sort.NAME
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    paused: bool = False
    selected: str = ""
    page: Page = Page.ALL
    overlay: Overlay = Overlay.NONE
    asks_to_leave: bool = False
    has_left: bool = False

    def same_order(self, other: Ui) -> bool:
        """Does the other show the same peers in the same order?"""
        return (self.sort, self.reverse, self.filter) == (other.sort, other.reverse, other.filter)


_MOVES = {Action.UP: -1, Action.DOWN: 1, Action.PAGE_UP: -10, Action.PAGE_DOWN: 10}


def typed(ui: Ui, text: str) -> Ui:
    """A printable character while the filter is written."""
    return replace(ui, filter=(ui.filter + text)[:MAX_FILTER]) if ui.typing else ui


def apply(ui: Ui, action: Action, order: Sequence[str]) -> Ui:
    """`ui` after an action; `order` are the ids of the peers that are shown, in their order."""
    if ui.typing:
        return _apply_typing(ui, action)
    if ui.overlay is Overlay.LEAVE:
        return replace(ui, overlay=Overlay.NONE, has_left=action is Action.YES)
    if ui.overlay is not Overlay.NONE and action in (Action.BACK, Action.OPEN, Action.HELP, Action.TICKET, Action.QUIT):
        return replace(ui, overlay=Overlay.NONE)
    match action:
        case Action.SORT:
            sorts = list(Sort)
            return replace(ui, sort=sorts[(sorts.index(ui.sort) + 1) % len(sorts)])
        case Action.REVERSE:
            return replace(ui, reverse=not ui.reverse)
        case Action.FILTER:
            return replace(ui, typing=True, overlay=Overlay.NONE)
        case Action.PAUSE:
            return replace(ui, paused=not ui.paused)
        case Action.PAGE:
            pages = list(Page)
            return replace(ui, page=pages[(pages.index(ui.page) + 1) % len(pages)], overlay=Overlay.NONE)
        case Action.OPEN:
            selected = ui.selected if ui.selected in order else (order[0] if order else "")
            return replace(ui, selected=selected, overlay=Overlay.PEER) if selected else ui
        case Action.TICKET:
            return replace(ui, overlay=Overlay.TICKET)
        case Action.HELP:
            return replace(ui, overlay=Overlay.HELP)
        case Action.QUIT:
            return replace(ui, overlay=Overlay.LEAVE) if ui.asks_to_leave else replace(ui, has_left=True)
        case Action.BACK:
            return replace(ui, selected="", filter="")
        case Action.CLEAR:
            return replace(ui, filter="")
        case Action.FIRST | Action.LAST if order:
            return replace(ui, selected=order[0 if action is Action.FIRST else -1])
        case Action.UP | Action.DOWN | Action.PAGE_UP | Action.PAGE_DOWN if order:
            return replace(ui, selected=_moved(ui.selected, _MOVES[action], order))
    return ui


def _apply_typing(ui: Ui, action: Action) -> Ui:
    match action:
        case Action.ACCEPT | Action.OPEN | Action.UP | Action.DOWN:
            return replace(ui, typing=False)
        case Action.BACK:
            return replace(ui, typing=False, filter="")
        case Action.ERASE:
            return replace(ui, filter=ui.filter[:-1])
        case Action.CLEAR:
            return replace(ui, filter="")
    return ui


def _moved(selected: str, by: int, order: Sequence[str]) -> str:
    if selected not in order:
        return order[0]
    return order[max(0, min(len(order) - 1, order.index(selected) + by))]
