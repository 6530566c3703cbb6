"""Two endpoints and a real relay: first contact, the move to a direct path, and back when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from tests.transport.fake_relay import FakeRelay
from tests.transport.relay_process import RelayProcess
from transport.config import TransportConfig
from transport.connection import Connection
from transport.endpoint import Endpoint
from transport.errors import Address, NotAdmitted, TransportError, Unreachable
from transport.identity import Identity, PeerId
from transport.news import News, RelayNews
from transport.proto.addresses import PathId, PathKind

REQUEST = 12_288
Open = Callable[..., Awaitable[Endpoint]]


@pytest.fixture
async def relay() -> AsyncIterator[RelayProcess]:
    process = RelayProcess()
    await process.start()
    yield process
    await process.end()


@pytest.fixture
async def second_relay() -> AsyncIterator[RelayProcess]:
    process = RelayProcess()
    await process.start()
    yield process
    await process.end()


@pytest.fixture
async def open_endpoint() -> AsyncIterator[Open]:
    """An endpoint on loopback with these relays, that echoes whatever its peers send."""
    opened: list[tuple[Endpoint, asyncio.Task[None]]] = []

    async def open_one(*relays: RelayProcess, admit: Callable[[PeerId], bool] | None = None) -> Endpoint:
        config = TransportConfig(relays=tuple(relay.url for relay in relays), port_mapping=False)
        endpoint = await Endpoint.bind(Identity.generate(), config, listen=("127.0.0.1", 0), admit=admit)
        opened.append((endpoint, asyncio.create_task(echo(endpoint))))
        return endpoint

    yield open_one
    for endpoint, task in opened:
        task.cancel()
        await endpoint.close()


async def echo(endpoint: Endpoint) -> None:
    async def serve(connection: Connection) -> None:
        with contextlib.suppress(TransportError):
            stream = await connection.accept_stream()
            while True:
                await stream.write(await stream.readexactly(REQUEST))

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(serve(await endpoint.accept()))


class Hole:
    """Loses every UDP datagram to these addresses, both ways, as a firewall that has changed its mind does."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.closed = False
        self._sends = [(one.socket.udp, one.socket.udp.send) for one in endpoints]
        for udp, send in self._sends:
            udp.send = self._losing(send)  # type: ignore[method-assign,assignment]

    def _losing(self, send: Callable[[Sequence[bytes], Address], None]) -> Callable[[Sequence[bytes], Address], None]:
        def maybe(datagrams: Sequence[bytes], address: Address) -> None:
            if not self.closed:
                send(datagrams, address)

        return maybe


async def path_becomes(endpoint: Endpoint, peer: PeerId, relayed: bool, within: float) -> None:
    async with asyncio.timeout(within):
        while True:
            decision = endpoint.decision(peer)
            if decision is not None and decision.primary is not None and bool(decision.primary.relay) == relayed:
                return
            await asyncio.sleep(0.02)


async def test_two_that_know_only_each_others_keys_meet_and_move_to_a_direct_path(
    relay: RelayProcess, open_endpoint: Open
) -> None:
    ours, theirs = await open_endpoint(relay), await open_endpoint(relay)
    connection = await ours.dial(theirs.peer_id)
    stream = await connection.open_stream()
    await stream.write(bytes(REQUEST))
    assert await stream.readexactly(REQUEST) == bytes(REQUEST)
    await path_becomes(ours, theirs.peer_id, relayed=False, within=3)
    await path_becomes(theirs, ours.peer_id, relayed=False, within=3)
    stats = connection.stats()
    assert (stats.path, stats.path_address, stats.relay) == (PathKind.LOOPBACK, theirs.address, "")
    kinds = {view.kind for view in ours.paths(theirs.peer_id)}
    assert kinds == {PathKind.LOOPBACK, PathKind.RELAY}


async def test_requests_go_on_when_the_direct_path_dies_and_come_back_to_it(
    relay: RelayProcess, open_endpoint: Open
) -> None:
    ours, theirs = await open_endpoint(relay), await open_endpoint(relay)
    hole = Hole(ours, theirs)
    connection = await ours.dial(theirs.peer_id)
    await path_becomes(ours, theirs.peer_id, relayed=False, within=3)
    stream = await connection.open_stream()
    loop = asyncio.get_running_loop()
    waits: list[float] = []

    async def requests(count: int) -> None:
        for number in range(count):
            payload = number.to_bytes(4, "big") * (REQUEST // 4)
            began = loop.time()
            async with asyncio.timeout(8):
                await stream.write(payload)
                assert await stream.readexactly(REQUEST) == payload
            waits.append(loop.time() - began)
            await asyncio.sleep(0.02)

    await requests(10)
    hole.closed = True
    await requests(40)
    await path_becomes(ours, theirs.peer_id, relayed=True, within=5)
    assert max(waits) < 3.0  # 0.3 to 0.6 s on a quiet machine; the lab measures it
    hole.closed = False
    await asyncio.gather(requests(100), path_becomes(ours, theirs.peer_id, relayed=False, within=15))
    assert connection.close_reason is None


async def test_a_relay_that_dies_and_returns_costs_a_direct_path_nothing(
    relay: RelayProcess, open_endpoint: Open
) -> None:
    ours, theirs = await open_endpoint(relay), await open_endpoint(relay)
    connection = await ours.dial(theirs.peer_id)
    await path_becomes(ours, theirs.peer_id, relayed=False, within=3)
    await relay.end(signal.SIGKILL)
    stream = await connection.open_stream()
    for _ in range(10):
        await stream.write(bytes(REQUEST))
        await stream.readexactly(REQUEST)
    await relay.start()
    async with asyncio.timeout(10):
        while not all(view.up for one in (ours, theirs) for view in one.relays()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert connection.close_reason is None


async def test_the_second_relay_takes_over_within_three_seconds(
    relay: RelayProcess, second_relay: RelayProcess, open_endpoint: Open
) -> None:
    ours, theirs = await open_endpoint(relay, second_relay), await open_endpoint(relay, second_relay)
    Hole(ours, theirs).closed = True  # no UDP at all
    async with asyncio.timeout(10):
        while not all(view.up for one in (ours, theirs) for view in one.relays()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    connection = await ours.dial(theirs.peer_id)
    stream = await connection.open_stream()
    await stream.write(bytes(REQUEST))
    await stream.readexactly(REQUEST)
    used = connection.stats().relay
    await (relay if used == relay.url else second_relay).end(signal.SIGKILL)
    async with asyncio.timeout(3):
        await stream.write(bytes(REQUEST))
        await stream.readexactly(REQUEST)
    assert connection.stats().relay != used


async def test_who_is_not_admitted_gets_no_answer_and_is_told_why_it_may_be(
    relay: RelayProcess, open_endpoint: Open
) -> None:
    ours, theirs = await open_endpoint(relay), await open_endpoint(relay, admit=lambda _: False)
    with pytest.raises((Unreachable, NotAdmitted)):
        await ours.dial(theirs.peer_id, timeout=3)
    assert theirs.connections() == []
    with pytest.raises(Unreachable, match="may not know this node"):
        await ours.ping(theirs.peer_id, timeout=4)
    assert theirs.reach.paths.counters.not_admitted > 0


async def test_a_relay_that_names_another_sender_gets_nothing_in(relay: RelayProcess, open_endpoint: Open) -> None:
    ours, theirs = await open_endpoint(relay), await open_endpoint(relay)
    liar = Identity.generate().peer_id
    deliver = theirs.socket.on_relayed
    assert theirs.reach.relays is not None
    theirs.reach.relays._on_datagrams = (  # as if the relay did it
        lambda url, _sender, datagrams, disco: deliver(url, liar, datagrams, disco)
    )
    with pytest.raises(TransportError):
        await ours.dial(theirs.peer_id, timeout=3)
    assert theirs.connections() == []
    assert theirs.reach.paths.counters.forged > 0


async def test_a_peer_that_is_not_there_is_unreachable_and_the_reason_says_so(
    relay: RelayProcess, open_endpoint: Open
) -> None:
    ours = await open_endpoint(relay)
    nobody = Identity.generate().peer_id
    with pytest.raises(Unreachable, match=r"not connected to http://127\.0\.0\.1"):
        await ours.dial(nobody, timeout=2)
    await relay.end(signal.SIGKILL)
    with pytest.raises(Unreachable, match=r"relay http://127\.0\.0\.1:\d+: "):
        await ours.dial(nobody, timeout=1)


async def test_garbage_on_every_port_harms_nothing(relay: RelayProcess, open_endpoint: Open) -> None:
    ours, theirs = await open_endpoint(relay), await open_endpoint(relay)
    for first in range(256):
        for size in (1, 20, 100, 1300):
            theirs.socket.udp._received(bytes([first]) * size, size, ("127.0.0.1", 9))
            theirs.socket.on_relayed(relay.url, ours.peer_id, [bytes([first]) * size], False)
    assert (await ours.ping(theirs.peer_id)).path.id != PathId()
    await ours.dial(theirs.peer_id)


async def test_a_strangers_relay_carries_datagrams_and_is_asked_and_told_nothing_else(open_endpoint: Open) -> None:
    async with FakeRelay(reflectors=(0, 0)) as own, FakeRelay(reflectors=(3478, 3479)) as stranger:
        endpoint = await open_endpoint(own)
        news: list[News] = []
        endpoint.on_news = news.append
        relays = endpoint.reach.relays
        assert relays is not None

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(10):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        await until(lambda: relays.up() == (own.url,))
        assert relays.need(stranger.url)
        await until(lambda: relays.up() == (own.url, stranger.url))
        assert endpoint.reach.counters().stun.sent == 0  # it would have been asked in the same turn
        assert [(view.url, view.own) for view in endpoint.relays()] == [(own.url, True), (stranger.url, False)]
        assert RelayNews(stranger.url, True, "", own=False) in news
        assert endpoint.reach.relay_problems() == ""
        await own.stop()
        await until(lambda: relays.up() == (stranger.url,))
        assert endpoint.reach.relay_problems().startswith(f"relay {own.url}: ")
        assert stranger.url not in endpoint.reach.relay_problems()


async def test_what_was_refused_is_counted_and_can_be_seen(relay: RelayProcess, open_endpoint: Open) -> None:
    ours, theirs = await open_endpoint(relay), await open_endpoint(relay, admit=lambda _: False)
    async with asyncio.timeout(10):
        while not all(view.up for one in (ours, theirs) for view in one.relays()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    with pytest.raises(Unreachable):
        await ours.ping(theirs.peer_id, timeout=1)
    before = theirs.reach.counters()
    theirs.socket.udp._received(bytes([0x3F]) * 100, 100, ("127.0.0.1", 9))
    counters = theirs.reach.counters()
    assert counters.disco.not_admitted > 0
    assert (before.socket.unknown, counters.socket.unknown) == (0, 1)  # a copy does not change
    assert counters.relays[relay.url].received_frames > 0
    assert counters.stun.sent == 0  # this relay has no reflector
