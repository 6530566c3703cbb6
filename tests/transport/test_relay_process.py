"""Links and pools against the real relay, as a process of its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.transport.relay_process import RelayProcess
from transport.identity import Identity, PeerId
from transport.proto.relay_frames import GoneReason
from transport.relay_pool import RelayPool
from transport.relay_session import RelayLinkConfig

StartRelay = Callable[..., Awaitable[RelayProcess]]


class Node:
    """A pool and what it told."""

    def __init__(self, urls: list[str], identity: Identity | None = None) -> None:
        self.identity = identity or Identity.generate()
        self.received: list[tuple[PeerId, list[bytes], bool]] = []
        self.gone: list[tuple[PeerId, GoneReason]] = []
        self.states: list[tuple[str, bool, str]] = []
        self._changed = asyncio.Event()
        self.pool = RelayPool(
            urls, self.identity, RelayLinkConfig(), self._on_datagrams, self._on_state, self._on_gone, self._changed.set
        )
        self.pool.start()

    def _on_datagrams(self, _url: str, peer: PeerId, datagrams: list[bytes], disco: bool) -> None:
        self.received.append((peer, datagrams, disco))
        self._changed.set()

    def _on_state(self, url: str, up: bool, reason: str) -> None:
        self.states.append((url, up, reason))
        self._changed.set()

    def _on_gone(self, _url: str, peer: PeerId, why: GoneReason) -> None:
        self.gone.append((peer, why))
        self._changed.set()

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def until(self, condition: Callable[[], bool], timeout: float = 20) -> None:
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def is_up(self, count: int = 1) -> None:
        await self.until(lambda: len(self.pool.up()) == count)


@pytest.fixture
async def start() -> AsyncIterator[StartRelay]:
    relays: list[RelayProcess] = []

    async def start_one(*options: str) -> RelayProcess:
        relays.append(RelayProcess(*options))
        await relays[-1].start()
        return relays[-1]

    yield start_one
    await asyncio.gather(*(relay.end() for relay in relays))


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make_one(urls: list[str], identity: Identity | None = None) -> Node:
        nodes.append(Node(urls, identity))
        return nodes[-1]

    yield make_one
    await asyncio.gather(*(node.pool.close() for node in nodes))


async def test_datagrams_of_every_size_arrive_from_who_sent_them(start: StartRelay, make: Callable[..., Node]) -> None:
    relay = await start()
    a, b = make([relay.url]), make([relay.url])
    await a.is_up()
    await b.is_up()
    sizes = [1, 1200, 1452, 8900, 65_535]
    a.pool.send(relay.url, b.peer, [bytes([7]) * size for size in sizes])
    a.pool.send(relay.url, b.peer, [b"call"], disco=True)
    await b.until(lambda: sum(len(datagrams) for _, datagrams, _ in b.received) == len(sizes) + 1)
    bulk = [datagram for _, datagrams, disco in b.received if not disco for datagram in datagrams]
    assert [len(datagram) for datagram in bulk] == sizes
    assert {peer for peer, _, _ in b.received} == {a.peer}
    assert [datagrams for _, datagrams, disco in b.received if disco] == [[b"call"]]


async def test_the_relay_says_who_is_not_there(start: StartRelay, make: Callable[..., Node]) -> None:
    relay = await start()
    node, nobody = make([relay.url]), Identity.generate().peer_id
    await node.is_up()
    node.pool.send(relay.url, nobody, [b"x"])
    await node.until(lambda: bool(node.gone))
    assert node.gone == [(nobody, GoneReason.NOT_CONNECTED)]
    link = node.pool.link(relay.url)
    assert link is not None
    assert link.observed.startswith("127.0.0.1:")
    assert link.reflectors == []


async def test_a_relay_that_crashed_is_come_back_to(start: StartRelay, make: Callable[..., Node]) -> None:
    relay = await start()
    node = make([relay.url])
    await node.is_up()
    await relay.end()
    await node.is_up(0)
    await relay.start()
    await node.is_up()


async def test_a_relay_that_was_told_to_end_sends_its_clients_to_their_second_at_once(
    start: StartRelay, make: Callable[..., Node]
) -> None:
    first, second = await start(), await start()
    node = make([first.url, second.url])
    await node.is_up(2)
    home, other = (first, second) if node.pool.home == first.url else (second, first)
    ending = asyncio.create_task(home.end(signal.SIGTERM))
    await node.until(lambda: node.pool.up() == (other.url,))
    assert node.pool.home == other.url
    assert "restarts" in next(reason for _, up, reason in node.states if not up)
    await ending


async def test_a_relay_that_hangs_is_left_within_three_seconds_of_traffic(
    start: StartRelay, make: Callable[..., Node]
) -> None:
    first, second = await start(), await start()
    node, peer = make([first.url, second.url]), make([first.url, second.url])
    await node.is_up(2)
    await peer.is_up(2)
    home, other = (first, second) if node.pool.home == first.url else (second, first)
    home.freeze()
    loop = asyncio.get_running_loop()
    began = loop.time()
    while node.pool.home == home.url:
        node.pool.send(home.url, peer.peer, [bytes(1200)])
        await asyncio.sleep(0.02)
        assert loop.time() - began < 15  # 2.5 s on a quiet machine
    assert node.pool.send(other.url, peer.peer, [b"by the second"])
    await peer.until(lambda: (node.peer, [b"by the second"], False) in peer.received)


async def test_a_wrong_name_is_refused_and_said(start: StartRelay, make: Callable[..., Node]) -> None:
    relay = await start("--name", "relay.example")
    node = make([relay.url])
    await node.until(lambda: bool(node.states))
    url, up, reason = node.states[0]
    assert (url, up) == (relay.url, False)
    assert "refused" in reason
