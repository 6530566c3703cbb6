from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.cli import main
from transport.endpoint import Endpoint
from transport.identity import Identity

PEER = Identity.generate(bytes(32)).peer_id


@pytest.fixture(autouse=True)
def _no_relay_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWARMNODE_RELAY", "SWARMNODE_RELAY_CA", "SWARMNODE_STATE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def peer() -> Iterator[str]:
    """PEERID@HOST:PORT of an endpoint that lets everybody in, in a thread of its own: the command runs its own loop."""
    ready, loop, found = threading.Event(), asyncio.new_event_loop(), list[str]()

    async def serve() -> None:
        async with await Endpoint.bind(Identity.generate(), listen=("127.0.0.1", 0)) as endpoint:
            found.append(f"{endpoint.peer_id}@127.0.0.1:{endpoint.address[1]}")
            ready.set()
            await asyncio.Event().wait()

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    task = loop.create_task(serve())
    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join(10)


def test_lines_for_people(capsys: pytest.CaptureFixture[str], peer: str, tmp_path: Path) -> None:
    assert main(["ping", peer, "-c", "2", "-i", "0.05", "--state", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    address = peer.partition("@")[2]
    assert lines[0].startswith(f"→ loopback {address} (loopback: ")
    assert [line.endswith(f" ms  loopback {address}") for line in lines[1:3]] == [True, True]
    assert lines[3].startswith("2 of 2 pings answered: ")


def test_data_for_machines(capsys: pytest.CaptureFixture[str], peer: str, tmp_path: Path) -> None:
    assert main(["ping", peer, "-c", "1", "--json", "--state", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert set(result) == {"peer", "path", "address", "relay", "rtt_ms", "reason"}
    assert (result["path"], result["address"]) == ("loopback", peer.partition("@")[2])
    assert result["rtt_ms"] > 0


def test_no_answer_is_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["ping", f"{PEER}@nosuch.invalid:1", "-c", "1", "--state", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("no path: cannot be dialled; not tried: nosuch.invalid:1 (the name was not found")
    assert out.endswith("0 of 1 pings answered, 1 without a path\n")
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        ([str(PEER)], "no node runs here to ask"),
        (["abc"], "no node runs here to ask"),
        (["abc", "--relay", "http://127.0.0.1:9"], "this has 3"),
        ([f"{PEER}@host"], "write HOST:PORT"),
        ([str(PEER), "--relay", "relay.example"], "write https://relay.example"),
        ([str(PEER), "--relay", "http://127.0.0.1:9", "--relay-ca", "/no/such/file"], "No such file"),
        ([str(PEER), "-c", "-1"], "--count"),
        ([str(PEER), "-c", "9" * 30], "--count"),
        ([str(PEER), "-i", "nan"], "--interval nan"),
        ([str(PEER), "-i", "0"], "--interval 0"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, tmp_path: Path) -> None:
    assert main(["ping", *arguments, "--state", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("swarmnode: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="no signals of this kind on Windows")
def test_ctrl_c_ends_it_with_the_summary(peer: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swarmnode", "ping", peer, "-i", "0.05", "--state", str(tmp_path)]
    pinging = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert pinging.stdout is not None
    first = pinging.stdout.readline()
    pinging.send_signal(signal.SIGINT)
    out, err = pinging.communicate(timeout=20)
    assert first.startswith("→ loopback")
    assert " answered: " in out.splitlines()[-1]
    assert pinging.returncode == 130
    assert err == ""
