"""A node's QUIC endpoint: bind, dial, accept, ping, close. SHELL.

The composer of the package: reach (socket, paths, relays) below quic_driver below connection; every task, timer and
connection has its owner here, in `dialer.py`, in `acceptor.py`, in reach or in a Dial. What those two share is who may
connect (`access.py`), how a connection is made (`connection_setup.py`) and which there are (`connection_table.py`).
Works on the one asyncio loop it was bound on; nothing is thread-safe. Called by nodes.

Nothing passes before both sides are authenticated: the client compares the key in the server's certificate with the
PeerId that it dialled; the server reads the client's proof (signed for this connection) before anything else, verifies
it, asks `admit`, and answers ACCEPT or closes with a reason. A dial returns after ACCEPT. A first request may travel
with the proof (`dial_with`); the server's application sees it only after ACCEPT, and never when it refuses.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from transport.acceptor import Acceptor
from transport.access import AccessControl, Admit, Gate
from transport.config import TransportConfig
from transport.connection import Connection
from transport.connection_setup import ConnectionSetup
from transport.connection_table import ConnectionTable
from transport.dialer import Dialer
from transport.dialing import Key, Resolved, resolve
from transport.errors import (
    Address,
    ConnectionClosed,
    EndpointClosed,
    TransportError,
    Unreachable,
)
from transport.identity import Identity, PeerId
from transport.news import News, OnNews, nobody_listens
from transport.path_keeper import Switch
from transport.path_samples import PathSampler
from transport.peer_socket import PeerSocket, SocketHandlers
from transport.proto.addresses import PathId
from transport.proto.control_frames import BOOT_ID_BYTES, Authenticate
from transport.proto.path_policy import Decision, PathView
from transport.quic_driver import DriverCounters, Link, QuicDriver
from transport.quic_engine import create_factory
from transport.reach import Reach, RelayView
from transport.route import Path
from transport.stream import Stream

UNKNOWN_RTT = 0.15  # seconds, of a path that nobody has measured; see PathConfig.first_rtt
TICKS_PER_KEEP_ALIVE = 4
SAMPLED_AT_ONCE = 32  # peers; each takes about 0.1 ms


@dataclass(frozen=True, slots=True)
class Pinged:
    """What one ping showed: the path, its round-trip time in seconds, and why it is this path."""

    path: Path
    rtt: float
    reason: str


class Endpoint:
    """One UDP socket, one identity, any number of connections in both roles. Made by `bind`."""

    def __init__(
        self,
        identity: Identity,
        config: TransportConfig,
        listen: Address,
        admit: Admit | None,
        gate: Gate | None = None,
    ) -> None:
        self.peer_id = identity.peer_id
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._access, self._table = AccessControl(admit, gate), ConnectionTable()
        self._factory = create_factory(identity, config)
        self._driver = QuicDriver(self._incoming)
        self._reach = Reach(
            identity,
            listen,
            config,
            SocketHandlers(self._driver.on_quic, self._driver.on_drained, self._driver.on_writable),
            admits=self._access.admits,
            on_switch=self._switched,
            on_path=self._path_found,
            on_news=self._tell,
        )
        self._socket, self._paths = self._reach.socket, self._reach.paths
        self._driver.socket, self._driver.paths = self._socket, self._paths
        self._sampler = PathSampler()
        self.on_news: OnNews = nobody_listens  # what people may want to see; set it after `bind`
        self._boot_id = boot_id = os.urandom(BOOT_ID_BYTES)
        setup = ConnectionSetup(self, config, self._factory, self._driver, self._reach, self._table)
        self._dialer = Dialer(identity, boot_id, setup, self._table, self._access, self._reach, self._settle_parked)
        self._acceptor = Acceptor(self.peer_id, boot_id, config, setup, self._table, self._access, self._dialer.dials)
        self._ticker = self._loop.call_later(config.keep_alive / TICKS_PER_KEEP_ALIVE, self._tick)

    @classmethod
    async def bind(
        cls,
        identity: Identity,
        config: TransportConfig = TransportConfig(),  # noqa: B008 - frozen
        *,
        listen: Address = ("0.0.0.0", 0),
        admit: Admit | None = None,
        gate: Gate | None = None,
    ) -> Endpoint:
        """Open the socket on the running loop. `admit` decides which authenticated peers may connect (all, if None),
        or `gate` does, which also sees what they show.

        Raises BindFailed, EngineFault. Listening on an IPv6 address such as "::" serves IPv4 too.
        """
        endpoint = cls(identity, config, listen, admit, gate)
        try:
            await asyncio.to_thread(endpoint._factory.warm_up)
            await endpoint._reach.start()
        except BaseException:
            await endpoint.close()
            raise
        return endpoint

    @property
    def address(self) -> Address:
        """Where the socket is bound; the host may be the unspecified address."""
        return self._socket.address

    @property
    def socket(self) -> PeerSocket:
        """The socket under QUIC, for its counters and for path machinery."""
        return self._socket

    def connections(self) -> list[Connection]:
        """All live, authenticated connections."""
        return list(self._table.live.values())

    def paths(self, peer: PeerId) -> list[PathView]:
        """Every path to a peer that is known, with what was measured."""
        return self._paths.views(peer)

    def decision(self, peer: PeerId) -> Decision | None:
        """Which path the peer's datagrams take now, and why; None for a peer that is not known."""
        return self._paths.decision(peer)

    def relays(self) -> list[RelayView]:
        """The relays of this node, home first."""
        return self._reach.relay_views()

    @property
    def quic_counters(self) -> DriverCounters:
        """What came for QUIC and led to nothing."""
        return replace(self._driver.counters)

    @property
    def reach(self) -> Reach:
        """What finds and keeps paths, for those who show it."""
        return self._reach

    async def ping(self, peer: PeerId, addresses: Sequence[Address] = (), *, timeout: float = 10.0) -> Pinged:
        """One ping over the path that the peer's datagrams take now; finds a path first where there is none.

        Needs no connection. Raises Unreachable, EndpointClosed.
        """
        if self._table.closed:
            raise EndpointClosed
        resolved = Resolved([], {})
        try:
            async with asyncio.timeout(timeout):
                resolved = await resolve(addresses, self.address)
                if self._reach.relays is None and not resolved.usable and self._paths.route(peer) is None:
                    raise Unreachable(peer, (), timeout, skipped=resolved.skipped)
                self._paths.want(peer, resolved.usable)
                path, rtt = await self._paths.ping(peer, timeout)
        except TimeoutError:
            raise Unreachable(peer, resolved.usable, timeout, self._reach.no_path_to(peer), resolved.skipped) from None
        decision = self._paths.decision(peer)
        if decision is None or decision.primary != path.id:
            return Pinged(path, rtt, f"left since then: {decision.reason}" if decision is not None else "")
        return Pinged(path, rtt, decision.reason)

    async def dial(
        self, peer: PeerId, addresses: Sequence[Address] = (), *, lane: str = "dispatch", timeout: float = 10.0
    ) -> Connection:
        """An authenticated connection to `peer` for `lane`: a live one, or a new one over the first way that works.

        Ways are the path that is known already, the relays of this node, and `addresses`. A dial that is already
        running is shared. Raises Unreachable (naming the addresses) after `timeout` seconds,
        at once when none of them can be tried, WrongPeer, Refused and its kinds, HandshakeFailed, EndpointClosed.
        """
        return (await self._dialer.dial(peer, addresses, lane, timeout))[0]

    async def dial_with(
        self,
        peer: PeerId,
        addresses: Sequence[Address] = (),
        *,
        first: bytes,
        lane: str = "dispatch",
        timeout: float = 10.0,
    ) -> tuple[Connection, Stream | None]:
        """Like `dial`, and a new stream that begins with `first` (at most EARLY_BYTES), sent with the proof of who we
        are: its answer comes a round trip earlier than that of a stream opened afterwards.

        The peer is authenticated before anything is sent. The stream is None where `first` is empty, and where nothing
        of it was carried out, so that it is the caller's turn to send it: the connection was there already, or the peer
        dialled it, or a dial is shared whose proof had gone or had no room left. It is never carried out twice: a peer
        that refuses has dropped it, and where the connection is lost instead, the dial ends with that error
        (ConnectionLost, ConnectionClosed) rather than trying again; it may have been carried out then, and after a
        time-out. Not 0-RTT: the handshake is over, nothing can be replayed. Raises what `dial` raises, and LocalFault
        where `first` is too long.
        """
        return await self._dialer.dial_with(peer, addresses, lane, timeout, first)

    async def accept(self) -> Connection:
        """The next authenticated connection that a peer opened. Raises EndpointClosed after close().

        A connection that a peer opened while we dialled it comes from here and from dial().
        """
        return await self._acceptor.accept()

    async def close(self) -> None:
        """End every connection (peers are told), every dial and accept(), and close the socket."""
        if self._table.closed:
            return
        self._table.closed = True  # from here on, nothing is let in any more
        self._ticker.cancel()
        try:
            self._dialer.close()
            for connection in list(self._table.all):
                connection.end(0, "endpoint closed", ConnectionClosed(0, "endpoint closed", "local"))
            self._acceptor.close()
            await self._socket.drain()
        finally:
            self._driver.close()
            await self._reach.close()

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- what connections report (ConnectionOwner)

    def handshake_done(self, connection: Connection) -> None:
        """An attempt has reached the right peer."""
        self._dialer.handshake_done(connection)

    def proof_accepted(self, connection: Connection, credentials: bytes) -> None:
        """The peer let us in."""
        self._dialer.proof_accepted(connection, credentials)

    def proof_received(self, connection: Connection, proof: Authenticate) -> None:
        """A peer wants to be let in."""
        self._acceptor.proof_received(connection, proof)

    def connection_ended(self, connection: Connection, error: TransportError) -> None:
        """Forget a connection that is over."""
        self._table.forget(connection)
        self._acceptor.forget(connection)
        self._dialer.attempt_ended(connection, error)

    def _settle_parked(self, key: Key) -> None:
        self._acceptor.settle_parked(key)

    def _incoming(self, original_cid: bytes, source: PathId, sender: PeerId | None) -> Link | None:
        return self._acceptor.incoming(original_cid, source, sender)

    # -- paths

    def _path_found(self, peer: PeerId) -> None:
        self._dialer.path_found(peer)

    def _switched(self, peer: PeerId, switch: Switch) -> None:
        """The peer's datagrams take another path."""
        now = self._loop.time()
        for connection in list(self._table.by_peer.get(peer, ())):
            engine = connection.link.engine
            try:
                if switch.worse:  # what the path before carried says nothing of this one
                    engine.restart(now, switch.rtt or UNKNOWN_RTT)
                elif switch.lossy:  # what was lost need not wait for its time-out
                    engine.wake(now)
                elif switch.rtt is not None:  # what is under way may arrive first: nothing is taken for lost
                    engine.switch(now, switch.rtt)
                self._driver.mark(connection.link)
            except Exception as error:  # one engine's fault must not cost the others their path
                connection.failed(error)

    def _tell(self, news: News) -> None:
        if self._table.closed:
            return
        try:
            self.on_news(news)
        except Exception as error:  # who watches must not disturb what is watched
            self._loop.call_exception_handler({"message": "on_news failed", "exception": error})

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(self._config.keep_alive / TICKS_PER_KEEP_ALIVE, self._tick)
        now = self._loop.time()
        for connection in list(self._table.all):
            try:
                connection.tick(now)
            except Exception as error:  # one that cannot be kept alive must not cost the others theirs
                connection.failed(error)
        self._paths.tick({peer for peer, _ in (*self._table.live, *self._dialer.dials)})
        self._sample(list(self._table.by_peer))

    def _sample(self, peers: list[PeerId]) -> None:
        """Tell the keeper what QUIC says of these peers' paths, some at a time: others want the loop too."""
        now = self._loop.time()
        for peer in peers[:SAMPLED_AT_ONCE]:
            sample = self._sampler.sample(self._table.by_peer.get(peer, ()), now)
            if sample is not None:
                self._paths.sample(peer, sample.sent, sample.lost, sample.goodput)
        if len(peers) > SAMPLED_AT_ONCE and not self._table.closed:
            self._loop.call_soon(self._sample, peers[SAMPLED_AT_ONCE:])
