"""Streams as an application uses them: order, ends, resets, and back-pressure both ways."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from typing import Any

import pytest

from tests.transport.conftest import Bind
from tests.transport.test_endpoint import connect
from transport import errors
from transport.connection import Connection
from transport.stream import Stream

KIB = 1024


@pytest.fixture
async def both(bind: Bind, engines: tuple[str, str]) -> tuple[Connection, Connection]:
    """A connection seen from both ends, with small windows, on every pair of engines."""
    settings: dict[str, Any] = {"stream_window": 128 * KIB, "connection_window": 256 * KIB, "max_send_buffer": 64 * KIB}
    return await connect(await bind(engines[0], **settings), await bind(engines[1], **settings))


async def pair_of_streams(ours: Connection, theirs: Connection) -> tuple[Stream, Stream]:
    """One stream seen from both ends, after a first byte."""
    stream = await ours.open_stream()
    await stream.write(b"!")
    incoming = await theirs.accept_stream()
    assert await incoming.readexactly(1) == b"!"
    return stream, incoming


async def read_all(stream: Stream) -> bytes:
    parts = []
    while part := await stream.read(64 * KIB):
        parts.append(part)
    return b"".join(parts)


async def until(condition: Any) -> None:
    """Wait until the condition holds; the loop turns in between."""
    while not condition():  # noqa: ASYNC110 - whatever is waited for happens inside this loop
        await asyncio.sleep(0)


async def test_a_megabyte_each_way_at_once_arrives_intact(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    payload = os.urandom(KIB * KIB)

    async def send(side: Stream) -> None:
        await side.write(payload)
        await side.finish()

    one, other, _, _ = await asyncio.gather(read_all(stream), read_all(incoming), send(stream), send(incoming))
    assert hashlib.sha256(one).digest() == hashlib.sha256(other).digest() == hashlib.sha256(payload).digest()


async def test_a_reader_that_does_not_read_bounds_memory_on_both_sides(both: tuple[Connection, Connection]) -> None:
    ours, theirs = both
    stream, incoming = await pair_of_streams(ours, theirs)
    chunk = bytes(KIB * KIB)
    sent = 0

    async def send_64_mb() -> None:
        nonlocal sent
        for _ in range(64):
            await stream.write(chunk)
            sent += len(chunk)

    sending = asyncio.ensure_future(send_64_mb())
    await until(lambda: incoming.buffered >= 127 * KIB)
    with pytest.raises(TimeoutError):  # it stands still
        async with asyncio.timeout(0.1):
            await asyncio.shield(sending)
    assert incoming.buffered <= 128 * KIB
    assert sent < 2 * len(chunk)
    assert ours.link.engine.backlog() <= 256 * KIB
    assert len(await incoming.readexactly(4 * KIB * KIB)) == 4 * KIB * KIB  # and moves on as soon as it reads
    assert incoming.buffered <= 128 * KIB
    sending.cancel()


async def test_one_unread_stream_does_not_stop_another(both: tuple[Connection, Connection]) -> None:
    ours, theirs = both
    stuck, _ = await pair_of_streams(ours, theirs)
    sending = asyncio.ensure_future(stuck.write(bytes(KIB * KIB)))
    stream, incoming = await pair_of_streams(ours, theirs)
    sender = asyncio.ensure_future(stream.write(bytes(KIB * KIB)))
    assert len(await incoming.readexactly(KIB * KIB)) == KIB * KIB
    await sender
    assert not sending.done()
    sending.cancel()


async def test_ends_are_told_apart(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    await stream.write(b"abc")
    await stream.finish()
    with pytest.raises(errors.IncompleteRead, match="3 of 5") as caught:
        await incoming.readexactly(5)
    assert caught.value.partial == b"abc"
    assert await incoming.read(10) == b""
    assert await incoming.read(0) == b""
    with pytest.raises(errors.StreamClosed):
        await stream.write(b"more")
    with pytest.raises(errors.StreamClosed):
        stream.write_nowait(b"more")
    await stream.finish()
    await incoming.write(b"the other way still works")
    assert await stream.readexactly(25) == b"the other way still works"


async def test_a_reset_reaches_the_peer_with_its_code(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    reading = asyncio.ensure_future(incoming.read(1))
    await asyncio.sleep(0)
    stream.reset(17)
    with pytest.raises(errors.StreamReset, match="code 17") as caught:
        await reading
    assert caught.value.code == 17
    await until(lambda: incoming.send_ended)
    with pytest.raises(errors.StreamReset):
        await incoming.write(b"x")
    with pytest.raises(errors.StreamClosed):
        await stream.read(1)
    with pytest.raises(errors.StreamClosed):
        await stream.write(b"x")
    stream.reset(18)


async def test_resets_in_mid_transfer_cost_no_credit(both: tuple[Connection, Connection]) -> None:
    ours, theirs = both
    for turn in range(12):  # each leaves up to 128 KiB sent and unread of a 256 KiB window
        stream, incoming = await pair_of_streams(ours, theirs)
        sending = asyncio.ensure_future(stream.write(bytes(KIB * KIB)))
        await until(lambda incoming=incoming: incoming.buffered > 64 * KIB)
        (stream if turn % 2 else incoming).reset(1)
        with contextlib.suppress(errors.StreamReset, errors.StreamClosed):
            await sending
        await until(lambda stream=stream, incoming=incoming: stream.receive_ended and incoming.receive_ended)
    stream, incoming = await pair_of_streams(ours, theirs)
    sender = asyncio.ensure_future(stream.write(bytes(KIB * KIB)))
    assert len(await incoming.readexactly(KIB * KIB)) == KIB * KIB
    await sender
    assert ours.close_reason is None


async def test_streams_beyond_the_limit_wait_for_one_to_end(bind: Bind, engines: tuple[str, str]) -> None:
    client, server = await bind(engines[0], max_streams=4), await bind(engines[1])
    ours, theirs = await connect(client, server)
    pairs = [await pair_of_streams(ours, theirs) for _ in range(4)]
    waiting = asyncio.ensure_future(ours.open_stream())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream, incoming = pairs[0]
    await stream.finish()
    assert await incoming.read(1) == b""
    await incoming.finish()
    fifth = await waiting
    await fifth.write(b"x")
    assert await (await theirs.accept_stream()).readexactly(1) == b"x"


async def test_hundreds_of_streams_one_after_the_other(bind: Bind, engines: tuple[str, str]) -> None:
    ours, theirs = await connect(await bind(engines[0]), await bind(engines[1]))

    async def echo() -> None:
        while True:
            incoming = await theirs.accept_stream()
            await incoming.write(await read_all(incoming))
            await incoming.finish()

    server = asyncio.ensure_future(echo())

    async def ask(number: int) -> None:
        stream = await ours.open_stream()
        await stream.write(b"%d" % number)
        await stream.finish()
        assert await read_all(stream) == b"%d" % number

    await asyncio.gather(*(ask(number) for number in range(300)))
    server.cancel()


async def test_a_receiver_is_called_without_a_task(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    answered = asyncio.Event()
    tasks: set[object] = set()
    answers = bytearray()

    def serve(data: bytes) -> None:
        tasks.add(asyncio.current_task())
        incoming.write_nowait(len(data).to_bytes(4, sys.byteorder))

    def receive(data: bytes) -> None:
        answers.extend(data)
        if sum(memoryview(answers[: len(answers) // 4 * 4]).cast("I")) >= 300_000:
            answered.set()

    incoming.set_receiver(serve, lambda _: None)
    stream.set_receiver(receive, lambda _: None)
    for _ in range(300):  # far beyond the windows: credit returns by itself
        await stream.write(b"x" * 1000)
    await answered.wait()
    assert tasks == {None}


async def test_a_receiver_gets_what_waits_and_the_end_once(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    await stream.write(b"early")
    await until(lambda: incoming.buffered == 5)
    got: list[bytes] = []
    ends: list[object] = []
    incoming.set_receiver(got.append, ends.append)
    assert got == [b"early"]
    await stream.write(b"late")
    await stream.finish()
    await until(lambda: ends)
    assert b"".join(got) == b"earlylate"
    assert ends == [None]


async def test_a_receiver_hears_of_resets_and_of_the_connection_s_end(both: tuple[Connection, Connection]) -> None:
    ours, theirs = both
    ends: list[errors.TransportError | None] = []
    for _ in range(2):
        stream, incoming = await pair_of_streams(ours, theirs)
        incoming.set_receiver(lambda _: None, ends.append)
        if not ends:
            stream.reset(5)
            await until(lambda: ends)
    await ours.close(3, "over")
    await until(lambda: len(ends) == 2)
    assert isinstance(ends[0], errors.StreamReset)
    assert isinstance(ends[1], errors.ConnectionClosed)


async def test_pausing_holds_the_peer_back(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    got = 0

    def receive(data: bytes) -> None:
        nonlocal got
        got += len(data)
        incoming.pause_reading()

    incoming.set_receiver(receive, lambda _: None)
    sending = asyncio.ensure_future(stream.write(bytes(KIB * KIB)))
    await until(lambda: got + incoming.buffered > 100 * KIB)
    assert 0 < got + incoming.buffered <= 128 * KIB + 1
    assert not sending.done()
    while got < KIB * KIB:
        incoming.resume_reading()
        await asyncio.sleep(0)
    await sending


async def test_a_receiver_that_raises_resets_its_stream_only(both: tuple[Connection, Connection]) -> None:
    ours, theirs = both
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    stream, incoming = await pair_of_streams(ours, theirs)

    def broken(_: bytes) -> None:
        raise ValueError("a bug of the application")

    incoming.set_receiver(broken, lambda _: None)
    await stream.write(b"x")
    with pytest.raises(errors.StreamReset):
        await stream.read(1)
    assert isinstance(reported[0]["exception"], ValueError)
    await pair_of_streams(ours, theirs)


async def test_write_nowait_is_bounded_and_takes_all_or_nothing(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    stream.write_nowait(bytes(128 * KIB - 1))  # the whole credit
    stream.write_nowait(b"a" * (60 * KIB))
    with pytest.raises(errors.SendBufferFull, match="limit of 65536"):
        stream.write_nowait(b"b" * (5 * KIB))
    stream.write_nowait(memoryview(b"c" * (4 * KIB)))
    waiting = asyncio.ensure_future(stream.write(b"d" * KIB))
    data = await incoming.readexactly(128 * KIB - 1 + 65 * KIB)
    await waiting
    assert data == bytes(128 * KIB - 1) + b"a" * (60 * KIB) + b"c" * (4 * KIB) + b"d" * KIB


async def test_finish_waits_for_what_is_queued(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    stream.write_nowait(bytes(150 * KIB))
    finishing = asyncio.ensure_future(stream.finish())
    await asyncio.sleep(0)
    assert not finishing.done()
    assert len(await read_all(incoming)) == 150 * KIB
    await finishing


async def test_writers_take_turns(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    writers = [asyncio.ensure_future(stream.write(bytes([letter]) * 200_000)) for letter in b"ab"]
    data = await incoming.readexactly(400_000)
    await asyncio.gather(*writers)
    assert data == b"a" * 200_000 + b"b" * 200_000


async def test_a_cancelled_readexactly_loses_nothing(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    await stream.write(b"abc")
    await until(lambda: incoming.buffered == 3)
    reading = asyncio.ensure_future(incoming.readexactly(6))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stream.write(b"def")
    assert await incoming.readexactly(6) == b"abcdef"
    consumed, received = incoming.receive_credit.consumed, incoming.receive_credit.received
    assert consumed == received == 7


async def test_empty_writes_and_other_buffers(both: tuple[Connection, Connection]) -> None:
    stream, incoming = await pair_of_streams(*both)
    await stream.write(b"")
    stream.write_nowait(b"")
    buffer = bytearray(b"abc")
    stream.write_nowait(buffer)
    buffer[:] = b"xyz"  # the stream has its own copy
    await stream.write(memoryview(b"defg")[1:])
    assert await incoming.readexactly(6) == b"abcefg"
