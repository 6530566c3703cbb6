from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import IdentityError
from transport.identity import Identity, PeerId, peer_id_of_certificate

SEED = bytes(range(32))
SEED_TEXT = "aoqqpp7tzyil4hlq3umoos6atft6jvrqtosq2xy53sdgiesvgg4pg5jx"


def test_text_of_a_peer_id_is_fixed() -> None:
    peer = Identity.generate(SEED).peer_id
    assert peer.raw.hex() == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert str(peer) == SEED_TEXT
    assert peer.short == str(peer)[:8]


@given(st.binary(min_size=32, max_size=32))
def test_parse_is_the_inverse_of_str(raw: bytes) -> None:
    peer = PeerId(raw)
    assert PeerId.parse(str(peer)) == peer
    assert PeerId.parse(f" {str(peer).upper()}\n") == peer


@given(st.binary(min_size=32, max_size=32), st.integers(0, 55), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_one_wrong_character_is_noticed(raw: bytes, at: int, letter: str) -> None:
    text = str(PeerId(raw))
    changed = text[:at] + letter + text[at + 1 :]
    if changed != text:
        with pytest.raises(IdentityError, match="checksum"):
            PeerId.parse(changed)


@given(st.text(max_size=70))
def test_parse_takes_any_text_or_says_what_is_wrong(text: str) -> None:
    with pytest.raises(IdentityError):
        PeerId.parse(text)


def test_bad_ids_are_named() -> None:
    with pytest.raises(IdentityError, match="56 characters, this has 3"):
        PeerId.parse("abc")
    with pytest.raises(IdentityError, match="only the characters"):
        PeerId.parse("1" * 56)
    with pytest.raises(IdentityError, match="32 bytes"):
        PeerId(b"short")


def test_signatures_verify_for_their_key_only() -> None:
    one, other = Identity.generate(), Identity.generate()
    signature = one.sign(b"message")
    assert one.peer_id.verify(signature, b"message")
    assert not one.peer_id.verify(signature, b"massage")
    assert not other.peer_id.verify(signature, b"message")
    assert not PeerId(b"\xff" * 32).verify(signature, b"message")


def test_peer_ids_are_ordered_and_hashable() -> None:
    low, high = PeerId(b"\x00" * 32), PeerId(b"\x01" + b"\x00" * 31)
    assert low < high
    assert len({low, PeerId(b"\x00" * 32), high}) == 2


def test_the_certificate_carries_the_key() -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    identity = Identity.generate(SEED)
    der = x509.load_pem_x509_certificate(identity.certificate_pem).public_bytes(Encoding.DER)
    assert peer_id_of_certificate(der) == identity.peer_id
    assert peer_id_of_certificate(b"no certificate") is None


def test_the_key_file_is_private_and_keeps_the_identity(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key.pem"
    first = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert [entry.name for entry in path.parent.iterdir()] == ["key.pem"]


@pytest.mark.skipif(os.name != "posix", reason="POSIX modes")
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    Identity.load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load_or_create(path)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"x" * 10_000])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=r"key\.pem"):
        Identity.load_or_create(path)


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "key.pem"
    path.write_bytes(X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="no Ed25519 key"):
        Identity.load_or_create(path)


def _peer_id_in(path: str) -> str:
    return str(Identity.load_or_create(Path(path)).peer_id)


def test_processes_that_start_at_once_get_one_key(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(_peer_id_in, [str(tmp_path / "key.pem")] * 9, chunksize=1)
    assert len(set(found)) == 1


def test_a_private_key_is_never_printed() -> None:
    identity = Identity.generate(SEED)
    assert SEED.hex() not in repr(identity)
    assert repr(identity) == f"Identity({identity.peer_id.short}…)"


def test_the_key_for_diffie_hellman_is_the_one_that_libsodium_derives() -> None:
    # libsodium, test/default/ed25519_convert.c
    identity = Identity.generate(bytes.fromhex("421151a459faeade3d247115f94aedae42318124095afabe4d1451a559faedee"))
    public = identity.x25519_private().public_key().public_bytes_raw()
    assert public.hex() == "f1814f0e8ff1043d8a44d25babff3cedcae6c22c3edaa48f857ae70de2baae50"
