"""Sealing: a disco datagram that only one peer can read, and that only its sender can have made. PURE.

Not the messages inside (disco_frames), and no session: every datagram stands alone, so a node that has just restarted
can answer the first one. It identifies nodes by the raw 32 bytes of their PeerId. Called by the shell that owns the
sockets, which also bounds how many strangers per second it opens (`sender`, `known`: a stranger costs an X25519).

Datagram:   0x1D "swn", sender's Ed25519 key 32, nonce 12, ChaCha20-Poly1305 ciphertext, tag 16
            (RFC 8439); associated data: head, sender's key, receiver's key
Key:        HKDF-SHA256 (RFC 5869; no salt, info: KEY_CONTEXT + both Ed25519 keys, the smaller first) of
            X25519 (RFC 7748) between the Ed25519 keys in Montgomery form: u = (1 + y) / (1 − y) mod 2²⁵⁵ − 19

The first byte has bit 0x40 clear, so that no disco datagram looks like QUIC. Both directions share a key; the receiver
in the associated data keeps a datagram from being sent back to its author. Nonces are 96 random bits: after 2³²
datagrams between two nodes, 20 years at 7 a second, the chance that one came twice is 2⁻³³.

The relay and anyone on the path can replay a datagram. A replayed ping is answered and a replayed pong matches no
open transaction; a replayed Call would start pings, and ReplayGuard stops it.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from transport.proto.disco_frames import MAX_DATAGRAM, SEAL_OVERHEAD, DiscoError

MAGIC = b"\x1dswn"
KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
KEY_CONTEXT = b"peer disco, version 1\x00"
MAX_SHARED_KEYS = 4_096  # strangers' keys held, about 0.5 KB each
MAX_BOOTS = 8  # runs of one peer whose calls are told from replays
MAX_CALLERS = 4_096

_SENDER_AT = len(MAGIC)
_NONCE_AT = _SENDER_AT + KEY_BYTES
_SEALED_AT = _NONCE_AT + NONCE_BYTES
assert _SEALED_AT + TAG_BYTES == SEAL_OVERHEAD

# Curve25519 and edwards25519: RFC 7748, 4.1.
_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P


def montgomery(ed25519_public: bytes) -> bytes:
    """The X25519 public key, 32 bytes, that belongs to an Ed25519 public key.

    Raises DiscoError when these 32 bytes are no point of the curve, in its one canonical form, or its neutral element.
    (Points of low order pass and make the X25519 exchange itself fail.)
    """
    if len(ed25519_public) != KEY_BYTES:
        raise DiscoError(f"a peer's key has {KEY_BYTES} bytes, not {len(ed25519_public)}")
    y = int.from_bytes(ed25519_public, "little") & (1 << 255) - 1
    y2 = y * y % _P
    # x² = (y² − 1) / (d·y² + 1) must be a square, which it is exactly when the product is (Euler's criterion).
    if y >= _P or y == 1 or pow((y2 - 1) * (_D * y2 + 1), (_P - 1) // 2, _P) == _P - 1:
        raise DiscoError(f"{ed25519_public.hex()} is no Ed25519 key; the peer cannot exist")
    return ((1 + y) * pow(1 - y, -1, _P) % _P).to_bytes(KEY_BYTES, "little")


def sender(datagram: bytes) -> bytes | None:
    """The key from which a datagram says it comes, before anything proves it; None when it is no disco datagram."""
    if datagram[:_SENDER_AT] != MAGIC or not SEAL_OVERHEAD < len(datagram) <= MAX_DATAGRAM:
        return None
    return datagram[_SENDER_AT:_NONCE_AT]


class DiscoBox:
    """Seals and opens one node's disco datagrams. Holds the keys shared with peers, never prints them.

    Peers given to `keep` stay; of all others the last `limit` that were sealed to, or opened from with success.
    """

    def __init__(self, me: bytes, private: X25519PrivateKey, limit: int = MAX_SHARED_KEYS) -> None:
        """`me`: our Ed25519 public key (PeerId.raw); `private`: Identity.x25519_private()."""
        self._me = me
        self._private = private
        self._limit = limit
        self._kept: dict[bytes, ChaCha20Poly1305] = {}
        self._strangers: dict[bytes, ChaCha20Poly1305] = {}  # the least recently used first

    def keep(self, peer: bytes) -> None:
        """Hold the key shared with `peer` until `release`, so that no crowd of strangers pushes it out.

        Raises DiscoError when no such key can exist.
        """
        if peer not in self._kept:
            self._kept[peer] = self._strangers.get(peer) or self._agree(peer)
            self._strangers.pop(peer, None)

    def release(self, peer: bytes) -> None:
        """Treat `peer` as any other again."""
        cipher = self._kept.pop(peer, None)
        if cipher is not None:
            self._remember(peer, cipher)

    def known(self, peer: bytes) -> bool:
        """Whether the key shared with `peer` is at hand; otherwise it costs about 0.3 ms to agree on it."""
        return peer in self._kept or peer in self._strangers

    def seal(self, peer: bytes, plaintext: bytes, nonce: bytes) -> bytes:
        """The datagram for `peer`, SEAL_OVERHEAD bytes longer than `plaintext`. `nonce`: 12 fresh random bytes.

        Raises DiscoError when nobody can have the key `peer`, ValueError when the nonce has another length.
        """
        head = MAGIC + self._me
        sealed = self._cipher(peer).encrypt(_checked(nonce), plaintext, head + peer)
        return head + nonce + sealed

    def open(self, datagram: bytes) -> tuple[bytes, bytes]:
        """(sender's key, plaintext) of a datagram sealed for us. Raises DiscoError; then nothing in it is true."""
        peer = sender(datagram)
        if peer is None:
            raise DiscoError(f"{len(datagram)} bytes that are no disco datagram")
        cipher = self._kept.get(peer) or self._strangers.get(peer) or self._agree(peer)
        nonce, sealed = datagram[_NONCE_AT:_SEALED_AT], datagram[_SEALED_AT:]
        try:
            plaintext = cipher.decrypt(nonce, sealed, MAGIC + peer + self._me)
        except InvalidTag:
            raise DiscoError(f"a disco datagram that {peer[:4].hex()}… did not seal for us") from None
        if peer not in self._kept:
            self._remember(peer, cipher)
        return peer, plaintext

    def _cipher(self, peer: bytes) -> ChaCha20Poly1305:
        cipher = self._kept.get(peer)
        if cipher is None:
            cipher = self._strangers.get(peer) or self._agree(peer)
            self._remember(peer, cipher)
        return cipher

    def _remember(self, peer: bytes, cipher: ChaCha20Poly1305) -> None:
        self._strangers.pop(peer, None)
        self._strangers[peer] = cipher
        if len(self._strangers) > self._limit:
            del self._strangers[next(iter(self._strangers))]

    def _agree(self, peer: bytes) -> ChaCha20Poly1305:
        if peer == self._me:
            raise DiscoError("a disco datagram from or to ourselves")
        public = X25519PublicKey.from_public_bytes(montgomery(peer))
        try:
            secret = self._private.exchange(public)
        except ValueError:  # the result is zero: a point of low order, for which every secret is the same
            raise DiscoError(f"{peer.hex()} is a key of low order; the peer cannot exist") from None
        info = KEY_CONTEXT + min(self._me, peer) + max(self._me, peer)
        return ChaCha20Poly1305(HKDF(SHA256(), KEY_BYTES, None, info).derive(secret))


class ReplayGuard:
    """Tells a new Call from one that was recorded and sent again. Bounded in peers and in runs of each.

    Within a run (boot) of a peer the numbers of its calls only grow; each run counts for itself, because run names are
    random and a peer that restarts must never be locked out. A run forgotten after MAX_BOOTS later ones may be
    replayed, each call once more: it costs a few pings to addresses where nobody is now.
    """

    def __init__(self, limit: int = MAX_CALLERS) -> None:
        self._limit = limit
        self._seen: dict[bytes, dict[bytes, int]] = {}  # peer → boot → highest number; the latest used last

    def fresh(self, peer: bytes, boot: bytes, number: int) -> bool:
        """Whether this call of an authenticated peer is new; remembers it."""
        boots = self._seen.pop(peer, None)
        if boots is None:
            boots = {}
        self._seen[peer] = boots
        if len(self._seen) > self._limit:
            del self._seen[next(iter(self._seen))]
        if number <= boots.get(boot, -1):
            return False
        boots.pop(boot, None)
        boots[boot] = number
        if len(boots) > MAX_BOOTS:
            del boots[next(iter(boots))]
        return True


def _checked(nonce: bytes) -> bytes:
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a disco nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    return nonce
