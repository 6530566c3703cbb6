"""Bytes per second of each peer, and when it was last heard, from counters that only grow. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Reading:
    at: float
    out: int
    back: int
    out_rate: float = 0.0
    back_rate: float = 0.0
    heard_at: float = 0.0


class Rates:
    """The rate between the last two readings of each peer."""

    def __init__(self) -> None:
        self._readings: dict[str, _Reading] = {}

    def update(self, peer: str, now: float, bytes_out: int, bytes_back: int) -> None:
        """Take a reading; a counter that went back (a new connection) starts over."""
        last = self._readings.get(peer)
        reading = _Reading(now, bytes_out, bytes_back, heard_at=now)
        if last is not None and now > last.at and bytes_out >= last.out and bytes_back >= last.back:
            span = now - last.at
            reading.out_rate = (bytes_out - last.out) / span
            reading.back_rate = (bytes_back - last.back) / span
            reading.heard_at = now if bytes_back > last.back else last.heard_at
        self._readings[peer] = reading

    def keep_only(self, peers: Iterable[str]) -> None:
        """Forget everybody else."""
        kept = set(peers)
        self._readings = {peer: reading for peer, reading in self._readings.items() if peer in kept}

    def of(self, peer: str) -> tuple[float, float]:
        """Bytes per second out and back, 0 where nothing is known."""
        reading = self._readings.get(peer)
        return (reading.out_rate, reading.back_rate) if reading is not None else (0.0, 0.0)

    def silent_s(self, peer: str, now: float) -> float:
        """Seconds since something was heard, as exact as the readings are frequent; 0 where nothing is known."""
        reading = self._readings.get(peer)
        return now - reading.heard_at if reading is not None else 0.0
