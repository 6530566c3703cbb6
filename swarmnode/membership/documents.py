"""What a swarm and its members sign: invitation, proof that one was received, certificate, revocations. Pure.

Not who may do what (judge.py), and not the text that people copy (ticket.py). Written by `swarmnode/authority.py` and
by nodes that join; read by everybody. A fixed hex vector per document stands in the tests.

Numbers are big endian, times are whole seconds since 1970, 0 for never. Each ends with an Ed25519 signature of 64 bytes
over its context string and all bytes before it; a later version has another context, so it never passes for this one.

Invitation   150 bytes, signed by the swarm:
             swarm 32, id 8, key 32, expires u64, uses u32 (0: any number), role u8, flags u8 (1: open), signature
JoinProof    246 bytes, signed with the invitation's secret, so that it is worth nothing to another peer:
             invitation 150, peer 32, signature
Certificate  153 bytes, signed by the swarm; an id of zeros where the authority certified without an invitation:
             swarm 32, peer 32, role u8, invitation id 8, issued u64, expires u64, signature
Revocations  at least 108 bytes, signed by the swarm; entries ascend:
             swarm 32, serial u64, invitations u16, peers u16, ids 8 each, peers 32 each, signature

Roles        1 worker, 2 backbone, 3 any. A role or a flag that is not known is refused.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

from swarmnode.errors import BadDocument
from transport.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, PeerId

Role = Literal["worker", "backbone", "any"]
ROLES: tuple[Role, ...] = ("worker", "backbone", "any")  # by number, from 1

ID_BYTES = 8
SECRET_BYTES = 32  # the seed of the invitation's key
NO_INVITATION = bytes(ID_BYTES)
MAX_REVOKED = 4096  # entries; 131 KB at most, sent to each member once
MAX_TIME = (1 << 63) - 1
MAX_USES = (1 << 32) - 1

_OPEN = 1
_NO_SIGNATURE = bytes(SIGNATURE_BYTES)
_INVITATION = struct.Struct(">32s8s32sQIBB")
_CERTIFICATE = struct.Struct(">32s32sB8sQQ")
_REVOCATIONS = struct.Struct(">32sQHH")
_INVITATION_CONTEXT = b"swarm invitation, version 1\x00"
_PROOF_CONTEXT = b"swarm join proof, version 1\x00"
_CERTIFICATE_CONTEXT = b"swarm certificate, version 1\x00"
_REVOCATIONS_CONTEXT = b"swarm revocations, version 1\x00"


@dataclass(frozen=True, slots=True)
class Invitation:
    """The swarm's word that who has the secret of `key` may join, until `expires`, `uses` different nodes in all.

    `open`: made for everybody on a trusted network; its secret need not be shown.
    """

    swarm: PeerId
    id: bytes
    key: bytes
    expires: int = 0
    uses: int = 0
    role: Role = "worker"
    open: bool = False
    signature: bytes = _NO_SIGNATURE

    SIZE = _INVITATION.size + SIGNATURE_BYTES

    def __post_init__(self) -> None:
        _exactly(self.id, ID_BYTES, "invitation id")
        _exactly(self.key, KEY_BYTES, "invitation key")
        _within(self.expires, MAX_TIME, "expiry")
        _within(self.uses, MAX_USES, "number of uses")

    @classmethod
    def issue(
        cls,
        swarm: Identity,
        secret: bytes,
        id: bytes,
        *,
        expires: int = 0,
        uses: int = 0,
        role: Role = "worker",
        open: bool = False,
    ) -> Self:
        """A signed one; `secret` is 32 random bytes, `id` 8. Raises ValueError for lengths and numbers out of range."""
        _exactly(secret, SECRET_BYTES, "secret")
        key = Identity.generate(secret).peer_id.raw
        blank = cls(swarm.peer_id, id, key, expires, uses, role, open)
        return replace(blank, signature=swarm.sign(_INVITATION_CONTEXT + blank._signed_part()))

    @property
    def label(self) -> str:
        """The id as people see and type it: 16 hexadecimal digits."""
        return self.id.hex()

    @property
    def is_genuine(self) -> bool:
        """Did the swarm sign it?"""
        return self.swarm.verify(self.signature, _INVITATION_CONTEXT + self._signed_part())

    def encode(self) -> bytes:
        """All bytes."""
        return self._signed_part() + self.signature

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The inverse; the signature is not verified. Raises BadDocument."""
        if len(data) != cls.SIZE:
            raise BadDocument(f"an invitation of {len(data)} bytes, {cls.SIZE} expected")
        swarm, id, key, expires, uses, role, flags = _INVITATION.unpack_from(data)
        if flags not in (0, _OPEN):
            raise BadDocument(f"an invitation with unknown flags {flags:#04x}; the other side runs a later version")
        signature = data[_INVITATION.size :]
        return cls(PeerId(swarm), id, key, _time(expires), uses, _role(role), flags == _OPEN, signature)

    def _signed_part(self) -> bytes:
        role, flags = ROLES.index(self.role) + 1, _OPEN if self.open else 0
        return _INVITATION.pack(self.swarm.raw, self.id, self.key, self.expires, self.uses, role, flags)


@dataclass(frozen=True, slots=True)
class JoinProof:
    """`peer` has the secret of `invitation`."""

    invitation: Invitation
    peer: PeerId
    signature: bytes = _NO_SIGNATURE

    SIZE = Invitation.SIZE + KEY_BYTES + SIGNATURE_BYTES

    @classmethod
    def make(cls, invitation: Invitation, secret: bytes, peer: PeerId) -> Self:
        """Signed with the invitation's secret, 32 bytes."""
        blank = cls(invitation, peer)
        return replace(blank, signature=Identity.generate(secret).sign(_PROOF_CONTEXT + blank._signed_part()))

    @property
    def is_genuine(self) -> bool:
        """Did the swarm sign the invitation, and who has its secret the rest?"""
        key = PeerId(self.invitation.key)
        return self.invitation.is_genuine and key.verify(self.signature, _PROOF_CONTEXT + self._signed_part())

    def encode(self) -> bytes:
        """All bytes."""
        return self._signed_part() + self.signature

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The inverse; no signature is verified. Raises BadDocument."""
        if len(data) != cls.SIZE:
            raise BadDocument(f"a join proof of {len(data)} bytes, {cls.SIZE} expected")
        end = Invitation.SIZE + KEY_BYTES
        return cls(Invitation.decode(data[: Invitation.SIZE]), PeerId(data[Invitation.SIZE : end]), data[end:])

    def _signed_part(self) -> bytes:
        return self.invitation.encode() + self.peer.raw


@dataclass(frozen=True, slots=True)
class Certificate:
    """The swarm's word that `peer` is a member, from `issued` until `expires`, by the invitation with this id."""

    swarm: PeerId
    peer: PeerId
    role: Role
    invitation: bytes = NO_INVITATION
    issued: int = 0
    expires: int = 0
    signature: bytes = _NO_SIGNATURE

    SIZE = _CERTIFICATE.size + SIGNATURE_BYTES

    def __post_init__(self) -> None:
        _exactly(self.invitation, ID_BYTES, "invitation id")
        _within(self.issued, MAX_TIME, "time of issue")
        _within(self.expires, MAX_TIME, "expiry")

    @classmethod
    def issue(
        cls,
        swarm: Identity,
        peer: PeerId,
        role: Role,
        *,
        invitation: bytes = NO_INVITATION,
        issued: int,
        expires: int = 0,
    ) -> Self:
        """A signed one. Raises ValueError for lengths and numbers out of range."""
        blank = cls(swarm.peer_id, peer, role, invitation, issued, expires)
        return replace(blank, signature=swarm.sign(_CERTIFICATE_CONTEXT + blank._signed_part()))

    @property
    def is_genuine(self) -> bool:
        """Did the swarm sign it?"""
        return self.swarm.verify(self.signature, _CERTIFICATE_CONTEXT + self._signed_part())

    def encode(self) -> bytes:
        """All bytes."""
        return self._signed_part() + self.signature

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The inverse; the signature is not verified. Raises BadDocument."""
        if len(data) != cls.SIZE:
            raise BadDocument(f"a certificate of {len(data)} bytes, {cls.SIZE} expected")
        swarm, peer, role, invitation, issued, expires = _CERTIFICATE.unpack_from(data)
        signature = data[_CERTIFICATE.size :]
        return cls(PeerId(swarm), PeerId(peer), _role(role), invitation, _time(issued), _time(expires), signature)

    def _signed_part(self) -> bytes:
        role = ROLES.index(self.role) + 1
        return _CERTIFICATE.pack(self.swarm.raw, self.peer.raw, role, self.invitation, self.issued, self.expires)


@dataclass(frozen=True, slots=True)
class Revocations:
    """Who is out: all that joined with one of these invitations, and these peers. A higher serial replaces a lower."""

    swarm: PeerId
    serial: int = 0
    invitations: frozenset[bytes] = frozenset()
    peers: frozenset[PeerId] = frozenset()
    signature: bytes = _NO_SIGNATURE

    MIN_SIZE = _REVOCATIONS.size + SIGNATURE_BYTES

    def __post_init__(self) -> None:
        for id in self.invitations:
            _exactly(id, ID_BYTES, "invitation id")
        _within(self.serial, MAX_TIME, "serial")
        _within(len(self.invitations) + len(self.peers), MAX_REVOKED, "number of revocations")

    @classmethod
    def issue(cls, swarm: Identity, serial: int, invitations: Iterable[bytes], peers: Iterable[PeerId]) -> Self:
        """A signed list. Raises ValueError for more than MAX_REVOKED entries and for numbers out of range."""
        blank = cls(swarm.peer_id, serial, frozenset(invitations), frozenset(peers))
        return replace(blank, signature=swarm.sign(_REVOCATIONS_CONTEXT + blank._signed_part()))

    @property
    def is_genuine(self) -> bool:
        """Did the swarm sign it?"""
        return self.swarm.verify(self.signature, _REVOCATIONS_CONTEXT + self._signed_part())

    def names(self, certificate: Certificate) -> bool:
        """Is the holder of this certificate out?"""
        return certificate.peer in self.peers or certificate.invitation in self.invitations

    def encode(self) -> bytes:
        """All bytes."""
        return self._signed_part() + self.signature

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The inverse; the signature is not verified. Raises BadDocument."""
        if len(data) < cls.MIN_SIZE:
            raise BadDocument(f"revocations of {len(data)} bytes, at least {cls.MIN_SIZE} expected")
        swarm, serial, n_invitations, n_peers = _REVOCATIONS.unpack_from(data)
        if n_invitations + n_peers > MAX_REVOKED:
            raise BadDocument(f"{n_invitations + n_peers} revocations, at most {MAX_REVOKED} are allowed")
        peers_at = _REVOCATIONS.size + n_invitations * ID_BYTES
        end = peers_at + n_peers * KEY_BYTES
        if len(data) != end + SIGNATURE_BYTES:
            raise BadDocument(f"revocations of {len(data)} bytes, {end + SIGNATURE_BYTES} expected")
        ids = _ascending(data[_REVOCATIONS.size : peers_at], ID_BYTES)
        peers = _ascending(data[peers_at:end], KEY_BYTES)
        return cls(PeerId(swarm), _time(serial), frozenset(ids), frozenset(map(PeerId, peers)), data[end:])

    def _signed_part(self) -> bytes:
        head = _REVOCATIONS.pack(self.swarm.raw, self.serial, len(self.invitations), len(self.peers))
        return head + b"".join(sorted(self.invitations)) + b"".join(sorted(peer.raw for peer in self.peers))


def _ascending(data: bytes, size: int) -> list[bytes]:
    """Entries of `size` bytes. One order, so that equal lists have equal bytes."""
    entries = [data[at : at + size] for at in range(0, len(data), size)]
    if any(a >= b for a, b in itertools.pairwise(entries)):
        raise BadDocument("revocations that do not ascend")
    return entries


def _role(number: int) -> Role:
    if not 1 <= number <= len(ROLES):
        raise BadDocument(f"role {number} is unknown; the other side runs a later version")
    return ROLES[number - 1]


def _time(value: int) -> int:
    if value > MAX_TIME:
        raise BadDocument(f"the number {value} is no time and no serial")
    return value


def _exactly(value: bytes, size: int, what: str) -> None:
    if len(value) != size:
        raise ValueError(f"an {what} has {size} bytes, not {len(value)}")


def _within(value: int, most: int, what: str) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{what} {value}: 0 to {most} is possible")
