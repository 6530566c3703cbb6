"""The table of peers, and one peer opened. Pure.

Columns come by importance as there is room; the reason of a path and the name take what is left. Only the rows that fit
are made, whatever the number of peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style

from swarmnode.dashboard import look as looks
from swarmnode.dashboard.cells import Line, clean, fit, pad, wrap
from swarmnode.dashboard.look import Look, amount, millis, spark
from swarmnode.dashboard.model import SHORT_ID, Model, PeerRow
from swarmnode.dashboard.ui import Sort, Ui

LOSS_BAD = 0.05  # share of datagrams: from here a direct path gives way to the relay
SEEN_LONG_S = 10.0  # seconds without a sign: twice what keeps a path alive
_MIN_ROOM = 1  # a column takes its width and a space


@dataclass(frozen=True, slots=True)
class Column:
    """`width` cells at least, at most `most`; the lowest `rank` comes first where there is no room for all."""

    title: str
    width: int
    rank: int
    text: Callable[[PeerRow, int, Look], str]
    most: int = 0
    right: bool = False
    sort: Sort | None = None
    style: Callable[[PeerRow], Style] = lambda _row: looks.PLAIN


def _role(row: PeerRow) -> str:
    return row.role + (" ?" if row.status.suspect else "")


def _path_style(row: PeerRow) -> Style:
    if not row.is_here:
        return looks.BAD
    return looks.WARN if row.path == "relay" else looks.GOOD


def _loss(row: PeerRow, _width: int, _look: Look) -> str:
    share = 100 * row.status.loss
    return f"{share:.1f}%" if 0 < share < 9.95 else f"{share:.0f}%"


def _seen(row: PeerRow, _width: int, _look: Look) -> str:
    seconds = row.status.last_seen_s
    if seconds < 0:
        return "never"
    return (
        f"{seconds:.0f}s" if seconds < 600 else f"{seconds / 60:.0f}m" if seconds < 36000 else f"{seconds / 3600:.0f}h"
    )


def _held(row: PeerRow, width: int, _look: Look) -> str:
    return row.held if len(row.held) <= width else amount(row.status.experts)


COLUMNS = (
    Column("name", 10, 1, lambda row, _w, _l: row.name or "–", most=22, sort=Sort.NAME),
    Column("id", SHORT_ID, 3, lambda row, _w, _l: row.status.peer[:SHORT_ID], style=lambda _row: looks.DIM),
    Column("role", 8, 4, lambda row, _w, _l: _role(row)),
    Column("path", 10, 2, lambda row, _w, _l: row.path, most=13, sort=Sort.PATH, style=_path_style),
    Column("RTT ms", 6, 2, lambda row, _w, _l: millis(row.status.rtt_ms), right=True, sort=Sort.RTT),
    Column("", 8, 7, lambda row, width, look: spark(row.spark, width, look), most=24, style=lambda _row: looks.SPARK),
    Column(
        "loss", 4, 6, _loss, right=True, sort=Sort.LOSS,
        style=lambda row: looks.BAD if row.status.loss >= LOSS_BAD else looks.PLAIN,
    ),
    Column("up B/s", 6, 5, lambda row, _w, _l: amount(row.status.up_Bps), right=True, sort=Sort.RATE),
    Column("down", 5, 5, lambda row, _w, _l: amount(row.status.down_Bps), right=True, sort=Sort.RATE),
    Column("load", 4, 8, lambda row, _w, _l: amount(row.status.in_flight + row.status.waiting_rows), right=True,
           sort=Sort.LOAD),
    Column(
        "seen", 5, 11, _seen, right=True, sort=Sort.SEEN,
        style=lambda row: looks.WARN if row.status.last_seen_s > SEEN_LONG_S else looks.PLAIN,
    ),
    Column("experts", 7, 10, _held, most=18, right=True, sort=Sort.EXPERTS),
    Column("why this path", 24, 9, lambda row, _w, _l: row.reason, most=400, style=lambda _row: looks.DIM),
)  # fmt: skip


def columns_for(width: int) -> list[tuple[Column, int]]:
    """The columns that fit beside each other, with their widths; together `width` at most."""
    chosen: list[Column] = []
    room = width - 1  # the mark of the row that is chosen
    for column in sorted(COLUMNS, key=lambda one: one.rank):
        if column.width + _MIN_ROOM <= room:
            chosen.append(column)
            room -= column.width + _MIN_ROOM
    widths = {column.title: column.width for column in chosen}
    for column in sorted(chosen, key=lambda one: one.most):  # what is soon wide enough first
        more = max(0, min(room, column.most - column.width))
        widths[column.title] += more
        room -= more
    return [(column, widths[column.title]) for column in COLUMNS if column in chosen]


def peers_table(model: Model, ui: Ui, width: int, height: int, look: Look) -> list[Line]:
    """`height` lines: the heads, then the rows around the one that is chosen."""
    columns = columns_for(width)
    lines = [_heads(columns, ui, width, look)]
    rows, room = model.shown(ui), height - 1
    if not rows:
        why = f"no peer has “{clean(ui.filter)}”" if ui.filter and model.peers else "nobody is connected yet"
        lines.append(pad([Segment(f"  {why}", looks.DIM)], width))
    at = next((i for i, row in enumerate(rows) if row.status.peer == ui.selected), -1)
    top = max(0, min(at - room // 2, len(rows) - room))
    for i, row in enumerate(rows[top : top + max(0, room)], top):
        lines.append(_row(row, columns, width, look, chosen=i == at))
    return lines[:height]


def shown_range(model: Model, ui: Ui, room: int) -> str:
    """Which rows a table of so many rows shows, "" where it shows all: 21–40 of 200."""
    rows = model.shown(ui)
    if len(rows) <= room or room <= 0:
        return ""
    at = next((i for i, row in enumerate(rows) if row.status.peer == ui.selected), -1)
    top = max(0, min(at - room // 2, len(rows) - room))
    return f"{top + 1}–{top + room} of {len(rows)}"


def _heads(columns: Sequence[tuple[Column, int]], ui: Ui, width: int, look: Look) -> Line:
    line = [Segment(" ", looks.PLAIN)]
    for column, cells in columns:
        title = column.title
        if column.sort is ui.sort and column.title != "down":
            arrow = look.up if ui.reverse else look.down
            title = f"{arrow}{title}" if column.right else f"{title}{arrow}"
        line += [Segment(fit(title, cells, column.right), looks.BOLD), Segment(" ", looks.PLAIN)]
    return pad(line, width)


def _row(row: PeerRow, columns: Sequence[tuple[Column, int]], width: int, look: Look, *, chosen: bool) -> Line:
    base = looks.SELECTED if chosen else looks.PLAIN if row.is_here else looks.DIM
    line = [Segment(look.mark if chosen else " ", base)]
    for column, cells in columns:
        style = base if chosen or not row.is_here else column.style(row)
        line += [Segment(fit(column.text(row, cells, look), cells, column.right), style), Segment(" ", base)]
    return pad(line, width)


def peer_opened(model: Model, peer: str, width: int, height: int, look: Look) -> list[Line]:
    """Everything that is known of one peer."""
    row = next((one for one in model.peers if one.status.peer == peer), None)
    if row is None:
        return [pad([Segment("this peer is gone; Esc goes back", looks.WARN)], width)]
    one = row.status
    known = row.spark[-60:]
    facts = {
        "name": row.name or "not told",
        "peer id": one.peer,
        "role": _role(row) + (" (suspended: it failed lately)" if one.suspect else ""),
        "path": f"{row.path} {one.relay or one.address}".rstrip(),
        "why": row.reason,
        "RTT": f"{millis(one.rtt_ms)} ms, of the last minute {millis(min(known))} to {millis(max(known))} ms"
        if known
        else "not measured",
        "": spark(row.spark, min(60, width - 14), look),
        "loss": f"{100 * one.loss:.2f} % of datagrams",
        "rate": f"{looks.size(one.up_Bps)}/s up, {looks.size(one.down_Bps)}/s down",
        "moved": f"{looks.size(one.bytes_out)} out, {looks.size(one.bytes_back)} back",
        "last seen": _seen(row, 0, look) + (" ago" if one.last_seen_s >= 0 else ""),
        "calls": f"{one.calls}, {one.rows} rows, {one.failures} failed; half within {millis(one.latency_ms)} ms",
        "load": f"{one.in_flight} calls under way, {one.waiting_rows} rows waiting there",
        "holds": "; ".join(f"layer {layer}: {ids}" for layer, ids in one.holdings.items()) or "nothing",
    }
    lines: list[Line] = []
    for label, value in facts.items():
        for i, piece in enumerate(wrap(clean(value), width - 13) or [""]):
            style = looks.SPARK if not label else looks.PLAIN
            lines.append(
                pad([Segment(fit(f"  {label}" if i == 0 else "", 13), looks.BOLD), Segment(piece, style)], width)
            )
    return lines[:height]
