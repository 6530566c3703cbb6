"""Nodes of one process, each with its own identity, socket and engine, over real QUIC on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from swarmnode.backbone.session import GenerateRequest
from swarmnode.config import build_config
from swarmnode.node import Node
from swarmnode.onboard import ModelPack

Json = dict[str, Any]


class Events:
    """What a node emitted; wait for an event instead of sleeping."""

    def __init__(self) -> None:
        self.seen: list[Json] = []
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def __call__(self, event: str, **fields: Any) -> None:
        self.seen.append({"event": event, **fields})
        self._loop.call_soon_threadsafe(self._news.set)

    def count(self, event: str) -> int:
        return len([e for e in self.seen if e["event"] == event])

    def last(self, event: str) -> Json:
        return [e for e in self.seen if e["event"] == event][-1]

    async def wait(self, event: str, count: int = 1, timeout: float = 30.0) -> list[Json]:
        try:
            async with asyncio.timeout(timeout):
                while len(found := [e for e in self.seen if e["event"] == event]) < count:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"no {count} × {event!r} within {timeout:g} s; seen: {self.seen}") from None
        return found


def free_udp_port() -> int:
    """A port that was free a moment ago; for tests in which two nodes must know each other before they start."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def poll(check: Callable[[], Awaitable[bool]], timeout: float = 20.0) -> None:
    """Wait for what happens in another process and tells nobody."""
    async with asyncio.timeout(timeout):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def start_node(folder: Path, pack: ModelPack, **given: Any) -> tuple[Node, Events]:
    events = Events()
    config = build_config({"model": pack.path, "threads": 1, **given}, None, state_dir=folder)
    node = Node(config, events)
    await node.start()
    return node, events


@contextlib.asynccontextmanager
async def swarm(
    folder: Path, pack: ModelPack, shares: Sequence[str], **backbone: Any
) -> AsyncIterator[tuple[Node, list[Node]]]:
    """Workers with these holdings and one attached backbone without experts of its own."""
    nodes: list[Node] = []
    try:
        for i, share in enumerate(shares):
            nodes.append((await start_node(folder / f"w{i}", pack, experts=share, name=f"w{i}"))[0])
        settings = {"local_experts": False, "context": 256, "batch": 128, **backbone}
        peers = [node.address for node in nodes]
        front, events = await start_node(folder / "backbone", pack, peers=peers, **settings)
        nodes.append(front)
        await events.wait("attached", len(shares))
        yield front, nodes[:-1]
    finally:
        for node in reversed(nodes):
            await node.close()


async def generate(node: Node, request: GenerateRequest) -> tuple[list[tuple[int, str]], Json]:
    """Tokens with their logit digests, and the result, as the control channel gives them."""
    tokens: list[tuple[int, str]] = []
    results: list[Json] = []

    async def send(event: Json) -> None:
        if event["event"] == "token" and event["token"] >= 0:
            tokens.append((event["token"], event["digest"]))
        elif event["event"] == "result":
            results.append(event["result"])

    await node.operations.answer("generate", {"request": msgspec.to_builtins(request)}, send)
    return tokens, results[0]
