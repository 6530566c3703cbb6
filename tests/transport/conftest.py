"""Endpoints, relays and pools for the transport tests: real sockets on loopback, port 0, closed after every test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from tests.transport.pool_node import MakeNode, PoolNode, StartRelay
from tests.transport.relay_process import RelayProcess
from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.identity import Identity, PeerId

ENGINE_PAIRS = [("qh3", "qh3"), ("aioquic", "aioquic"), ("qh3", "aioquic"), ("aioquic", "qh3")]

Bind = Callable[..., Awaitable[Endpoint]]


@pytest.fixture(params=ENGINE_PAIRS, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def engines(request: pytest.FixtureRequest) -> tuple[str, str]:
    """(client's engine, server's engine): all four combinations."""
    pair: tuple[str, str] = request.param
    return pair


@pytest.fixture
async def bind() -> AsyncIterator[Bind]:
    """Bind an endpoint on loopback: bind(engine="qh3", admit=…, identity=…, emulation=…, any config field=…)."""
    opened: list[Endpoint] = []

    async def bind_one(
        engine: str = "qh3",
        *,
        identity: Identity | None = None,
        admit: Callable[[PeerId], bool] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        **settings: object,
    ) -> Endpoint:
        config = replace(TransportConfig(engine=engine), **settings)  # type: ignore[arg-type]
        endpoint = await Endpoint.bind(identity or Identity.generate(), config, listen=(host, port), admit=admit)
        opened.append(endpoint)
        return endpoint

    yield bind_one
    for endpoint in opened:
        await endpoint.close()


@pytest.fixture
async def start_relay() -> AsyncIterator[StartRelay]:
    """Start a relay process with these options; ended after the test."""
    relays: list[RelayProcess] = []

    async def start_one(*options: str) -> RelayProcess:
        relays.append(RelayProcess(*options))
        await relays[-1].start()
        return relays[-1]

    yield start_one
    await asyncio.gather(*(relay.end() for relay in relays))


@pytest.fixture
async def make_node() -> AsyncIterator[MakeNode]:
    """Make a pool of these relays' URLs; closed after the test."""
    nodes: list[PoolNode] = []

    def make_one(urls: list[str], identity: Identity | None = None) -> PoolNode:
        nodes.append(PoolNode(urls, identity))
        return nodes[-1]

    yield make_one
    await asyncio.gather(*(node.pool.close() for node in nodes))
