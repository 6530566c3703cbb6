"""`swarmnode up` processes inside hosts of the lab, and what tests want to know of them. SHELL.

Their control channels are on the hosts' loopback: whoever asks them something does so on a thread that is in the host.
They end with this process, and with the lab. Called by test_swarm_sites.py; agents and relays are in swarm.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swarmnode.backbone.session import GenerateRequest
from swarmnode.control import request, request_one
from swarmnode.errors import ControlError
from swarmnode.local_swarm import NodeProcess
from tests.natlab.node import Host
from tests.natlab.swarm import ROOT

Json = dict[str, Any]  # Any: JSON
T = TypeVar("T")

LINE = 1 << 20
POLL_S = 0.2
SOME = 3  # tokens


class SiteNode(NodeProcess):
    """A node in a host. `start` waits for nothing: `wait_for("ready")` does."""

    host: Host

    @classmethod
    async def begin(cls, host: Host, folder: Path, arguments: Sequence[str]) -> SiteNode:
        """Start it under the host's name."""
        state = folder / host.name
        state.mkdir(parents=True, exist_ok=True)
        log = state / "stderr.txt"
        up = [sys.executable, "-m", "swarmnode", "up", "--json", "--stop-on-eof", "--name", host.name]
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *host.entering([*up, "--state", str(state), *arguments]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "passive"},
                limit=LINE,
            )
        host.watch(process.pid)
        node = cls(host.name, state, process, log)
        node.host = host
        return node

    async def status(self) -> Json:
        """See NodeProcess.status."""
        answer: Json = (await self._ask(lambda: request_one(self.state, "status")))["status"]
        return answer

    async def tokens(self, wanted: GenerateRequest, begun: asyncio.Event | None = None) -> list[tuple[int, str]]:
        """Generate: token ids with the digests of their logits. `begun` is set when some are there."""
        loop = asyncio.get_running_loop()
        tokens: list[tuple[int, str]] = []

        async def collect() -> None:
            async for event in request(self.state, "generate", request=msgspec.to_builtins(wanted)):
                if event["event"] == "token" and event["token"] >= 0:
                    tokens.append((event["token"], event["digest"]))
                    if begun is not None and len(tokens) == SOME:
                        loop.call_soon_threadsafe(begun.set)

        await self._ask(collect)
        return tokens

    async def members(self) -> dict[str, bool]:
        """The members that it sees, by name, and whether it is linked to them."""
        swarm = (await self.status())["swarm"]
        return {one["name"]: one["linked"] for one in swarm["members"]} if swarm is not None else {}

    async def paths(self) -> dict[str, str]:
        """How the datagrams of each connected peer go, by its PeerId."""
        return {peer["peer"]: peer["path"] for peer in (await self.status())["peers"]}

    async def end(self) -> None:
        """By force: it has nobody to hand over to when all end."""
        self.kill()
        await self.stop()

    async def _ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T:
        def ask() -> T:
            with self.host.inside():
                return asyncio.run(question())

        return await asyncio.to_thread(ask)


async def until(what: str, check: Callable[[], Awaitable[object]], timeout: float) -> float:
    """Wait for what happens in other processes: until `check` returns True; anything else is told when time is up.

    Returns the seconds it took. Raises AssertionError.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    while True:
        try:
            seen = await check()
        except ControlError as error:  # it is starting, or has ended
            seen = error
        if seen is True:
            return loop.time() - start
        assert loop.time() - start < timeout, f"not within {timeout:g} s: {what}; now {seen}"
        await asyncio.sleep(POLL_S)
