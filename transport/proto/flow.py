"""Credit accounting of one stream or one connection. Pure.

Not QUIC's own flow control, which both libraries widen as data arrives whether anyone reads or not; these
credits are widened only when the application has taken the bytes. Limits are absolute byte counts since the
start, as in RFC 9000, 4.1, so a lost or reordered update does no harm. Called by connection.py and stream.py.
"""

from __future__ import annotations

from transport.errors import CreditExceeded

MAX_LIMIT = (1 << 62) - 1


class SendCredit:
    """How much may be sent."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @property
    def available(self) -> int:
        """Bytes that may be sent now."""
        return self.limit - self.used

    def use(self, size: int) -> None:
        """Account for `size` bytes given to QUIC; the caller has checked `available`."""
        self.used += size

    def raise_to(self, limit: int) -> bool:
        """Take an update; True when it widened the credit. Older updates are ignored."""
        if limit <= self.limit:
            return False
        self.limit = limit
        return True


class ReceiveCredit:
    """How much the peer may send, and when to tell it more."""

    __slots__ = ("consumed", "limit", "received", "what", "window")

    def __init__(self, window: int, what: str) -> None:
        self.window = window
        self.limit = window
        self.received = 0
        self.consumed = 0
        self.what = what

    def receive(self, size: int) -> None:
        """Account for bytes that came in. Raises CreditExceeded when the peer overran its credit."""
        self.received += size
        if self.received > self.limit:
            raise CreditExceeded(self.what, self.limit, self.received)

    def consume(self, size: int) -> bool:
        """Account for bytes the application took; True when an update is due (half of the window is used)."""
        self.consumed += size
        return self.limit - self.consumed <= self.window // 2

    def grant(self) -> int:
        """The new limit to announce."""
        self.limit = self.consumed + self.window
        return self.limit
