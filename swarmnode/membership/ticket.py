"""The text that lets a device into a swarm: copied from one terminal to another. Pure.

Not the judgement whether it still counts (judge.py and the authority). Written and read by `cli/ticket.py` and
`cli/up.py`. Whoever has a ticket can join: it is printed only where the user asked for it, and never logged.

Text:     "swarm1", then the data in lower-case base32 (RFC 4648) without padding. Case does not matter, and white space
          anywhere is ignored: terminals and mails break long lines.
Data:     version u8 1, length u16 of the whole data (big endian, as all numbers),
          invitation as in documents.py without its key, which follows from the secret, 118 bytes; secret 32;
          relays: count u8 ≤ 3, each length u8, URL (ASCII);
          peers: count u8 ≤ 4, each key 32, count u8 ≤ 6, addresses: family u8 4 or 6, host 4 or 16, port u16;
          or family 0, length u8, a host name (ASCII), port u16;
          checksum 4: SHA-256("swarm ticket" + all before)[:4], in this place in every version
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import struct
from dataclasses import dataclass, field

from swarmnode.errors import BadDocument, BadTicket
from swarmnode.membership.documents import ID_BYTES, SECRET_BYTES, Invitation, JoinProof
from transport.errors import Address
from transport.identity import KEY_BYTES, Identity, PeerId
from transport.proto.relay_url import BadRelayUrl, parse_relay_url

PREFIX = "swarm"
VERSION = 1
MAX_RELAYS = 3
MAX_PEERS = 4
MAX_ADDRESSES = 6  # of one peer
MAX_BYTES = 2048  # of data; a usual ticket has 250
MAX_TEXT = len(PREFIX) + 1 + (MAX_BYTES * 8 + 4) // 5
MAX_PASTED = 4 * MAX_TEXT  # with white space

_CHECKSUM_BYTES = 4
_HEAD = struct.Struct(">BH")
_PORT = struct.Struct(">H")
_KEY_AT = KEY_BYTES + ID_BYTES  # where the key stands in an invitation
_SHORT_INVITATION = Invitation.SIZE - KEY_BYTES
_FAMILY_BYTES = {4: 4, 6: 16}
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?", re.ASCII)
_START = re.compile(rf"{PREFIX}([0-9])")


@dataclass(frozen=True, slots=True)
class BootstrapPeer:
    """A member to ask first, and where it may be; without addresses it is reached through the relays.

    Hosts are IP literals or names, at most MAX_ADDRESSES.
    """

    peer: PeerId
    addresses: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Ticket:
    """An invitation, its secret (32 bytes), and where the swarm is. `str()` is the text; `repr()` hides the secret.

    Raises ValueError where it cannot be written: too many relays or peers, hosts or URLs that are none.
    """

    invitation: Invitation
    secret: bytes = field(repr=False)
    relays: tuple[str, ...] = ()
    peers: tuple[BootstrapPeer, ...] = ()

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"a ticket's secret has {SECRET_BYTES} bytes, not {len(self.secret)}")
        if len(self.relays) > MAX_RELAYS or len(self.peers) > MAX_PEERS:
            raise ValueError(f"{len(self.relays)} relays, {len(self.peers)} peers; {MAX_RELAYS} and {MAX_PEERS} fit")
        if any(len(known.addresses) > MAX_ADDRESSES for known in self.peers):
            raise ValueError(f"a peer with more than {MAX_ADDRESSES} addresses")
        if Identity.generate(self.secret).peer_id.raw != self.invitation.key:
            raise ValueError("the secret is not this invitation's")
        size = len(_encode(self))
        if size > MAX_BYTES:
            raise ValueError(f"a ticket of {size} bytes, at most {MAX_BYTES} are possible")

    @property
    def swarm(self) -> PeerId:
        """Which swarm it is for."""
        return self.invitation.swarm

    def prove(self, peer: PeerId) -> JoinProof:
        """That `peer` has this ticket."""
        return JoinProof.make(self.invitation, self.secret, peer)

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """The ticket that a text is. Raises BadTicket with one line that says what is wrong with it."""
        return _parse(text)

    def __str__(self) -> str:
        return f"{PREFIX}{VERSION}{_text(_encode(self))}"


def looks_like_ticket(text: str) -> bool:
    """Was a ticket meant, whole or not? Tells it from a file name and a prefix of an id."""
    return _START.match(text.strip().lower()) is not None


def _parse(text: str) -> Ticket:
    if len(text) > MAX_PASTED:
        raise BadTicket(f"a ticket has at most {MAX_TEXT} characters, this has {len(text)}; copy the ticket alone")
    text = "".join(text.split()).lower()
    if not text:
        raise BadTicket("the ticket is empty; copy it from the line that starts with swarm1")
    if len(text) > MAX_TEXT:
        raise BadTicket(f"a ticket has at most {MAX_TEXT} characters, this has {len(text)}; copy the ticket alone")
    version = _START.match(text)
    if version is None:
        if f"{PREFIX}{VERSION}".startswith(text):
            raise BadTicket(f"the ticket is cut short after {len(text)} characters; copy it whole")
        raise BadTicket(f"{text[:20]!r}… is no ticket: one starts with {PREFIX}{VERSION}")
    if int(version[1]) != VERSION:
        raise _other_version(int(version[1]))
    body = text[len(PREFIX) + 1 :]
    if not re.fullmatch("[a-z2-7]*", body, re.ASCII):
        wrong = next(c for c in body if not re.fullmatch("[a-z2-7]", c, re.ASCII))
        raise BadTicket(f"a ticket has only the characters a-z and 2-7, this has {wrong!r}; copy it again")
    data = _bytes(body)
    if len(data) < _HEAD.size + _CHECKSUM_BYTES:
        raise BadTicket(f"the ticket is cut short after {len(text)} characters; copy it whole")
    if _checksum(data[:-_CHECKSUM_BYTES]) != data[-_CHECKSUM_BYTES:] or _text(data) != body:
        raise _not_intact(data, text)
    if data[0] != VERSION:
        raise _other_version(data[0])
    try:
        if _HEAD.unpack_from(data)[1] != len(data):
            raise ValueError("its length is wrong")
        ticket = Ticket(*_decode(data[_HEAD.size : -_CHECKSUM_BYTES]))
    except (ValueError, BadDocument, struct.error, IndexError) as error:
        raise BadTicket(f"the ticket is damaged ({error}); ask for a new one") from None
    if not ticket.invitation.is_genuine:
        raise BadTicket("the ticket is a forgery: the swarm that it names did not sign it")
    return ticket


def _text(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _bytes(body: str) -> bytes:
    """The inverse. What is left over beyond whole bytes is dropped; `_text` of the result shows the difference."""
    usable = body[: len(body) - (len(body) % 8 in (1, 3, 6))]
    return base64.b32decode(usable.upper() + "=" * (-len(usable) % 8))


def _not_intact(data: bytes, text: str) -> BadTicket:
    """Why the checksum is wrong. The length stands at the front: likely right even if the end is missing."""
    version, length = _HEAD.unpack_from(data)
    if version == VERSION and len(data) < length <= MAX_BYTES:
        whole = len(PREFIX) + 1 + (length * 8 + 4) // 5
        return BadTicket(f"the ticket is cut short: {len(text)} of {whole} characters; copy it whole")
    if version == VERSION and len(data) > length:
        return BadTicket(f"the ticket is too long: {len(text)} characters, more than one ticket; copy one alone")
    return BadTicket("the checksum of the ticket is wrong: a character was mistyped; copy it again")


def _other_version(version: int) -> BadTicket:
    return BadTicket(
        f"the ticket is of version {version}, this program reads version {VERSION}; run the same swarmnode on both"
    )


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(b"swarm ticket" + data).digest()[:_CHECKSUM_BYTES]


def _encode(ticket: Ticket) -> bytes:
    invitation = ticket.invitation.encode()
    parts = [invitation[:_KEY_AT], invitation[_KEY_AT + KEY_BYTES :], ticket.secret, bytes([len(ticket.relays)])]
    for relay in ticket.relays:
        try:
            url = parse_relay_url(relay).text.encode("ascii")
        except BadRelayUrl as error:
            raise ValueError(str(error)) from None
        parts += (_length(url), url)
    parts.append(bytes([len(ticket.peers)]))
    for known in ticket.peers:
        parts += (known.peer.raw, bytes([len(known.addresses)]), *map(_encode_address, known.addresses))
    body = b"".join(parts)
    data = _HEAD.pack(VERSION, _HEAD.size + len(body) + _CHECKSUM_BYTES) + body
    return data + _checksum(data)


def _decode(data: bytes) -> tuple[Invitation, bytes, tuple[str, ...], tuple[BootstrapPeer, ...]]:
    """What stands between head and checksum; raises BadDocument, ValueError, struct.error, IndexError."""
    secret = data[_SHORT_INVITATION : _SHORT_INVITATION + SECRET_BYTES]
    key = Identity.generate(secret).peer_id.raw if len(secret) == SECRET_BYTES else b""
    invitation = Invitation.decode(data[:_KEY_AT] + key + data[_KEY_AT:_SHORT_INVITATION])
    count, at = data[_SHORT_INVITATION + SECRET_BYTES], _SHORT_INVITATION + SECRET_BYTES + 1
    _at_most(count, MAX_RELAYS, "relays")
    relays = []
    for _ in range(count):
        end = at + 1 + data[at]
        relays.append(data[at + 1 : end].decode("ascii"))
        at = end
    count, at = data[at], at + 1
    _at_most(count, MAX_PEERS, "peers")
    peers = []
    for _ in range(count):
        if at + KEY_BYTES >= len(data):
            raise ValueError("a peer is cut short")
        peer, of, at = PeerId(data[at : at + KEY_BYTES]), data[at + KEY_BYTES], at + KEY_BYTES + 1
        _at_most(of, MAX_ADDRESSES, "addresses")
        addresses = []
        for _ in range(of):
            address, at = _decode_address(data, at)
            addresses.append(address)
        peers.append(BootstrapPeer(peer, tuple(addresses)))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")
    return invitation, secret, tuple(relays), tuple(peers)


def _encode_address(address: Address) -> bytes:
    host, port = address
    if not 0 < port < 1 << 16:
        raise ValueError(f"{port} is no port")
    try:
        literal = ipaddress.ip_address(host.partition("%")[0])  # an interface's name means nothing elsewhere
    except ValueError:
        if not _HOST_NAME.fullmatch(host.lower()):
            raise ValueError(f"{host[:80]!r} is neither a host name nor an IP address") from None
        name = host.lower().encode("ascii")
        return b"\0" + _length(name) + name + _PORT.pack(port)
    return bytes([literal.version]) + literal.packed + _PORT.pack(port)


def _decode_address(data: bytes, at: int) -> tuple[Address, int]:
    """(address, where it ends); `_encode_address` judges names and ports once more when the ticket is made."""
    family, at = data[at], at + 1
    if family:
        end = at + _FAMILY_BYTES.get(family, 0)
        host = str(ipaddress.ip_address(data[at:end]))
    else:
        end = at + 1 + data[at]
        host = data[at + 1 : end].decode("ascii")
    port: int = _PORT.unpack_from(data, end)[0]
    return (host, port), end + _PORT.size


def _length(text: bytes) -> bytes:
    _at_most(len(text), 255, "characters of a host or URL")
    return bytes([len(text)])


def _at_most(count: int, most: int, what: str) -> None:
    if count > most:
        raise ValueError(f"{count} {what}, at most {most} are possible")
