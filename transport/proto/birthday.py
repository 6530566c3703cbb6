"""Which pings a birthday punch sends, and when: many sockets on one side, many guesses on the other. PURE.

A HARD NAT gives each of our sockets its own port towards the peer, nobody knows which. With 256 such ports open, a peer
that pings random ports hits one of them with 1 - (1 - 256/64512)^n: 63 % after 250 pings, 99.7 % after 1,500. Neither
side may be HARD twice. Called by punch.py, which says when it begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transport.errors import Address
from transport.proto.addresses import PathId, PathKind
from transport.proto.path_config import PathConfig

LOWEST_PORT, PORTS = 1024, 65536 - 1024  # NATs do not give out well-known ports


@dataclass(frozen=True, slots=True)
class Shot:
    """For paths.py: one ping, which is remembered but makes no path until it is answered."""

    path: PathId
    kind: PathKind = PathKind.PUNCHED


def spray(
    target: Address, config: PathConfig, random_bytes: Callable[[int], bytes], now: float
) -> Iterator[tuple[float, Shot]]:
    """The easy side: distinct random ports of the target's host, at their times, from `now` on."""
    tried: set[int] = set()
    while len(tried) < config.birthday_probes:
        port = LOWEST_PORT + int.from_bytes(random_bytes(4), "big") % PORTS
        if port not in tried:
            yield now + len(tried) * config.birthday_gap, Shot(PathId((target[0], port)))
            tried.add(port)


def fan(target: Address, count: int, config: PathConfig, now: float) -> Iterator[tuple[float, Shot]]:
    """The hard side: the target from auxiliary sockets 1..count, again and again so that its NAT keeps the ports."""
    while True:
        for number in range(count):
            yield now + number * config.birthday_fan_gap, Shot(PathId(target, socket=number + 1))
        now += config.birthday_refresh
