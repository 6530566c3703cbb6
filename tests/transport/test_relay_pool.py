from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from tests.transport.fake_relay import FakeRelay
from transport import relay_pool
from transport.identity import Identity, PeerId
from transport.news import NOT_NEEDED
from transport.proto import relay_frames as frames
from transport.proto.relay_url import BadRelayUrl
from transport.relay_pool import MAX_ON_DEMAND, MAX_OWN, MAX_STRANGERS, RelayPool
from transport.relay_session import RelayLinkConfig

FAST = RelayLinkConfig(silence=0.2, urgent_timeout=0.3, kick_timeout=0.3, pong_timeout=0.5)


class Node:
    """A pool and what it told."""

    def __init__(self, urls: Sequence[str], config: RelayLinkConfig = FAST) -> None:
        self.identity = Identity.generate()
        self.received: list[tuple[str, PeerId, list[bytes], bool]] = []
        self.told: list[tuple[str, tuple[str, ...]]] = []  # (home, up) at each on_change
        self.down_seen: list[tuple[str, tuple[str, ...]]] = []  # (home, up) when on_state said that one is down
        self.gone: list[tuple[str, PeerId]] = []
        self.states: list[tuple[str, bool, str]] = []
        self._changed = asyncio.Event()
        self.pool = RelayPool(
            urls, self.identity, config, self._on_datagrams, self._on_state, self._on_gone, self._on_change
        )

    def _on_datagrams(self, url: str, peer: PeerId, datagrams: list[bytes], disco: bool) -> None:
        self.received.append((url, peer, datagrams, disco))
        self._changed.set()

    def _on_state(self, url: str, up: bool, reason: str) -> None:
        self.states.append((url, up, reason))
        if not up:
            self.down_seen.append((self.pool.home, self.pool.up()))
        self._changed.set()

    def _on_gone(self, url: str, peer: PeerId, _why: frames.GoneReason) -> None:
        self.gone.append((url, peer))
        self._changed.set()

    def _on_change(self) -> None:
        self.told.append((self.pool.home, self.pool.up()))
        self._changed.set()

    async def until(self, condition: Callable[[], bool], timeout: float = 15) -> None:
        """Wait for something that changes with a callback."""
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make_one(urls: Sequence[str], *, start: bool = True, config: RelayLinkConfig = FAST) -> Node:
        node = Node(urls, config)
        nodes.append(node)
        if start:
            node.pool.start()
        return node

    yield make_one
    await asyncio.gather(*(node.pool.close() for node in nodes))


@pytest.fixture
async def relays() -> AsyncIterator[list[FakeRelay]]:
    """Three, each slower than the one before."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeRelay()) for _ in range(3)]
        for index, fake in enumerate(fakes):
            fake.pong_delay = 0.05 * index
        yield fakes


async def test_the_nearest_is_home_and_a_second_is_warm(
    relays: list[FakeRelay], make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_pool, "SURVEY_SECONDS", 1.0)
    near, middle, far = (relay.url for relay in relays)
    node = make([far, middle, near])
    await node.until(lambda: node.pool.up() == (near, middle))
    assert node.pool.home == near
    assert node.told[-1] == (near, (near, middle))
    assert node.pool.link(far) is None


async def test_datagrams_go_by_the_relay_that_is_named(relays: list[FakeRelay], make: Callable[..., Node]) -> None:
    urls = [relay.url for relay in relays[:2]]
    a, b = make(urls), make(urls)
    for node in (a, b):
        await node.until(lambda node=node: len(node.pool.up()) == 2)  # type: ignore[misc]
    for url in urls:
        assert a.pool.send(url, b.identity.peer_id, [b"by " + url.encode()])
    await b.until(lambda: len(b.received) == 2)
    assert {(url, datagrams[0]) for url, _, datagrams, _ in b.received} == {
        (url, b"by " + url.encode()) for url in urls
    }
    assert not a.pool.send("http://127.0.0.1:1", b.identity.peer_id, [b"x"])


async def test_when_the_home_dies_the_second_is_home_in_the_same_turn(
    relays: list[FakeRelay], make: Callable[..., Node]
) -> None:
    near, middle = relays[0].url, relays[1].url
    node = make([near, middle])
    await node.until(lambda: node.pool.up() == (near, middle))
    await relays[0].stop()
    await node.until(lambda: bool(node.down_seen))
    assert node.down_seen[0] == (middle, (middle,))
    assert node.pool.send(node.pool.home, Identity.generate().peer_id, [b"x"])
    await relays[0].listen()
    await node.until(lambda: near in node.pool.up())


async def test_a_home_that_falls_silent_is_left_while_traffic_flows(
    relays: list[FakeRelay], make: Callable[..., Node]
) -> None:
    near, middle = relays[0].url, relays[1].url
    node = make([near, middle])
    await node.until(lambda: node.pool.up() == (near, middle))
    relays[0].reads.clear()
    node.pool.send(near, Identity.generate().peer_id, [b"x"])
    await node.until(lambda: node.pool.home == middle)
    assert node.pool.up()[0] == middle


async def test_with_the_second_down_too_a_third_is_connected(
    relays: list[FakeRelay], make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_pool, "SURVEY_SECONDS", 1.0)
    near, middle, far = (relay.url for relay in relays)
    node = make([near, middle, far])
    await node.until(lambda: node.pool.up() == (near, middle))
    await relays[0].stop()
    await node.until(lambda: node.pool.up() == (middle, far))
    await relays[1].stop()
    await node.until(lambda: node.pool.up() == (far,))
    assert node.pool.home == far


async def test_a_much_nearer_home_is_taken_back_when_it_returns(
    relays: list[FakeRelay], make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_pool, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(relay_pool, "SURVEY_SECONDS", 1.5)
    near, middle, far = (relay.url for relay in relays)
    node = make([near, middle, far])
    await node.until(lambda: node.pool.up() == (near, middle))
    await relays[0].stop()
    await node.until(lambda: node.pool.up() == (middle, far))
    await relays[0].listen()
    await node.until(lambda: node.pool.home == near, 30)


async def test_a_relay_that_a_peer_needs_is_opened_and_closed_when_unused(
    relays: list[FakeRelay], make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_pool, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(relay_pool, "IDLE_SECONDS", 0.4)
    home, other = relays[0].url, relays[1].url
    node = make([home])
    await node.until(lambda: node.pool.up() == (home,))
    assert node.pool.need(other)
    await node.until(lambda: node.pool.up() == (home, other))
    assert node.pool.home == home
    await node.until(lambda: node.pool.up() == (home,))
    assert node.pool.link(other) is None
    assert node.pool.link(home) is not None
    await node.until(lambda: node.states[-1] == (other, False, NOT_NEEDED))
    assert node.states[:-1] == [(home, True, ""), (other, True, "")]


async def test_a_relay_that_makes_room_for_another_is_told_as_down(
    relays: list[FakeRelay], make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_pool, "MAX_ON_DEMAND", 1)
    monkeypatch.setattr(relay_pool, "BUSY_SECONDS", 0.0)
    home, first, second = (relay.url for relay in relays)
    node = make([home])
    node.pool.need(first)
    await node.until(lambda: node.pool.up() == (home, first))
    assert node.pool.need(second)
    await node.until(lambda: (first, False, NOT_NEEDED) in node.states)
    await node.until(lambda: node.pool.up() == (home, second))


async def test_a_peers_relay_never_becomes_the_home(relays: list[FakeRelay], make: Callable[..., Node]) -> None:
    home, other = relays[1].url, relays[0].url
    node = make([home])
    await node.until(lambda: node.pool.up() == (home,))
    node.pool.need(other)
    await node.until(lambda: other in node.pool.up())
    await relays[1].stop()
    await node.until(lambda: node.pool.up() == (other,))
    assert node.pool.home == home


async def test_a_ticket_adds_a_relay_at_run_time(relays: list[FakeRelay], make: Callable[..., Node]) -> None:
    node = make([])
    assert node.pool.home == ""
    assert node.pool.up() == ()
    node.pool.add(relays[0].url, own=True)
    await node.until(lambda: node.pool.up() == (relays[0].url,))
    assert node.pool.home == relays[0].url
    assert node.pool.own == (relays[0].url,)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:9", "http://192.168.1.1", "http://[::1]:9", "http://localhost:9", "http://169.254.169.254"],
)
async def test_peers_may_not_send_us_to_private_addresses(make: Callable[..., Node], url: str) -> None:
    node = make(["https://relay.example"], start=False)
    with pytest.raises(BadRelayUrl, match="private"):
        node.pool.add(url)
    assert not node.pool.need(url)
    assert make(["http://10.0.0.1"], start=False).pool.add(url) == url


@pytest.mark.parametrize("url", ["ftp://relay.example", "https://" + "a" * 300, "x", ""])
async def test_peers_may_not_name_what_is_no_relay(make: Callable[..., Node], url: str) -> None:
    node = make(["https://relay.example"], start=False)
    with pytest.raises(BadRelayUrl):
        node.pool.add(url)
    assert not node.pool.need(url)


async def test_what_peers_name_is_bounded(make: Callable[..., Node]) -> None:
    node = make(["http://127.0.0.1:1"])
    wanted = [node.pool.need(f"http://127.0.0.1:{port}") for port in range(2, 40)]
    assert sum(wanted) == MAX_ON_DEMAND
    for number in range(10 * MAX_STRANGERS):
        node.pool.add(f"http://127.0.0.1:1/{number}")
    assert len(node.pool._entries) <= MAX_STRANGERS + 1
    assert len(node.pool.links()) == MAX_ON_DEMAND + 1


async def test_a_user_may_not_name_too_many(make: Callable[..., Node]) -> None:
    with pytest.raises(BadRelayUrl, match="more than"):
        make([f"http://127.0.0.1:{port}" for port in range(1, MAX_OWN + 2)], start=False)


async def test_one_relay_named_twice_is_one(make: Callable[..., Node]) -> None:
    node = make(["https://relay.example", "https://RELAY.example:443/"], start=False)
    assert node.pool.own == ("https://relay.example",)


async def test_a_kick_proves_all_links(relays: list[FakeRelay], make: Callable[..., Node]) -> None:
    near, middle = relays[0].url, relays[1].url
    node = make([near, middle])
    await node.until(lambda: node.pool.up() == (near, middle))
    relays[0].reads.clear()
    node.pool.kick()
    await node.until(lambda: node.pool.up() == (middle,))


async def test_close_leaves_nothing(relays: list[FakeRelay], make: Callable[..., Node]) -> None:
    node = make([relay.url for relay in relays])
    await node.until(lambda: len(node.pool.up()) == 3)
    await node.pool.close()
    assert node.pool.up() == ()
    for relay in relays:
        await relay.until(lambda relay=relay: not relay.sessions)  # type: ignore[misc]
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("relay-")]
    assert not node.pool.need(relays[0].url)
    assert all(up for _, up, _ in node.states)
