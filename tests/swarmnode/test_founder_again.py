"""A founder that restarts: its workers find it, and it plans when they are all back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from swarmnode import parts
from swarmnode.node import Node
from swarmnode.onboard import ModelPack

from .helpers import free_udp_port, start_node

QUIET: dict[str, Any] = {"lan": False, "listen": "127.0.0.1:0"}


async def test_one_plan_is_made_with_all_that_come_back(
    tmp_path: Path, demo_pack: ModelPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two workers hold the model together only: a plan with one of them would throw half of it away.

    They are back before the founder has loaded its model and can plan: what they reported then counts.
    """
    founding = {"memory": "1M", "context": 256, **QUIET, "listen": f"127.0.0.1:{free_udp_port()}"}
    nodes: list[Node] = []
    monkeypatch.setattr("swarmnode.swarm_part.REPORT_S", 1000.0)  # nobody says a thing twice
    try:
        founder, events = await start_node(tmp_path / "founder", demo_pack, **founding)
        ticket = (await events.wait("ticket"))[0]["ticket"]
        joining = {"model": None, "ticket": ticket, "memory": "4M", **QUIET}
        workers = await asyncio.gather(*(start_node(tmp_path / name, demo_pack, **joining) for name in ("a", "b")))
        nodes += [node for node, _ in workers]
        for _, heard in workers:
            await heard.wait("holding")
        await founder.close()
        for _, heard in workers:
            heard.seen.clear()
        load = parts.load_sessions

        def linked(node: Node) -> bool:
            return node.swarm is not None and founder.endpoint.peer_id in node.swarm.member.mesh.up()

        def when_linked(*given: Any) -> Any:  # Any: handed on
            while not all(linked(node) for node, _ in workers):
                time.sleep(0.01)
            return load(*given)

        monkeypatch.setattr(parts, "load_sessions", when_linked)
        founder, events = await start_node(tmp_path / "founder", demo_pack, **founding)
        nodes.append(founder)
        plan = (await events.wait("plan"))[0]
        assert plan["workers"].keys() == {str(node.endpoint.peer_id) for node, _ in workers}
        assert plan["uncovered"] == 0
        for _, heard in workers:
            await heard.wait("holding")
        assert len([event for event in events.seen if event["event"] == "plan"]) == 1
    finally:
        for node in reversed(nodes):
            await node.close()
