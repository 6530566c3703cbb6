"""Which members slices are taken from, where more have some than are asked at a time. PURE: `now` is an argument.

Those who generate come first, as they have everything; then those that are connected; then the others, in an order that
is another one at each node, so that no member is everybody's first choice. A source that gave nothing for a while has
nothing that is missing here: the next one takes its turn, until everybody had one.

Called by `swarmnode/member.py`. What is fetched from whom is `schedule.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping

from transport.identity import PeerId

MAX_SOURCES = 8  # members that slices are taken from at a time
IDLE_S = 5.0


class Turns:
    """See the module. `holders` is who has the model: peer → whether it generates."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._rested: set[PeerId] = set()  # had their turn
        self._received: Mapping[PeerId, int] = {}  # at the last look
        self._looked = float("-inf")

    def choose(self, holders: Mapping[PeerId, bool], connected: Container[PeerId]) -> list[PeerId]:
        """Those to be connected with, at most MAX_SOURCES."""

        def place(peer: PeerId) -> tuple[bool, bool, bool, bytes]:
            by_chance = hashlib.sha256(self._own.raw + peer.raw).digest()
            return not holders[peer], peer not in connected, peer in self._rested, by_chance

        return sorted(holders, key=place)[:MAX_SOURCES]

    def failed(self, peer: PeerId) -> None:
        """It cannot be asked: others come first."""
        self._rested.add(peer)

    def ended(self, holders: Mapping[PeerId, bool], received: Mapping[PeerId, int], now: float) -> list[PeerId]:
        """The sources whose turn is over. `received`: bytes that each source has given so far. Ask often."""
        if now - self._looked < IDLE_S:
            return []
        self._looked, before, self._received = now, self._received, dict(received)
        others = holders.keys() - received.keys()
        if not others:
            return []
        over = [p for p, size in received.items() if before.get(p) == size and not holders.get(p, False)]
        self._rested = (self._rested | set(over)) & holders.keys()
        if not others - self._rested:
            self._rested = set(over)  # once more around
        return over
