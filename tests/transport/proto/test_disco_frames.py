"""Disco messages: fixed bytes, round trips, and whatever a peer may send."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.proto.addresses import Candidate, CandidateSource, NatKind
from transport.proto.disco_frames import (
    MAX_DATAGRAM,
    MAX_PLAINTEXT,
    SEAL_OVERHEAD,
    Call,
    CallStage,
    DiscoError,
    DiscoMessage,
    Ping,
    Pong,
    decode,
    encode,
)

TX = bytes(range(12))
CALL = Call(
    CallStage.ANSWER,
    b"\x55" * 8,
    b"\x66" * 8,
    7,
    NatKind.HARD,
    -1,
    (
        Candidate(("192.0.2.1", 4433), CandidateSource.REFLECTED),
        Candidate(("2001:db8::1", 4433), CandidateSource.INTERFACE),
    ),
    ("https://r.example",),
)
CALL_HEAD = "0302" + "55" * 8 + "66" * 8 + "0000000703ffff"
VECTORS: list[tuple[DiscoMessage, str]] = [
    (Ping(TX), "01" + TX.hex() + "00" * 19),
    (Ping(TX, left=True), "01" + TX.hex() + "01" + "00" * 18),
    (Pong(TX, None), "02" + TX.hex() + "00"),
    (Pong(TX, ("192.0.2.1", 4433)), "02" + TX.hex() + "04c00002011151"),
    (Pong(TX, ("2001:db8::1", 4433)), "02" + TX.hex() + "0620010db8" + "00" * 11 + "011151"),
    (
        CALL,
        CALL_HEAD + "020204c00002011151010620010db8" + "00" * 11 + "011151"
        "010011" + b"https://r.example".hex(),
    ),
    (replace(CALL, candidates=(), relays=()), CALL_HEAD + "0000"),
]  # fmt: skip


def reachable(host: IPv4Address | IPv6Address) -> bool:
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return not (host.is_unspecified or host.is_multicast or mapped)


transactions = st.binary(min_size=12, max_size=12)
addresses = st.tuples(st.ip_addresses().filter(reachable).map(str), st.integers(1, 0xFFFF))
calls = st.builds(
    Call,
    st.sampled_from(CallStage),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 0xFFFFFFFF),
    st.sampled_from(NatKind),
    st.integers(-0x8000, 0x7FFF),
    st.lists(st.builds(Candidate, addresses, st.sampled_from(CandidateSource)), max_size=16).map(tuple),
    st.lists(st.from_regex(r"https?://[a-zé.]{1,100}(:[0-9]{1,5})?", fullmatch=True), max_size=3).map(tuple),
)
messages = st.one_of(
    st.builds(Ping, transactions), st.builds(Pong, transactions, st.none() | addresses), calls
)  # fmt: skip


@pytest.mark.parametrize(("message", "wire"), VECTORS)
def test_fixed_bytes(message: DiscoMessage, wire: str) -> None:
    assert encode(message).hex() == wire
    assert decode(bytes.fromhex(wire)) == message


@given(messages, st.binary(max_size=40))
def test_round_trip_whatever_a_later_version_appends(message: DiscoMessage, later: bytes) -> None:
    assert decode(encode(message) + later) == message


@given(transactions, st.integers(0, MAX_DATAGRAM), addresses)
def test_a_ping_has_its_size_when_sealed_and_never_less_than_its_pong(
    tx: bytes, size: int, address: tuple[str, int]
) -> None:
    ping = encode(Ping(tx), size)
    assert len(ping) + SEAL_OVERHEAD == max(size, 96)
    assert len(ping) >= len(encode(Pong(tx, address)))
    assert decode(ping) == Ping(tx)


def test_the_largest_call_fits_any_path() -> None:
    host = "2001:db8:1111:2222:3333:4444:5555:6666"
    candidates = tuple(Candidate((host, port), CandidateSource.GIVEN) for port in range(1, 17))
    call = replace(CALL, candidates=candidates, relays=("x" * 256,) * 3)
    assert len(encode(call)) + SEAL_OVERHEAD <= 1200
    assert decode(encode(call)) == call


def test_addresses_are_told_plainly() -> None:
    assert decode(encode(Pong(TX, ("::ffff:192.0.2.1", 9)))) == Pong(TX, ("192.0.2.1", 9))
    assert decode(encode(Pong(TX, ("fe80::1%eth0", 9)))) == Pong(TX, ("fe80::1", 9))


def test_what_a_later_version_may_say() -> None:
    wire = bytearray(encode(CALL))
    wire[22] = 200  # NAT kind
    wire[26] = 99  # source of the first candidate
    assert decode(bytes(wire)) == replace(CALL, nat=NatKind.UNKNOWN, candidates=CALL.candidates[1:])


@pytest.mark.parametrize(
    "address", ["00", "04c00002010000", "04000000001151", "04e00000011151", "06ff02" + "00" * 13 + "011151"]
)
def test_addresses_where_nobody_can_be_are_left_out(address: str) -> None:
    good = "0204c00002011151"
    call = decode(bytes.fromhex(CALL_HEAD + "02" + "01" + address + good + "00"))
    assert isinstance(call, Call)
    assert call.candidates == CALL.candidates[:1]
    assert decode(bytes.fromhex("02" + TX.hex() + address)) == Pong(TX, None)


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        ("", "0 bytes"),
        ("00" * (MAX_PLAINTEXT + 1), f"{MAX_PLAINTEXT + 1} bytes"),
        ("7f00", "unknown type 0x7f"),
        ("01" + "00" * 11, "shorter than its answer"),
        ("02" + "00" * 12, "PONG is cut short"),
        ("02" + "00" * 12 + "05", "unknown family 5"),
        ("02" + "00" * 12 + "04c0000201", "PONG is cut short"),
        (CALL_HEAD, "CALL is cut short"),
        (CALL_HEAD + "11", "17 candidates"),
        (CALL_HEAD + "00", "CALL is cut short"),
        (CALL_HEAD + "0004", "4 relays"),
        (CALL_HEAD + "00010101" + "61" * 300, "257 bytes"),
        (CALL_HEAD + "0001000561", "5 bytes"),
        (CALL_HEAD + "00010000", "cannot be one"),
        (CALL_HEAD + "0001000161".replace("61", "0a"), "cannot be one"),
        (CALL_HEAD + "0001000361ffff", "not UTF-8"),
        (CALL_HEAD.replace("0302", "0309", 1) + "0000", "unknown stage 9"),
    ],
)
def test_what_is_wrong_is_said(wire: str, reason: str) -> None:
    with pytest.raises(DiscoError, match=reason):
        decode(bytes.fromhex(wire))


@pytest.mark.parametrize(
    "message",
    [
        Ping(b"short"),
        Pong(b"short", None),
        Pong(TX, ("relay.example", 1)),
        Pong(TX, ("192.0.2.1", 65536)),
        replace(CALL, session=b""),
        replace(CALL, boot=b""),
        replace(CALL, number=-1),
        replace(CALL, port_delta=40_000),
        replace(CALL, candidates=CALL.candidates * 9),
        replace(CALL, relays=("a",) * 4),
        replace(CALL, relays=("a" * 257,)),
        replace(CALL, relays=("https://a b",)),
    ],
)
def test_what_cannot_be_said_is_our_mistake(message: DiscoMessage) -> None:
    with pytest.raises(ValueError, match=r"."):
        encode(message)


def test_a_ping_beyond_any_path_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="9001 bytes"):
        encode(Ping(TX), MAX_DATAGRAM + 1)


@given(st.sampled_from([b"", b"\1", b"\2", b"\3", b"\3\1" + bytes(23)]), st.binary(max_size=120))
def test_fuzz_any_bytes(head: bytes, rest: bytes) -> None:
    decode_anything(head + rest)


@given(calls, st.data())
def test_fuzz_changed_and_cut_calls(call: Call, data: st.DataObject) -> None:
    wire = bytearray(encode(call))
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] = data.draw(st.integers(0, 255))
    decode_anything(bytes(wire))
    decode_anything(bytes(wire[:at]))


def decode_anything(plaintext: bytes) -> None:
    """The invariant: a message within all bounds that can be encoded again, or a DiscoError; nothing else."""
    try:
        message = decode(plaintext)
    except DiscoError:
        return
    if isinstance(message, Call):
        assert len(message.candidates) <= 16
        assert len(message.relays) <= 3
    assert decode(encode(message)) == message


def test_a_ping_shorter_than_its_answer_is_refused() -> None:
    shortest = encode(Ping(bytes(12)))
    assert decode(shortest) == Ping(bytes(12))
    with pytest.raises(DiscoError, match="shorter than its answer"):
        decode(shortest[:-1])
