"""Messages between members of a swarm, on the lanes "join" and "swarm". Pure.

Message:  length u32 (big endian), then as many bytes of MessagePack: a map whose "type" names the message. Unknown
          fields are ignored, so that later versions can add; an unknown type is skipped (`decode` returns None).

Each side sends on a stream that it opened itself and reads the other's. `message_link.py` moves the bytes;
`coordinator.py`, `agent.py` and `swarmnode/member.py` decide what follows.

join    Join           newcomer → authority: what it is; its invitation was judged before, with the connection
        Joined         authority → newcomer: its certificate
        JoinDeclined    authority → newcomer: one line
swarm   Records        records of peers, signed by them (discovery/record.py), told by peers
        Revoked        the newest list of who is out, signed by the swarm (membership.py)
        Serves         backbone → all: the model that this swarm runs
        Report         worker → coordinator: what it has, holds and does; every few seconds and when it changed
        Assign         coordinator → worker: what it is to hold
        Leaving        worker → coordinator: it wants to go
        Released       coordinator → worker: nothing is lost when it goes now
        StatusWanted   member → member: what does your node look like?
        StatusTold     the answer (member_status.py), cut where it would be too large
        StatusRefused  or one line why not; with `again_s`, when to ask again
        Gated          founder → members that may generate, before its Serves: its gate's verdict on that model

A node that is too old to know StatusWanted skips it: who asks waits in vain, and says so. One that is too old to know
Gated goes by its own gate alone, as does one whose founder is too old to tell.
Masks are little-endian bytes, bit e for expert e, as in dispatch/frames.py. Texts end on people's terminals: whatever
cannot be printed in them is a space, as soon as a message is made or read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, get_args

import msgspec

from swarmnode.errors import BadMessage

HEADER_BYTES = 4
MAX_MESSAGE = 1 << 20  # holdings of 4,000 sites with 1,024 experts fit
MAX_RECORDS = 64  # records per message
MAX_EXPERTS = 1 << 16
MAX_SITES = 4096
MAX_STATUS = 1 << 18  # bytes, compressed: a node with a thousand peers fits
MAX_VERDICT = 1 << 18  # bytes, compressed: 100 layers take 30,000

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Mask = Annotated[bytes, msgspec.Meta(max_length=MAX_EXPERTS // 8)]
Site = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SITES)]
Masks = Annotated[dict[Site, Mask], msgspec.Meta(max_length=MAX_SITES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


def _make_printable(message: msgspec.Struct) -> None:
    for name in message.__struct_fields__:
        text = getattr(message, name)
        if isinstance(text, str) and not text.isprintable():
            clean = "".join(one if one.isprintable() else " " for one in text)
            msgspec.structs.force_setattr(message, name, clean)


class Join(msgspec.Struct, frozen=True, tag="join", tag_field="type"):
    """A newcomer: its credentials once more, and what it wants to be called and to be."""

    credentials: Annotated[bytes, msgspec.Meta(max_length=1024)]
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    role: Annotated[str, msgspec.Meta(max_length=16)] = "worker"

    def __post_init__(self) -> None:
        _make_printable(self)


class Joined(msgspec.Struct, frozen=True, tag="joined", tag_field="type"):
    """Welcome."""

    certificate: Annotated[bytes, msgspec.Meta(max_length=1024)]


class JoinDeclined(msgspec.Struct, frozen=True, tag="join-declined", tag_field="type"):
    """Not welcome, and why."""

    why: Text

    def __post_init__(self) -> None:
        _make_printable(self)


class Records(msgspec.Struct, frozen=True, tag="records", tag_field="type"):
    """Encoded peer records."""

    blobs: Annotated[list[Annotated[bytes, msgspec.Meta(max_length=2048)]], msgspec.Meta(max_length=MAX_RECORDS)]


class Revoked(msgspec.Struct, frozen=True, tag="revoked", tag_field="type"):
    """Encoded revocations."""

    blob: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE)]


class Serves(msgspec.Struct, frozen=True, tag="serves", tag_field="type"):
    """The model that the sender runs: its hash and its name."""

    model: Hash
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""

    def __post_init__(self) -> None:
        _make_printable(self)


class Report(msgspec.Struct, frozen=True, tag="report", tag_field="type"):
    """A worker's state. `budget` in bytes of experts; `row_s` seconds per (token, expert) row, 0 before it is known.

    `assignment` is the last one that it has carried out whole, 0 for none; `waiting` the rows in its queue; `pinned`
    says that its user chose its experts; `trouble` why it cannot carry out what it was assigned, "" if it can;
    `fetched` the bytes of slices that have come since it started.
    """

    model: Hash
    budget: Count
    held: Masks
    assignment: Count = 0
    row_s: Seconds = 0.0
    waiting: Count = 0
    pinned: bool = False
    trouble: Text = ""
    fetched: Count = 0

    def __post_init__(self) -> None:
        _make_printable(self)


class Assign(msgspec.Struct, frozen=True, tag="assign", tag_field="type"):
    """Hold exactly this. Numbers grow; a worker carries out the newest."""

    number: Count
    model: Hash
    hold: Masks


class Leaving(msgspec.Struct, frozen=True, tag="leaving", tag_field="type"):
    """The sender wants to go once nothing is lost by it."""


class Released(msgspec.Struct, frozen=True, tag="released", tag_field="type"):
    """The receiver may go."""


class StatusWanted(msgspec.Struct, frozen=True, tag="status-wanted", tag_field="type"):
    """The sender's user wants to see the receiver's status. The answer has the same number."""

    number: Count


class StatusTold(msgspec.Struct, frozen=True, tag="status-told", tag_field="type"):
    """A status as `member_status.pack_status` makes it; the next question is answered after `again_s`."""

    number: Count
    status: Annotated[bytes, msgspec.Meta(max_length=MAX_STATUS)]
    again_s: Seconds = 0.0


class StatusRefused(msgspec.Struct, frozen=True, tag="status-refused", tag_field="type"):
    """No answer, and why. `again_s` 0: asking again changes nothing."""

    number: Count
    why: Text
    again_s: Seconds = 0.0

    def __post_init__(self) -> None:
        _make_printable(self)


class Gated(msgspec.Struct, frozen=True, tag="gated", tag_field="type"):
    """What the founder's gate found out about this model, as `gate/verdict_bytes.py` packs it; b"" for nothing."""

    model: Hash
    verdict: Annotated[bytes, msgspec.Meta(max_length=MAX_VERDICT)] = b""


Message = (
    Join | Joined | JoinDeclined | Records | Revoked | Serves | Report | Assign | Leaving | Released
    | StatusWanted | StatusTold | StatusRefused | Gated
)  # fmt: skip

_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()
_TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Message))


class _Any(msgspec.Struct):
    type: str


_any_decoder = msgspec.msgpack.Decoder(_Any)


def encode(message: Message) -> bytes:
    """The whole message with its length. Raises BadMessage where it is too large."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE:
        raise BadMessage(f"a {type(message).__name__} message of {len(body)} bytes; the limit is {MAX_MESSAGE}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """The bytes that follow a header. Raises BadMessage where they are too many."""
    length = int.from_bytes(header, "big")
    if not 0 < length <= MAX_MESSAGE:
        raise BadMessage(f"a message of {length} bytes; 1 to {MAX_MESSAGE} are allowed")
    return length


def decode(body: bytes) -> Message | None:
    """A message from its body; None for a type of a later version. Raises BadMessage."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        first = error
    try:
        known = _any_decoder.decode(body).type in _TYPES
    except (msgspec.DecodeError, RecursionError):
        known = True
    if known:
        raise BadMessage(f"not a message: {first}") from None
    return None


def pack_masks(masks: Mapping[int, int]) -> dict[int, bytes]:
    """Site → bitmap, as messages carry it; sites without experts are left out."""
    return {site: mask.to_bytes((mask.bit_length() + 7) // 8, "little") for site, mask in masks.items() if mask}


def unpack_masks(packed: Mapping[int, bytes], n_expert: Sequence[int]) -> dict[int, int]:
    """The inverse. `n_expert[site]` bounds it: raises BadMessage for a site or an expert that does not exist."""
    masks = {}
    for site, data in packed.items():
        mask = int.from_bytes(data, "little")
        if site >= len(n_expert) or mask.bit_length() > n_expert[site]:
            raise BadMessage(f"site {site} with expert {mask.bit_length() - 1} does not exist in this model")
        if mask:
            masks[site] = mask
    return masks
