"""Nodes whose output stands still, fails or is missing serve on: a stopped or closed terminal, a full pipe or disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest
from swarmnode.control import Json, request, request_one
from swarmnode.errors import NoNode
from swarmnode.local_swarm import NodeProcess
from swarmnode.onboard import ModelPack
from tests.full_pipe import fill

from .helpers import poll

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes and terminals of POSIX")
REQUEST = GenerateRequest(prompt="import os\n", max_tokens=20, sampling=Sampling(temperature=0.8, seed=1))
QUIET = ["--listen", "127.0.0.1:0", "--no-lan", "--threads", "1"]
PATIENCE_S = 60.0
Process = subprocess.Popen[bytes]


@contextlib.contextmanager
def up(arguments: list[str], output: int, errors: int | None = None, line: str = "") -> Iterator[Process]:
    """`line`: what a shell does to its streams."""
    command = [sys.executable, "-m", "swarmnode", "up", *QUIET, *arguments]
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {line}', "sh", *command] if line else command,
        stdin=subprocess.DEVNULL, stdout=output, stderr=output if errors is None else errors,
        start_new_session=True, env={**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def stopped_terminal() -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Its end for a process, and what lets it go on and reads what came."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # what Ctrl-S does

    def go_on() -> bytes:
        termios.tcflow(theirs, termios.TCOON)
        return drained(ours)

    yield theirs, go_on
    os.close(ours)
    os.close(theirs)


@contextlib.contextmanager
def closed_terminal() -> Iterator[tuple[int, Callable[[], bytes]]]:
    import pty

    ours, theirs = pty.openpty()
    os.close(ours)
    yield theirs, lambda: b""
    os.close(theirs)


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, Callable[[], bytes]]]:
    read, write = os.pipe()
    fill(write)
    yield write, lambda: drained(read)
    os.close(read)
    os.close(write)


@contextlib.contextmanager
def full_disk() -> Iterator[tuple[int, Callable[[], bytes]]]:
    if not os.path.exists("/dev/full"):
        pytest.skip("no full disk to be had")
    with open("/dev/full", "wb") as full:
        yield full.fileno(), lambda: b""


def drained(fd: int) -> bytes:
    seen = b""
    while select.select([fd], [], [], 1.0)[0]:
        seen += os.read(fd, 1 << 16)
    return seen


def read_until(fd: int, wanted: bytes) -> bytes:
    seen, end = b"", time.monotonic() + PATIENCE_S
    while wanted not in seen:
        assert time.monotonic() < end, f"{wanted!r} did not come; {seen[-2000:]!r}"
        if select.select([fd], [], [], 0.2)[0]:
            seen += os.read(fd, 1 << 16)
    return seen


async def until_up(state: Path) -> None:
    async def ready() -> bool:
        with contextlib.suppress(NoNode):
            status: Json = (await request_one(state, "status"))["status"]
            return any("ready" in one["text"] for one in status["events"])
        return False

    await poll(ready, PATIENCE_S)


async def generated(state: Path) -> int:
    async for event in request(state, "generate", request=msgspec.to_builtins(REQUEST)):
        if event["event"] == "result":
            return int(event["result"]["tokens"])
    raise AssertionError("no result")


@pytest.mark.parametrize("how", [stopped_terminal, closed_terminal, full_pipe, full_disk], ids=lambda how: how.__name__)
async def test_a_worker_joins_and_serves_while_the_output_of_its_founder_takes_nothing(
    how: Callable[[], contextlib.AbstractContextManager[tuple[int, Callable[[], bytes]]]],
    tmp_path: Path,
    demo_pack: ModelPack,
) -> None:
    state = tmp_path / "founder"
    arguments = ["--model", str(demo_pack.path), "--state", str(state), "--headless", "--context", "256"]
    with how() as (output, go_on), up([*arguments, "--log-level", "debug"], output) as process:
        await until_up(state)
        ticket = (await request_one(state, "ticket"))["ticket"]
        worker = await NodeProcess.start("worker", tmp_path, [ticket, *QUIET])
        try:
            await worker.wait_for("holding")
            assert await generated(state) == REQUEST.max_tokens
            if how is not stopped_terminal:
                process.send_signal(signal.SIGTERM)
            else:  # it goes on: all that was said is there
                seen = await asyncio.to_thread(go_on)
                for text in (b"ready: backbone", b"swarmnode up swarm1", b"worker worker is here", b" INFO transport."):
                    assert text in seen
                assert b"missing" not in seen
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(go_on)
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        finally:
            await worker.stop()


async def test_the_log_does_not_scribble_over_the_live_view_of_its_terminal(
    tmp_path: Path, demo_pack: ModelPack
) -> None:
    import pty
    import termios

    state = tmp_path / "node"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 200))
    with up(["--model", str(demo_pack.path), "--state", str(state), "--log-level", "info"], theirs) as process:
        seen = await asyncio.to_thread(read_until, ours, b"\x1b[?1049h")
        await until_up(state)
        ticket = (await request_one(state, "ticket"))["ticket"]
        worker = await NodeProcess.start("worker", tmp_path, [ticket, *QUIET])
        seen += await asyncio.to_thread(read_until, ours, b"info transport.")  # among the events
        assert b" INFO " not in seen.split(b"\x1b[?1049h")[1]
        termios.tcflow(theirs, termios.TCOOFF)
        await worker.stop()
        assert await generated(state) == REQUEST.max_tokens
        termios.tcflow(theirs, termios.TCOON)
        process.send_signal(signal.SIGTERM)
        seen = await asyncio.to_thread(read_until, ours, b"stopping")
        assert b" INFO " not in seen.split(b"\x1b[?1049l")[0]
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    os.close(ours)
    os.close(theirs)


def shell(line: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command with what a shell does to its streams."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {line}', "sh", sys.executable, "-m", "swarmnode", *arguments],
        capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **env},
    )  # fmt: skip


@pytest.mark.parametrize("line", [">&-", "<&- >&- 2>&-"])
async def test_without_some_standard_streams(line: str, tmp_path: Path, demo_pack: ModelPack) -> None:
    state = tmp_path / "node"
    where = ["--state", str(state)]
    arguments = [*where, "--model", str(demo_pack.path)]
    with up(arguments, subprocess.DEVNULL, subprocess.PIPE, line) as process:
        await until_up(state)
        done = await asyncio.to_thread(shell, line, "dashboard", "--once", *where)
        assert (done.returncode, done.stderr) == (0, "")
        assert await generated(state) == REQUEST.max_tokens
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_what_is_wrong_with_the_configuration_is_told_as_the_log_is(by: str, tmp_path: Path) -> None:
    flag, env = (["--log-format", "json"], {}) if by == "flag" else ([], {"SWARMNODE_LOG_FORMAT": "json"})
    done = shell("", "up", "BADTICKET", "--state", str(tmp_path), *flag, **env)
    found = json.loads(done.stderr)
    assert (done.returncode, found["event"], found["level"]) == (2, "ended", "error")
    assert "ticket" in found["error"].lower()
    plain = shell("", "up", "BADTICKET", "--state", str(tmp_path))
    assert plain.returncode == 2
    assert plain.stderr.startswith("swarmnode: ")
