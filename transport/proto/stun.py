"""STUN Binding (RFC 8489): asking which address a datagram of ours comes from, and answering that. PURE.

Not a STUN agent: no credentials, no error answers, no retransmission; whoever sends decides when and how often. On
the node's socket these are the datagrams whose first byte is 0x00 or 0x01 and that carry the magic cookie. Called by
surroundings and netcheck (asking) and by the relay's reflector (answering).

Message:    type u16 (0x0001 request, 0x0101 success), length u16 of what follows the header, cookie 0x2112A442,
            transaction id 12, attributes; numbers are big endian
Attribute:  type u16, length u16, value, zeros up to a multiple of 4; types below 0x8000 must be understood
    MAPPED-ADDRESS     0x0001  zero u8, family u8 (1 IPv4, 2 IPv6), port u16, address 4 or 16
    CHANGE-REQUEST     0x0003  u32 flags: 0x2 answer from your other port, 0x4 from your other IP (RFC 5780, 7.2)
    XOR-MAPPED-ADDRESS 0x0020  the same with the port ⊕ cookie's upper half and the address ⊕ (cookie, transaction id)
    filler             0xFF21  zeros. Optional to understand and unregistered; PADDING of RFC 5780 must be understood,
                               so public servers would refuse it

A request is at least as long as any answer, so a reflector never amplifies a forged source.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address

from transport.errors import Address

MAGIC_COOKIE = 0x2112A442
TRANSACTION_BYTES = 12
HEADER_BYTES = 20
MAX_RESPONSE_BYTES = HEADER_BYTES + 4 + 20  # what make_binding_response gives for IPv6; 32 for IPv4
DEFAULT_REQUEST_BYTES = 64
MAX_MESSAGE_BYTES = 9_216  # requests as long as a jumbo frame measure a path
MAX_ATTRIBUTES = 32  # real servers send up to ten; a hostile message of empty ones must not keep us busy

_REQUEST = 0x0001
_SUCCESS = 0x0101
_MAPPED_ADDRESS = 0x0001
_CHANGE_REQUEST = 0x0003
_XOR_MAPPED_ADDRESS = 0x0020
_FILLER = 0xFF21
_OPTIONAL = 0x8000  # types from here on may be ignored
_CHANGE_PORT = 0x2
_CHANGE_IP = 0x4
_FAMILY_OF = {4: 1, 6: 2}
_ADDRESS_BYTES = {1: 4, 2: 16}  # by family

_HEADER = struct.Struct(">HHI12s")
_ATTRIBUTE = struct.Struct(">HH")
_ADDRESS = struct.Struct(">xBH")
_FLAGS = struct.Struct(">I")


def is_stun(data: bytes) -> bool:
    """Whether a datagram is a STUN message by its first byte and cookie; the rest may still be broken."""
    return len(data) >= HEADER_BYTES and data[0] <= 1 and data[4:8] == b"\x21\x12\xa4\x42"


def binding_request(transaction: bytes, pad_to: int = DEFAULT_REQUEST_BYTES, *, change_port: bool = False) -> bytes:
    """A Binding request of `pad_to` bytes, rounded down to a multiple of 4 as STUN asks.

    `change_port` asks the reflector to answer from its other port. Raises ValueError when the transaction id has not
    12 bytes or `pad_to` is below MAX_RESPONSE_BYTES or above MAX_MESSAGE_BYTES.
    """
    if len(transaction) != TRANSACTION_BYTES:
        raise ValueError(f"a STUN transaction id has {TRANSACTION_BYTES} bytes, not {len(transaction)}")
    if not MAX_RESPONSE_BYTES <= pad_to <= MAX_MESSAGE_BYTES:
        raise ValueError(f"a STUN request of {pad_to} bytes; {MAX_RESPONSE_BYTES} to {MAX_MESSAGE_BYTES} are possible")
    attributes = _attribute(_CHANGE_REQUEST, _FLAGS.pack(_CHANGE_PORT)) if change_port else b""
    filler = (pad_to & ~3) - HEADER_BYTES - len(attributes) - _ATTRIBUTE.size
    return _message(_REQUEST, transaction, attributes + _attribute(_FILLER, bytes(filler)))


def parse_binding_request(data: bytes) -> bytes | None:
    """The transaction id of a request that deserves an answer; None for everything else.

    None also for a request that is shorter than the longest answer, that asks for something which must be understood
    and is not, or that wants the answer from another IP: an answer from the wrong place would mislead the asker.
    """
    parsed = _parse(data, _REQUEST)
    if parsed is None or len(data) < MAX_RESPONSE_BYTES:
        return None
    transaction, attributes = parsed
    for kind, value in attributes:
        if kind == _CHANGE_REQUEST:
            if len(value) != _FLAGS.size or _FLAGS.unpack(value)[0] & _CHANGE_IP:
                return None
        elif kind < _OPTIONAL:
            return None
    return transaction


def wants_other_port(data: bytes) -> bool:
    """Whether a request that parse_binding_request took asks for an answer from the reflector's other port."""
    parsed = _parse(data, _REQUEST)
    return parsed is not None and any(
        kind == _CHANGE_REQUEST and len(value) == _FLAGS.size and bool(_FLAGS.unpack(value)[0] & _CHANGE_PORT)
        for kind, value in parsed[1]
    )


def make_binding_response(transaction: bytes, address: Address) -> bytes:
    """The success answer that tells the asker its `address`: 32 bytes for IPv4, 44 for IPv6.

    Raises ValueError when the host is no IP address or the transaction id has not 12 bytes.
    """
    if len(transaction) != TRANSACTION_BYTES:
        raise ValueError(f"a STUN transaction id has {TRANSACTION_BYTES} bytes, not {len(transaction)}")
    host, port = _plain(ip_address(address[0].partition("%")[0])), address[1]
    value = _ADDRESS.pack(_FAMILY_OF[host.version], port ^ MAGIC_COOKIE >> 16) + _xor(host.packed, transaction)
    return _message(_SUCCESS, transaction, _attribute(_XOR_MAPPED_ADDRESS, value))


def parse_binding_response(data: bytes) -> tuple[bytes, Address] | None:
    """(transaction id, our address as the server saw it) of a success answer; None for everything else.

    The caller checks that it asked with this transaction id. Attributes that we do not know are skipped, whatever
    their number: public servers add theirs. MAPPED-ADDRESS counts only without XOR-MAPPED-ADDRESS, because some
    routers rewrite addresses that they recognise in payloads.
    """
    parsed = _parse(data, _SUCCESS)
    if parsed is None:
        return None
    transaction, attributes = parsed
    plain: Address | None = None
    for kind, value in attributes:
        if kind == _XOR_MAPPED_ADDRESS:
            address = _address(value, transaction)
            return None if address is None else (transaction, address)
        if kind == _MAPPED_ADDRESS and plain is None:
            plain = _address(value, None)
    return None if plain is None else (transaction, plain)


def _parse(data: bytes, wanted: int) -> tuple[bytes, list[tuple[int, bytes]]] | None:
    if not (HEADER_BYTES <= len(data) <= MAX_MESSAGE_BYTES):
        return None
    kind, length, cookie, transaction = _HEADER.unpack_from(data)
    if kind != wanted or cookie != MAGIC_COOKIE or length % 4 or length != len(data) - HEADER_BYTES:
        return None
    attributes = list(_attributes(data))
    if len(attributes) > MAX_ATTRIBUTES or (attributes and attributes[-1][0] < 0):
        return None
    return transaction, attributes


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """At most MAX_ATTRIBUTES + 1 of (type, value); the type −1 says that the rest is broken."""
    at = HEADER_BYTES
    for _ in range(MAX_ATTRIBUTES + 1):
        if at == len(data):
            return
        kind, length = _ATTRIBUTE.unpack_from(data, at)  # four bytes are there: every length is a multiple of four
        at += _ATTRIBUTE.size
        if at + length > len(data):
            yield -1, b""
            return
        yield kind, data[at : at + length]
        at += length + 3 & ~3


def _address(value: bytes, transaction: bytes | None) -> Address | None:
    """The address in a value, un-XORed when a transaction id is given; None when nobody can have it."""
    if len(value) < _ADDRESS.size:
        return None
    family, port = _ADDRESS.unpack_from(value)
    packed = value[_ADDRESS.size :]
    if len(packed) != _ADDRESS_BYTES.get(family):
        return None
    if transaction is not None:
        port ^= MAGIC_COOKIE >> 16
        packed = _xor(packed, transaction)
    host = _plain(ip_address(packed))
    if not port or host.is_unspecified or host.is_multicast:
        return None
    return str(host), port


def _plain(host: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """IPv4 as such where a dual-stack socket shows ::ffff:a.b.c.d."""
    return (host.ipv4_mapped or host) if isinstance(host, IPv6Address) else host


def _xor(packed: bytes, transaction: bytes) -> bytes:
    mask = MAGIC_COOKIE.to_bytes(4, "big") + transaction
    size = len(packed)
    return (int.from_bytes(packed, "big") ^ int.from_bytes(mask[:size], "big")).to_bytes(size, "big")


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(kind, len(value)) + value + bytes(-len(value) % 4)


def _message(kind: int, transaction: bytes, attributes: bytes) -> bytes:
    return _HEADER.pack(kind, len(attributes), MAGIC_COOKIE, transaction) + attributes
