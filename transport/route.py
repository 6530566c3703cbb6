"""Where one peer's datagrams go: the path chosen now, and what the socket and the keeper of paths remember beside it.

A `Route` is shared by all connections to a peer and stays the same object for as long as the peer is known; QUIC never
learns that the path below has changed. Filled in by path_keeper, read by peer_socket and quic_driver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from transport.identity import PeerId
from transport.proto.addresses import PathId, PathKind

# What is sent again on another path when the first one is suspected: the last datagrams, up to so many bytes.
MAX_REPLAY_BYTES = 128 * 1024
MAX_REPLAY_AGE = 3.0  # seconds; what is older was either acknowledged or sent again by QUIC


@dataclass(frozen=True, slots=True)
class Path:
    """One way to a peer, and the UDP payload (bytes) that it is known to carry; any size fits a relay's frames."""

    kind: PathKind
    id: PathId
    datagram_size: int


class Route:
    """The path of a peer's datagrams now; `also` takes a copy of each while the path is in doubt."""

    __slots__ = (
        "_recent",
        "_recent_bytes",
        "also",
        "heard_at",
        "heard_from",
        "kept",
        "path",
        "peer",
        "sent_at",
    )

    def __init__(self, path: Path, peer: PeerId | None = None) -> None:
        """`peer` is who the datagrams are for: always known on a relayed path, on a direct one once authenticated."""
        self.path = path
        self.also: Path | None = None
        self.peer = peer
        self.kept = False  # a keeper of paths looks after it
        self.heard_from: PathId | None = None
        self.heard_at = self.sent_at = float("-inf")
        self._recent: deque[tuple[float, Sequence[bytes], int]] = deque()
        self._recent_bytes = 0

    def note(self, datagrams: Sequence[bytes], now: float) -> None:
        """Remember what was sent, as far as it may be sent again."""
        size = sum(map(len, datagrams))
        self._recent.append((now, datagrams, size))
        self._recent_bytes += size
        while self._recent_bytes > MAX_REPLAY_BYTES and len(self._recent) > 1:
            self._recent_bytes -= self._recent.popleft()[2]

    def forget(self, now: float) -> None:
        """Let go of what is too old to be sent again."""
        while self._recent and now - self._recent[0][0] > MAX_REPLAY_AGE:
            self._recent_bytes -= self._recent.popleft()[2]

    def to_replay(self, since: float, now: float) -> list[bytes]:
        """The datagrams sent since then, oldest first; of many the last."""
        self.forget(now)
        chosen: list[bytes] = []
        room = MAX_REPLAY_BYTES
        for at, batch, _ in reversed(self._recent):
            if at < since:
                break
            for datagram in reversed(batch):
                room -= len(datagram)
                if room < 0:
                    return chosen[::-1]
                chosen.append(datagram)
        return chosen[::-1]
