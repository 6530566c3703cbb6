"""Where the panels go: a model, what the person wants and a size → exactly as many lines as the screen has. Pure.

From 80×24 upwards everything has a place: this node, generation, peers, experts, events. Below, peers keep theirs
longest. From 120 columns on experts and events lie side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment

from swarmnode.dashboard import look as looks
from swarmnode.dashboard.cells import Line, clean, fit, pad, width_of
from swarmnode.dashboard.events_panel import event_log
from swarmnode.dashboard.experts_panel import has_heat, heat_lines
from swarmnode.dashboard.keys import HELP
from swarmnode.dashboard.look import UNICODE, Look
from swarmnode.dashboard.model import Model
from swarmnode.dashboard.node_panel import generates, generation_lines, node_lines, text_lines, title_line
from swarmnode.dashboard.peers_panel import peer_opened, peers_table, shown_range
from swarmnode.dashboard.ui import Overlay, Page, Ui

MIN_WIDTH, MIN_HEIGHT = 30, 8
WIDE = 120  # columns from which two panels lie side by side
LEAST_OF_BOTH = 5  # lines in which experts and events have room one above the other
_FOOT = "q quit  ? help  s sort  / filter  Enter open  Tab page  p pause  t ticket"


def compose(model: Model, ui: Ui, width: int, height: int, look: Look = UNICODE) -> list[Line]:
    """`height` lines of `width` cells."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return _filled([pad([Segment(f"{width}×{height} is too small", looks.WARN)], width)], width, height)
    head = [title_line(model, width)]
    progress = [pad([Segment(f" {text}", looks.BOLD)], width) for text in model.progress[:3]]
    foot = _foot(model, ui, width)
    room = height - len(head) - len(progress) - 1
    body = _overlay(model, ui, width, room, look) or _page(model, ui, width, room, look)
    return [*head, *progress, *_filled(body, width, room)[:room], foot]


def _page(model: Model, ui: Ui, width: int, height: int, look: Look) -> list[Line]:
    match ui.page:
        case Page.PEERS:
            return _peers(model, ui, width, height, look)
        case Page.EXPERTS:
            return [_rule("experts", width, look), *heat_lines(model, width, height - 1, look)]
        case Page.EVENTS:
            return [_rule("events", width, look), *event_log(model, width, height - 1, whole=True)]
        case Page.ALL:
            return _all(model, ui, width, height, look)


def _all(model: Model, ui: Ui, width: int, height: int, look: Look) -> list[Line]:
    tall = height >= 34
    lines = node_lines(model, width, 4 if tall else 2)
    if generates(model) and height >= 12:
        lines += [_rule("generation", width, look), *generation_lines(model, width, 4 if tall else 3, look)]
    room = height - len(lines)
    needed = 2 + max(1, len(model.shown(ui)))  # a title, the heads, the rows
    least = 0 if height < 14 else height // 4 if height < 30 else height // 3
    below = min(room - 3, max(least, room - needed))
    lines += _filled(_peers(model, ui, width, room - below, look), width, room - below)
    return lines + (_below(model, width, below, look) if below > 1 else [])


def _below(model: Model, width: int, room: int, look: Look) -> list[Line]:
    """Experts and events, in `room` lines."""
    heat = has_heat(model)
    n_layers = len(model.status.selected) if model.status is not None else 0
    if not heat or (width < WIDE and room < LEAST_OF_BOTH):
        return [_rule("events", width, look), *_filled(event_log(model, width, room - 1), width, room - 1)]
    if width >= WIDE:
        half = width // 2
        left = [_rule("experts", half - 1, look), *heat_lines(model, half - 1, room - 1, look)]
        right = [_rule("events", width - half, look), *event_log(model, width - half, room - 1)]
        pairs = zip(_filled(left, half - 1, room), _filled(right, width - half, room), strict=True)
        return [(*one, Segment(" ", looks.PLAIN), *other) for one, other in pairs]
    heats = max(2, min(n_layers + 1, room // 2 - 1))
    logged = room - heats - 2  # two of them are rules
    return [
        _rule("experts", width, look),
        *heat_lines(model, width, heats, look),
        _rule("events", width, look),
        *_filled(event_log(model, width, logged), width, logged),
    ]


def _peers(model: Model, ui: Ui, width: int, height: int, look: Look) -> list[Line]:
    here = sum(row.is_here for row in model.peers)
    words = [f"peers {here}" + (f" of {len(model.peers)}" if here < len(model.peers) else "")]
    words.append(f"by {ui.sort.value}{' reversed' if ui.reverse else ''}")
    if ui.filter or ui.typing:
        words.append(f"with “{clean(ui.filter)}{'_' if ui.typing else ''}”")
    if shown := shown_range(model, ui, height - 2):
        words.append(shown)
    return [_rule(" · ".join(words), width, look), *peers_table(model, ui, width, height - 1, look)]


def _overlay(model: Model, ui: Ui, width: int, height: int, look: Look) -> list[Line]:
    match ui.overlay:
        case Overlay.PEER:
            title = f"peer {model.name_of(ui.selected)}"
            return [_rule(title, width, look), *peer_opened(model, ui.selected, width, height - 1, look)]
        case Overlay.HELP:
            rows = [
                pad([Segment(f"  {fit(keys, 10)}", looks.BOLD), Segment(what, looks.PLAIN)], width)
                for keys, what in HELP
            ]
            return [_rule("keys", width, look), *rows]
        case Overlay.LEAVE:
            asked = "stop this node? y stops it as Ctrl-C does: it hands over and leaves; any other key goes back"
            return [_rule("quit", width, look), *text_lines([asked], width, looks.BOLD)]
        case _:  # the ticket is shown outside of this screen, so that it can be copied
            return []


def _foot(model: Model, ui: Ui, width: int) -> Line:
    if ui.typing:
        text = f" filter: {clean(ui.filter)}_   Enter keeps it, Esc drops it"
        return pad([Segment(fit(text, width), looks.SELECTED)], width)
    if ui.paused:
        return pad([Segment(fit(" paused; p goes on", width), looks.SELECTED)], width)
    if model.trouble:
        return pad([Segment(fit(f" {clean(model.trouble)}", width), looks.BAD)], width)
    return pad([Segment(f" {_FOOT}", looks.DIM)], width)


def _rule(title: str, width: int, look: Look) -> Line:
    shown = fit(title, min(width_of(title), max(0, width - 4)))
    left = max(0, width - width_of(shown) - 4)
    return pad(
        [
            Segment(look.rule * 2 + " ", looks.DIM),
            Segment(shown, looks.TITLE),
            Segment(" " + look.rule * left, looks.DIM),
        ],
        width,
    )


def _filled(lines: Sequence[Line], width: int, height: int) -> list[Line]:
    empty = pad((), width)
    return [*lines[:height], *(empty for _ in range(height - len(lines)))]
