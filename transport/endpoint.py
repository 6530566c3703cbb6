"""A node's QUIC endpoint: bind, dial, accept; who may connect, and which of several connections stays. SHELL.

The composer of the package: reach (socket, paths, relays) below quic_driver below connection; every task, timer and
connection has its owner here, in reach or in a Dial. Works on the one asyncio loop it was bound on; nothing is
thread-safe. Called by nodes.

Nothing passes before both sides are authenticated: the client compares the key in the server's certificate with the
PeerId that it dialled; the server reads the client's proof (signed for this connection) before anything else, verifies
it, asks `admit`, and answers ACCEPT or closes with a reason. A dial returns after ACCEPT. A first request may travel
with the proof (`dial_with`); the server's application sees it only after ACCEPT, and never when it refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

from transport.config import TransportConfig
from transport.connection import Connection, State
from transport.dialing import Dial, Early, Key, Resolved, resolve
from transport.errors import (
    KEY_CONNECTED_ANEW,
    Address,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    ConnectionReplaced,
    EndpointClosed,
    EngineFault,
    LocalFault,
    NotAdmitted,
    TransportError,
    Unreachable,
)
from transport.identity import Identity, PeerId
from transport.news import News, OnNews, nobody_listens
from transport.path_keeper import Switch
from transport.path_samples import PathSampler
from transport.peer_socket import PeerSocket, SocketHandlers
from transport.proto.addresses import PathId
from transport.proto.control_frames import BOOT_ID_BYTES, MAX_LANE_BYTES, VERSION, Authenticate, CloseCode
from transport.proto.dedup import PARK_GRACE, Existing, Verdict, decide
from transport.proto.early import EARLY_BYTES
from transport.proto.path_policy import Decision, PathView
from transport.quic_driver import DriverCounters, Link, QuicDriver
from transport.quic_engine import create_factory
from transport.reach import Reach, RelayView
from transport.route import Path, Route
from transport.stream import Stream
from transport.waiters import Waiters, wait, wake

UNKNOWN_RTT = 0.15  # seconds, of a path that nobody has measured; see PathConfig.first_rtt
MAX_ACCEPT_QUEUE = 256  # authenticated connections that nobody has accepted yet
TWIN_MEMORY = 20.0  # seconds that a replaced run of a peer is refused, and for as long as the later one is here
MAX_REMEMBERED = 4096  # (peer, lane) pairs whose last connection is remembered, see proto/dedup.py
TICKS_PER_KEEP_ALIVE = 4
SAMPLED_AT_ONCE = 32  # peers; each takes about 0.1 ms

Admit = Callable[[PeerId], bool]


class Gate(Protocol):
    """Who may connect, by more than its key: both ends show credentials that only the gates understand."""

    def knows(self, peer: PeerId) -> bool:
        """Whether this peer's disco messages are answered: it was let in before, or we look for it."""

    def judge(self, peer: PeerId, lane: str, credentials: bytes) -> str | None:
        """None where `peer`, whose key is proven, may connect for `lane`, or be connected to; else why not."""

    def credentials(self, lane: str) -> bytes:
        """What to show on a connection for `lane`, at most MAX_CREDENTIALS bytes."""


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
        self._identity, self._config, self._admit, self._gate = identity, config, admit, gate
        self._loop = asyncio.get_running_loop()
        self._boot_id = os.urandom(BOOT_ID_BYTES)
        self._factory = create_factory(identity, config)
        self._driver = QuicDriver(self._incoming)
        self._reach = Reach(
            identity,
            listen,
            config,
            SocketHandlers(self._driver.on_quic, self._driver.on_drained, self._driver.on_writable),
            admits=self._admits,
            on_switch=self._switched,
            on_path=self._path_found,
            on_news=self._tell,
        )
        self._socket, self._paths = self._reach.socket, self._reach.paths
        self._driver.socket, self._driver.paths = self._socket, self._paths
        self._sampler = PathSampler()
        self.on_news: OnNews = nobody_listens  # what people may want to see; set it after `bind`
        self._all: set[Connection] = set()
        self._by_peer: dict[PeerId, set[Connection]] = {}  # those on the peer's own route
        self._live: dict[Key, Connection] = {}
        self._previous: OrderedDict[Key, int] = OrderedDict()
        self._boots: OrderedDict[PeerId, bytes] = OrderedDict()  # the run of each peer that was met last
        self._left: OrderedDict[tuple[PeerId, bytes], float] = OrderedDict()  # runs of peers that a later run replaced
        self._dials: dict[Key, Dial] = {}
        self._parked: dict[Key, tuple[Connection, Authenticate]] = {}
        self._deadlines: dict[Connection, asyncio.TimerHandle] = {}  # incoming, not yet authenticated
        self._accepted: deque[Connection] = deque()
        self._acceptors: Waiters = []
        self._closed = False
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
        return list(self._live.values())

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
        if self._closed:
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
            raise Unreachable(peer, resolved.usable, timeout, self._no_path_to(peer), resolved.skipped) from None
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
        return (await self._dial(peer, addresses, lane, timeout, None))[0]

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
        if len(first) > EARLY_BYTES:
            raise LocalFault(
                f"{len(first)} bytes cannot go with a proof, at most {EARLY_BYTES}; send them after a dial"
            )
        early = Early(first)
        stream: Stream | None = None
        try:
            connection, stream = await self._dial(peer, addresses, lane, timeout, early if first else None)
            return connection, stream
        finally:
            if early.stream is not None and early.stream is not stream:
                early.stream.reset(0)  # others may go on with the connection

    async def _dial(
        self, peer: PeerId, addresses: Sequence[Address], lane: str, timeout: float, early: Early | None
    ) -> tuple[Connection, Stream | None]:
        if self._closed:
            raise EndpointClosed
        if peer == self.peer_id:
            raise Unreachable(peer, addresses, timeout, "that is this node itself")
        if not 1 <= len(lane.encode()) <= MAX_LANE_BYTES:
            raise ConfigError(f"a lane has 1 to {MAX_LANE_BYTES} bytes, {lane!r} has {len(lane.encode())}")
        key = (peer, lane)
        dial: Dial | None = None
        try:
            async with asyncio.timeout(timeout):
                resolved = await resolve(addresses, self.address)
                if self._closed:
                    raise EndpointClosed
                if key in self._live:
                    return self._live[key], None
                dial = self._dials.get(key)
                if dial is None:
                    dial = Dial(key, lambda target: self._connect(peer, lane, target), self._dial_over)
                    self._dials[key] = dial
                dial.waiters += 1
                if early is not None:
                    dial.early.append(early)
                if self._reach.relays is not None or self._paths.route(peer) is not None:
                    dial.hope()
                self._paths.want(peer, resolved.usable if self._reach.relays is not None else ())
                if self._paths.route(peer) is not None:
                    dial.add_path()
                dial.add(resolved.usable, resolved.skipped)
                connection = await asyncio.shield(dial.future)
                return connection, early.sent_on(connection) if early is not None else None
        except TimeoutError:
            if dial is None:
                raise Unreachable(peer, addresses, timeout, "the names were not looked up in time") from None
            raise dial.timed_out(timeout, self._no_path_to(peer)) from None
        finally:
            if dial is not None:
                dial.waiters -= 1
                if early is not None:
                    dial.early.remove(early)
                if dial.waiters == 0:
                    dial.finish(Unreachable(peer, addresses, timeout, "nobody waits for it any more"))

    async def accept(self) -> Connection:
        """The next authenticated connection that a peer opened. Raises EndpointClosed after close().

        A connection that a peer opened while we dialled it comes from here and from dial().
        """
        while not self._accepted:  # connections that end before they are accepted leave it
            if self._closed:
                raise EndpointClosed
            await wait(self._acceptors)
        return self._accepted.popleft()

    async def close(self) -> None:
        """End every connection (peers are told), every dial and accept(), and close the socket."""
        if self._closed:
            return
        self._closed = True  # from here on, nothing is let in any more
        self._ticker.cancel()
        try:
            for dial in list(self._dials.values()):
                dial.finish(EndpointClosed())
            for connection in list(self._all):
                connection.end(0, "endpoint closed", ConnectionClosed(0, "endpoint closed", "local"))
            wake(self._acceptors)
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

    # -- dialling

    def _connect(self, peer: PeerId, lane: str, target: Address | None) -> Connection:
        """Start an attempt over an address, or over the path that is known to the peer (None)."""
        if target is None:
            route = self._paths.route(peer)
            if route is None:
                raise Unreachable(peer, (), 0.0, "there is no path any more")
        else:
            route = Route(self._socket.direct(target))
        link = Link(self._factory.client(self._socket.quic_size(route.path)), route, validated=True)
        connection = Connection(self._driver, link, self, self._config, expected=peer, lane=lane)
        self._all.add(connection)
        if target is None:
            self._by_peer.setdefault(peer, set()).add(connection)
        self._driver.add_cid(link, link.engine.host_cid)
        try:
            link.engine.connect(self._loop.time())
        except Exception as error:
            fault = EngineFault(f"the QUIC library failed to dial: {error!r}")
            connection.end(CloseCode.INTERNAL, "internal error", fault)
            raise fault from error
        self._driver.mark(link)
        return connection

    def handshake_done(self, connection: Connection) -> None:
        """An attempt has reached the right peer: prove who we are, unless that is settled already."""
        key = (connection.peer, connection.lane)
        dial = self._dials.get(key)
        if dial is None or dial.proving is not None or key in self._live:
            connection.end(CloseCode.DUPLICATE, "another attempt won", ConnectionClosed(0, "dial over"))
            return
        shown = self._credentials(connection.lane)
        connection.prove(self._identity, self._boot_id, self._previous.get(key, 0), shown)
        dial.sent_proof(connection)

    def proof_accepted(self, connection: Connection, credentials: bytes) -> None:
        """The peer let us in; do we want it, too?"""
        objection = self._judge(connection.peer, connection.lane, credentials)
        if objection is not None:
            connection.end(CloseCode.NOT_ADMITTED, objection, NotAdmitted(f"refused here: {objection}"))
            return
        connection.open_after_proof()
        key = (connection.peer, connection.lane)
        restarted = self._retire_older_boot(connection)
        self._adopt_route(connection, restarted=restarted)
        self._register(connection)
        dial = self._dials.get(key)
        if dial is not None:
            dial.finish(connection)

    def _dial_over(self, dial: Dial) -> Connection | None:
        """A dial has ended: settle the connection that the peer opened meanwhile, if one was parked; which one is it
        now?"""
        del self._dials[dial.key]
        parked = self._parked.pop(dial.key, None)
        if parked is not None and not self._closed:
            self._decide(*parked)
        return None if self._closed else self._live.get(dial.key)

    # -- accepting

    def _incoming(self, original_cid: bytes, source: PathId, sender: PeerId | None) -> Link | None:
        """The first datagram of an unknown connection; a relay names the `sender`."""
        if self._closed or not self._has_place():
            return None
        route = Route(self._socket.path_of(source), sender)
        link = Link(self._factory.server(original_cid, self._socket.quic_size(route.path)), route, validated=False)
        connection = Connection(self._driver, link, self, self._config, expected=None)
        self._all.add(connection)
        self._driver.add(link, original_cid, link.engine.host_cid)
        self._deadlines[connection] = self._loop.call_later(
            self._config.handshake_timeout, self._handshake_timed_out, connection
        )
        return link

    def _has_place(self) -> bool:
        """Whether one more handshake may begin. When too many run, the oldest whose address may be forged gives way;
        a peer that is really there dials again after this code."""
        if len(self._deadlines) < self._config.max_pending:
            return True
        unproven = next((pending for pending in self._deadlines if not pending.link.validated), None)
        if unproven is None:
            return False
        reason = "too many handshakes at one time"
        unproven.end(0, reason, ConnectionClosed(0, reason))
        return True

    def _handshake_timed_out(self, connection: Connection) -> None:
        error = ConnectionLost("the peer did not authenticate in time")
        connection.end(CloseCode.TIMED_OUT, "no authentication in time", error)

    def proof_received(self, connection: Connection, proof: Authenticate) -> None:
        """Verify a proof, ask `admit`, and decide between connections."""
        refusal = self._objection(connection, proof)
        if refusal is not None:
            code, reason = refusal
            connection.end(code, reason, NotAdmitted(f"refused here: {reason}"))
            return
        connection.identify(proof)
        self._decide(connection, proof)

    def _objection(self, connection: Connection, proof: Authenticate) -> tuple[CloseCode, str] | None:
        if proof.version != VERSION:
            return CloseCode.VERSION_MISMATCH, f"protocol version {proof.version} there, {VERSION} here"
        if proof.server != self.peer_id.raw or not proof.lane or proof.client == self.peer_id.raw:
            return CloseCode.BAD_SIGNATURE, "the proof is not for this node"
        if not connection.verify(proof):
            return CloseCode.BAD_SIGNATURE, "the proof's signature does not verify"
        peer = PeerId(proof.client)
        if connection.link.route.peer not in (None, peer):
            return CloseCode.BAD_SIGNATURE, "the relay named another sender"
        objection = self._judge(peer, proof.lane, proof.credentials)
        if objection is not None:
            return CloseCode.NOT_ADMITTED, objection
        if self._is_replaced_twin(peer, proof.boot_id):
            reason = "another node uses this node's key and took its place; give each its own --state"
            return CloseCode.NOT_ADMITTED, reason
        if len(self._live) >= self._config.max_connections or len(self._accepted) >= MAX_ACCEPT_QUEUE:
            return CloseCode.OVERLOADED, f"{len(self._live)} connections are open here"
        return None

    def _is_replaced_twin(self, peer: PeerId, boot_id: bytes) -> bool:
        """Whether this run of a peer was replaced by another one, that is here or was a moment ago.

        A node that restarts never comes back as the run that it was before: two nodes have one key.
        """
        left_at = self._left.get((peer, boot_id))
        if left_at is None:
            return False
        others = any(one.state is State.OPEN and one.boot_id != boot_id for one in self._by_peer.get(peer, ()))
        return others or self._loop.time() - left_at < TWIN_MEMORY

    def _judge(self, peer: PeerId, lane: str, credentials: bytes) -> str | None:
        """Why a peer may not connect for a lane, or not be connected to; None where it may."""
        if self._gate is None:
            return None if self._admits(peer) else f"peer {peer.short} is not admitted"
        try:
            return self._gate.judge(peer, lane, credentials)
        except Exception as error:
            context = {"message": f"the gate raised for peer {peer.short}; refused", "exception": error}
            self._loop.call_exception_handler(context)
            return "internal error at the gate"

    def _credentials(self, lane: str) -> bytes:
        return self._gate.credentials(lane) if self._gate is not None else b""

    def _admits(self, peer: PeerId) -> bool:
        try:
            if self._gate is not None:
                return self._gate.knows(peer)
            return self._admit is None or self._admit(peer)
        except Exception as error:
            context = {"message": f"admit raised for peer {peer.short}; refused", "exception": error}
            self._loop.call_exception_handler(context)
            return False

    def _decide(self, connection: Connection, proof: Authenticate) -> None:
        if connection.state is State.CLOSED:
            return
        key = (connection.peer, connection.lane)
        live = self._live.get(key)
        existing = None if live is None else Existing(live.boot_id, live.connection_id, live.is_client)
        verdict = decide(
            ours=self.peer_id.raw,
            theirs=proof.client,
            boot_id=proof.boot_id,
            previous=proof.previous,
            existing=existing,
            dialling=key in self._dials,
        )
        if verdict is Verdict.PARK:
            self._replace_parked(key, connection, proof)
        elif verdict is Verdict.REFUSE:
            self._refuse_duplicate(connection)
        else:
            self._let_in(connection, replaced=live)

    def _replace_parked(self, key: Key, connection: Connection, proof: Authenticate) -> None:
        earlier = self._parked.get(key)
        self._parked[key] = (connection, proof)
        if earlier is not None:
            self._refuse_duplicate(earlier[0])
        self._loop.call_later(PARK_GRACE, self._parked_long_enough, key, connection)

    def _parked_long_enough(self, key: Key, connection: Connection) -> None:
        """Our own dial has had its time: when it has not even reached the peer, the peer's connection is taken."""
        parked, dial = self._parked.get(key), self._dials.get(key)
        if parked is None or parked[0] is not connection or dial is None or dial.reached:
            return
        del self._parked[key]
        self._let_in(connection, replaced=None)

    def _refuse_duplicate(self, connection: Connection) -> None:
        reason = "another connection for this lane exists"
        connection.end(CloseCode.DUPLICATE, reason, ConnectionReplaced(reason))

    def _let_in(self, connection: Connection, replaced: Connection | None) -> None:
        key = (connection.peer, connection.lane)
        restarted = self._retire_older_boot(connection)
        if replaced is not None:
            reason = "the peer opened a new connection"
            replaced.end(CloseCode.REPLACED, reason, ConnectionReplaced(reason))
        self._deadlines.pop(connection).cancel()
        self._adopt_route(connection, restarted=restarted)
        connection.accept_proof(self._boot_id, self._credentials(connection.lane))
        self._register(connection)
        self._accepted.append(connection)
        wake(self._acceptors)
        dial = self._dials.get(key)
        if dial is not None:
            dial.finish(connection)

    # -- all connections

    def connection_ended(self, connection: Connection, error: TransportError) -> None:
        """Forget a connection that is over."""
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._accepted.remove(connection)
        deadline = self._deadlines.pop(connection, None)
        if deadline is not None:
            deadline.cancel()
        if connection.is_identified:
            key = (connection.peer, connection.lane)
            if self._live.get(key) is connection:
                del self._live[key]
            if key in self._parked and self._parked[key][0] is connection:
                del self._parked[key]
            siblings = self._by_peer.get(connection.peer, set())
            siblings.discard(connection)
            if not siblings:
                self._by_peer.pop(connection.peer, None)
        for dial in list(self._dials.values()):
            if dial.owns(connection):
                dial.attempt_ended(connection, error)

    def _register(self, connection: Connection) -> None:
        key = (connection.peer, connection.lane)
        self._live[key] = connection
        self._previous[key] = connection.connection_id
        self._previous.move_to_end(key)
        if len(self._previous) > MAX_REMEMBERED:
            self._previous.popitem(last=False)

    def _retire_older_boot(self, connection: Connection) -> bool:
        """End what is left of an earlier run of this peer; whether there was one: its paths may lead nowhere now."""
        siblings = [one for one in self._by_peer.get(connection.peer, ()) if one is not connection]
        stale = [one for one in siblings if one.state is State.OPEN and one.boot_id != connection.boot_id]
        for live in stale:
            self._left[live.peer, live.boot_id] = self._loop.time()
            self._left.move_to_end((live.peer, live.boot_id))
            if len(self._left) > MAX_REMEMBERED:
                self._left.popitem(last=False)
            live.end(CloseCode.REPLACED, KEY_CONNECTED_ANEW, ConnectionReplaced("the peer has restarted"))
        known = self._boots.get(connection.peer)
        self._boots[connection.peer] = connection.boot_id
        self._boots.move_to_end(connection.peer)
        if len(self._boots) > MAX_REMEMBERED:
            self._boots.popitem(last=False)
        return known not in (None, connection.boot_id)

    def _adopt_route(self, connection: Connection, *, restarted: bool) -> None:
        link = connection.link
        link.route = self._paths.adopt(connection.peer, link.route, restarted=restarted)
        self._by_peer.setdefault(connection.peer, set()).add(connection)

    # -- paths

    def _path_found(self, peer: PeerId) -> None:
        """There is a path to a peer that had none: dials that hope for one use it."""
        for (dialled, _), dial in list(self._dials.items()):
            if dialled == peer:
                dial.add_path()

    def _switched(self, peer: PeerId, switch: Switch) -> None:
        """The peer's datagrams take another path."""
        now = self._loop.time()
        for connection in list(self._by_peer.get(peer, ())):
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
        if self._closed:
            return
        try:
            self.on_news(news)
        except Exception as error:  # who watches must not disturb what is watched
            self._loop.call_exception_handler({"message": "on_news failed", "exception": error})

    def _no_path_to(self, peer: PeerId) -> str:
        """Why a peer has no path, for people."""
        problems = self._reach.relay_problems()
        if problems or self._reach.relays is None:
            return problems
        relayed = [view for view in self._paths.views(peer) if view.path.relay]
        silent = [view.path.relay for view in relayed if not view.down]
        if silent:
            return f"no answer through {', '.join(silent)}: it may not know this node, or be too slow"
        return f"it is not connected to {', '.join(view.path.relay for view in relayed)}" if relayed else ""

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(self._config.keep_alive / TICKS_PER_KEEP_ALIVE, self._tick)
        now = self._loop.time()
        for connection in list(self._all):
            try:
                connection.tick(now)
            except Exception as error:  # one that cannot be kept alive must not cost the others theirs
                connection.failed(error)
        self._paths.tick({peer for peer, _ in (*self._live, *self._dials)})
        self._sample(list(self._by_peer))

    def _sample(self, peers: list[PeerId]) -> None:
        """Tell the keeper what QUIC says of these peers' paths, some at a time: others want the loop too."""
        now = self._loop.time()
        for peer in peers[:SAMPLED_AT_ONCE]:
            sample = self._sampler.sample(self._by_peer.get(peer, ()), now)
            if sample is not None:
                self._paths.sample(peer, sample.sent, sample.lost, sample.goodput)
        if len(peers) > SAMPLED_AT_ONCE and not self._closed:
            self._loop.call_soon(self._sample, peers[SAMPLED_AT_ONCE:])
