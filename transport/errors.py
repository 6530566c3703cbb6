"""Every error the transport raises on purpose. `str(error)` is one line: what is wrong, the values, what to do.

TransportError
├── LocalFault                   this process, its files or its caller
│   ├── IdentityError            a key file or the text of a PeerId
│   ├── ConfigError              a TransportConfig or emulation text that cannot be meant
│   ├── BindFailed               the UDP socket could not be opened
│   ├── EndpointClosed           the endpoint was closed by its owner
│   ├── EngineFault              the QUIC library raised, or is not the version the adapter knows
│   ├── SendBufferFull           write_nowait beyond config.max_send_buffer
│   └── StreamClosed             writing after finish() or reset()
├── Unreachable                  nobody answered in time, or no address could be tried (nobody's fault)
├── ConnectionClosed             a connection ended; carries code, reason and who ended it
│   ├── ConnectionLost           nothing was heard from the peer for the idle time-out
│   ├── ConnectionReplaced       the same peer came back (restart) or another connection won
│   ├── ProtocolViolation        (also PeerFault) the peer broke this protocol
│   │   ├── BadControlFrame      bytes on the control stream that are no frame
│   │   ├── CreditExceeded       it sent more than it had credit for
│   │   └── TooMuchEarly         it sent more than a request before it was let in
│   └── HandshakeFailed          (also PeerFault) TLS or QUIC failed before authentication
├── StreamReset                  the peer aborted one stream; carries its code
├── IncompleteRead               the stream ended inside readexactly; carries what came
└── PeerFault                    the other node's fault
    ├── WrongPeer                another identity answers at this address
    └── Refused                  the server said no, with a reason
        ├── NotAdmitted          its `admit` callback declined this PeerId
        ├── DuplicateConnection  it already has a connection to us for this lane
        ├── BadSignature         our proof of identity did not verify there
        ├── VersionMismatch      it speaks another version of this protocol
        └── Overloaded           it has as many connections as it is willing to hold
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Address = tuple[str, int]
EndedBy = Literal["local", "peer", "network"]


def format_addresses(addresses: Sequence[Address]) -> str:
    """`127.0.0.1:4433, [::1]:4433`, or `no address`."""
    if not addresses:
        return "no address"
    return ", ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses)


class TransportError(Exception):
    """Root of the tree."""


class LocalFault(TransportError):
    """This process, its files or its caller."""


class IdentityError(LocalFault):
    """A key file or the text of a PeerId is not usable."""


class ConfigError(LocalFault):
    """A configuration or emulation text that cannot be meant."""


class BindFailed(LocalFault):
    """The UDP socket could not be opened."""


class EndpointClosed(LocalFault):
    """The endpoint was closed by its owner."""

    def __init__(self) -> None:
        super().__init__("the endpoint is closed; bind a new one")


class EngineFault(LocalFault):
    """The QUIC library raised, or what serves it here, or it is not the version its adapter was written for."""


class SendBufferFull(LocalFault):
    """write_nowait would queue more than config.max_send_buffer on one stream."""

    def __init__(self, queued: int, size: int, limit: int) -> None:
        self.queued, self.size, self.limit = queued, size, limit
        super().__init__(
            f"{queued} bytes wait on this stream and {size} more exceed the limit of {limit}; "
            "the peer reads too slowly, wait with write() or send less"
        )


class StreamClosed(LocalFault):
    """Writing after finish() or reset()."""


class Unreachable(TransportError):
    """Nobody answered at any of the addresses within the time-out, or none could be tried.

    `addresses` were tried; `skipped` were given and could not be, each with the reason.
    """

    def __init__(
        self,
        peer: object,
        addresses: Sequence[Address],
        timeout: float,
        detail: str = "",
        skipped: Mapping[Address, str] | None = None,
    ) -> None:
        self.peer, self.addresses, self.timeout = peer, tuple(addresses), timeout
        self.skipped = dict(skipped or {})
        reasons = ", ".join(f"{format_addresses([given])} ({why})" for given, why in self.skipped.items())
        if not (addresses or detail or reasons):
            detail = "no address is known"
        failed = f"did not answer at {format_addresses(addresses)} within {timeout:g} s"
        super().__init__(
            f"peer {peer} {failed if addresses else 'cannot be dialled'}"
            f"{f' ({detail})' if detail else ''}{f'; not tried: {reasons}' if reasons else ''}"
            f"{'; check that it runs and that UDP reaches it' if addresses else ''}"
        )


class ConnectionClosed(TransportError):
    """A connection ended. `code` and `reason` are the closer's, `by` says who ended it."""

    def __init__(self, code: int = 0, reason: str = "", by: EndedBy = "local", message: str = "") -> None:
        self.code, self.reason, self.by = code, reason, by
        super().__init__(message or f"connection closed by {by}: code {code}{f', {reason!r}' if reason else ''}")


class ConnectionLost(ConnectionClosed):
    """Nothing was heard from the peer for the idle time-out."""

    def __init__(self, detail: str) -> None:
        super().__init__(0, detail, "network", f"connection lost: {detail}; dial again")


# What a peer closes the connection of an earlier run with. For a run that is alive: another node has its key.
KEY_CONNECTED_ANEW = "your key has connected anew: this node has restarted, or another one uses its key"


class ConnectionReplaced(ConnectionClosed):
    """The same peer came back after a restart, or another connection to it won."""

    def __init__(self, reason: str, by: EndedBy = "local") -> None:
        super().__init__(0, reason, by, f"connection replaced: {reason}")


class PeerFault(TransportError):
    """The other node's fault."""


class ProtocolViolation(ConnectionClosed, PeerFault):
    """The peer broke this protocol; the connection is closed."""

    def __init__(self, detail: str, code: int = 0) -> None:
        super().__init__(code, detail, "local", f"the peer broke the protocol: {detail}; connection closed")


class BadControlFrame(ProtocolViolation):
    """Bytes on the control stream that are no frame of this protocol."""


class CreditExceeded(ProtocolViolation):
    """The peer sent more than it had credit for."""

    def __init__(self, what: str, limit: int, received: int) -> None:
        self.what, self.limit, self.received = what, limit, received
        super().__init__(f"{received} bytes received on {what}, the credit was {limit}")


class TooMuchEarly(ProtocolViolation):
    """It sent more than a request before it was let in; sizes in bytes."""

    def __init__(self, size: int, max_size: int, streams: int, max_streams: int) -> None:
        self.size, self.max_size, self.streams, self.max_streams = size, max_size, streams, max_streams
        super().__init__(
            f"{size} bytes on {streams} streams before it was let in, at most {max_size} on {max_streams} are held"
        )


class HandshakeFailed(ConnectionClosed, PeerFault):
    """TLS or QUIC failed before the peer was authenticated."""

    def __init__(self, code: int, reason: str) -> None:
        detail = f"code {code:#x}{f', {reason}' if reason else ''}"
        super().__init__(code, reason, "peer", f"handshake failed: {detail}; is it the same protocol?")


class WrongPeer(PeerFault):
    """Another identity answers at this address."""

    def __init__(self, expected: object, found: object, addresses: Sequence[Address]) -> None:
        self.expected, self.found, self.addresses = expected, found, tuple(addresses)
        super().__init__(
            f"expected peer {expected} at {format_addresses(addresses)}, found {found}; the address is stale"
        )


class Refused(PeerFault):
    """The server said no, with a reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the peer refused this connection: {reason}")


class NotAdmitted(Refused):
    """Its `admit` callback declined this PeerId."""


class DuplicateConnection(Refused):
    """It already has a connection to us for this lane."""


class BadSignature(Refused):
    """Our proof of identity did not verify there."""


class VersionMismatch(Refused):
    """It speaks another version of this protocol."""


class Overloaded(Refused):
    """It has as many connections as it is willing to hold."""


class StreamReset(TransportError):
    """The peer aborted one stream."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"the peer reset the stream with code {code}")


class IncompleteRead(TransportError):
    """The stream ended inside readexactly."""

    def __init__(self, partial: bytes, expected: int) -> None:
        self.partial, self.expected = partial, expected
        super().__init__(f"the stream ended after {len(partial)} of {expected} bytes")
