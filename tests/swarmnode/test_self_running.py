"""A swarm that runs itself, in real processes: found, join, split the model, restart, leave, die."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, TokenEvent
from swarmnode.control import request_one
from swarmnode.local_swarm import FoundedSwarm, NodeProcess
from swarmnode.onboard import ModelPack

from .backbone.helpers import local_session
from .helpers import poll

EXPERTS = 64  # of the shipped model; 7.6 MB, 0.11 to 0.13 MB each
REQUEST = GenerateRequest(
    prompt="import os\nimport sys\n\nclass Parser:\n    def __init__(self, filename):\n",
    max_tokens=24,
    sampling=Sampling(temperature=0.0),
    digests=True,
)
SMALL = ("--context", "256", "--batch", "128")

Tokens = list[tuple[int, str]]


@pytest.fixture(scope="module")
def local_run(demo_pack: ModelPack) -> Tokens:
    """The tokens and logit digests of llama.cpp alone."""
    session = local_session(demo_pack)
    try:
        events: list[TokenEvent] = []
        session.generate(REQUEST, events.append)
        return [(event.token, event.digest) for event in events if event.token >= 0]
    finally:
        session.close()


async def generate(node: NodeProcess) -> Tokens:
    return [
        (event["token"], event["digest"])
        async for event in node.generate(msgspec.to_builtins(REQUEST))
        if event["event"] == "token" and event["token"] >= 0
    ]


async def swarm_status(node: NodeProcess) -> dict[str, Any]:
    status: dict[str, Any] = (await node.status())["swarm"]
    return status


async def members(node: NodeProcess) -> set[str]:
    return {member["peer"] for member in (await swarm_status(node))["members"]}


async def covered(founder: NodeProcess, workers: int, experts: int = EXPERTS) -> None:
    """Wait until `workers` are attached to the founder and offer so many experts together, copies counted too."""

    async def there() -> bool:
        peers = [peer for peer in (await founder.status())["peers"] if peer["experts"]]
        return len(peers) == workers and sum(peer["experts"] for peer in peers) >= experts

    await poll(there, 40.0)


async def holds(node: NodeProcess) -> int:
    """How many experts a worker serves."""
    return sum(len(expand(text)) for text in (await node.status())["holdings"].values())


def expand(ranges: str) -> list[int]:
    """`0-3,7` → 0, 1, 2, 3, 7."""
    spans = [part.split("-") for part in ranges.split(",") if part]
    return [expert for span in spans for expert in range(int(span[0]), int(span[-1]) + 1)]


async def test_five_processes_from_nothing_split_the_model_and_hand_over(
    tmp_path: Path, demo_pack: ModelPack, local_run: Tokens
) -> None:
    async with FoundedSwarm(tmp_path, demo_pack.path) as swarm:
        founder = await swarm.found("--memory", "1M", "--emulate", "rate=40mbit", *SMALL)
        names = [f"worker-{i}" for i in range(1, 5)]
        workers = await asyncio.gather(*(swarm.join(name, "--memory", "2M") for name in names))
        await covered(founder, 4)
        assert await generate(founder) == local_run

        everybody = {node.peer for node in swarm.nodes.values()}
        for node in swarm.nodes.values():
            assert await members(node) == everybody - {node.peer}
            assert all(member["linked"] for member in (await swarm_status(node))["members"])
        for node in workers:
            status = await swarm_status(node)
            assert 0 < status["held_bytes"] <= status["budget"] == 2 << 20
        assert sum(peer["rows"] for peer in (await founder.status())["peers"]) > 0

        # A spare comes; one leaves: what it held is taken over, also from itself, before it goes.
        spare = await swarm.join("spare", "--memory", "3M")
        await covered(founder, 5)
        leaver = workers[0]
        leaver.process.send_signal(signal.SIGINT)
        await leaver.wait_for("handing-over", timeout=40.0)
        assert await generate(founder) == local_run
        assert await asyncio.wait_for(leaver.process.wait(), 30) == 0
        await covered(founder, 4)
        assert await generate(founder) == local_run
        assert (await swarm_status(founder))["plan"]["uncovered"] == 0
        for node in (founder, spare):
            assert leaver.peer not in await members(node)
        taken = (await swarm_status(spare))["taken_bytes"]
        assert sum(count for peer, count in taken.items() if peer != founder.peer) > 200_000, taken


async def test_workers_restart_die_and_the_founder_comes_back(
    tmp_path: Path, demo_pack: ModelPack, local_run: Tokens
) -> None:
    async with FoundedSwarm(tmp_path, demo_pack.path) as swarm:
        founder = await swarm.found("--memory", "1M", *SMALL)
        one, two = await asyncio.gather(swarm.join("one", "--memory", "4M"), swarm.join("two", "--memory", "4M"))
        await covered(founder, 2)
        before = (await one.status())["holdings"]

        one.kill()
        one = await swarm.again("one", "--memory", "4M")
        await one.wait_for("holding", timeout=40.0)
        await covered(founder, 2)
        assert (await one.status())["holdings"] == before
        assert not (await swarm_status(one))["taken_bytes"]
        assert await generate(founder) == local_run

        # The founder's new process has another port: it finds the workers by what it remembers of them.
        await founder.stop()
        founder = await swarm.found("--memory", "1M", *SMALL)
        await covered(founder, 2)
        assert await generate(founder) == local_run
        three = await swarm.join("three", "--memory", "4M")  # orders go on
        await three.wait_for("holding", timeout=40.0)
        await covered(founder, 3)

        two.kill()
        died = time.monotonic()

        async def gone() -> bool:
            return all([two.peer not in await members(node) for node in (founder, one, three)])

        await poll(gone, 20.0)
        assert time.monotonic() - died < 17.0  # 15, and a poll of a loaded machine
        await covered(founder, 2)
        assert await generate(founder) == local_run


async def test_second_ctrl_c_does_not_wait_for_anybody(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with FoundedSwarm(tmp_path, demo_pack.path) as swarm:
        founder = await swarm.found("--memory", "1M", *SMALL)
        worker = await swarm.join("worker", "--memory", "8M")
        await worker.wait_for("holding", timeout=40.0)
        founder.process.send_signal(signal.SIGSTOP)  # nobody releases it
        try:
            worker.process.send_signal(signal.SIGINT)
            await worker.wait_for("handing-over", timeout=40.0)
            worker.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(worker.process.wait(), 10) == 0
        finally:
            founder.process.send_signal(signal.SIGCONT)


async def test_two_backbones_generate_at_once(tmp_path: Path, demo_pack: ModelPack, local_run: Tokens) -> None:
    async with FoundedSwarm(tmp_path, demo_pack.path) as swarm:
        founder = await swarm.found("--memory", "1M", *SMALL)
        made = await request_one(founder.state, "ticket", expires_s=600, uses=0, role="any")
        worker, second = await asyncio.gather(
            swarm.join("worker", "--memory", "8M"),
            swarm.join("second", "--role", "backbone", *SMALL, ticket=made["ticket"]),
        )
        await covered(founder, 1)
        await covered(second, 1)
        (fetched,) = second.state.glob("models/*/backbone.gguf")
        assert fetched.read_bytes() == demo_pack.backbone.read_bytes()
        texts = await asyncio.gather(*(generate(node) for node in (founder, second, founder, second)))
        assert texts == [local_run] * 4
        assert (await worker.status())["served_rows"] > 0
