"""Turns the bytes of a dispatch stream back into frames.

Pure: bytes in, frames out; BadFrame is the only error that bytes from a peer can cause. The layouts are in
`frames.py`. Both ends own one decoder per stream and feed it what the transport delivers, in whatever pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

import numpy as np

from swarmnode.dispatch.codec import Buffer
from swarmnode.dispatch.frames import (
    ANSWER_HEAD,
    BULK,
    CALL_HEAD,
    F32_LE,
    HEADER,
    LIMITS,
    MAX_BULK,
    MAX_CONTROL,
    NARROW,
    PARTIAL,
    PROTOCOL_VERSION,
    ROW_PER_PAIR,
    SITE_HEAD,
    U8,
    U16,
    Answer,
    CallFrame,
    Cancel,
    Frame,
    FrameType,
    Goodbye,
    Hello,
    Holdings,
    HoldingsUpdate,
    Key,
    Limits,
    Refuse,
    RefuseCode,
    SiteHoldings,
    Welcome,
    token_dtype,
)
from swarmnode.errors import BadFrame


class FrameDecoder:
    """Cuts a byte stream into frames of the accepted types: CALL and ANSWER up to `max_bulk` bytes, others MAX_CONTROL.

    A frame that lies whole inside one fed chunk is parsed where it lies; only one that is split over chunks
    is copied. What is held is never more than what has been fed of one frame, and its length is judged before
    any of it is held. After BadFrame the stream has no meaning any more: feeding on raises the same error
    again.
    """

    def __init__(self, accept: Iterable[FrameType], max_bulk: int = MAX_BULK) -> None:
        self._limits = {int(kind): min(max_bulk, MAX_BULK) if kind in BULK else MAX_CONTROL for kind in accept}
        self._held = bytearray()  # the beginning of one frame
        self._error: BadFrame | None = None

    def feed(self, data: Buffer) -> list[Frame]:
        """Take the next bytes of the stream; return the frames they complete. Raises BadFrame."""
        if self._error is not None:
            raise self._error
        try:
            return self._feed(memoryview(data))
        except BadFrame as error:
            self._error = error
            self._held = bytearray()
            raise

    def _feed(self, view: memoryview) -> list[Frame]:
        frames: list[Frame] = []
        while view or self._held:
            if not self._held and (total := self._total(view)) is not None and len(view) >= total:
                frames.append(_parse(view[4], view[HEADER.size : total]))
                view = view[total:]
                continue
            total = self._total(self._held)
            wanted = (HEADER.size if total is None else total) - len(self._held)
            self._held += view[:wanted]
            view = view[wanted:]
            if total is None:
                if self._total(self._held) is None:
                    break
            elif len(self._held) == total:
                whole, self._held = memoryview(self._held), bytearray()
                frames.append(_parse(whole[4], whole[HEADER.size :]))
            else:
                break
        return frames

    def _total(self, start: Buffer) -> int | None:
        """Return the size of the whole frame that begins so, None while its header is incomplete."""
        if len(start) < HEADER.size:
            return None
        length, kind = HEADER.unpack_from(start)
        limit = self._limits.get(kind)
        if limit is None:
            raise BadFrame(f"frame type {kind} is unknown or not for this side (protocol version {PROTOCOL_VERSION})")
        if not 1 <= length <= limit:
            raise BadFrame(f"a {FrameType(kind).name} frame of {length} bytes; 1 to {limit} are allowed")
        return 4 + int(length)


class _Reader:
    """Takes fields off a body; running out is BadFrame."""

    def __init__(self, kind: FrameType, body: memoryview) -> None:
        self.kind, self._body, self._at = kind, body, 0

    def take(self, n: int) -> memoryview:
        end = self._at + n
        if end > len(self._body):
            raise BadFrame(f"a {self.kind.name} frame ends {end - len(self._body)} bytes before its fields do")
        part, self._at = self._body[self._at : end], end
        return part

    def uint(self, n: int) -> int:
        return int.from_bytes(self.take(n), "little")

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def text(self) -> str:
        try:
            text = bytes(self.take(self.uint(1))).decode()
        except UnicodeDecodeError:
            raise BadFrame(f"a {self.kind.name} frame with a text that is not UTF-8") from None
        # It will be printed on somebody's terminal.
        return "".join(c if c.isprintable() else "�" for c in text)

    def key(self) -> Key:
        version, model_hash, recipes_hash = self.uint(2), bytes(self.take(32)), bytes(self.take(32))
        return Key(model_hash, recipes_hash, self.text(), self.text(), self.text(), version)

    def holdings(self) -> Holdings:
        held: dict[int, SiteHoldings] = {}
        for _ in range(self.uint(2)):
            site, n_expert = self.unpack(SITE_HEAD)
            mask = self.uint((n_expert + 7) // 8)
            if mask >> n_expert or site in held:
                raise BadFrame(f"holdings name site {site} twice, or an expert above its {n_expert}")
            held[site] = SiteHoldings(site, n_expert, mask)
        return tuple(held.values())


def _parse_hello(read: _Reader) -> Hello:
    return Hello(read.key())


def _parse_welcome(read: _Reader) -> Welcome:
    key = read.key()
    if key.version != PROTOCOL_VERSION:
        return Welcome(key, Limits(0, 0, 0), ())
    return Welcome(key, Limits(*read.unpack(LIMITS)), read.holdings())


def _parse_call(read: _Reader) -> CallFrame:
    call_id, site, flag_bits, wire_out, wire_back, n_tokens, n_rows, n_pairs, n_bytes = read.unpack(CALL_HEAD)
    if flag_bits & ~(PARTIAL | ROW_PER_PAIR | NARROW):
        raise BadFrame(f"a CALL with unknown flags {flag_bits:#04x}")
    token = token_dtype(n_tokens)
    expert: np.dtype[np.unsignedinteger] = U8 if flag_bits & NARROW else U16
    weighted = flag_bits & (PARTIAL | ROW_PER_PAIR) == PARTIAL
    experts_at = n_pairs * token.itemsize * (n_tokens != 1)
    weights_at = experts_at + n_pairs * expert.itemsize
    rows_at = weights_at + n_pairs * 4 * weighted
    data = read.take(rows_at + n_bytes)
    return CallFrame(
        call_id,
        site,
        bool(flag_bits & PARTIAL),
        bool(flag_bits & ROW_PER_PAIR),
        wire_out,
        wire_back,
        n_tokens,
        n_rows,
        np.zeros(n_pairs, U16) if n_tokens == 1 else np.frombuffer(data[:experts_at], token),
        np.frombuffer(data[experts_at:weights_at], expert),
        np.frombuffer(data[weights_at:rows_at], F32_LE) if weighted else None,
        data[rows_at:],
    )


def _parse_answer(read: _Reader) -> Answer:
    call_id, wire, n_rows, queued_us, busy_us, n_bytes = read.unpack(ANSWER_HEAD)
    return Answer(call_id, wire, n_rows, queued_us, busy_us, read.take(n_bytes))


def _parse_refuse(read: _Reader) -> Refuse:
    call_id, code = read.uint(8), read.uint(1)
    try:
        return Refuse(call_id, RefuseCode(code), read.text())
    except ValueError:
        raise BadFrame(f"a REFUSE with unknown code {code}") from None


_PARSERS: dict[FrameType, Callable[[_Reader], Frame]] = {
    FrameType.HELLO: _parse_hello,
    FrameType.WELCOME: _parse_welcome,
    FrameType.HOLDINGS: lambda read: HoldingsUpdate(read.holdings()),
    FrameType.CALL: _parse_call,
    FrameType.ANSWER: _parse_answer,
    FrameType.REFUSE: _parse_refuse,
    FrameType.CANCEL: lambda read: Cancel(read.uint(8)),
    FrameType.GOODBYE: lambda read: Goodbye(read.text()),
}


def _parse(number: int, body: memoryview) -> Frame:
    kind = FrameType(number)
    return _PARSERS[kind](_Reader(kind, body))
