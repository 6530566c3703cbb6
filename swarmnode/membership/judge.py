"""Who may connect to a member, and as what: one judgement per connection, with the reason in words. Pure.

Not how certificates are made (the authority), and not the transport's proof that a peer has its key: `peer` is proven
when it comes here. Called by the endpoint's gate for both ends of every connection, and by discovery for the
certificates in peers' records.

    lane "join"      a newcomer shows the proof of its invitation, or nothing where the door is open; only the
                     authority (a node with a Gatekeeper) lets it in. Members may come too.
    every other lane a certificate of this swarm for this peer, not expired, not revoked
    dispatch:PEER    who calls experts there, so PEER needs a ticket that is not for workers alone

A reason is read by the person at the other end: it says what is wrong and what to do, in at most MAX_REASON bytes, and
nothing that a stranger does not know already.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from swarmnode.dispatch.lane import dispatch_lane
from swarmnode.errors import BadDocument
from swarmnode.membership.credentials import Credentials
from swarmnode.membership.documents import Certificate, Invitation, JoinProof, Revocations
from transport.identity import PeerId

JOIN_LANE = "join"
MAX_MEMBERS = 4096  # certificates remembered; the one seen longest ago goes first
MAX_REASON = 200  # bytes, of what the transport carries in a close
CLOCK_SKEW = 300  # seconds by which two nodes' clocks may differ: certificates are read everywhere

REVOKED = "this ticket was revoked: ask for a new one"
EXPELLED = "you were expelled from this swarm"
_NO_MEMBER = "you are not a member of this swarm: join with a ticket"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


class Gatekeeper(Protocol):
    """The authority's answer to a newcomer: `swarmnode/authority.py`."""

    def objection(self, peer: PeerId, proof: JoinProof | None, now: float) -> str | None:
        """None where `peer` may join with this genuine proof, or without one; otherwise the reason."""


class Membership:
    """What one node knows of its swarm: its own certificate, who is out, and the members it has met.

    `own` is this node. `proof` is what it joins with; until then it may hold a certificate that no longer counts. A
    node with a `gatekeeper` is the authority, and applies the authority's revocations whenever they change. Raises
    BadDocument for documents that are another swarm's, another node's, or not genuine.
    """

    def __init__(
        self,
        swarm: PeerId,
        own: PeerId,
        *,
        certificate: Certificate | None = None,
        proof: JoinProof | None = None,
        revocations: Revocations | None = None,
        gatekeeper: Gatekeeper | None = None,
    ) -> None:
        self.swarm = swarm
        self.own = own
        self.certificate: Certificate | None = None
        self.revocations = Revocations(swarm)
        self._proof: JoinProof | None = None
        self._gatekeeper = gatekeeper
        self._members: OrderedDict[PeerId, Certificate] = OrderedDict()
        if revocations is not None:
            self.apply(revocations)
        if certificate is not None:
            self.adopt(certificate)
        self._proof = proof

    @property
    def is_authority(self) -> bool:
        """Does this node let others in?"""
        return self._gatekeeper is not None

    @property
    def members(self) -> dict[PeerId, Certificate]:
        """Peers whose certificates were seen and are valid, without this node."""
        return dict(self._members)

    def certificate_of(self, peer: PeerId) -> Certificate | None:
        """The certificate of a member that was seen, and found valid."""
        return self._members.get(peer)

    def knows(self, peer: PeerId) -> bool:
        """Was this peer's certificate seen, and found valid?"""
        return peer in self._members

    def adopt(self, certificate: Certificate) -> None:
        """Be a member with this certificate from now on. Raises BadDocument where it is not ours or not genuine."""
        if certificate.swarm != self.swarm or certificate.peer != self.own:
            raise BadDocument(
                f"a certificate for {certificate.peer.short}… in swarm {certificate.swarm.short}…, this node is "
                f"{self.own.short}… in swarm {self.swarm.short}…"
            )
        if not certificate.is_genuine:
            raise BadDocument(f"our certificate was not signed by swarm {self.swarm.short}…")
        self.certificate, self._proof = certificate, None

    def standing(self, now: float) -> str | None:
        """None where this node is a member; otherwise why it is not."""
        if self.certificate is None:
            return "this node is not a member yet: join with a ticket"
        return self._lapsed(self.certificate, now)

    def credentials(self, lane: str) -> bytes:
        """What to show on a connection for `lane`: the certificate, or the proof where it is about joining."""
        if lane == JOIN_LANE and self._proof is not None:
            return Credentials.join(self._proof).encode()
        if self.certificate is not None:
            return Credentials.certificate(self.certificate).encode()
        return Credentials.none().encode()

    def judge(self, peer: PeerId, lane: str, credentials: bytes, now: float) -> str | None:
        """None where `peer`, which has proven its key, may connect for `lane`; otherwise the reason.

        `now` in seconds since 1970.
        """
        try:
            shown = Credentials.decode(credentials).document
        except BadDocument as error:
            return f"the credentials cannot be read: {error}"[:MAX_REASON]
        if isinstance(shown, Certificate):
            return self._judge_certificate(peer, shown, now) or self._judge_role(peer, lane, shown)
        if lane != JOIN_LANE:
            return _NO_MEMBER
        return self._judge_newcomer(peer, shown, now)

    def judge_certificate(self, peer: PeerId, encoded: bytes, now: float) -> str | None:
        """The same for an encoded certificate that came another way, such as in a record that `peer` signed."""
        try:
            return self._judge_certificate(peer, Certificate.decode(encoded), now)
        except BadDocument as error:
            return f"the certificate cannot be read: {error}"[:MAX_REASON]

    def apply(self, revocations: Revocations) -> frozenset[PeerId]:
        """Take a list of who is out, if it is newer; returns who is out now and was not before, perhaps this node.

        Raises BadDocument for one that this swarm did not sign.
        """
        if revocations.swarm != self.swarm:
            raise BadDocument(f"revocations of swarm {revocations.swarm.short}…, this is {self.swarm.short}…")
        if revocations.serial <= self.revocations.serial:
            return frozenset()
        if not revocations.is_genuine:
            raise BadDocument(f"revocations that swarm {self.swarm.short}… did not sign")
        out = set(revocations.peers - self.revocations.peers)
        out.update(peer for peer, certificate in self._members.items() if revocations.names(certificate))
        if self.certificate is not None and revocations.names(self.certificate):
            out.add(self.own)
        self.revocations = revocations
        for peer in out:
            self._members.pop(peer, None)
        return frozenset(out)

    def expire(self, now: float) -> frozenset[PeerId]:
        """Forget the members whose certificates have run out, and say which."""
        out = frozenset(peer for peer, seen in self._members.items() if _is_over(seen.expires, now))
        for peer in out:
            del self._members[peer]
        return out

    def _judge_certificate(self, peer: PeerId, certificate: Certificate, now: float) -> str | None:
        if certificate.swarm != self.swarm:
            return f"you are a member of another swarm ({certificate.swarm.short}…): join this one with a ticket"
        if certificate.peer != peer:
            return (
                f"this certificate is for another node ({certificate.peer.short}…), not for {peer.short}…: "
                "join with a ticket; each node has a key of its own"
            )
        if certificate != self._members.get(peer) and not certificate.is_genuine:
            return "this certificate is a forgery: this swarm did not sign it"
        lapsed = self._lapsed(certificate, now)
        if lapsed is not None:
            self._members.pop(peer, None)
            return lapsed
        if peer != self.own:
            self._members[peer] = certificate
            self._members.move_to_end(peer)
            if len(self._members) > MAX_MEMBERS:
                self._members.popitem(last=False)
        return None

    def _lapsed(self, certificate: Certificate, now: float) -> str | None:
        if certificate.peer in self.revocations.peers:
            return EXPELLED
        if certificate.invitation in self.revocations.invitations:
            return "the ticket that you joined with was revoked: ask for a new one"
        if _is_over(certificate.expires, now):
            return f"your membership expired {ago(now - certificate.expires)}: ask for a new ticket"
        return None

    def _judge_role(self, peer: PeerId, lane: str, certificate: Certificate) -> str | None:
        if certificate.role == "worker" and lane == dispatch_lane(peer):
            return "your ticket is for workers: it lets you serve experts, not call those of others"
        return None

    def _judge_newcomer(self, peer: PeerId, proof: JoinProof | None, now: float) -> str | None:
        if proof is not None and proof.invitation.swarm != self.swarm:
            return f"this ticket is for another swarm ({proof.invitation.swarm.short}…), this node is not in it"
        if self._gatekeeper is None:
            return _NO_MEMBER if proof is None else "only the swarm's founder can let you in, and this is another node"
        if proof is not None and (proof.peer != peer or not proof.is_genuine):
            return "this ticket is a forgery, or another node's proof of one: ask for a ticket"
        if peer in self.revocations.peers:
            return EXPELLED
        return self._gatekeeper.objection(peer, proof, now)


def objection_to(invitation: Invitation, used: int, is_revoked: bool, now: float) -> str | None:
    """Why nobody new can join with this invitation, `used` times redeemed so far; None where one can."""
    if is_revoked:
        return REVOKED
    if invitation.expires and now > invitation.expires:  # judged by the clock that set it: no skew
        return f"this ticket expired {ago(now - invitation.expires)}: ask for a new one"
    if invitation.uses and used >= invitation.uses:
        return f"this ticket was used up ({used} of {invitation.uses}): ask for a new one"
    return None


def ago(seconds: float) -> str:
    """`40 s ago`, `5 min ago`, `3 h ago`, `2 days ago`: whole units, rounded down."""
    whole = max(0, int(seconds))
    if whole >= 2 * _DAY:
        return f"{whole // _DAY} days ago"
    if whole >= _HOUR:
        return f"{whole // _HOUR} h ago"
    return f"{whole // _MINUTE} min ago" if whole >= _MINUTE else f"{whole} s ago"


def _is_over(expires: int, now: float) -> bool:
    return expires != 0 and now > expires + CLOCK_SKEW
