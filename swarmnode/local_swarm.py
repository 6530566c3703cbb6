"""A swarm of real `swarmnode up` processes on this machine, for the demo, the benchmarks and the tests.

Each process has its own identity and state below one folder. They end with this process however it ends: a node that is
started with --stop-on-eof stops when its standard input closes.

    LocalSwarm     wired by hand: workers with given experts, one backbone that is told their addresses
    FoundedSwarm   runs itself: a founder, and nodes that join with its ticket and are told what to hold
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from swarmnode.control import Json, request, request_one
from swarmnode.errors import SwarmnodeError

START_TIMEOUT = 120.0  # seconds: a loaded machine, a large model
STOP_TIMEOUT = 10.0


class NodeProcess:
    """One `swarmnode up` process and the events it has printed."""

    def __init__(self, name: str, state: Path, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self.state, self.process, self._log = name, state, process, log
        self.address = ""
        self.peer = ""
        self._events: list[Json] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, name: str, folder: Path, arguments: Sequence[str], module: str = "swarmnode") -> NodeProcess:
        """Start and wait until it is ready. SwarmnodeError with the node's own line when it is not.

        `module` takes the same command line, such as a benchmark's that changes something about the node.
        """
        state = folder / name
        state.mkdir(parents=True, exist_ok=True)
        log = state / "stderr.txt"
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, "up", "--json", "--stop-on-eof",
                "--name", name, "--state", str(state), *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "SWARMNODE_METRICS": ""},  # one port cannot serve them all
                limit=1 << 20,
            )  # fmt: skip
        node = cls(name, state, process, log)
        try:
            ready = await node.wait_for("ready")
        except BaseException:
            await node.stop()
            raise
        node.address, node.peer = ready["address"], ready["peer"]
        return node

    async def wait_for(self, event: str, count: int = 1, timeout: float = START_TIMEOUT) -> Json:
        """The `count`-th event of this name. SwarmnodeError when the process ends or is silent before."""

        def found() -> list[Json]:
            return [e for e in self._events if e["event"] == event]

        try:
            async with self._news:
                waiting = self._news.wait_for(lambda: len(found()) >= count or self._reader.done())
                await asyncio.wait_for(waiting, timeout)
        except TimeoutError:
            raise SwarmnodeError(f"{self.name} did not report {event!r} within {timeout:g} s") from None
        if len(found()) < count:
            raise SwarmnodeError(f"{self.name} ended early: {self._last_words()}")
        return found()[count - 1]

    def events(self, event: str) -> list[Json]:
        """All events of this name so far."""
        return [e for e in self._events if e["event"] == event]

    def forget_events(self) -> None:
        """`wait_for` counts from here on."""
        self._events.clear()

    async def status(self) -> Json:
        """The node's `status`."""
        status: Json = (await request_one(self.state, "status"))["status"]
        return status

    def generate(self, arguments: Json) -> AsyncIterator[Json]:
        """Events of a generation (see `node.Node`)."""
        return request(self.state, "generate", request=arguments)

    def kill(self) -> None:
        """End it as a crash would (SIGKILL)."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def stop(self) -> int:
        """End it as Ctrl-C would; by force where it does not end. Returns the exit code."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            code = await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            code = await self.process.wait()
        await asyncio.gather(self._reader, return_exceptions=True)
        return code

    async def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            async for line in self.process.stdout:
                event: Any = json.loads(line)
                async with self._news:
                    self._events.append(event)
                    self._news.notify_all()
        await self.process.wait()
        async with self._news:
            self._news.notify_all()

    def _last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1].removeprefix("swarmnode: ") if lines else f"exit code {self.process.returncode}"


class LocalSwarm:
    """Workers and one backbone, all processes. Use as an async context manager."""

    def __init__(self, folder: Path, pack: Path) -> None:
        self._folder, self._pack = folder, pack
        self.workers: list[NodeProcess] = []
        self.backbone: NodeProcess

    async def __aenter__(self) -> LocalSwarm:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.stop()

    async def start(
        self, shares: Sequence[str], backbone: Sequence[str] = (), worker: Sequence[str] = (), *, threads: int = 1
    ) -> None:
        """Workers as `start_workers` makes them, then the backbone; wait until all are attached."""
        await self.start_workers(shares, worker, threads=threads)
        links = [argument for node in self.workers for argument in ("--peer", node.address)]
        arguments = [*self._common(threads), *links, *backbone]
        self.backbone = await NodeProcess.start("backbone", self._folder, arguments)
        for count in range(1, len(self.workers) + 1):
            await self.backbone.wait_for("attached", count, timeout=30.0)

    async def start_workers(self, shares: Sequence[str], worker: Sequence[str] = (), *, threads: int = 1) -> None:
        """One worker per entry of `shares` (what --experts takes), all started at once."""
        starting = [
            NodeProcess.start(f"worker-{i + 1}", self._folder, [*self._common(threads), "--experts", share, *worker])
            for i, share in enumerate(shares)
        ]
        started = await asyncio.gather(*starting, return_exceptions=True)
        self.workers = [node for node in started if isinstance(node, NodeProcess)]
        for problem in started:
            if isinstance(problem, BaseException):
                raise problem

    def _common(self, threads: int) -> list[str]:
        return ["--model", str(self._pack), "--listen", "127.0.0.1:0", "--threads", str(threads)]

    async def stop(self) -> None:
        """End all processes."""
        nodes = [*([self.backbone] if hasattr(self, "backbone") else []), *self.workers]
        await asyncio.gather(*(node.stop() for node in nodes))


class FoundedSwarm:
    """A founder and the nodes that joined it, all processes on this machine. Use as an async context manager.

    `nodes` are all by name, the founder too; `ticket` is the one that the founder printed.
    """

    def __init__(self, folder: Path, model: Path, *, threads: int = 1) -> None:
        self._folder, self._model = folder, model
        self._common = ("--listen", "127.0.0.1:0", "--no-lan", "--threads", str(threads))
        self.nodes: dict[str, NodeProcess] = {}
        self.ticket = ""

    async def __aenter__(self) -> FoundedSwarm:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.stop()

    @property
    def founder(self) -> NodeProcess:
        """The founder's process, of its last start."""
        return self.nodes["founder"]

    async def found(self, *arguments: str) -> NodeProcess:
        """Start the founder, or start it again, and wait for its ticket."""
        node = await self._start("founder", ["--model", str(self._model), *arguments])
        self.ticket = (await node.wait_for("ticket"))["ticket"]
        return node

    async def join(self, name: str, *arguments: str, ticket: str | None = None) -> NodeProcess:
        """Start a node that joins with a ticket, the founder's own unless another is given; wait until it serves."""
        return await self._start(name, [self.ticket if ticket is None else ticket, *arguments])

    async def again(self, name: str, *arguments: str) -> NodeProcess:
        """Start a node that was a member before: it needs no ticket."""
        return await self._start(name, list(arguments))

    async def stop(self) -> None:
        """End all processes at once: those who would hand over have nobody to do it for."""
        nodes = list(self.nodes.values())
        for node in nodes:
            node.kill()
        await asyncio.gather(*(node.stop() for node in nodes))

    async def _start(self, name: str, arguments: Sequence[str]) -> NodeProcess:
        node = await NodeProcess.start(name, self._folder, [*arguments, *self._common])
        self.nodes[name] = node
        return node
