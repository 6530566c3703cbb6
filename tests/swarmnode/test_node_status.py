"""The snapshot of a node that is not there yet."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from swarmnode.config import build_config
from swarmnode.node import Node
from swarmnode.onboard import ModelPack

from .helpers import Events, start_node

QUIET = {"listen": "127.0.0.1:0", "lan": False}


async def test_a_member_without_a_model_shows_itself(tmp_path: Path, demo_pack: ModelPack) -> None:
    """A worker that was a member, and starts before anybody who could tell it the model."""
    founder, events = await start_node(tmp_path / "founder", demo_pack, context=256, **QUIET)
    ticket = (await events.wait("ticket"))[0]["ticket"]
    try:
        worker, _ = await start_node(tmp_path / "worker", demo_pack, model=None, ticket=ticket, memory="1M", **QUIET)
        await worker.close()
    finally:
        await founder.close()

    heard = Events()
    again = Node(build_config({"memory": "1M", **QUIET}, None, state_dir=tmp_path / "worker"), heard)
    starting = asyncio.create_task(again.start())
    try:
        await heard.wait("waiting-for-model")
        status = again.status()
        assert status.peer == str(again.endpoint.peer_id)
        assert status.swarm is not None
        assert (status.swarm.members, status.peers, status.sites) == ([], [], [])
    finally:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await again.close()
