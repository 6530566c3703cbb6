"""STUN: RFC 5769's vectors, our own bytes, and whatever the network may send."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import Address
from transport.proto.stun import (
    MAX_ATTRIBUTES,
    MAX_MESSAGE_BYTES,
    MAX_RESPONSE_BYTES,
    binding_request,
    is_stun,
    make_binding_response,
    parse_binding_request,
    parse_binding_response,
    wants_other_port,
)

TX = bytes.fromhex("b7e7a701bc34d686fa87dfae")
HEAD = "2112a442" + TX.hex()
# RFC 5769, 2.1 to 2.3.
RFC_REQUEST = bytes.fromhex(
    f"00010058{HEAD}80220010"
    "5354554e207465737420636c69656e74"
    "002400046e0001ff80290008932ff9b151263b36"
    "000600096576746a3a6836765920202000080014"
    "9aeaa70cbfd8cb56781ef2b5b2d3f249c1b571a280280004e57a3bcf"
)
RFC_RESPONSE_4 = bytes.fromhex(
    f"0101003c{HEAD}8022000b"
    "7465737420766563746f7220"
    "002000080001a147e112a643"
    "000800142b91f599fd9e90c38c7489f92af9ba53f06be7d780280004c07d4c96"
)
RFC_RESPONSE_6 = bytes.fromhex(
    f"01010048{HEAD}8022000b"
    "7465737420766563746f7220"
    "002000140002a1470113a9faa5d3f179bc25f4b5bed2b9d9"
    "00080014a382954e4be67bf11784c97c8292c275bfe3ed4180280004c8fb0b4c"
)
IPV4: Address = ("192.0.2.1", 32853)
IPV6: Address = ("2001:db8:1234:5678:11:2233:4455:6677", 32853)

transactions = st.binary(min_size=12, max_size=12)
ports = st.integers(1, 0xFFFF)


def reachable(host: IPv4Address | IPv6Address) -> bool:
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return not (host.is_unspecified or host.is_multicast or mapped)


addresses = st.tuples(st.ip_addresses().filter(reachable).map(str), ports)


def message(kind: int, *attributes: tuple[int, bytes]) -> bytes:
    body = b"".join(
        struct.pack(">HH", number, len(value)) + value + bytes(-len(value) % 4) for number, value in attributes
    )
    return struct.pack(">HHI", kind, len(body), 0x2112A442) + TX + body


def test_answers_of_the_rfc() -> None:
    assert is_stun(RFC_RESPONSE_4)
    assert parse_binding_response(RFC_RESPONSE_4) == (TX, IPV4)
    assert parse_binding_response(RFC_RESPONSE_6) == (TX, IPV6)


def test_a_request_with_conditions_that_we_do_not_know_is_not_answered() -> None:
    assert is_stun(RFC_REQUEST)
    assert parse_binding_request(RFC_REQUEST) is None


@pytest.mark.parametrize(
    ("sent", "wire"),
    [
        (binding_request(TX), f"0001002c{HEAD}ff210028" + "00" * 40),
        (binding_request(TX, 44), f"00010018{HEAD}ff210014" + "00" * 20),
        (binding_request(TX, 52, change_port=True), f"00010020{HEAD}0003000400000002ff210014" + "00" * 20),
        (make_binding_response(TX, IPV4), f"0101000c{HEAD}002000080001a147e112a643"),
        (make_binding_response(TX, IPV6), f"01010018{HEAD}002000140002a1470113a9faa5d3f179bc25f4b5bed2b9d9"),
    ],
)
def test_fixed_bytes(sent: bytes, wire: str) -> None:
    assert sent.hex() == wire


@given(transactions, st.integers(MAX_RESPONSE_BYTES, MAX_MESSAGE_BYTES), st.booleans())
def test_a_request_has_the_size_asked_for_and_is_understood(transaction: bytes, size: int, change_port: bool) -> None:
    request = binding_request(transaction, size, change_port=change_port)
    assert len(request) == size - size % 4
    assert is_stun(request)
    assert parse_binding_request(request) == transaction
    assert wants_other_port(request) == change_port
    assert parse_binding_response(request) is None


@given(transactions, addresses)
def test_an_answer_carries_the_address_and_is_no_longer_than_the_shortest_request(
    transaction: bytes, address: Address
) -> None:
    answer = make_binding_response(transaction, address)
    assert len(answer) <= MAX_RESPONSE_BYTES == len(binding_request(transaction, MAX_RESPONSE_BYTES))
    assert parse_binding_response(answer) == (transaction, address)
    assert parse_binding_request(answer) is None


def test_addresses_of_a_dual_stack_socket_are_told_plainly() -> None:
    assert make_binding_response(TX, ("::ffff:192.0.2.1", 32853)) == make_binding_response(TX, IPV4)
    assert make_binding_response(TX, ("fe80::1%eth0", 9)) == make_binding_response(TX, ("fe80::1", 9))


def test_short_requests_are_not_answered() -> None:
    assert parse_binding_request(message(1)) is None
    assert parse_binding_request(message(1, (0x8022, bytes(16)))) is None
    assert parse_binding_request(message(1, (0x8022, bytes(20)))) == TX


def test_an_answer_from_another_ip_cannot_be_had() -> None:
    both = message(1, (3, b"\0\0\0\x06"), (0x8022, bytes(32)))
    assert parse_binding_request(both) is None
    assert parse_binding_request(message(1, (3, b"\0\0"), (0x8022, bytes(32)))) is None


def test_public_servers_answers() -> None:
    mapped = b"\0\1" + struct.pack(">H", 32853) + bytes([192, 0, 2, 1])
    other = b"\0\1" + struct.pack(">H", 1) + bytes([10, 0, 0, 1])
    xored = bytes.fromhex("0001a147e112a643")
    old = message(0x0101, (1, mapped), (4, other), (5, other), (0x8020, other))
    assert parse_binding_response(old) == (TX, IPV4)
    assert parse_binding_response(message(0x0101, (1, other), (0x20, xored), (0x802B, mapped))) == (TX, IPV4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(20),
        RFC_RESPONSE_4[:-1],
        RFC_RESPONSE_4 + bytes(4),
        message(0x0101),
        message(0x0111, (9, b"\0\0\4\0")),
        message(0x0101, (0x20, bytes.fromhex("0001a147e112a6"))),
        message(0x0101, (0x20, bytes.fromhex("0003a147e112a643"))),
        message(0x0101, (0x20, bytes.fromhex("0002a147e112a643"))),
        message(0x0101, (0x20, bytes.fromhex("00012112e112a643"))),  # port 0
        message(0x0101, (0x20, bytes.fromhex("0001a1472112a442"))),  # 0.0.0.0
        message(0x0101, (1, bytes.fromhex("0001a147e0000001"))),  # multicast
        message(0x0101, *[(0x8022, b"")] * MAX_ATTRIBUTES, (0x20, bytes.fromhex("0001a147e112a643"))),
        message(0x0101, (0x8022, bytes(MAX_MESSAGE_BYTES))),
        bytes.fromhex(f"01010008{HEAD}0020ffff0001a147"),
        RFC_RESPONSE_4.replace(b"\x21\x12\xa4\x42", b"\x21\x12\xa4\x43", 1),
    ],
)
def test_broken_answers_are_none(data: bytes) -> None:
    assert parse_binding_response(data) is None


@pytest.mark.parametrize("pad_to", [0, MAX_RESPONSE_BYTES - 1, MAX_MESSAGE_BYTES + 1])
def test_requests_of_impossible_size(pad_to: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        binding_request(TX, pad_to)


def test_our_own_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        binding_request(b"short")
    with pytest.raises(ValueError, match="12 bytes"):
        make_binding_response(b"short", IPV4)
    with pytest.raises(ValueError, match="relay"):
        make_binding_response(TX, ("relay.example", 1))


@given(st.binary(max_size=200))
def test_fuzz_any_bytes_are_parsed_or_none(data: bytes) -> None:
    parse_everything(data)


@given(
    st.sampled_from([1, 0x0101]),
    st.lists(st.tuples(st.sampled_from([1, 3, 4, 0x20, 0x8022]), st.binary(max_size=24)), max_size=40),
    st.integers(-8, 8),
)
def test_fuzz_almost_valid_messages(kind: int, attributes: list[tuple[int, bytes]], cut: int) -> None:
    whole = message(kind, *attributes)
    parse_everything(whole)
    parse_everything(whole[:cut] if cut else whole)


@given(st.sampled_from([RFC_REQUEST, RFC_RESPONSE_4, RFC_RESPONSE_6]), st.integers(0, 107), st.integers(0, 255))
def test_fuzz_one_changed_byte(valid: bytes, at: int, value: int) -> None:
    changed = bytearray(valid)
    changed[at % len(valid)] = value
    parse_everything(bytes(changed))


def parse_everything(data: bytes) -> None:
    """The invariant: never an error; an address that is told can be sent to."""
    transaction = parse_binding_request(data)
    assert transaction is None or len(transaction) == 12
    wants_other_port(data)
    answer = parse_binding_response(data)
    if answer is not None:
        assert is_stun(data)
        host, port = answer[1]
        assert 0 < port < 65536
        assert make_binding_response(*answer)
        assert "%" not in host
