"""Two contexts of one model over a real swarm: at once, sharing nothing but the weights and the dispatch client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swarmnode.backbone.runner import GenerationRunner
from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, GenerateResult, TokenEvent
from swarmnode.node import Node
from swarmnode.onboard import ModelPack

from ..helpers import swarm
from .drafters import OracleDrafter
from .helpers import local_session

PROMPTS = (
    "import os\nimport sys\n\nclass Parser:\n    def __init__(self, filename):\n",
    "import re\n\n\ndef tokens(text):\n    return",
)


async def read(runner: GenerationRunner, request: GenerateRequest) -> tuple[list[TokenEvent], GenerateResult]:
    events: list[TokenEvent] = []
    async for event in runner.stream(request):
        if isinstance(event, GenerateResult):
            return events, event
        events.append(event)
    raise AssertionError("no result")


def runner_of(node: Node) -> GenerationRunner:
    assert node.runner is not None
    return node.runner


@contextlib.asynccontextmanager
async def two_lanes(folder: Path, pack: ModelPack, emulate: str | None = None) -> AsyncIterator[Node]:
    more = {"emulate": emulate} if emulate else {}
    async with swarm(folder, pack, ["1/2", "2/2"], lanes=2, parallel=2, mode="exact", **more) as (front, _):
        yield front


async def test_each_lane_has_the_local_runs_bits(tmp_path: Path, demo_pack: ModelPack) -> None:
    requests = [
        GenerateRequest(prompt=prompt, max_tokens=30, sampling=sampling, digests=True, ignore_end=True)
        for prompt, sampling in zip(PROMPTS, (Sampling(), Sampling(temperature=0.8, seed=2)), strict=True)
    ]
    local = local_session(demo_pack)
    expected: list[list[TokenEvent]] = []
    try:
        for request in requests:
            expected.append([])
            await asyncio.to_thread(local.generate, request, expected[-1].append)
    finally:
        local.close()
    async with two_lanes(tmp_path, demo_pack) as front:
        for _ in range(2):
            found = await asyncio.gather(*(read(runner_of(front), request) for request in requests))
            assert [events for events, _ in found] == expected
            assert all(result.blocking_round_trips_per_token == 4.0 for _, result in found)


async def test_the_trips_of_one_hide_behind_those_of_the_other(tmp_path: Path, demo_pack: ModelPack) -> None:
    order: list[str] = []

    async def follow(runner: GenerationRunner, name: str, request: GenerateRequest) -> None:
        async for event in runner.stream(request):
            if isinstance(event, TokenEvent):
                order.append(name)

    async with two_lanes(tmp_path, demo_pack, "rtt=20ms") as front:
        runner = runner_of(front)
        requests = [GenerateRequest(prompt=prompt, max_tokens=8, ignore_end=True) for prompt in PROMPTS]
        await asyncio.gather(follow(runner, "first", requests[0]), follow(runner, "second", requests[1]))
    # In one lane the second would begin where the first ends.
    assert order.index("second") < 8
    assert order.index("first") < 8
    assert runner.tokens == 16


async def test_leaving_one_lane_disturbs_nobody_in_the_other(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with two_lanes(tmp_path, demo_pack, "rtt=20ms") as front:
        runner = runner_of(front)
        stays = asyncio.create_task(read(runner, GenerateRequest(prompt=PROMPTS[0], max_tokens=12)))
        leaves = runner.stream(GenerateRequest(prompt=PROMPTS[1], max_tokens=300))
        await anext(leaves)
        await asyncio.wait_for(leaves.aclose(), 10)
        assert runner.running == 1
        _, result = await asyncio.wait_for(stays, 20)
        assert (result.stopped_by, result.tokens) == ("length", 12)
        assert (await read(runner, GenerateRequest(prompt=PROMPTS[1], max_tokens=4)))[1].tokens == 4


async def test_drafts_over_the_swarm_save_round_trips(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with two_lanes(tmp_path, demo_pack) as front:
        sessions = [lane.session for lane in runner_of(front)._lanes]
        request = GenerateRequest(prompt=PROMPTS[0], max_tokens=40, ignore_end=True)
        plain: list[TokenEvent] = []
        await asyncio.to_thread(sessions[0].generate, request, plain.append)
        drafter = OracleDrafter([event.token for event in plain], most=4, wrong=3)
        events: list[TokenEvent] = []
        result = await asyncio.to_thread(sessions[1].generate, request, events.append, drafter=lambda: drafter)
        assert (result.tokens, result.speculation) == (40, "on")
        assert result.accepted_per_step > 2
        assert result.blocking_round_trips_per_token == pytest.approx(4.0 / result.accepted_per_step)
