"""A relay of a hundred lines, told by a test to be silent, rude or gone. The real one has its own tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Self

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from transport.identity import PeerId
from transport.proto import relay_frames as frames

NONCE = bytes(range(32))


class FakeRelay:
    """Speaks the relay protocol on loopback; `sessions` are those that were welcomed, by key."""

    def __init__(
        self, ping_s: int = 20, spread_ms: int = 200, reflectors: tuple[int, int] = (3478, 3479), version: int = 1
    ) -> None:
        self.features = 0
        self.records: list[frames.Publish | frames.Watch] = []
        self.ping_s, self.spread_ms, self.reflectors, self.version = ping_s, spread_ms, reflectors, version
        self.sessions: dict[bytes, ServerConnection] = {}
        self.logins: list[float] = []  # when, by the loop's clock
        self.pings = 0
        self.received: list[frames.Data] = []
        self.answers_pings = True
        self.reads = asyncio.Event()  # cleared: the relay stops reading
        self.reads.set()
        self.pong_delay = 0.0
        self.refuse_with: frames.Refused | None = None
        self.on_challenge: Callable[[ServerConnection], bytes | str | None] | None = None
        self.changed = asyncio.Condition()
        self._server: Server | None = None
        self.port = 0
        self.authority = ""  # what a front in between makes of our own

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def listen(self) -> None:
        """Listen, on the same port when it did before."""
        self._server = await serve(
            self._session,
            "127.0.0.1",
            self.port,
            subprotocols=[Subprotocol(frames.SUBPROTOCOL)],
            compression=None,
            max_size=frames.MAX_MESSAGE,
            ping_interval=None,
            close_timeout=0.2,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def stop(self) -> None:
        """Kill all connections and stop listening."""
        self.reads.set()
        if self._server is not None:
            for connection in list(self._server.connections):
                connection.transport.abort()
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset_all(self) -> None:
        """End all sessions as a crash does."""
        for session in list(self.sessions.values()):
            session.transport.abort()

    async def tell(self, message: bytes) -> None:
        """Send a message to all sessions."""
        for session in list(self.sessions.values()):
            await session.send(message)

    async def until(self, condition: Callable[[], bool], timeout: float = 10) -> None:
        """Wait until something that the relay sees is so."""
        async with asyncio.timeout(timeout), self.changed:
            await self.changed.wait_for(condition)

    async def _session(self, socket: ServerConnection) -> None:
        key = b""
        with contextlib.suppress(ConnectionClosed):
            key = await self._login(socket)
            if key:
                await self._serve(socket, key)
        if self.sessions.get(key) is socket:
            del self.sessions[key]
        await self._notify()

    async def _login(self, socket: ServerConnection) -> bytes:
        if self.on_challenge is not None:
            message = self.on_challenge(socket)
            if message is not None:
                await socket.send(message)
            await socket.wait_closed()
            return b""
        await socket.send(frames.Challenge(self.version, NONCE).encode())
        data = await socket.recv()
        assert isinstance(data, bytes)
        login = frames.decode_client(data)
        assert isinstance(login, frames.Login)
        assert PeerId(login.key).verify(login.signature, frames.login_message(NONCE, login.authority))
        assert login.authority == (self.authority or f"127.0.0.1:{self.port}")
        self.logins.append(asyncio.get_running_loop().time())
        if self.refuse_with is not None:
            await socket.send(self.refuse_with.encode())
            await self._notify()
            return b""
        host, port = socket.remote_address[:2]
        await socket.send(
            frames.Welcome(
                self.ping_s, self.spread_ms, 10_000_000, self.reflectors, bytes(16), f"{host}:{port}", self.features
            ).encode()
        )
        self.sessions[login.key] = socket
        await self._notify()
        return login.key

    async def _serve(self, socket: ServerConnection, key: bytes) -> None:
        while True:
            message = await socket.recv()
            await self.reads.wait()
            assert isinstance(message, bytes)
            match frames.decode_client(message):
                case frames.Ping(echo):
                    self.pings += 1
                    if self.answers_pings:
                        await asyncio.sleep(self.pong_delay)
                        await socket.send(frames.Pong(echo, self.spread_ms).encode())
                case frames.Data() as data:
                    self.received.append(data)
                    other = self.sessions.get(data.peer)
                    if other is not None:
                        await other.send(frames.relayed(message, key)[1])
                case frames.Publish() | frames.Watch() as record:
                    self.records.append(record)
                case _:
                    pass
            await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
