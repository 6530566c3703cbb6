"""Who belongs to a swarm: tickets, invitations, certificates, and the judgement of who may connect. All of it pure.

A swarm is an Ed25519 key; its id is the public half. Who has the private half (`swarmnode/authority.py`) invites: a
ticket carries an invitation that the swarm signed and the secret that redeems it. A node that proves the secret gets a
certificate, signed by the swarm, for its own key, and shows that on every connection from then on. The certificate is
checked without asking anybody. Who is to be out is on a short signed list that members tell each other.
"""

from __future__ import annotations

from swarmnode.membership.credentials import MAX_CREDENTIALS, Credentials
from swarmnode.membership.documents import (
    ID_BYTES,
    MAX_REVOKED,
    SECRET_BYTES,
    Certificate,
    Invitation,
    JoinProof,
    Revocations,
    Role,
)
from swarmnode.membership.judge import JOIN_LANE, Gatekeeper, Membership
from swarmnode.membership.ticket import BootstrapPeer, Ticket

__all__ = [
    "ID_BYTES",
    "JOIN_LANE",
    "MAX_CREDENTIALS",
    "MAX_REVOKED",
    "SECRET_BYTES",
    "BootstrapPeer",
    "Certificate",
    "Credentials",
    "Gatekeeper",
    "Invitation",
    "JoinProof",
    "Membership",
    "Revocations",
    "Role",
    "Ticket",
]
