"""A backbone that joined goes by the founder's gate: who may say it, and real processes from start to restart."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from swarmnode.config import build_config
from swarmnode.control import request_one
from swarmnode.coordination.messages import Gated
from swarmnode.errors import SwarmnodeError
from swarmnode.gate import save_verdict
from swarmnode.gate.verdict_file import bound_of
from swarmnode.local_swarm import FoundedSwarm, NodeProcess
from swarmnode.membership.documents import NO_INVITATION
from swarmnode.onboard import ModelPack
from swarmnode.swarm_entry import Entry
from swarmnode.swarm_part import SwarmPart
from transport.identity import Identity

from .gate import samples
from .helpers import poll

SMALL = ("--context", "256", "--batch", "128")
CHEAPEST = ("--mode", "partial", "--wire", "auto")
FOUNDER, OTHER = (Identity.generate(bytes([i + 70]) * 32).peer_id for i in range(2))


def gated(pack: ModelPack, **changed: Any) -> None:
    sites = [samples.site(one.layer, one.d_in, one.d_out) for one in pack.manifest.sites]
    save_verdict(pack, msgspec.structs.replace(samples.verdict(*sites, bound=bound_of(pack)), **changed))


@pytest.mark.parametrize("role", ["backbone", "worker"])
async def test_only_the_founder_may_say_it(tmp_path: Path, role: str) -> None:
    said: list[str] = []
    config = build_config({"open": True, "role": role}, None, state_dir=tmp_path)
    part = SwarmPart(
        config,
        Identity.generate(),
        lambda _event, **fields: said.append(fields["note"]),
        lambda work, name: asyncio.create_task(work, name=name),
        lambda: pytest.fail("nobody asked"),
    )
    members = {
        FOUNDER: SimpleNamespace(invitation=NO_INVITATION, role="any"),
        OTHER: SimpleNamespace(invitation=b"12345678", role="any"),
    }
    part.entry = cast("Entry", SimpleNamespace(authority=None, membership=SimpleNamespace(members=members)))
    message = Gated(bytes(32), b"x")
    for _ in range(3):
        part._message(OTHER, message)
    assert part._verdict._latest is None
    assert len(said) == (role == "backbone")
    part._message(FOUNDER, message)
    assert part._verdict._latest == (message if role == "backbone" else None)


async def shown(node: NodeProcess) -> str:
    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "swarmnode", "status", "--state", str(node.state)],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return " ".join(done.stdout.split())

    return await asyncio.to_thread(run)


async def remembers(node: NodeProcess, other: NodeProcess) -> None:
    """A node that starts again has another port here: it dials whom it has written down."""
    port = other.address.rpartition(":")[2]

    async def written() -> bool:
        return port in (node.state / "swarm" / "member.json").read_text("utf-8")

    await poll(written, 40.0)


async def wires(node: NodeProcess) -> tuple[set[str], str]:
    generation = (await node.status())["generation"]
    return set(generation["wires"].values()), generation["verdict"]


@pytest.mark.slow
async def test_a_backbone_that_joined_uses_what_the_founder_s_gate_allows(tmp_path: Path, demo_pack: ModelPack) -> None:
    pack = ModelPack.open(Path(shutil.copytree(demo_pack.path, tmp_path / "pack")))
    async with FoundedSwarm(tmp_path, pack.path) as swarm:
        founder = await swarm.found(*SMALL, *CHEAPEST)
        made = await request_one(founder.state, "ticket", expires_s=600, uses=0, role="any")
        second = await swarm.join("second", "--role", "backbone", *SMALL, *CHEAPEST, ticket=made["ticket"])
        (note,) = second.events("wire")
        assert note["note"].startswith("F16 on the wire (not gated yet); for less, run swarmnode gate on the founder's")
        assert await wires(second) == ({"F16/F16"}, "")

        # The founder is gated and started again: who runs hears of it, and goes by it when started again.
        await remembers(founder, second)
        await founder.stop()
        gated(pack)
        founder = await swarm.found(*SMALL, *CHEAPEST)
        assert await wires(founder) == ({"INT8/INT8"}, "own")
        news = await second.wait_for("note", timeout=60.0)
        assert news["note"] == "the founder's gate has a new verdict on this model: start this node again to go by it"
        assert await wires(second) == ({"F16/F16"}, "")
        await remembers(second, founder)
        await second.stop()
        second = await swarm.again("second", "--role", "backbone", *SMALL, *CHEAPEST)
        assert [event["note"] for event in second.events("wire")] == [
            "INT8/INT8 on the wire, as the founder's gate allows"
        ]
        assert await wires(second) == ({"INT8/INT8"}, "founder")
        assert "INT8/INT8 on the wire (by the founder's gate)" in await shown(second)

        # One that joins now has it with the model: INT8 by name is no usage error.
        made = await request_one(founder.state, "ticket", expires_s=600, uses=0, role="any")
        third = await swarm.join(
            "third", "--role", "backbone", *SMALL, "--mode", "partial", "--wire", "int8", ticket=made["ticket"]
        )
        assert await wires(third) == ({"INT8/INT8"}, "founder")
        worker = await swarm.join("worker", "--memory", "8M")
        await worker.wait_for("holding", timeout=60.0)
        tokens = [
            event async for event in third.generate({"prompt": "import os\n", "max_tokens": 6, "ignore_end": True})
        ]
        assert tokens[-1]["event"] == "result"


@pytest.mark.slow
async def test_what_failed_the_founder_s_gate_is_not_run_by_a_backbone_that_joins(
    tmp_path: Path, demo_pack: ModelPack
) -> None:
    pack = ModelPack.open(Path(shutil.copytree(demo_pack.path, tmp_path / "pack")))
    gated(pack, local_differ=3)
    async with FoundedSwarm(tmp_path, pack.path) as swarm:
        founder = await swarm.found(*SMALL, "--force")
        made = await request_one(founder.state, "ticket", expires_s=600, uses=0, role="any")
        with pytest.raises(SwarmnodeError, match=r"model failed the founder's gate: .*or give --force"):
            await swarm.join("second", "--role", "backbone", *SMALL, ticket=made["ticket"])
        assert not list((tmp_path / "second").glob("models/*/backbone.gguf"))  # nothing large was fetched for it
        second = await swarm.again("second", "--role", "backbone", *SMALL, "--force")
        whose, _, why = (await wires(second))[1].partition(": ")
        assert whose == "founder"
        assert "the logits differ at 3 of 128 positions" in why
        await swarm.join("worker", "--memory", "8M")  # which computes what it is asked, as its founder wants
