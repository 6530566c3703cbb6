"""Agents and relays as processes inside hosts of the lab, driven from one asyncio loop. SHELL.

Called by the tests that need our endpoint in the lab, and by matrix.py. Processes end with the lab.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.natlab.agent import Json, peer_of
from tests.natlab.node import Host

ROOT = Path(__file__).parents[2]
RELAY_PORT = 80  # passes networks that let out nothing but the web
START_SECONDS = 30.0  # interpreters start slowly on a machine that runs a whole test suite
KEPT_LINES = 200


class AgentError(Exception):
    """An agent could not do what it was asked; the text is its own."""


class Errors:
    """The last lines that a process wrote to stderr; a thread reads them."""

    def __init__(self, process: subprocess.Popen[Any], ready: str = "") -> None:  # Any: Popen's text or bytes
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.ready = threading.Event()
        assert process.stderr is not None
        self._pipe, self._ready_text = process.stderr, ready
        self._thread = threading.Thread(target=self._read, name="stderr", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            for line in self._pipe:
                text = line.decode(errors="replace").rstrip()
                self.lines.append(text)
                if self._ready_text and self._ready_text in text:
                    self.ready.set()
        self.ready.set()  # the end

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Relay:
    """A relay server in a public host, at port 80, with two UDP reflectors."""

    def __init__(self, host: Host, *flags: str) -> None:
        """Start it; `ready` waits until it serves. Its URL needs a name: see Lab.name."""
        self.host, self._flags = host, flags
        self.url = f"http://{host.lab.name(host)}"
        self._start()

    def _start(self) -> None:
        address = "[::]" if self.host.ipv6 else "0.0.0.0"
        command = [sys.executable, "-m", "relay", "--listen", f"{address}:{RELAY_PORT}", *self._flags]
        self.process = self.host.popen(command, stderr=subprocess.PIPE, env=_environment())
        self.errors = Errors(self.process, "relay ready")

    async def ready(self) -> None:
        """Wait until it serves. Raises AssertionError with what it said instead."""
        await asyncio.to_thread(self.errors.ready.wait, START_SECONDS)
        assert self.process.poll() is None, f"the relay did not start:\n{self.errors}"

    async def stop(self, *, kill: bool = False) -> None:
        """End it: politely, or as a power cut does."""
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        await asyncio.to_thread(self.process.wait, 10)

    async def restart(self) -> None:
        """Start it again after `stop`."""
        self._start()
        await self.ready()


class Agent:
    """An endpoint in a host; see agent.py for what it can do."""

    def __init__(self, host: Host, name: str, relays: Sequence[str] = (), *flags: str) -> None:
        """Start it; `ready` waits until it listens."""
        self.host, self.name, self.peer = host, name, peer_of(name)
        self.port = 0
        command = [sys.executable, "-m", "tests.natlab.agent", "--name", name, *flags]
        for relay in relays:
            command += ["--relay", relay]
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = host.popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE, env=_environment()
            )
        self.errors = Errors(self.process)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Json]] = {}
        self._ready: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read())
        self._writer: asyncio.StreamWriter | None = None

    async def ready(self) -> None:
        """Wait until it listens. Raises AssertionError with what it said instead."""
        async with asyncio.timeout(START_SECONDS):
            self.port = (await self._ready)["port"]

    async def ask(self, do: str, **arguments: Any) -> Json:  # Any: JSON
        """Have it do something; returns the answer. Raises AgentError."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._writer is not None, "await ready() first"
        self._writer.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        message: Json = await answer
        if not message.pop("ok"):
            raise AgentError(f"{self.name}: {do}: {message['error']}")
        return message

    async def close(self) -> None:
        """End it; the process too."""
        if self._writer is not None:
            self._writer.close()  # the end of its stdin
        try:
            await asyncio.to_thread(self.process.wait, 10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._task.cancel()
        self._socket.close()

    async def _read(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=1 << 24)
        try:
            while line := await reader.readline():
                message: Json = json.loads(line)
                if "id" in message:
                    self._waiting.pop(message.pop("id")).set_result(message)
                else:
                    self._ready.set_result(message)
        except OSError:
            pass
        self._ended(f"agent {self.name} ended:\n{self.errors}")

    def _ended(self, why: str) -> None:
        waiting = [one for one in (self._ready, *self._waiting.values()) if not one.done()]
        self._waiting.clear()
        for one in waiting:
            one.set_exception(AssertionError(why))
            one.exception()  # whoever awaits it hears of it; nobody else has to


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
