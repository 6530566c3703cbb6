"""Which swarm a node is in, across restarts."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.errors import SwarmFilesDamaged, UsageError
from swarmnode.member_state import FILE_NAME, MAX_PEERS, Joined, MemberState
from swarmnode.membership import BootstrapPeer, Certificate, Invitation, Membership, Revocations, Ticket
from transport.identity import Identity

SWARM, OTHER = Identity.generate(b"\x01" * 32), Identity.generate(b"\x02" * 32)
OWN, PEER = Identity.generate(b"\x03" * 32).peer_id, Identity.generate(b"\x04" * 32).peer_id
JOINED = Joined(
    Certificate.issue(SWARM, OWN, "worker", invitation=b"\x07" * 8, issued=1_700_000_000),
    ("https://relay.example",),
    (BootstrapPeer(PEER, (("192.0.2.1", 4433), ("node.example", 1))), BootstrapPeer(SWARM.peer_id)),
    Revocations.issue(SWARM, 3, [b"\x01" * 8], [PEER]),
)


def ticket(swarm: Identity) -> Ticket:
    return Ticket(Invitation.issue(swarm, bytes(32), bytes(8)), bytes(32))


def test_a_node_finds_its_swarm_again(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "swarm"
    assert MemberState(folder).joined is None
    assert not folder.exists()
    MemberState(folder).save(JOINED)
    again = MemberState(folder)
    assert again.joined == JOINED
    again.check_key(OWN)
    again.check_ticket(ticket(SWARM))
    if os.name == "posix":
        assert stat.S_IMODE((folder / FILE_NAME).stat().st_mode) == 0o600
    bare = replace(JOINED, relays=(), peers=(), revocations=None)
    again.save(bare)
    assert MemberState(folder).joined == bare
    again.leave()
    assert MemberState(folder).joined is None


def test_a_ticket_of_another_swarm_names_both_and_a_folder(tmp_path: Path) -> None:
    state = MemberState(tmp_path / "state" / "swarm")
    state.check_ticket(ticket(OTHER))
    state.save(JOINED)
    ours, theirs = SWARM.peer_id.short, OTHER.peer_id.short
    with pytest.raises(UsageError) as caught:
        state.check_ticket(ticket(OTHER))
    assert str(caught.value) == (
        f"this node is in swarm {ours}…, the ticket is for swarm {theirs}…: "
        f"to be in both, start another with --state {tmp_path}/state-{theirs}"
    )
    with pytest.raises(UsageError, match=f"in swarm {ours}…, not in {theirs}…"):
        state.save(Joined(Certificate.issue(OTHER, OWN, "any", issued=1)))
    assert MemberState(tmp_path / "state" / "swarm").joined == JOINED


def test_another_key_than_the_certificates(tmp_path: Path) -> None:
    state = MemberState(tmp_path)
    state.check_key(PEER)
    state.save(JOINED)
    with pytest.raises(SwarmFilesDamaged, match=f"is of node {OWN.short}…, the key file beside it of {PEER.short}…"):
        state.check_key(PEER)


def test_more_peers_than_are_worth_asking(tmp_path: Path) -> None:
    known = BootstrapPeer(PEER, tuple(("192.0.2.1", port) for port in range(1, 20)))
    MemberState(tmp_path).save(replace(JOINED, relays=("https://relay.example",) * 20, peers=(known,) * 100))
    joined = MemberState(tmp_path).joined
    assert joined is not None
    assert (len(joined.relays), len(joined.peers), len(joined.peers[0].addresses)) == (8, MAX_PEERS, 6)


def test_a_swarm_that_has_put_nobody_out_yet(tmp_path: Path) -> None:
    MemberState(tmp_path).save(replace(JOINED, revocations=Membership(SWARM.peer_id, OWN).revocations))
    assert MemberState(tmp_path).joined == replace(JOINED, revocations=None)


def test_a_write_that_fails_loses_nothing(tmp_path: Path) -> None:
    state = MemberState(tmp_path)
    state.save(JOINED)
    (tmp_path / "blocked").write_text("a file")
    with pytest.raises(SwarmFilesDamaged, match="blocked"):
        MemberState(tmp_path / "blocked" / "swarm").save(JOINED)
    assert MemberState(tmp_path).joined == JOINED


def test_a_swarm_that_did_not_sign(tmp_path: Path) -> None:
    for wrong in (
        replace(JOINED, certificate=replace(JOINED.certificate, signature=bytes(64))),
        replace(JOINED, revocations=Revocations.issue(OTHER, 1, [], [])),
    ):
        folder = tmp_path / str(wrong.swarm)
        MemberState(folder).save(wrong)
        with pytest.raises(SwarmFilesDamaged, match="not of this swarm"):
            MemberState(folder)
        (folder / FILE_NAME).unlink()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(damage)
    with pytest.raises(SwarmFilesDamaged, match=r"member\.json: damaged \(.*\); restore it from a copy") as caught:
        MemberState(tmp_path)
    assert "\n" not in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=3))
def test_any_damage_is_one_line_or_harmless(tmp_path: Path, at: float, new: bytes) -> None:
    path, good = tmp_path / FILE_NAME, tmp_path / "good"
    if not good.exists():
        MemberState(tmp_path).save(JOINED)
        good.write_bytes(path.read_bytes())
    data = bytearray(good.read_bytes())
    start = int(at * len(data))
    data[start : start + len(new)] = new
    path.write_bytes(data)
    with contextlib.suppress(SwarmFilesDamaged):
        joined = MemberState(tmp_path).joined
        assert joined is not None
        assert joined.certificate == JOINED.certificate
