"""The live view in a real terminal, with a real node."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from swarmnode.local_swarm import LocalSwarm
from swarmnode.onboard import ModelPack

from .tmux import UP, Tmux, needs_tmux, terminal

pytestmark = needs_tmux
READY = "── peers 0 · by name"


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarmnode", *arguments], capture_output=True, text=True, timeout=100, check=False
    )


def start(one: Tmux, pack: ModelPack, state: Path) -> None:
    one.enter(f"{UP} --model {pack.path} --context 256 --name study --state {state}; echo ended with $?")
    one.wait_for(READY, "q quit")


def lines_of(screen: str) -> list[str]:
    return screen.rstrip("\n").split("\n")


def test_up_shows_the_live_view_at_every_size_and_keys_work(tmp_path: Path, demo_pack: ModelPack) -> None:
    with terminal(tmp_path) as one:
        start(one, demo_pack, tmp_path / "node")
        for width, height in ((80, 24), (120, 40), (200, 50), (80, 24)):
            one.resize(width, height)
            rule = f"── peers 0 · by name {'─' * (width - 21)}\n"
            screen = one.wait_for("memory", "NAT", "tokens/s", "── events ─", rule)
            assert len(lines_of(screen)) == height
            assert re.search(r"^ q quit .* t ticket", lines_of(screen)[-1])
            assert lines_of(screen)[0].startswith(" swarmnode study · backbone of pystdlib-moe-15m")
            assert lines_of(screen)[0].rstrip().endswith(" s")
            assert "nobody is connected yet" in screen
            assert "ready: backbone of pystdlib-moe-15m" in screen
        one.type("?")
        one.wait_for("── keys", "PgUp PgDn")
        one.type("Escape")
        one.wait_for(READY, absent=("PgUp PgDn",))
        one.type("s")
        one.wait_for("peers 0 · by RTT")
        one.type("/", "a", "n", "v")
        one.wait_for("filter: anv_")
        one.type("Escape")
        one.wait_for("peers 0 · by RTT ─", "q quit")
        one.type("Tab", "Tab", "Tab")
        one.wait_for("── events ─", absent=("── peers",))
        one.type("Tab")
        one.type("p")
        one.wait_for("paused; p goes on")
        one.type("p")
        one.wait_for("q quit")
        one.type("t")
        screen = one.wait_for("swarmnode up swarm1", "(any key goes back)", joined=True)
        ticket = re.findall(r"swarmnode up (swarm1\w+)", screen)[-1]
        assert not one.is_alternate()  # where text can be marked and copied, and stays
        assert cli("ticket", "list", "--state", str(tmp_path / "node")).returncode == 0
        one.type("x")
        one.wait_for("q quit")
        assert one.is_alternate()
        one.type("q")
        one.wait_for("stop this node? y stops it")
        one.type("n")
        one.wait_for("q quit", absent=("stop this node?",))
        one.type("q")
        one.wait_for("stop this node? y stops it")
        one.type("y")
        screen = one.wait_for("stopping", "ended with 0", joined=True)
        assert re.findall(r"swarmnode up (swarm1\w+)\s+stopping", screen) == [ticket]
        assert not one.is_alternate()


def test_a_paste_is_no_command_but_a_filter(tmp_path: Path, demo_pack: ModelPack) -> None:
    with terminal(tmp_path) as one:
        start(one, demo_pack, tmp_path / "node")
        one.run("set-buffer", "q\ny\nqy\n")
        one.run("paste-buffer", "-p")
        one.type("/")
        one.wait_for("filter: _")
        one.run("set-buffer", "study q\ny\n")
        one.run("paste-buffer", "-p")
        one.wait_for("filter: study q_")
        one.type("C-c")
        one.wait_for("stopping", "ended with 0")


def test_suspending_gives_the_terminal_back_and_going_on_draws_anew(tmp_path: Path, demo_pack: ModelPack) -> None:
    with terminal(tmp_path, NO_COLOR="1") as one:
        start(one, demo_pack, tmp_path / "node")
        colours = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")
        assert not colours.search(one.screen(escapes=True))
        assert "\x1b[1m" in one.screen(escapes=True)
        for _ in range(2):
            one.type("C-z")
            one.wait_for("Stopped")
            assert not one.is_alternate()
            one.enter("clear; stty -a | grep -oE -e '-?icanon' -e '-?echo '; echo asked")
            screen = one.wait_for("\nasked")
            assert screen.split()[:3] == ["icanon", "echo", "asked"]
            one.enter("fg; echo ended with $?")
            one.wait_for(READY, "q quit")
            assert one.is_alternate()
        one.type("C-z")
        one.wait_for("Stopped")
        one.enter("clear; bg")  # it serves on, and leaves the terminal to the shell
        one.wait_for("&")
        done = cli("generate", "import os\n", "-n", "8", "--state", str(tmp_path / "node"))
        assert done.returncode == 0, done.stderr
        one.enter("echo still mine")
        one.wait_for("\nstill mine")
        assert not one.is_alternate()
        one.enter("fg; echo ended with $?")
        one.wait_for(READY, "q quit")
        one.type("C-c")
        one.wait_for("stopping", "ended with 0")


def test_a_terminal_that_is_stopped_slows_nothing_and_gets_the_newest_when_it_goes_on(
    tmp_path: Path, demo_pack: ModelPack
) -> None:
    with terminal(tmp_path) as one:
        start(one, demo_pack, tmp_path / "node")
        one.type("C-s")
        for _ in range(3):
            done = cli("generate", "import os\n", "-n", "40", "--state", str(tmp_path / "node"))
            assert done.returncode == 0, done.stderr
        assert "tokens 120" not in one.screen()
        one.type("C-q")
        one.wait_for("tokens 120")
        one.type("C-c")
        one.wait_for("stopping", "ended with 0")


async def test_an_attached_view_of_a_swarm(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with LocalSwarm(tmp_path, demo_pack.path) as swarm:
        await swarm.start(["1/2", "2/2"], backbone=["--context", "256"])
        await asyncio.to_thread(attached, tmp_path, swarm)
        assert swarm.backbone.process.returncode is None


def attached(folder: Path, swarm: LocalSwarm) -> None:
    state = swarm.backbone.state
    with terminal(folder, 120, 40) as one:
        one.enter(f"{sys.executable} -m swarmnode dashboard --state {state} --interval 0.2; echo ended with $?")
        screen = one.wait_for("── peers 2 · by name", "worker-1", "worker-2", "loopback")
        assert re.search(r"worker-1 +\S{8} worker +loopback +\d", screen)
        done = cli("generate", "import os\n", "-n", "64", "--state", str(state))
        assert done.returncode == 0, done.stderr
        screen = one.wait_for("tokens 64", "slowest layer")
        assert re.search(r"per step 1\.00 .*round trips/token 4\.0\d", screen)
        assert re.search(r"slowest layer \d, \S+ ms, waits for worker-[12]", screen)
        one.type("j", "Enter")
        one.wait_for("── peer worker-1 (", "layer 0: 0-7; layer 1: 0-7", "rows, 0 failed")
        one.type("Escape")
        one.wait_for("── peers 2")
        one.type("t")
        one.wait_for("this node is in no swarm")
        one.type("x")
        one.wait_for("── peers 2")
        one.type("C-z")
        one.wait_for("Stopped")
        one.enter("fg; echo ended with $?")
        one.wait_for("── peers 2")
        one.type("q")
        one.wait_for("ended with 0")
        assert not one.is_alternate()
