"""What the machine of paths.py asks of whoever owns it, and what it counts. PURE.

SendCall, OpenSockets and CloseSockets are punch.py's. Carried out by path_keeper.
"""

from __future__ import annotations

from dataclasses import dataclass

from transport.proto.addresses import PathId
from transport.proto.punch import CloseSockets, OpenSockets, SendCall


@dataclass(frozen=True, slots=True)
class SendPing:
    """Send Ping(tx, left) on this path; a padded one when size is not 0: then the sealed datagram has `size` bytes."""

    path: PathId
    tx: bytes
    size: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """Send again on this path what was sent since `since`: the path it went by is in doubt."""

    path: PathId
    since: float


Action = SendPing | SendCall | OpenSockets | CloseSockets | Replay


@dataclass(slots=True)
class Counters:
    """What happened, for status and tests."""

    pings: int = 0
    pongs: int = 0
    unknown_pongs: int = 0  # no ping asked for them, or too late
    strangers: int = 0  # unknown paths that were not looked at: too many at once
    calls: int = 0
    relay_bytes: int = 0  # spent on calls
    switches: int = 0
    replays: int = 0
