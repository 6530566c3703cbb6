"""What Linux' kernel says when links, addresses or routes change (rtnetlink(7)). PURE.

Only what is needed to see that something changed and what was lost on the way; the state itself is read elsewhere.
Broken messages end the reading, they are never an error: the next look finds what they meant. Called by interfaces.

Message, in the byte order of the machine: length u32 with this header, type u16, flags u16, sequence u32, port u32,
    payload, zeros up to a multiple of 4
    links:     family u8, pad u8, type u16, index i32, flags u32, change u32, attributes
    addresses: family u8, prefix u8, flags u8, scope u8, index u32, attributes
    attribute: length u16 with these four bytes, type u16, value, zeros up to a multiple of 4
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator

# RTMGRP_LINK, IPV4_IFADDR, IPV4_ROUTE, IPV6_IFADDR, IPV6_ROUTE
GROUPS = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
NEWLINK, DELLINK, NEWADDR, DELADDR, NEWROUTE, DELROUTE = 16, 17, 20, 21, 24, 25
CHANGES = frozenset({NEWLINK, DELLINK, NEWADDR, DELADDR, NEWROUTE, DELROUTE})

_IFF_RUNNING = 0x40
_IFLA_IFNAME, _IFA_ADDRESS, _IFA_LOCAL = 3, 1, 2
_MESSAGE = struct.Struct("=IHHII")
_LINK = struct.Struct("=BBHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, payload) of each message in one read; stops at what is broken."""
    at = 0
    while at + _MESSAGE.size <= len(data):
        length, kind, *_ = _MESSAGE.unpack_from(data, at)
        if length < _MESSAGE.size or at + length > len(data):
            return
        yield kind, data[at + _MESSAGE.size : at + length]
        at += (length + 3) & ~3


def host_of(payload: bytes) -> str:
    """The host in the payload of an address message; empty when there is none."""
    if len(payload) < _ADDRESS.size:
        return ""
    values = dict(_attributes(payload[_ADDRESS.size :]))
    packed = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS) or b""
    return str(ipaddress.ip_address(packed)) if len(packed) in (4, 16) else ""


def stopped_link(payload: bytes) -> str:
    """The name of a link that does not run, in the payload of a link message; empty when it runs."""
    if len(payload) < _LINK.size or _LINK.unpack_from(payload)[4] & _IFF_RUNNING:
        return ""
    name = dict(_attributes(payload[_LINK.size :])).get(_IFLA_IFNAME, b"")
    return name.rstrip(b"\0").decode("utf-8", "replace")


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size or at + length > len(data):
            return
        yield kind, data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
