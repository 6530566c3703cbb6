"""Datagrams to and from peers, whatever path they take. SHELL over udp_socket and relay_pool.

    down   a route's datagrams → its path (and the second one, in doubt) → cut to what the path carries → UDP or relay
    up     UDP or relay → QUIC, disco or STUN; pieces are put together again → the handlers, with the path they came by

QUIC sees one constant logical address and never learns of paths. What a path is worth is decided in proto/paths.py;
path_keeper moves routes. Link emulation sits here too, under everything. Called by endpoint, quic_driver, path_keeper.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from transport.config import TransportConfig
from transport.emulation import DelayLine, LinkModel
from transport.errors import Address, BindFailed
from transport.identity import PeerId
from transport.proto import segments, stun
from transport.proto.addresses import PathId, PathKind
from transport.proto.candidates import InterfaceAddress, kind_of
from transport.proto.disco_seal import MAGIC as DISCO_MAGIC
from transport.proto.path_config import RELAY_SIZE, UNPROBED_SIZE
from transport.route import Path, Route
from transport.udp_socket import UdpSocket, path_mtu

HEADER_BYTES = 48  # the larger of IPv4's and IPv6's, with UDP's
MAX_ORIGINS = 8192  # remembered (address → PathId); only a cache
SEGMENT = bytes([segments.MAGIC])
REPLAY_BATCH = 12  # datagrams; a relay passes a frame on when it has all of it, which takes a slow link a while
AUXILIARY_BUFFER = 64 * 1024  # bytes; such a socket carries probes, and at most one of them data later on


class RelaySender(Protocol):
    """What sends through relays; see relay_pool."""

    def send(self, url: str, peer: PeerId, datagrams: Sequence[bytes], disco: bool = False) -> bool:
        """Queue datagrams for a peer; False when that relay is not connected."""


@dataclass(slots=True)
class SocketHandlers:
    """Who takes what arrives. A `PathId` is the path by which it came; a `PeerId` is whom a relay names, unproven.

    on_quic: datagrams of one source, each as long as the number says but the last. on_disco: one sealed datagram.
    on_stun: one datagram that looks like STUN. on_drained: nothing more for now. on_writable: the socket has room.
    """

    on_quic: Callable[[bytes, int, PathId, PeerId | None], None]
    on_drained: Callable[[], None]
    on_writable: Callable[[], None]
    on_disco: Callable[[bytes, PathId, PeerId | None], None] = lambda *_: None
    on_stun: Callable[[bytes, Address], None] = lambda *_: None


@dataclass(slots=True)
class SocketCounters:
    """What came and led to nothing, since the socket was opened."""

    unknown: int = 0  # datagrams of no protocol spoken here
    relay_down: int = 0  # batches for a relay that was not connected
    socket_closed: int = 0  # batches for a socket of a punch that is over


@dataclass(slots=True)
class _Arrival:
    """What an emulated link holds on the way in."""

    data: bytes
    segment: int
    source: PathId
    sender: PeerId | None
    quic: bool


@dataclass(slots=True)
class _Departure:
    """… and on the way out."""

    datagram: bytes
    path: PathId
    peer: PeerId | None
    disco: bool = field(default=False)


class PeerSocket:
    """The node's sockets and relays, seen as a way to peers."""

    def __init__(self, listen: Address, config: TransportConfig, handlers: SocketHandlers) -> None:
        """Open the socket on the running loop. Raises BindFailed."""
        self._config, self._handlers = config, handlers
        self._loop = asyncio.get_running_loop()
        self.relays: RelaySender | None = None
        self.counters = SocketCounters()
        self._sizes: dict[Address, int] = {}
        self._origins: dict[Hashable, PathId] = {}
        self.interfaces: tuple[InterfaceAddress, ...] = ()
        self._auxiliary: dict[tuple[PeerId, int], UdpSocket] = {}
        self._pieces = segments.Reassembler()
        self._drained: asyncio.Handle | None = None
        self._ident = int.from_bytes(os.urandom(4), "big")  # not the pieces of a former run on the same port
        emulation = config.emulation
        self._out: DelayLine[_Departure] | None = None
        self._in: DelayLine[_Arrival] | None = None
        if emulation is not None:
            seeds = Random(emulation.seed)
            self._out = DelayLine(self._loop, LinkModel(emulation, Random(seeds.random())), self._emulated_out)
            self._in = DelayLine(self._loop, LinkModel(emulation, Random(seeds.random())), self._emulated_in)
        self.udp = UdpSocket(
            listen,
            config,
            on_quic=self._on_quic,
            on_other=self._on_other,
            on_drained=handlers.on_drained,
            on_writable=handlers.on_writable,
        )

    @property
    def address(self) -> Address:
        """As bound."""
        return self.udp.address

    @property
    def blocked(self) -> bool:
        """Whether the socket is full; produce no more until `on_writable`."""
        return self.udp.blocked

    def close(self) -> None:
        """Close all sockets."""
        for line in (self._out, self._in):
            if line is not None:
                line.close()
        for udp in self._auxiliary.values():
            udp.close()
        self._auxiliary.clear()
        if self._drained is not None:
            self._drained.cancel()
        self.udp.close()

    async def drain(self) -> None:
        """Wait until an emulated link has delivered what was sent; at once without one."""
        if self._out is not None:
            await asyncio.sleep(self._out.remaining())

    # -- paths

    def set_interfaces(self, interfaces: Sequence[InterfaceAddress]) -> None:
        """The addresses of this machine and its networks: they tell what kind of path leads to a peer."""
        self.interfaces = tuple(interfaces)

    def kind_of(self, address: Address) -> PathKind:
        """What a direct path to this address is called."""
        return kind_of(address, self.interfaces)

    def direct(self, address: Address) -> Path:
        """The path to an address from the node's socket, with the datagram size that it carries for certain."""
        kind = self.kind_of(address)
        size = self._loopback_size(address) if kind is PathKind.LOOPBACK else UNPROBED_SIZE
        return Path(kind, self._origin(address), size)

    def path_of(self, source: PathId) -> Path:
        """The way back to where a datagram came from."""
        if source.relay:
            return Path(PathKind.RELAY, source, RELAY_SIZE)
        path = self.direct(source.address)
        return path if not source.socket else replace(path, id=source, kind=PathKind.PUNCHED)

    def largest(self, path: Path) -> int:
        """The largest datagram that it makes sense to try on this path (bytes)."""
        return max(path.datagram_size, self._config.datagram_size)

    def quic_size(self, path: Path) -> int:
        """The datagram size for the life of a connection that begins on this path (bytes).

        Paths that carry less later on get its datagrams in pieces.
        """
        if path.kind is PathKind.LOOPBACK and path.datagram_size > self._config.datagram_size:
            return path.datagram_size
        return self._config.datagram_size

    def open_auxiliary(self, peer: PeerId, count: int) -> int:
        """Open more sockets towards one peer, numbered from 1; how many there are then (the system may allow fewer)."""
        config = replace(self._config, socket_buffer=AUXILIARY_BUFFER, gro=False)
        for number in range(1, count + 1):
            if (peer, number) in self._auxiliary:
                continue

            def quic(data: bytes, segment: int, source: Address, number: int = number) -> None:
                self._arrived(data, segment, self._origin(source, number), None, quic=True)

            def other(data: bytes, source: Address, number: int = number) -> None:
                self._other(data, self._origin(source, number))

            try:
                self._auxiliary[peer, number] = UdpSocket(
                    (self.address[0], 0),
                    config,
                    on_quic=quic,
                    on_other=other,
                    on_drained=self._handlers.on_drained,
                    on_writable=self._handlers.on_writable,
                )
            except BindFailed:  # out of file descriptors: fewer sockets punch less well, nothing else
                return number - 1
        return count

    def close_auxiliary(self, peer: PeerId, keep: frozenset[int] = frozenset()) -> None:
        """Close the sockets of a punch, except those that carry its path."""
        for owner, number in [key for key in self._auxiliary if key[0] == peer and key[1] not in keep]:
            self._auxiliary.pop((owner, number)).close()

    # -- sending

    def send(self, route: Route, datagrams: Sequence[bytes]) -> None:
        """Send on the route's path; never waits, never raises for the network's sake."""
        self._carry(route.path, route.peer, datagrams)
        if route.also is not None:
            self._carry(route.also, route.peer, datagrams)
        # Loopback loses nothing; memory that is held instead of used again costs a tenth of its speed.
        if route.kept and route.path.kind is not PathKind.LOOPBACK:
            route.note(datagrams, self._loop.time())

    def replay(self, route: Route, path: Path, since: float) -> None:
        """Send what was sent since then once more, on `path`: the path before has probably lost it."""
        datagrams = route.to_replay(since, self._loop.time())
        for start in range(0, len(datagrams), REPLAY_BATCH):
            self._carry(path, route.peer, datagrams[start : start + REPLAY_BATCH])

    def send_disco(self, path: PathId, peer: PeerId, datagram: bytes) -> None:
        """Send one sealed datagram, ahead of data where a relay knows classes."""
        if self._out is not None:
            self._out.push(_Departure(datagram, path, peer, disco=True), len(datagram))
        else:
            self._emit([datagram], path, peer, disco=True)

    def send_udp(self, datagram: bytes, address: Address) -> None:
        """Send one datagram that is for no peer, such as a question to a reflector, from the node's socket."""
        if self._out is not None:
            self._out.push(_Departure(datagram, PathId(address), None), len(datagram))
        else:
            self.udp.send([datagram], address)

    def _carry(self, path: Path, peer: PeerId | None, datagrams: Sequence[bytes]) -> None:
        limit = path.datagram_size
        if max(map(len, datagrams)) > limit:
            datagrams = segments.split_all(datagrams, limit, self._next_ident)
        if self._out is None:
            self._emit(datagrams, path.id, peer)
            return
        for datagram in datagrams:
            self._out.push(_Departure(datagram, path.id, peer), len(datagram))

    def _emit(self, datagrams: Sequence[bytes], path: PathId, peer: PeerId | None, disco: bool = False) -> None:
        if path.relay:
            if self.relays is None or peer is None or not self.relays.send(path.relay, peer, datagrams, disco):
                self.counters.relay_down += 1
        elif not path.socket:
            self.udp.send(datagrams, path.address)
        elif peer is not None and (auxiliary := self._auxiliary.get((peer, path.socket))) is not None:
            auxiliary.send(datagrams, path.address)
        else:
            self.counters.socket_closed += 1

    def _next_ident(self) -> int:
        self._ident = (self._ident + 1) & 0xFFFFFFFF
        return self._ident

    def _emulated_out(self, due: list[_Departure]) -> None:
        start = 0
        for at in range(1, len(due) + 1):
            first = due[start]
            if at == len(due) or (due[at].path, due[at].peer, due[at].disco) != (first.path, first.peer, first.disco):
                self._emit([one.datagram for one in due[start:at]], first.path, first.peer, first.disco)
                start = at

    # -- receiving

    def on_relayed(self, url: str, sender: PeerId, datagrams: Sequence[bytes], disco: bool) -> None:
        """Datagrams that a relay delivered; it names the sender, which proves nothing yet."""
        source = self._relay_origin(url)
        quic: list[bytes] = []
        for datagram in datagrams:
            if datagram[0] & 0x40:
                quic.append(datagram)
            elif datagram.startswith(DISCO_MAGIC):
                self._arrived(datagram, len(datagram), source, sender, quic=False)
            else:
                self.counters.unknown += 1
        for data, segment in _joined(quic):
            self._arrived(data, segment, source, sender, quic=True)
        # A frame costs far more than a datagram does: what the application answers to this one goes out with the
        # acknowledgements, and so does what came with other frames of the same read.
        if self._in is None and self._drained is None:
            self._drained = self._loop.call_soon(self._relays_drained)

    def _relays_drained(self) -> None:
        self._drained = None
        self._handlers.on_drained()

    def _on_quic(self, data: bytes, segment: int, address: Address) -> None:
        self._arrived(data, segment, self._origin(address), None, quic=True)

    def _on_other(self, data: bytes, address: Address) -> None:
        self._other(data, self._origin(address))

    def _other(self, data: bytes, source: PathId) -> None:
        if data.startswith(DISCO_MAGIC):
            self._arrived(data, len(data), source, None, quic=False)
        elif data.startswith(SEGMENT):
            whole = self._pieces.add(source, data, self._loop.time())
            if whole is not None and whole[0] & 0x40:
                self._arrived(whole, len(whole), source, None, quic=True)
        elif stun.is_stun(data):
            self._handlers.on_stun(data, source.address)
        else:
            self.counters.unknown += 1

    def _arrived(self, data: bytes, segment: int, source: PathId, sender: PeerId | None, *, quic: bool) -> None:
        if self._in is None:
            if quic:
                self._handlers.on_quic(data, segment, source, sender)
            else:
                self._handlers.on_disco(data, source, sender)
            return
        for at in range(0, len(data), segment):
            datagram = data[at : at + segment]
            self._in.push(_Arrival(datagram, len(datagram), source, sender, quic), len(datagram))

    def _emulated_in(self, arrived: list[_Arrival]) -> None:
        for one in arrived:
            if one.quic:
                self._handlers.on_quic(one.data, one.segment, one.source, one.sender)
            else:
                self._handlers.on_disco(one.data, one.source, one.sender)
        self._handlers.on_drained()

    def _origin(self, address: Address, number: int = 0) -> PathId:
        return self._remembered((address, number), lambda: PathId(address, socket=number))

    def _relay_origin(self, url: str) -> PathId:
        return self._remembered(url, lambda: PathId(relay=url))

    def _remembered(self, key: Hashable, make: Callable[[], PathId]) -> PathId:
        """The same object for the same path: whoever compares paths need not look inside."""
        origin = self._origins.get(key)
        if origin is None:
            if len(self._origins) >= MAX_ORIGINS:
                self._origins.clear()
            origin = self._origins[key] = make()
        return origin

    def _loopback_size(self, address: Address) -> int:
        # A loopback interface normally carries 64 KiB, but its MTU can be set lower: ask once per host.
        if self._config.emulation is not None:
            return self._config.datagram_size
        key = (address[0], 0)
        size = self._sizes.get(key)
        if size is None:
            mtu = path_mtu(address)
            wanted = self._config.loopback_datagram_size
            fits = mtu is not None and mtu >= wanted + HEADER_BYTES
            size = self._sizes[key] = wanted if fits else UNPROBED_SIZE
        return size


def _joined(datagrams: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Datagrams of one size put together, as GRO does: (bytes, size of each but the last)."""
    found: list[tuple[bytes, int]] = []
    start, end = 0, len(datagrams)
    while start < end:
        size, at = len(datagrams[start]), start + 1
        while at < end and len(datagrams[at]) == size:
            at += 1
        if at < end and len(datagrams[at]) < size:
            at += 1
        found.append((b"".join(datagrams[start:at]), size))
        start = at
    return found
