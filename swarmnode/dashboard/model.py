"""Successive snapshots of a node → what the panels show. Pure: `now` is an argument.

One writer, the thread that draws. Whatever peers chose is cleaned here, once per snapshot, never later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.dashboard.cells import clean
from swarmnode.dashboard.history import Figures, GenerationFigures, Series
from swarmnode.dashboard.ui import Sort, Ui
from swarmnode.status import NodeStatus, PeerStatus

SHORT_ID = 8  # characters of an id that people compare
MAX_PEERS = 4096  # whose history is kept
_QUICK = ("direct-lan", "direct-public", "punched", "loopback", "lan", "direct", "relay")


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A peer with its texts cleaned and its history; `spark` is RTT in ms, one value per second."""

    status: PeerStatus
    name: str
    role: str
    path: str
    reason: str
    held: str
    spark: Sequence[float]

    @property
    def is_here(self) -> bool:
        return self.status.path != "none"


@dataclass(frozen=True, slots=True)
class Happening:
    """A line of the event log."""

    at: float
    event: str
    text: str


class Model:
    """See the module. `version` changes whenever there is something else to show."""

    def __init__(self, utc_offset_s: int = 0) -> None:
        self.utc_offset_s = utc_offset_s
        self.version = 0
        self.status: NodeStatus | None = None
        self.peers: list[PeerRow] = []
        self.names: dict[str, str] = {}
        self.events: list[Happening] = []
        self.speed = Series()
        self.progress: list[str] = []
        self.trouble = ""  # of the view itself, such as a node that does not answer
        self._generation = GenerationFigures()
        self._rtt: dict[str, Series] = {}
        self._order: tuple[int, Ui | None, list[PeerRow]] = (-1, None, [])

    @property
    def figures(self) -> Figures:
        """What generating costs."""
        return self._generation.figures

    def take(self, status: NodeStatus, now: float) -> None:
        """A new snapshot, at `now` seconds of a clock that only runs forwards."""
        old = self.status
        if old is not None and (old.peer != status.peer or status.uptime_s < old.uptime_s):  # another run of the node
            self._generation, self.speed = GenerationFigures(), Series()
            self._rtt.clear()
        self.status = status
        self.version += 1
        self.trouble = ""
        self._generation.take(status, now)
        self.speed.add(now, self.figures.tokens_per_s)
        members = status.swarm.members if status.swarm is not None else []
        names = {one.peer: clean(one.name) for one in members}
        self.peers = [self._row(peer, names, now) for peer in status.peers[:MAX_PEERS]]
        names.update({row.status.peer: row.name for row in self.peers if row.name})
        self.names = names
        if len(self._rtt) > len(status.peers):
            here = {peer.peer for peer in status.peers}
            self._rtt = {peer: series for peer, series in self._rtt.items() if peer in here}
        if old is None or old.events != status.events:
            self.events = [Happening(one.at, one.event, clean(one.text)) for one in status.events]

    def set_progress(self, lines: list[str]) -> None:
        """What is under way, one line each."""
        if lines != self.progress:
            self.progress = lines
            self.version += 1

    def set_trouble(self, text: str) -> None:
        """What keeps the view from being fresh."""
        if text != self.trouble:
            self.trouble = text
            self.version += 1

    def name_of(self, peer: str) -> str:
        """What people call a peer, and the beginning of its id."""
        name = self.names.get(peer, "")
        return f"{name} ({peer[:SHORT_ID]})" if name else peer[:SHORT_ID]

    def shown(self, ui: Ui) -> list[PeerRow]:
        """The peers that `ui` lets through, in its order."""
        version, for_ui, rows = self._order
        if version == self.version and for_ui is not None and for_ui.same_order(ui):
            return rows
        wanted = ui.filter.casefold()
        rows = [row for row in self.peers if not wanted or wanted in _searched(row)]
        rows.sort(key=lambda row: (*_key(row, ui.sort), row.status.peer), reverse=ui.reverse)
        self._order = self.version, ui, rows
        return rows

    def _row(self, peer: PeerStatus, names: dict[str, str], now: float) -> PeerRow:
        series = self._rtt.get(peer.peer)
        if series is None:
            series = self._rtt[peer.peer] = Series()
        if peer.rtt_ms > 0:
            series.add(now, peer.rtt_ms)
        return PeerRow(
            peer,
            clean(peer.name) or names.get(peer.peer, ""),
            clean(peer.role),
            clean(peer.path),
            clean(peer.reason),
            _held(peer),
            series.values,
        )


def _searched(row: PeerRow) -> str:
    return f"{row.name} {row.status.peer} {row.role} {row.path} {row.reason}".casefold()


def _key(row: PeerRow, sort: Sort) -> tuple[float | str, ...]:
    """Ascending; what is worth seeing first comes first: the most, the slowest, except where a name decides."""
    peer = row.status
    match sort:
        case Sort.NAME:
            return (row.name.casefold() or "\uffff",)
        case Sort.PATH:
            return (_QUICK.index(row.path) if row.path in _QUICK else len(_QUICK), row.path)
        case Sort.RTT:
            return (-round(peer.rtt_ms, 0 if peer.rtt_ms >= 10 else 1),)
        case Sort.LOSS:
            return (-round(peer.loss, 3),)
        case Sort.RATE:
            return (-(peer.up_Bps + peer.down_Bps),)
        case Sort.EXPERTS:
            return (-peer.experts,)
        case Sort.LOAD:
            return (-(peer.in_flight + peer.waiting_rows),)
        case Sort.SEEN:
            return (peer.last_seen_s if peer.last_seen_s >= 0 else float("inf"),)


def _held(peer: PeerStatus) -> str:
    """As in "16 in 4 layers"; which ones is told when a peer is opened."""
    if not peer.holdings:
        return ""
    layers = len(peer.holdings)
    return f"{peer.experts} in {layers} layer{'s' if layers > 1 else ''}"
