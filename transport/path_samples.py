"""What QUIC's counters say of the path that a peer's datagrams take: loss, and goodput while the sender was never idle.

Takes the difference between two looks at every connection of a peer. No I/O. Called by endpoint about once a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transport.connection import Connection
from transport.identity import PeerId
from transport.quic_engine import EngineCounters


@dataclass(frozen=True, slots=True)
class PathSample:
    """One peer, one interval: packets sent and lost, bytes per second delivered (None unless always busy)."""

    peer: PeerId
    sent: int
    lost: int
    goodput: float | None


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    counters: EngineCounters


class PathSampler:
    """Remembers each connection's counters from one look to the next."""

    def __init__(self) -> None:
        self._looks: WeakKeyDictionary[Connection, _Look] = WeakKeyDictionary()

    def sample(self, connections: Iterable[Connection], now: float) -> Iterator[PathSample]:
        """One sample per peer that was sent something since the last call."""
        totals: dict[PeerId, list[float]] = {}
        saturated: set[PeerId] = set()
        for connection in connections:
            counters = connection.link.engine.counters()
            before = self._looks.get(connection)
            self._looks[connection] = _Look(now, counters)
            if before is None or counters.sent == before.counters.sent:
                continue
            total = totals.setdefault(connection.peer, [0, 0, 0.0])
            total[0] += counters.sent - before.counters.sent
            total[1] += max(0, counters.lost - before.counters.lost)
            total[2] += (counters.acked - before.counters.acked) / max(1e-3, now - before.at)
            if counters.ran_dry == before.counters.ran_dry:
                saturated.add(connection.peer)
        for peer, (sent, lost, rate) in totals.items():
            yield PathSample(peer, int(sent), int(lost), rate if peer in saturated else None)
