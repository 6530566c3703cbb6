"""The writer on a real stream whose peer takes as much as the test says."""

from __future__ import annotations

import asyncio
import functools

import pytest

from swarmnode.dispatch.frame_writer import MAX_QUEUED, FrameWriter
from transport.errors import StreamReset
from transport.stream import Buffer, Stream

PATIENT = 60.0  # seconds: longer than any test


class Peer:
    """What a stream needs of its connection; has room for `room` bytes."""

    def __init__(self, room: int, max_queue: int = 0) -> None:
        self.room = room
        self.taken = b""
        self.stream = Stream(self, 0, 1 << 30, 1 << 30, max_queue)

    def give(self, room: int) -> None:
        self.room += room
        self.stream.pump()

    def send_room(self, stream: Stream) -> int:
        return self.room

    def send(self, stream: Stream, data: Buffer, end: bool) -> None:
        self.taken += bytes(data)
        self.room -= len(data)

    def wants_room(self, stream: Stream) -> None: ...

    def consumed(self, stream: Stream, size: int) -> None: ...

    def abort(self, stream: Stream, code: int) -> None: ...

    def half_closed(self, stream: Stream) -> None: ...


class Reports:
    """What the writer says to its owner."""

    def __init__(self) -> None:
        self.whys: list[str] = []
        self._heard = asyncio.Event()

    def __call__(self, why: str) -> None:
        self.whys.append(why)
        self._heard.set()

    async def first(self) -> str:
        async with asyncio.timeout(20):
            await self._heard.wait()
        return self.whys[0]


async def test_frames_are_written_at_once_while_the_peer_keeps_up_and_in_order_otherwise() -> None:
    peer, reports, written = Peer(room=6), Reports(), list[str]()
    writer = FrameWriter(peer.stream, PATIENT, reports)
    for name in ("one", "two", "three", "four"):
        writer.send(name.encode(), functools.partial(written.append, name))
    assert (peer.taken, written) == (b"onetwo", ["one", "two"])
    peer.give(100)
    async with asyncio.timeout(20):
        await writer.drain()
    assert (peer.taken, written) == (b"onetwothreefour", ["one", "two", "three", "four"])
    writer.send(b"five")
    assert peer.taken.endswith(b"fourfive")
    assert writer.bytes_out == len(peer.taken)
    assert reports.whys == []


async def test_a_peer_that_takes_nothing_is_reported() -> None:
    reports = Reports()
    FrameWriter(Peer(room=0).stream, 0.01, reports).send(b"frame")
    assert await reports.first() == "took no data for 0.01 s"


async def test_a_peer_that_provokes_frames_and_reads_none_is_reported() -> None:
    reports = Reports()
    writer = FrameWriter(Peer(room=0).stream, PATIENT, reports)
    for _ in range(MAX_QUEUED + 10):
        writer.send(b"frame")
    assert await reports.first() == f"left {MAX_QUEUED} frames unread"
    assert len(reports.whys) == 1


@pytest.mark.parametrize("waiting", [False, True])
async def test_a_peer_that_stops_our_side_is_reported_once_and_never_from_inside_send(waiting: bool) -> None:
    peer, reports, written = Peer(room=0 if waiting else 100), Reports(), list[bool]()
    writer = FrameWriter(peer.stream, PATIENT, reports)
    if waiting:
        writer.send(b"first", lambda: written.append(True))
    peer.stream.end_sending(StreamReset(5))
    writer.send(b"second", lambda: written.append(True))
    writer.send(b"third", lambda: written.append(True))
    assert reports.whys == []
    assert await reports.first() == str(StreamReset(5))
    await asyncio.sleep(0)
    assert (len(reports.whys), peer.taken, written) == (1, b"", [])


async def test_a_closed_writer_drops_what_waits_and_says_nothing() -> None:
    peer, reports = Peer(room=0), Reports()
    writer = FrameWriter(peer.stream, PATIENT, reports)
    writer.send(b"first")
    writer.close()
    peer.give(100)
    writer.send(b"second")
    await writer.drain()
    assert (peer.taken, reports.whys) == (b"", [])
