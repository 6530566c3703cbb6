"""Frames on a connection's control stream (the client's first bidirectional stream). Pure.

Not application data, which flows unframed on its own streams. Written and read by connection.py; a fixed hex
vector per frame stands in the tests.

Frame:         type u8, length u16, body; numbers are big endian. A body is at most MAX_BODY bytes. Bytes after
               the fields below are ignored, and so are unknown types, so that later versions can add to both.

AUTHENTICATE   0x01  client → server, its first bytes:
               version u8, client PeerId 32, server PeerId 32, boot id 16, previous connection u64,
               stream window u64, connection window u64, lane length u8, lane (UTF-8), signature 64,
               credentials length u16, credentials
ACCEPT         0x02  server → client, its first bytes:
               version u8, boot id 16, stream window u64, connection window u64,
               credentials length u16, credentials
CONNECTION_CREDIT 0x03  limit u64: bytes that may have been sent on all streams since the start
STREAM_CREDIT  0x04  stream id u64, limit u64
RESET          0x05  stream id u64, code u64, final size u64: bytes sent on the stream before it was aborted
               (beside QUIC's RESET_STREAM, whose final size the libraries do not report)

Credentials are opaque here, at most MAX_CREDENTIALS bytes, and may be left out: what each side shows the other's
application, which decides whether to go on. TLS keeps them whole; whom they are for, they must say themselves.

The signature is Ed25519 over SIGNATURE_CONTEXT + binding + the body before the signature, with
binding = the first 32 of 40 bytes of the TLS exporter (RFC 8446, 7.5; label EXPORTER_LABEL, no context): it holds for
this connection only.

Refusals and closes are QUIC CONNECTION_CLOSE frames with an application error code: codes below
FIRST_RESERVED_CODE belong to the application, the others are `CloseCode`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from transport.errors import BadControlFrame

VERSION = 1
EXPORTER_LABEL = b"EXPORTER-peer-transport-authentication"
SIGNATURE_CONTEXT = b"peer transport authentication, version 1\x00"
BINDING_BYTES = 32
MAX_BODY = 1024
MAX_CREDENTIALS = 512
MAX_LANE_BYTES = 32
BOOT_ID_BYTES = 16
FIRST_RESERVED_CODE = 0x4000

_HEADER = struct.Struct(">BH")
_AUTHENTICATE = struct.Struct(">B32s32s16sQQQB")
_ACCEPT = struct.Struct(">B16sQQ")
_ONE = struct.Struct(">Q")
_TWO = struct.Struct(">QQ")
_THREE = struct.Struct(">QQQ")
_SIGNATURE_BYTES = 64
_LENGTH = struct.Struct(">H")


class FrameType(IntEnum):
    """All frame numbers of the control stream."""

    AUTHENTICATE = 0x01
    ACCEPT = 0x02
    CONNECTION_CREDIT = 0x03
    STREAM_CREDIT = 0x04
    RESET = 0x05


class CloseCode(IntEnum):
    """Application error codes of CONNECTION_CLOSE that this protocol keeps for itself."""

    NOT_ADMITTED = 0x4001
    DUPLICATE = 0x4002
    BAD_SIGNATURE = 0x4003
    VERSION_MISMATCH = 0x4004
    OVERLOADED = 0x4005
    REPLACED = 0x4006
    PROTOCOL_VIOLATION = 0x4007
    CREDIT_EXCEEDED = 0x4008
    WRONG_PEER = 0x4009
    TIMED_OUT = 0x400A
    INTERNAL = 0x400B


@dataclass(frozen=True, slots=True)
class Authenticate:
    """The client's proof of identity."""

    version: int
    client: bytes
    server: bytes
    boot_id: bytes
    previous: int
    stream_window: int
    connection_window: int
    lane: str
    signature: bytes = bytes(_SIGNATURE_BYTES)
    credentials: bytes = b""

    def signed_part(self) -> bytes:
        """The body up to the signature."""
        lane = self.lane.encode()
        fixed = _AUTHENTICATE.pack(
            self.version,
            self.client,
            self.server,
            self.boot_id,
            self.previous,
            self.stream_window,
            self.connection_window,
            len(lane),
        )
        return fixed + lane

    def message(self, binding: bytes) -> bytes:
        """What the signature covers on the connection with this `binding`."""
        return SIGNATURE_CONTEXT + binding + self.signed_part()

    def encode(self) -> bytes:
        """The whole frame."""
        return _frame(FrameType.AUTHENTICATE, self.signed_part() + self.signature + _credentials(self.credentials))


@dataclass(frozen=True, slots=True)
class Accept:
    """The server's answer to a proof that it admits."""

    version: int
    boot_id: bytes
    stream_window: int
    connection_window: int
    credentials: bytes = b""

    def encode(self) -> bytes:
        """The whole frame."""
        body = _ACCEPT.pack(self.version, self.boot_id, self.stream_window, self.connection_window)
        return _frame(FrameType.ACCEPT, body + _credentials(self.credentials))


@dataclass(frozen=True, slots=True)
class ConnectionCredit:
    """A new limit for all streams together."""

    limit: int

    def encode(self) -> bytes:
        """The whole frame."""
        return _frame(FrameType.CONNECTION_CREDIT, _ONE.pack(self.limit))


@dataclass(frozen=True, slots=True)
class StreamCredit:
    """A new limit for one stream."""

    stream_id: int
    limit: int

    def encode(self) -> bytes:
        """The whole frame."""
        return _frame(FrameType.STREAM_CREDIT, _TWO.pack(self.stream_id, self.limit))


@dataclass(frozen=True, slots=True)
class Reset:
    """One stream was aborted after `final_size` bytes."""

    stream_id: int
    code: int
    final_size: int

    def encode(self) -> bytes:
        """The whole frame."""
        return _frame(FrameType.RESET, _THREE.pack(self.stream_id, self.code, self.final_size))


ControlFrame = Authenticate | Accept | ConnectionCredit | StreamCredit | Reset


class FrameReader:
    """Cuts the control stream into frames. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[ControlFrame]:
        """The frames that `data` completes. Raises BadControlFrame; then the reader must not be used again."""
        buffer = self._buffer
        buffer += data
        frames: list[ControlFrame] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            kind, length = _HEADER.unpack_from(buffer, start)
            if length > MAX_BODY:
                raise BadControlFrame(f"a control frame of {length} bytes, at most {MAX_BODY} are allowed")
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            frame = _decode(kind, bytes(buffer[start + _HEADER.size : end]))
            if frame is not None:
                frames.append(frame)
            start = end
        del buffer[:start]
        return frames


def _frame(kind: FrameType, body: bytes) -> bytes:
    return _HEADER.pack(kind, len(body)) + body


def _decode(kind: int, body: bytes) -> ControlFrame | None:
    try:
        match kind:
            case FrameType.AUTHENTICATE:
                return _decode_authenticate(body)
            case FrameType.ACCEPT:
                version, boot_id, stream_window, connection_window = _ACCEPT.unpack_from(body)
                shown = _read_credentials(body, _ACCEPT.size)
                return Accept(version, boot_id, stream_window, connection_window, shown)
            case FrameType.CONNECTION_CREDIT:
                return ConnectionCredit(*_ONE.unpack_from(body))
            case FrameType.STREAM_CREDIT:
                return StreamCredit(*_TWO.unpack_from(body))
            case FrameType.RESET:
                return Reset(*_THREE.unpack_from(body))
            case _:
                return None
    except struct.error:
        raise BadControlFrame(f"control frame {FrameType(kind).name} is too short: {len(body)} bytes") from None


def _decode_authenticate(body: bytes) -> Authenticate:
    if body and body[0] != VERSION:  # another layout may follow: only the version is known
        return Authenticate(body[0], bytes(32), bytes(32), bytes(BOOT_ID_BYTES), 0, 0, 0, "")
    version, client, server, boot_id, previous, stream_window, connection_window, lane_length = (
        _AUTHENTICATE.unpack_from(body)
    )
    signature_at = _AUTHENTICATE.size + lane_length
    signature = body[signature_at : signature_at + _SIGNATURE_BYTES]
    if lane_length > MAX_LANE_BYTES or len(signature) != _SIGNATURE_BYTES:
        raise BadControlFrame(f"control frame AUTHENTICATE: lane of {lane_length} bytes in a body of {len(body)}")
    try:
        lane = body[_AUTHENTICATE.size : signature_at].decode()
    except UnicodeDecodeError:
        raise BadControlFrame("control frame AUTHENTICATE: the lane is not UTF-8") from None
    credentials = _read_credentials(body, signature_at + _SIGNATURE_BYTES)
    windows = stream_window, connection_window
    return Authenticate(version, client, server, boot_id, previous, *windows, lane, signature, credentials)


def _credentials(shown: bytes) -> bytes:
    return _LENGTH.pack(len(shown)) + shown


def _read_credentials(body: bytes, at: int) -> bytes:
    if at == len(body):
        return b""
    (length,) = _LENGTH.unpack_from(body, at)
    shown = body[at + _LENGTH.size : at + _LENGTH.size + length]
    if length > MAX_CREDENTIALS or len(shown) != length:
        raise BadControlFrame(f"credentials of {length} bytes in a control frame of {len(body)}")
    return shown
