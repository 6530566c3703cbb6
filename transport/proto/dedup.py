"""Which of several connections to one peer stays, when both sides dial or one side restarts. Pure.

There is one connection per (peer, lane). A client proves who it is only while it has no live connection for that
pair, and it names the last one that it had (`previous`), so the server can tell a peer that lost its connection
from two dials that crossed on the wire. Called by the endpoint when an incoming proof has verified.

    what the server has for (peer, lane)            proof says                  verdict
    nothing                                         anything                    ACCEPT
    a live connection, older boot id                another boot id             REPLACE  the peer restarted
    a live connection that the peer dialled         same boot id                REPLACE  the peer gave it up
    a live connection that we dialled               previous = that one         REPLACE  the peer gave it up
    a live connection that we dialled               previous is another         REFUSE   crossed on the wire
    a running dial, the peer's id is the smaller    anything                    ACCEPT   the peer's dial wins
    a running dial, our id is the smaller           anything                    PARK     until ours has ended

Only the larger side accepts while it dials, so the two sides never both drop the other's connection. A parked
proof is accepted when our own dial fails, and when that dial has not even reached the peer within PARK_GRACE:
as long as the peer has not seen our proof, giving up our dial cannot cross with its decision.

A request that came with a proof (proto/early.py) shares its fate: carried out when the proof is accepted, dropped
unseen when it is refused. Of two crossed dials one is let in at both ends, so a client whose own dial lost may send
its request on the winner.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PARK_GRACE = 0.5  # seconds; a handshake takes one round trip, so an unanswered dial is a dead address


class Verdict(Enum):
    """What to do with an incoming connection whose proof has verified."""

    ACCEPT = "accept"
    REPLACE = "replace"
    REFUSE = "refuse"
    PARK = "park"


@dataclass(frozen=True, slots=True)
class Existing:
    """The live connection for the same (peer, lane)."""

    boot_id: bytes
    connection_id: int
    dialled_by_us: bool


def decide(
    *, ours: bytes, theirs: bytes, boot_id: bytes, previous: int, existing: Existing | None, dialling: bool
) -> Verdict:
    """The verdict of the table above; `ours` and `theirs` are the raw PeerIds."""
    if existing is not None:
        if existing.boot_id != boot_id or not existing.dialled_by_us or previous == existing.connection_id:
            return Verdict.REPLACE
        return Verdict.REFUSE
    if dialling and ours < theirs:
        return Verdict.PARK
    return Verdict.ACCEPT
