"""The real relay as a process, for tests of its clients."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
READY_SECONDS = 20


class RelayProcess:
    """`python -m relay` on a port of 127.0.0.1; comes back on the same port when started again."""

    def __init__(self, *options: str) -> None:
        self.options = options
        self.port = 0
        self.process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Returns when it is ready."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "relay",
            *("--listen", f"127.0.0.1:{self.port}", "--reflector", "off", *self.options),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.process.stderr is not None
        async with asyncio.timeout(READY_SECONDS):
            while line := (await self.process.stderr.readline()).decode():
                if found := re.search(r"relay ready on 127\.0\.0\.1:(\d+)", line):
                    self.port = int(found[1])
                    self._drain = asyncio.create_task(self._read_on(self.process.stderr))
                    return
        raise AssertionError(f"the relay ended with {await self.process.wait()} before it was ready")

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
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    async def _read_on(self, stream: asyncio.StreamReader) -> None:
        while await stream.readline():
            pass
