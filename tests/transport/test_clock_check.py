from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from transport.clock_check import offset_in, offset_to
from transport.proto.relay_url import parse_relay_url


async def offset_with(answer: bytes) -> float | None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await offset_to(parse_relay_url(f"http://127.0.0.1:{port}"))


async def test_a_clock_that_is_ahead() -> None:
    past = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() - 100))
    offset = await offset_with(f"HTTP/1.1 200 OK\r\nDate: {past}\r\n\r\nok".encode())
    assert offset is not None
    assert 97 < offset < 103


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nDate: yesterday\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nDate: Thu, 01 Jan 99999999 00:00:00 GMT\r\n\r\n",
        b"\xff" * 100_000,
        b"x: y\r\n" * 10_000,
    ],
)
async def test_answers_that_tell_no_time(answer: bytes) -> None:
    assert await offset_with(answer) is None


def test_the_middle_of_the_second_counts() -> None:
    head = b"HTTP/1.1 200 OK\r\nDate: Thu, 01 Jan 1970 00:01:40 GMT\r\n\r\n"
    assert offset_in(head, 100.5) == 0.0
