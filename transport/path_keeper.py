"""Keeps the paths to every peer: carries out what proto/paths.py decides, and moves routes. SHELL.

One pure `PeerPaths` per peer decides what to ping, when to punch and which path datagrams take; this file brings it
the time, disco datagrams, relays' and surroundings' news, and does what it asks. Owns nothing but timers.

Who may cost us something: a sealed datagram from an unknown key costs one key exchange, so those are rationed; only
peers that `admits` lets in are answered, and an answer is never larger than the question. Called by endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from transport.errors import Address, EndpointClosed
from transport.identity import Identity, PeerId
from transport.news import OnNews, PathNews, nobody_listens
from transport.peer_socket import PeerSocket
from transport.proto.addresses import NO_ADDRESS, Candidate, NatKind, PathId, PathKind
from transport.proto.candidates import usable
from transport.proto.disco_frames import BOOT_BYTES, TRANSACTION_BYTES, Call, DiscoError, Ping, Pong, decode, encode
from transport.proto.disco_seal import NONCE_BYTES, DiscoBox, ReplayGuard, sender
from transport.proto.path_config import RELAY_SIZE, PathConfig
from transport.proto.path_policy import Decision, PathState, PathView
from transport.proto.paths import (
    Action,
    CloseSockets,
    Counters,
    OpenSockets,
    PeerPaths,
    Replay,
    SendCall,
    SendPing,
)
from transport.route import Path, Route
from transport.waiters import Waiters, wait, wake

logger = logging.getLogger(__name__)

MAX_PEERS = 4096
IDLE_SECONDS = 120.0  # a peer without connections is kept this long: its next dial finds the paths as they were
# Datagrams per second from peers of whom nothing is kept: each costs a key exchange (0.3 ms), and a machine if the peer
# is admitted (0.7 ms).
STRANGER_RATE, STRANGER_BURST = 100.0, 300.0
# Pings per second, of all peers together, to addresses that carry nothing: peers name them, so they may be anybody's.
# One punch with many sockets takes 100 per second, after a burst of 256.
PROBE_RATE, PROBE_BURST = 250.0, 600.0
MAX_BIRTHDAYS = 1  # punches with hundreds of sockets at one time
WANT_INTERVAL = 30.0  # seconds; paths of a peer with idle connections are kept alive all the same
HEARD_INTERVAL = 0.02  # seconds between two notes of a receipt on the same path; detection needs no finer ones
ELICITING_BYTES = 80  # a datagram below this is an acknowledgement, to which nobody answers
RELAY_WANTED_INTERVAL = 5.0  # seconds between two relays that a peer makes us connect to
PING_AGAIN = 0.5  # seconds
TIMER_SLACK = 0.001  # a timer that would fire this much later is not worth arming anew


@dataclass(slots=True)
class DiscoCounters:
    """What disco has seen; everything refused is counted."""

    pings_in: int = 0
    pings_out: int = 0
    pongs_in: int = 0
    pongs_unknown: int = 0  # no such ping is open: forged, replayed or late
    calls_in: int = 0
    calls_out: int = 0
    forged: int = 0  # could not be opened, or a relay named another sender
    malformed: int = 0
    replayed: int = 0
    not_admitted: int = 0
    rationed: int = 0  # strangers above the ration
    withheld: int = 0  # our own pings to unproven addresses above theirs


class _Ration:
    """A token bucket."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, float("-inf")

    def take(self, now: float) -> bool:
        """Whether one more is allowed."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True, slots=True)
class Switch:
    """How a peer's datagrams changed their path.

    lossy: the path before has probably lost what was under way. rtt: of the new path, seconds, None if not measured.
    worse: the path before had lost its tier; how much it carried says nothing of the new one.
    """

    lossy: bool
    rtt: float | None
    worse: bool = False


@dataclass(slots=True)
class _Peer:
    """One peer, as kept here."""

    peer: PeerId
    paths: PeerPaths
    route: Route
    used_at: float
    decision: Decision
    wanted_at: float = float("-inf")
    relay_wanted_at: float = float("-inf")
    timer: asyncio.TimerHandle | None = None
    due: float = field(default=float("inf"))
    birthday: bool = False
    waiting: Waiters = field(default_factory=list)  # for a path that answers


class PathKeeper:
    """The paths to all peers of one endpoint."""

    def __init__(
        self,
        identity: Identity,
        socket: PeerSocket,
        config: PathConfig,
        *,
        admits: Callable[[PeerId], bool],
        on_switch: Callable[[PeerId, Switch], None],
        on_path: Callable[[PeerId], None],
    ) -> None:
        """`on_switch` is called when a peer's datagrams take another path, `on_path` when there is one after none."""
        self._loop = asyncio.get_running_loop()
        self._me = identity.peer_id
        self._box = DiscoBox(identity.peer_id.raw, identity.x25519_private())
        self._socket, self._config = socket, config
        self._admits, self._on_switch, self._on_path = admits, on_switch, on_path
        self._peers: dict[PeerId, _Peer] = {}
        self._guard = ReplayGuard()
        self._boot, self._calls = os.urandom(BOOT_BYTES), 0
        self._strangers = _Ration(STRANGER_RATE, STRANGER_BURST)
        self._probes = _Ration(PROBE_RATE, PROBE_BURST)
        self._candidates: tuple[Candidate, ...] = ()
        self._nat, self._port_delta = NatKind.UNKNOWN, 0
        self._relays: tuple[str, ...] = ()
        self._relays_up: dict[str, bool] = {}  # our own?
        self._closed = False
        self._own_pings: dict[bytes, tuple[float, asyncio.Future[tuple[PathId, float]]]] = {}
        self.counters = DiscoCounters()
        self.on_observed: Callable[[PeerId, Address], None] = _nobody_asks
        self.on_relay_wanted: Callable[[str], object] = _no_relay
        self.on_news: OnNews = nobody_listens

    def close(self) -> None:
        """Stop all timers; who waits for a path is told."""
        self._closed = True
        for kept in self._peers.values():
            if kept.timer is not None:
                kept.timer.cancel()
            wake(kept.waiting)
        self._peers.clear()
        for _, answered in self._own_pings.values():
            if not answered.done():
                answered.set_exception(EndpointClosed())

    # -- for the endpoint

    def want(self, peer: PeerId, addresses: Sequence[Address] = ()) -> None:
        """Somebody dials this peer: look for paths, `addresses` among them."""
        kept = self._keep(peer)
        now = self._loop.time()
        kept.used_at = now
        for address in addresses:
            path = self._socket.direct(address)
            kept.paths.candidate(path.id, path.kind, now, self._socket.largest(path))
        kept.paths.want(now)
        self._run(kept)

    def route(self, peer: PeerId) -> Route | None:
        """The peer's route, when it has a path now."""
        kept = self._peers.get(peer)
        return kept.route if kept is not None and kept.decision.primary is not None else None

    def adopt(self, peer: PeerId, route: Route, *, restarted: bool) -> Route:
        """The route of `peer` from now on, after a handshake over `route` has authenticated it.

        A peer that has `restarted` may have left every earlier path behind.
        """
        kept = self._keep(peer)
        now = self._loop.time()
        path = route.path
        if restarted:
            self._forget_paths(kept)
        if restarted or route is not kept.route:
            kept.paths.confirmed(path.id, path.kind, now, self._socket.largest(path))
            kept.route.heard_from, kept.route.heard_at = path.id, now
        kept.used_at = now
        self._run(kept)
        return kept.route

    def heard(self, route: Route, source: PathId) -> None:
        """Datagrams of an authenticated connection came by `source`. Called for every batch."""
        now = self._loop.time()
        if source is route.heard_from and now - route.heard_at < HEARD_INTERVAL:
            return
        route.heard_from, route.heard_at = source, now
        kept = self._peers.get(route.peer) if route.peer is not None else None
        if kept is None:
            return
        kept.paths.heard(source, now)
        if source != route.path.id and not source.relay:  # a NAT may have given the peer a new port
            kept.paths.hint(source, self._socket.path_of(source).kind, now)
        self._look(kept)

    def sent(self, route: Route, datagrams: Sequence[bytes]) -> None:
        """Datagrams of an authenticated connection went out on its route. Called for every batch."""
        now = self._loop.time()
        if now - route.sent_at < HEARD_INTERVAL or len(datagrams[0]) < ELICITING_BYTES:
            return
        route.sent_at = now
        kept = self._peers.get(route.peer) if route.peer is not None else None
        if kept is not None:
            kept.paths.sent(route.path.id, len(datagrams[0]), now)
            self._look(kept)

    def sample(self, peer: PeerId, sent: int, lost: int, goodput: float | None) -> None:
        """What QUIC says of the path in use, each second: packets sent and lost; bytes per second delivered while the
        sender was never idle (None otherwise)."""
        kept = self._peers.get(peer)
        if kept is not None and kept.decision.primary is not None:
            kept.paths.sample(kept.decision.primary, sent, lost, goodput, self._loop.time())
            self._run(kept)

    def tick(self, used: Iterable[PeerId]) -> None:
        """About once a second: these peers have connections or dials; forget those that nobody has used for long."""
        now = self._loop.time()
        for peer in used:
            kept = self._peers.get(peer)
            if kept is not None:
                kept.used_at = now
                kept.route.forget(now)
                if now - kept.wanted_at > WANT_INTERVAL:  # QUIC's keep-alives are too small to count as sent
                    kept.wanted_at = now
                    kept.paths.want(now)
                    self._look(kept)
        for kept in [one for one in self._peers.values() if now - one.used_at > IDLE_SECONDS]:
            self._drop(kept)

    def views(self, peer: PeerId) -> list[PathView]:
        """Every path to a peer, for people."""
        kept = self._peers.get(peer)
        return kept.paths.views(self._loop.time()) if kept is not None else []

    def punching(self, peer: PeerId) -> Counters | None:
        """What finding paths to a peer has cost, for those who measure."""
        kept = self._peers.get(peer)
        return kept.paths.counters if kept is not None else None

    def decision(self, peer: PeerId) -> Decision | None:
        """Which path the peer's datagrams take, and why."""
        kept = self._peers.get(peer)
        return kept.decision if kept is not None else None

    async def ping(self, peer: PeerId, timeout: float) -> tuple[Path, float]:
        """The path by which the peer answers now, and its round-trip time in seconds.

        A ping that is lost is followed by another one after PING_AGAIN. Raises TimeoutError when there is no path, or
        no answer, EndpointClosed.
        """
        kept = self._keep(peer)
        answered: asyncio.Future[tuple[PathId, float]] = self._loop.create_future()
        sent: list[bytes] = []
        try:
            async with asyncio.timeout(timeout):
                kept.paths.want(self._loop.time())
                self._run(kept)
                while not self._answers(kept):
                    await wait(kept.waiting)
                    if self._closed:
                        raise EndpointClosed
                while not answered.done():
                    tx = os.urandom(TRANSACTION_BYTES)
                    sent.append(tx)
                    self._own_pings[tx] = (self._loop.time(), answered)
                    self.counters.pings_out += 1
                    self._seal_and_send(kept, kept.route.path.id, encode(Ping(tx)))
                    await asyncio.wait([answered], timeout=PING_AGAIN)
                path, rtt = answered.result()
                return self._path(kept, path), rtt
        finally:
            for tx in sent:
                self._own_pings.pop(tx, None)

    # -- news from below and beside

    def set_local(
        self,
        candidates: Sequence[Candidate],
        nat: NatKind,
        port_delta: int,
        relays: Sequence[str],
    ) -> None:
        """What this node tells its peers of itself; `relays` are where it is reached, home first."""
        self._candidates, self._nat, self._port_delta = tuple(candidates), nat, port_delta
        self._relays = tuple(relays)
        now = self._loop.time()
        for kept in list(self._peers.values()):
            kept.paths.local(self._candidates, nat, port_delta, self._relays, now)
            self._run(kept)

    def network_changed(self) -> None:
        """Interfaces changed, or the machine woke up: every path must answer again."""
        for kept in list(self._peers.values()):
            kept.paths.network_changed(self._loop.time())
            self._run(kept)

    def relay_changed(self, url: str, up: bool, *, own: bool) -> None:
        """A relay connected, or was lost. One that is not our `own` is a path to the peers that named it alone."""
        now = self._loop.time()
        if up:
            self._relays_up[url] = own
        else:
            self._relays_up.pop(url, None)
        for kept in list(self._peers.values()):
            if not up:
                kept.paths.relay_down(url, now)
            elif own or url in kept.paths.relays_of_peer:
                kept.paths.relay_up(url, now)
            else:
                continue
            self._run(kept)

    def relay_gone(self, url: str, peer: PeerId) -> None:
        """A relay says that the peer is not there."""
        kept = self._peers.get(peer)
        if kept is not None:
            kept.paths.relay_gone(url, self._loop.time())
            self._run(kept)

    def on_disco(self, data: bytes, source: PathId, named: PeerId | None) -> None:
        """One sealed datagram; `named` is whom a relay says it is from."""
        claimed = sender(data)
        if claimed is None or claimed == self._me.raw or (named is not None and named.raw != claimed):
            self.counters.forged += 1
            return
        if PeerId(claimed) not in self._peers and not self._strangers.take(self._loop.time()):
            self.counters.rationed += 1
            return
        try:
            raw, plaintext = self._box.open(data)
            peer = PeerId(raw)
        except DiscoError:
            self.counters.forged += 1
            return
        try:
            message = decode(plaintext)
        except DiscoError:
            self.counters.malformed += 1
            return
        if peer not in self._peers and not self._admits(peer):
            self.counters.not_admitted += 1
            return
        now = self._loop.time()
        kept = self._keep(peer)
        if isinstance(message, Ping):
            self.counters.pings_in += 1
            observed = None if source.relay else source.address
            self._seal_and_send(kept, source, encode(Pong(message.tx, observed)))
            path = self._socket.path_of(source)
            kept.paths.on_ping(source, path.kind, now, self._socket.largest(path), left=message.left)
        elif isinstance(message, Pong):
            self.counters.pongs_in += 1
            asked = self._own_pings.get(message.tx)
            if asked is not None:
                if not asked[1].done():
                    asked[1].set_result((source, now - asked[0]))
            else:
                unknown = kept.paths.counters.unknown_pongs
                kept.paths.on_pong(source, message.tx, message.observed, now)
                if kept.paths.counters.unknown_pongs > unknown:
                    self.counters.pongs_unknown += 1
                elif message.observed is not None and not source.socket and not source.relay:
                    self.on_observed(peer, message.observed)
        else:
            self._on_call(kept, message, source, now)
        self._run(kept)

    def _on_call(self, kept: _Peer, call: Call, source: PathId, now: float) -> None:
        if not self._guard.fresh(kept.peer.raw, call.boot, call.number):
            self.counters.replayed += 1
            return
        self.counters.calls_in += 1
        host, port = self._socket.address
        interfaces = self._socket.interfaces
        reachable = tuple(c for c in call.candidates if usable(c, interfaces, listen_host=host, port=port))
        kept.paths.on_call(replace(call, candidates=reachable), source.relay, now)
        for url in kept.paths.relays_of_peer:
            if url in self._relays_up:
                if not self._relays_up[url]:
                    kept.paths.relay_up(url, now)
            elif now - kept.relay_wanted_at > RELAY_WANTED_INTERVAL:
                kept.relay_wanted_at = now
                self.on_relay_wanted(url)

    # -- peers

    def _keep(self, peer: PeerId) -> _Peer:
        kept = self._peers.get(peer)
        if kept is not None:
            return kept
        if len(self._peers) >= MAX_PEERS:
            self._drop(min(self._peers.values(), key=lambda one: one.used_at))
        now = self._loop.time()
        with contextlib.suppress(DiscoError):  # no such key can exist: nobody will answer
            self._box.keep(peer.raw)
        paths = self._machine(peer)
        nowhere = Path(PathKind.PUBLIC, PathId(NO_ADDRESS), RELAY_SIZE)
        route = Route(nowhere, peer)
        route.kept = True
        kept = self._peers[peer] = _Peer(peer, paths, route, now, paths.decision)
        self._tell(kept)
        return kept

    def _machine(self, peer: PeerId) -> PeerPaths:
        return PeerPaths(self._me.raw, peer.raw, self._config, os.urandom, self._loop.time(), self._socket.kind_of)

    def _tell(self, kept: _Peer) -> None:
        """Everything about this node, to a machine that knows nothing yet."""
        now = self._loop.time()
        kept.paths.local(self._candidates, self._nat, self._port_delta, self._relays, now)
        for url, own in self._relays_up.items():
            if own:
                kept.paths.relay_up(url, now)

    def _forget_paths(self, kept: _Peer) -> None:
        self._socket.close_auxiliary(kept.peer)
        kept.birthday = False
        earlier, kept.paths = kept.paths, self._machine(kept.peer)
        kept.paths.recall(earlier)
        kept.decision = kept.paths.decision
        self._tell(kept)

    def _drop(self, kept: _Peer) -> None:
        del self._peers[kept.peer]
        self._box.release(kept.peer.raw)
        kept.route.kept = False
        if kept.timer is not None:
            kept.timer.cancel()
        self._socket.close_auxiliary(kept.peer)

    # -- the machine of one peer

    def _look(self, kept: _Peer) -> None:
        """After an event of the data path: act only when something is due."""
        due = kept.paths.timer()
        if due is not None and (due <= self._loop.time() or due < kept.due - TIMER_SLACK):
            self._run(kept)

    def _timer(self, kept: _Peer) -> None:
        kept.timer, kept.due = None, float("inf")
        self._run(kept)

    def _run(self, kept: _Peer) -> None:
        for action in kept.paths.poll(self._loop.time()):
            self._do(kept, action)
        self._apply(kept)
        due = kept.paths.timer()
        if due is None or kept.peer not in self._peers:
            return
        if kept.timer is not None:
            if kept.due <= due:
                return
            kept.timer.cancel()
        kept.due = due
        kept.timer = self._loop.call_at(due, self._timer, kept)

    def _do(self, kept: _Peer, action: Action) -> None:
        if isinstance(action, SendPing):
            in_use = action.path in (kept.decision.primary, kept.decision.duplicate) or action.path.relay
            if not in_use and not self._probes.take(self._loop.time()):
                self.counters.withheld += 1
                return
            self.counters.pings_out += 1
            self._seal_and_send(kept, action.path, encode(Ping(action.tx, action.left), action.size))
        elif isinstance(action, SendCall):
            self.counters.calls_out += 1
            self._calls += 1
            call = replace(action.call, boot=self._boot, number=self._calls)
            self._seal_and_send(kept, PathId(relay=action.relay), encode(call))
        elif isinstance(action, OpenSockets):
            running = sum(one.birthday for one in self._peers.values())
            opened = 0
            if running < MAX_BIRTHDAYS or kept.birthday:
                kept.birthday = True
                opened = self._socket.open_auxiliary(kept.peer, action.count)
            kept.paths.sockets_ready(opened, self._loop.time())
        elif isinstance(action, CloseSockets):
            kept.birthday = False
            self._socket.close_auxiliary(kept.peer, action.keep)
        elif isinstance(action, Replay):
            self._socket.replay(kept.route, self._path(kept, action.path), action.since)

    def _apply(self, kept: _Peer) -> None:
        decision, before, route = kept.paths.decision, kept.decision, kept.route
        primary, duplicate = decision.primary, decision.duplicate
        if primary is not None and not _is_up_to_date(route.path, primary, kept.paths):
            route.path = self._path(kept, primary)
        if duplicate is None:
            route.also = None
        elif route.also is None or not _is_up_to_date(route.also, duplicate, kept.paths):
            route.also = self._path(kept, duplicate)
        if decision is before:
            return
        kept.decision = decision
        wake(kept.waiting)
        if primary is None:
            if before.primary is not None:
                logger.info("paths.none %s %s", kept.peer.short, decision.reason)
        elif primary != before.primary:
            logger.info("paths.switch %s %s %s", kept.peer.short, primary, decision.reason)
            if before.primary is None:
                self._on_path(kept.peer)
            self._on_switch(kept.peer, _switch(kept.paths.views(self._loop.time()), before.primary, primary))
        elif (before.duplicate is None) != (duplicate is None):  # another path helps, or this one answers again
            self._on_switch(kept.peer, Switch(lossy=True, rtt=None))
        if primary != before.primary:
            path = route.path if primary is not None else None
            self.on_news(PathNews(kept.peer, path, self._rtt(kept, primary), decision.reason))

    def _answers(self, kept: _Peer) -> bool:
        primary = kept.decision.primary
        views = kept.paths.views(self._loop.time())
        return any(view.path == primary and view.state is PathState.LIVE for view in views)

    def _rtt(self, kept: _Peer, path: PathId | None) -> float | None:
        views = kept.paths.views(self._loop.time())
        return next((view.rtt for view in views if view.path == path and view.state is PathState.LIVE), None)

    def _path(self, kept: _Peer, path: PathId) -> Path:
        return Path(kept.paths.kind(path), path, kept.paths.size(path))

    def _seal_and_send(self, kept: _Peer, path: PathId, plaintext: bytes) -> None:
        with contextlib.suppress(DiscoError):  # as above
            sealed = self._box.seal(kept.peer.raw, plaintext, os.urandom(NONCE_BYTES))
            self._socket.send_disco(path, kept.peer, sealed)


def _is_up_to_date(path: Path, wanted: PathId, paths: PeerPaths) -> bool:
    return path.id == wanted and path.datagram_size == paths.size(wanted) and path.kind is paths.kind(wanted)


def _switch(views: Sequence[PathView], old: PathId | None, new: PathId) -> Switch:
    by_path = {view.path: view for view in views}
    before, after = by_path.get(old) if old is not None else None, by_path.get(new)
    works = before is not None and before.state is PathState.LIVE
    worse = before is not None and bool(before.demoted)
    return Switch(lossy=not works, rtt=after.rtt if after is not None else None, worse=worse)


def _nobody_asks(_peer: PeerId, _observed: Address) -> None:
    """Without surroundings, what peers see of us does not matter."""


def _no_relay(_url: str) -> None:
    """Without relays of its own, a node does not use a peer's."""
