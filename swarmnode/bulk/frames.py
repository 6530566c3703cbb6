"""The bulk protocol: its byte layouts, and how each is written and read.

Pure. Each request has a bidirectional stream of its own on a connection of lane `bulk`: the asking side writes one part
and finishes; the answering side writes its parts and finishes. Either side of a connection may ask. All integers are
little-endian. Bytes after the fields below are ignored, so that a later version can append; what is in the fields is
checked. A part of another version is read no further than its head.

    part       u8 kind | u8 version | u16 n | n bytes of fields | data as the fields say

  requests
    1 MANIFEST    32 model hash
    2 BACKBONE    32 model hash | u64 offset
    3 EXPERTS     32 model hash | u16 site | u16 n | n × u16 expert          1 to 256, each once
    4 HOLDINGS    32 model hash

  answers
    129 MANIFEST  u64 size | | size bytes of the manifest's JSON
    130 BACKBONE  u64 offset | u64 end | u64 length | | the backbone file's bytes from offset to end
                  offset is the one asked for, or end where that is less; from end to length the file reads zero
    131 EXPERT    u16 expert | u64 size | | size bytes: its slices in the order of the site's tensors
    132 HOLDINGS  u64 size | | size bytes: n × (u16 site | u32 n_expert | ⌈n_expert/8⌉ bitmap, expert e = bit e%8 of
                  byte e//8), sites ascending
    133 ABSENT    u16 expert                                                 this one is not held (any more)
    134 FAILED    u8 code | UTF-8 why                                        the last part

EXPERTS is answered with one EXPERT or ABSENT per expert, in the order asked. A sender that cannot go on within data
resets the stream. Callers: `server.py`, `source.py`, `download.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from swarmnode.errors import BadBulkFrame

LANE = "bulk"
VERSION = 1
HASH_BYTES = 32
MAX_EXPERTS_ASKED = 256
MAX_FIELDS = 1024  # of any part: the longest request has 36 + 512 bytes, the longest answer 1 + MAX_WHY
MAX_WHY = 400  # bytes
MAX_LENGTH = 1 << 44  # of a backbone file, bytes: more is nonsense

HEAD = struct.Struct("<BBH")
_U16, _U64 = struct.Struct("<H"), struct.Struct("<Q")
_EXPERTS = struct.Struct("<HH")
_EXPERT = struct.Struct("<HQ")
_BACKBONE = struct.Struct("<QQQ")
_SITE = struct.Struct("<HI")


class Kind(IntEnum):
    """All part numbers. Numbers are never reused."""

    ASK_MANIFEST = 1
    ASK_BACKBONE = 2
    ASK_EXPERTS = 3
    ASK_HOLDINGS = 4
    MANIFEST = 129
    BACKBONE = 130
    EXPERT = 131
    HOLDINGS = 132
    ABSENT = 133
    FAILED = 134


class FailCode(IntEnum):
    """Why a request has no other answer. A code of a later version is read as FAILED."""

    FAILED = 0
    UNKNOWN_MODEL = 1
    BAD_REQUEST = 2
    BUSY = 3
    NO_BACKBONE = 4
    OTHER_VERSION = 5


@dataclass(frozen=True, slots=True)
class AskManifest:
    """The manifest of a model; `model_hash` has 32 bytes, here and below."""

    model_hash: bytes

    def encode(self) -> bytes:
        """Return the whole part."""
        return _part(Kind.ASK_MANIFEST, self.model_hash)


@dataclass(frozen=True, slots=True)
class AskBackbone:
    """The backbone file from byte `offset` on."""

    model_hash: bytes
    offset: int

    def encode(self) -> bytes:
        """Return the whole part."""
        return _part(Kind.ASK_BACKBONE, self.model_hash, _U64.pack(self.offset))


@dataclass(frozen=True, slots=True)
class AskExperts:
    """Experts of one site."""

    model_hash: bytes
    site: int
    experts: tuple[int, ...]

    def encode(self) -> bytes:
        """Return the whole part."""
        ids = struct.pack(f"<{len(self.experts)}H", *self.experts)
        return _part(Kind.ASK_EXPERTS, self.model_hash, _EXPERTS.pack(self.site, len(self.experts)), ids)


@dataclass(frozen=True, slots=True)
class AskHoldings:
    """Which experts the other side has."""

    model_hash: bytes

    def encode(self) -> bytes:
        """Return the whole part."""
        return _part(Kind.ASK_HOLDINGS, self.model_hash)


@dataclass(frozen=True, slots=True)
class ManifestFollows:
    """`size` bytes follow."""

    size: int

    def encode(self) -> bytes:
        """Return the part without its data."""
        return _part(Kind.MANIFEST, _U64.pack(self.size))


@dataclass(frozen=True, slots=True)
class BackboneFollows:
    """`end` − `offset` bytes follow; the file has `length` bytes, zeros after `end`."""

    offset: int
    end: int
    length: int

    def encode(self) -> bytes:
        """Return the part without its data."""
        return _part(Kind.BACKBONE, _BACKBONE.pack(self.offset, self.end, self.length))


@dataclass(frozen=True, slots=True)
class ExpertFollows:
    """`size` bytes of one expert follow."""

    expert: int
    size: int

    def encode(self) -> bytes:
        """Return the part without its data."""
        return _part(Kind.EXPERT, _EXPERT.pack(self.expert, self.size))


@dataclass(frozen=True, slots=True)
class HoldingsFollow:
    """`size` bytes of bitmaps follow."""

    size: int

    def encode(self) -> bytes:
        """Return the part without its data."""
        return _part(Kind.HOLDINGS, _U64.pack(self.size))


@dataclass(frozen=True, slots=True)
class Absent:
    """This expert is not held."""

    expert: int

    def encode(self) -> bytes:
        """Return the whole part."""
        return _part(Kind.ABSENT, _U16.pack(self.expert))


@dataclass(frozen=True, slots=True)
class Failed:
    """The last part of an answer."""

    code: FailCode
    why: str

    def encode(self) -> bytes:
        """Return the whole part."""
        return _part(Kind.FAILED, bytes([self.code]), self.why.encode("utf-8", "replace")[:MAX_WHY])


Request = AskManifest | AskBackbone | AskExperts | AskHoldings
Answer = ManifestFollows | BackboneFollows | ExpertFollows | HoldingsFollow | Absent | Failed


@dataclass(frozen=True, slots=True)
class Head:
    """What a part begins with: `n_fields` bytes of fields follow."""

    kind: int
    version: int
    n_fields: int

    @classmethod
    def decode(cls, data: bytes) -> Head:
        """Read `HEAD.size` bytes. Raises BadBulkFrame for fields longer than any part has."""
        head = cls(*HEAD.unpack(data))
        if head.n_fields > MAX_FIELDS:
            raise BadBulkFrame(f"a part of kind {head.kind} with {head.n_fields} bytes of fields; {MAX_FIELDS} at most")
        return head


def decode_request(head: Head, fields: bytes) -> Request:
    """Read a request's fields. Raises BadBulkFrame for any other part and for fields that cannot be."""
    _require(head.version == VERSION, f"protocol version {head.version}, this node speaks {VERSION}")
    reader = _Fields(head, fields)
    match head.kind:
        case Kind.ASK_MANIFEST:
            return AskManifest(reader.take(HASH_BYTES))
        case Kind.ASK_BACKBONE:
            return AskBackbone(reader.take(HASH_BYTES), reader.unpack(_U64)[0])
        case Kind.ASK_HOLDINGS:
            return AskHoldings(reader.take(HASH_BYTES))
        case Kind.ASK_EXPERTS:
            model_hash = reader.take(HASH_BYTES)
            site, count = reader.unpack(_EXPERTS)
            _require(1 <= count <= MAX_EXPERTS_ASKED, f"{count} experts asked for; 1 to {MAX_EXPERTS_ASKED} at a time")
            experts = reader.unpack(struct.Struct(f"<{count}H"))
            _require(len(set(experts)) == count, "an expert is asked for twice")
            return AskExperts(model_hash, site, experts)
        case _:
            raise BadBulkFrame(f"a part of kind {head.kind} where a request is due")


def decode_answer(head: Head, fields: bytes) -> Answer:
    """Read the fields of a part of an answer. Raises BadBulkFrame."""
    _require(head.version == VERSION, f"protocol version {head.version}, this node speaks {VERSION}")
    reader = _Fields(head, fields)
    match head.kind:
        case Kind.MANIFEST:
            return ManifestFollows(reader.unpack(_U64)[0])
        case Kind.BACKBONE:
            offset, end, length = reader.unpack(_BACKBONE)
            _require(offset <= end <= length <= MAX_LENGTH, f"a backbone file of {offset}, {end}, {length} bytes")
            return BackboneFollows(offset, end, length)
        case Kind.EXPERT:
            return ExpertFollows(*reader.unpack(_EXPERT))
        case Kind.HOLDINGS:
            return HoldingsFollow(reader.unpack(_U64)[0])
        case Kind.ABSENT:
            return Absent(reader.unpack(_U16)[0])
        case Kind.FAILED:
            code = reader.take(1)[0]
            known = code in FailCode.__members__.values()
            return Failed(FailCode(code) if known else FailCode.FAILED, _text(reader.rest()))
        case _:
            raise BadBulkFrame(f"a part of kind {head.kind} where an answer is due")


def encode_holdings(holdings: Mapping[int, Iterable[int]], n_expert: Sequence[int]) -> bytes:
    """Site -> experts as the data of HOLDINGS; `n_expert[site]` of every site of the model."""
    parts = []
    for site, experts in sorted(holdings.items()):
        mask = mask_of(experts)
        if mask:
            count = n_expert[site]
            parts.append(_SITE.pack(site, count) + mask.to_bytes(-(-count // 8), "little"))
    return b"".join(parts)


def decode_holdings(data: bytes, n_expert: Sequence[int]) -> dict[int, int]:
    """Site -> bitmap. Raises BadBulkFrame where they do not fit a model with `n_expert[site]` experts per site."""
    found: dict[int, int] = {}
    at, last = 0, -1
    while at < len(data):
        _require(at + _SITE.size <= len(data), "holdings end within a site")
        site, count = _SITE.unpack_from(data, at)
        at += _SITE.size
        _require(last < site < len(n_expert), f"holdings name site {site} after {last} of {len(n_expert)} sites")
        _require(count == n_expert[site], f"holdings give site {site} {count} experts; the model has {n_expert[site]}")
        size = -(-count // 8)
        _require(at + size <= len(data), "holdings end within a bitmap")
        mask = int.from_bytes(data[at : at + size], "little")
        _require(mask >> count == 0, f"holdings name an expert of site {site} that does not exist")
        found[site] = mask
        at, last = at + size, site
    return found


def max_holdings_bytes(n_expert: Sequence[int]) -> int:
    """The size of the holdings of a node that has something at every site."""
    return sum(_SITE.size + -(-count // 8) for count in n_expert)


def mask_of(experts: Iterable[int]) -> int:
    """Return the bitmap with a bit for each expert."""
    mask = 0
    for expert in experts:
        mask |= 1 << expert
    return mask


def experts_of(mask: int) -> tuple[int, ...]:
    """Return the experts of a bitmap, ascending."""
    experts = []
    while mask:
        low = mask & -mask
        experts.append(low.bit_length() - 1)
        mask ^= low
    return tuple(experts)


class _Fields:
    """Takes fields one after the other. BadBulkFrame where they end early."""

    def __init__(self, head: Head, data: bytes) -> None:
        self._kind, self._data, self._at = head.kind, data, 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise BadBulkFrame(f"a part of kind {self._kind} ends after {len(self._data)} of {end} bytes of fields")
        taken, self._at = self._data[self._at : end], end
        return taken

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def rest(self) -> bytes:
        return self._data[self._at :]


def _text(data: bytes) -> str:
    """What the other side says, as one printable line."""
    return "".join(c if c.isprintable() else " " for c in data[:MAX_WHY].decode("utf-8", "replace"))


def _part(kind: Kind, *fields: bytes) -> bytes:
    body = b"".join(fields)
    return HEAD.pack(kind, VERSION, len(body)) + body


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BadBulkFrame(message)
