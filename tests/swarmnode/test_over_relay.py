"""Processes that know nothing of each other but keys and a relay: the same text as locally, whatever the relay does."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.session import GenerateRequest, TokenEvent
from swarmnode.local_swarm import NodeProcess
from swarmnode.onboard import ModelPack
from tests.transport.relay_process import RelayProcess
from transport.identity import Identity

from .backbone.helpers import local_session
from .helpers import poll

REQUEST = GenerateRequest(
    prompt="import os\nimport sys\n\nclass Parser:\n    def __init__(self, filename):\n",
    max_tokens=40,
    sampling=Sampling(temperature=0.8, seed=1),
    digests=True,
)


class Pair:
    """A worker and a backbone, each told the other's key and the relay."""

    def __init__(self, folder: Path, pack: ModelPack, relay: RelayProcess) -> None:
        self._folder, self._pack, self._relay = folder, pack, relay
        self.started: list[NodeProcess] = []

    def peer_id(self, name: str) -> str:
        """A node's key exists before the node, as for a user who has started it once."""
        (self._folder / name).mkdir(exist_ok=True)
        return str(Identity.load_or_create(self._folder / name / "identity.key").peer_id)

    async def worker(self, listen: str = "127.0.0.1:0") -> NodeProcess:
        return await self._start("worker", "backbone", listen, "--experts", "all")

    async def backbone(self, listen: str = "127.0.0.1:0") -> NodeProcess:
        options = ("--no-local-experts", "--context", "256", "--batch", "128")
        return await self._start("backbone", "worker", listen, *options)

    async def _start(self, name: str, other: str, listen: str, *options: str) -> NodeProcess:
        self.peer_id(name)
        arguments = ["--model", str(self._pack.path), "--threads", "1", "--listen", listen, *options]
        network = ["--relay", self._relay.url, "--peer", self.peer_id(other), "--no-port-mapping"]
        node = await NodeProcess.start(name, self._folder, [*arguments, *network])
        self.started.append(node)
        return node


@pytest.fixture
async def relay() -> AsyncIterator[RelayProcess]:
    relay = RelayProcess()
    yield relay
    await relay.end()


@pytest.fixture
async def pair(tmp_path: Path, demo_pack: ModelPack, relay: RelayProcess) -> AsyncIterator[Pair]:
    await relay.start()
    pair = Pair(tmp_path, demo_pack, relay)
    yield pair
    await asyncio.gather(*(node.stop() for node in pair.started))


@pytest.fixture(scope="module")
def expected(demo_pack: ModelPack) -> list[tuple[int, str]]:
    session = local_session(demo_pack)
    try:
        events: list[TokenEvent] = []
        session.generate(REQUEST, events.append)
        return [(e.token, e.digest) for e in events if e.token >= 0]
    finally:
        session.close()


async def generate(backbone: NodeProcess, after: int = -1, then: asyncio.Event | None = None) -> list[tuple[int, str]]:
    """Tokens with the digests of their logits; `then` is set after so many tokens."""
    tokens: list[tuple[int, str]] = []
    async for event in backbone.generate(msgspec.to_builtins(REQUEST)):
        if event["event"] == "token" and event["token"] >= 0:
            tokens.append((event["token"], event["digest"]))
            if len(tokens) == after and then is not None:
                then.set()
    return tokens


async def path_of_its_peer(node: NodeProcess, path: str) -> None:
    """Wait until the node's one peer is there, on this kind of path."""

    async def there() -> bool:
        return [peer["path"] for peer in (await node.status())["peers"]] == [path]

    await poll(there)


async def ping(node: NodeProcess, peer: str, *options: str) -> tuple[int, list[dict[str, object]]]:
    command = [sys.executable, "-m", "swarmnode", "ping", peer, "--state", str(node.state), "--json", *options]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


async def test_two_keys_and_a_relay_are_enough(
    pair: Pair, relay: RelayProcess, expected: list[tuple[int, str]]
) -> None:
    worker, backbone = await asyncio.gather(pair.worker(), pair.backbone())
    await backbone.wait_for("attached", timeout=30)
    assert await generate(backbone) == expected
    await path_of_its_peer(backbone, "loopback")  # the relay has brought them together
    assert (await backbone.wait_for("relay-connected"))["url"] == relay.url
    status = await backbone.status()
    assert status["relays"] == [relay.url]
    assert status["relay_problems"] == {}
    code, pings = await ping(backbone, worker.peer[:6], "-c", "2", "-i", "0.05")
    assert code == 0
    assert [(one["peer"], one["path"]) for one in pings] == [(worker.peer, "loopback")] * 2
    await relay.end(signal.SIGTERM)
    assert (await worker.wait_for("relay-lost"))["reason"]
    assert await generate(backbone) == expected
    assert list((await backbone.status())["relay_problems"]) == [relay.url]
    assert not backbone.events("lost")
    assert await backbone.stop() == 0
    assert (await worker.wait_for("lost"))["peer"] == backbone.peer


async def test_a_backbone_that_starts_before_the_relay_and_a_worker_that_comes_back(
    pair: Pair, relay: RelayProcess, expected: list[tuple[int, str]]
) -> None:
    await relay.end()
    backbone = await pair.backbone()
    assert "refused" in (await backbone.wait_for("relay-failed"))["reason"]
    code, pings = await ping(backbone, pair.peer_id("worker"), "-c", "1")
    assert code == 1
    assert relay.url in str(pings[0]["reason"])
    await relay.start()
    first = await pair.worker()
    await backbone.wait_for("attached", timeout=40)
    first.kill()
    await first.process.wait()
    await pair.worker()
    await backbone.wait_for("attached", 2, timeout=60)
    assert await generate(backbone) == expected


def ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not ipv6(), reason="no IPv6 on this machine: nothing to part two nodes of it with")
async def test_over_the_relay_alone_and_while_it_restarts(
    pair: Pair, relay: RelayProcess, expected: list[tuple[int, str]]
) -> None:
    """One node speaks IPv4 only and the other IPv6 only: the relay is all they have."""
    _, backbone = await asyncio.gather(pair.worker("127.0.0.1:0"), pair.backbone("[::1]:0"))
    await backbone.wait_for("attached", timeout=30)
    await path_of_its_peer(backbone, "relay")
    begun = asyncio.Event()
    generating = asyncio.create_task(generate(backbone, 5, begun))
    await begun.wait()
    await relay.end()
    await relay.start()
    assert await generating == expected
    assert (await backbone.status())["peers"][0]["relay"] == relay.url
    assert not backbone.events("lost")
