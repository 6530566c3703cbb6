"""Memory stays where it is while peers come and go, paths change and relays restart: days in a minute."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator

import psutil
import pytest

from tests.transport.relay_process import RelayProcess
from tests.transport.test_reach import Hole, echo, path_becomes
from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.identity import Identity

WARM_UP, ROUNDS = 40, 160
GROWTH = 1.05


@pytest.fixture
async def relay() -> AsyncIterator[RelayProcess]:
    process = RelayProcess()
    await process.start()
    yield process
    await process.end()


async def bind(relay: RelayProcess) -> Endpoint:
    config = TransportConfig(relays=(relay.url,), port_mapping=False)
    return await Endpoint.bind(Identity.generate(), config, listen=("127.0.0.1", 0))


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.slow
async def test_memory_does_not_grow_with_connections_and_changes_of_path(relay: RelayProcess) -> None:
    ours, theirs = await bind(relay), await bind(relay)
    hole = Hole(ours, theirs)
    serving = asyncio.create_task(echo(theirs))
    payload = bytes(12_288)

    async def one_round(number: int) -> None:
        connection = await ours.dial(theirs.peer_id)
        stream = await connection.open_stream()
        for _ in range(4):
            await stream.write(payload)
            assert await stream.readexactly(len(payload)) == payload
        if number % 40 == 39:  # the direct path dies, and comes back
            hole.closed = True
            await path_becomes(ours, theirs.peer_id, relayed=True, within=10)
            hole.closed = False
        await connection.close()

    try:
        for number in range(WARM_UP):
            await one_round(number)
        before = resident()
        for number in range(ROUNDS):
            await one_round(number)
            if number == ROUNDS // 2:
                await relay.end(signal.SIGKILL)
                await relay.start()
        assert resident() <= before * GROWTH
    finally:
        serving.cancel()
        await ours.close()
        await theirs.close()


async def test_nothing_is_left_of_a_peer_that_has_gone(relay: RelayProcess) -> None:
    """Many peers that came once leave no tasks, sockets or timers behind."""
    theirs = await bind(relay)
    serving = asyncio.create_task(echo(theirs))
    files = psutil.Process().num_fds()
    try:
        for _ in range(20):
            async with await bind(relay) as ours:
                await ours.dial(theirs.peer_id)
        async with asyncio.timeout(10):
            while theirs.connections():  # noqa: ASYNC110 - ended by the network
                await asyncio.sleep(0.02)
        assert psutil.Process().num_fds() <= files + 1
        assert len(asyncio.all_tasks()) < 12
    finally:
        serving.cancel()
        await theirs.close()
