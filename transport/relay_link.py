"""A node's link to one relay: connects, logs in, says what comes, and comes back when it was lost. SHELL.

One task owns the link; it composes relay_dial (addresses, TLS), relay_session (one WebSocket session) and
proto/reconnect (when to try again). Which relays a node uses is relay_pool's business. One loop only.

    down ──due──▶ connecting ──WELCOME──▶ up ──end──▶ down          any ──close──▶ closed
      ▲                │ failure, time-out
      └────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import socket
from collections.abc import Callable, Sequence

from transport.errors import Address, TransportError
from transport.identity import Identity, PeerId
from transport.proto.reconnect import Reconnect
from transport.proto.relay_frames import Feature, GoneReason, Record
from transport.proto.relay_url import RelayUrl, is_global
from transport.relay_dial import DialFailed, Resolver, connect, start, tls_context
from transport.relay_session import Ending, RelayCounters, RelayLinkConfig, RelaySession

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0  # what the relay has to answer a goodbye
RESTART_AFTER = 0.5  # a try that is older when the network changes began on the old one

OnDatagrams = Callable[[str, PeerId, list[bytes], bool], None]  # url, sender, datagrams, disco
OnState = Callable[[str, bool, str], None]  # url, up, reason
OnGone = Callable[[str, PeerId, GoneReason], None]


class RelayLink:
    """A link to one relay. Callbacks run on the loop, in its turn; what they raise is logged and dropped.

    on_state is also called, with up false, after each try that failed. private_ok: whether addresses that are not
    reachable from everywhere may be connected to; others named this relay when it is false.
    """

    def __init__(
        self,
        url: RelayUrl,
        identity: Identity,
        config: RelayLinkConfig,
        on_datagrams: OnDatagrams,
        on_state: OnState,
        on_gone: OnGone,
        *,
        on_rtt: Callable[[], None] | None = None,
        on_record: Callable[[str, Record], None] = lambda _url, _record: None,
        private_ok: Callable[[], bool] = lambda: True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.url = url
        self._identity, self._config = identity, config
        self._on_datagrams, self._on_state, self._on_gone = on_datagrams, on_state, on_gone
        self._on_rtt, self._on_record, self._private_ok = on_rtt, on_record, private_ok
        self.counters = RelayCounters()
        self.error = ""  # why it is not up, one line; "" while it is
        self.rtt: float | None = None  # seconds, smoothed; the last one known while down
        self.measured = 0  # how many answers went into it
        self.host = ""  # the IP address connected to last
        self.observed = ""  # "ip:port" of this node as the relay sees its TCP connection
        self._reflector_hosts: tuple[str, ...] = ()
        self._reflector_ports: tuple[int, ...] = ()
        self._resolver = Resolver(url)
        self._plan = Reconnect(os.urandom, self._loop.time())
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._session: RelaySession | None = None
        self._lingering: set[RelaySession] = set()
        self._attempt: asyncio.Timeout | None = None
        self._attempt_began = 0.0
        self._closed = False

    # -- for the owner

    def start(self) -> None:
        """Begin to connect."""
        if self._task is None and not self._closed:
            self._task = self._loop.create_task(self._run(), name=f"relay-link {self.url}")

    async def close(self) -> None:
        """End the session and all tries, with a goodbye to the relay; takes at most CLOSE_SECONDS."""
        self._closed = True
        self._resolver.close()
        sessions = [*self._lingering, *([self._session] if self._session is not None else [])]
        for session in sessions:
            session.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if sessions:
            await asyncio.wait([session.closed for session in sessions], timeout=CLOSE_SECONDS)
            for session in sessions:
                session.abort()

    def send(self, peer: PeerId, datagrams: Sequence[bytes], disco: bool = False) -> bool:
        """Send by this relay, never waits; False when the link is not up.

        Disco goes before bulk; bulk that the socket cannot take is queued, and the oldest is dropped beyond the bound.
        """
        session = self._session
        return session is not None and session.send(peer.raw, datagrams, disco)

    def send_record(self, message: bytes) -> bool:
        """Send a PUBLISH or WATCH now; False when the link is not up, or its socket is full."""
        session = self._session
        return session is not None and session.send_record(message)

    def kick(self) -> None:
        """The network changed: prove the session or replace it at once; try again now if there is none."""
        now = self._loop.time()
        session = self._session
        if session is not None and session.up:
            if _is_gone(session.local_host):
                session.fail("the address of this machine that it used is gone", own=True)
            else:
                session.kick()
            return
        self._plan.network_changed(now)
        self._wake.set()
        if self._attempt is not None and now - self._attempt_began > RESTART_AFTER:
            with contextlib.suppress(RuntimeError):  # it has timed out in this very turn
                self._attempt.reschedule(now)

    @property
    def up(self) -> bool:
        """Whether `send` sends."""
        return self._session is not None and self._session.up

    @property
    def has_directory(self) -> bool:
        """Whether it is up, with a relay that takes PUBLISH and WATCH."""
        welcome = self._session.welcome if self.up and self._session is not None else None
        return welcome is not None and bool(welcome.features & Feature.DIRECTORY)

    @property
    def reflectors(self) -> list[Address]:
        """Where this relay answers STUN over UDP; empty until it was up once, or when it does not."""
        return [(host, port) for host in self._reflector_hosts for port in self._reflector_ports]

    # -- the task

    async def _run(self) -> None:
        while True:
            while (delay := self._plan.due - self._loop.time()) > 0:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), delay)
            session = await self._connect()
            if session is not None:
                await session.ended

    async def _connect(self) -> RelaySession | None:
        """One try: a session that was welcomed, or None; then the plan knows when to try again."""
        self._attempt_began = self._loop.time()
        timeout = asyncio.timeout(self._config.connect_timeout)
        session = RelaySession(self.url, self._identity, self._config, self.counters, self)
        step = "the name look-up"
        welcomed = False
        try:
            async with timeout:
                self._attempt = timeout
                tls = tls_context(self._config.ca_file) if self.url.secure else None
                addresses = self._permitted(await self._resolver.addresses())
                step = "the connection"
                connection = await connect(addresses)
                self.host = str(connection.getpeername()[0])
                step = "the TLS handshake" if tls else "the WebSocket handshake"
                try:
                    await start(connection, session, self.url, tls)
                except BaseException:
                    connection.close()
                    raise
                step = "the login"
                self._session = session
                await session.finished_login
                welcomed = session.welcome is not None
        except TimeoutError:
            waited = self._loop.time() - self._attempt_began
            self._failed(session, f"{step} at {self.url} took more than {waited:.1f} s")
        except TransportError as error:
            self._failed(session, str(error))
        except OSError as error:
            self._failed(session, f"cannot connect to {self.url}: {error.strerror or error}")
        finally:
            self._attempt = None
            if not welcomed:
                session.drop()
        return session if welcomed else None

    def _permitted(self, addresses: Sequence[Address]) -> list[Address]:
        if self._private_ok():
            return list(addresses)
        permitted = [address for address in addresses if is_global(address[0])]
        if not permitted:
            raise DialFailed(f"{self.url} was named by others and has only private addresses; not tried")
        return permitted

    def _failed(self, session: RelaySession, reason: str) -> None:
        if session.ended.done():
            return  # it has told its own reason
        self._session = None
        self._plan.failed(self._loop.time())
        self._down(reason)

    def _down(self, reason: str) -> None:
        if reason != self.error:
            logger.info("relay.down %s: %s", self.url, reason)
        self.error = reason
        _guarded(self._on_state, self.url.text, False, reason)

    # -- SessionOwner

    def session_up(self, session: RelaySession) -> None:
        """The relay welcomed us."""
        welcome = session.welcome
        assert welcome is not None
        self._plan.connected(self._loop.time())
        self._reflector_hosts = self._answering_hosts()
        self._reflector_ports = tuple(port for port in welcome.reflectors if port)
        self.observed = welcome.observed
        self.error = ""
        logger.info("relay.up %s", self.url)
        _guarded(self._on_state, self.url.text, True, "")

    def _answering_hosts(self) -> tuple[str, ...]:
        """The host that we are connected to, and the first of the other family, since each has a NAT of its own. A
        name server may list anybody, so no more than that is taken from it."""
        known = [host for host, _ in self._resolver.known if self._private_ok() or is_global(host)]
        other = next((host for host in known if (":" in host) != (":" in self.host)), None)
        return (self.host,) if other is None else (self.host, other)

    def session_datagrams(self, peer: PeerId, datagrams: list[bytes], disco: bool) -> None:
        """Datagrams of a peer came."""
        try:
            self._on_datagrams(self.url.text, peer, datagrams, disco)
        except Exception:  # the owner's fault must not cost the session
            logger.exception("relay.callback_failed")

    def session_gone(self, peer: PeerId, why: GoneReason) -> None:
        """The relay could not deliver to a peer."""
        _guarded(self._on_gone, self.url.text, peer, why)

    def session_record(self, record: Record) -> None:
        """The relay's directory says something."""
        _guarded(self._on_record, self.url.text, record)

    def session_measured(self) -> None:
        """A ping was answered."""
        if self._session is not None:
            self.rtt = self._session.rtt
            self.measured += 1
        if self._on_rtt is not None:
            _guarded(self._on_rtt)

    def session_ended(self, session: RelaySession, ending: Ending) -> None:
        """The session is over, at login or later."""
        if self._closed:
            return
        now = self._loop.time()
        if ending.restart is not None:
            self._plan.restarting(*ending.restart, now)
            self._linger(session)
        elif ending.refused_for is not None:
            self._plan.refused(ending.refused_for, now)
            self._linger(session)
        elif session.welcome is not None:
            self._plan.lost(ending.spread, now, ending.own)
        else:
            self._plan.failed(now)
        if self._session is session:
            self._session = None
        self._down(ending.reason)

    def _linger(self, session: RelaySession) -> None:
        self._lingering.add(session)
        session.closed.add_done_callback(functools.partial(self._lingered, session))

    def _lingered(self, session: RelaySession, _: asyncio.Future[None]) -> None:
        self._lingering.discard(session)


def _guarded(callback: Callable[..., None], *values: object) -> None:
    try:
        callback(*values)
    except Exception:  # the owner's fault must not cost the session
        logger.exception("relay.callback_failed")


def _is_gone(host: str) -> bool:
    """Whether this machine no longer has the address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL
    return False
