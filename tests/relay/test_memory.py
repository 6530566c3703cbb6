"""Memory of clients that left goes back to the system; when a relay looks for it, and with which allocator it runs."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import re
import sys

import psutil
import pytest

from relay.memory import QUIET_SECONDS, WORTH, Reclaimer, run_with_system_malloc

from .client import PATIENCE, Client

ROUNDS, CLIENTS, AT_ONCE = 3, 300, 50
# Quiet for a shorter time than in earnest. main() starts this very command anew, with another allocator.
RELAY = "import sys, relay.memory; relay.memory.QUIET_SECONDS = 0.5; from relay.__main__ import main; sys.exit(main())"

only_with_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc",
    reason="only glibc gives memory back when asked",
)


def test_it_collects_once_each_time_the_connections_have_halved_for_a_while() -> None:
    reclaimer = Reclaimer()
    now = 0.0

    def after(seconds: float, connections: int) -> int:
        nonlocal now
        now += seconds
        reclaimer.look(connections, connections, now)
        return reclaimer.times

    after(0, 10 * WORTH)
    assert after(60, 6 * WORTH) == 0  # not half
    assert after(1, 4 * WORTH) == 0  # not for long
    assert after(QUIET_SECONDS - 1, 9 * WORTH) == 0  # they have come back
    assert after(1, 4 * WORTH) == 0
    assert after(QUIET_SECONDS, 4 * WORTH) == 1
    assert after(3600, 4 * WORTH) == 1
    assert after(1, 0) == 1
    assert after(QUIET_SECONDS, 0) == 2
    after(1, WORTH - 1)
    after(1, 0)
    assert after(3600, 0) == 2  # too few to care


def test_cycles_are_collected() -> None:
    class Node:
        me: object = None

    reclaimer = Reclaimer()
    gc.disable()
    try:
        node = Node()
        node.me = node
        del node
        reclaimer.look(0, WORTH, 0.0)  # they came and went between two looks
        reclaimer.look(0, 0, QUIET_SECONDS)
        assert not any(isinstance(found, Node) for found in gc.get_objects())
    finally:
        gc.enable()


def test_an_allocator_that_somebody_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONMALLOC", "pymalloc")
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the command was started anew"))
    run_with_system_malloc()


@only_with_glibc
async def test_three_rounds_of_clients_leave_no_memory_behind() -> None:
    flags = ["--listen", "127.0.0.1:0", "--reflector", "off", "--max-clients-per-ip", "1000"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONMALLOC"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RELAY, *flags, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert process.stderr is not None
        line = (await asyncio.wait_for(process.stderr.readline(), PATIENCE * 3)).decode()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert found, line
        relay = psutil.Process(process.pid)
        assert relay.environ()["PYTHONMALLOC"] == "malloc"
        await come_and_go(int(found[1]), 20)  # what is loaded late is no client's memory
        before = relay.memory_info().rss
        for _ in range(ROUNDS):
            await come_and_go(int(found[1]), CLIENTS)
        async with asyncio.timeout(PATIENCE):
            while relay.memory_info().rss > before * 1.05:  # noqa: ASYNC110  it says nothing when it has done so
                await asyncio.sleep(0.1)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def come_and_go(port: int, count: int) -> None:
    """So many clients, all connected at the same time."""
    slots = asyncio.Semaphore(AT_ONCE)
    here = asyncio.Barrier(count)

    async def one() -> None:
        client = Client(port)
        async with slots:
            await client.__aenter__()
        await here.wait()
        client.socket.transport.abort()

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
