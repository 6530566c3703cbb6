from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnode.bench.swarm_start import all_started, onboarded
from swarmnode.demo import MODEL
from swarmnode.errors import ModelError, SwarmnodeError
from swarmnode.local_swarm import NodeProcess


async def test_what_is_cancelled_writes_nothing_afterwards(tmp_path: Path) -> None:
    working = asyncio.create_task(onboarded(MODEL, tmp_path / "pack"))
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert not (tmp_path / "pack" / "manifest.json").exists()
    assert len(asyncio.all_tasks()) == 1


async def test_a_pack_or_its_own_error_comes_of_it(tmp_path: Path) -> None:
    assert (await onboarded(MODEL, tmp_path / "pack")).path == tmp_path / "pack"
    with pytest.raises(ModelError):
        await onboarded(tmp_path / "none.gguf", tmp_path / "other")


async def test_of_nodes_that_are_started_at_once_none_is_left(tmp_path: Path) -> None:
    """Whether one fails or nobody wants them any more."""
    common = ["--model", str((await onboarded(MODEL, tmp_path / "pack")).path), "--listen", "127.0.0.1:0", "--no-lan"]
    made: list[NodeProcess] = []

    async def start(name: str, share: str, ready: asyncio.Event) -> NodeProcess:
        made.append(await NodeProcess.start(name, tmp_path, [*common, "--threads", "1", "--experts", share]))
        ready.set()
        return made[-1]

    async def fail(ready: asyncio.Event) -> NodeProcess:
        await ready.wait()
        raise SwarmnodeError("no")

    async def never(ready: asyncio.Event) -> NodeProcess:
        await ready.wait()
        starting.cancel()
        return await start("other", "2/2", asyncio.Event())

    for other, problem in ((fail, SwarmnodeError), (never, asyncio.CancelledError)):
        ready = asyncio.Event()
        starting = asyncio.create_task(all_started([start(other.__name__, "1/2", ready), other(ready)]))
        with pytest.raises(problem):
            await starting
        assert made.pop().process.returncode is not None
        assert len(asyncio.all_tasks()) == 1
    assert made == []
