"""A relay client for tests: small, strict, and able to misbehave."""

from __future__ import annotations

import asyncio
import ssl
from types import TracebackType
from typing import Self, TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from transport.identity import Identity
from transport.proto.relay_frames import (
    MAX_MESSAGE,
    PATH,
    SUBPROTOCOL,
    VERSION,
    Challenge,
    Data,
    Login,
    Refused,
    ServerFrame,
    Welcome,
    decode_server,
    login_message,
)

PATIENCE = 10.0  # seconds until a test gives up; nothing here takes so long

Kind = TypeVar("Kind")


class Client:
    """async with Client(port, …) as client: connected, and logged in unless login=False."""

    def __init__(
        self,
        port: int,
        identity: Identity | None = None,
        *,
        authority: str = "relay.test",
        login: bool = True,
        headers: dict[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.identity = identity or Identity.generate()
        self.key = self.identity.peer_id.raw
        self.port = port
        self.authority = authority
        self.welcome: Welcome | None = None
        self._login = login
        self._headers = headers
        self._tls = tls

    async def __aenter__(self) -> Self:
        self.socket: ClientConnection = await connect(
            f"{'wss' if self._tls else 'ws'}://127.0.0.1:{self.port}{PATH}",
            ssl=self._tls,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            max_size=MAX_MESSAGE,
            ping_interval=None,
            close_timeout=1,
            proxy=None,
            additional_headers=self._headers,
        )
        self.challenge = await self.expect(Challenge)
        if self._login:
            await self.send_login()
            self.welcome = await self.expect(Welcome)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.socket.close()

    async def send_login(self, **changes: object) -> None:
        """A LOGIN; `changes` replace its fields."""
        signature = self.identity.sign(login_message(self.challenge.nonce, self.authority))
        fields = {"version": VERSION, "key": self.key, "authority": self.authority, "signature": signature}
        await self.send(Login(**{**fields, **changes}).encode())  # type: ignore[arg-type]

    async def send(self, message: bytes) -> None:
        """One binary message."""
        await self.socket.send(message)

    async def data(self, peer: bytes, *datagrams: bytes, disco: bool = False) -> None:
        """Datagrams to a peer."""
        await self.send(Data(peer, datagrams, disco).encode())

    async def receive(self) -> ServerFrame:
        """The next frame."""
        message = await asyncio.wait_for(self.socket.recv(), PATIENCE)
        assert isinstance(message, bytes)
        return decode_server(message)

    async def expect(self, kind: type[Kind]) -> Kind:
        """The next frame, which is of this kind."""
        frame = await self.receive()
        assert isinstance(frame, kind), frame
        return frame

    async def refused(self) -> Refused:
        """The relay's last words; after them it closes."""
        frame = await self.expect(Refused)
        await self.closed()
        return frame

    async def closed(self) -> int | None:
        """Wait until the relay has closed; its WebSocket close code."""
        try:
            while True:
                await asyncio.wait_for(self.socket.recv(), PATIENCE)
        except ConnectionClosed:
            return self.socket.close_code
