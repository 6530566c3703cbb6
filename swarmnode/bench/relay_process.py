"""The real relay as a process of its own, for benchmarks and tests: `python -m relay` on a port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
READY_SECONDS = 30


class RelayProcess:
    """Comes back on the same port when started again. Also an async context manager."""

    def __init__(self, *options: str) -> None:
        self.options = options
        self.port = 0
        self.process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """What a node is given."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process's id, while it runs."""
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Returns when it is ready. Raises ConnectionError with what it said instead."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "relay",
            *("--listen", f"127.0.0.1:{self.port}", "--reflector", "off", *self.options),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.process.stderr is not None
        said = ""
        async with asyncio.timeout(READY_SECONDS):
            while line := (await self.process.stderr.readline()).decode():
                said += line
                if found := re.search(r"relay ready on 127\.0\.0\.1:(\d+)", line):
                    self.port = int(found[1])
                    self._drain = asyncio.create_task(_read_on(self.process.stderr))
                    return
        raise ConnectionError(f"the relay ended with {await self.process.wait()} before it was ready: {said}")

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it and wait for that."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(how)
            await self.process.wait()
        if self._drain is not None:
            await self._drain
            self._drain = None

    def freeze(self) -> None:
        """Stop it as a machine that hangs does: its connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)

    async def __aenter__(self) -> RelayProcess:
        try:
            await self.start()
        except BaseException:
            await self.end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end(signal.SIGTERM)


async def _read_on(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass
