"""The relay: one TCP port for WebSocket, /healthz, /metrics and a page, and the UDP reflector. SHELL.

RelayServer makes what all sessions share, looks after them once a second, and ends them in order when the relay
restarts. What a connection does is session.py's; flags and signals are __main__'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from http import HTTPStatus

from websockets.frames import CloseCode

from relay import page
from relay.config import RelayConfig, read_access_file, tls_context
from relay.connection import Page
from relay.limits import QueueTotal, Slots, TokenBucket
from relay.memory import Reclaimer
from relay.metrics import CONTENT_TYPE as METRICS_TYPE
from relay.metrics import Counts, Metrics, version
from relay.record_pump import RecordPump
from relay.reflector import IPV6_MISSING, Reflector
from relay.session import Session, Shared
from transport.errors import Address, BindFailed
from transport.proto.relay_frames import INSTANCE_ID_BYTES, MAX_MESSAGE, Restarting

logger = logging.getLogger(__name__)

BACKLOG = 1024  # after a restart many come at once
CHECK_INTERVAL = 1.0
DRAIN_STEP = 0.02


class RelayServer:
    """`start`, then `shutdown` (in order) or `close` (at once)."""

    def __init__(self, config: RelayConfig) -> None:
        self.config = config
        self.counts = Counts()
        self.metrics = Metrics(self.counts, self._gauges)
        self._reflector = Reflector(self.counts)
        self._memory = Reclaimer()
        self._server: asyncio.Server | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._started = time.monotonic()

    async def start(self) -> None:
        """Listen. Raises BindFailed, and ConfigError when a file that config names cannot be used."""
        config = self.config
        loop = asyncio.get_running_loop()
        now = loop.time()
        disco_burst = max(config.global_disco_rate, MAX_MESSAGE)
        self.shared = Shared(
            config=config,
            loop=loop,
            page=self._page,
            login_seconds=self.metrics.login_seconds.observe,
            counts=self.counts,
            instance_id=secrets.token_bytes(INSTANCE_ID_BYTES),
            queues=QueueTotal(config.max_queued),
            records=RecordPump(config, self.counts, loop),
            bulk=TokenBucket(config.global_rate, max(config.global_rate, MAX_MESSAGE), now),
            disco=TokenBucket(config.global_disco_rate, disco_burst, now),
            pending=Slots(config.max_pending_per_ip, config.max_pending),
            clients_by_ip=Slots(config.max_clients_per_ip, config.max_clients),
        )
        self.shared.all_gone.set()
        self.reload_access()
        tls = tls_context(config)
        sock = _listen(config.listen)
        try:
            if config.reflector_ports is not None:
                await self._reflector.start(config.reflector_host or config.listen[0], config.reflector_ports)
                self.shared.reflector_ports = self._reflector.ports
            self._server = await loop.create_server(
                lambda: Session(self.shared),
                sock=sock,
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=config.login_timeout if tls else None,
                ssl_shutdown_timeout=config.linger if tls else None,
            )
        except BaseException:
            sock.close()
            self._reflector.close()
            raise
        self._check_timer = loop.call_later(CHECK_INTERVAL, self._check)
        logger.info("started port=%d reflector=%s", self.address[1], self.shared.reflector_ports)

    @property
    def address(self) -> Address:
        """Where it listens."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    @property
    def reflector_ports(self) -> tuple[int, int]:
        """The two UDP ports; 0 for none."""
        return self.shared.reflector_ports

    def reload_access(self) -> None:
        """Read the access list again; whoever is no longer on it is sent away. Raises ConfigError."""
        path = self.config.access_file
        if path is None:
            return
        access = read_access_file(path)
        self.shared.access = access
        for key, session in list(self.shared.router.sessions.items()):
            if key not in access:
                session.refuse_not_on_list()
        logger.info("access_list keys=%d", len(access))

    async def shutdown(self) -> None:
        """Tell everybody, let the queues run empty (drain_timeout at most), close everything."""
        shared, loop = self.shared, asyncio.get_running_loop()
        shared.shutting_down = True
        shortest = round(self.config.restart_min * 1000)
        restarting = Restarting(shortest, shortest + shared.spread_ms())
        for session in list(shared.sessions):
            session.tell_restart(restarting)
        deadline = loop.time() + self.config.drain_timeout
        # No event tells that the last of many queues is empty.
        while loop.time() < deadline and any(session.has_unsent() for session in shared.sessions):  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_STEP)
        for session in list(shared.sessions):
            session.end(CloseCode.SERVICE_RESTART, "restart")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(shared.all_gone.wait(), self.config.linger)
        await self.close()

    async def close(self) -> None:
        """Close everything at once."""
        if self._check_timer is not None:
            self._check_timer.cancel()
            self.shared.records.close()
        self._reflector.close()
        if self._server is None:
            return
        self._server.close()
        for session in list(self.shared.sessions):
            session.abort("abandoned")
        await self.shared.all_gone.wait()
        with contextlib.suppress(TimeoutError):  # TLS handshakes that go on hold it up
            await asyncio.wait_for(self._server.wait_closed(), self.config.linger)
        self._server = None

    def _check(self) -> None:
        loop = self.shared.loop
        now = loop.time()
        for session in list(self.shared.sessions):
            session.check(now, self.config.idle_timeout, self.config.write_timeout)
        self.shared.records.expire()
        connections = len(self.shared.sessions)
        self._memory.look(connections, self.shared.most_sessions, now)
        self.shared.most_sessions = connections
        self._check_timer = loop.call_later(CHECK_INTERVAL, self._check)

    def _page(self, path: str) -> Page:
        shared = self.shared
        if path == "/healthz":
            if shared.shutting_down:
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"shutting down\n")
            return Page(HTTPStatus.OK, "text/plain", b"ok\n")
        if path == "/metrics":
            return Page(HTTPStatus.OK, METRICS_TYPE, self.metrics.render())
        if path in ("/", ""):
            body = page.render(len(shared.router), time.monotonic() - self._started, version())
            policy = (("Content-Security-Policy", page.CONTENT_SECURITY_POLICY),)
            return Page(HTTPStatus.OK, page.CONTENT_TYPE, body, policy)
        return Page(HTTPStatus.NOT_FOUND, "text/plain", b"nothing here; this is a peer relay\n")

    def _gauges(self) -> dict[str, float]:
        shared = self.shared
        return {
            "clients": len(shared.router),
            "connections": len(shared.sessions),
            "connections_not_logged_in": shared.pending.used,
            "directory_bytes": shared.records.directory.size,
            "directory_records": shared.records.directory.count,
            "directory_watches": shared.records.directory.watches,
            "queue_bytes": shared.queues.used,
            "reconnect_spread_seconds": shared.spread_ms() / 1000,
            "uptime_seconds": time.monotonic() - self._started,
        }


def _listen(address: Address) -> socket.socket:
    """A listening socket. SO_REUSEADDR: a restart binds at once. No SO_REUSEPORT: two relays would share clients."""
    host, port = address
    try:
        return _listen_on(host, port)
    except UnicodeError as error:  # a name that no resolver can be asked for
        raise BindFailed(f"TCP port {port}: {host!r} is no host name; choose another --listen") from error
    except OSError as error:
        if host == "::" and error.errno in IPV6_MISSING:
            return _listen(("0.0.0.0", port))
        raise BindFailed(f"TCP port {port} on {host}: {error.strerror or error}; choose another --listen") from error


def _listen_on(host: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows, where SO_REUSEADDR lets anybody take the port over
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.setblocking(False)
        sock.bind(where)
        sock.listen(BACKLOG)  # here, not later: a port in use shows only now on some systems
    except OSError:
        sock.close()
        raise
    return sock
