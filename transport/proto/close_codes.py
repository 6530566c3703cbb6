"""What the end of a QUIC connection means to whoever held it. Pure: codes in, typed errors out.

Called by connection.py when QUIC ended. The codes themselves are in control_frames.py (`CloseCode`). A reason is chosen
by whoever closed, before authentication by anybody: this is where it comes in, and the only place where it is cleaned.
"""

from __future__ import annotations

from typing import Literal

from transport.errors import (
    BadSignature,
    ConnectionClosed,
    ConnectionLost,
    ConnectionReplaced,
    DuplicateConnection,
    HandshakeFailed,
    NotAdmitted,
    Overloaded,
    TransportError,
    VersionMismatch,
)
from transport.proto.control_frames import CloseCode

MAX_REASON = 256  # bytes that we send, fits one datagram with room to spare; characters that we take

REFUSALS: dict[int, type[NotAdmitted | DuplicateConnection | BadSignature | VersionMismatch | Overloaded]] = {
    CloseCode.NOT_ADMITTED: NotAdmitted,
    CloseCode.DUPLICATE: DuplicateConnection,
    CloseCode.BAD_SIGNATURE: BadSignature,
    CloseCode.VERSION_MISMATCH: VersionMismatch,
    CloseCode.OVERLOADED: Overloaded,
}


def printable(reason: str) -> str:
    """A reason from the network as one line for a terminal: at most MAX_REASON characters, none that controls it."""
    cut = reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in cut)


def error_of_code(code: int, reason: str) -> TransportError:
    """The error of an application close by the peer; `reason` is printable."""
    if code in REFUSALS:
        return REFUSALS[code](reason)
    if code == CloseCode.REPLACED:
        return ConnectionReplaced(reason, "peer")
    return ConnectionClosed(code, reason, "peer")


def error_of_termination(
    kind: Literal["idle", "application", "transport"], code: int, reason: str, *, is_open: bool
) -> TransportError:
    """The error of an engine's Termination. `is_open`: both sides had authenticated each other."""
    reason = printable(reason)
    if kind == "idle":
        return ConnectionLost("nothing was heard from the peer for the idle time-out")
    if kind == "application":
        error = error_of_code(code, reason)
        if is_open and not isinstance(error, ConnectionClosed):  # a verdict after it was let in
            return ConnectionReplaced(reason, "peer")
        return error
    if not is_open:
        return HandshakeFailed(code, reason)
    return ConnectionClosed(code, reason, "peer", f"QUIC ended the connection: code {code:#x}, {reason or 'no reason'}")
