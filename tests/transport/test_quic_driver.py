"""Hostile and damaged datagrams, and links that lose them: nothing of it may harm an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transport.conftest import Bind
from tests.transport.test_endpoint import connect
from transport.connection import Connection
from transport.emulation import LinkEmulation
from transport.endpoint import Endpoint
from transport.errors import Address, ConnectionClosed, EngineFault
from transport.proto.addresses import PathId, PathKind
from transport.quic_driver import Link, QuicDriver
from transport.route import Path, Route


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """A plain UDP socket of somebody else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.bind(("127.0.0.1", 0))
        yield opened


async def echo_works(ours: Connection, theirs: Connection, payload: bytes = b"still alive") -> None:
    stream = await ours.open_stream()
    async with asyncio.timeout(20):
        sending = asyncio.ensure_future(stream.write(payload))
        incoming = await theirs.accept_stream()
        assert await incoming.readexactly(len(payload)) == payload
        await sending
        await incoming.write(b"yes")
        assert await stream.readexactly(3) == b"yes"


def record(endpoint: Endpoint) -> list[bytes]:
    """All datagrams that this endpoint sends from now on."""
    sent: list[bytes] = []
    send = endpoint.socket.udp.send

    def recording(datagrams: list[bytes], destination: Address) -> None:
        sent.extend(datagrams)
        send(datagrams, destination)

    endpoint.socket.udp.send = recording  # type: ignore[method-assign,assignment]
    return sent


def damaged(datagram: bytes, source: random.Random) -> Iterator[bytes]:
    """Truncations, bit flips, extensions and header variants of a real datagram."""
    yield datagram
    for _ in range(6):
        yield datagram[: source.randrange(len(datagram))]
        at = source.randrange(len(datagram))
        yield datagram[:at] + bytes([datagram[at] ^ 1 << source.randrange(8)]) + datagram[at + 1 :]
        yield datagram + source.randbytes(source.randrange(200))
        yield datagram[: source.randrange(40)] + source.randbytes(1200)
    for first in range(0, 256, 5):
        yield bytes([first]) + datagram[1:]


async def test_damaged_copies_of_real_datagrams_do_no_harm(
    bind: Bind, engines: tuple[str, str], stranger: socket.socket
) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])
    sent = record(client)
    ours, theirs = await connect(client, server)
    await echo_works(ours, theirs)
    source = random.Random(5)
    for datagram in list(sent):
        for hostile in damaged(datagram, source):
            stranger.sendto(hostile, server.address)
            stranger.sendto(hostile, client.address)
        await echo_works(ours, theirs)
    assert ours.stats().path_address == server.address
    assert theirs.stats().path_address == client.address  # no source was followed


async def test_damaged_first_flights_open_nothing(
    bind: Bind, engines: tuple[str, str], stranger: socket.socket
) -> None:
    client, server = await bind(engines[0]), await bind(engines[1], max_pending=8)
    stranger.setblocking(False)
    sent = record(client)
    peer = server.peer_id
    with pytest.raises(Exception, match="did not answer"):
        await client.dial(peer, [stranger.getsockname()], timeout=0.3)
    source = random.Random(6)
    for datagram in sent:
        for hostile in damaged(datagram, source):
            stranger.sendto(hostile, server.address)
    newcomer = await bind(engines[0])
    async with asyncio.timeout(20):
        ours = await newcomer.dial(peer, [server.address], timeout=15)
        await echo_works(ours, await server.accept())
    assert len(server._acceptor.deadlines) <= 8


@pytest.mark.parametrize("engine", ["qh3", "aioquic"])
async def test_random_datagrams_are_ignored(bind: Bind, engine: str, stranger: socket.socket) -> None:
    server, client = await bind(engine), await bind(engine)
    ours, theirs = await connect(client, server)
    source = random.Random(7)
    cids = list(theirs.link.cids)
    for round_ in range(300):
        size = source.choice([1, 2, 5, 6, 20, 100, 1200, 1500])
        noise = bytearray(source.randbytes(size))
        if round_ % 3 == 0 and size > 8:
            noise[0] = 0x40 | source.randrange(64)
            noise[1:9] = source.choice(cids)  # the right connection, the wrong bytes
        elif round_ % 3 == 1 and size >= 1200:
            noise[:6] = b"\xc0\x00\x00\x00\x01\x08"  # looks like the start of a connection
        stranger.sendto(noise, server.address)
    await echo_works(ours, theirs)
    assert server.connections() == [theirs]


def looks_like_an_initial(source: random.Random) -> bytes:
    """A well-formed header of a client's first packet (RFC 9000, 17.2.2), and noise."""
    header = b"\xc0\x00\x00\x00\x01\x08" + source.randbytes(8) + b"\x08" + source.randbytes(8) + b"\x00\x44\x96"
    return (header + source.randbytes(1200))[:1200]


@pytest.mark.parametrize("engine", ["qh3", "aioquic"])
async def test_noise_that_looks_like_a_first_datagram_holds_no_place(
    bind: Bind, engine: str, stranger: socket.socket
) -> None:
    server = await bind(engine, max_pending=4, handshake_timeout=60.0)
    source = random.Random(8)
    answers = record(server)
    for _ in range(20):
        receive(server, looks_like_an_initial(source), stranger.getsockname())
    assert not answers
    for _ in range(20):
        stranger.sendto(looks_like_an_initial(source), server.address)
    ours, theirs = await connect(await bind(), server)
    await echo_works(ours, theirs)
    assert not server._acceptor.deadlines
    assert server._table.all == {theirs}
    assert not server._driver._closed
    assert set(server._driver._links.values()) == {theirs.link}


async def first_datagram(bind: Bind, engine: str, server: Endpoint) -> bytes:
    """A real client's first datagram to this server's key, which the server has not seen."""
    client = await bind(engine)
    sent = record(client)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(Exception, match="did not answer"):
            await client.dial(server.peer_id, [nobody.getsockname()], timeout=0.05)
    return sent[0]


def receive(server: Endpoint, data: bytes, source: Address) -> None:
    """As if the socket had read this one datagram."""
    server._driver.on_quic(data, len(data), PathId(source), None)
    server._driver.on_drained()


async def test_handshakes_that_nobody_goes_on_with_give_way_to_newcomers(
    bind: Bind, engines: tuple[str, str], stranger: socket.socket
) -> None:
    server = await bind(engines[1], max_pending=2, handshake_timeout=60.0)
    for _ in range(3):
        receive(server, await first_datagram(bind, engines[0], server), stranger.getsockname())
    assert len(server._acceptor.deadlines) == 2
    ours, theirs = await connect(await bind(engines[0]), server)
    await echo_works(ours, theirs)


async def test_the_last_word_to_an_unknown_source_stays_within_the_limit(
    bind: Bind, engines: tuple[str, str], stranger: socket.socket
) -> None:
    server = await bind(engines[1])
    for spent in (False, True):
        first = await first_datagram(bind, engines[0], server)
        answers = record(server)
        receive(server, first, stranger.getsockname())
        [pending] = server._acceptor.deadlines
        if spent:  # all that this source may be sent has been sent
            answers.clear()
            pending.link.bytes_out = 3 * pending.link.bytes_in
        pending.end(1, "go away", ConnectionClosed(1, "go away"))
        for _ in range(3):
            receive(server, b"\x40" + pending.link.engine.host_cid + bytes(40), stranger.getsockname())
        assert sum(map(len, answers)) <= (0 if spent else 3 * len(first))
        assert not server._driver._closed  # nothing is said again


async def test_an_error_in_our_own_code_ends_the_connection_instead_of_losing_bytes(
    bind: Bind, engines: tuple[str, str]
) -> None:
    client, server = await bind(engines[0]), await bind(engines[1])
    ours, theirs = await connect(client, server)
    bulk, their_bulk = await connect(client, server, "bulk")

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    theirs.stream_data = broken  # type: ignore[method-assign,assignment]
    await (await ours.open_stream()).write(b"lost?")
    async with asyncio.timeout(5):
        reason = await theirs.wait_closed()
        await ours.wait_closed()
    assert isinstance(reason, EngineFault)
    assert isinstance(reason.__cause__, RuntimeError)
    await echo_works(bulk, their_bulk)


class Talker:
    """An engine and its owner that have one datagram to send whenever they are asked."""

    more = False

    def datagrams(self, _: float) -> list[bytes]:
        return [b"one"]

    def timer(self) -> None:
        return None

    def before_transmit(self) -> None: ...

    def after_transmit(self) -> None: ...


class FullAfterOne:
    """A peer socket that has room for one send at a time."""

    def __init__(self) -> None:
        self.blocked = False
        self.sent: list[Route] = []

    def send(self, route: Route, _: list[bytes]) -> None:
        self.sent.append(route)
        self.blocked = True


async def test_a_socket_that_fills_up_holds_back_the_links_that_are_left() -> None:
    driver = QuicDriver(lambda *_: None)
    full: Any = FullAfterOne()
    talker: Any = Talker()
    driver.socket = full
    routes = [Route(Path(PathKind.LOOPBACK, PathId(("127.0.0.1", port)), 1452)) for port in (1, 2, 3)]
    for route in routes:
        link = Link(talker, route, validated=True)
        link.owner = talker
        driver.mark(link)
    driver.on_drained()
    for count in (1, 2, 3):
        assert full.sent == routes[:count]
        full.blocked = False
        driver.on_writable()
    assert full.sent == routes
    driver.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=1300), segment=st.integers(1, 1300))
def test_the_driver_takes_any_bytes(data: bytes, segment: int) -> None:
    async def feed() -> None:
        from transport.config import TransportConfig
        from transport.identity import Identity

        endpoint = Endpoint(Identity.generate(b"f" * 32), TransportConfig(), ("127.0.0.1", 0), None)
        endpoint._driver.on_quic(data, segment, PathId(("127.0.0.1", 9)), None)
        endpoint._driver.on_drained()
        await endpoint.close()

    asyncio.run(feed())


async def test_an_unknown_source_gets_at_most_three_times_what_it_sent(
    bind: Bind, engines: tuple[str, str], stranger: socket.socket
) -> None:
    client, server = await bind(engines[0]), await bind(engines[1], handshake_timeout=2.0)
    sent = record(client)
    with pytest.raises(Exception, match="did not answer"):
        await client.dial(server.peer_id, [stranger.getsockname()], timeout=0.05)
    first = sent[0]
    answers = record(server)
    stranger.sendto(first, server.address)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.5):  # long enough for two probe time-outs
            await asyncio.Event().wait()
    assert sum(map(len, answers)) <= 3 * len(first)


async def test_a_lossy_slow_link_still_delivers(bind: Bind, engines: tuple[str, str]) -> None:
    emulation = LinkEmulation(rtt=0.02, jitter=0.004, loss=0.03, seed=3)
    client, server = await bind(engines[0], emulation=emulation), await bind(engines[1])
    loop = asyncio.get_running_loop()
    start = loop.time()
    ours, theirs = await connect(client, server)
    assert loop.time() - start >= 0.03  # two round trips
    await echo_works(ours, theirs, bytes(range(256)) * 600)
    assert ours.stats().lost > 0
    rtt = ours.stats().min_rtt_s
    assert rtt is not None
    assert rtt >= 0.015


async def test_a_close_crosses_an_emulated_link(bind: Bind) -> None:
    client, server = await bind(emulation=LinkEmulation(rtt=0.02)), await bind()
    _, theirs = await connect(client, server)
    await client.close()
    async with asyncio.timeout(5):
        assert "endpoint closed" in str(await theirs.wait_closed())


async def test_only_the_peers_own_packets_count_as_heard(bind: Bind, engines: tuple[str, str]) -> None:
    """Who has seen a connection ID can send with it; that neither keeps a path alive nor makes us ask anybody."""
    server, client = await bind(engines[1]), await bind(engines[0])
    ours, theirs = await connect(client, server)
    await echo_works(ours, theirs)
    heard: list[PathId] = []
    server._paths.heard = lambda _, source: heard.append(source)  # type: ignore[method-assign,assignment]
    elsewhere = ("127.0.0.2", 9)
    for data in (b"\x40" + theirs.link.engine.host_cid + bytes(40), b"\xc0" + bytes(60)):
        receive(server, data, elsewhere)
        server._driver.on_quic(data * 3, len(data), PathId(elsewhere), None)
    assert heard == []
    assert server._driver.counters.unauthentic > 0
    await echo_works(ours, theirs)
    assert PathId(client.address) in heard
