"""Messages to and from a router that maps ports: PCP (RFC 6887), NAT-PMP (RFC 6886), SSDP search for UPnP. PURE.

Not the exchange itself (times, tries, renewals: transport/port_mapping.py). Everything a router says is hostile: each
parser returns None for what is no answer of its kind and never raises; who sent it is the caller's check. Numbers are
big endian; both protocols share UDP port 5351 of the router.

NAT-PMP     ask:    version 0, opcode 0                                             external address
                    version 0, opcode 1, 0 u16, internal port u16, wanted external port u16, lifetime s u32
            answer: version 0, opcode + 128, result u16, epoch s u32, then IPv4 address 4
                    or internal port u16, external port u16, lifetime s u32
PCP         ask:    version 2, opcode u8, 0 u16, lifetime s u32, own address 16
            answer: version 2, opcode + 128, 0 u8, result u8, lifetime s u32, epoch s u32, 0 12
  MAP (1)   then in both: nonce 12, IP protocol u8, 0 3, internal port u16, external port u16, external address 16
  ANNOUNCE (0) has nothing more: its answer tells the epoch.
            IPv4 addresses stand in 16 bytes as ::ffff:a.b.c.d. Options after the fields are ignored.
An unknown version is answered in the versions that the router knows, with result 1.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

from transport.errors import Address

ROUTER_PORT = 5351
MAX_MESSAGE = 1100  # RFC 6887, 7
NONCE_BYTES = 12
UDP_PROTOCOL = 17
MAX_SSDP = 2048
MAX_LOCATION = 256

PMP_VERSION, PCP_VERSION = 0, 2
_ANSWER = 0x80
_PMP_ADDRESS, _PMP_MAP_UDP = 0, 1
_PCP_ANNOUNCE, _PCP_MAP = 0, 1
_PMP_ASK_MAP = struct.Struct(">BBHHHI")
_PMP_ADDRESS_ANSWER = struct.Struct(">BBHI4s")
_PMP_MAP_ANSWER = struct.Struct(">BBHIHHI")
_PCP_ASK = struct.Struct(">BBHI16s")
_PCP_ANSWER = struct.Struct(">BBBBII12x")
_PCP_MAPPING = struct.Struct(">12sB3xHH16s")

# What people should read instead of a number (RFC 6886, 3.5 and RFC 6887, 7.4).
_PMP_RESULTS = {1: "unsupported version", 2: "switched off in the router", 3: "the router has no network", 4: "full"}
_PCP_RESULTS = {
    1: "unsupported version",
    2: "switched off in the router",
    3: "malformed request",
    4: "unsupported opcode",
    7: "the router has no network",
    8: "full",
    9: "unsupported protocol",
    10: "too many mappings of this machine",
    11: "the router cannot give that external address",
    12: "another NAT stands between this machine and the router",
    13: "too many peers",
}


@dataclass(frozen=True, slots=True)
class PmpAddress:
    """NAT-PMP's answer about the external address; `host` is "" when `result` is not 0."""

    result: int
    epoch: int
    host: str


@dataclass(frozen=True, slots=True)
class PmpMapping:
    """NAT-PMP's answer to a mapping request. lifetime: seconds."""

    result: int
    epoch: int
    internal_port: int
    external_port: int
    lifetime: int


@dataclass(frozen=True, slots=True)
class PcpMapping:
    """PCP's answer to a MAP request. lifetime: seconds, of the error where `result` is not 0."""

    result: int
    epoch: int
    lifetime: int
    nonce: bytes
    internal_port: int
    external: Address


def pmp_ask_address() -> bytes:
    """NAT-PMP: what is the external address?"""
    return bytes((PMP_VERSION, _PMP_ADDRESS))


def pmp_ask_mapping(port: int, wanted: int, lifetime: int) -> bytes:
    """NAT-PMP: map UDP `port`; lifetime 0 removes the mapping (then `wanted` must be 0)."""
    return _PMP_ASK_MAP.pack(PMP_VERSION, _PMP_MAP_UDP, 0, port, wanted, lifetime)


def pcp_ask_mapping(own_host: str, nonce: bytes, port: int, wanted: Address, lifetime: int) -> bytes:
    """PCP: map UDP `port` of this machine, whose address towards the router is `own_host`.

    wanted: the external address we would like, ("0.0.0.0", 0) for any. lifetime: seconds, 0 removes the mapping that
    was made with this nonce.
    """
    head = _PCP_ASK.pack(PCP_VERSION, _PCP_MAP, 0, lifetime, _in_16_bytes(own_host))
    return head + _PCP_MAPPING.pack(nonce, UDP_PROTOCOL, port, wanted[1], _in_16_bytes(wanted[0]))


def pcp_ask_epoch(own_host: str) -> bytes:
    """PCP ANNOUNCE: are you there, and since when?"""
    return _PCP_ASK.pack(PCP_VERSION, _PCP_ANNOUNCE, 0, 0, _in_16_bytes(own_host))


def parse_pmp_address(data: bytes) -> PmpAddress | None:
    """The answer to `pmp_ask_address`; an error may come without the address."""
    if not _is(data, PMP_VERSION, _PMP_ADDRESS, 8):
        return None
    result, epoch = struct.unpack_from(">HI", data, 2)
    if result:
        return PmpAddress(result, epoch, "")
    if len(data) < _PMP_ADDRESS_ANSWER.size:
        return None
    return PmpAddress(0, epoch, str(ipaddress.IPv4Address(data[8:12])))


def parse_pmp_mapping(data: bytes) -> PmpMapping | None:
    """The answer to `pmp_ask_mapping`."""
    if not _is(data, PMP_VERSION, _PMP_MAP_UDP, _PMP_MAP_ANSWER.size):
        return None
    _, _, result, epoch, internal, external, lifetime = _PMP_MAP_ANSWER.unpack_from(data)
    if not result and lifetime and not external:
        return None
    return PmpMapping(result, epoch, internal, external, lifetime)


def parse_pcp_mapping(data: bytes) -> PcpMapping | None:
    """The answer to `pcp_ask_mapping`. The caller compares nonce and internal port with its request."""
    if not _is(data, PCP_VERSION, _PCP_MAP, _PCP_ANSWER.size + _PCP_MAPPING.size):
        return None
    _, _, _, result, lifetime, epoch = _PCP_ANSWER.unpack_from(data)
    nonce, protocol, internal, external, host = _PCP_MAPPING.unpack_from(data, _PCP_ANSWER.size)
    if protocol != UDP_PROTOCOL or (not result and lifetime and not external):
        return None
    return PcpMapping(result, epoch, lifetime, nonce, internal, (_of_16_bytes(host), external))


def parse_pcp_epoch(data: bytes) -> int | None:
    """The epoch in the answer to `pcp_ask_epoch`, errors included: seconds since the router lost its mappings."""
    if not _is(data, PCP_VERSION, _PCP_ANNOUNCE, _PCP_ANSWER.size):
        return None
    return int(_PCP_ANSWER.unpack_from(data)[5])


def refuses_version(data: bytes, asked: int) -> bool:
    """Does the router say, in another version than `asked`, that it does not know that one?"""
    if not 4 <= len(data) <= MAX_MESSAGE or not data[1] & _ANSWER or data[0] == asked:
        return False
    return (data[3] if data[0] else int.from_bytes(data[2:4], "big")) == 1


def pmp_reason(result: int) -> str:
    """What a NAT-PMP result means, for people."""
    return _PMP_RESULTS.get(result, f"error {result}")


def pcp_reason(result: int) -> str:
    """What a PCP result means, for people."""
    return _PCP_RESULTS.get(result, f"error {result}")


class EpochClock:
    """Notices that a router lost its mappings: its epoch must run as our clock does (RFC 6887, 8.5)."""

    def __init__(self) -> None:
        self._epoch = 0
        self._now = 0.0
        self._known = False

    def lost(self, epoch: int, now: float) -> bool:
        """Take an epoch that came at `now` (s, monotonic); True when the router started anew since the last one."""
        before, then, known = self._epoch, self._now, self._known
        self._epoch, self._now, self._known = epoch, now, True
        if not known:
            return False
        theirs, ours = epoch - before, now - then
        return theirs < -1 or theirs + 2 < ours - ours / 16 or ours + 2 < theirs - theirs / 16


def ssdp_search(kind: str) -> bytes:
    """An M-SEARCH for devices of `kind` (a URN), answered within a second (UPnP Device Architecture 1.1, 1.3.2)."""
    lines = (
        "M-SEARCH * HTTP/1.1",
        "HOST: 239.255.255.250:1900",
        'MAN: "ssdp:discover"',
        "MX: 1",
        f"ST: {kind}",
        "",
        "",
    )
    return "\r\n".join(lines).encode("ascii")


def parse_ssdp_location(data: bytes) -> str | None:
    """The description's URL in an answer to `ssdp_search`; None when it is no such answer."""
    if len(data) > MAX_SSDP or not data.isascii():
        return None
    status, *lines = data.decode("ascii").split("\r\n")
    if not status.startswith("HTTP/1.1 200"):
        return None
    headers = {name.strip().lower(): value.strip() for name, colon, value in (x.partition(":") for x in lines) if colon}
    location = headers.get("location", "")
    if "InternetGatewayDevice" not in headers.get("st", "") or len(location) > MAX_LOCATION:
        return None
    return location if location.startswith("http://") and location.isprintable() else None


def _is(data: bytes, version: int, opcode: int, size: int) -> bool:
    return size <= len(data) <= MAX_MESSAGE and data[0] == version and data[1] == opcode | _ANSWER


def _in_16_bytes(host: str) -> bytes:
    address = ipaddress.ip_address(host)
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed


def _of_16_bytes(data: bytes) -> str:
    address = ipaddress.IPv6Address(data)
    return str(address.ipv4_mapped or address)
