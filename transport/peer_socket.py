"""Datagrams to and from peers, whatever path they take. SHELL over udp_socket.

QUIC sees one constant logical address and never learns of paths; a `Route` says where a peer's datagrams really go,
and all connections to that peer share it. Today every path is a UDP address; relayed and punched paths plug in here.
A route moves only by `adopt`, after a handshake over the new path has authenticated the peer: the source address of a
datagram alone changes nothing. Link emulation sits here too, under everything. Called by quic_driver and endpoint.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from weakref import WeakValueDictionary

from transport.config import TransportConfig
from transport.emulation import DelayLine, LinkModel
from transport.errors import Address
from transport.identity import PeerId
from transport.udp_socket import OtherHandler, QuicHandler, UdpSocket, is_loopback, path_mtu

# RFC 8200, 5: every IPv6 link carries 1280 bytes; less 40 for its header and 8 for UDP's.
IPV6_SAFE_DATAGRAM = 1232
HEADER_BYTES = 48  # the larger of IPv4's and IPv6's, with UDP's


@dataclass(frozen=True, slots=True)
class Path:
    """One way to a peer."""

    kind: str  # "loopback", "direct-lan" or "direct-public"
    address: Address
    datagram_size: int  # UDP payload that it is known to carry


class Route:
    """Where one peer's datagrams go now. Shared by all connections to the peer; the path below may change."""

    __slots__ = ("__weakref__", "path", "peer")

    def __init__(self, path: Path, peer: PeerId | None = None) -> None:
        self.path = path
        self.peer = peer


class PeerSocket:
    """The node's socket, seen as a way to peers."""

    def __init__(
        self,
        listen: Address,
        config: TransportConfig,
        *,
        on_quic: QuicHandler,
        on_drained: Callable[[], None],
        on_writable: Callable[[], None],
        on_other: OtherHandler | None = None,
    ) -> None:
        """Open the socket on the running loop. Raises BindFailed."""
        self._config = config
        self._on_quic, self._on_drained = on_quic, on_drained
        self._routes: WeakValueDictionary[PeerId, Route] = WeakValueDictionary()
        self._sizes: dict[Address, int] = {}
        emulation = config.emulation
        self._out: DelayLine[tuple[bytes, Address]] | None = None
        self._in: DelayLine[tuple[bytes, int, Address]] | None = None
        if emulation is not None:
            loop = asyncio.get_running_loop()
            seeds = Random(emulation.seed)
            self._out = DelayLine(loop, LinkModel(emulation, Random(seeds.random())), self._emulated_out)
            self._in = DelayLine(loop, LinkModel(emulation, Random(seeds.random())), self._emulated_in)
        self.udp = UdpSocket(
            listen,
            config,
            on_quic=on_quic if self._in is None else self._delay_in,
            on_other=on_other or _ignore,
            on_drained=on_drained if self._in is None else _nothing,
            on_writable=on_writable,
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
        """Close the socket."""
        for line in (self._out, self._in):
            if line is not None:
                line.close()
        self.udp.close()

    async def drain(self) -> None:
        """Wait until an emulated link has delivered what was sent; at once without one."""
        if self._out is not None:
            await asyncio.sleep(self._out.remaining())

    def path_to(self, address: Address) -> Path:
        """The direct path to an address, with the datagram size that it carries for certain."""
        size = self._config.datagram_size
        if is_loopback(address):
            if self._config.emulation is None:
                size = self._loopback_size(address)
            return Path("loopback", address, size)
        if ":" in address[0]:
            size = min(size, IPV6_SAFE_DATAGRAM)
        return Path("direct-lan" if _is_private(address) else "direct-public", address, size)

    def adopt(self, peer: PeerId, route: Route, *, restarted: bool, in_use: bool) -> Route:
        """The route of `peer`, after a handshake over `route` has authenticated it.

        The new path becomes the peer's when it has no other connection (`in_use`), when the peer has restarted, or
        when the path so far does not carry the datagrams that this connection was set up with.
        """
        known = self._routes.get(peer)
        if known is None:
            route.peer = peer
            self._routes[peer] = route
            return route
        if restarted or not in_use or known.path.datagram_size < route.path.datagram_size:
            known.path = route.path
        return known

    def send(self, route: Route, datagrams: Sequence[bytes]) -> None:
        """Send on the route's path; never waits, never raises for the network's sake."""
        address = route.path.address
        if self._out is None:
            self.udp.send(datagrams, address)
            return
        for datagram in datagrams:
            self._out.push((datagram, address), len(datagram))

    def _loopback_size(self, address: Address) -> int:
        # A loopback interface normally carries 64 KiB, but its MTU can be set lower: ask once per host.
        key = (address[0], 0)
        size = self._sizes.get(key)
        if size is None:
            mtu = path_mtu(address)
            wanted = self._config.loopback_datagram_size
            fits = mtu is not None and mtu >= wanted + HEADER_BYTES
            size = self._sizes[key] = wanted if fits else self._config.datagram_size
        return size

    def _delay_in(self, data: bytes, segment: int, address: Address) -> None:
        assert self._in is not None
        for at in range(0, len(data), segment):
            datagram = data[at : at + segment]
            self._in.push((datagram, len(datagram), address), len(datagram))

    def _emulated_in(self, arrived: list[tuple[bytes, int, Address]]) -> None:
        for data, segment, address in arrived:
            self._on_quic(data, segment, address)
        self._on_drained()

    def _emulated_out(self, due: list[tuple[bytes, Address]]) -> None:
        start = 0
        for at in range(1, len(due) + 1):
            if at == len(due) or due[at][1] != due[start][1]:
                self.udp.send([datagram for datagram, _ in due[start:at]], due[start][1])
                start = at


def _is_private(address: Address) -> bool:
    try:
        return not ipaddress.ip_address(address[0].partition("%")[0]).is_global
    except ValueError:
        return False


def _ignore(_data: bytes, _address: Address) -> None:
    """Nothing but QUIC is spoken yet."""


def _nothing() -> None:
    """Emulated datagrams are answered when they arrive, not when they are read."""
