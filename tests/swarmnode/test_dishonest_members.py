"""Members of a swarm that answer wrongly, or say that they hold what they do not: found out, and the text is right."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import cast

import pytest

from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, TokenEvent
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.engine_api import Engine
from swarmnode.config import build_config
from swarmnode.node import Node
from swarmnode.onboard import ModelPack

from .backbone.helpers import local_session
from .dispatch.tampering import TamperingEngine
from .helpers import Events, generate, poll

# Long enough that a share of its rows is surely checked in the first call.
PROMPT = "import os\nimport sys\n\n\n" + "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(8))
REQUEST = GenerateRequest(prompt=PROMPT, max_tokens=16, sampling=Sampling(temperature=0.0), digests=True)
ROUNDS = 20
HERE = {"listen": "127.0.0.1:0", "lan": False, "threads": 1, "context": 512, "batch": 256}


@pytest.fixture(scope="module")
def local_run(demo_pack: ModelPack) -> list[tuple[int, str]]:
    session = local_session(demo_pack, n_context=512, n_batch=256)
    try:
        events: list[TokenEvent] = []
        session.generate(REQUEST, events.append)
        return [(event.token, event.digest) for event in events if event.token >= 0]
    finally:
        session.close()


class WrappingNode(Node):
    """A worker whose engine is wrapped."""

    @staticmethod
    def wrap(engine: ExpertEngine) -> Engine:
        return TamperingEngine(engine, one_in=1.0, noise=0.3)

    def _start_worker(self) -> None:
        honest = self.engine
        assert honest is not None
        self.engine = cast("ExpertEngine", self.wrap(honest))
        super()._start_worker()
        self.engine = honest


class Boaster(TamperingEngine):
    """Says that it holds every expert, and has what it has."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, one_in=math.inf)

    @property
    def holdings(self) -> Mapping[int, tuple[int, ...]]:
        return {site: tuple(range(16)) for site in range(4)}


class BoastingNode(WrappingNode):
    @staticmethod
    def wrap(engine: ExpertEngine) -> Engine:
        return Boaster(engine)


class Swarm:
    """A founder that keeps almost nothing itself, and members."""

    def __init__(self, folder: Path, pack: ModelPack) -> None:
        self._folder = folder
        self.events = Events()
        settings = {"model": pack.path, "memory": "1K", **HERE}
        self.founder = Node(build_config(settings, None, state_dir=folder / "founder"), self.events)
        self.members: list[Node] = []

    async def join(self, name: str, kind: type[Node], memory: str) -> Events:
        """Start a member and wait until it holds its part."""
        events = Events()
        ticket = (await self.events.wait("ticket"))[0]["ticket"]
        settings = {"ticket": ticket, "memory": memory, "name": name, **HERE}
        self.members.append(kind(build_config(settings, None, state_dir=self._folder / name), events))
        await self.members[-1].start()
        await events.wait("holding")
        return events


@contextlib.asynccontextmanager
async def swarm(folder: Path, pack: ModelPack) -> AsyncIterator[Swarm]:
    made = Swarm(folder, pack)
    try:
        await made.founder.start()
        yield made
    finally:
        for node in reversed(made.members):
            node.is_ready = False  # nobody is left to hand over to
            await node.close()
        await made.founder.close()


async def test_a_tampering_worker_is_named_and_gets_nothing_any_more(
    tmp_path: Path, demo_pack: ModelPack, local_run: list[tuple[int, str]]
) -> None:
    async with swarm(tmp_path, demo_pack) as s:
        founder, events = s.founder, s.events
        await s.join("bad", WrappingNode, "9M")  # alone, or an honest one might be asked in its place, being quicker
        bad = s.members[0]
        for _ in range(ROUNDS):  # on a busy machine it may at first be late
            tokens, _ = await generate(founder, REQUEST)
            assert tokens == local_run
            if events.count("quarantined"):
                break
        (named,) = await events.wait("quarantined", timeout=1.0)
        await s.join("good", Node, "9M")
        assert named["peer"] == str(bad.endpoint.peer_id)
        assert list(founder.status().quarantined) == [named["peer"]]

        async def planned_around() -> bool:
            return named["peer"] not in events.last("plan")["workers"]

        await poll(planned_around)
        config, plans = bad.config, events.count("plan")
        await bad.close()
        back = WrappingNode(config, Events())  # a restart changes nothing
        try:
            await back.start()
            await events.wait("plan", plans + 1)
            assert await planned_around()
        finally:
            back.is_ready = False
            await back.close()
        again, _ = await generate(founder, REQUEST)
        assert again == local_run


async def test_a_worker_that_says_it_holds_everything_costs_no_token(
    tmp_path: Path, demo_pack: ModelPack, local_run: list[tuple[int, str]]
) -> None:
    async with swarm(tmp_path, demo_pack) as s:
        told = await s.join("bad", BoastingNode, "1M")
        await s.join("good", Node, "9M")
        for _ in range(2):
            tokens, _ = await generate(s.founder, REQUEST)
            assert tokens == local_run
        assert not [event for event in told.seen if event["event"] == "task-failed"]
        (view,) = [peer for peer in s.founder.status().peers if peer.name == "bad"]
        assert view.failures > 0, view
