"""What people see who cannot come in, or must go: one clear line, and an exit code that says it. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.control import Json, request_one
from swarmnode.dispatch.lane import dispatch_lane
from swarmnode.local_swarm import FoundedSwarm, NodeProcess
from swarmnode.onboard import ModelPack
from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.errors import TransportError
from transport.identity import Identity, PeerId

from .helpers import poll

SMALL = ("--context", "256", "--batch", "128")
HERE = ("--listen", "127.0.0.1:0", "--no-lan", "--threads", "1")


async def run_up(*arguments: str, state: Path, timeout: float = 60.0) -> tuple[int, list[str], str]:
    """`swarmnode up …` that is to end by itself: exit code, lines on standard error, standard output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "swarmnode", "up", *arguments, *HERE, "--state", str(state), "--headless",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, errors = await asyncio.wait_for(process.communicate(), timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode is not None
    return process.returncode, errors.decode().splitlines(), out.decode()


async def run_ticket(*arguments: str, state: Path) -> tuple[int, list[str], str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "swarmnode", "ticket", *arguments, "--state", str(state),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, errors = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode is not None
    return process.returncode, errors.decode().splitlines(), out.decode()


async def run(*command: str) -> str:
    """What a command says on standard error where it fails, else nothing."""
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, errors = await process.communicate()
    return errors.decode().strip() or str(process.returncode) if process.returncode else ""


async def new_ticket(founder: NodeProcess, **terms: object) -> Json:
    wanted: dict[str, Any] = {"expires_s": 600, "uses": 0, "role": "worker", **terms}  # Any: as it goes into JSON
    return await request_one(founder.state, "ticket", **wanted)


def is_one_line(outcome: tuple[int, list[str], str], *words: str) -> None:
    code, lines, _ = outcome
    assert code != 0, outcome
    assert len(lines) == 1, outcome
    assert lines[0].startswith("swarmnode: ")
    for word in words:
        assert word in lines[0], lines[0]


@contextlib.asynccontextmanager
async def founded(folder: Path, pack: ModelPack) -> AsyncIterator[FoundedSwarm]:
    async with FoundedSwarm(folder, pack.path) as swarm:
        await swarm.found("--memory", "1M", *SMALL)
        yield swarm


async def test_tickets_that_let_nobody_in(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with founded(tmp_path, demo_pack) as swarm:
        founder, good = swarm.founder, swarm.ticket
        once = (await new_ticket(founder, uses=1))["ticket"]
        short = (await new_ticket(founder, expires_s=0.5))["ticket"]
        revoked = await new_ticket(founder)
        assert (await run_ticket("revoke", revoked["id"], state=founder.state))[0] == 0
        first = await swarm.join("first", "--memory", "1M", ticket=once)
        wrong = good[:-20] + ("a" if good[-20] != "a" else "b") + good[-19:]
        cases = {
            "mistyped": (wrong, "ticket"),
            "expired": (short, "this ticket expired"),
            "used up": (once, "this ticket was used up (1 of 1)"),
            "revoked": (revoked["ticket"], "this ticket was revoked"),
        }
        outcomes = await asyncio.gather(*(run_up(ticket, state=tmp_path / name) for name, (ticket, _) in cases.items()))
        for outcome, (_, line) in zip(outcomes, cases.values(), strict=True):
            is_one_line(outcome, line)
        busy, worker, role = await asyncio.gather(
            run_up(good, state=founder.state),
            run_ticket(state=first.state),
            run_up(good, "--role", "backbone", state=tmp_path / "role"),
        )
        is_one_line(busy, "a node runs here already")
        is_one_line(worker, "only the node that founded the swarm gives tickets")
        is_one_line(role, "--role backbone with a ticket for workers")


async def test_nodes_that_are_in_a_swarm_already(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with founded(tmp_path / "a", demo_pack) as swarm, founded(tmp_path / "b", demo_pack) as other:
        worker = await swarm.join("worker", "--memory", "200K")
        assert await worker.stop() == 0
        model = ["--model", str(demo_pack.path)]
        outcomes = await asyncio.gather(
            run_up(swarm.ticket, *model, state=tmp_path / "both"),
            run_up("--model", str(tmp_path / "none.gguf"), state=tmp_path / "c"),
            run_up(other.ticket, state=worker.state),
            other.founder.stop(),
        )
        is_one_line(outcomes[0], "a ticket and --model")
        is_one_line(outcomes[1], "none.gguf")
        is_one_line(outcomes[2], "this node is in swarm", "--state")
        late = await asyncio.gather(run_up(*model, state=worker.state), run_up(swarm.ticket, state=other.founder.state))
        is_one_line(late[0], "this node is a member of swarm")
        is_one_line(late[1], "this node founded a swarm")
        is_one_line(await run_up("--memory", "50K", state=worker.state), "holds no expert", "--memory 124.5K")


async def refusal(endpoint: Endpoint, peer: PeerId, address: tuple[str, int], lane: str) -> str:
    """Why a connection is not to be had, or does not last."""
    try:
        connection = await endpoint.dial(peer, [address], lane=lane)
    except TransportError as error:
        return str(error)
    await asyncio.wait_for(connection.wait_closed(), 20.0)
    return str(connection.close_reason)


async def test_a_stranger_is_refused_on_every_lane(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with founded(tmp_path, demo_pack) as swarm:
        worker = await swarm.join("worker", "--memory", "8M")
        await worker.wait_for("holding", timeout=40.0)
        stranger = await Endpoint.bind(Identity.generate(), TransportConfig(), listen=("127.0.0.1", 0))
        try:
            for node in (swarm.founder, worker):
                peer, address = node.address.split("@")
                host, port = address.rsplit(":", 1)
                calls = [dispatch_lane(PeerId.parse(peer)), dispatch_lane(stranger.peer_id)]
                for lane in ["swarm", "bulk", "join", "x", *calls]:
                    why = await refusal(stranger, PeerId.parse(peer), (host, int(port)), lane)
                    assert "not a member" in why or "ticket" in why, (lane, why)
        finally:
            await stranger.close()
        for node in (swarm.founder, worker):
            status = await node.status()
            assert str(stranger.peer_id) not in {peer["peer"] for peer in status["peers"]}
            assert len(status["swarm"]["members"]) == 1


async def test_an_expelled_member_is_told_and_ends(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with founded(tmp_path, demo_pack) as swarm:
        worker, other = await asyncio.gather(
            swarm.join("worker", "--memory", "4M"), swarm.join("other", "--memory", "4M")
        )
        await worker.wait_for("holding", timeout=40.0)
        code, _, out = await run_ticket("expel", worker.peer[:12], state=swarm.founder.state)
        assert (code, out.strip()) == (0, f"expelled {worker.peer}")
        assert await asyncio.wait_for(worker.process.wait(), 20) == 1
        await worker.stop()
        lines = (worker.state / "stderr.txt").read_text().splitlines()
        assert lines == ["swarmnode: this node was expelled from the swarm: ask its founder"]

        async def forgotten() -> bool:
            views = [(await node.status())["swarm"]["members"] for node in (swarm.founder, other)]
            return all(worker.peer not in {member["peer"] for member in view} for view in views)

        await poll(forgotten)
        is_one_line(await run_up(swarm.ticket, state=worker.state), "expelled")


async def test_of_two_nodes_with_one_key_the_older_ends(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with founded(tmp_path, demo_pack) as swarm:
        worker = await swarm.join("worker", "--memory", "1M")
        (tmp_path / "twin").mkdir()
        for name in ("identity.key", "swarm"):
            await run("cp", "-a", str(worker.state / name), str(tmp_path / "twin"))
        await worker.wait_for("holding", timeout=40.0)
        twin = await swarm.again("twin", "--memory", "1M")
        assert await asyncio.wait_for(worker.process.wait(), 30) == 1
        (line,) = (worker.state / "stderr.txt").read_text().splitlines()
        assert line.startswith("swarmnode: another node uses this node's key")
        assert "--state" in line
        await twin.wait_for("holding", timeout=40.0)  # the later one is the node now
        assert len((await swarm.founder.status())["swarm"]["members"]) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk needs root")
async def test_a_disk_that_fills_is_one_line_and_the_rest_serves(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with founded(tmp_path, demo_pack) as swarm:
        disk = tmp_path / "worker"
        disk.mkdir()
        problem = await run("mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk))
        if problem:
            pytest.skip(f"cannot mount a tmpfs here: {problem}")
        try:
            worker = await swarm.join("worker", "--memory", "8M")
            (disk / "ballast").write_bytes(bytes(max(0, shutil.disk_usage(disk).free - (1 << 20))))
            trouble = await worker.wait_for("holding-trouble", timeout=40.0)
            assert "\n" not in trouble["error"]
            assert "disk" in trouble["error"] or "space" in trouble["error"]

            async def reported() -> bool:
                return bool((await worker.status())["swarm"]["trouble"])

            await poll(reported)
            assert worker.process.returncode is None
        finally:
            await swarm.stop()
            await run("umount", "-l", str(disk))
