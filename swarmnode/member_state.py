"""Which swarm this node belongs to, across restarts: STATE/swarm/member.json.

Not who is let in (membership/judge.py) and not what the swarm's founder keeps (authority.py). Nothing in it is secret
without the node's key. Called by `up`, and by the node when its certificate or the revocations change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from swarmnode.errors import BadDocument, SwarmFilesDamaged, UsageError
from swarmnode.membership import BootstrapPeer, Certificate, Revocations, Ticket
from swarmnode.membership.ticket import MAX_ADDRESSES
from swarmnode.swarm_files import damaged, make_folder, read_file, write_file
from transport.errors import IdentityError
from transport.identity import PeerId
from transport.proto.relay_url import BadRelayUrl, parse_relay_url

FORMAT = 1
FILE_NAME = "member.json"
MAX_FILE = 1 << 20  # bytes
MAX_RELAYS = 8
MAX_PEERS = 64  # worth asking first after a restart

_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Addresses = Annotated[tuple[tuple[_Host, _Port], ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


@dataclass(frozen=True, slots=True)
class Joined:
    """The swarm, our certificate in it, how to find it again, and the newest list of who is out."""

    certificate: Certificate
    relays: tuple[str, ...] = ()
    peers: tuple[BootstrapPeer, ...] = ()
    revocations: Revocations | None = None

    @property
    def swarm(self) -> PeerId:
        """Which swarm it is."""
        return self.certificate.swarm


class _Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: str
    addresses: _Addresses = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    swarm: str
    certificate: str
    relays: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_RELAYS)] = ()
    peers: Annotated[tuple[_Peer, ...], msgspec.Meta(max_length=MAX_PEERS)] = ()
    revocations: str = ""


class MemberState:
    """`joined` is what is on disk, None for a node of no swarm. For one process at a time, as a state folder is."""

    def __init__(self, folder: Path) -> None:
        """`folder` is STATE/swarm; it need not exist. Raises SwarmFilesDamaged."""
        self._folder = folder
        self._path = folder / FILE_NAME
        found = read_file(self._path, _File, MAX_FILE, is_secret=False)
        self.joined: Joined | None = None if found is None else self._read(found)

    def check_ticket(self, ticket: Ticket) -> None:
        """Raises UsageError for a ticket of another swarm than this node's."""
        if self.joined is None or self.joined.swarm == ticket.swarm:
            return
        ours, theirs = self.joined.swarm, ticket.swarm
        state = self._folder.absolute().parent
        raise UsageError(
            f"this node is in swarm {ours.short}…, the ticket is for swarm {theirs.short}…: "
            f"to be in both, start another with --state {state}-{theirs.short}"
        )

    def check_key(self, own: PeerId) -> None:
        """Raises SwarmFilesDamaged where the certificate is for another key than this node has now."""
        if self.joined is not None and self.joined.certificate.peer != own:
            raise SwarmFilesDamaged(
                f"{self._path}: is of node {self.joined.certificate.peer.short}…, the key file beside it of "
                f"{own.short}…; restore that key, or move {FILE_NAME} away and join again with a ticket"
            )

    def save(self, joined: Joined) -> None:
        """Be in this swarm from now on. Relays and peers beyond the limits are dropped from the end, and
        so is the list of a swarm that has put nobody out yet, which nobody signed.

        Raises SwarmFilesDamaged where it cannot be written, UsageError where this node is in another swarm.
        """
        if self.joined is not None and self.joined.swarm != joined.swarm:
            raise UsageError(f"this node is in swarm {self.joined.swarm.short}…, not in {joined.swarm.short}…")
        kept = tuple(replace(known, addresses=known.addresses[:MAX_ADDRESSES]) for known in joined.peers[:MAX_PEERS])
        signed = joined.revocations if joined.revocations is not None and joined.revocations.serial else None
        joined = replace(joined, relays=joined.relays[:MAX_RELAYS], peers=kept, revocations=signed)
        if joined == self.joined:
            return
        make_folder(self._folder)
        write_file(
            self._path,
            _File(
                FORMAT,
                str(joined.swarm),
                joined.certificate.encode().hex(),
                joined.relays,
                tuple(_Peer(str(known.peer), known.addresses) for known in joined.peers),
                joined.revocations.encode().hex() if joined.revocations is not None else "",
            ),
        )
        self.joined = joined

    def leave(self) -> None:
        """Be in no swarm. Raises SwarmFilesDamaged."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise SwarmFilesDamaged(f"{self._path}: cannot be removed ({error.strerror})") from error
        self.joined = None

    def _read(self, found: _File) -> Joined:
        try:
            if found.format != FORMAT:
                raise ValueError(f"format {found.format}, this program reads {FORMAT}")
            certificate = Certificate.decode(bytes.fromhex(found.certificate))
            revocations = Revocations.decode(bytes.fromhex(found.revocations)) if found.revocations else None
            if PeerId.parse(found.swarm) != certificate.swarm or not certificate.is_genuine:
                raise ValueError("the certificate is not of this swarm")
            if revocations is not None and not (revocations.swarm == certificate.swarm and revocations.is_genuine):
                raise ValueError("the revocations are not of this swarm")
            relays = tuple(parse_relay_url(url).text for url in found.relays)
            peers = tuple(BootstrapPeer(PeerId.parse(known.peer), known.addresses) for known in found.peers)
        except (ValueError, BadDocument, IdentityError, BadRelayUrl) as error:
            raise damaged(self._path, str(error)) from None
        return Joined(certificate, relays, peers, revocations)
