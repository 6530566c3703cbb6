"""Terminals and pipes that nobody reads: a node that is watched serves as one that is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest
from swarmnode.control import request, request_one
from swarmnode.errors import NoNode
from swarmnode.local_swarm import LocalSwarm, NodeProcess
from swarmnode.onboard import ModelPack

from ..helpers import poll

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no pseudo terminals on Windows")
REQUEST = GenerateRequest(prompt="import os\n", max_tokens=100, sampling=Sampling(temperature=0.8, seed=1))
QUIET = ["--listen", "127.0.0.1:0", "--no-lan", "--threads", "1", "--context", "256"]


@contextlib.contextmanager
def on_a_terminal(arguments: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A command on a pseudo terminal of its own: the process and both ends."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 200))
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "swarmnode", *arguments], stdin=theirs, stdout=theirs, stderr=errors,
            start_new_session=True, env={**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip
    try:
        yield process, ours, theirs
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        with contextlib.suppress(OSError):
            os.close(theirs)


def read_until(fd: int, wanted: bytes, timeout: float = 60.0) -> bytes:
    import select

    seen, end = b"", time.monotonic() + timeout
    while wanted not in seen:
        assert time.monotonic() < end, f"{wanted!r} did not come; {seen[-2000:]!r}"
        if select.select([fd], [], [], 0.2)[0]:
            seen += os.read(fd, 1 << 16)
    return seen


async def generate(state: Path) -> int:
    """The tokens of one generation."""
    async for event in request(state, "generate", request=msgspec.to_builtins(REQUEST)):
        if event["event"] == "result":
            return int(event["result"]["tokens"])
    raise AssertionError("no result")


async def status(state: Path) -> dict[str, object]:
    answer: dict[str, object] = (await request_one(state, "status"))["status"]
    return answer


@pytest.mark.parametrize("how", ["stopped", "never read"])
async def test_a_node_whose_terminal_stands_still_serves_and_ends(
    how: str, tmp_path: Path, demo_pack: ModelPack
) -> None:
    import termios

    state = tmp_path / "node"
    arguments = ["up", "--model", str(demo_pack.path), "--state", str(state), *QUIET]
    with on_a_terminal(arguments, tmp_path / "stderr.txt") as (process, ours, theirs):

        async def ready() -> bool:
            with contextlib.suppress(NoNode):
                return bool((await status(state))["events"])
            return False

        if how == "stopped":
            await asyncio.to_thread(read_until, ours, b"\x1b[?1049h")
            termios.tcflow(theirs, termios.TCOOFF)  # what Ctrl-S does
        await poll(ready, 60.0)
        for _ in range(8):
            assert await generate(state) == 100
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert (tmp_path / "stderr.txt").read_bytes() == b""
        assert not (state / "control.json").exists()


async def test_a_view_that_is_suspended_or_killed_does_not_hold_its_node(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with LocalSwarm(tmp_path, demo_pack.path) as swarm:
        await swarm.start(["all"], backbone=["--context", "256"])
        state = swarm.backbone.state
        arguments = ["dashboard", "--state", str(state), "--interval", "0.1"]
        with on_a_terminal(arguments, tmp_path / "stderr.txt") as (process, ours, _):
            await asyncio.to_thread(read_until, ours, b"peers 1")
            process.send_signal(signal.SIGSTOP)
            for _ in range(4):
                assert await generate(state) == 100
            process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(read_until, ours, b"tokens \x1b[0m400")
            process.send_signal(signal.SIGTERM)
            seen = await asyncio.to_thread(read_until, ours, b"\x1b[?1049l")
            assert b"\x1b[?25h" in seen  # the cursor is back
            assert await asyncio.to_thread(process.wait, 20) == 0
        assert (tmp_path / "stderr.txt").read_bytes() == b""


async def test_the_view_picks_its_node_up_again(tmp_path: Path, demo_pack: ModelPack) -> None:
    common = ["--model", str(demo_pack.path), "--experts", "1/2", *QUIET]
    node = await NodeProcess.start("w", tmp_path, common)
    with on_a_terminal(["dashboard", "--state", str(node.state)], tmp_path / "stderr.txt") as (process, ours, _):
        await asyncio.to_thread(read_until, ours, b"worker of")
        await node.stop()
        await asyncio.to_thread(read_until, ours, b"waiting for it to come back")
        node = await NodeProcess.start("w", tmp_path, common)
        await asyncio.to_thread(read_until, ours, b"q quit")
        os.write(ours, b"q")
        assert await asyncio.to_thread(process.wait, 20) == 0
    await node.stop()


async def test_plain_lines_where_the_output_is_no_terminal_and_a_closed_pipe(
    tmp_path: Path, demo_pack: ModelPack
) -> None:
    async with LocalSwarm(tmp_path, demo_pack.path) as swarm:
        await swarm.start(["1/2"], backbone=["--context", "256"])
        state = swarm.backbone.state
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "swarmnode", "dashboard", "--state", str(state), "--interval", "0.1",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        seen: list[str] = []

        async def line_with(what: str) -> None:
            async with asyncio.timeout(60):
                while not any(what in line for line in seen):
                    assert process.stdout is not None
                    seen.append((await process.stdout.readline()).decode())

        await line_with("worker-1 (")
        assert re.match(r"\d\d:\d\d:\d\d backbone \(", seen[0])
        assert any("worker on loopback, 32 experts" in line for line in seen)
        assert await generate(state) == 100
        await swarm.workers[0].stop()
        await line_with(": not connected (was loopback)")
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]  # asyncio has no other way
        async with asyncio.timeout(30):
            assert await process.wait() == 1
            assert await process.stderr.read() == b""
        assert not any("\x1b" in line for line in seen)
        assert (await status(state))["role"] == "backbone"


async def test_stills_of_a_running_node(tmp_path: Path, demo_pack: ModelPack) -> None:
    def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "swarmnode", "dashboard", *arguments],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    async with LocalSwarm(tmp_path, demo_pack.path) as swarm:
        await swarm.start(["1/2", "2/2"], backbone=["--context", "256"])
        state = ["--state", str(swarm.backbone.state)]
        assert await generate(swarm.backbone.state) == 100
        once = await asyncio.to_thread(cli, "--once", *state)
        assert once.returncode == 0, once.stderr
        assert len(once.stdout.splitlines()) == 40
        assert re.search(r"worker-2 +\S{8} worker +loopback", once.stdout)
        assert "round trips/token 4.0" in once.stdout
        assert "\x1b" not in once.stdout
        files = ["--svg", str(tmp_path / "a.svg"), "--html", str(tmp_path / "a.html"), "--size", "100x30"]
        done = await asyncio.to_thread(cli, *files, *state)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        svg = (tmp_path / "a.svg").read_text("utf-8")
        assert svg.startswith("<svg")
        assert "worker-1" in svg
        assert "worker-2" in (tmp_path / "a.html").read_text("utf-8")
        wrong = await asyncio.to_thread(cli, "--svg", str(tmp_path / "a.svg"), "--size", "5", *state)
        assert wrong.returncode == 2
        assert "--size 5: give COLUMNSxROWS" in wrong.stderr
        unwritable = await asyncio.to_thread(cli, "--svg", "/proc/nowhere/a.svg", *state)
        assert unwritable.returncode == 1
        assert len(unwritable.stderr.splitlines()) == 1
    nobody = await asyncio.to_thread(cli, "--state", str(tmp_path / "nobody"))
    assert nobody.returncode == 1
    assert "no node is running" in nobody.stderr


async def test_status_has_events_choices_and_load(tmp_path: Path, demo_pack: ModelPack) -> None:
    """What the view needs is in the status of a founder, and no ticket is."""
    node = await NodeProcess.start("founder", tmp_path, ["--model", str(demo_pack.path), *QUIET])
    try:
        assert await generate(node.state) == 100
        seen: Any = await status(node.state)
        assert set(seen["selected"]) == {"0", "1", "2", "3"}
        for row in seen["selected"].values():
            assert re.fullmatch(r"[0-9a-f]{16}", row)
            assert "f" in row
        assert "ready: backbone" in json.dumps(seen["events"])
        assert "swarm1" not in json.dumps(seen)
        assert all(site["evaluations"] > 0 for site in seen["sites"])
    finally:
        await node.stop()
