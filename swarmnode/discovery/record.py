"""What a member says of itself: who, where, until when, signed with its own key. PURE.

Not whether it is a member (membership judges the certificate that is carried here), and not who is alive (peer_book).
A record lives RECORD_TTL_S from its receipt and is issued again every REISSUE_S, so that a node that was killed is out
of every view within 15 s: its last record's life, and two hops by which it may have come. Written by discovery.py,
read by peer_book, mdns and relay_directory; carried by mDNS, by the relays' directories and by peers.

Record:  version u8 = 1, swarm 32, peer 32, seq u64 (unix ms; grows), ttl s u8 ≤ 60 (0: it leaves),
         memory u64 (bytes it offers for experts), model 8 (the first bytes of the model's hash, zeros: none),
         name: length u8 ≤ 64, UTF-8;  role: length u8 ≤ 16, a-z and "-";
         relays: count u8 ≤ 3, each: length u16 ≤ 256, canonical URL, its home first;
         certificate: length u16 ≤ 400;
         addresses: count u8 ≤ 12, each: family u8 (4 or 6), host 4 or 16 bytes, port u16, best first;
         …, signature 64: Ed25519 by the peer's key over CONTEXT and everything before the signature

Numbers are big endian. Bytes between the addresses and the signature are a later version's and ignored. A relay that is
no URL, and an address where nobody can be, is left out. At most MAX_RECORD bytes: `sign` cuts addresses, down to
KEPT_ADDRESSES, then relays but the home, then the rest of the addresses.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import ip_address

from swarmnode.errors import BadRecord
from transport.errors import Address
from transport.identity import PeerId
from transport.proto.candidates import parse_host, why_not_told
from transport.proto.relay_url import BadRelayUrl, parse_relay_url

VERSION = 1
CONTEXT = b"swarmnode peer record 1\x00"
TOPIC_CONTEXT = b"swarmnode swarm topic 1\x00"
TAG_CONTEXT = b"swarmnode swarm tag 1\x00"

RECORD_TTL_S = 10  # three records may be lost before a peer is taken for gone
REISSUE_S = 3.0
MAX_TTL_S = 60

MAX_RECORD = 1300  # bytes; fits in one datagram of every path, and in a relay's blob
MAX_NAME_BYTES = 64
MAX_ROLE_BYTES = 16
MAX_RELAYS = 3
MAX_RELAY_BYTES = 256
MAX_ADDRESSES = 12
MAX_CERTIFICATE = 400
KEPT_ADDRESSES = 4  # worth more than a second relay: this machine's own networks, and what reflectors saw
MODEL_BYTES = 8
TOPIC_BYTES = 32
TAG_BYTES = 8
KEY_BYTES = 32
SIGNATURE_BYTES = 64

_HEAD = struct.Struct(">B32s32sQB")
_FIXED = struct.Struct(">Q8s")
_LENGTH = struct.Struct(">H")
_SEQ_AT = 1 + 2 * KEY_BYTES
_NO_MODEL = bytes(MODEL_BYTES)
_ROLE = re.compile(r"[a-z-]{0,16}", re.ASCII)
_FAMILY_BYTES = {4: 4, 6: 16}


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """A peer's word of itself. `memory`: bytes; `model`: 8 bytes, or none; `seq`: unix milliseconds when it was issued.

    `ttl_s` 0: it leaves. `addresses` are (IP, port), best first; `relays` URLs, its home first.
    """

    swarm: PeerId
    peer: PeerId
    seq: int
    ttl_s: int = RECORD_TTL_S
    name: str = ""
    role: str = "worker"
    relays: tuple[str, ...] = ()
    addresses: tuple[Address, ...] = ()
    certificate: bytes = b""
    model: bytes = b""
    memory: int = 0

    @property
    def leaves(self) -> bool:
        """Whether it says goodbye."""
        return self.ttl_s == 0

    def same_content(self, other: PeerRecord) -> bool:
        """Whether nothing but the time of issue differs."""
        return replace(self, seq=0, ttl_s=0) == replace(other, seq=0, ttl_s=0)


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a record whose signature nobody has checked."""

    swarm: bytes
    peer: bytes
    seq: int
    ttl_s: int


def swarm_topic(swarm: PeerId) -> bytes:
    """The name of a swarm in the relays' directories, 32 bytes: only who knows the swarm's id can ask for it."""
    return hashlib.sha256(TOPIC_CONTEXT + swarm.raw).digest()


def swarm_tag(swarm: PeerId) -> bytes:
    """What tells a swarm's members from others on a LAN, 8 bytes."""
    return hashlib.sha256(TAG_CONTEXT + swarm.raw).digest()[:TAG_BYTES]


def next_seq(previous: int, unix: float) -> int:
    """The number of the next record: `unix` seconds in ms, and more than the previous one, however clocks jump."""
    return max(previous + 1, int(unix * 1000))


def sign(record: PeerRecord, key: Callable[[bytes], bytes]) -> bytes:
    """The record as bytes, at most MAX_RECORD; `key` signs (Identity.sign). What is too much is cut, best first kept.

    Raises ValueError for what cannot be said: a number, role, relay, model or certificate out of its bounds.
    """
    head = _encode_fixed(record)
    relays = [_encode_relay(url) for url in dict.fromkeys(record.relays)][:MAX_RELAYS]
    told = [address for address in dict.fromkeys(record.addresses) if not why_not_told(address)]
    addresses = list(dict.fromkeys(_encode_address(address) for address in told))[:MAX_ADDRESSES]
    certificate = _LENGTH.pack(len(record.certificate)) + record.certificate
    room = MAX_RECORD - SIGNATURE_BYTES - len(head) - len(certificate) - 2  # two counts
    while _size(relays) + _size(addresses) > room:
        if len(addresses) > KEPT_ADDRESSES or len(relays) <= 1:
            addresses.pop()  # a home relay and nothing else always fits
        else:
            relays.pop()
    body = b"".join(
        (head, bytes([len(relays)]), *relays, certificate, bytes([len(addresses)]), *addresses),
    )
    return body + key(CONTEXT + body)


def peek(blob: bytes) -> Head:
    """Whose record this claims to be, without a look at its signature. Raises BadRecord."""
    if len(blob) > MAX_RECORD:
        raise BadRecord(f"a peer record of {len(blob)} bytes, at most {MAX_RECORD} are allowed")
    if len(blob) < _HEAD.size + _FIXED.size + SIGNATURE_BYTES:
        raise BadRecord(f"a peer record of {len(blob)} bytes is cut short")
    version, swarm, peer, seq, ttl_s = _HEAD.unpack_from(blob)
    if version != VERSION:
        raise BadRecord(f"a peer record of version {version}, this node reads {VERSION}")
    if ttl_s > MAX_TTL_S:
        raise BadRecord(f"a peer record that lives {ttl_s} s, at most {MAX_TTL_S} s are allowed")
    return Head(swarm, peer, seq, ttl_s)


def content(blob: bytes) -> bytes:
    """What of a record stays the same when it is issued again: all but its number, its life and its signature."""
    return bytes(blob[:_SEQ_AT] + blob[_HEAD.size : -SIGNATURE_BYTES])


def decode(blob: bytes) -> PeerRecord:
    """The record in these bytes, its signature checked. Raises BadRecord."""
    head = peek(blob)
    body, signature = bytes(blob[:-SIGNATURE_BYTES]), bytes(blob[-SIGNATURE_BYTES:])
    try:
        record = _decode_body(head, body)
    except (struct.error, IndexError):
        raise BadRecord(f"a peer record of {len(blob)} bytes is cut short") from None
    if not record.peer.verify(signature, CONTEXT + body):
        raise BadRecord(f"the peer record of {record.peer.short} is not signed by it")
    return record


def shown_name(name: str) -> str:
    """A name as records carry it: printable, no spaces around, at most MAX_NAME_BYTES."""
    clean = "".join(one if one.isprintable() else " " for one in name).strip()
    return clean.encode(errors="ignore")[:MAX_NAME_BYTES].decode(errors="ignore").rstrip()


def _encode_fixed(record: PeerRecord) -> bytes:
    if not 0 <= record.ttl_s <= MAX_TTL_S:
        raise ValueError(f"a record that lives {record.ttl_s} s; 0 to {MAX_TTL_S} are possible")
    if len(record.model) not in (0, MODEL_BYTES) or record.model == _NO_MODEL:
        raise ValueError(f"the first {MODEL_BYTES} bytes of a model's hash, not {record.model.hex()!r}")
    if len(record.certificate) > MAX_CERTIFICATE:
        raise ValueError(f"a certificate of {len(record.certificate)} bytes; at most {MAX_CERTIFICATE} fit")
    if _ROLE.fullmatch(record.role) is None:
        raise ValueError(f"{record.role[:40]!r} is no role")
    name = shown_name(record.name).encode()
    role = record.role.encode()
    try:
        head = _HEAD.pack(VERSION, record.swarm.raw, record.peer.raw, record.seq, record.ttl_s)
        fixed = _FIXED.pack(record.memory, record.model or _NO_MODEL)
    except struct.error as error:
        raise ValueError(f"seq {record.seq} and memory {record.memory} of a record: {error}") from None
    return b"".join((head, fixed, bytes([len(name)]), name, bytes([len(role)]), role))


def _encode_relay(url: str) -> bytes:
    try:
        raw = parse_relay_url(url).text.encode()
    except BadRelayUrl as error:
        raise ValueError(str(error)) from None
    return _LENGTH.pack(len(raw)) + raw


def _encode_address(address: Address) -> bytes:
    host = parse_host(address[0])
    assert host is not None  # why_not_told has looked
    return bytes([host.version]) + host.packed + _LENGTH.pack(address[1])


def _size(parts: list[bytes]) -> int:
    return sum(map(len, parts))


def _decode_body(head: Head, body: bytes) -> PeerRecord:
    at = _HEAD.size
    memory, model = _FIXED.unpack_from(body, at)
    at += _FIXED.size
    name, at = _short_text(body, at, MAX_NAME_BYTES, "name")
    if not name.isprintable():
        raise BadRecord("a peer record with a name that cannot be printed")
    role, at = _short_text(body, at, MAX_ROLE_BYTES, "role")
    if _ROLE.fullmatch(role) is None:
        raise BadRecord(f"a peer record with the role {role!r}")
    relays, at = _decode_relays(body, at)
    (length,) = _LENGTH.unpack_from(body, at)
    at += _LENGTH.size
    certificate = body[at : at + length]
    if length > MAX_CERTIFICATE or len(certificate) != length:
        raise BadRecord(f"a peer record with a certificate of {length} bytes, at most {MAX_CERTIFICATE} are allowed")
    addresses, _ = _decode_addresses(body, at + length)
    return PeerRecord(
        swarm=PeerId(head.swarm),
        peer=PeerId(head.peer),
        seq=head.seq,
        ttl_s=head.ttl_s,
        name=name,
        role=role,
        relays=relays,
        addresses=addresses,
        certificate=certificate,
        model=b"" if model == _NO_MODEL else model,
        memory=memory,
    )


def _short_text(body: bytes, at: int, limit: int, what: str) -> tuple[str, int]:
    length = body[at]
    raw = body[at + 1 : at + 1 + length]
    if length > limit or len(raw) != length:
        raise BadRecord(f"a peer record with a {what} of {length} bytes, at most {limit} are allowed")
    try:
        return raw.decode(), at + 1 + length
    except UnicodeDecodeError:
        raise BadRecord(f"a peer record with a {what} that is no UTF-8") from None


def _decode_relays(body: bytes, at: int) -> tuple[tuple[str, ...], int]:
    count, at = body[at], at + 1
    if count > MAX_RELAYS:
        raise BadRecord(f"a peer record with {count} relays, at most {MAX_RELAYS} are allowed")
    relays: list[str] = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        raw = body[at : at + length]
        if length > MAX_RELAY_BYTES or len(raw) != length:
            raise BadRecord(f"a peer record with a relay of {length} bytes, at most {MAX_RELAY_BYTES} are allowed")
        at += length
        try:
            relays.append(parse_relay_url(raw.decode("ascii")).text)
        except (BadRelayUrl, UnicodeDecodeError):
            continue
    return tuple(dict.fromkeys(relays)), at


def _decode_addresses(body: bytes, at: int) -> tuple[tuple[Address, ...], int]:
    count, at = body[at], at + 1
    if count > MAX_ADDRESSES:
        raise BadRecord(f"a peer record with {count} addresses, at most {MAX_ADDRESSES} are allowed")
    addresses: list[Address] = []
    for _ in range(count):
        size = _FAMILY_BYTES.get(body[at])
        if size is None:
            raise BadRecord(f"a peer record with an address of family {body[at]}")
        packed = body[at + 1 : at + 1 + size]
        (port,) = _LENGTH.unpack_from(body, at + 1 + size)
        at += 1 + size + _LENGTH.size
        host = parse_host(str(ip_address(packed)))
        address = (str(host), port)
        if not why_not_told(address):
            addresses.append(address)
    return tuple(dict.fromkeys(addresses)), at
