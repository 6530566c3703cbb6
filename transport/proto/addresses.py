"""What protocol logic calls a path, a candidate and a kind of NAT. PURE.

Shared by disco_frames, candidates, nat_report, punch, paths and path_policy, so that none of them needs another one's
file for a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from transport.errors import Address

NO_ADDRESS: Address = ("", 0)


class PathKind(StrEnum):
    """How datagrams travel; the text is what people see."""

    LOOPBACK = "loopback"
    LAN = "direct-lan"
    PUBLIC = "direct-public"
    PUNCHED = "punched"
    RELAY = "relay"


@dataclass(frozen=True, slots=True)
class PathId:
    """One way to a peer: a UDP address (from one of our sockets), or a relay.

    relay: the relay's URL, "" on a direct path. address: where datagrams go, NO_ADDRESS on a relayed path.
    socket: 0 is the node's one socket; others exist while and after a birthday punch.
    """

    address: Address = NO_ADDRESS
    relay: str = ""
    socket: int = 0

    def __str__(self) -> str:
        host, port = self.address
        return self.relay or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


class CandidateSource(IntEnum):
    """How a node learned one of its own addresses; the number is what goes over the wire."""

    INTERFACE = 1  # an address of this machine
    REFLECTED = 2  # seen by a reflector
    MAPPED = 3  # a port mapping that the router made for us
    OBSERVED = 4  # seen by a peer
    GIVEN = 5  # the user said so


@dataclass(frozen=True, slots=True)
class Candidate:
    """An address at which a node may be reached."""

    address: Address
    source: CandidateSource


class NatKind(IntEnum):
    """What stands between a node and the Internet, as far as punching is concerned; the number goes over the wire.

    EASY: endpoint-independent mapping, one external port whoever is called. HARD: another port for every destination.
    """

    UNKNOWN = 0
    NONE = 1
    EASY = 2
    HARD = 3
    BLOCKED = 4  # no UDP leaves, or nothing comes back
