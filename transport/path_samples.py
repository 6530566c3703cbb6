"""What QUIC's counters say of the path that a peer's datagrams take: loss, and goodput while the sender was never idle.

Takes the difference between two looks at every connection of a peer. No I/O. Called by endpoint about once a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transport.connection import Connection
from transport.quic_engine import EngineCounters


@dataclass(frozen=True, slots=True)
class PathSample:
    """One peer, one interval: packets sent and lost, bytes per second delivered (None unless always busy)."""

    sent: int
    lost: int
    goodput: float | None


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    datagrams: int
    counters: EngineCounters


class PathSampler:
    """Remembers each connection's counters from one look to the next."""

    def __init__(self) -> None:
        self._looks: WeakKeyDictionary[Connection, _Look] = WeakKeyDictionary()

    def sample(self, connections: Iterable[Connection], now: float) -> PathSample | None:
        """All connections of one peer together; None when nothing was sent to it since the last call."""
        sent = lost = 0
        rate = 0.0
        busy = False
        for connection in connections:
            before = self._looks.get(connection)
            datagrams = connection.link.datagrams_out
            if before is not None and datagrams == before.datagrams:
                continue
            counters = connection.link.engine.counters()
            self._looks[connection] = _Look(now, datagrams, counters)
            if before is None or counters.sent == before.counters.sent:
                continue
            sent += counters.sent - before.counters.sent
            lost += max(0, counters.lost - before.counters.lost)
            rate += (counters.acked - before.counters.acked) / max(1e-3, now - before.at)
            busy = busy or counters.ran_dry == before.counters.ran_dry
        return PathSample(sent, lost, rate if busy else None) if sent else None
