"""Swarms of real processes: the demo, kill -9 in mid-sentence, Ctrl-C, and what a user sees when something is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, TokenEvent
from swarmnode.local_swarm import LocalSwarm, NodeProcess
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack

from .backbone.helpers import local_session
from .helpers import poll

REQUEST = GenerateRequest(
    prompt="import os\nimport sys\n\nclass Parser:\n    def __init__(self, filename):\n",
    max_tokens=40,
    sampling=Sampling(temperature=0.8, seed=1),
    digests=True,
)


def run_cli(*arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarmnode", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def expected_tokens(pack: ModelPack) -> list[tuple[int, str]]:
    session = local_session(pack)
    try:
        events: list[TokenEvent] = []
        session.generate(REQUEST, events.append)
        return [(e.token, e.digest) for e in events if e.token >= 0]
    finally:
        session.close()


async def generate_all(swarm: LocalSwarm, kill_after: int = -1) -> list[tuple[int, str]]:
    """Generate; after `kill_after` tokens kill the worker that has computed most of them."""
    tokens: list[tuple[int, str]] = []
    async for event in swarm.backbone.generate(msgspec.to_builtins(REQUEST)):
        if event["event"] == "token" and event["token"] >= 0:
            tokens.append((event["token"], event["digest"]))
            if len(tokens) == kill_after:
                peers = (await swarm.backbone.status())["peers"]
                busiest = max(peers, key=lambda peer: int(peer["rows"]))["peer"]
                next(node for node in swarm.workers if node.peer == busiest).kill()
    return tokens


def test_demo_json(tmp_path: Path) -> None:
    done = run_cli("demo", "--tokens", "64", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] is True
    assert report["tokens"] == report["identical_logit_rows"] == 64
    assert [w["experts"] for w in report["workers"]] == [20, 20, 24]
    assert all(w["path"] == "loopback" and w["rtt_ms"] > 0 and w["rows"] > 0 for w in report["workers"])
    assert [s["layer"] for s in report["sites"]] == [0, 1, 2, 3]
    assert report["round_trips"] == 4 * 64
    assert all(s["round_trips"] == 64 and s["bytes_out"] > 0 and s["bytes_back"] > 0 for s in report["sites"])
    assert report["bytes_back"] > report["bytes_out"] > 0
    assert report["tokens_per_s"] > 0
    assert report["local_tokens_per_s"] > 0


def test_demo_for_people_on_aioquic_over_a_slow_link(tmp_path: Path) -> None:
    done = run_cli(
        "demo", "--tokens", "4", "--workers", "2", "--quic", "aioquic", "--emulate", "rtt=20ms,jitter=2ms,loss=1%"
    )
    assert done.returncode == 0, done.stderr
    assert "identical: every token and 4 of 4 logit rows are byte-equal to the plain local run" in " ".join(
        done.stdout.split()
    )


@pytest.mark.parametrize("fallback", ["replica", "own file"])
async def test_kill_9_of_a_worker_in_mid_sentence_changes_nothing(
    fallback: str, tmp_path: Path, demo_pack: ModelPack
) -> None:
    expected = expected_tokens(demo_pack)
    shares = ["1/2", "2/2", "all"] if fallback == "replica" else ["1/2", "2/2"]
    own = ["--no-local-experts"] if fallback == "replica" else []
    async with LocalSwarm(tmp_path, demo_pack.path) as swarm:
        await swarm.start(shares, backbone=["--context", "256", "--batch", "128", *own])
        tokens = await generate_all(swarm, kill_after=8)
        again = await generate_all(swarm)
        (dead,) = [node for node in swarm.workers if node.process.returncode is not None]

        async def noticed() -> bool:  # by a call, or by its silence where no call has met it since
            peers = (await swarm.backbone.status())["peers"]
            return all(p["failures"] > 0 or p["path"] == "none" for p in peers if p["peer"] == dead.peer)

        await poll(noticed)
    assert tokens == expected
    assert again == expected


async def test_losing_the_only_holder_is_one_clear_line(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with LocalSwarm(tmp_path, demo_pack.path) as swarm:
        await swarm.start(["1/2", "2/2"], backbone=["--no-local-experts", "--context", "256"])
        swarm.workers[1].kill()
        await swarm.workers[1].process.wait()
        done = await asyncio.to_thread(run_cli, "generate", "import os", "--state", str(swarm.backbone.state))
        assert done.returncode == 1
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.stderr.startswith("swarmnode: layer 0: ")
        assert (await swarm.backbone.status())["generation"]["active"] is False


async def test_commands_talk_to_the_running_node(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with LocalSwarm(tmp_path, demo_pack.path) as swarm:
        await swarm.start(["1/2", "2/2"], backbone=["--context", "256"])
        state = ["--state", str(swarm.backbone.state)]
        text = await asyncio.to_thread(run_cli, "generate", "import os\n", "-n", "8", *state)
        assert text.returncode == 0
        assert text.stdout.strip()
        assert "8 tokens" in text.stderr
        data = await asyncio.to_thread(run_cli, "generate", "import os\n", "-n", "8", "--json", *state)
        result = json.loads(data.stdout)
        assert result["text"] == text.stdout
        assert {"tokens", "tokens_per_s", "steps", "accepted_per_step", "stopped_by"} <= set(result)
        status = json.loads((await asyncio.to_thread(run_cli, "status", "--json", *state)).stdout)
        assert status["role"] == "backbone"
        assert len(status["peers"]) == 2
        peers = json.loads((await asyncio.to_thread(run_cli, "peers", "--json", *state)).stdout)
        assert [p["role"] for p in peers] == ["worker", "worker"]
        assert peers[0]["holdings"]["0"] in ("0-7", "8-15")
        table = await asyncio.to_thread(run_cli, "peers", *state)
        assert "loopback" in table.stdout
        own = await asyncio.to_thread(run_cli, "status", "--state", str(swarm.workers[0].state))
        assert "layer 0: 0-7" in own.stdout.replace("\n", " ")
        busy = await asyncio.to_thread(run_cli, "up", "--model", str(demo_pack.path), *state)
        assert busy.returncode == 1
        assert "a node runs here already" in busy.stderr


async def test_a_client_that_goes_away_ends_its_generation(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with LocalSwarm(tmp_path, demo_pack.path) as swarm:
        await swarm.start(["all"], backbone=["--context", "512"])
        long = msgspec.structs.replace(REQUEST, max_tokens=400)
        async for event in swarm.backbone.generate(msgspec.to_builtins(long)):
            if event["event"] == "token" and event["index"] == 3:
                break

        async def idle() -> bool:
            return not (await swarm.backbone.status())["generation"]["active"]

        await poll(idle)
        assert (await swarm.backbone.status())["generation"]["tokens"] < 300


@pytest.mark.skipif(os.name == "nt", reason="no signals of this kind on Windows")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_ctrl_c_ends_cleanly(number: signal.Signals, tmp_path: Path, demo_pack: ModelPack) -> None:
    node = await NodeProcess.start("w", tmp_path, ["--model", str(demo_pack.path), "--experts", "all"])
    node.process.send_signal(number)
    assert await asyncio.wait_for(node.process.wait(), 10) == 0
    assert node.events("stopping")
    assert not (node.state / "control.json").exists()
    assert (node.state / "stderr.txt").read_text() == ""
    await node.stop()


async def test_no_process_outlives_the_demo_that_was_killed(tmp_path: Path) -> None:
    demo = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "swarmnode", "demo", "--tokens", "400", "--json",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    parent = psutil.Process(demo.pid)

    async def all_started() -> bool:
        return len(parent.children()) == 4

    await poll(all_started, 60)
    children = parent.children()
    demo.kill()
    await demo.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 20)
    assert alive == []


@pytest.mark.skipif(os.name == "nt", reason="no signals of this kind on Windows")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_demo_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    demo = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "swarmnode", "demo", "--tokens", "400", "--json",
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip

    async def all_started() -> bool:
        return len(psutil.Process(demo.pid).children()) == 4

    await poll(all_started, 60)
    demo.send_signal(number)
    _, errors = await asyncio.wait_for(demo.communicate(), 20)
    assert demo.returncode == 130
    assert b"Traceback" not in errors
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="no signals of this kind on Windows")
async def test_ctrl_c_while_onboarding_ends_it_and_leaves_no_pack(tmp_path: Path) -> None:
    (source,) = write_random_model(RandomModel(d_model=1024, n_ff_expert=1024, n_expert=64), tmp_path / "m.gguf")
    pack = tmp_path / "pack"
    onboarding = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "swarmnode", "onboard", str(source), "--out", str(pack), stderr=subprocess.PIPE
    )

    async def begun() -> bool:
        return any(pack.glob("*/backbone.gguf"))  # it is made beside what is there; what follows reads 400 MB

    await poll(begun)
    onboarding.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(onboarding.communicate(), 10)
    assert onboarding.returncode == 130
    assert errors == b""
    assert not pack.exists()
