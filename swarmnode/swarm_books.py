"""The file in which a swarm's authority keeps its invitations: STATE/swarm/invitations.json.

Not the rules (authority.py, its only caller) and not the key. It holds the secrets of invitations, so that a ticket can
be printed again: 0600, like the key beside it.

{format: 1, swarm: id, revocations: hex of Revocations,
 issued: [{invitation: hex of Invitation, secret: hex, created, revoked (0: not), joined: {peer: when}}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from swarmnode.errors import BadDocument
from swarmnode.membership import SECRET_BYTES, Invitation, Revocations
from swarmnode.membership.judge import objection_to
from swarmnode.swarm_files import damaged, read_file, write_file
from transport.errors import IdentityError
from transport.identity import PeerId

FORMAT = 1
MAX_FILE = 8 << 20  # bytes; full it has 4 MB
MAX_INVITATIONS = 4096


@dataclass(frozen=True, slots=True)
class Issued:
    """An invitation and what became of it. Times in seconds since 1970; `revoked` is 0 while it is not."""

    invitation: Invitation
    secret: bytes = field(repr=False)
    created: int
    revoked: int = 0
    joined: Mapping[PeerId, int] = field(default_factory=dict)  # peer → when

    def objection(self, now: float) -> str | None:
        """Why nobody new can join with it; None where one can."""
        return objection_to(self.invitation, len(self.joined), self.revoked != 0, now)


@dataclass(slots=True)
class Books:
    """Everything that the authority knows: invitations by id, and who is out."""

    issued: dict[bytes, Issued]
    revocations: Revocations


_Time = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    invitation: str
    secret: str
    created: _Time
    revoked: _Time = 0
    joined: dict[str, _Time] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    swarm: str
    revocations: str
    issued: Annotated[tuple[_Entry, ...], msgspec.Meta(max_length=MAX_INVITATIONS)]


def read_books(path: Path, swarm: PeerId) -> Books | None:
    """What `path` says, None where it is missing. Raises SwarmFilesDamaged, for another swarm's books too."""
    found = read_file(path, _File, MAX_FILE, is_secret=True)
    if found is None:
        return None
    try:
        if found.format != FORMAT:
            raise ValueError(f"format {found.format}, this program reads {FORMAT}")
        revocations = Revocations.decode(bytes.fromhex(found.revocations))
        if PeerId.parse(found.swarm) != swarm or revocations.swarm != swarm:
            raise ValueError(f"it is of swarm {found.swarm[:8]}…, the key beside it is of {swarm.short}…")
        if not revocations.is_genuine:
            raise ValueError("the revocations are not signed by the swarm")
        issued = {}
        for entry in found.issued:
            one = _from_entry(entry)
            if one.invitation.swarm != swarm or len(one.secret) != SECRET_BYTES:
                raise ValueError(f"ticket {one.invitation.label} is not this swarm's")
            issued[one.invitation.id] = one
    except (ValueError, BadDocument, IdentityError) as error:
        raise damaged(path, str(error)) from None
    return Books(issued, revocations)


def write_books(path: Path, swarm: PeerId, books: Books) -> None:
    """Replace `path`, whole or not at all. Raises SwarmFilesDamaged."""
    entries = tuple(
        _Entry(
            one.invitation.encode().hex(),
            one.secret.hex(),
            one.created,
            one.revoked,
            {str(peer): when for peer, when in one.joined.items()},
        )
        for one in books.issued.values()
    )
    write_file(path, _File(FORMAT, str(swarm), books.revocations.encode().hex(), entries))


def _from_entry(entry: _Entry) -> Issued:
    return Issued(
        Invitation.decode(bytes.fromhex(entry.invitation)),
        bytes.fromhex(entry.secret),
        entry.created,
        entry.revoked,
        {PeerId.parse(peer): when for peer, when in entry.joined.items()},
    )
