"""Plain WebSocket messages through the relay as a carrier, without QUIC: what the relay's hop itself costs.

Each datagram of a frame is one byte DATA and the session's bytes, or TAKEN and how many (u32) of bulk have been taken.
A relay drops what a client does not read, so bulk keeps to a window.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from swarmnode.bench.carriers.base import BULK, Answers, Place, Session
from transport.identity import Identity, PeerId
from transport.proto.relay_url import parse_relay_url
from transport.relay_link import RelayLink
from transport.relay_session import RelayLinkConfig

DATA, TAKEN = b"D", b"T"
PIECE = 60_000  # a datagram in a frame has at most 65,535 bytes
WINDOW = 512 * 1024  # half of what the link and the relay hold for a slow reader


class MessagesSession:
    """The client's side."""

    def __init__(self, link: RelayLink, peer: PeerId) -> None:
        self._link, self._peer = link, peer
        self._missing = 0  # bytes of answers
        self._ahead = 0  # bytes of bulk not yet taken
        self._woken: asyncio.Future[None] | None = None

    def received(self, datagrams: list[bytes]) -> None:
        """A message of the server."""
        for datagram in datagrams:
            if datagram.startswith(TAKEN):
                self._ahead -= int.from_bytes(datagram[1:], "big")
            else:
                self._missing -= len(datagram) - 1
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken

    async def ask(self, request: bytes, size: int) -> None:
        """See Session."""
        self._missing += size
        self._link.send(self._peer, _pieces(request))
        await self._until(lambda: self._missing <= 0)

    async def push(self, data: bytes) -> None:
        """See Session."""
        for piece in _pieces(data):
            await self._until(lambda: self._ahead < WINDOW)
            self._ahead += len(piece) - 1
            self._link.send(self._peer, [piece])

    async def answer(self) -> None:
        """See Session."""
        self._missing += 1
        await self._until(lambda: self._missing <= 0)


class RelayMessages:
    """Two links to one relay."""

    name = "websocket-relay"
    note = "WebSocket messages through the relay, without QUIC: one sender's TCP, the relay, one receiver's TCP"
    quick = True
    bulk_megabytes = 200
    missing = ""

    async def serve(self, place: Place) -> AsyncIterator[str]:
        """See Carrier."""
        clients: dict[PeerId, Answers] = {}

        def received(_url: str, peer: PeerId, datagrams: list[bytes], _disco: bool) -> None:
            answers = clients.get(peer)
            if answers is None:
                answers = clients[peer] = Answers(lambda data: link.send(peer, _pieces(data)))
            for datagram in datagrams:
                answers.received(datagram[1:])
            if answers.mode == BULK:
                taken = sum(map(len, datagrams)) - len(datagrams)
                link.send(peer, [TAKEN + taken.to_bytes(4, "big")])

        async with _linked(place, place.identity(self.name), received) as link:
            yield "through the relay"

    @contextlib.asynccontextmanager
    async def connect(self, place: Place, where: str) -> AsyncIterator[Session]:
        """See Carrier."""
        sessions: list[MessagesSession] = []

        def received(_url: str, _peer: PeerId, datagrams: list[bytes], _disco: bool) -> None:
            sessions[0].received(datagrams)

        async with _linked(place, Identity.generate(), received) as link:
            sessions.append(MessagesSession(link, place.identity(self.name).peer_id))
            yield sessions[0]


@contextlib.asynccontextmanager
async def _linked(
    place: Place, identity: Identity, received: Callable[[str, PeerId, list[bytes], bool], None]
) -> AsyncIterator[RelayLink]:
    """A link that is up."""
    up = asyncio.Event()

    def state(_url: str, is_up: bool, _reason: str) -> None:
        if is_up:
            up.set()

    url = parse_relay_url(place.relay)
    link = RelayLink(url, identity, RelayLinkConfig(), received, state, lambda *_: None)
    link.start()
    try:
        await up.wait()
        yield link
    finally:
        await link.close()


def _pieces(data: bytes) -> Sequence[bytes]:
    return [DATA + data[at : at + PIECE] for at in range(0, len(data), PIECE)]
