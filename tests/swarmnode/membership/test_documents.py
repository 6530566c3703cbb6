"""What swarms sign: fixed bytes, round trips, and whatever a peer may send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import BadDocument
from swarmnode.membership import MAX_REVOKED, Certificate, Invitation, JoinProof, Revocations, Role
from tests.swarmnode.membership.people import CERTIFICATE, INVITATION, OTHER_SWARM, PEER, PROOF, SECRET, STRANGER, SWARM
from transport.identity import Identity, PeerId

Document = Invitation | JoinProof | Certificate | Revocations
REVOCATIONS = Revocations.issue(SWARM, 7, [b"\x02" * 8, b"\x01" * 8], [PEER])
SWARM_HEX = "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
PEER_HEX = "d04ab232742bb4ab3a1368bd4615e4e6d0224ab71a016baf8520a332c9778737"
INVITATION_HEX = (
    SWARM_HEX + "0102030405060708a09aa5f47a6759802ff955f8dc2d2a14a5c99d23be97f864127ff9383455a4f0"
    "000000006b49d200000000030100"
    "882b350bcea50fea1a2df1f7854dd8d3d2e1edc29fead4cb7a00316bebbda40a"
    "70fd03f89e4cb4e79389a80348b90c50bfebb9c87ff5893848e4065ff1f7df04"
)
VECTORS: list[tuple[Document, str]] = [
    (INVITATION, INVITATION_HEX),
    (
        PROOF,
        INVITATION_HEX + PEER_HEX +
        "7d7de9af2160b142465d3c38af5c49dd1dd09c09da72f28d6d119a938f652719"
        "9f4b3d2b3a23f76c7653b7edb6391356c0791f0abcdfff87f89326b2f93df206",
    ),
    (
        CERTIFICATE,
        SWARM_HEX + PEER_HEX + "020102030405060708000000006553f10000000000713fb300"
        "abd31e6a3a333a26d41ec4f4ba7c86e820672c2229dbb187299f0b3b75505e52"
        "7b0d2e892fbcf8898f6c71a4e61ac0d88c8315b8aee46b8bfbc3c34c195bd605",
    ),
    (
        REVOCATIONS,
        SWARM_HEX + "00000000000000070002000101010101010101010202020202020202" + PEER_HEX +
        "cd7f878bb2c9162be6fff9f5bee4d847fa3bb98ab0b3fe3b1554148a50281a3b"
        "14ab7882e0ec5cbb3f7a33a0aecbfa8e2df0c4ed64638661fac0e0f526dc9107",
    ),
]  # fmt: skip
DECODERS: list[Callable[[bytes], Document]] = [
    Invitation.decode,
    JoinProof.decode,
    Certificate.decode,
    Revocations.decode,
]


@pytest.mark.parametrize(("document", "text"), VECTORS)
def test_fixed_bytes(document: Document, text: str) -> None:
    data = bytes.fromhex(text)
    assert document.encode() == data
    assert type(document).decode(data) == document
    assert document.is_genuine


def test_sizes_are_those_of_the_layouts() -> None:
    assert [Invitation.SIZE, JoinProof.SIZE, Certificate.SIZE, Revocations.MIN_SIZE] == [150, 246, 153, 108]


@given(st.integers(0, 3), st.data())
def test_no_changed_byte_stays_genuine(which: int, data: st.DataObject) -> None:
    encoded = bytearray(VECTORS[which][0].encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        changed = DECODERS[which](bytes(encoded))
    except BadDocument:
        return
    assert not changed.is_genuine


@given(st.binary(max_size=300))
def test_anything_from_the_network_is_a_document_or_one_line(data: bytes) -> None:
    for decode in DECODERS:
        line = ""
        try:
            assert decode(data).encode() == data
        except BadDocument as error:
            line = str(error)
        assert "\n" not in line


@given(st.sampled_from(VECTORS), st.integers(0, 400))
def test_a_document_that_is_cut_short_or_longer_is_refused(vector: tuple[Document, str], size: int) -> None:
    document, data = vector[0], vector[0].encode()
    if size != len(data):
        with pytest.raises(BadDocument, match="bytes"):
            type(document).decode((data + bytes(400))[:size])


@given(
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**32 - 1),
    st.sampled_from(get_args(Role)),
    st.booleans(),
)
def test_invitations_come_back(id: bytes, expires: int, uses: int, role: Role, open: bool) -> None:
    made = Invitation.issue(SWARM, SECRET, id, expires=expires, uses=uses, role=role, open=open)
    assert Invitation.decode(made.encode()) == made
    assert made.is_genuine


@given(
    st.frozensets(st.binary(min_size=8, max_size=8), max_size=20),
    st.frozensets(st.binary(min_size=32, max_size=32).map(PeerId), max_size=20),
)
def test_revocations_come_back(ids: frozenset[bytes], peers: frozenset[PeerId]) -> None:
    made = Revocations.issue(SWARM, 1, ids, peers)
    assert Revocations.decode(made.encode()) == made
    assert made.is_genuine


def test_what_another_swarm_signed_is_not_genuine() -> None:
    assert not replace(CERTIFICATE, swarm=OTHER_SWARM.peer_id).is_genuine
    foreign = Certificate.issue(OTHER_SWARM, PEER, "any", issued=1)
    assert foreign.is_genuine
    assert not replace(foreign, swarm=SWARM.peer_id).is_genuine


def test_a_proof_is_worth_nothing_to_another_peer_nor_without_the_secret() -> None:
    assert not replace(PROOF, peer=STRANGER).is_genuine
    assert not JoinProof.make(INVITATION, b"\x23" * 32, PEER).is_genuine
    own_key = replace(INVITATION, key=Identity.generate(b"\x23" * 32).peer_id.raw)
    assert not JoinProof.make(own_key, b"\x23" * 32, PEER).is_genuine


def test_too_many_revocations_are_refused_before_they_are_read() -> None:
    ids = [number.to_bytes(8, "big") for number in range(MAX_REVOKED + 1)]
    full = Revocations.issue(SWARM, 1, ids[:-1], [])
    assert Revocations.decode(full.encode()) == full
    with pytest.raises(ValueError, match="4097"):
        Revocations.issue(SWARM, 1, ids, [])
    head = SWARM.peer_id.raw + bytes(8) + (65535).to_bytes(2, "big") * 2
    with pytest.raises(BadDocument, match="at most 4096"):
        Revocations.decode(head + bytes(64))


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [(84, 0, "role 0"), (84, 9, "role 9"), (85, 2, "flags"), (72, 255, "no time")],
)
def test_numbers_of_a_later_version_are_refused(at: int, value: int, text: str) -> None:
    data = bytearray(INVITATION.encode())
    data[at] = value
    with pytest.raises(BadDocument, match=text):
        Invitation.decode(bytes(data))


def test_revocations_have_one_order() -> None:
    data = REVOCATIONS.encode()
    with pytest.raises(BadDocument, match="ascend"):
        Revocations.decode(data[:44] + data[52:60] + data[44:52] + data[60:])


@pytest.mark.parametrize("wrong", [{"id": b"1"}, {"key": b"1"}, {"expires": -1}, {"uses": 2**32}])
def test_what_cannot_be_written_is_refused_where_it_is_made(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        replace(INVITATION, **wrong)  # type: ignore[arg-type]  # that is the point
