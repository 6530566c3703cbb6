"""What may be sent on a connection before the server has let the client in, counted the same way at both ends. Pure.

A client that has checked the server's key and sent its proof need not wait a round trip for the verdict: the first
request goes with the proof. The server holds what comes so, out of the application's reach, and drops it when it
refuses. Since a stranger can send as much, it is little. This is not TLS 1.3's early data (0-RTT): the handshake is
over, the bytes are under its keys and cannot be replayed. Called by connection.py.
"""

from __future__ import annotations

from transport.errors import TooMuchEarly

EARLY_BYTES = 16 * 1024  # of all streams together: a request of any control protocol, and 1 MiB for 64 strangers
EARLY_STREAMS = 4  # callers that may share one dial


class EarlyAllowance:
    """How much of it one connection has used."""

    __slots__ = ("_streams", "size")

    def __init__(self) -> None:
        self.size = 0
        self._streams: set[int] = set()

    @property
    def is_used(self) -> bool:
        """Whether there is anything: a stream without bytes counts too."""
        return bool(self._streams)

    def fits(self, size: int) -> bool:
        """Whether one more stream, with `size` bytes, is within the limits."""
        return len(self._streams) < EARLY_STREAMS and self.size + size <= EARLY_BYTES

    def take(self, stream_id: int, size: int) -> None:
        """Count `size` bytes of a stream. Raises TooMuchEarly; then they must not be kept."""
        streams = len(self._streams | {stream_id})
        if streams > EARLY_STREAMS or self.size + size > EARLY_BYTES:
            raise TooMuchEarly(self.size + size, EARLY_BYTES, streams, EARLY_STREAMS)
        self._streams.add(stream_id)
        self.size += size
