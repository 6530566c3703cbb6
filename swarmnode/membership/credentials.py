"""What a node shows when a connection opens, opaque to the transport: a certificate, a join proof, or nothing. Pure.

Both ends show some: the client with its proof of identity, the server with its answer. Made by `Membership.credentials`
and read by `Membership.judge`.

Credentials: nothing at all, or kind u8, then the document (documents.py). Bytes after it are ignored, so that later
versions can add.

NONE         0x00  no document
CERTIFICATE  0x01  Certificate
JOIN         0x02  JoinProof
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from swarmnode.errors import BadDocument
from swarmnode.membership.documents import Certificate, JoinProof

MAX_CREDENTIALS = 512  # bytes, what the transport carries


class Kind(IntEnum):
    """All kinds of credentials."""

    NONE = 0x00
    CERTIFICATE = 0x01
    JOIN = 0x02


@dataclass(frozen=True, slots=True)
class Credentials:
    """`document` is what is shown. Nothing is verified here."""

    document: Certificate | JoinProof | None = None

    @classmethod
    def certificate(cls, certificate: Certificate) -> Self:
        """I am a member."""
        return cls(certificate)

    @classmethod
    def join(cls, proof: JoinProof) -> Self:
        """I have an invitation."""
        return cls(proof)

    @classmethod
    def none(cls) -> Self:
        """I have nothing to show."""
        return cls()

    def encode(self) -> bytes:
        """At most MAX_CREDENTIALS bytes; none at all for nothing."""
        match self.document:
            case None:
                return b""
            case Certificate():
                return bytes([Kind.CERTIFICATE]) + self.document.encode()
            case JoinProof():
                return bytes([Kind.JOIN]) + self.document.encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The inverse. Raises BadDocument; for an unknown kind too, since nobody can judge that."""
        if len(data) > MAX_CREDENTIALS:
            raise BadDocument(f"credentials of {len(data)} bytes, at most {MAX_CREDENTIALS} are allowed")
        match data[0] if data else Kind.NONE:
            case Kind.NONE:
                return cls()
            case Kind.CERTIFICATE:
                return cls(Certificate.decode(data[1 : 1 + Certificate.SIZE]))
            case Kind.JOIN:
                return cls(JoinProof.decode(data[1 : 1 + JoinProof.SIZE]))
            case kind:
                raise BadDocument(f"credentials of unknown kind {kind}; the other side runs a later version")
