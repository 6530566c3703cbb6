"""Hostile and damaged datagrams, and links that lose them: nothing of it may harm an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transport.conftest import Bind
from tests.transport.test_endpoint import connect
from transport.connection import Connection
from transport.emulation import LinkEmulation
from transport.endpoint import Endpoint
from transport.errors import Address


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
    assert len(server._deadlines) <= 8


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=1300), segment=st.integers(1, 1300))
def test_the_driver_takes_any_bytes(data: bytes, segment: int) -> None:
    async def feed() -> None:
        from transport.config import TransportConfig
        from transport.identity import Identity

        endpoint = Endpoint(Identity.generate(b"f" * 32), TransportConfig(), ("127.0.0.1", 0), None)
        endpoint._driver.on_quic(data, segment, ("127.0.0.1", 9))
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
