"""One session over a transport that a test holds: what is written, when, and what hostile bytes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from transport.identity import Identity, PeerId
from transport.proto import relay_frames as frames
from transport.proto.relay_queue import MAX_FIRST
from transport.proto.relay_url import parse_relay_url
from transport.relay_session import (
    MAX_FRAME,
    MAX_QUEUED_FRAME,
    Ending,
    RelayCounters,
    RelayLinkConfig,
    RelaySession,
)

PEER = Identity.generate(bytes(32)).peer_id
WELCOME = frames.Welcome(20, 5000, 1, (0, 0), bytes(16), "1.2.3.4:5")


class Wire(asyncio.Transport):
    """Takes what is written; `server` understands it."""

    def __init__(self) -> None:
        super().__init__()
        self.server = ServerProtocol(subprotocols=[Subprotocol(frames.SUBPROTOCOL)], max_size=frames.MAX_MESSAGE)
        self.closing = False
        self.unread = 0
        self.messages: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.closing:
            return
        self.server.receive_data(bytes(data))
        for event in self.server.events_received():
            if isinstance(event, Request):
                self.server.send_response(self.server.accept(event))
            elif isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                self.messages.append(bytes(event.data))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True


class Owner:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.ups = 0
        self.datagrams: list[tuple[PeerId, list[bytes], bool]] = []
        self.gone: list[PeerId] = []
        self.records: list[frames.Record] = []
        self.endings: list[Ending] = []
        self.measured = 0

    def session_up(self, _session: RelaySession) -> None:
        self.ups += 1

    def session_datagrams(self, peer: PeerId, datagrams: list[bytes], disco: bool) -> None:
        self.datagrams.append((peer, datagrams, disco))

    def session_gone(self, peer: PeerId, _why: frames.GoneReason) -> None:
        self.gone.append(peer)

    def session_record(self, record: frames.Record) -> None:
        self.records.append(record)

    def session_measured(self) -> None:
        self.measured += 1

    def session_ended(self, _session: RelaySession, ending: Ending) -> None:
        self.endings.append(ending)


class Bench:
    """A session, its wire and its owner."""

    def __init__(self, config: RelayLinkConfig | None = None) -> None:
        self.owner, self.wire, self.counters = Owner(), Wire(), RelayCounters()
        self.session = RelaySession(
            parse_relay_url("http://relay.example"),
            Identity.generate(bytes(32)),
            config or RelayLinkConfig(),
            self.counters,
            self.owner,
        )
        self.session.connection_made(self.wire)
        self.session.data_received(b"".join(self.wire.server.data_to_send()))

    def login(self) -> Bench:
        self.tell(frames.Challenge(1, bytes(32)).encode())
        self.tell(WELCOME.encode())
        assert self.session.up
        self.wire.messages.clear()
        return self

    def tell(self, message: bytes) -> None:
        self.session.data_received(Frame(Opcode.BINARY, message).serialize(mask=False))

    def sent(self) -> list[frames.ClientFrame]:
        found = [frames.decode_client(message) for message in self.wire.messages]
        self.wire.messages.clear()
        return found

    def end(self) -> None:
        self.session.connection_lost(None)


async def test_the_login_is_signed_for_this_nonce_and_this_name() -> None:
    bench = Bench()
    bench.tell(frames.Challenge(1, b"n" * 32).encode())
    (login,) = bench.sent()
    assert isinstance(login, frames.Login)
    assert login.authority == "relay.example"
    assert PeerId(login.key).verify(login.signature, frames.login_message(b"n" * 32, "relay.example"))
    bench.end()


async def test_a_second_challenge_is_not_signed() -> None:
    """A relay that asks again wants an answer for somebody else's challenge."""
    bench = Bench().login()
    bench.tell(frames.Challenge(1, b"m" * 32).encode())
    assert not bench.sent()
    assert "twice" in bench.owner.endings[0].reason
    bench.end()


async def test_a_full_socket_cuts_what_waits_small_and_orders_it() -> None:
    bench = Bench().login()
    datagrams = [bytes([number]) * 1452 for number in range(60)]
    bench.session.pause_writing()
    assert bench.session.send(PEER.raw, datagrams, False)
    assert bench.session.send(PEER.raw, [b"disco"], True)
    assert not bench.wire.messages
    bench.session.resume_writing()
    first, *rest = bench.wire.messages
    assert frames.decode_client(first) == frames.Data(PEER.raw, (b"disco",), disco=True)
    assert all(len(message) <= MAX_QUEUED_FRAME for message in rest)
    assert [datagram for frame in bench.sent()[1:] for datagram in getattr(frame, "datagrams", ())] == datagrams
    bench.end()


async def test_bulk_that_waited_too_long_is_dropped() -> None:
    bench = Bench(replace(RelayLinkConfig(), queue_age=0.0)).login()
    bench.session.pause_writing()
    bench.session.send(PEER.raw, [b"bulk"], False)
    bench.session.send(PEER.raw, [b"disco"], True)
    await asyncio.sleep(0.01)
    bench.session.resume_writing()
    assert bench.sent() == [frames.Data(PEER.raw, (b"disco",), disco=True)]
    assert bench.counters.dropped_frames == 1
    bench.end()


async def test_queues_are_bounded_whatever_is_sent() -> None:
    bench = Bench().login()
    bench.session.pause_writing()
    for _ in range(2000):
        assert bench.session.send(PEER.raw, [bytes(1400)], False)
        assert bench.session.send(PEER.raw, [bytes(1400)], True)
    bench.session.resume_writing()
    sizes = {True: 0, False: 0}
    for message in bench.wire.messages:
        sizes[message[0] == frames.FrameType.DISCO] += len(message)
    assert sizes[False] <= RelayLinkConfig().queue
    assert sizes[True] <= MAX_FIRST
    bench.end()


@given(st.lists(st.integers(1, 65_535), min_size=1, max_size=40), st.booleans())
@settings(max_examples=50)
def test_one_send_is_as_few_frames_as_hold_it(sizes: list[int], paused: bool) -> None:
    async def run() -> None:
        bench = Bench().login()
        if paused:
            bench.session.pause_writing()
        datagrams = [bytes(size) for size in sizes]
        bench.session.send(PEER.raw, datagrams, False)
        dropped = bench.counters.dropped_frames
        bench.session.resume_writing()
        found = bench.sent()
        if not dropped:
            assert [len(datagram) for frame in found for datagram in getattr(frame, "datagrams", ())] == sizes
        if not paused:
            assert len(found) <= 1 + 2 * (sum(sizes) + 2 * len(sizes)) // MAX_FRAME
        bench.end()

    asyncio.run(run())


async def test_what_cannot_be_relayed_is_the_callers_error() -> None:
    bench = Bench().login()
    for datagrams, disco in (([b""], False), ([bytes(65_536)], False), ([bytes(9000)], True)):
        with pytest.raises(frames.RelayFrameError):
            bench.session.send(PEER.raw, datagrams, disco)
    assert bench.session.up
    bench.end()


async def test_an_invented_pong_is_no_measurement() -> None:
    bench = Bench().login()
    bench.tell(frames.Pong(b"\xff" * 8, 1).encode())
    assert bench.owner.measured == 0
    bench.tell(frames.Pong((1).to_bytes(8), 1).encode())
    assert bench.owner.measured == 1
    bench.tell(frames.Pong((1).to_bytes(8), 1).encode())
    assert bench.owner.measured == 1
    bench.end()


async def test_the_spread_that_the_last_pong_told_counts() -> None:
    bench = Bench().login()
    bench.tell(frames.Pong((1).to_bytes(8), 9000).encode())
    bench.end()
    assert bench.owner.endings[0].spread == 9.0


async def test_the_end_is_told_once_and_nothing_is_sent_after_it() -> None:
    bench = Bench().login()
    bench.tell(frames.Refused(frames.RefusalCode.REPLACED, 60_000, "elsewhere").encode())
    bench.session.fail("again")
    bench.end()
    assert [ending.refused_for for ending in bench.owner.endings] == [60.0]
    assert not bench.session.send(PEER.raw, [b"x"], False)
    assert bench.session.closed.done()


async def test_a_refusal_is_the_last_word_and_the_close_frame_after_it_is_answered() -> None:
    bench = Bench().login()
    bench.tell(frames.Refused(frames.RefusalCode.REPLACED, 60_000, "elsewhere").encode())
    bench.tell(WELCOME.encode())
    assert not bench.session.up
    assert not bench.wire.closing
    bench.wire.server.send_close(1008)
    bench.session.data_received(b"".join(bench.wire.server.data_to_send()))
    assert bench.wire.server.close_rcvd is not None
    bench.end()
    assert [ending.refused_for for ending in bench.owner.endings] == [60.0]
    assert bench.owner.ups == 1


MESSAGES: list[Callable[[Random], bytes]] = [
    lambda random: random.randbytes(random.randrange(80)),
    lambda random: bytes([random.choice(list(frames.FrameType))]) + random.randbytes(random.randrange(80)),
    lambda random: frames.data_frame(random.randbytes(32), [random.randbytes(random.randrange(1, 50))]),
    lambda random: frames.Challenge(random.choice([1, 1, 2]), random.randbytes(32)).encode(),
    lambda _: WELCOME.encode(),
    lambda random: frames.Welcome(
        random.randrange(1 << 16), random.randrange(1 << 32), 0, (1, 2), bytes(16), ""
    ).encode(),
    lambda random: frames.Pong(random.randrange(4).to_bytes(8), random.randrange(1 << 32)).encode(),
    lambda random: frames.Ping(random.randbytes(8)).encode(),
    lambda random: frames.Gone(random.randbytes(32), frames.GoneReason.NOT_CONNECTED).encode(),
    lambda random: frames.Restarting(random.randrange(1 << 32), random.randrange(1 << 32)).encode(),
    lambda random: frames.Limited(random.randrange(1 << 32)).encode(),
    lambda random: frames.Refused(random.choice(list(frames.RefusalCode)), random.randrange(1 << 32), "no").encode(),
]


@given(st.integers(0, 1 << 32), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_no_relay_makes_a_session_raise_or_end_twice(seed: int, logged_in: bool, garble: bool) -> None:
    async def run() -> None:
        random, bench = Random(seed), Bench()
        if logged_in:
            bench.login()
        for _ in range(30):
            if bench.wire.closing:
                break
            opcode = random.choice([Opcode.BINARY] * 8 + [Opcode.TEXT, Opcode.PING, Opcode.CLOSE, Opcode.CONT])
            fin = opcode in (Opcode.PING, Opcode.CLOSE) or random.random() < 0.8
            data = bytearray(Frame(opcode, random.choice(MESSAGES)(random)[:120], fin).serialize(mask=False))
            if garble and random.random() < 0.2:
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            at = random.randrange(len(data) + 1)
            bench.session.data_received(bytes(data[:at]))
            if not bench.wire.closing:
                bench.session.data_received(bytes(data[at:]))
            bench.session.send(PEER.raw, [b"x"], False)
        bench.end()
        assert len(bench.owner.endings) == 1
        assert bench.owner.ups <= 1
        assert "\n" not in bench.owner.endings[0].reason

    asyncio.run(run())


@given(st.binary(max_size=3000))
def test_no_http_answer_makes_a_session_raise(answer: bytes) -> None:
    async def run() -> None:
        owner = Owner()
        session = RelaySession(
            parse_relay_url("http://relay.example"),
            Identity.generate(bytes(32)),
            RelayLinkConfig(),
            RelayCounters(),
            owner,
        )
        session.connection_made(Wire())
        session.data_received(answer)
        session.eof_received()
        session.connection_lost(None)
        assert len(owner.endings) == 1

    asyncio.run(run())
