"""What the founder of a swarm keeps: the swarm's key, the invitations given out, and who joined with them.

    STATE/swarm/swarm.key         Ed25519, PKCS#8 PEM (transport/identity.py); whoever has it is the swarm
    STATE/swarm/invitations.json  what swarm_books.py writes: invitations, the peers that each let in, the revocations
    STATE/swarm/lock              held while either is changed

All 0600, the folder 0700. A running node and a command may use one folder at once: every change reads what the other
wrote, under the lock. What counts is on disk before it is told: a use of an invitation before the certificate leaves,
so that a crash can lose a use but never give one twice.

Changes, `list` and `refresh` wait for the disk, and for another process up to LOCK_WAIT: a node calls them in a thread.
`objection`, `revocations` and `certify` answer at once from what was read last: the loop's thread may ask them at any
time, and whoever wants news calls `refresh` before. Thread-safe. Called by `up` of the founder, `ticket`, and as the
Gatekeeper of membership/judge.py.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.errors import JoinRefused, ModelError, SwarmFilesDamaged, UsageError
from swarmnode.membership import (
    ID_BYTES,
    MAX_REVOKED,
    SECRET_BYTES,
    Certificate,
    Invitation,
    JoinProof,
    Revocations,
    Role,
    Ticket,
)
from swarmnode.membership.documents import MAX_TIME, MAX_USES
from swarmnode.membership.judge import EXPELLED, REVOKED
from swarmnode.membership.ticket import looks_like_ticket
from swarmnode.model.folder_lock import FolderLock
from swarmnode.swarm_books import MAX_INVITATIONS, Books, Issued, read_books, write_books
from swarmnode.swarm_files import make_folder, version_of
from transport.errors import IdentityError
from transport.identity import Identity, PeerId

KEY_NAME = "swarm.key"
FILE_NAME = "invitations.json"
MAX_JOINED = 4096  # nodes, over all invitations: strangers with a leaked ticket cannot fill the disk
LOCK_WAIT = 10.0  # seconds; a change takes milliseconds

_LOCK_POLL = 0.01
_FULL = f"this swarm is full: {MAX_JOINED} nodes have joined"
_CLOSED = "a ticket is needed to join this swarm: ask for one, then run swarmnode up TICKET"


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read last, never changed: another one takes its place. `version` is the file's."""

    books: Books
    version: tuple[int, int, int] | None


class SwarmAuthority:
    """The swarm's word. `now` gives seconds since 1970; `random` so many random bytes."""

    def __init__(
        self,
        folder: Path,
        now: Callable[[], float] = time.time,
        random: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """Load the swarm of `folder` (STATE/swarm), or found one there. Raises SwarmFilesDamaged."""
        self._folder, self._path = folder, folder / FILE_NAME
        self._now, self._random = now, random
        self._guard = threading.Lock()  # held while the file is changed: may be long
        self._swap = threading.Lock()  # held for an assignment
        self._damaged = False
        self._door: bytes | None = None
        make_folder(folder)
        if self._path.exists() and not self.exists(folder):
            raise SwarmFilesDamaged(f"{folder / KEY_NAME}: is missing, and {FILE_NAME} is of a swarm: restore the key")
        try:
            self._key = Identity.load_or_create(folder / KEY_NAME)
        except IdentityError as error:
            raise SwarmFilesDamaged(
                f"{folder / KEY_NAME}: cannot be used ({error}); restore it from a copy: it is the swarm, "
                "and without it nobody can join or be expelled"
            ) from None
        self.swarm = self._key.peer_id
        self._read = _Read(Books({}, Revocations.issue(self._key, 0, (), ())), None)
        self.refresh()

    @staticmethod
    def exists(folder: Path) -> bool:
        """Was a swarm founded in this folder?"""
        return (folder / KEY_NAME).exists()

    @property
    def revocations(self) -> Revocations:
        """Who is out, signed; as new as the last `refresh` or change."""
        return self._read.books.revocations

    def list(self) -> tuple[Issued, ...]:
        """All invitations, the oldest first. Reads the file; raises SwarmFilesDamaged."""
        return tuple(sorted(self.refresh().issued.values(), key=lambda one: one.created))

    def refresh(self) -> Books:
        """Read what another process has written. Raises SwarmFilesDamaged; then what was known stays known.

        The books are not to be changed.
        """
        before = self._read
        found = self._look(before)
        with self._swap:
            if self._read is before:  # otherwise somebody has read or written later than we have
                self._read = found
            return self._read.books

    def restore(self, revocations: Revocations) -> None:
        """Take back a list that this swarm signed and the file does not have any more: who was out stays out."""
        ours = revocations.swarm == self.swarm and revocations.is_genuine
        with self._changing() as books:
            if ours and revocations.serial > books.revocations.serial:
                books.revocations = revocations

    def certify(self, peer: PeerId, role: Role = "any") -> Certificate:
        """A certificate without an invitation: for the founder's own node."""
        return Certificate.issue(self._key, peer, role, issued=int(self._now()))

    def invite(
        self, expires_s: float = 0, uses: int = 0, role: Role = "worker", *, open: bool = False
    ) -> tuple[Invitation, bytes]:
        """A new invitation and its secret, good for `expires_s` seconds (0: for ever) and `uses` nodes (0: any number).

        Raises UsageError for what cannot be meant and where there are too many, SwarmFilesDamaged.
        """
        now = self._now()
        if not 0 <= expires_s <= MAX_TIME / 4:
            raise UsageError(f"a ticket that expires in {expires_s:g} s: give a time in the future, or 0 for never")
        if not 0 <= uses <= MAX_USES:
            raise UsageError(f"a ticket for {uses} nodes: give a number from 1 on, or 0 for any number")
        secret, id = self._random(SECRET_BYTES), self._random(ID_BYTES)
        expires = max(1, int(now + expires_s)) if expires_s else 0
        invitation = Invitation.issue(self._key, secret, id, expires=expires, uses=uses, role=role, open=open)
        with self._changing() as books:
            if len(books.issued) >= MAX_INVITATIONS:  # else they stay: whoever comes with one is told what is wrong
                for old in [i for i, one in books.issued.items() if not one.joined and one.objection(now) is not None]:
                    del books.issued[old]
            if len(books.issued) >= MAX_INVITATIONS:
                raise UsageError(f"this swarm has {MAX_INVITATIONS} tickets: give one out for more than one node")
            books.issued[id] = Issued(invitation, secret, int(now))
        return invitation, secret

    def open_door(self, role: Role = "worker") -> Invitation:
        """Let in everybody who asks, without a ticket, as long as this process runs. For a trusted network.

        They join by an open invitation, the same after a restart, and are out when that is revoked with `expel`.
        """
        now = self._now()
        for one in self.list():
            terms = one.invitation
            if terms.open and terms.role == role and one.objection(now) is None:
                self._door = terms.id
                return terms
        invitation, _ = self.invite(role=role, open=True)
        self._door = invitation.id
        return invitation

    def close_door(self) -> None:
        """From now on a ticket is needed again."""
        self._door = None

    def objection(self, peer: PeerId, proof: JoinProof | None, now: float) -> str | None:
        """None where `peer` may join with this genuine proof, or through the open door; otherwise the reason.

        A peer that joined with the invitation before may do so again: it is a member, whatever became of the ticket.
        Nothing is read for it. A ticket that another process has only just given out gets no objection: `redeem` reads.
        """
        if self._damaged:
            return "the founder's files are damaged: tell the founder"
        books = self._read.books
        if proof is not None and proof.invitation.id not in books.issued:
            return None
        found = self._find(books, peer, proof, now)
        return found if isinstance(found, str) else None

    def redeem(self, proof: JoinProof | None, peer: PeerId, now: float | None = None) -> Certificate:
        """The certificate of `peer`, which has proven its key; without a proof, through the open door.

        The use is on disk before this returns. The same peer again is free and gets the same certificate. Raises
        JoinRefused with the reason, SwarmFilesDamaged where it cannot be written down.
        """
        at = self._now() if now is None else now
        if proof is not None and (proof.invitation.swarm != self.swarm or proof.peer != peer or not proof.is_genuine):
            raise JoinRefused("this ticket is for another swarm or node, or a forgery: ask for a ticket")
        one = self._let_in(self.refresh(), peer, proof, at)
        if peer not in one.joined:
            with self._changing() as books:
                one = self._let_in(books, peer, proof, at)  # another process may have been first
                one = replace(one, joined={**one.joined, peer: one.joined.get(peer, int(at))})
                books.issued[one.invitation.id] = one
        terms = one.invitation
        return Certificate.issue(self._key, peer, terms.role, invitation=terms.id, issued=one.joined[peer])

    def revoke(self, named: bytes | str, expel: bool = False) -> Revocations:
        """Nobody else joins with this invitation; with `expel` those who did are out too.

        `named` is its id, the first digits of it, or a ticket. Returns the list to tell members (unchanged without
        `expel`). Raises UsageError where none or several are meant, or the list is full.
        """
        with self._changing() as books:
            one = self._named(books, named)
            id = one.invitation.id
            if not one.revoked:
                books.issued[id] = replace(one, revoked=max(1, int(self._now())))
            if expel:
                self._add_revocations(books, invitations={id})
            return books.revocations

    def expel(self, named: PeerId | str) -> Revocations:
        """This one member is out, and no ticket lets it in again. `named` is its id or the first characters of it.

        Returns the list to tell members. Raises UsageError where none or several are meant, or the list is full.
        """
        if isinstance(named, str):
            with contextlib.suppress(IdentityError):
                named = PeerId.parse(named)
        with self._changing() as books:
            if isinstance(named, PeerId):
                peers = {named}
            else:
                start = named.strip().lower()
                peers = {p for one in books.issued.values() for p in one.joined if str(p).startswith(start) and start}
            if len(peers) != 1:
                raise UsageError(f"{named!s:.60}: {_how_many(len(peers))} such members; give more of the id")
            self._add_revocations(books, peers=peers)
            return books.revocations

    def _find(self, books: Books, peer: PeerId, proof: JoinProof | None, now: float) -> Issued | str:
        """The invitation by which `peer` may have a certificate, or why it may not."""
        if proof is None and self._door is None:
            return _CLOSED
        one = books.issued.get(proof.invitation.id if proof is not None else self._door or b"")
        if one is None:
            return "this ticket is not known to the swarm any more: ask for a new one"
        if peer in books.revocations.peers:
            return EXPELLED
        if one.invitation.id in books.revocations.invitations:
            return REVOKED
        if peer in one.joined:
            return one
        objection = one.objection(now)
        if objection is not None:
            return objection if proof is not None else _CLOSED
        return one if _members(books) < MAX_JOINED else _FULL

    def _let_in(self, books: Books, peer: PeerId, proof: JoinProof | None, now: float) -> Issued:
        found = self._find(books, peer, proof, now)
        if isinstance(found, str):
            raise JoinRefused(found)
        return found

    def _named(self, books: Books, named: bytes | str) -> Issued:
        if isinstance(named, str) and looks_like_ticket(named):
            named = Ticket.parse(named).invitation.id
        start = named.hex() if isinstance(named, bytes) else named.strip().lower()
        found = [one for one in books.issued.values() if start and one.invitation.label.startswith(start)]
        if len(found) != 1:
            raise UsageError(f"{start[:60]}: {_how_many(len(found))} such tickets; swarmnode ticket list shows them")
        return found[0]

    def _add_revocations(self, books: Books, invitations: Iterable[bytes] = (), peers: Iterable[PeerId] = ()) -> None:
        old = books.revocations
        all_invitations, all_peers = old.invitations.union(invitations), old.peers.union(peers)
        if (all_invitations, all_peers) == (old.invitations, old.peers):
            return
        if len(all_invitations) + len(all_peers) > MAX_REVOKED:
            raise UsageError(f"this swarm has revoked {MAX_REVOKED} tickets and nodes, no more can be: found a new one")
        serial = max(old.serial + 1, int(self._now()))  # newer than any list of a file that was lost
        books.revocations = Revocations.issue(self._key, serial, all_invitations, all_peers)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Books]:
        """A copy of the newest books to change; when the block ends well it is written and counts, otherwise not."""
        with self._guard, self._locked():
            found = self._look(self._read)
            with self._swap:
                self._read = found
            books = Books(dict(found.books.issued), found.books.revocations)
            _make_room(books)
            yield books
            if books == found.books:
                return
            write_books(self._path, self.swarm, books)
            written = _Read(books, version_of(self._path))
            with self._swap:
                self._read = written

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                lock = FolderLock(self._folder)
                break
            except ModelError as error:
                if error.__cause__ is not None or time.monotonic() >= deadline:  # a cause: not held, but unusable
                    raise SwarmFilesDamaged(str(error)) from None
                time.sleep(_LOCK_POLL)
        try:
            yield
        finally:
            lock.release()

    def _look(self, known: _Read) -> _Read:
        """What the file says now: `known` where it is still the same one, or missing."""
        try:
            version = version_of(self._path)
            books = None if version is None or version == known.version else read_books(self._path, self.swarm)
        except SwarmFilesDamaged:
            self._damaged = True
            raise
        self._damaged = False
        return known if books is None else _Read(books, version)


def _members(books: Books) -> int:
    """How many nodes have joined and are not out."""
    out = books.revocations
    joined = (one.joined for id, one in books.issued.items() if id not in out.invitations)
    return sum(peer not in out.peers for peers in joined for peer in peers)


def _make_room(books: Books) -> None:
    """Forget who joined with invitations that are revoked with all of them, where there are too many to remember."""
    if sum(len(one.joined) for one in books.issued.values()) < MAX_JOINED:
        return
    for id in books.revocations.invitations & books.issued.keys():
        books.issued[id] = replace(books.issued[id], joined={})


def _how_many(count: int) -> str:
    return "there are no" if count == 0 else f"there are {count}"
