"""What an endpoint tells those who watch it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.transport.relay_process import RelayProcess
from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.identity import Identity
from transport.news import News, PathNews, RelayNews
from transport.proto.addresses import PathKind


@pytest.fixture
async def relay() -> AsyncIterator[RelayProcess]:
    relay = RelayProcess()
    await relay.start()
    yield relay
    await relay.end()


class Watched:
    """An endpoint with one relay, and its news."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.news: list[News] = []
        self._came = asyncio.Event()
        endpoint.on_news = self._on_news

    @classmethod
    async def bind(cls, relay: RelayProcess) -> Watched:
        config = TransportConfig(relays=(relay.url,), port_mapping=False)
        return cls(await Endpoint.bind(Identity.generate(), config, listen=("127.0.0.1", 0)))

    def _on_news(self, news: News) -> None:
        self.news.append(news)
        self._came.set()

    async def path(self, kind: PathKind) -> PathNews:
        """The first news that datagrams take a path of this kind."""
        async with asyncio.timeout(20):
            while True:
                for news in self.news:
                    if isinstance(news, PathNews) and news.path is not None and news.path.kind is kind:
                        return news
                await self._more()

    async def relay(self, *, up: bool) -> RelayNews:
        """The first news that the relay is up, or not."""
        async with asyncio.timeout(20):
            while True:
                for news in self.news:
                    if isinstance(news, RelayNews) and news.up is up:
                        return news
                await self._more()

    async def _more(self) -> None:
        self._came.clear()
        await self._came.wait()


@pytest.fixture
async def pair(relay: RelayProcess) -> AsyncIterator[tuple[Watched, Watched]]:
    ours, theirs = await Watched.bind(relay), await Watched.bind(relay)
    yield ours, theirs
    await ours.endpoint.close()
    await theirs.endpoint.close()


async def test_a_relay_comes_and_goes(pair: tuple[Watched, Watched], relay: RelayProcess) -> None:
    ours, _ = pair
    assert await ours.relay(up=True) == RelayNews(relay.url, True, "", own=True)
    await relay.end()
    lost = await ours.relay(up=False)
    assert lost.url == relay.url
    assert lost.reason


async def test_from_the_relay_to_a_direct_path(pair: tuple[Watched, Watched], relay: RelayProcess) -> None:
    ours, theirs = pair
    await ours.endpoint.dial(theirs.endpoint.peer_id)
    relayed, direct = await ours.path(PathKind.RELAY), await ours.path(PathKind.LOOPBACK)
    assert relayed.peer == direct.peer == theirs.endpoint.peer_id
    assert relayed.path is not None
    assert direct.path is not None
    assert relayed.path.id.relay == relay.url
    assert direct.path.id.address == ("127.0.0.1", theirs.endpoint.address[1])
    assert direct.rtt is not None
    assert direct.reason.startswith("loopback: ")


async def test_who_watches_cannot_disturb(pair: tuple[Watched, Watched]) -> None:
    ours, theirs = pair
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))

    def raises(_news: News) -> None:
        raise ValueError("ours")

    ours.endpoint.on_news = raises
    await ours.endpoint.dial(theirs.endpoint.peer_id)
    assert {type(problem) for problem in problems} == {ValueError}


async def test_nothing_is_told_after_the_end(pair: tuple[Watched, Watched]) -> None:
    ours, theirs = pair
    await ours.endpoint.dial(theirs.endpoint.peer_id)
    ours.news.clear()
    await ours.endpoint.close()
    assert ours.news == []
