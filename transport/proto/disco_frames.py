"""What two nodes say to each other about paths, inside sealed datagrams: ping, pong, call. PURE.

Not the sealing (disco_seal) and not the decision what to say (paths, punch). Written and read by the shell around
them. A fixed hex vector per frame stands in the tests.

Frame:      type u8, fields; numbers are big endian. Bytes after the fields are ignored: padding, or a later version's.
Address:    family u8: 0 none (and nothing follows), 4 or 6; host 4 or 16 bytes, port u16

PING  0x01  transaction 12, flags u8 (bit 0: left), zeros: padded to measure what a path carries, and never sealed
            smaller than any PONG
PONG  0x02  transaction 12 of the ping, Address that the ping came from (none on a relayed path)
CALL  0x03  stage u8, session 8, boot 8, number u32, NAT kind u8, port delta i16,
            count u8 ≤ 16, candidates: source u8, Address;
            count u8 ≤ 3, relays: length u16 ≤ 256, URL (UTF-8), the sender's home first

Tolerated from later versions: an unknown NAT kind is UNKNOWN; a candidate of unknown source, or at an address where
nobody can be (port 0, unspecified, multicast), is left out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv6Address, ip_address

from transport.errors import Address, PeerFault
from transport.proto.addresses import NO_ADDRESS, Candidate, CandidateSource, NatKind

TRANSACTION_BYTES = 12
SESSION_BYTES = 8
BOOT_BYTES = 8
MAX_CANDIDATES = 16
MAX_RELAYS = 3
MAX_RELAY_BYTES = 256
SEAL_OVERHEAD = 64  # what disco_seal adds to a plaintext: head 4, key 32, nonce 12, tag 16; it asserts this
MAX_DATAGRAM = 9_000  # the largest sealed datagram: jumbo frames are as far as paths are probed
MAX_PLAINTEXT = MAX_DATAGRAM - SEAL_OVERHEAD

_FAMILY_BYTES = {4: 4, 6: 16}
_KNOWN_SOURCES = frozenset(CandidateSource)
_KNOWN_NATS = frozenset(NatKind)
_PORT = struct.Struct(">H")
_LENGTH = struct.Struct(">H")
_TRANSACTION = struct.Struct(">B12s")
_CALL = struct.Struct(">BB8s8sIBh")
_PING = struct.Struct(">B12sB")
_LEFT = 0x01
_MIN_PING = _TRANSACTION.size + 1 + 16 + _PORT.size  # a PONG with an IPv6 address


class DiscoError(PeerFault):
    """Bytes that are no disco datagram for us, or not from whom they say they are."""


class FrameType(IntEnum):
    """All frame numbers of disco."""

    PING = 0x01
    PONG = 0x02
    CALL = 0x03


class CallStage(IntEnum):
    """Where a punch session is: the caller calls, the called answers, the caller says go."""

    CALL = 1
    ANSWER = 2
    GO = 3


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there? `tx` is random, 12 bytes, and used once. `left`: the sender has left this path for its loss."""

    tx: bytes
    left: bool = False


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to the ping `tx`, with the address from which it came; None over a relay."""

    tx: bytes
    observed: Address | None


@dataclass(frozen=True, slots=True)
class Call:
    """Call me maybe, through a relay: where the sender may be reached, and how hard its NAT is.

    session: names one punch, 8 bytes. boot: names one run of the sender, 8 bytes; number grows with every Call in it
    (ReplayGuard). port_delta: by how much a HARD NAT's port grows per mapping, 0 when unpredictable.
    """

    stage: CallStage
    session: bytes
    boot: bytes
    number: int
    nat: NatKind
    port_delta: int
    candidates: tuple[Candidate, ...]
    relays: tuple[str, ...]


DiscoMessage = Ping | Pong | Call


def encode(message: DiscoMessage, size: int = 0) -> bytes:
    """The plaintext of a message. A Ping is padded so that the sealed datagram has `size` bytes, if that is more.

    Raises ValueError for what cannot be said: lengths, counts, hosts that are no IP, a size beyond MAX_DATAGRAM.
    """
    match message:
        case Ping():
            if size > MAX_DATAGRAM:
                raise ValueError(f"a disco datagram of {size} bytes; at most {MAX_DATAGRAM} are possible")
            tx = _exactly(message.tx, TRANSACTION_BYTES, "transaction")
            plain = _PING.pack(FrameType.PING, tx, _LEFT if message.left else 0)
            return plain.ljust(max(_MIN_PING, size - SEAL_OVERHEAD), b"\0")
        case Pong():
            plain = _TRANSACTION.pack(FrameType.PONG, _exactly(message.tx, TRANSACTION_BYTES, "transaction"))
            return plain + _encode_address(message.observed or NO_ADDRESS)
        case Call():
            return _encode_call(message)


def decode(plaintext: bytes) -> DiscoMessage:
    """The message in an opened datagram. Raises DiscoError."""
    if not 0 < len(plaintext) <= MAX_PLAINTEXT:
        raise DiscoError(f"a disco message of {len(plaintext)} bytes, 1 to {MAX_PLAINTEXT} are possible")
    try:
        match plaintext[0]:
            case FrameType.PING:
                if len(plaintext) < _MIN_PING:
                    raise DiscoError(f"disco PING of {len(plaintext)} bytes is shorter than its answer")
                _, tx, flags = _PING.unpack_from(plaintext)
                return Ping(tx, bool(flags & _LEFT))
            case FrameType.PONG:
                tx = _TRANSACTION.unpack_from(plaintext)[1]
                address, _ = _decode_address(plaintext, _TRANSACTION.size)
                return Pong(tx, address if _reachable(address) else None)
            case FrameType.CALL:
                return _decode_call(plaintext)
            case kind:
                raise DiscoError(f"disco message of unknown type {kind:#04x}")
    except (struct.error, IndexError):
        raise DiscoError(f"disco {FrameType(plaintext[0]).name} is cut short: {len(plaintext)} bytes") from None


def _encode_call(call: Call) -> bytes:
    if len(call.candidates) > MAX_CANDIDATES or len(call.relays) > MAX_RELAYS:
        raise ValueError(
            f"a Call with {len(call.candidates)} candidates and {len(call.relays)} relays; "
            f"{MAX_CANDIDATES} and {MAX_RELAYS} are possible"
        )
    try:
        fixed = _CALL.pack(
            FrameType.CALL,
            call.stage,
            _exactly(call.session, SESSION_BYTES, "session"),
            _exactly(call.boot, BOOT_BYTES, "boot"),
            call.number,
            call.nat,
            call.port_delta,
        )
    except struct.error as error:
        raise ValueError(f"a Call with number {call.number} and port delta {call.port_delta}: {error}") from None
    parts = [fixed, bytes([len(call.candidates)])]
    for candidate in call.candidates:
        parts += (bytes([candidate.source]), _encode_address(candidate.address))
    parts.append(bytes([len(call.relays)]))
    for relay in call.relays:
        url = relay.encode()
        if not _plain_url(relay) or len(url) > MAX_RELAY_BYTES:
            raise ValueError(f"{relay[:60]!r} is no relay URL of at most {MAX_RELAY_BYTES} bytes")
        parts += (_LENGTH.pack(len(url)), url)
    return b"".join(parts)


def _decode_call(data: bytes) -> Call:
    _, stage, session, boot, number, nat, port_delta = _CALL.unpack_from(data)
    at = _CALL.size
    count, at = data[at], at + 1
    if count > MAX_CANDIDATES:
        raise DiscoError(f"disco CALL with {count} candidates, at most {MAX_CANDIDATES} are allowed")
    candidates: list[Candidate] = []
    for _ in range(count):
        source = data[at]
        address, at = _decode_address(data, at + 1)
        if source in _KNOWN_SOURCES and _reachable(address):
            candidates.append(Candidate(address, CandidateSource(source)))
    count, at = data[at], at + 1
    if count > MAX_RELAYS:
        raise DiscoError(f"disco CALL with {count} relays, at most {MAX_RELAYS} are allowed")
    relays: list[str] = []
    for _ in range(count):
        length = _LENGTH.unpack_from(data, at)[0]
        at += _LENGTH.size
        if length > MAX_RELAY_BYTES or at + length > len(data):
            raise DiscoError(f"disco CALL with a relay URL of {length} bytes, at most {MAX_RELAY_BYTES} are allowed")
        relays.append(_decode_url(data[at : at + length]))
        at += length
    try:
        known_stage = CallStage(stage)
    except ValueError:
        raise DiscoError(f"disco CALL of unknown stage {stage}") from None
    known_nat = NatKind(nat) if nat in _KNOWN_NATS else NatKind.UNKNOWN
    return Call(known_stage, session, boot, number, known_nat, port_delta, tuple(candidates), tuple(relays))


def _encode_address(address: Address) -> bytes:
    if address == NO_ADDRESS:
        return b"\0"
    host = ip_address(address[0].partition("%")[0])  # an interface's name means nothing elsewhere
    if isinstance(host, IPv6Address):
        host = host.ipv4_mapped or host
    try:
        return bytes([host.version]) + host.packed + _PORT.pack(address[1])
    except struct.error:
        raise ValueError(f"{address[1]} is no port") from None


def _decode_address(data: bytes, at: int) -> tuple[Address, int]:
    """(address, where it ends); raises IndexError or struct.error when it is cut short."""
    family = data[at]
    if not family:
        return NO_ADDRESS, at + 1
    size = _FAMILY_BYTES.get(family)
    if size is None:
        raise DiscoError(f"disco address of unknown family {family}")
    end = at + 1 + size
    port: int = _PORT.unpack_from(data, end)[0]
    host = ip_address(data[at + 1 : end])
    if isinstance(host, IPv6Address):
        host = host.ipv4_mapped or host
    return (str(host), port), end + _PORT.size


def _reachable(address: Address) -> bool:
    if not address[1]:
        return False
    host = ip_address(address[0])
    return not (host.is_unspecified or host.is_multicast)


def _decode_url(raw: bytes) -> str:
    try:
        url = raw.decode()
    except UnicodeDecodeError:
        raise DiscoError("disco CALL with a relay URL that is not UTF-8") from None
    if not _plain_url(url):
        raise DiscoError(f"disco CALL with a relay URL that cannot be one: {url[:60]!r}")
    return url


def _plain_url(url: str) -> bool:
    """No space, no control character: it will stand in logs. Whether it is a URL is the relay pool's question."""
    return bool(url) and url.isprintable() and " " not in url


def _exactly(value: bytes, size: int, what: str) -> bytes:
    if len(value) != size:
        raise ValueError(f"a disco {what} has {size} bytes, not {len(value)}")
    return value
