"""Who may connect, and what those hear who may not."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import BadDocument
from swarmnode.membership import (
    Certificate,
    Credentials,
    Invitation,
    JoinProof,
    Membership,
    Revocations,
    Role,
)
from swarmnode.membership.judge import CLOCK_SKEW, MAX_MEMBERS, MAX_REASON, ago, objection_to
from tests.swarmnode.membership.people import (
    CERTIFICATE,
    INVITATION,
    NOW,
    OTHER_SWARM,
    PEER,
    PROOF,
    SECRET,
    STRANGER,
    SWARM,
)
from transport.identity import Identity, PeerId

OWN = Identity.generate(b"\x55" * 32).peer_id
SHOWN = Credentials.certificate(CERTIFICATE).encode()


@dataclass
class Door:
    """A gatekeeper that says one thing and remembers whom it was asked about."""

    answer: str | None = None
    asked: list[tuple[PeerId, JoinProof | None]] = field(default_factory=list)

    def objection(self, peer: PeerId, proof: JoinProof | None, now: float) -> str | None:
        self.asked.append((peer, proof))
        return self.answer


def member(**options: object) -> Membership:
    return Membership(SWARM.peer_id, OWN, **options)  # type: ignore[arg-type]  # named by each test


def certificate(peer: PeerId, role: Role = "any", *, id: bytes = bytes(8), expires: int = 0) -> bytes:
    made = Certificate.issue(SWARM, peer, role, invitation=id, issued=int(NOW), expires=expires)
    return Credentials.certificate(made).encode()


@pytest.mark.parametrize("lane", ["swarm", "bulk", "dispatch:abcdefgh", "join", "a lane of a later version"])
def test_a_member_may_connect(lane: str) -> None:
    membership = member()
    assert membership.judge(PEER, lane, SHOWN, NOW) is None
    assert membership.knows(PEER)
    assert membership.members == {PEER: CERTIFICATE}
    assert not membership.knows(STRANGER)


@pytest.mark.parametrize(
    ("peer", "shown", "line"),
    [
        (PEER, b"", "you are not a member of this swarm: join with a ticket"),
        (PEER, Credentials.join(PROOF).encode(), "you are not a member of this swarm: join with a ticket"),
        (STRANGER, SHOWN, "this certificate is for another node (2bflemtu…), not for"),
        (
            PEER,
            Credentials.certificate(Certificate.issue(OTHER_SWARM, PEER, "any", issued=1)).encode(),
            "you are a member of another swarm (",
        ),
        (PEER, SHOWN[:-1] + b"\0", "this certificate is a forgery"),
        (PEER, certificate(PEER, expires=int(NOW) - 3 * 3600), "your membership expired 3 h ago: ask for a new ticket"),
        (PEER, SHOWN[:9], "the credentials cannot be read: a certificate of 8 bytes, 153 expected"),
        (PEER, b"\x99", "the credentials cannot be read: credentials of unknown kind 153"),
    ],
)
def test_everybody_else_hears_why_not(peer: PeerId, shown: bytes, line: str) -> None:
    membership = member()
    reason = membership.judge(peer, "swarm", shown, NOW)
    assert reason is not None
    assert reason.startswith(line)
    assert len(reason.encode()) <= MAX_REASON
    assert not membership.knows(peer)


def test_clocks_may_differ_by_five_minutes() -> None:
    shown = certificate(PEER, expires=int(NOW))
    assert member().judge(PEER, "swarm", shown, NOW + CLOCK_SKEW) is None
    assert "expired 5 min ago" in (member().judge(PEER, "swarm", shown, NOW + CLOCK_SKEW + 1) or "")


def test_a_clock_that_is_years_behind_does_not_lock_a_device_out() -> None:
    assert member().judge(PEER, "swarm", SHOWN, 0) is None


@pytest.mark.parametrize(
    ("role", "lane", "may"),
    [
        ("worker", f"dispatch:{PEER.short}", False),
        ("worker", f"dispatch:{OWN.short}", True),
        ("worker", "bulk", True),
        ("backbone", f"dispatch:{PEER.short}", True),
        ("any", f"dispatch:{PEER.short}", True),
    ],
)
def test_a_ticket_for_workers_lets_nobody_call_experts(role: Role, lane: str, may: bool) -> None:
    reason = member().judge(PEER, lane, certificate(PEER, role), NOW)
    assert (reason is None) is may
    assert may or "your ticket is for workers" in (reason or "")


def test_the_authority_asks_its_gatekeeper_about_genuine_proofs_only() -> None:
    door = Door()
    authority = member(gatekeeper=door)
    assert authority.is_authority
    assert authority.judge(PEER, "join", Credentials.join(PROOF).encode(), NOW) is None
    assert authority.judge(PEER, "join", b"", NOW) is None
    assert door.asked == [(PEER, PROOF), (PEER, None)]
    stolen = authority.judge(STRANGER, "join", Credentials.join(PROOF).encode(), NOW)
    forged = JoinProof.make(INVITATION, b"\x66" * 32, PEER)
    assert "forgery" in (stolen or "")
    assert "forgery" in (authority.judge(PEER, "join", Credentials.join(forged).encode(), NOW) or "")
    assert len(door.asked) == 2
    door.answer = "this ticket was used up (2 of 2): ask for a new one"
    assert authority.judge(PEER, "join", Credentials.join(PROOF).encode(), NOW) == door.answer
    assert not authority.knows(PEER)  # not before it has a certificate


def test_only_the_authority_lets_newcomers_in() -> None:
    reason = member().judge(PEER, "join", Credentials.join(PROOF).encode(), NOW)
    assert reason == "only the swarm's founder can let you in, and this is another node"
    assert "join with a ticket" in (member().judge(PEER, "join", b"", NOW) or "")


def test_a_ticket_for_another_swarm() -> None:
    theirs = Invitation.issue(OTHER_SWARM, SECRET, bytes(8))
    shown = Credentials.join(JoinProof.make(theirs, SECRET, PEER)).encode()
    for membership in (member(), member(gatekeeper=Door())):
        assert "this ticket is for another swarm (" in (membership.judge(PEER, "join", shown, NOW) or "")


@pytest.mark.parametrize(
    ("used", "is_revoked", "late", "line"),
    [
        (0, False, 0, None),
        (2, False, 0, None),
        (3, False, 0, "this ticket was used up (3 of 3): ask for a new one"),
        (0, True, 0, "this ticket was revoked: ask for a new one"),
        (0, False, 3 * 3600, "this ticket expired 3 h ago: ask for a new one"),
        (3, True, 3600, "this ticket was revoked: ask for a new one"),
    ],
)
def test_why_a_ticket_does_not_count_any_more(used: int, is_revoked: bool, late: float, line: str | None) -> None:
    assert objection_to(INVITATION, used, is_revoked, INVITATION.expires + late) == line


def test_revocations_put_members_out() -> None:
    other = Identity.generate(b"\x66" * 32).peer_id
    membership = member()
    for peer, id in ((PEER, INVITATION.id), (STRANGER, b"\x09" * 8), (other, b"\x09" * 8)):
        assert membership.judge(peer, "swarm", certificate(peer, id=id), NOW) is None
    out = membership.apply(Revocations.issue(SWARM, 1, [INVITATION.id], [STRANGER]))
    assert out == {PEER, STRANGER}
    assert list(membership.members) == [other]
    again = membership.judge(PEER, "swarm", certificate(PEER, id=INVITATION.id), NOW)
    assert again == "the ticket that you joined with was revoked: ask for a new one"
    assert membership.judge(STRANGER, "swarm", certificate(STRANGER), NOW) == "you were expelled from this swarm"
    assert membership.judge(PEER, "swarm", certificate(PEER, id=b"\x0a" * 8), NOW) is None  # joined by another ticket


def test_the_expelled_do_not_join_again() -> None:
    door = Door()
    authority = member(gatekeeper=door, revocations=Revocations.issue(SWARM, 1, [], [PEER]))
    shown = Credentials.join(PROOF).encode()
    assert authority.judge(PEER, "join", shown, NOW) == "you were expelled from this swarm"
    assert door.asked == []


def test_a_newer_list_wins_and_an_old_or_foreign_one_does_nothing() -> None:
    membership = member()
    newer = Revocations.issue(SWARM, 2, [], [PEER])
    assert membership.apply(newer) == {PEER}
    assert membership.apply(newer) == frozenset()
    assert membership.apply(Revocations.issue(SWARM, 1, [], [])) == frozenset()
    assert membership.revocations == newer
    for wrong in (
        Revocations.issue(OTHER_SWARM, 3, [], [STRANGER]),
        Revocations(SWARM.peer_id, 3, frozenset(), frozenset([STRANGER]), bytes(64)),
    ):
        with pytest.raises(BadDocument, match="swarm"):
            membership.apply(wrong)
    assert membership.apply(Revocations.issue(SWARM, 3, [], [])) == frozenset()  # taken back
    assert membership.judge(PEER, "swarm", certificate(PEER), NOW) is None


def test_what_a_node_shows_and_where_it_stands() -> None:
    proof = JoinProof.make(INVITATION, SECRET, OWN)
    membership = member(proof=proof)
    assert membership.credentials("join") == Credentials.join(proof).encode()
    assert membership.credentials("swarm") == b""
    assert membership.standing(NOW) == "this node is not a member yet: join with a ticket"
    own = Certificate.issue(SWARM, OWN, "worker", invitation=INVITATION.id, issued=1)
    membership.adopt(own)
    assert membership.standing(NOW) is None
    assert membership.credentials("join") == membership.credentials("swarm") == Credentials.certificate(own).encode()
    assert membership.apply(Revocations.issue(SWARM, 1, [INVITATION.id], [])) == {OWN}
    assert "was revoked" in (membership.standing(NOW) or "")


def test_who_was_put_out_joins_again_with_a_new_ticket() -> None:
    old = Certificate.issue(SWARM, OWN, "worker", invitation=INVITATION.id, issued=1)
    proof = JoinProof.make(Invitation.issue(SWARM, SECRET, b"\x0b" * 8), SECRET, OWN)
    revoked = Revocations.issue(SWARM, 1, [INVITATION.id], [])
    membership = member(certificate=old, proof=proof, revocations=revoked)
    assert membership.credentials("join") == Credentials.join(proof).encode()
    membership.adopt(Certificate.issue(SWARM, OWN, "worker", invitation=proof.invitation.id, issued=2))
    assert membership.standing(NOW) is None


@pytest.mark.parametrize(
    "wrong",
    [
        CERTIFICATE,
        Certificate.issue(OTHER_SWARM, OWN, "any", issued=1),
        Certificate(SWARM.peer_id, OWN, "any"),
    ],
)
def test_a_node_takes_no_certificate_that_is_not_its_own(wrong: Certificate) -> None:
    with pytest.raises(BadDocument):
        member().adopt(wrong)


def test_certificates_that_came_another_way() -> None:
    membership = member()
    assert membership.judge_certificate(PEER, CERTIFICATE.encode(), NOW) is None
    assert membership.knows(PEER)
    assert "another node" in (membership.judge_certificate(STRANGER, CERTIFICATE.encode(), NOW) or "")
    assert "cannot be read" in (membership.judge_certificate(PEER, b"x", NOW) or "")


def test_a_membership_that_runs_out() -> None:
    membership = member()
    assert membership.judge(PEER, "swarm", certificate(PEER, expires=int(NOW) + 10), NOW) is None
    assert membership.expire(NOW + 10 + CLOCK_SKEW) == frozenset()
    assert membership.expire(NOW + 11 + CLOCK_SKEW) == {PEER}
    assert not membership.knows(PEER)


def test_members_are_bounded_and_the_one_seen_last_stays() -> None:
    membership = member()
    assert membership.judge(PEER, "swarm", SHOWN, NOW) is None
    for number in range(MAX_MEMBERS):
        membership._members[PeerId(number.to_bytes(32, "big"))] = CERTIFICATE  # 4,096 signatures would take a second
    assert membership.judge(STRANGER, "swarm", certificate(STRANGER), NOW) is None
    assert membership.knows(STRANGER)
    assert not membership.knows(PEER)


@given(st.binary(max_size=520), st.sampled_from(["join", "swarm", "dispatch:x"]), st.booleans())
def test_any_bytes_are_judged_in_one_line(data: bytes, lane: str, is_authority: bool) -> None:
    membership = member(gatekeeper=Door("no") if is_authority else None)
    for shown in (data, b"\x01" + data, b"\x02" + data):
        reason = membership.judge(PEER, lane, shown, NOW)
        assert reason is not None
        assert reason.isprintable()
        assert len(reason.encode()) <= MAX_REASON
    assert not membership.members


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (3599, "59 min ago"),
        (86400, "24 h ago"),
        (2e5, "2 days ago"),
    ],
)
def test_ago(seconds: float, text: str) -> None:
    assert ago(seconds) == text
