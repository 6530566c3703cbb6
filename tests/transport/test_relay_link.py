from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from tests.transport.fake_relay import FakeRelay
from transport import relay_dial
from transport.errors import Address
from transport.identity import Identity, PeerId
from transport.proto import relay_frames as frames
from transport.proto.relay_queue import MAX_FIRST
from transport.proto.relay_url import parse_relay_url
from transport.relay_link import RelayLink
from transport.relay_session import MAX_FRAME, RelayLinkConfig

CONFIG = RelayLinkConfig()
FAST = RelayLinkConfig(silence=0.2, urgent_timeout=0.3, kick_timeout=0.3, write_timeout=0.5, pong_timeout=0.5)
SIZE = 1200


class Node:
    """A link and what it told."""

    def __init__(
        self,
        url: str,
        config: RelayLinkConfig = CONFIG,
        identity: Identity | None = None,
        private_ok: Callable[[], bool] = lambda: True,
    ) -> None:
        self.identity = identity or Identity.generate()
        self.received: list[tuple[PeerId, list[bytes], bool]] = []
        self.states: list[tuple[bool, str]] = []
        self.gone: list[tuple[PeerId, frames.GoneReason]] = []
        self._changed = asyncio.Event()
        self.link = RelayLink(
            parse_relay_url(url),
            self.identity,
            config,
            self._on_datagrams,
            self._on_state,
            self._on_gone,
            on_rtt=self._changed.set,
            private_ok=private_ok,
        )

    def _on_datagrams(self, url: str, peer: PeerId, datagrams: list[bytes], disco: bool) -> None:
        assert url == self.link.url.text
        self.received.append((peer, datagrams, disco))
        self._changed.set()

    def _on_state(self, url: str, up: bool, reason: str) -> None:
        assert url == self.link.url.text
        assert "\n" not in reason
        self.states.append((up, reason))
        self._changed.set()

    def _on_gone(self, _url: str, peer: PeerId, why: frames.GoneReason) -> None:
        self.gone.append((peer, why))
        self._changed.set()

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def datagrams(self) -> list[bytes]:
        return [datagram for _, datagrams, _ in self.received for datagram in datagrams]

    async def until(self, condition: Callable[[], bool], timeout: float = 10) -> None:
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def is_up(self, timeout: float = 10) -> None:
        await self.until(lambda: self.link.up, timeout)

    async def is_down(self, timeout: float = 10) -> str:
        """Wait for the next report that it is down; its reason."""
        before = len(self.states)
        await self.until(lambda: any(not up for up, _ in self.states[before:]), timeout)
        return next(reason for up, reason in self.states[before:] if not up)


@pytest.fixture
async def relay() -> AsyncIterator[FakeRelay]:
    async with FakeRelay() as fake:
        yield fake


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make_one(url: str, *args: object, **kwargs: object) -> Node:
        node = Node(url, *args, **kwargs)  # type: ignore[arg-type]
        nodes.append(node)
        node.link.start()
        return node

    yield make_one
    await asyncio.gather(*(node.link.close() for node in nodes))


async def test_two_nodes_talk_over_a_relay(relay: FakeRelay, make: Callable[..., Node]) -> None:
    a, b = make(relay.url), make(relay.url)
    await a.is_up()
    await b.is_up()
    assert a.link.send(b.peer, [b"one", b"two"])
    assert b.link.send(a.peer, [b"call"], disco=True)
    await b.until(lambda: bool(b.received))
    await a.until(lambda: bool(a.received))
    assert b.received == [(a.peer, [b"one", b"two"], False)]
    assert a.received == [(b.peer, [b"call"], True)]


async def test_a_link_knows_what_the_relay_said_of_it(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node = make(relay.url)
    await node.until(lambda: node.link.rtt is not None)
    assert node.link.reflectors == [("127.0.0.1", 3478), ("127.0.0.1", 3479)]
    assert node.link.observed.startswith("127.0.0.1:")
    assert node.link.error == ""
    assert node.states == [(True, "")]
    assert 0 < (node.link.rtt or 0) < 1


async def test_reflectors_are_where_we_are_connected_and_one_host_of_the_other_family(
    relay: FakeRelay, make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may list whom it likes; IPv4 must be asked about even where the relay is reached by IPv6."""

    def look_up(_url: object) -> asyncio.Future[list[Address]]:
        found = asyncio.get_running_loop().create_future()
        hosts = ["127.0.0.1", "2001:db8::1", "127.9.9.9", "192.0.2.1", "2001:db8::2"]
        found.set_result([(host, relay.port) for host in hosts])
        return found

    monkeypatch.setattr(relay_dial, "_look_up", look_up)
    relay.authority = f"localhost:{relay.port}"
    node = make(f"http://localhost:{relay.port}")
    await node.is_up()
    assert {host for host, _ in node.link.reflectors} == {"127.0.0.1", "2001:db8::1"}


async def test_datagrams_of_one_send_share_frames(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node, peer = make(relay.url), Identity.generate().peer_id
    await node.is_up()
    datagrams = [bytes([number]) * 1452 for number in range(200)]
    node.link.send(peer, datagrams)
    await relay.until(lambda: sum(len(data.datagrams) for data in relay.received) == 200)
    assert [datagram for data in relay.received for datagram in data.datagrams] == datagrams
    assert len(relay.received) == -(-200 * 1454 // MAX_FRAME)


async def test_a_send_is_in_the_socket_before_it_returns(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node = make(relay.url)
    await node.is_up()
    before = node.link.counters.sent_frames
    node.link.send(Identity.generate().peer_id, [bytes(12_000)])
    assert node.link.counters.sent_frames == before + 1


async def test_nothing_is_sent_while_the_link_is_down(make: Callable[..., Node]) -> None:
    node = make("http://127.0.0.1:1")
    assert not node.link.send(node.peer, [b"x"])
    reason = await node.is_down()
    assert "127.0.0.1:1" in reason
    assert node.link.error == reason


@pytest.mark.parametrize("disco", [False, True])
async def test_a_peer_that_is_not_there_is_told_as_gone(
    relay: FakeRelay, make: Callable[..., Node], disco: bool
) -> None:
    node, peer = make(relay.url), Identity.generate().peer_id
    await node.is_up()
    node.link.send(peer, [b"x"], disco=disco)
    await relay.tell(frames.Gone(peer.raw, frames.GoneReason.NOT_CONNECTED).encode())
    await node.until(lambda: bool(node.gone))
    assert node.gone == [(peer, frames.GoneReason.NOT_CONNECTED)]


async def test_after_a_loss_the_link_comes_back_within_the_spread(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node = make(relay.url)
    await node.is_up()
    relay.reset_all()
    await node.is_down()
    await node.is_up()
    assert len(relay.logins) == 2


async def test_a_relay_that_restarts_is_left_at_once_and_still_heard(
    relay: FakeRelay, make: Callable[..., Node]
) -> None:
    node, peer = make(relay.url), Identity.generate().peer_id
    await node.is_up()
    await relay.tell(frames.Restarting(300, 400).encode())
    reason = await node.is_down()
    assert "restarts" in reason
    assert not node.link.send(peer, [b"x"])
    await relay.tell(frames.Data(peer.raw, (b"late",)).encode())
    await node.until(lambda: bool(node.received))
    assert node.datagrams == [b"late"]
    told = asyncio.get_running_loop().time()
    await node.is_up()
    assert 0.1 < relay.logins[1] - told < 2


async def test_a_refusal_is_obeyed_and_its_text_is_made_harmless(relay: FakeRelay, make: Callable[..., Node]) -> None:
    relay.refuse_with = frames.Refused(frames.RefusalCode.OVERLOADED, 600, "full\n\x1b[31mred")
    node = make(relay.url)
    reason = await node.is_down()
    assert reason == "the relay refused: full [31mred"
    refused = asyncio.get_running_loop().time()
    relay.refuse_with = None
    await node.is_up()
    assert relay.logins[1] - refused > 0.5


async def test_a_kick_does_not_move_what_the_relay_asked_for(relay: FakeRelay, make: Callable[..., Node]) -> None:
    relay.refuse_with = frames.Refused(frames.RefusalCode.KEY_FIGHT, 400, "")
    node = make(relay.url)
    reason = await node.is_down()
    assert "key fight" in reason
    refused = asyncio.get_running_loop().time()
    relay.refuse_with = None
    node.link.kick()
    await node.is_up()
    assert relay.logins[1] - refused > 0.3


async def test_a_dead_relay_is_noticed_while_traffic_flows(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node = make(relay.url, FAST)
    await node.until(lambda: node.link.rtt is not None)
    relay.reads.clear()
    node.link.send(Identity.generate().peer_id, [bytes(SIZE)])
    reason = await node.is_down(5)
    assert "did not answer" in reason


async def test_a_dead_relay_is_noticed_without_traffic(make: Callable[..., Node]) -> None:
    async with FakeRelay() as relay:
        node = make(relay.url, FAST)
        await node.until(lambda: node.link.rtt is not None)
        relay.answers_pings = False
        reason = await node.is_down(10)  # by one of the first pings
        assert "did not answer" in reason


async def test_a_relay_that_takes_nothing_is_given_up(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node = make(relay.url, replace(FAST, silence=60, pong_timeout=60))
    await node.until(lambda: node.link.rtt is not None)
    relay.reads.clear()
    down = asyncio.create_task(node.is_down(20))
    peer = Identity.generate().peer_id
    for _ in range(1000):
        if not node.link.send(peer, [bytes(SIZE)] * 50):
            break
        await asyncio.sleep(0.002)
    assert "took nothing" in await down


async def test_a_full_socket_lets_disco_first_and_drops_the_oldest_bulk(
    relay: FakeRelay, make: Callable[..., Node]
) -> None:
    node = make(relay.url, replace(CONFIG, silence=60, pong_timeout=60, write_timeout=60, queue_age=60))
    await node.until(lambda: node.link.rtt is not None)
    relay.reads.clear()
    peer = Identity.generate().peer_id
    sent = 0
    while node.link.counters.dropped_frames < 20:
        assert node.link.send(peer, [sent.to_bytes(4) + bytes(SIZE)] * 40)
        sent += 1
        await asyncio.sleep(0)
    node.link.send(peer, [b"disco"], disco=True)
    last = sent
    node.link.send(peer, [last.to_bytes(4) + b"the last"])
    relay.reads.set()
    await relay.until(lambda: any(data.datagrams[-1].endswith(b"the last") for data in relay.received), 20)
    at = next(index for index, data in enumerate(relay.received) if data.disco)
    numbers = [int.from_bytes(data.datagrams[0][:4]) for data in relay.received if not data.disco]
    assert at < len(relay.received) - 10  # a megabyte of bulk waited and came after it
    assert numbers == sorted(numbers)
    missing = set(range(last)) - set(numbers)
    assert missing
    assert max(missing) < last - 10  # the oldest of what waited


async def test_disco_is_bounded_too(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node = make(relay.url, replace(CONFIG, silence=60, pong_timeout=60, write_timeout=60))
    await node.until(lambda: node.link.rtt is not None)
    relay.reads.clear()
    peer = Identity.generate().peer_id
    for _ in range(20_000):
        assert node.link.send(peer, [bytes(4000)], disco=True)
        if node.link.counters.dropped_frames * 4000 > 4 * MAX_FIRST:
            break
    else:
        pytest.fail("twenty thousand disco datagrams of 4 KB were all queued")


async def test_a_kick_replaces_a_session_that_is_dead(relay: FakeRelay, make: Callable[..., Node]) -> None:
    relay.spread_ms = 60_000  # not waited for: only our own network is at fault
    node = make(relay.url, FAST)
    await node.until(lambda: node.link.rtt is not None)
    relay.reads.clear()
    node.link.kick()
    await node.is_down(5)
    relay.reads.set()
    await node.is_up(5)
    assert len(relay.logins) == 2


async def test_a_kick_leaves_a_session_that_answers(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node = make(relay.url, FAST)
    await node.until(lambda: node.link.rtt is not None)
    measured = node.link.measured
    node.link.kick()
    await node.until(lambda: node.link.measured > measured)
    assert node.states == [(True, "")]


async def test_a_kick_ends_the_waiting(make: Callable[..., Node]) -> None:
    async with FakeRelay() as relay:
        await relay.stop()
        node = make(relay.url)
        for _ in range(6):  # the back-off is 1.6 to 3.2 s then
            await node.is_down(20)
        await relay.listen()
        node.link.kick()
        await node.is_up(1.2)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "empty"),
        (b"\x77" * 2000, "bytes"),
        ("hello", "text"),
        (frames.Challenge(9, bytes(32)).encode(), "version 9"),
        (frames.Welcome(20, 1, 1, (0, 0), bytes(16), "").encode(), "Welcome before"),
        (frames.Data(bytes(32), (b"x",)).encode(), "Data before"),
        (b"\x01\x01short", "too short"),
        (b"\x01" + bytes(300_000), "WebSocket"),
    ],
)
async def test_what_is_no_challenge_ends_the_try(
    relay: FakeRelay, make: Callable[..., Node], message: bytes | str, words: str
) -> None:
    relay.on_challenge = lambda _socket: message
    node = make(relay.url)
    assert words in await node.is_down()


async def test_frames_of_later_versions_are_ignored(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node, peer = make(relay.url), Identity.generate().peer_id
    await node.is_up()
    await relay.tell(b"\x7fsomething new")
    await relay.tell(frames.Ping(b"12345678").encode())
    await relay.tell(frames.Limited(100).encode())
    await relay.tell(frames.Data(peer.raw, (b"x",)).encode())
    await node.until(lambda: bool(node.received))
    assert node.states == [(True, "")]


@pytest.mark.parametrize("message", [b"\x10" + bytes(32), b"\x10" + bytes(32) + b"\0\x05abc", b"\x12abc"])
async def test_a_broken_frame_ends_the_session(relay: FakeRelay, make: Callable[..., Node], message: bytes) -> None:
    node = make(relay.url)
    await node.is_up()
    await relay.tell(message)
    assert "broke the protocol" in await node.is_down()


async def test_fragments_are_joined(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node, peer = make(relay.url), Identity.generate().peer_id
    await node.is_up()
    whole = frames.Data(peer.raw, (b"x" * 1000, b"y" * 1000)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(whole), 500):
            yield whole[at : at + 500]

    await relay.sessions[node.peer.raw].send(pieces())
    await node.until(lambda: bool(node.received))
    assert node.datagrams == [b"x" * 1000, b"y" * 1000]


async def test_a_login_that_takes_too_long_is_given_up(relay: FakeRelay, make: Callable[..., Node]) -> None:
    relay.on_challenge = lambda _socket: None
    node = make(relay.url, replace(CONFIG, connect_timeout=0.3))
    assert "the login" in await node.is_down()


async def test_a_tcp_port_that_never_speaks_is_given_up(make: Callable[..., Node]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = make(f"http://127.0.0.1:{listener.getsockname()[1]}", replace(CONFIG, connect_timeout=0.3))
        assert "took more than" in await node.is_down()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "HTTP 200"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", "HTTP 200"),
        (b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "HTTP 301"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "behind its front"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "no WebSocket"),
        (b"\0" * 100_000, "no WebSocket"),
        (b"", "closed the connection"),
    ],
)
async def test_what_is_no_relay_is_named(make: Callable[..., Node], answer: bytes, words: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    node = make(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert words in await node.is_down()
    server.close()


async def test_a_relay_that_makes_us_write_without_reading_is_left(make: Callable[..., Node]) -> None:
    """WebSocket pings, which every end must answer: a memory bomb if the answers are not read."""
    async with FakeRelay() as relay:
        node = make(relay.url, replace(CONFIG, silence=60, pong_timeout=60, write_timeout=60))
        await node.is_up()
        session = relay.sessions[node.peer.raw]
        session.transport.pause_reading()
        down = asyncio.create_task(node.is_down(20))
        flood = b"\x89\x7d" + bytes(125)
        while not down.done() and not session.transport.is_closing():
            session.transport.write(flood * 500)
            await asyncio.sleep(0)
        assert "does not read" in await down


async def test_strangers_relays_may_not_be_private(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node = make(relay.url.replace("127.0.0.1", "localhost"), private_ok=lambda: False)
    assert "only private addresses" in await node.is_down()
    assert not relay.logins


async def test_a_name_that_is_unknown_is_said(make: Callable[..., Node]) -> None:
    node = make("http://no-such-name.invalid:80")
    assert "no-such-name.invalid" in await node.is_down(20)


async def test_what_a_callback_raises_does_not_end_the_session(
    relay: FakeRelay, make: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    node, peer = make(relay.url), Identity.generate().peer_id
    node.link._on_datagrams = lambda *_: 1 / 0  # type: ignore[assignment]
    await node.is_up()
    await relay.tell(frames.Data(peer.raw, (b"x",)).encode())
    await relay.tell(frames.Gone(peer.raw, frames.GoneReason.QUEUE_FULL).encode())
    await node.until(lambda: bool(node.gone))
    assert node.states == [(True, "")]


async def test_close_says_goodbye_and_leaves_nothing(relay: FakeRelay, make: Callable[..., Node]) -> None:
    node = make(relay.url)
    await node.is_up()
    session = relay.sessions[node.peer.raw]
    await node.link.close()
    await relay.until(lambda: not relay.sessions)
    assert session.close_code == 1000
    assert not node.link.up
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("relay-")]
