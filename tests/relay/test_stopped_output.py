"""A relay whose standard error stands still, fails or is missing relays on and ends in order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.full_pipe import fill

from .client import Client

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes and terminals of POSIX")
PATIENCE_S = 60.0


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    with open("/dev/full", "wb") as full:
        yield full.fileno()


@contextlib.contextmanager
def relay(stderr: int | None, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    command = [sys.executable, "-m", "relay", "--listen", f"127.0.0.1:{port}", "--reflector", "0,0", *flags]
    if stderr is None:
        command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
    with subprocess.Popen(command, stderr=stderr, stdin=subprocess.DEVNULL) as process:
        try:
            yield process, port
        finally:
            process.kill()


def is_well(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def until_well(port: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_well(port):
        assert time.monotonic() < end
        time.sleep(0.05)


async def log_much(port: int) -> None:
    for _ in range(40):  # each says that it comes and that it goes
        async with Client(port):
            pass


async def test_a_full_pipe_that_nobody_reads_holds_nothing_up() -> None:
    read, write = os.pipe()
    fill(write)
    with relay(write, "--log-level", "debug") as (process, port):
        os.close(write)
        until_well(port)
        await log_much(port)
        assert is_well(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    os.close(read)


async def test_a_terminal_that_is_stopped_holds_nothing_up_and_has_it_all_when_it_goes_on() -> None:
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcflow(theirs, termios.TCOOFF)  # what Ctrl-S does
    with relay(theirs, "--log-level", "info") as (process, port):
        until_well(port)
        await log_much(port)
        assert is_well(port)
        termios.tcflow(theirs, termios.TCOON)
        seen = b""
        while seen.count(b" login ") < 40:
            seen += os.read(ours, 1 << 16)
        assert seen.index(b"relay ready on") < seen.index(b" login ")
        assert b"missing" not in seen
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    os.close(theirs)
    os.close(ours)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full disk to be had")
async def test_a_full_disk_ends_nothing() -> None:
    with full_disk() as full, relay(full, "--log-level", "info") as (process, port):
        until_well(port)
        await log_much(port)
        assert is_well(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


async def test_without_standard_streams() -> None:
    with relay(None, "--log-level", "info") as (process, port):
        until_well(port)
        await log_much(port)
        assert is_well(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
