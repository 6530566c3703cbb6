"""Relays for the tests: in this process, on loopback, port 0, closed at the end of every test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from relay.config import RelayConfig
from relay.server import RelayServer

StartRelay = Callable[..., Awaitable[RelayServer]]


@pytest.fixture
async def start_relay() -> AsyncIterator[StartRelay]:
    """start_relay(any config field=…) → a running RelayServer."""
    running: list[RelayServer] = []

    async def start(**settings: object) -> RelayServer:
        config = RelayConfig(listen=("127.0.0.1", 0), reflector_ports=None)
        server = RelayServer(replace(config, **settings))  # type: ignore[arg-type]
        await server.start()
        running.append(server)
        return server

    yield start
    for server in running:
        await server.close()
