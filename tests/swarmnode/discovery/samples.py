"""Members for tests: keys that are always the same, and their records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarmnode.discovery.record import PeerRecord, sign
from transport.identity import Identity

SWARM = Identity.generate(bytes([2]) * 32).peer_id
UNIX = 1_900_000_000.0  # seconds since 1970 at the tests' time 0


def identity(number: int) -> Identity:
    return Identity.generate(number.to_bytes(32, "big"))


def record(number: int, at: float = 0.0, **fields: Any) -> PeerRecord:  # Any: any field of a record
    """The record that member `number` issues at time `at`."""
    made = PeerRecord(SWARM, identity(number).peer_id, seq=int((UNIX + at) * 1000), name=f"node{number}")
    usual = {"certificate": b"member", "addresses": (("192.168.1.7", 4000 + number),)}
    return replace(made, **(usual | fields))


def blob(number: int, at: float = 0.0, **fields: Any) -> bytes:
    """The same as bytes, signed by its own key."""
    return sign(record(number, at, **fields), identity(number).sign)
