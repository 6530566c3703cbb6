"""Messages between members: fixed bytes, round trips, and garbage."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.coordination.messages import (
    HEADER_BYTES,
    MAX_MESSAGE,
    MAX_STATUS,
    MAX_VERDICT,
    Assign,
    Gated,
    Join,
    JoinDeclined,
    Joined,
    Leaving,
    Message,
    Records,
    Released,
    Report,
    Revoked,
    Serves,
    StatusRefused,
    StatusTold,
    StatusWanted,
    body_length,
    decode,
    encode,
    pack_masks,
    unpack_masks,
)
from swarmnode.errors import BadMessage

MODEL = bytes(range(32))
EVERY: list[Message] = [
    Join(b"credentials", "desk", "worker"),
    Joined(b"certificate"),
    JoinDeclined("this ticket was revoked"),
    Records([b"one", b"two"]),
    Revoked(b"list"),
    Serves(MODEL, "demo"),
    Report(MODEL, 1 << 33, {0: b"\x0f", 3: b"\x00\x80"}, 7, 1.5e-5, 3, True, "disk full"),
    Assign(8, MODEL, {1: b"\xff"}),
    Leaving(),
    Released(),
    StatusWanted(7),
    StatusTold(7, b"zlib", 1.5),
    StatusRefused(7, "it runs with --allow-view nobody"),
    Gated(MODEL, b"zlib"),
]


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    data = encode(message)
    assert body_length(data[:HEADER_BYTES]) == len(data) - HEADER_BYTES
    assert decode(data[HEADER_BYTES:]) == message


def test_the_bytes_do_not_change() -> None:
    assert encode(StatusWanted(7)).hex() == "0000001c82a474797065ad7374617475732d77616e746564a66e756d62657207"
    assert encode(Gated(bytes(32), b"x")).hex() == (
        "0000003f83a474797065a56761746564a56d6f64656cc420" + "00" * 32 + "a776657264696374c40178"
    )
    assert encode(Leaving()).hex() == "0000000e81a474797065a76c656176696e67"
    assert encode(Assign(8, bytes(32), {1: b"\xff"})).hex() == (
        "0000004784a474797065a661737369676ea66e756d62657208a56d6f64656cc420" + "00" * 32 + "a4686f6c648101c401ff"
    )


def test_what_a_later_version_adds_is_ignored() -> None:
    body = msgspec.msgpack.encode({"type": "leaving", "why": "tired", "at": 3})
    assert decode(body) == Leaving()
    assert decode(msgspec.msgpack.encode({"type": "of-the-future", "x": [1, 2]})) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "report"}),
        msgspec.msgpack.encode({"type": "serves", "model": b"short"}),
        msgspec.msgpack.encode({"type": "report", "model": MODEL, "budget": -1, "held": {}}),
        msgspec.msgpack.encode({"type": "report", "model": MODEL, "budget": 1, "held": {-1: b"\1"}}),
        msgspec.msgpack.encode({"type": "assign", "number": 1, "model": MODEL, "hold": {99_999: b"\1"}}),
        msgspec.msgpack.encode({"type": "records", "blobs": [b"x"] * 65}),
        msgspec.msgpack.encode({"type": "status-wanted", "number": -1}),
        msgspec.msgpack.encode({"type": "status-told", "number": 1, "status": bytes(MAX_STATUS + 1)}),
        msgspec.msgpack.encode({"type": "status-refused", "number": 1, "why": "x", "again_s": float("nan")}),
        msgspec.msgpack.encode({"type": "gated", "model": b"short"}),
        msgspec.msgpack.encode({"type": "gated", "model": MODEL, "verdict": bytes(MAX_VERDICT + 1)}),
        msgspec.msgpack.encode([1, 2]),
        b"\x91" * 5000,
    ],
    ids=range(15),
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(body)


@given(st.binary(max_size=200))
def test_garbage_never_gets_further_than_bad_message(body: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(body)


@pytest.mark.parametrize("length", [0, MAX_MESSAGE + 1, 0xFFFFFFFF])
def test_a_length_is_bounded_before_anything_is_read(length: int) -> None:
    with pytest.raises(BadMessage):
        body_length(length.to_bytes(4, "big"))


def test_a_message_too_large_is_not_sent() -> None:
    with pytest.raises(BadMessage):
        encode(Revoked(bytes(MAX_MESSAGE)))


@given(st.dictionaries(st.integers(0, 5), st.integers(0, (1 << 16) - 1)))
def test_masks_survive_the_wire(masks: dict[int, int]) -> None:
    assert unpack_masks(pack_masks(masks), [16] * 6) == {site: mask for site, mask in masks.items() if mask}


def test_masks_beyond_the_model_are_refused() -> None:
    with pytest.raises(BadMessage, match="does not exist"):
        unpack_masks({0: b"\x00\x00\x01"}, [16])
    with pytest.raises(BadMessage, match="does not exist"):
        unpack_masks({1: b"\x01"}, [16])


def test_no_text_can_move_a_terminal_s_cursor() -> None:
    bad, good = "desk\x1b[2J\n\u202eevil", "desk [2J  evil"
    for body in (
        {"type": "join", "credentials": b"", "name": bad},
        {"type": "join-declined", "why": bad},
        {"type": "serves", "model": MODEL, "name": bad},
        {"type": "report", "model": MODEL, "budget": 1, "held": {}, "trouble": bad},
        {"type": "status-refused", "number": 1, "why": bad},
    ):
        message = decode(msgspec.msgpack.encode(body))
        assert good in (getattr(message, name, "") for name in ("name", "why", "trouble"))
    assert Serves(MODEL, bad).name == good
    assert decode(encode(Serves(MODEL, "Modèle 家"))[HEADER_BYTES:]) == Serves(MODEL, "Modèle 家")
