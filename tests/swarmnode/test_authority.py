"""The founder's books: invitations, who joined, who is out; what is on disk, and when."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import swarmnode.authority
from swarmnode.authority import FILE_NAME, KEY_NAME, SwarmAuthority
from swarmnode.errors import BadTicket, JoinRefused, SwarmFilesDamaged, UsageError
from swarmnode.membership import Certificate, Credentials, Invitation, JoinProof, Membership, Revocations, Ticket
from swarmnode.model.folder_lock import FolderLock
from swarmnode.swarm_books import read_books
from transport.identity import Identity, PeerId

NOW = 1_750_000_000.0
HOUR = 3600.0


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authority(tmp_path: Path, clock: Clock) -> SwarmAuthority:
    return SwarmAuthority(tmp_path / "swarm", clock)


def peers() -> Iterator[PeerId]:
    number = 0
    while True:
        number += 1
        yield Identity.generate(number.to_bytes(32, "big")).peer_id


A, B, C = (peer for peer, _ in zip(peers(), range(3), strict=False))


def join(authority: SwarmAuthority, given: tuple[Invitation, bytes], peer: PeerId) -> Certificate:
    return authority.redeem(JoinProof.make(*given, peer), peer)


def test_a_newcomer_gets_the_certificate_that_everybody_accepts(authority: SwarmAuthority) -> None:
    given = authority.invite(expires_s=HOUR, uses=2, role="worker")
    certificate = join(authority, given, A)
    assert (certificate.role, certificate.invitation, certificate.issued) == ("worker", given[0].id, int(NOW))
    stranger_to_the_authority = Membership(authority.swarm, B)
    assert stranger_to_the_authority.judge(A, "bulk", Credentials.certificate(certificate).encode(), NOW) is None


def test_the_swarm_and_its_books_survive_a_restart(authority: SwarmAuthority, tmp_path: Path, clock: Clock) -> None:
    given = authority.invite(uses=2)
    first = join(authority, given, A)
    revoked = authority.revoke(authority.invite()[0].id, expel=True)
    again = SwarmAuthority(tmp_path / "swarm", clock)
    assert again.swarm == authority.swarm
    assert again.list() == authority.list()
    assert again.revocations == revoked
    assert revoked.is_genuine
    assert join(again, given, A) == first
    join(again, given, B)
    with pytest.raises(JoinRefused, match=r"this ticket was used up \(2 of 2\): ask for a new one"):
        join(again, given, C)


def test_the_same_peer_again_is_free_whatever_became_of_the_ticket(authority: SwarmAuthority, clock: Clock) -> None:
    given = authority.invite(expires_s=HOUR, uses=1)
    first = join(authority, given, A)
    clock.now += 10 * HOUR
    authority.revoke(given[0].id)
    assert join(authority, given, A) == first
    assert len(authority.list()[0].joined) == 1


@pytest.mark.parametrize("late", [0.0, 3 * HOUR])
def test_an_expired_ticket(authority: SwarmAuthority, clock: Clock, late: float) -> None:
    given = authority.invite(expires_s=HOUR)
    clock.now += HOUR + late
    if late:
        with pytest.raises(JoinRefused, match="this ticket expired 3 h ago: ask for a new one"):
            join(authority, given, A)
    else:
        join(authority, given, A)


def test_a_leaked_ticket_is_revoked_by_its_first_digits_or_by_itself(authority: SwarmAuthority) -> None:
    for named in (0, 1, 2):
        given = authority.invite()
        join(authority, given, A)
        ways = (given[0].id, given[0].label[:6].upper(), str(Ticket(*given)))
        before = authority.revocations
        assert authority.revoke(ways[named]) == before  # members that it let in stay
        with pytest.raises(JoinRefused, match="this ticket was revoked: ask for a new one"):
            join(authority, given, B)
        join(authority, given, A)


def test_revoked_with_everybody_it_let_in(authority: SwarmAuthority, clock: Clock) -> None:
    given = authority.invite()
    shown = Credentials.certificate(join(authority, given, A)).encode()
    membership = Membership(authority.swarm, B)
    assert membership.judge(A, "swarm", shown, NOW) is None
    first = authority.revoke(given[0].label, expel=True)
    assert membership.apply(first) == {A}
    with pytest.raises(JoinRefused, match="this ticket was revoked"):
        join(authority, given, A)
    clock.now -= HOUR  # a clock that is put back makes no older list
    second = authority.revoke(authority.invite()[0].id, expel=True)
    assert second.serial > first.serial
    assert second.invitations > first.invitations
    assert authority.revoke(given[0].label, expel=True) == second
    join(authority, authority.invite(), A)  # it may come with another ticket


def test_one_member_is_expelled_for_good(authority: SwarmAuthority) -> None:
    given = authority.invite()
    join(authority, given, A)
    join(authority, given, B)
    assert authority.expel(str(A)[:10]).peers == {A}
    assert authority.expel(C).peers == {A, C}
    for ticket in (given, authority.invite()):
        with pytest.raises(JoinRefused, match="you were expelled from this swarm"):
            join(authority, ticket, A)
    join(authority, given, B)


def test_names_that_mean_none_or_several(authority: SwarmAuthority) -> None:
    for _ in range(17):
        authority.invite()
    several = next(d for d in "0123456789abcdef" if sum(i.invitation.label.startswith(d) for i in authority.list()) > 1)
    with pytest.raises(UsageError, match=r"there are \d+ such tickets"):
        authority.revoke(several)
    for none in ("", "xyz", b"12345678"):
        with pytest.raises(UsageError, match="there are no such tickets"):
            authority.revoke(none)
    with pytest.raises(UsageError, match="there are no such members"):
        authority.expel("")
    with pytest.raises(BadTicket, match="cut short"):
        authority.revoke("swarm1abc")


@pytest.mark.parametrize(("expires", "uses"), [(-1, 0), (0, -1), (0, 1 << 32), (1e30, 0), (float("nan"), 0)])
def test_tickets_that_cannot_be_meant(authority: SwarmAuthority, expires: float, uses: int) -> None:
    with pytest.raises(UsageError, match="a ticket"):
        authority.invite(expires, uses)
    assert authority.list() == ()


def test_what_is_no_proof_of_ours(authority: SwarmAuthority, tmp_path: Path) -> None:
    invitation, secret = authority.invite()
    theirs = SwarmAuthority(tmp_path / "other").invite()
    for proof, peer in (
        (JoinProof.make(invitation, secret, A), B),
        (JoinProof.make(invitation, bytes(32), A), A),
        (JoinProof.make(*theirs, A), A),
    ):
        with pytest.raises(JoinRefused, match="forgery"):
            authority.redeem(proof, peer)


def test_a_ticket_that_the_books_have_lost(authority: SwarmAuthority, tmp_path: Path) -> None:
    given = authority.invite()
    old = authority.revoke(authority.invite()[0].id, expel=True)
    (tmp_path / "swarm" / FILE_NAME).unlink()
    again = SwarmAuthority(tmp_path / "swarm", lambda: NOW + 1)
    with pytest.raises(JoinRefused, match="not known to the swarm any more"):
        join(again, given, A)
    assert again.revoke(again.invite()[0].id, expel=True).serial > old.serial  # members take the new list


def test_the_gatekeeper_says_before_what_redeem_says(authority: SwarmAuthority, clock: Clock) -> None:
    given = authority.invite(expires_s=HOUR, uses=1)
    gate = Membership(authority.swarm, C, certificate=authority.certify(C), gatekeeper=authority)
    shown = {peer: Credentials.join(JoinProof.make(*given, peer)).encode() for peer in (A, B)}
    assert gate.judge(A, "join", shown[A], NOW) is None
    join(authority, given, A)
    assert gate.judge(B, "join", shown[B], NOW) == "this ticket was used up (1 of 1): ask for a new one"
    assert gate.judge(A, "join", shown[A], NOW) is None
    assert "a ticket is needed" in (gate.judge(B, "join", b"", NOW) or "")


def test_an_open_door_on_a_trusted_network(authority: SwarmAuthority, tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(JoinRefused, match="a ticket is needed"):
        authority.redeem(None, A)
    door = authority.open_door()
    assert door.open
    assert authority.objection(A, None, NOW) is None
    assert authority.redeem(None, A).invitation == door.id
    authority.close_door()
    with pytest.raises(JoinRefused, match="a ticket is needed"):
        authority.redeem(None, A)
    again = SwarmAuthority(tmp_path / "swarm", clock)
    with pytest.raises(JoinRefused, match="a ticket is needed"):  # a restart without --open closes it
        again.redeem(None, B)
    assert again.open_door() == door
    assert again.revoke(door.id, expel=True).invitations == {door.id}
    for peer in (A, B):
        with pytest.raises(JoinRefused):
            again.redeem(None, peer)
    assert again.open_door() != door


def test_a_command_and_a_running_node_share_the_books(authority: SwarmAuthority, tmp_path: Path, clock: Clock) -> None:
    command = SwarmAuthority(tmp_path / "swarm", clock)
    given = command.invite(uses=1)
    join(authority, given, A)  # the node has never heard of it
    assert [len(one.joined) for one in command.list()] == [1]
    revoked = command.revoke(given[0].id, expel=True)
    authority.refresh()
    assert authority.revocations == revoked
    assert authority.objection(B, JoinProof.make(*given, B), NOW) == "this ticket was revoked: ask for a new one"


def test_a_ticket_that_a_command_has_just_given_out_is_good_at_once(authority: SwarmAuthority, tmp_path: Path) -> None:
    given = SwarmAuthority(tmp_path / "swarm").invite()
    assert authority.objection(A, JoinProof.make(*given, A), NOW) is None  # before this one has looked
    join(authority, given, A)


def test_questions_are_answered_while_a_change_waits_for_the_disk(authority: SwarmAuthority, tmp_path: Path) -> None:
    """They come from the event loop, which must not stand still while another process holds the lock."""
    given = authority.invite(uses=1)
    join(authority, given, A)
    proof = JoinProof.make(*given, B)
    lock = FolderLock(tmp_path / "swarm")
    waiting = threading.Thread(target=authority.invite)
    waiting.start()
    try:
        asked = threading.Event()

        def ask() -> None:
            assert "used up" in (authority.objection(B, proof, NOW) or "")
            assert authority.revocations.serial == 0
            authority.refresh()
            assert authority.list()
            asked.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert asked.wait(5)
        assert waiting.is_alive()
        asking.join()
    finally:
        lock.release()
        waiting.join()
    assert len(authority.list()) == 2


def test_a_reader_that_is_overtaken_by_a_change_does_not_undo_it(
    authority: SwarmAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SwarmAuthority(tmp_path / "swarm").invite()  # so that there is something to read
    reading, go_on = threading.Event(), threading.Event()

    def slow(path: Path, swarm: PeerId) -> object:
        found = read_books(path, swarm)
        if threading.current_thread() is reader:
            reading.set()
            assert go_on.wait(10)
        return found

    monkeypatch.setattr(swarmnode.authority, "read_books", slow)
    reader = threading.Thread(target=authority.refresh)
    reader.start()
    assert reading.wait(10)
    given = authority.invite()
    revoked = authority.revoke(given[0].id, expel=True)
    go_on.set()
    reader.join()
    assert authority.revocations == revoked
    assert len(authority.list()) == 2


def test_many_at_once_never_use_a_ticket_too_often(tmp_path: Path, clock: Clock) -> None:
    authorities = [SwarmAuthority(tmp_path / "swarm", clock) for _ in range(3)]
    given = authorities[0].invite(uses=5)
    many = [peer for peer, _ in zip(peers(), range(12), strict=False)]
    got: list[PeerId] = []

    def run(authority: SwarmAuthority, mine: list[PeerId]) -> None:
        for peer in mine:
            with contextlib.suppress(JoinRefused):
                got.append(join(authority, given, peer).peer)

    threads = [threading.Thread(target=run, args=(a, many[i::3])) for i, a in enumerate(authorities)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == len(got) == 5
    assert set(authorities[1].list()[0].joined) == set(got)


def test_files_are_private(authority: SwarmAuthority, tmp_path: Path) -> None:
    authority.invite()
    if os.name == "posix":
        folder = tmp_path / "swarm"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE((folder / name).stat().st_mode) for name in (KEY_NAME, FILE_NAME)} == {0o600}
        (folder / FILE_NAME).chmod(0o640)
        with pytest.raises(SwarmFilesDamaged, match="can be read by others; run: chmod 600"):
            SwarmAuthority(folder)


def test_a_full_disk_gives_no_certificate_and_loses_nothing(
    authority: SwarmAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = authority.invite(uses=1)

    def full(*_: object) -> None:
        raise SwarmFilesDamaged("invitations.json: cannot be written (No space left on device)")

    with monkeypatch.context() as patched:
        patched.setattr(swarmnode.authority, "write_books", full)
        with pytest.raises(SwarmFilesDamaged, match="No space left"):
            join(authority, given, A)
        assert authority.list()[0].joined == {}
    join(authority, given, B)


def test_a_lock_that_is_never_given_back_is_one_line(
    authority: SwarmAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarmnode.authority, "LOCK_WAIT", 0.05)
    lock = FolderLock(tmp_path / "swarm")
    with pytest.raises(SwarmFilesDamaged, match="used by another swarmnode"):
        authority.invite()
    lock.release()
    authority.invite()


def test_books_without_their_key_are_not_taken_over_by_a_new_one(authority: SwarmAuthority, tmp_path: Path) -> None:
    authority.invite()
    folder = tmp_path / "swarm"
    kept = (folder / KEY_NAME).rename(tmp_path / "kept")
    with pytest.raises(SwarmFilesDamaged, match=r"swarm\.key: is missing"):
        SwarmAuthority(folder)
    assert not SwarmAuthority.exists(folder)
    Identity.load_or_create(folder / KEY_NAME)
    with pytest.raises(SwarmFilesDamaged, match=r"it is of swarm \w{8}…, the key beside it is of \w{8}…"):
        SwarmAuthority(folder)
    kept.replace(folder / KEY_NAME)
    assert len(SwarmAuthority(folder).list()) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b"\xff", b'{"format": 2}', b"[" * 100_000])
def test_damaged_books_are_one_line(authority: SwarmAuthority, tmp_path: Path, damage: bytes) -> None:
    authority.invite()
    path = tmp_path / "swarm" / FILE_NAME
    path.write_bytes(damage)
    with pytest.raises(SwarmFilesDamaged, match=r"invitations\.json: damaged \(.*\); restore it") as caught:
        SwarmAuthority(tmp_path / "swarm")
    assert "\n" not in str(caught.value)
    with pytest.raises(SwarmFilesDamaged, match="damaged"):
        authority.invite()
    assert authority.objection(A, None, NOW) == "the founder's files are damaged: tell the founder"
    assert path.read_bytes() == damage  # never written over


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=3))
def test_any_damage_is_one_line_or_harmless(authority: SwarmAuthority, tmp_path: Path, at: float, new: bytes) -> None:
    path = tmp_path / "swarm" / FILE_NAME
    if not path.exists():
        join(authority, authority.invite(uses=3), A)
        (tmp_path / "good").write_bytes(path.read_bytes())
    data = bytearray((tmp_path / "good").read_bytes())
    start = int(at * len(data))
    data[start : start + len(new)] = new
    path.write_bytes(data)
    with contextlib.suppress(SwarmFilesDamaged):
        assert SwarmAuthority(tmp_path / "swarm").swarm == authority.swarm


def test_an_oversized_file_is_not_read(authority: SwarmAuthority, tmp_path: Path) -> None:
    authority.invite()
    with (tmp_path / "swarm" / FILE_NAME).open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(SwarmFilesDamaged, match="more than 8388608 bytes"):
        SwarmAuthority(tmp_path / "swarm")


def test_a_leaked_ticket_cannot_fill_the_disk(authority: SwarmAuthority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarmnode.authority, "MAX_JOINED", 2)
    given = authority.invite()
    join(authority, given, A)
    join(authority, given, B)
    with pytest.raises(JoinRefused, match="this swarm is full"):
        join(authority, given, C)
    join(authority, given, A)


def test_a_leaked_ticket_that_is_revoked_leaves_the_swarm_open(
    authority: SwarmAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarmnode.authority, "MAX_JOINED", 3)
    leaked, fresh = authority.invite(), authority.invite()
    join(authority, leaked, A)
    join(authority, leaked, B)
    join(authority, fresh, C)
    others = [peer for peer, _ in zip(peers(), range(7), strict=False)][3:]
    authority.revoke(leaked[0].id)  # its members stay, and count
    with pytest.raises(JoinRefused, match="this swarm is full"):
        join(authority, fresh, others[0])
    authority.revoke(leaked[0].id, expel=True)
    join(authority, fresh, others[0])
    authority.expel(C)
    join(authority, fresh, others[1])
    join(authority, fresh, others[2])
    with pytest.raises(JoinRefused, match="this swarm is full"):
        join(authority, fresh, others[3])
    with pytest.raises(JoinRefused, match="this ticket was revoked"):
        join(authority, leaked, A)
    kept = {one.invitation.id: set(one.joined) for one in SwarmAuthority(tmp_path / "swarm").list()}
    assert kept == {leaked[0].id: set(), fresh[0].id: {C, *others[:3]}}  # who is out takes no room on the disk


def test_dead_tickets_make_room(authority: SwarmAuthority, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarmnode.authority, "MAX_INVITATIONS", 2)
    authority.invite(expires_s=HOUR)
    lasting = authority.invite()
    with pytest.raises(UsageError, match="this swarm has 2 tickets"):
        authority.invite()
    clock.now += 2 * HOUR
    newest = authority.invite()
    assert [one.invitation for one in authority.list()] == [lasting[0], newest[0]]
    assert [one.secret for one in authority.list()] == [lasting[1], newest[1]]  # a ticket can be printed again
    assert repr(newest[1]) not in repr(authority.list())


CHILD = """
import sys
from pathlib import Path
from swarmnode.authority import SwarmAuthority
from swarmnode.membership import JoinProof
from transport.identity import Identity
authority = SwarmAuthority(Path(sys.argv[1]))
one = authority.list()[0]
for number in range(1, 1000):
    peer = Identity.generate(number.to_bytes(32, "big")).peer_id
    authority.redeem(JoinProof.make(one.invitation, one.secret, peer), peer)
    print(peer, flush=True)
"""


@pytest.mark.parametrize("after", [1, 7, 20])
def test_killed_at_any_time_no_certificate_is_out_that_is_not_counted(tmp_path: Path, after: int) -> None:
    folder = tmp_path / "swarm"
    SwarmAuthority(folder).invite(uses=999)
    with subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        told = [child.stdout.readline().strip() for _ in range(after)]
        child.send_signal(signal.SIGKILL)
        told += [line.strip() for line in child.stdout if line.endswith("\n")]
    counted = {str(peer) for peer in SwarmAuthority(folder).list()[0].joined}
    assert set(told) <= counted
    assert len(counted) <= len(told) + 1
    SwarmAuthority(folder).invite()  # the lock went with the process


def test_who_was_expelled_stays_out_when_the_invitations_are_lost(tmp_path: Path) -> None:
    authority = SwarmAuthority(tmp_path)
    peer = Identity.generate().peer_id
    invitation, secret = authority.invite()
    authority.redeem(JoinProof.make(invitation, secret, peer), peer)
    revocations = authority.expel(str(peer))  # the whole id
    (tmp_path / "invitations.json").unlink()
    lost = SwarmAuthority(tmp_path)
    assert peer not in lost.revocations.peers
    lost.restore(revocations)
    assert peer in SwarmAuthority(tmp_path).revocations.peers
    lost.restore(Revocations.issue(Identity.generate(), 1 << 40, (), ()))  # of another swarm
    assert lost.revocations == revocations


def test_a_member_that_no_book_names_can_be_expelled_by_its_whole_id(tmp_path: Path) -> None:
    peer = Identity.generate().peer_id
    assert peer in SwarmAuthority(tmp_path).expel(str(peer)).peers


def test_a_damaged_key_is_to_be_restored_and_never_thrown_away(tmp_path: Path) -> None:
    SwarmAuthority(tmp_path)
    (tmp_path / "swarm.key").write_bytes(b"junk")
    with pytest.raises(SwarmFilesDamaged, match="restore it from a copy"):
        SwarmAuthority(tmp_path)
