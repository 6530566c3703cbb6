"""Keys and documents that the tests of membership share."""

from __future__ import annotations

from swarmnode.membership import Certificate, Invitation, JoinProof
from transport.identity import Identity

SWARM = Identity.generate(bytes(range(32)))
OTHER_SWARM = Identity.generate(b"\x33" * 32)
PEER = Identity.generate(b"\x11" * 32).peer_id
STRANGER = Identity.generate(b"\x44" * 32).peer_id
SECRET = b"\x22" * 32
INVITATION = Invitation.issue(SWARM, SECRET, bytes(range(1, 9)), expires=1_800_000_000, uses=3)
PROOF = JoinProof.make(INVITATION, SECRET, PEER)
CERTIFICATE = Certificate.issue(
    SWARM, PEER, "backbone", invitation=INVITATION.id, issued=1_700_000_000, expires=1_900_000_000
)
NOW = 1_750_000_000.0
