"""Who a node is: an Ed25519 key pair. PeerId is the public key; Identity holds the private one.

Not a trust store: whether a PeerId may connect is decided by the endpoint's `admit` callback. Called by the
endpoint (proofs, certificate), by configuration code (key file) and by everything that names a peer.

Text of a PeerId: lowercase base32 (RFC 4648, no padding) of the 32 key bytes followed by 3 checksum bytes,
SHA-256("peer id" + key)[:3]. 35 bytes are exactly 56 characters.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.x509.oid import NameOID

from transport.errors import IdentityError

KEY_BYTES = 32
CHECKSUM_BYTES = 3
TEXT_LENGTH = 56
SIGNATURE_BYTES = 64
MAX_KEY_FILE = 4096  # a PKCS#8 Ed25519 key in PEM is 119 bytes; anything large is not ours
# Only the key in the certificate counts, so its dates never expire (RFC 5280, 4.1.2.5 "no well-defined end").
NOT_BEFORE = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)


def _checksum(raw: bytes) -> bytes:
    return hashlib.sha256(b"peer id" + raw).digest()[:CHECKSUM_BYTES]


@dataclass(frozen=True, order=True, slots=True)
class PeerId:
    """A node's public key: 32 raw Ed25519 bytes. Ordered and hashable; `str()` is its text with checksum."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != KEY_BYTES:
            raise IdentityError(f"a peer id has {KEY_BYTES} bytes, not {len(self.raw)}")

    @classmethod
    def parse(cls, text: str) -> PeerId:
        """The PeerId that `text` names. Raises IdentityError on a bad length, alphabet or checksum."""
        text = text.strip().lower()
        if len(text) != TEXT_LENGTH:
            raise IdentityError(f"a peer id has {TEXT_LENGTH} characters, this has {len(text)}; copy it whole")
        try:
            data = base64.b32decode(text.upper())
        except (binascii.Error, ValueError):
            raise IdentityError("a peer id has only the characters a-z and 2-7; copy it again") from None
        raw, checksum = data[:KEY_BYTES], data[KEY_BYTES:]
        if checksum != _checksum(raw):
            raise IdentityError(f"the checksum of peer id {text[:8]}… is wrong; a character was mistyped")
        return cls(raw)

    @property
    def short(self) -> str:
        """The first 8 characters, for people."""
        return str(self)[:8]

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether `signature` over `message` was made with this peer's private key."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    def __str__(self) -> str:
        return base64.b32encode(self.raw + _checksum(self.raw)).decode().lower()

    def __repr__(self) -> str:
        return f"PeerId({self.short}…)"


class Identity:
    """A node's key pair. Never printed; written only by `load_or_create`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        public = key.public_key()
        raw = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.peer_id = PeerId(raw)

    @classmethod
    def generate(cls, seed: bytes | None = None) -> Identity:
        """A new identity, or the one that belongs to a 32-byte `seed`."""
        seed = secrets.token_bytes(KEY_BYTES) if seed is None else seed
        if len(seed) != KEY_BYTES:
            raise IdentityError(f"a seed has {KEY_BYTES} bytes, not {len(seed)}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity in `path` (PKCS#8 PEM, mode 0600); creates it when missing.

        Creation is atomic: of two processes that start at once, both get the same key. Raises IdentityError
        when the file can be read by others, is no Ed25519 key, or cannot be written.
        """
        try:
            if not path.exists():
                _create_key_file(path)
            return cls(_read_key_file(path))
        except OSError as error:
            raise IdentityError(f"key file {path}: {error.strerror or error}") from error

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature over `message`."""
        return self._key.sign(message)

    def x25519_private(self) -> X25519PrivateKey:
        """The same key for Diffie-Hellman, so that whoever knows a PeerId can seal datagrams to it (disco_seal).

        SHA-512(seed)[:32] is the scalar of Ed25519 (RFC 8032, 5.1.5); X25519 clamps it in the same way.
        """
        seed = self._key.private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )
        return X25519PrivateKey.from_private_bytes(hashlib.sha512(seed).digest()[:KEY_BYTES])

    @cached_property
    def certificate_pem(self) -> bytes:
        """The self-signed certificate shown in QUIC handshakes. Peers check its key and nothing else."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "peer")])
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOT_BEFORE)
            .not_valid_after(NOT_AFTER)
        )
        return builder.sign(self._key, None).public_bytes(serialization.Encoding.PEM)

    @property
    def private_key_pem(self) -> bytes:
        """PKCS#8 PEM, for the QUIC library's TLS and for the key file."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def __repr__(self) -> str:
        return f"Identity({self.peer_id.short}…)"


def peer_id_of_certificate(der: bytes) -> PeerId | None:
    """The PeerId whose key is in this certificate; None when it holds no Ed25519 key or cannot be parsed."""
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except ValueError:
        return None
    if not isinstance(key, Ed25519PublicKey):
        return None
    return PeerId(key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))


def _create_key_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(Identity.generate().private_key_pem)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # fails when another process was first: then its key counts
        except FileExistsError:
            return
        except OSError:  # a file system without hard links: the first rename wins almost always
            if not path.exists():
                os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_key_file(path: Path) -> Ed25519PrivateKey:
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
            raise IdentityError(f"key file {path} can be read by others; run: chmod 600 {path}")
        pem = file.read(MAX_KEY_FILE + 1)
    if len(pem) > MAX_KEY_FILE:
        raise IdentityError(f"key file {path} is too large to be a key; choose another path")
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise IdentityError(f"key file {path} is not a PEM private key; move it away to get a new one") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"key file {path} holds no Ed25519 key; move it away to get a new one")
    return key
