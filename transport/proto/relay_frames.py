"""Frames between a node and a relay: one binary WebSocket message is one frame. Pure.

Not the WebSocket, and not what is inside the datagrams, which are sealed between peers. The relay's server uses
`decode_client`, `relayed` and the server's frames; a node's link uses `decode_server`, `data_frame` and the client's.
A fixed hex vector per frame stands in the tests.

Frame: type u8, then the fields; numbers are big endian. Bytes after the fields are ignored, except in DATA and DISCO,
so that later versions can add; a type that is not in the table raises UnknownRelayFrame, which a receiver may ignore.
"text" is u16 length, UTF-8. Limits are constants below.

CHALLENGE  0x01  server → client, first message:  version u8, nonce 32
LOGIN      0x02  client → server, first message:  version u8, key 32, authority text, signature 64
                 authority: "host" or "host:port" that the client dialled; a relay that passes another relay's
                 challenge on cannot use the answer there. The signature is Ed25519 over
                 LOGIN_CONTEXT + nonce + authority text (with its length).
WELCOME    0x03  server → client:  ping interval s u16, reconnect spread ms u32, bytes per second u32 (this client's
                 limit), reflector ports u16 × 2 (0: none), instance id 16, observed address text ("ip:port"),
                 features u8, bits of Feature (older relays end before it: none)
DATA       0x10  both ways:  key 32, then one or more of: length u16 ≥ 1, bytes
DISCO      0x11  the same, in the class that is delivered first
                 The key is the destination on the way to the relay and the authenticated sender on the way from it.
GONE       0x12  server → client:  key 32, why u8 (GoneReason): what was sent to that peer was not delivered
PING       0x20  both ways:  echo 8
PONG       0x21  both ways:  echo 8; from the server also: reconnect spread ms u32
RESTARTING 0x30  server → client:  shortest ms u32, longest ms u32: come back at a time spread evenly between
LIMITED    0x31  server → client:  ms u32: over the rate; about so long until what is sent passes again
REFUSED    0x3F  server → client, its last message:  code u8 (RefusalCode), retry after ms u32, reason text
PUBLISH    0x40  client → server:  topic 32, ttl s u16 (0: withdraw), blob u16 length ≤ MAX_BLOB, bytes: show this to
                 whoever watches the topic, in our key's name
WATCH      0x41  client → server:  topic 32, on u8: tell us all records of the topic now, and then what changes; 0: stop
RECORD     0x42  server → client:  topic 32, publisher's authenticated key 32, ttl s u16 (what is left; 0: it is gone),
                 blob u16 length, bytes
                 One record per topic and key. Only a relay that has Feature.DIRECTORY is sent PUBLISH and WATCH.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from transport.errors import PeerFault

VERSION = 1
PATH = "/relay"
SUBPROTOCOL = "peer-relay.1"
LOGIN_CONTEXT = b"peer-relay login 1\x00"
KEY_BYTES = 32
NONCE_BYTES = 32
SIGNATURE_BYTES = 64
INSTANCE_ID_BYTES = 16
ECHO_BYTES = 8
MAX_DATA_MESSAGE = 256 * 1024
MAX_DISCO_MESSAGE = 8 * 1024
MAX_MESSAGE = MAX_DATA_MESSAGE  # what a WebSocket end must accept, and no more
MAX_CONTROL_MESSAGE = 1024  # every frame that is neither DATA nor DISCO, nor has a blob
MAX_BLOB_MESSAGE = 2048  # PUBLISH and RECORD
MAX_BLOB = 1400
TOPIC_BYTES = 32
MAX_TTL_S = 0xFFFF
MAX_TOPICS = 8  # that one client publishes under, and that it watches
PUBLISH_RATE = 2.0  # a second and client; what is beyond PUBLISH_BURST at once is dropped
PUBLISH_BURST = 8.0
MAX_DATAGRAM = 0xFFFF
MAX_AUTHORITY_BYTES = 300  # a DNS name has at most 253, and a port
MAX_OBSERVED_BYTES = 64
MAX_REASON_BYTES = 200
PAYLOAD_AT = 1 + KEY_BYTES  # where the datagrams of DATA and DISCO begin

_VERSIONED = struct.Struct(">BB32s")
_WELCOME = struct.Struct(">BHIIHH16s")
_GONE = struct.Struct(">B32sB")
_ECHO = struct.Struct(">B8s")
_PONG_FROM_SERVER = struct.Struct(">B8sI")
_RESTARTING = struct.Struct(">BII")
_LIMITED = struct.Struct(">BI")
_PUBLISH = struct.Struct(">B32sHH")
_WATCH = struct.Struct(">B32sB")
_RECORD = struct.Struct(">B32s32sHH")
_REFUSED = struct.Struct(">BBI")
_LENGTH = struct.Struct(">H")


class FrameType(IntEnum):
    """All frame numbers of the relay protocol."""

    CHALLENGE = 0x01
    LOGIN = 0x02
    WELCOME = 0x03
    DATA = 0x10
    DISCO = 0x11
    GONE = 0x12
    PING = 0x20
    PONG = 0x21
    RESTARTING = 0x30
    LIMITED = 0x31
    REFUSED = 0x3F
    PUBLISH = 0x40
    WATCH = 0x41
    RECORD = 0x42


class Feature(IntFlag):
    """What a relay can do beyond the first version of the protocol."""

    DIRECTORY = 1  # PUBLISH, WATCH, RECORD


class GoneReason(IntEnum):
    """Why datagrams to a peer were not delivered."""

    UNKNOWN = 0  # a number of a later version
    NOT_CONNECTED = 1
    QUEUE_FULL = 2


class RefusalCode(IntEnum):
    """Why a relay ends a session."""

    UNKNOWN = 0  # a number of a later version
    BAD_SIGNATURE = 1
    WRONG_AUTHORITY = 2
    VERSION = 3
    NOT_ON_LIST = 4
    REPLACED = 5  # another session logged in with the same key
    KEY_FIGHT = 6  # two sessions with the same key replace each other again and again
    OVERLOADED = 7
    SHUTTING_DOWN = 8
    PROTOCOL_ERROR = 9


class RelayFrameError(PeerFault):
    """A message that is no frame of this protocol, or a frame that cannot be built."""


class UnknownRelayFrame(RelayFrameError):
    """A frame of a type that this version does not know, or that this end never gets. May be ignored."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        super().__init__(f"relay frame of type {kind:#04x} is not known here")


@dataclass(frozen=True, slots=True)
class Challenge:
    """The relay's first words: sign this nonce. Of another version only `version` is known."""

    version: int
    nonce: bytes

    def encode(self) -> bytes:
        """The whole message."""
        return _VERSIONED.pack(FrameType.CHALLENGE, self.version, self.nonce)


@dataclass(frozen=True, slots=True)
class Login:
    """A node's answer to the challenge. Of another version only `version` is known."""

    version: int
    key: bytes
    authority: str
    signature: bytes

    def encode(self) -> bytes:
        """The whole message. Raises RelayFrameError when the authority is too long."""
        return (
            _VERSIONED.pack(FrameType.LOGIN, self.version, self.key)
            + _text(self.authority, MAX_AUTHORITY_BYTES, "authority")
            + self.signature
        )


@dataclass(frozen=True, slots=True)
class Welcome:
    """The session stands.

    ping_s: send a PING so often. spread_ms: after a loss, first try again within a random part of this time.
    bytes_per_s: what this client may send. reflectors: the two UDP ports that answer STUN, 0 for none.
    observed: the client's "ip:port" as the relay sees it. features: bits of Feature.
    """

    ping_s: int
    spread_ms: int
    bytes_per_s: int
    reflectors: tuple[int, int]
    instance_id: bytes
    observed: str
    features: int = 0

    def encode(self) -> bytes:
        """The whole message."""
        first, second = self.reflectors
        fixed = _WELCOME.pack(
            FrameType.WELCOME, self.ping_s, self.spread_ms, self.bytes_per_s, first, second, self.instance_id
        )
        return fixed + _text(self.observed, MAX_OBSERVED_BYTES, "observed address") + bytes((self.features,))


@dataclass(frozen=True, slots=True)
class Data:
    """Datagrams to or from `peer`; disco: in the class that is delivered first."""

    peer: bytes
    datagrams: tuple[bytes, ...]
    disco: bool = False

    def encode(self) -> bytes:
        """The whole message; see `data_frame`."""
        return data_frame(self.peer, self.datagrams, self.disco)


@dataclass(frozen=True, slots=True)
class Gone:
    """What was sent to `peer` was not delivered."""

    peer: bytes
    why: GoneReason

    def encode(self) -> bytes:
        """The whole message."""
        return _GONE.pack(FrameType.GONE, self.peer, self.why)


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with a Pong that carries the same 8 bytes."""

    echo: bytes

    def encode(self) -> bytes:
        """The whole message."""
        return _ECHO.pack(FrameType.PING, self.echo)


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a Ping. spread_ms: only from the relay, its current reconnect spread."""

    echo: bytes
    spread_ms: int | None = None

    def encode(self) -> bytes:
        """The whole message."""
        if self.spread_ms is None:
            return _ECHO.pack(FrameType.PONG, self.echo)
        return _PONG_FROM_SERVER.pack(FrameType.PONG, self.echo, self.spread_ms)


@dataclass(frozen=True, slots=True)
class Restarting:
    """The relay goes away: come back after a random time between the two."""

    min_ms: int
    max_ms: int

    def encode(self) -> bytes:
        """The whole message."""
        return _RESTARTING.pack(FrameType.RESTARTING, self.min_ms, self.max_ms)


@dataclass(frozen=True, slots=True)
class Limited:
    """The client is over its rate; what it sends is dropped for about `ms`."""

    ms: int

    def encode(self) -> bytes:
        """The whole message."""
        return _LIMITED.pack(FrameType.LIMITED, self.ms)


@dataclass(frozen=True, slots=True)
class Refused:
    """The relay's last words."""

    code: RefusalCode
    retry_after_ms: int
    reason: str

    def encode(self) -> bytes:
        """The whole message. Raises RelayFrameError when the reason is too long."""
        fixed = _REFUSED.pack(FrameType.REFUSED, self.code, self.retry_after_ms)
        return fixed + _text(self.reason, MAX_REASON_BYTES, "reason")


@dataclass(frozen=True, slots=True)
class Publish:
    """Show `blob` to the watchers of `topic` (32 bytes) for `ttl_s` seconds; 0 withdraws it."""

    topic: bytes
    ttl_s: int
    blob: bytes = b""

    def encode(self) -> bytes:
        """The whole message. Raises RelayFrameError when a size or the ttl is out of range."""
        _check_record(self.topic, self.ttl_s, self.blob)
        return _PUBLISH.pack(FrameType.PUBLISH, self.topic, self.ttl_s, len(self.blob)) + self.blob


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell us of the records of `topic` (32 bytes), or no longer."""

    topic: bytes
    on: bool

    def encode(self) -> bytes:
        """The whole message. Raises RelayFrameError when the topic has not 32 bytes."""
        _check_record(self.topic, 0, b"")
        return _WATCH.pack(FrameType.WATCH, self.topic, self.on)


@dataclass(frozen=True, slots=True)
class Record:
    """What the session of `key` published under `topic`, `ttl_s` seconds before it vanishes; 0: it is gone."""

    topic: bytes
    key: bytes
    ttl_s: int
    blob: bytes = b""

    def encode(self) -> bytes:
        """The whole message. Raises RelayFrameError when a size or the ttl is out of range."""
        _check_record(self.topic, self.ttl_s, self.blob)
        return _RECORD.pack(FrameType.RECORD, self.topic, self.key, self.ttl_s, len(self.blob)) + self.blob


_REFUSAL_CODES = frozenset(int(code) for code in RefusalCode)
_GONE_REASONS = frozenset(int(reason) for reason in GoneReason)
_LIMITS: dict[int, int] = {
    FrameType.DATA: MAX_DATA_MESSAGE,
    FrameType.DISCO: MAX_DISCO_MESSAGE,
    FrameType.PUBLISH: MAX_BLOB_MESSAGE,
    FrameType.RECORD: MAX_BLOB_MESSAGE,
}

ClientFrame = Login | Data | Ping | Pong | Publish | Watch
ServerFrame = Challenge | Welcome | Data | Gone | Ping | Pong | Restarting | Limited | Refused | Record


def login_message(nonce: bytes, authority: str) -> bytes:
    """What a LOGIN's signature covers."""
    return LOGIN_CONTEXT + nonce + _text(authority, MAX_AUTHORITY_BYTES, "authority")


def data_frame(peer: bytes, datagrams: Iterable[bytes], disco: bool = False) -> bytes:
    """A DATA or DISCO message. Raises RelayFrameError when it or one of its datagrams has no valid size."""
    parts = [b"\x11" if disco else b"\x10", peer]
    append, length_of = parts.append, _LENGTH.pack
    try:
        for datagram in datagrams:
            size = len(datagram)
            if not size:
                raise RelayFrameError("an empty datagram cannot be relayed")
            append(length_of(size))
            append(datagram)
    except struct.error:
        raise RelayFrameError(f"a datagram of {size} bytes, at most {MAX_DATAGRAM} can be relayed") from None
    message = b"".join(parts)
    limit = MAX_DISCO_MESSAGE if disco else MAX_DATA_MESSAGE
    if len(message) > limit or len(peer) != KEY_BYTES or len(parts) == 2:
        raise RelayFrameError(
            f"a relay message of {len(message)} bytes with {len(parts) // 2 - 1} datagrams to a key of {len(peer)} "
            f"bytes; allowed are {limit} bytes, at least 1 datagram and {KEY_BYTES} bytes"
        )
    return message


def datagrams(payload: bytes | memoryview) -> list[bytes]:
    """The datagrams of a DATA or DISCO message after its first PAYLOAD_AT bytes.

    Raises RelayFrameError unless there is at least one, none is empty, and the lengths add up.
    """
    found: list[bytes] = []
    at, end = 0, len(payload)
    while at + 2 <= end:
        start = at + 2
        at = start + (payload[at] << 8 | payload[at + 1])
        if at == start or at > end:
            break
        found.append(bytes(payload[start:at]))
    else:
        if at == end and found:
            return found
    raise _lengths_wrong(end, len(found))


def relayed(message: bytes, source: bytes) -> tuple[bytes, bytes]:
    """The destination key of a DATA or DISCO message and the message to deliver there, in the name of `source`.

    The payload is copied twice at most. The caller has looked at the type. Raises RelayFrameError
    as `datagrams` does, and on a message beyond its class's limit.
    """
    at, end = PAYLOAD_AT, len(message)
    if end <= PAYLOAD_AT:
        raise RelayFrameError(f"a relay message of {end} bytes is too short for datagrams")
    if end > (MAX_DISCO_MESSAGE if message[0] == FrameType.DISCO else MAX_DATA_MESSAGE):
        raise RelayFrameError(f"a relay message of {end} bytes is too large for its type {message[0]:#04x}")
    while at + 2 < end:  # at least one byte must follow a length
        step = message[at] << 8 | message[at + 1]
        if not step:
            break
        at += 2 + step
    if at != end:
        raise _lengths_wrong(end - PAYLOAD_AT, 0)
    return message[1:PAYLOAD_AT], message[:1] + source + message[PAYLOAD_AT:]


def decode_client(message: bytes) -> ClientFrame:
    """The frame in a message from a client. Raises RelayFrameError; UnknownRelayFrame for what may be ignored."""
    kind = _kind(message)
    try:
        match kind:
            case FrameType.LOGIN:
                return _decode_login(message)
            case FrameType.DATA | FrameType.DISCO:
                return _decode_data(message)
            case FrameType.PING:
                return Ping(_ECHO.unpack_from(message)[1])
            case FrameType.PONG:
                return Pong(_ECHO.unpack_from(message)[1])
            case FrameType.PUBLISH:
                _, topic, ttl_s, size = _PUBLISH.unpack_from(message)
                return Publish(topic, ttl_s, _read_blob(message, _PUBLISH.size, size))
            case FrameType.WATCH:
                _, topic, on = _WATCH.unpack_from(message)
                return Watch(topic, bool(on))
            case _:
                raise UnknownRelayFrame(kind)
    except struct.error:
        raise RelayFrameError(f"relay frame {FrameType(kind).name} is too short: {len(message)} bytes") from None


def decode_server(message: bytes) -> ServerFrame:
    """The frame in a message from a relay. Raises RelayFrameError; UnknownRelayFrame for what may be ignored."""
    kind = _kind(message)
    try:
        match kind:
            case FrameType.DATA | FrameType.DISCO:
                return _decode_data(message)
            case FrameType.CHALLENGE:
                return _decode_challenge(message)
            case FrameType.WELCOME:
                _, ping_s, spread_ms, bytes_per_s, first, second, instance_id = _WELCOME.unpack_from(message)
                observed, at = _read_text(message, _WELCOME.size, MAX_OBSERVED_BYTES)
                features = message[at] if at < len(message) else 0
                return Welcome(ping_s, spread_ms, bytes_per_s, (first, second), instance_id, observed, features)
            case FrameType.RECORD:
                _, topic, key, ttl_s, size = _RECORD.unpack_from(message)
                return Record(topic, key, ttl_s, _read_blob(message, _RECORD.size, size))
            case FrameType.GONE:
                _, peer, why = _GONE.unpack_from(message)
                return Gone(peer, GoneReason(why) if why in _GONE_REASONS else GoneReason.UNKNOWN)
            case FrameType.PING:
                return Ping(_ECHO.unpack_from(message)[1])
            case FrameType.PONG:
                if len(message) < _PONG_FROM_SERVER.size:
                    return Pong(_ECHO.unpack_from(message)[1])
                return Pong(*_PONG_FROM_SERVER.unpack_from(message)[1:])
            case FrameType.RESTARTING:
                return Restarting(*_RESTARTING.unpack_from(message)[1:])
            case FrameType.LIMITED:
                return Limited(_LIMITED.unpack_from(message)[1])
            case FrameType.REFUSED:
                _, code, retry_after_ms = _REFUSED.unpack_from(message)
                reason, _ = _read_text(message, _REFUSED.size, MAX_REASON_BYTES)
                known = RefusalCode(code) if code in _REFUSAL_CODES else RefusalCode.UNKNOWN
                return Refused(known, retry_after_ms, reason)
            case _:
                raise UnknownRelayFrame(kind)
    except struct.error:
        raise RelayFrameError(f"relay frame {FrameType(kind).name} is too short: {len(message)} bytes") from None


def _kind(message: bytes) -> int:
    if not message:
        raise RelayFrameError("an empty relay message")
    kind = message[0]
    limit = _LIMITS.get(kind, MAX_CONTROL_MESSAGE)
    if len(message) > limit:
        raise RelayFrameError(f"a relay message of {len(message)} bytes and type {kind:#04x}, {limit} are allowed")
    return kind


def _decode_data(message: bytes) -> Data:
    if len(message) < PAYLOAD_AT:
        raise RelayFrameError(f"a relay message of {len(message)} bytes is too short for datagrams")
    found = datagrams(memoryview(message)[PAYLOAD_AT:])
    return Data(message[1:PAYLOAD_AT], tuple(found), message[0] == FrameType.DISCO)


def _decode_challenge(message: bytes) -> Challenge:
    if len(message) > 1 and message[1] != VERSION:  # another layout may follow: only the version is known
        return Challenge(message[1], bytes(NONCE_BYTES))
    return Challenge(*_VERSIONED.unpack_from(message)[1:])


def _decode_login(message: bytes) -> Login:
    if len(message) > 1 and message[1] != VERSION:
        return Login(message[1], bytes(KEY_BYTES), "", bytes(SIGNATURE_BYTES))
    _, version, key = _VERSIONED.unpack_from(message)
    authority, at = _read_text(message, _VERSIONED.size, MAX_AUTHORITY_BYTES)
    signature = message[at : at + SIGNATURE_BYTES]
    if len(signature) != SIGNATURE_BYTES:
        raise RelayFrameError(f"relay frame LOGIN ends within its signature: {len(message)} bytes")
    return Login(version, key, authority, signature)


def _lengths_wrong(size: int, whole: int) -> RelayFrameError:
    return RelayFrameError(f"the lengths in a relay message do not add up ({size} bytes, {whole} datagrams are whole)")


def _text(text: str, limit: int, what: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise RelayFrameError(f"{what} in a relay frame cannot be written as UTF-8") from None
    if len(data) > limit:
        raise RelayFrameError(f"{what} of {len(data)} bytes in a relay frame, at most {limit} are allowed")
    return _LENGTH.pack(len(data)) + data


def _read_text(message: bytes, at: int, limit: int) -> tuple[str, int]:
    """The text at `at`, and where it ends."""
    (length,) = _LENGTH.unpack_from(message, at)
    start = at + _LENGTH.size
    if length > limit or start + length > len(message):
        raise RelayFrameError(f"text of {length} bytes in a relay frame of {len(message)}, at most {limit} are allowed")
    try:
        return message[start : start + length].decode(), start + length
    except UnicodeDecodeError:
        raise RelayFrameError("a text in a relay frame is not UTF-8") from None


def _check_record(topic: bytes, ttl_s: int, blob: bytes) -> None:
    if len(topic) != TOPIC_BYTES or not 0 <= ttl_s <= MAX_TTL_S or len(blob) > MAX_BLOB:
        raise RelayFrameError(
            f"a record of {len(blob)} bytes for {ttl_s} s under a topic of {len(topic)} bytes; allowed are {MAX_BLOB} "
            f"bytes, {MAX_TTL_S} s and {TOPIC_BYTES} bytes"
        )


def _read_blob(message: bytes, at: int, size: int) -> bytes:
    if size > MAX_BLOB or at + size > len(message):
        raise RelayFrameError(
            f"a record of {size} bytes in a relay frame of {len(message)}, at most {MAX_BLOB} are allowed"
        )
    return message[at : at + size]
