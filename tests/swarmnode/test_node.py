"""Starting and ending a node where something goes wrong in between."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from swarmnode.backbone.session import GenerateRequest
from swarmnode.config import build_config
from swarmnode.demo import MODEL
from swarmnode.errors import Cancelled, ComputeError, ModelError, SwarmnodeError
from swarmnode.node import Node
from swarmnode.onboard import ModelPack
from transport.errors import BindFailed

from .helpers import generate, poll, start_node


@pytest.mark.parametrize("phase", ["onboard", "slices", "load"])
async def test_ctrl_c_while_starting_ends_at_once_and_leaves_nothing(
    phase: str, tmp_path: Path, demo_pack: ModelPack
) -> None:
    loop = asyncio.get_running_loop()
    reached = asyncio.Event()
    seen: list[str] = []

    def emit(event: str, **_fields: Any) -> None:
        seen.append(event)
        if event == phase:
            loop.call_soon_threadsafe(reached.set)

    given = {"model": MODEL, "experts": "all", "role": "both", "threads": 1}
    node = Node(build_config(given, None, state_dir=tmp_path), emit)
    starting = asyncio.create_task(node.start())
    await asyncio.wait_for(reached.wait(), 30)
    starting.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert "ready" not in seen
    assert not (tmp_path / "control.json").exists()
    again, _ = await start_node(tmp_path, demo_pack, experts="all")  # the store's lock is free
    await again.close()


async def test_one_failing_step_does_not_keep_the_others_from_closing(tmp_path: Path, demo_pack: ModelPack) -> None:
    node, events = await start_node(tmp_path, demo_pack, experts="all")

    async def fails() -> None:
        raise RuntimeError("a step of ours")

    node._cleanup.append(fails)
    await node.close()
    assert [e["error"] for e in events.seen if e["event"] == "close-problem"] == ["RuntimeError: a step of ours"]
    assert not (tmp_path / "control.json").exists()
    await node.close()


async def test_a_port_in_use_is_said_and_everything_closed(tmp_path: Path, demo_pack: ModelPack) -> None:
    first, _ = await start_node(tmp_path / "a", demo_pack, experts="all")
    try:
        port = first.endpoint.address[1]
        with pytest.raises(BindFailed, match=str(port)):
            await start_node(tmp_path / "b", demo_pack, experts="all", listen=f"127.0.0.1:{port}")
        assert not (tmp_path / "b" / "control.json").exists()
    finally:
        await first.close()


async def test_a_backbone_that_cannot_load_closes_what_was_started(tmp_path: Path, demo_pack: ModelPack) -> None:
    pack = tmp_path / "pack"
    pack.mkdir()
    for name in ("manifest.json", "source.json"):
        (pack / name).write_bytes((demo_pack.path / name).read_bytes())
    (pack / "backbone.gguf").write_bytes(demo_pack.backbone.read_bytes()[:100_000])
    threads = threading.active_count()
    with pytest.raises(SwarmnodeError, match=r"backbone\.gguf") as error:
        await start_node(tmp_path / "s", ModelPack(pack, demo_pack.manifest, demo_pack.source))
    assert isinstance(error.value, ModelError | ComputeError)
    assert threading.active_count() <= threads + 4  # asyncio's own pool


def damage(folder: Path, change: str) -> None:
    """Alter or cut one slot file of a worker's store."""
    slots = sorted(folder.glob("slices/*/*.slots"))[1]
    if change == "altered":
        data = bytearray(slots.read_bytes())
        data[70_000:70_064] = bytes(64)
        slots.write_bytes(data)
    else:
        os.truncate(slots, slots.stat().st_size - 1)


@pytest.mark.parametrize("change", ["altered", "cut"])
async def test_damaged_slices_are_named_and_taken_from_the_source_again(
    change: str, tmp_path: Path, demo_pack: ModelPack
) -> None:
    node, _ = await start_node(tmp_path, demo_pack, experts="all")
    await node.close()
    damage(tmp_path, change)
    node, events = await start_node(tmp_path, demo_pack, experts="all")
    await node.close()
    (damaged,) = [e["error"] for e in events.seen if e["event"] == "damaged"]
    assert re.search(r"\.slots", damaged)
    fetched = max(e["total"] for e in events.seen if e["event"] == "slices")
    assert fetched == demo_pack.manifest.expert_bytes(0)  # the one expert that was damaged
    node, events = await start_node(tmp_path, demo_pack, experts="all")
    await node.close()
    assert not [e for e in events.seen if e["event"] in ("damaged", "slices")]


async def test_damaged_slices_without_a_source_are_an_error(tmp_path: Path, demo_pack: ModelPack) -> None:
    node, _ = await start_node(tmp_path, demo_pack, experts="all")
    await node.close()
    damage(tmp_path, "altered")
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "manifest.json").write_bytes((demo_pack.path / "manifest.json").read_bytes())
    with pytest.raises(ModelError, match="give --source"):
        await start_node(tmp_path, ModelPack(pack, demo_pack.manifest, None), experts="all")


async def test_an_altered_backbone_file_is_refused(tmp_path: Path, demo_pack: ModelPack) -> None:
    pack = tmp_path / "pack"
    shutil.copytree(demo_pack.path, pack)
    data = bytearray(demo_pack.backbone.read_bytes())
    copied, _ = await start_node(tmp_path / "copied", ModelPack.open(pack))  # a true copy is verified and used
    await copied.close()
    data[1_000_000:1_000_064] = bytes(b ^ 0xFF for b in data[1_000_000:1_000_064])
    (pack / "backbone.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=r"backbone\.gguf: does not have the manifest's SHA-256"):
        await start_node(tmp_path / "altered", ModelPack.open(pack))


async def test_generate_while_the_node_ends_is_an_error_not_a_crash(tmp_path: Path, demo_pack: ModelPack) -> None:
    node, _ = await start_node(tmp_path, demo_pack, context=256, batch=64)
    running = asyncio.create_task(
        generate(node, GenerateRequest(prompt="import os\n", max_tokens=200, ignore_end=True))
    )

    async def generating() -> bool:
        return node.runner is not None and node.runner.active

    await poll(generating)
    closing = asyncio.create_task(node.close())
    late = asyncio.create_task(generate(node, GenerateRequest(prompt="import os\n", max_tokens=5)))
    await asyncio.wait_for(closing, 20)
    for cut in (running, late):
        with pytest.raises(Cancelled, match="shutting down"):
            await cut
