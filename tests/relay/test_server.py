"""The relay with real clients on loopback: logins, who gets what, and what happens to those who misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import relay.connection
from relay.config import RelayConfig, parse_network
from relay.limits import Priority, QueueBounds
from relay.metrics import Drop
from relay.server import RelayServer
from transport.identity import Identity
from transport.proto.relay_frames import (
    MAX_DATA_MESSAGE,
    PATH,
    Data,
    Gone,
    GoneReason,
    Limited,
    Ping,
    Pong,
    RefusalCode,
    Refused,
    Restarting,
    Welcome,
    data_frame,
    login_message,
)

from .client import PATIENCE, Client
from .conftest import StartRelay

ECHO = b"12345678"
UPGRADE = (
    f"GET {PATH} HTTP/1.1\r\nHost: relay.test\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: peer-relay.1\r\n\r\n"
).encode()


async def until(condition: object, what: str) -> None:
    """Wait until `condition()` is true."""
    assert callable(condition)
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.005)


async def http(server: RelayServer, request: bytes) -> bytes:
    """Everything that a raw request gets."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.address[1])
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    return answer


# Logins


async def test_a_welcome_tells_what_a_node_needs_to_know(start_relay: StartRelay) -> None:
    server = await start_relay(client_rate=1_000_000, reflector_ports=(0, 0))
    async with Client(server.address[1]) as client, Client(server.address[1]) as other:
        welcome = client.welcome
        assert welcome is not None
        assert other.welcome is not None
        assert (welcome.ping_s, welcome.bytes_per_s, welcome.spread_ms) == (20, 1_000_000, 200)
        assert welcome.reflectors == server.reflector_ports
        assert all(welcome.reflectors)
        assert welcome.observed == "{}:{}".format(*client.socket.local_address)
        assert welcome.instance_id == other.welcome.instance_id


async def test_accepted_sockets_do_not_wait_for_more_to_send(
    start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nagle's algorithm on accepted sockets adds up to 300 ms to small frames."""
    tuned: list[int] = []

    def tune(sock: socket.socket) -> None:
        original(sock)
        tuned.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    original = relay.connection._tune
    monkeypatch.setattr("relay.connection._tune", tune)
    server = await start_relay()
    async with Client(server.address[1]):
        assert tuned
        assert all(tuned)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"signature": bytes(64)}, RefusalCode.BAD_SIGNATURE),
        ({"key": Identity.generate().peer_id.raw}, RefusalCode.BAD_SIGNATURE),
        ({"key": bytes(32)}, RefusalCode.BAD_SIGNATURE),
        ({"authority": "other.test"}, RefusalCode.BAD_SIGNATURE),
        ({"version": 2}, RefusalCode.VERSION),
    ],
)
async def test_logins_that_are_refused(start_relay: StartRelay, changes: dict[str, object], code: RefusalCode) -> None:
    server = await start_relay()
    async with Client(server.address[1], login=False) as client:
        await client.send_login(**changes)
        refused = await client.refused()
    assert refused.code is code
    assert refused.retry_after_ms >= 60_000
    assert len(server.shared.router) == 0
    assert server.counts.logins[code.name.lower()] == 1


async def test_a_login_for_another_nonce_is_refused(start_relay: StartRelay) -> None:
    server = await start_relay()
    identity = Identity.generate()
    port = server.address[1]
    async with Client(port, identity, login=False) as first, Client(port, identity, login=False) as second:
        assert first.challenge.nonce != second.challenge.nonce
        await second.send_login(signature=identity.sign(login_message(first.challenge.nonce, "relay.test")))
        assert (await second.refused()).code is RefusalCode.BAD_SIGNATURE


async def test_a_relay_that_knows_its_names_takes_no_login_meant_for_another(start_relay: StartRelay) -> None:
    server = await start_relay(names=frozenset({"relay.test", "[::1]:8080"}))
    for good in ("relay.test", "RELAY.test:443", "[::1]:8080"):
        async with Client(server.address[1], authority=good):
            pass
    for wrong in ("lying.test", "relay.test.lying.test", "[::1]:80", ""):
        async with Client(server.address[1], authority=wrong, login=False) as client:
            await client.send_login()
            assert (await client.refused()).code is RefusalCode.WRONG_AUTHORITY


async def test_the_access_list_and_its_reload(start_relay: StartRelay, tmp_path: Path) -> None:
    member, late = Identity.generate(), Identity.generate()
    file = tmp_path / "access"
    file.write_text(f"# who may\n\n{member.peer_id}  # a member\n")
    server = await start_relay(access_file=file)
    async with Client(server.address[1], member) as client:
        async with Client(server.address[1], late, login=False) as refused:
            await refused.send_login()
            assert (await refused.refused()).code is RefusalCode.NOT_ON_LIST
        file.write_text(f"{late.peer_id}\n")
        server.reload_access()
        assert (await client.refused()).code is RefusalCode.NOT_ON_LIST
    async with Client(server.address[1], late):
        assert len(server.shared.router) == 1


async def test_the_first_message_must_be_a_login(start_relay: StartRelay) -> None:
    server = await start_relay()
    for message in (b"", b"\x02", Ping(ECHO).encode(), data_frame(bytes(32), [b"x"]), b"\xff" * 500):
        async with Client(server.address[1], login=False) as client:
            await client.send(message)
            assert (await client.refused()).code is RefusalCode.PROTOCOL_ERROR


async def test_a_full_relay_says_so(start_relay: StartRelay) -> None:
    server = await start_relay(max_clients=2, max_clients_per_ip=2)
    identity = Identity.generate()
    async with Client(server.address[1], identity), Client(server.address[1]):
        async with Client(server.address[1], login=False) as client:
            await client.send_login()
            refused = await client.refused()
            assert refused.code is RefusalCode.OVERLOADED
            assert refused.retry_after_ms == 30_000
        async with Client(server.address[1], identity):  # a place is kept by whoever has it
            pass
    await until(lambda: server.shared.clients_by_ip.used == 0, "slots are given back")


# One session per key


async def test_a_newer_login_replaces_the_older(start_relay: StartRelay) -> None:
    server = await start_relay()
    identity = Identity.generate()
    port = server.address[1]
    async with Client(port, identity) as old, Client(port) as peer, Client(port, identity) as new:
        refused = await old.refused()
        assert refused.code is RefusalCode.REPLACED
        assert refused.retry_after_ms >= 60_000
        await peer.data(identity.peer_id.raw, b"for the new one")
        assert await new.expect(Data) == Data(peer.key, (b"for the new one",))
        assert len(server.shared.router) == 2


async def test_two_nodes_with_one_key_end_their_war(start_relay: StartRelay) -> None:
    server = await start_relay()
    identity = Identity.generate()
    async with contextlib.AsyncExitStack() as stack:
        last: Client | None = None
        for _ in range(3):
            client = await stack.enter_async_context(Client(server.address[1], identity))
            if last is not None:
                assert (await last.refused()).code is RefusalCode.REPLACED
            last = client
        assert last is not None
        client = await stack.enter_async_context(Client(server.address[1], identity, login=False))
        await client.send_login()
        for side in (last, client):
            refused = await side.refused()
            assert refused.code is RefusalCode.KEY_FIGHT
            assert refused.retry_after_ms == 60_000
        late = await stack.enter_async_context(Client(server.address[1], identity, login=False))
        await late.send_login()
        refused = await late.refused()
        assert refused.code is RefusalCode.KEY_FIGHT
        assert 50_000 < refused.retry_after_ms <= 60_000
    assert len(server.shared.router) == 0


async def test_nodes_that_drop_the_connection_when_replaced_are_at_war_too(start_relay: StartRelay) -> None:
    server = await start_relay()
    identity = Identity.generate()
    async with contextlib.AsyncExitStack() as stack:
        last = await stack.enter_async_context(Client(server.address[1], identity))
        for _ in range(2):
            client = await stack.enter_async_context(Client(server.address[1], identity))
            assert isinstance(await last.receive(), Refused)
            last.socket.transport.abort()
            await until(lambda: len(server.shared.sessions) == 1, "the old connection is gone")
            last = client
        client = await stack.enter_async_context(Client(server.address[1], identity, login=False))
        await client.send_login()
        assert (await client.refused()).code is RefusalCode.KEY_FIGHT


async def test_a_node_that_leaves_dead_connections_behind_is_in_no_war(start_relay: StartRelay) -> None:
    server = await start_relay(linger=0.2)
    identity = Identity.generate()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            client = await stack.enter_async_context(Client(server.address[1], identity))
            client.socket.transport.pause_reading()  # as if the network had swallowed it
            stack.callback(client.socket.transport.abort)
        assert len(server.shared.router) == 1
        await until(lambda: len(server.shared.sessions) == 1, "the dead ones are dropped after linger")


# Frames


async def test_datagrams_arrive_in_the_sender_s_name_and_in_order(start_relay: StartRelay) -> None:
    server = await start_relay()
    async with Client(server.address[1]) as one, Client(server.address[1]) as two:
        for number in range(100):
            await one.data(two.key, b"%d" % number, bytes(1200), disco=False)
        await one.data(two.key, b"call", disco=True)
        for number in range(100):
            assert await two.expect(Data) == Data(one.key, (b"%d" % number, bytes(1200)))
        assert await two.expect(Data) == Data(one.key, (b"call",), disco=True)
        await two.data(two.key, b"to myself")
        assert await two.expect(Data) == Data(two.key, (b"to myself",))
    assert (server.counts.frames_bulk, server.counts.frames_disco) == (101, 1)


async def test_the_largest_message_passes_whole_and_in_fragments(start_relay: StartRelay) -> None:
    server = await start_relay()
    async with Client(server.address[1]) as one, Client(server.address[1]) as two:
        whole = data_frame(two.key, [bytes(65_000)] * 4)
        await one.send(whole)
        assert (await two.expect(Data)).datagrams == (bytes(65_000),) * 4
        await one.socket.send([whole[:10], whole[10:11], b"", whole[11:]])
        assert (await two.expect(Data)).datagrams == (bytes(65_000),) * 4
        await one.send(bytes(MAX_DATA_MESSAGE + 1))
        assert await one.closed() == 1009


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x10" + bytes(31),
        b"\x10" + bytes(32),
        b"\x10" + bytes(32) + b"\0",
        b"\x10" + bytes(32) + b"\0\0",
        b"\x10" + bytes(32) + b"\0\5abcd",
        b"\x11" + bytes(32) + b"\0\1ab",
        b"\x11" + bytes(32) + b"\x2f\xff" + bytes(0x2FFF),
        b"\x20short",
        b"\x02" + bytes(200),
        b"\xee" * 2000,
    ],
)
async def test_broken_frames_end_the_session_and_only_it(start_relay: StartRelay, message: bytes) -> None:
    server = await start_relay()
    async with Client(server.address[1]) as bad, Client(server.address[1]) as good:
        await bad.send(message)
        assert (await bad.refused()).code is RefusalCode.PROTOCOL_ERROR
        await good.send(Ping(ECHO).encode())
        await good.expect(Pong)
        assert len(server.shared.router) == 1


async def test_a_text_message_ends_the_session(start_relay: StartRelay) -> None:
    server = await start_relay()
    async with Client(server.address[1]) as client:
        await client.socket.send("hello")
        assert (await client.refused()).code is RefusalCode.PROTOCOL_ERROR


async def test_ping_is_answered_and_frames_of_a_later_version_are_ignored(start_relay: StartRelay) -> None:
    server = await start_relay()
    async with Client(server.address[1]) as client:
        await client.send(b"\x7ffrom the future")
        await client.send(Pong(ECHO).encode())
        await client.send(Ping(ECHO).encode())
        assert await client.expect(Pong) == Pong(ECHO, 200)


async def test_who_is_not_there_is_told_seldom(start_relay: StartRelay) -> None:
    server = await start_relay()
    nobody = Identity.generate().peer_id.raw
    async with Client(server.address[1]) as client:
        for _ in range(50):
            await client.data(nobody, b"hello?")
        await client.send(Ping(ECHO).encode())
        assert await client.expect(Gone) == Gone(nobody, GoneReason.NOT_CONNECTED)
        while not isinstance(frame := await client.receive(), Pong):
            assert isinstance(frame, Gone)
    assert server.counts.drops[Drop.NOT_CONNECTED] == 50


async def test_floods_of_control_frames_end_the_session(start_relay: StartRelay) -> None:
    server = await start_relay()
    async with Client(server.address[1]) as client:
        for _ in range(200):
            await client.send(Ping(ECHO).encode())
        while isinstance(frame := await client.receive(), Pong):
            pass
        assert getattr(frame, "code", None) is RefusalCode.PROTOCOL_ERROR
    async with Client(server.address[1]) as client:
        for _ in range(200):
            await client.socket.ping()
        assert (await client.refused()).code is RefusalCode.PROTOCOL_ERROR


# Rates and queues


async def test_over_the_rate_bulk_is_dropped_and_disco_still_passes(start_relay: StartRelay) -> None:
    server = await start_relay(client_rate=100_000)
    async with Client(server.address[1]) as fast, Client(server.address[1]) as peer:
        for _ in range(20):
            await fast.data(peer.key, bytes(50_000))
        await fast.data(peer.key, b"call", disco=True)
        limited = await fast.expect(Limited)
        assert 0 < limited.ms < 10_000
        bulk = 0
        while not (frame := await peer.expect(Data)).disco:
            bulk += 1
        assert frame.datagrams == (b"call",)
        assert 5 <= bulk <= 12  # burst 256 KiB, then 100 KB/s
        assert server.counts.drops[Drop.CLIENT_RATE] == 20 - bulk


async def test_the_global_rate_bounds_all_together(start_relay: StartRelay) -> None:
    server = await start_relay(client_rate=0, global_rate=100_000)
    async with Client(server.address[1]) as one, Client(server.address[1]) as two, Client(server.address[1]) as peer:
        for client in (one, two):
            for _ in range(10):
                await client.data(peer.key, bytes(50_000))
            await client.data(peer.key, b"call", disco=True)
        calls = bulk = 0
        while calls < 2:
            frame = await peer.expect(Data)
            calls, bulk = calls + frame.disco, bulk + (not frame.disco)
        assert 5 <= bulk <= 12
        assert server.counts.drops[Drop.GLOBAL_RATE] == 20 - bulk


async def test_a_flood_of_tiny_frames_is_slowed_down_and_holds_nobody_up(start_relay: StartRelay) -> None:
    server = await start_relay(client_frames=500)
    async with Client(server.address[1]) as flooder, Client(server.address[1]) as good:
        transport = flooder.socket.transport
        tiny = b"\x82\x80\0\0\0\0"  # an empty masked binary message is a broken frame; a fragment is none
        first, rest = b"\x02" + tiny[1:], b"\x00" + tiny[1:]
        transport.write(first + rest * 20_000)
        await good.send(Ping(ECHO).encode())
        await good.expect(Pong)
        session = server.shared.router.sessions[flooder.key]
        await until(lambda: session._reading_timer is not None, "reading is paused")
        await good.send(Ping(ECHO).encode())
        await good.expect(Pong)
        transport.abort()


async def fill(server: RelayServer, sender: Client, reader: Client) -> None:
    """Send bulk to a reader that does not read, until its queue on the relay has dropped some."""
    reader.socket.transport.pause_reading()
    target = server.shared.router.sessions[reader.key]
    number = 0
    while target.queue.dropped[Priority.BULK] < 20:
        await sender.data(reader.key, number.to_bytes(4, "big"), *[bytes(60_000)] * 2)
        number += 1
        assert number < 2_000


async def test_disco_overtakes_bulk_for_a_slow_reader_and_the_oldest_bulk_is_dropped(start_relay: StartRelay) -> None:
    server = await start_relay(client_rate=0, global_rate=0)
    async with Client(server.address[1]) as sender, Client(server.address[1]) as reader:
        await fill(server, sender, reader)
        target = server.shared.router.sessions[reader.key]
        await sender.data(reader.key, b"call", disco=True)
        await sender.data(reader.key, (10**9).to_bytes(4, "big"))
        await until(lambda: server.counts.frames_disco == 1, "the call is queued")
        assert target.queue.size <= 1_100_000
        reader.socket.transport.resume_reading()
        numbers: list[int] = []
        before_call = 0
        while not numbers or numbers[-1] != 10**9:
            frame = await reader.expect(Data)
            if frame.disco:
                before_call = len(numbers)
            else:
                numbers.append(int.from_bytes(frame.datagrams[0], "big"))
        assert numbers == sorted(numbers)
        behind = numbers[before_call:]
        assert len(behind) >= 5  # the queue of bulk came after the call
        assert numbers[before_call] > numbers[before_call - 1] + 1  # and what was dropped was the oldest of the queue
        gone = await sender.expect(Gone)
        assert gone == Gone(reader.key, GoneReason.QUEUE_FULL)
        assert server.counts.drops[Drop.QUEUE_FULL] == target.queue.dropped[Priority.BULK]


async def test_all_queues_together_are_bounded(start_relay: StartRelay) -> None:
    server = await start_relay(client_rate=0, global_rate=0, max_queued=300_000)
    async with Client(server.address[1]) as sender, Client(server.address[1]) as reader:
        await fill(server, sender, reader)
        assert server.shared.queues.used <= 300_000
        reader.socket.transport.abort()
        await until(lambda: server.shared.queues.used == 0, "memory is given back")


async def test_a_client_that_takes_nothing_is_closed(start_relay: StartRelay) -> None:
    server = await start_relay(client_rate=0, global_rate=0, write_timeout=0.5)
    async with Client(server.address[1]) as sender, Client(server.address[1]) as reader:
        await fill(server, sender, reader)
        await until(lambda: server.counts.ends["write_timeout"] == 1, "write time-out")
        assert list(server.shared.router.sessions) == [sender.key]
        await until(lambda: server.shared.queues.used == 0, "memory is given back")
        reader.socket.transport.abort()


async def test_small_queues_bound_disco_too(start_relay: StartRelay) -> None:
    bounds = QueueBounds(disco_count=3)
    server = await start_relay(client_rate=0, global_rate=0, queue=bounds)
    async with Client(server.address[1]) as sender, Client(server.address[1]) as reader:
        await fill(server, sender, reader)
        for number in range(10):
            await sender.data(reader.key, b"call %d" % number, disco=True)
        await until(lambda: server.counts.frames_disco == 10, "all calls are there")
        reader.socket.transport.resume_reading()
        calls: list[bytes] = []
        while len(calls) < 3:
            frame = await reader.expect(Data)
            calls += [frame.datagrams[0]] if frame.disco else []
        assert calls == [b"call 7", b"call 8", b"call 9"]


# Connections


async def test_half_open_and_silent_connections_are_dropped(start_relay: StartRelay) -> None:
    server = await start_relay(login_timeout=0.3)
    nothing = socket.create_connection(server.address)
    started = socket.create_connection(server.address)
    started.sendall(b"GET /relay HTT")
    async with Client(server.address[1], login=False) as client:
        await until(lambda: len(server.shared.sessions) == 3, "all are connected")
        await until(lambda: not server.shared.sessions, "all are dropped")
        assert await client.closed() == 1006
    nothing.close()
    started.close()
    assert server.shared.pending.used == 0
    assert server.counts.strangers["login_timeout"] == 3
    page = await http(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b'relay_connections_refused_total{why="login_timeout"} 3.0' in page


async def test_a_session_from_which_nothing_comes_is_dropped(start_relay: StartRelay) -> None:
    server = await start_relay(idle_timeout=0.2)
    async with Client(server.address[1]) as client:
        assert await client.closed() == 1006
    assert server.counts.ends["idle"] == 1


async def test_connections_before_the_login_are_bounded_per_address(start_relay: StartRelay) -> None:
    server = await start_relay(max_pending_per_ip=3)
    waiting = [socket.create_connection(server.address) for _ in range(3)]
    await until(lambda: server.shared.pending.used == 3, "three wait")
    assert await http(server, b"") == b""
    assert server.counts.strangers["too_many_pending"] == 1
    waiting.pop().close()
    await until(lambda: server.shared.pending.used == 2, "a slot is free")
    async with Client(server.address[1]), Client(server.address[1]):  # who has logged in needs none
        pass
    for sock in waiting:
        sock.close()


async def test_the_address_of_a_client_behind_a_front(start_relay: StartRelay) -> None:
    forwarded = {"X-Forwarded-For": "10.9.9.9, 198.51.100.7, 127.0.0.5"}
    trusting = await start_relay(trusted_proxies=(parse_network("127.0.0.0/8"),), max_pending_per_ip=1)
    async with Client(trusting.address[1], headers=forwarded) as client:
        assert client.welcome is not None
        assert client.welcome.observed == "198.51.100.7:0"
    async with Client(trusting.address[1], headers={"X-Forwarded-For": "2001:db8::7"}, login=False):
        with pytest.raises(InvalidStatus) as refused:  # the same /64 has one connection already
            async with Client(trusting.address[1], headers={"X-Forwarded-For": "2001:db8::8"}):
                pass
        assert refused.value.response.status_code == 503
    async with Client(trusting.address[1]) as one, Client(trusting.address[1]) as two:  # the front tells nothing
        assert one.welcome is not None
        assert two.welcome is not None
        assert one.welcome.observed == two.welcome.observed == ""
    distrusting = await start_relay()
    async with Client(distrusting.address[1], headers=forwarded) as client:
        assert client.welcome is not None
        assert client.welcome.observed.startswith("127.0.0.1:")


async def test_one_socket_serves_ipv6_and_ipv4(start_relay: StartRelay) -> None:
    server = await start_relay(listen=("::", 0))
    async with Client(server.address[1]) as client:
        assert client.welcome is not None
        assert client.welcome.observed.startswith("127.0.0.1:")


async def test_too_much_before_the_login_is_cut_off(start_relay: StartRelay) -> None:
    server = await start_relay()
    assert await http(server, b"GET / HTTP/1.1\r\n" + b"X-Padding: 1234567890123456789012345678\r\n" * 500) == b""
    assert not server.shared.sessions


async def test_what_a_client_took_is_freed_with_its_connection(start_relay: StartRelay) -> None:
    server = await start_relay(trusted_proxies=(parse_network("127.0.0.0/8"),))
    gc.collect()
    gc.disable()
    try:
        for login in (True, False):
            async with Client(server.address[1], login=login) as client:
                (session,) = server.shared.sessions
                websocket = weakref.ref(session._websocket)
                del session
                client.socket.transport.abort()
            await server.shared.all_gone.wait()
            await until(lambda: websocket() is None, "nothing waits for the garbage collector")  # noqa: B023
    finally:
        gc.enable()


# HTTP


@pytest.mark.parametrize(
    ("request_line", "status", "part"),
    [
        ("GET /healthz", 200, b"ok"),
        ("GET /healthz?x=1", 200, b"ok"),
        ("GET /metrics", 200, b"relay_clients 0.0"),
        ("GET /", 200, b"Peer relay"),
        ("GET /other", 404, b"relay"),
        ("GET /../../etc/passwd", 404, b"relay"),
        ("POST /", 405, b"GET"),
        ("DELETE /relay", 405, b""),
        ("GET /relay", 426, b""),
        ("HEAD /", 200, b""),
        ("NONSENSE", 400, b""),
    ],
)
async def test_http(start_relay: StartRelay, request_line: str, status: int, part: bytes) -> None:
    server = await start_relay()
    answer = await http(server, f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert part in body
    if status == 200:
        assert b"Date: " in head
    if request_line.startswith("HEAD"):
        assert body == b""


async def test_a_request_with_a_body_gets_an_answer_too(start_relay: StartRelay) -> None:
    server = await start_relay()
    answer = await http(server, b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_pages_and_metrics_tell_counts_and_no_keys(start_relay: StartRelay) -> None:
    server = await start_relay()
    async with Client(server.address[1]) as one, Client(server.address[1]) as two:
        await one.data(two.key, b"x" * 100)
        await two.expect(Data)
        page = await http(server, b"GET / HTTP/1.1\r\n\r\n")
        metrics = (await http(server, b"GET /metrics HTTP/1.1\r\n\r\n")).decode()
    assert b"<dd>2</dd>" in page
    for line in (
        "relay_clients 2.0",
        'relay_frames_total{class="bulk"} 1.0',
        'relay_bytes_total{class="bulk"} 135.0',
        'relay_logins_total{result="ok"} 2.0',
        'relay_drops_total{reason="queue_full"} 0.0',
        "relay_login_seconds_count 2.0",
        "process_resident_memory_bytes",
    ):
        assert line in metrics
    assert one.identity.peer_id.short not in metrics + page.decode()


# Garbage


async def test_a_websocket_without_the_subprotocol_is_refused(start_relay: StartRelay) -> None:
    server = await start_relay()
    with pytest.raises(InvalidStatus):
        await connect(f"ws://127.0.0.1:{server.address[1]}{PATH}", proxy=None)


@settings(max_examples=40, deadline=None)
@given(
    upgraded=st.booleans(),
    chunks=st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=200),
            st.sampled_from([UPGRADE, b"\x88\x80\0\0\0\0", b"\x89\x80\0\0\0\0", b"\x82\xfe\xff\xff", b"\r\n\r\n"]),
        ),
        max_size=6,
    ),
)
@example(upgraded=False, chunks=[b"GET / HTTP/1.1\r\n\r\n\0\0"])
@example(upgraded=False, chunks=[UPGRADE + b"\0\0"])
def test_no_bytes_break_the_relay(upgraded: bool, chunks: list[bytes]) -> None:
    async def scenario() -> None:
        server = RelayServer(RelayConfig(listen=("127.0.0.1", 0), reflector_ports=None, linger=0.1))
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.address[1])
        with contextlib.suppress(ConnectionError):
            for chunk in [UPGRADE] * upgraded + chunks:
                writer.write(chunk)
                await writer.drain()
            writer.write_eof()
            await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        await asyncio.wait_for(server.shared.all_gone.wait(), PATIENCE)
        assert server.shared.pending.used == server.shared.clients_by_ip.used == len(server.shared.router) == 0
        await server.close()

    without_faults(scenario)


frames = st.one_of(
    st.binary(max_size=80),
    st.binary(max_size=60).map(lambda rest: b"\x10" + bytes(32) + rest),
    st.binary(max_size=60).map(lambda rest: b"\x11" + bytes(32) + rest),
    st.sampled_from([data_frame(bytes(32), [b"x"]), Ping(ECHO).encode(), Pong(ECHO).encode(), b"\x7f"]),
)


@settings(max_examples=40, deadline=None)
@given(messages=st.lists(frames, max_size=8), cut=st.integers(0, 40))
def test_no_frames_of_a_client_break_the_relay(messages: list[bytes], cut: int) -> None:
    async def scenario() -> None:
        server = RelayServer(RelayConfig(listen=("127.0.0.1", 0), reflector_ports=None, linger=0.1))
        await server.start()
        async with Client(server.address[1]) as good:
            async with Client(server.address[1]) as wild:
                with contextlib.suppress(ConnectionClosed):
                    for message in messages:
                        await wild.socket.send([message[:cut], message[cut:]] if cut < len(message) else message)
                    await wild.socket.send(Ping(ECHO).encode())
                    while not isinstance(await wild.receive(), Pong):
                        pass
            await good.send(Ping(ECHO).encode())
            await good.expect(Pong)
        await server.close()
        assert server.shared.pending.used == server.shared.clients_by_ip.used == len(server.shared.router) == 0

    without_faults(scenario)


def without_faults(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run it; no exception may have been swallowed by the relay or by asyncio."""
    faults: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: faults.append(f"{record.getMessage()} {record.exc_info}")  # type: ignore[method-assign]
    for name in ("relay", "asyncio"):
        logging.getLogger(name).addHandler(handler)
    try:
        asyncio.run(scenario())
    finally:
        for name in ("relay", "asyncio"):
            logging.getLogger(name).removeHandler(handler)
    assert not faults


# Restart


async def test_a_restart_is_announced_and_the_port_is_free_at_once(start_relay: StartRelay) -> None:
    server = await start_relay()
    port = server.address[1]
    async with Client(port) as one, Client(port) as two, Client(port, login=False) as late:
        ending = asyncio.ensure_future(server.shutdown())
        await until(lambda: server.shared.shutting_down, "it shuts down")
        for client in (one, two):
            told = await client.expect(Restarting)
            assert told == Restarting(1000, 1200)
            assert await client.closed() == 1012
        await late.closed()
        await asyncio.wait_for(ending, PATIENCE)
        again = await start_relay(listen=("127.0.0.1", port))
        async with Client(again.address[1], one.identity) as back:
            assert isinstance(back.welcome, Welcome)


async def test_while_shutting_down_health_is_bad_and_nobody_gets_in(start_relay: StartRelay) -> None:
    server = await start_relay()
    server.shared.shutting_down = True
    assert (await http(server, b"GET /healthz HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
    async with Client(server.address[1], login=False) as client:
        await client.send_login()
        refused = await client.refused()
        assert refused.code is RefusalCode.SHUTTING_DOWN
        assert 1000 <= refused.retry_after_ms <= 1200


async def test_shutdown_delivers_what_waits(start_relay: StartRelay) -> None:
    server = await start_relay(client_rate=0, global_rate=0)
    async with Client(server.address[1]) as sender, Client(server.address[1]) as reader:
        await fill(server, sender, reader)
        await sender.data(reader.key, b"last")
        await until(lambda: server.shared.router.sessions[sender.key]._held_back == b"", "all was read")
        await sender.send(Ping(ECHO).encode())
        while not isinstance(await sender.receive(), Pong):
            pass
        ending = asyncio.ensure_future(server.shutdown())
        reader.socket.transport.resume_reading()
        last = None
        while not (isinstance(last, Data) and last.datagrams == (b"last",)):
            last = await reader.receive()
        assert await reader.closed() == 1012
        await ending


async def test_a_hundred_clients_are_told_to_come_back_over_one_and_a_half_seconds(start_relay: StartRelay) -> None:
    server = await start_relay(max_pending_per_ip=100)
    async with contextlib.AsyncExitStack() as stack:
        clients = await asyncio.gather(*(stack.enter_async_context(Client(server.address[1])) for _ in range(100)))
        await clients[0].send(Ping(ECHO).encode())
        assert await clients[0].expect(Pong) == Pong(ECHO, 1500)
        ending = asyncio.ensure_future(server.shutdown())
        told = await asyncio.gather(*(client.expect(Restarting) for client in clients))
        assert set(told) == {Restarting(1000, 2500)}
        assert {await client.closed() for client in clients} == {1012}
        await ending


async def test_a_client_that_ended_first_is_no_fault_of_ours(
    start_relay: StartRelay, caplog: pytest.LogCaptureFixture
) -> None:
    """Its system resets what we still send, and then our own end cannot be sent any more."""
    server = await start_relay()
    with socket.create_connection(server.address) as client:
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, UPGRADE)
        await loop.sock_recv(client, 65_536)
        client.send(b"\x88\x80\0\0\0\0")  # a close frame; the answer to it meets a closed socket
    await until(lambda: not server.shared.sessions, "the relay still has the connection")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
