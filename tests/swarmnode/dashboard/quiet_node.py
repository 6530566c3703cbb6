"""A process with a control channel that tells an invented status, and nothing behind it: `python -m … STATE`.

What commands do with a node can be seen with it, in a tenth of the time and memory that a real one takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from swarmnode.control import ControlServer, Json, Send
from swarmnode.dashboard.fake import fake_status


async def serve(state: Path) -> None:
    async def handler(op: str, arguments: Json, send: Send) -> None:
        status = msgspec.to_builtins(fake_status(1, 3))
        if op == "status":
            await send({"event": "status", "status": status})
        elif op == "peers":
            await send({"event": "peers", "peers": status["peers"]})
        else:
            await asyncio.Event().wait()

    await ControlServer(state, handler).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def quiet_node(state: Path) -> Iterator[subprocess.Popen[str]]:
    """Serves until the block ends."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def suspended(process: subprocess.Popen[str]) -> Iterator[None]:
    """As by Ctrl-Z."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
