"""The frames of the dispatch stream: their byte layouts, and how each is written.

Pure. `frame_decoder.py` reads them; what a frame means is decided by `client.py` and `worker.py`, what its
rows are by `codec.py`. One bidirectional stream per connection carries them; the client speaks first. All
integers are little-endian. Bytes after the fields below are ignored, so that a later version can append;
everything inside the fields is checked.

    frame     u32 length | u8 type | body            length counts the type and the body
    text      u8 n | n bytes of UTF-8
    key       u16 version | 32 model hash | 32 recipes hash | text model | text engine | text node
    holdings  u16 n | n × (u16 site | u16 n_expert | ⌈n_expert/8⌉ bitmap, expert e = bit e%8 of byte e//8)

    1 HELLO     key                                  client → worker, first frame
    2 WELCOME   key | u32 max pairs | u32 max bytes | u16 max calls | holdings  worker → client, first frame
    3 HOLDINGS  holdings                             worker → client, replaces what was held before
    4 CALL      u64 id | u16 site | u8 flags | u8 wire out | u8 wire back | u8 0
                | u32 n_tokens | u32 n_rows | u32 n_pairs | u32 n_bytes
                | [n_pairs × token] | n_pairs × expert | [n_pairs × f32 weight] | n_bytes of x rows
                token is u16, or u32 when n_tokens > 65536; not there when n_tokens = 1: all pairs are of token 0
                expert is u16, or u8 with NARROW; weights are there with PARTIAL and without ROW_PER_PAIR
    5 ANSWER    u64 id | u8 wire | 3 × u8 0 | u32 n_rows | u32 µs queued | u32 µs busy | u32 n_bytes
                | n_bytes of rows
    6 REFUSE    u64 id | u8 code | text why
    7 CANCEL    u64 id                               client → worker
    8 GOODBYE   text why                             worker → client: no new calls after this

Flags of CALL: 1 PARTIAL: one row per token comes back, the sum over the pairs; else one row per pair, in
their order. 2 ROW_PER_PAIR: x has one row per pair (already weighted); else one per token. 4 NARROW: experts
are one byte each, all below 256. Every CALL gets exactly one ANSWER or REFUSE, a cancelled one too. The key has
this layout in every version, so that a mismatch can name both values; a WELCOME of another version is read no
further than its key.

Version 2 left out what version 1 sent with every call of one token (2 bytes per pair of token index, 1 of expert), and
added the wire types INT8 and FP8.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from swarmnode.dispatch.codec import F32, Buffer

PROTOCOL_VERSION = 2
MAX_CONTROL = 1 << 20  # holdings of 4,000 sites with 1,024 experts fit twice
MAX_BULK = 1 << 26  # no decoder accepts more in one frame, whatever it is asked for; calls are split far below it
HEADER = struct.Struct("<IB")
CALL_HEAD = struct.Struct("<QHBBBxIIII")
ANSWER_HEAD = struct.Struct("<QBxxxIIII")
ANSWER_SIZE = HEADER.size + ANSWER_HEAD.size  # of an ANSWER without its rows
LIMITS = struct.Struct("<IIH")
SITE_HEAD = struct.Struct("<HH")
PARTIAL, ROW_PER_PAIR, NARROW = 1, 2, 4  # the flags of CALL
_WIDE_TOKENS = 1 << 16  # above this many tokens an index does not fit u16
# Made once: both ends need them in every call.
U8: np.dtype[np.unsignedinteger] = np.dtype("u1")
U16, U32, F32_LE = np.dtype("<u2"), np.dtype("<u4"), np.dtype("<f4")


class FrameType(IntEnum):
    """All frame numbers. Numbers are never reused."""

    HELLO = 1
    WELCOME = 2
    HOLDINGS = 3
    CALL = 4
    ANSWER = 5
    REFUSE = 6
    CANCEL = 7
    GOODBYE = 8


BULK = frozenset({FrameType.CALL, FrameType.ANSWER})


class RefuseCode(IntEnum):
    """Why a worker did not answer a call."""

    NOT_HELD = 1
    OVERLOADED = 2
    BAD_REQUEST = 3
    SHUTTING_DOWN = 4
    COMPUTE_FAILED = 5
    CANCELLED = 6


@dataclass(frozen=True, slots=True)
class Key:
    """What both ends must agree on (version, hashes, engine), and names for people. Hashes are 32 bytes."""

    model_hash: bytes
    recipes_hash: bytes
    model: str
    engine: str
    node: str
    version: int = PROTOCOL_VERSION

    def pack(self) -> bytes:
        """Return the bytes of the key."""
        texts = b"".join(map(_pack_text, (self.model, self.engine, self.node)))
        return self.version.to_bytes(2, "little") + self.model_hash + self.recipes_hash + texts


@dataclass(frozen=True, slots=True)
class SiteHoldings:
    """The experts held at one site: bit e of `mask` is expert e."""

    site: int
    n_expert: int
    mask: int


Holdings = tuple[SiteHoldings, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest calls a worker takes: pairs and bytes (each way) of one, and how many at a time from one peer."""

    max_pairs: int
    max_bytes: int
    max_calls: int


@dataclass(frozen=True, slots=True)
class Hello:
    """A client introduces itself."""

    type: ClassVar[FrameType] = FrameType.HELLO
    key: Key

    def encode(self) -> bytes:
        """Return the whole frame."""
        return _frame(self.type, self.key.pack())


@dataclass(frozen=True, slots=True)
class Welcome:
    """A worker's reply to HELLO, also to one that it will not serve."""

    type: ClassVar[FrameType] = FrameType.WELCOME
    key: Key
    limits: Limits
    holdings: Holdings

    def encode(self) -> bytes:
        """Return the whole frame."""
        limits = LIMITS.pack(self.limits.max_pairs, self.limits.max_bytes, self.limits.max_calls)
        return _frame(self.type, self.key.pack(), limits, _pack_holdings(self.holdings))


@dataclass(frozen=True, slots=True)
class HoldingsUpdate:
    """A worker now holds exactly this."""

    type: ClassVar[FrameType] = FrameType.HOLDINGS
    holdings: Holdings

    def encode(self) -> bytes:
        """Return the whole frame."""
        return _frame(self.type, _pack_holdings(self.holdings))


@dataclass(frozen=True, slots=True, eq=False)
class CallFrame:
    """Compute pairs of (token, expert) at one site. `tokens` u16 or u32[n_pairs], `experts` u8 or u16[n_pairs].

    Experts that are given as u8 travel so. With one token `tokens` must be zeros: they do not travel. `weights` is
    f32[n_pairs] where it is `partial` and not `row_per_pair`, None otherwise. A decoded frame's arrays and `rows` are
    views of the bytes fed.
    """

    type: ClassVar[FrameType] = FrameType.CALL
    id: int
    site: int
    partial: bool
    row_per_pair: bool
    wire_out: int
    wire_back: int
    n_tokens: int
    n_rows: int
    tokens: NDArray[np.unsignedinteger]
    experts: NDArray[np.unsignedinteger]
    weights: F32 | None
    rows: Buffer = field(repr=False)

    @property
    def n_pairs(self) -> int:
        """Number of (token, expert) pairs."""
        return len(self.experts)

    def encode(self) -> bytes:
        """Return the whole frame."""
        narrow = self.experts.dtype == U8
        flags = self.partial * PARTIAL + self.row_per_pair * ROW_PER_PAIR + narrow * NARROW
        head = CALL_HEAD.pack(
            self.id,
            self.site,
            flags,
            self.wire_out,
            self.wire_back,
            self.n_tokens,
            self.n_rows,
            self.n_pairs,
            len(self.rows),
        )
        tokens = b"" if self.n_tokens == 1 else np.asarray(self.tokens, token_dtype(self.n_tokens)).tobytes()
        experts = np.asarray(self.experts, U8 if narrow else U16).tobytes()
        weights = b"" if self.weights is None else np.asarray(self.weights, F32_LE).tobytes()
        return _frame(self.type, head, tokens, experts, weights, self.rows)


@dataclass(frozen=True, slots=True)
class Answer:
    """The rows of one call, and how long it waited for the engine and ran in it."""

    type: ClassVar[FrameType] = FrameType.ANSWER
    id: int
    wire: int
    n_rows: int
    queued_us: int
    busy_us: int
    rows: Buffer = field(repr=False)

    def encode(self) -> bytes:
        """Return the whole frame."""
        head = ANSWER_HEAD.pack(
            self.id,
            self.wire,
            self.n_rows,
            min(self.queued_us, 0xFFFFFFFF),
            min(self.busy_us, 0xFFFFFFFF),
            len(self.rows),
        )
        return _frame(self.type, head, self.rows)


@dataclass(frozen=True, slots=True)
class Refuse:
    """A call that will have no answer, and why."""

    type: ClassVar[FrameType] = FrameType.REFUSE
    id: int
    code: RefuseCode
    why: str

    def encode(self) -> bytes:
        """Return the whole frame."""
        return _frame(self.type, self.id.to_bytes(8, "little"), bytes([self.code]), _pack_text(self.why))


@dataclass(frozen=True, slots=True)
class Cancel:
    """The answer to this call is not needed any more."""

    type: ClassVar[FrameType] = FrameType.CANCEL
    id: int

    def encode(self) -> bytes:
        """Return the whole frame."""
        return _frame(self.type, self.id.to_bytes(8, "little"))


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The sender is leaving: what runs is finished, nothing new is begun."""

    type: ClassVar[FrameType] = FrameType.GOODBYE
    why: str

    def encode(self) -> bytes:
        """Return the whole frame."""
        return _frame(self.type, _pack_text(self.why))


Frame = Hello | Welcome | HoldingsUpdate | CallFrame | Answer | Refuse | Cancel | Goodbye

# What each side may be sent; anything else is the peer's fault.
TO_WORKER = frozenset({FrameType.HELLO, FrameType.CALL, FrameType.CANCEL})
TO_CLIENT = frozenset({FrameType.WELCOME, FrameType.HOLDINGS, FrameType.ANSWER, FrameType.REFUSE, FrameType.GOODBYE})


def _frame(kind: FrameType, *parts: Buffer) -> bytes:
    return b"".join((HEADER.pack(1 + sum(map(len, parts)), kind), *parts))


def token_dtype(n_tokens: int) -> np.dtype[np.unsignedinteger]:
    """Return the type of a token index in a CALL of n_tokens that carries them."""
    return U16 if n_tokens <= _WIDE_TOKENS else U32


def _pack_text(text: str) -> bytes:
    data = text.encode()[:255]
    data = data.decode(errors="ignore").encode()  # not in the middle of a character
    return bytes([len(data)]) + data


def _pack_holdings(holdings: Holdings) -> bytes:
    parts = [len(holdings).to_bytes(2, "little")]
    for held in holdings:
        parts += (
            SITE_HEAD.pack(held.site, held.n_expert),
            held.mask.to_bytes((held.n_expert + 7) // 8, "little"),
        )
    return b"".join(parts)
