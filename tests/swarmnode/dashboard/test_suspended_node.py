"""A node that runs and does not answer is said so, by every command; a view that watches it goes on trying."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swarmnode import control
from swarmnode.control import request, request_one
from swarmnode.errors import NodeSilent

from .quiet_node import quiet_node, suspended
from .test_without_a_reader import on_a_terminal, read_until

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no SIGSTOP on Windows")
SAID = "the node has not answered for 5 s: is it suspended?"


def test_commands_end_with_one_line(tmp_path: Path) -> None:
    state = tmp_path / "node"
    commands = (["status"], ["peers", "--json"], ["dashboard", "--once"], ["dashboard"], ["ticket"], ["generate", "x"])
    with quiet_node(state) as node, suspended(node):
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "swarmnode", *words, "--state", str(state)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for words in commands
        ]  # fmt: skip
        for one in running:
            out, errors = one.communicate(timeout=100)
            assert (one.returncode, out, errors) == (1, "", f"swarmnode: {SAID}\n"), one.args


async def test_a_deadline_is_the_whole_answers(tmp_path: Path) -> None:
    with quiet_node(tmp_path) as node:
        assert (await request_one(tmp_path, "status"))["status"]["name"] == "study"
        with suspended(node), pytest.raises(NodeSilent, match=r"not answered for 0 s: is it suspended\?"):
            await request_one(tmp_path, "status", within=0.2)
        assert (await request_one(tmp_path, "peers"))["peers"]


async def test_an_answer_that_takes_long_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 0.1)
    with quiet_node(tmp_path) as node:
        events = request(tmp_path, "generate")
        first = asyncio.ensure_future(anext(events))
        assert not (await asyncio.wait({first}, timeout=1))[0]  # slow is not suspended
        with suspended(node), pytest.raises(NodeSilent):
            await first


def test_a_view_says_so_and_goes_on_trying(tmp_path: Path) -> None:
    state = tmp_path / "node"
    with quiet_node(state) as node, suspended(node):
        arguments = ["dashboard", "--state", str(state), "--interval", "0.1"]
        with on_a_terminal(arguments, tmp_path / "stderr.txt") as (process, ours, _):
            read_until(ours, SAID.encode())
            node.send_signal(signal.SIGCONT)
            read_until(ours, b"peers 3")
            os.write(ours, b"q")
            assert process.wait(20) == 0
        assert (tmp_path / "stderr.txt").read_bytes() == b""


def test_plain_lines_say_so_once_and_go_on(tmp_path: Path) -> None:
    state = tmp_path / "node"
    with quiet_node(state) as node:
        command = [sys.executable, "-m", "swarmnode", "dashboard", "--state", str(state), "--interval", "0.1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            try:
                while "the node" not in (line := watching.stdout.readline()):
                    assert line
                    if "study" in line:
                        node.send_signal(signal.SIGSTOP)
                assert line.endswith(f"{SAID}\n")
                node.send_signal(signal.SIGCONT)
                assert watching.stdout.readline().endswith("the node answers again\n")
            finally:
                watching.terminate()
