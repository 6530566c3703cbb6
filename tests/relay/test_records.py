"""The relay's directory with real clients: who hears what, and that nobody is hurt by those who say too much."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relay.directory
from relay.config import RelayConfig
from relay.metrics import Drop
from relay.server import RelayServer
from tests.relay.client import PATIENCE, Client
from tests.relay.conftest import StartRelay
from transport.proto.relay_frames import (
    MAX_BLOB,
    MAX_TOPICS,
    PUBLISH_BURST,
    Data,
    Feature,
    Ping,
    Pong,
    Publish,
    Record,
    RefusalCode,
    Watch,
)

TOPIC = b"t" * 32
ECHO = b"12345678"


async def heard(client: Client) -> Record:
    """The next frame, a record."""
    return await client.expect(Record)


async def nothing_more(client: Client) -> None:
    """What was said before has no answer: the next frame answers a ping."""
    await client.send(Ping(ECHO).encode())
    assert (await client.expect(Pong)).echo == ECHO


async def test_records_are_shown_in_the_publishers_proven_name(start_relay: StartRelay) -> None:
    server = await start_relay()
    async with Client(server.address[1]) as anna, Client(server.address[1]) as bert:
        assert anna.welcome is not None
        assert anna.welcome.features & Feature.DIRECTORY
        await anna.send(Publish(TOPIC, 10, b"first").encode())
        await nothing_more(anna)
        await bert.send(Watch(TOPIC, True).encode())
        assert await heard(bert) == Record(TOPIC, anna.key, 10, b"first")
        await anna.send(Publish(TOPIC, 10, bytes(MAX_BLOB)).encode())
        assert await heard(bert) == Record(TOPIC, anna.key, 10, bytes(MAX_BLOB))
        await anna.send(Publish(TOPIC, 0).encode())
        assert await heard(bert) == Record(TOPIC, anna.key, 0)
        await bert.send(Watch(TOPIC, False).encode())
        await nothing_more(bert)
        await anna.send(Publish(TOPIC, 10, b"unheard").encode())
        await nothing_more(anna)
        await nothing_more(bert)
        page = server.metrics.render().decode()
        assert "relay_directory_records 1.0" in page
        assert "relay_records_published_total 4.0" in page
        assert "relay_records_sent_total 3.0" in page


async def test_a_record_ends_with_its_ttl(start_relay: StartRelay) -> None:
    server = await start_relay()
    async with Client(server.address[1]) as client:
        await client.send(Watch(TOPIC, True).encode())
        await client.send(Publish(TOPIC, 1, b"x").encode())
        assert (await heard(client)).ttl_s == 1
        assert await heard(client) == Record(TOPIC, client.key, 0)


async def test_a_reconnect_does_not_flap_and_a_session_that_stays_away_takes_its_records_along(
    start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay.directory, "GRACE", 1.0)
    server = await start_relay()
    directory = server.shared.records.directory
    async with Client(server.address[1]) as watcher:
        await watcher.send(Watch(TOPIC, True).encode())
        async with Client(server.address[1]) as first:
            await first.send(Publish(TOPIC, 1000, b"v1").encode())
            assert (await heard(watcher)).blob == b"v1"
        async with Client(server.address[1], first.identity) as second:
            await second.send(Publish(TOPIC, 1000, b"v2").encode())
            assert (await heard(watcher)).blob == b"v2"
            directory.expire(server.shared.loop.time() + 30)
            assert directory.count == 1
        ended = asyncio.get_running_loop().time()
        assert await asyncio.wait_for(heard(watcher), PATIENCE) == Record(TOPIC, first.key, 0)
        assert asyncio.get_running_loop().time() - ended > 0.9


async def test_two_hundred_records_come_to_a_new_watcher_and_disco_does_not_wait(start_relay: StartRelay) -> None:
    server = await start_relay()
    directory, now = server.shared.records.directory, server.shared.loop.time()
    for number in range(200):
        directory.publish(number.to_bytes(32, "big"), TOPIC, 60, bytes(MAX_BLOB), now)
    async with Client(server.address[1]) as watcher, Client(server.address[1]) as friend:
        await watcher.send(Watch(TOPIC, True).encode())
        keys = {(await heard(watcher)).key}
        await friend.data(watcher.key, b"call", disco=True)
        before_disco = 0
        while len(keys) < 200:
            frame = await watcher.receive()
            if isinstance(frame, Data):
                before_disco = len(keys)
            else:
                assert isinstance(frame, Record)
                keys.add(frame.key)
        assert 0 < before_disco < 200


async def test_a_watcher_that_does_not_read_costs_others_nothing_and_gets_the_last_version(
    start_relay: StartRelay,
) -> None:
    server = await start_relay()
    directory = server.shared.records.directory
    async with Client(server.address[1]) as slow, Client(server.address[1]) as quick:
        for client in (slow, quick):
            await client.send(Watch(TOPIC, True).encode())
            await nothing_more(client)
        slow.socket.transport.pause_reading()
        session = server.shared.router.sessions[slow.key]
        for version in range(20):
            for number in range(30):
                blob = bytes((version,)) * MAX_BLOB
                directory.publish(number.to_bytes(32, "big"), TOPIC, 60, blob, server.shared.loop.time())
            server.shared.records.expire()
            latest: dict[bytes, bytes] = {}
            while len(latest) < 30 or any(blob[0] != version for blob in latest.values()):
                record = await heard(quick)
                latest[record.key] = record.blob
        assert session.queue.size < 128 * 1024
        assert session.queue.dropped == [0, 0, 0, 0]
        slow.socket.transport.resume_reading()
        latest.clear()
        while len(latest) < 30 or any(blob[0] != 19 for blob in latest.values()):
            record = await heard(slow)
            latest[record.key] = record.blob


async def test_who_publishes_too_often_or_too_much_is_dropped_or_sent_away(start_relay: StartRelay) -> None:
    server = await start_relay()
    drops = server.counts.drops
    async with Client(server.address[1]) as client:
        for number in range(int(PUBLISH_BURST) + 5):
            await client.send(Publish(TOPIC, 10, bytes((number,))).encode())
        await nothing_more(client)
        assert drops[Drop.RECORD_RATE] >= 4
        for number in range(MAX_TOPICS + 2):
            await client.send(Watch(bytes((number,)) * 32, True).encode())
        await nothing_more(client)
        assert drops[Drop.RECORD_TOPICS] == 2
        for _ in range(200):
            await client.send(Publish(TOPIC, 10, b"flood").encode())
        assert (await client.refused()).code is RefusalCode.PROTOCOL_ERROR
    for broken in (b"\x40" + TOPIC + b"\0\x0a\xff\xff" + bytes(1500), b"\x40" + bytes(4000), b"\x41", b"\x40" + TOPIC):
        async with Client(server.address[1]) as client:
            await client.send(broken)
            assert (await client.refused()).code is RefusalCode.PROTOCOL_ERROR
    assert server.shared.records.directory.watches == 0


async def test_a_full_directory_takes_no_more_and_says_so_in_the_metrics(start_relay: StartRelay) -> None:
    server = await start_relay(max_directory=4000)
    async with Client(server.address[1]) as first, Client(server.address[1]) as second:
        for client in (first, second):
            await client.send(Publish(TOPIC, 10, bytes(MAX_BLOB)).encode())
            await nothing_more(client)
        await second.send(Publish(b"u" * 32, 10, bytes(MAX_BLOB)).encode())
        await nothing_more(second)
        assert server.counts.drops[Drop.DIRECTORY_FULL] == 1
        assert server.shared.records.directory.size <= 4000


async def fuzz(server: RelayServer, message: bytes) -> None:
    async with Client(server.address[1]) as client:
        await client.send(message)
        await client.send(Ping(ECHO).encode())
        frame = await client.receive()
        while isinstance(frame, Record):
            frame = await client.receive()
        assert isinstance(frame, Pong) or "Refused" in type(frame).__name__


@settings(max_examples=40)
@given(kind=st.sampled_from([0x40, 0x41, 0x42]), body=st.binary(max_size=120))
def test_any_record_frame_is_taken_or_refused(kind: int, body: bytes) -> None:
    """No bytes of these types make the relay fail: the next client is served."""

    async def main() -> None:
        server = RelayServer(RelayConfig(listen=("127.0.0.1", 0), reflector_ports=None))
        await server.start()
        try:
            await fuzz(server, bytes((kind,)) + body)
            await fuzz(server, Watch(TOPIC, True).encode())
        finally:
            await server.close()

    asyncio.run(main())
