"""What waits for a full socket to a relay: disco first, then bulk, both bounded. PURE.

The oldest is dropped when there is no room, and bulk that became too old when its turn comes: QUIC has resent it, and
an early loss tells it to slow down. Bulk never drops disco. Called by relay_session.
"""

from __future__ import annotations

from collections import deque

MAX_FIRST = 64 * 1024  # bytes; hundreds of disco datagrams: a relay that takes none of them is broken


class RelayQueue:
    """Messages of one session. `limit`: bytes of bulk; `max_age`: seconds that bulk may wait."""

    def __init__(self, limit: int, max_age: float) -> None:
        self._limit, self._max_age = limit, max_age
        self._first: deque[bytes] = deque()
        self._bulk: deque[tuple[float, bytes]] = deque()
        self._first_bytes = self._bulk_bytes = 0
        self.dropped = 0  # messages

    def __bool__(self) -> bool:
        return bool(self._first or self._bulk)

    def push_first(self, message: bytes) -> None:
        """Queue disco, a ping or a pong."""
        self._first.append(message)
        self._first_bytes += len(message)
        while self._first_bytes > MAX_FIRST:
            self._first_bytes -= len(self._first.popleft())
            self.dropped += 1

    def push_bulk(self, message: bytes, now: float) -> None:
        """Queue data."""
        self._bulk.append((now, message))
        self._bulk_bytes += len(message)
        while self._bulk_bytes > self._limit:
            self._bulk_bytes -= len(self._bulk.popleft()[1])
            self.dropped += 1

    def pop(self, now: float) -> bytes | None:
        """The message that goes next; None when there is none."""
        if self._first:
            message = self._first.popleft()
            self._first_bytes -= len(message)
            return message
        while self._bulk:
            since, message = self._bulk.popleft()
            self._bulk_bytes -= len(message)
            if now - since <= self._max_age:
                return message
            self.dropped += 1
        return None

    def clear(self) -> None:
        """Forget what waits."""
        self._first.clear()
        self._bulk.clear()
        self._first_bytes = self._bulk_bytes = 0
