"""What `up --metrics` shows, and that a hostile client of its port costs the node nothing."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from swarmnode import metrics, metrics_listener
from swarmnode.backbone.session import GenerateRequest, GenerateResult
from swarmnode.errors import UsageError
from swarmnode.metrics import MAX_PEERS, Traffic
from swarmnode.metrics_listener import MAX_OPEN, MAX_REQUEST, MetricsListener
from swarmnode.node import Node
from swarmnode.onboard import ModelPack
from transport.errors import Address
from transport.identity import Identity, PeerId

from .helpers import start_node

HERE: Address = ("127.0.0.1", 0)
QUIET: dict[str, Any] = {"listen": "127.0.0.1:0", "metrics": "127.0.0.1:0", "lan": False}
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


async def ask(address: Address | None, request: bytes = GET) -> tuple[int, dict[str, str], str]:
    """Status, headers in lower case, body."""
    assert address is not None
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    head, _, body = answer.decode().partition("\r\n\r\n")
    first, *rest = head.split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in rest), body


def value(page: str, name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    found = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, name
    return sum(found)


async def generate(node: Node, **given: Any) -> GenerateResult:
    assert node.runner is not None
    async for event in node.runner.stream(GenerateRequest(prompt="import os\n", **given)):
        if isinstance(event, GenerateResult):
            return event
    raise AssertionError("no result")


async def test_a_backbone_and_its_worker_show_what_they_did(tmp_path: Path, demo_pack: ModelPack) -> None:
    async with contextlib.AsyncExitStack() as stack:
        worker, _ = await start_node(tmp_path / "w", demo_pack, experts="all", role="worker", **QUIET)
        stack.push_async_callback(worker.close)
        backbone, events = await start_node(
            tmp_path / "b", demo_pack, peers=[worker.address], local_experts=False, context=256, mode="partial", **QUIET
        )
        stack.push_async_callback(backbone.close)
        await events.wait("attached")
        result = await generate(backbone, max_tokens=12)
        _, headers, page = await ask(backbone.metrics_address)
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        assert value(page, "swarmnode_generated_tokens_total") == result.tokens
        assert value(page, "swarmnode_prompt_tokens_total") == result.prompt_tokens
        assert value(page, "swarmnode_generation_steps_total") == result.steps
        assert value(page, "swarmnode_drafted_tokens_accepted_total") == result.drafts_accepted
        assert value(page, "swarmnode_generations_total", stopped_by="length") == 1
        trips = value(page, "swarmnode_dispatch_round_trips_total")
        assert trips == len(demo_pack.manifest.sites) * (result.steps + 1)  # and once for the prompt
        assert value(page, "swarmnode_dispatch_round_trips_total", layer="0") == result.steps + 1
        assert value(page, "swarmnode_dispatch_wait_seconds_total") > 0
        assert value(page, "swarmnode_dispatch_bytes_total", direction="out", layer="1") > 0
        peer = worker.endpoint.peer_id.short
        assert value(page, "swarmnode_worker_calls_total", peer=peer) == trips
        assert 0 < value(page, "swarmnode_peer_rtt_seconds", peer=peer) < 5
        assert value(page, "swarmnode_peers", path="loopback") == 1
        assert value(page, "swarmnode_ready") == 1
        sent = value(page, "swarmnode_transport_bytes_total", path="loopback", direction="out")
        assert sent > value(page, "swarmnode_dispatch_bytes_total", direction="out")

        _, _, served = await ask(worker.metrics_address)
        assert value(served, "swarmnode_served_calls_total") == trips
        assert value(served, "swarmnode_served_rows_total") == value(
            page, "swarmnode_dispatch_rows_total", where="remote"
        )
        assert value(served, "swarmnode_engine_kernel_seconds_total") > 0
        assert value(served, "swarmnode_served_refused_total") == 0
        assert "swarmnode_generated_tokens_total" not in served

        # What a connection moved is not forgotten with it.
        await worker.close()
        await events.wait("lost")
        await asyncio.sleep(metrics_listener.KEPT)  # as long as a page is kept
        _, _, later = await ask(backbone.metrics_address)
        assert value(later, "swarmnode_transport_bytes_total", path="loopback", direction="out") >= sent
        assert value(later, "swarmnode_peers") == 0
        assert "swarmnode_peer_bytes_total{" not in later


async def test_the_port_is_freed_and_one_that_is_taken_is_named(tmp_path: Path, demo_pack: ModelPack) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    where = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(UsageError, match=f"--metrics {where}: .* choose another address"):
        await start_node(tmp_path / "n", demo_pack, experts="all", role="worker", **{**QUIET, "metrics": where})
    taken.close()
    node, _ = await start_node(tmp_path / "n", demo_pack, experts="0:0", role="worker", **{**QUIET, "metrics": where})
    assert (await ask(node.metrics_address))[0] == 200
    assert (await ask(node.metrics_address, b"GET /healthz HTTP/1.0\r\n\r\n"))[2] == "ok\n"
    await node.close()
    with pytest.raises(OSError):  # noqa: PT011  nobody listens any more, in the system's words
        await ask(node.metrics_address)


# ---- the listener alone


@contextlib.asynccontextmanager
async def listener(page: bytes = b"a 1\n", ready: bool = True) -> AsyncIterator[tuple[MetricsListener, list[int]]]:
    made: list[int] = []

    async def render() -> bytes:
        made.append(len(made))
        return page

    one = MetricsListener(HERE, render, lambda: ready)
    await one.start()
    try:
        yield one, made
    finally:
        await one.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (GET, 200),
        (b"GET /metrics?name=x HTTP/1.1\r\n\r\n", 200),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../x HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"\xff\x00\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 503),
    ],
)
async def test_requests_get_an_answer_of_their_own_kind(request_: bytes, status: int) -> None:
    async with listener(ready=False) as (one, _):
        found, headers, body = await ask(one.address, request_)
        assert (found, headers["connection"]) == (status, "close")
        assert (body == "") == request_.startswith(b"HEAD")


async def test_a_page_is_made_once_a_second_however_many_ask() -> None:
    async with listener() as (one, made):
        answers = await asyncio.gather(*(ask(one.address) for _ in range(10)))
        assert {body for _, _, body in answers} == {"a 1\n"}
        assert len(made) == 1


@pytest.mark.parametrize("size", [MAX_REQUEST, MAX_REQUEST * 4, 512 << 10])
async def test_a_request_that_is_too_large_is_told_so(size: int) -> None:
    async with listener() as (one, _):
        status, headers, body = await ask(one.address, b"GET /metrics HTTP/1.1\r\nA: " + b"x" * size + b"\r\n\r\n")
        assert (status, body) == (431, f"a request has at most {MAX_REQUEST} bytes\n")
        assert headers["content-length"] == str(len(body))


async def test_a_request_that_does_not_end_is_cut_off() -> None:
    async with listener() as (one, _):
        reader, writer = await asyncio.open_connection(*one.address)
        writer.write(b"GET /metrics HTTP/1.1\r\nA: " + b"x" * MAX_REQUEST)
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 431 ")
        with contextlib.suppress(ConnectionError):
            while True:  # it goes on; nobody listens for ever
                writer.write(b"x" * MAX_REQUEST)
                await writer.drain()
        writer.close()
        assert (await ask(one.address))[0] == 200


async def test_who_is_slow_loses_the_connection_and_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_listener, "TIMEOUT", 1.0)
    page = b"x" * (8 << 20)  # larger than what the system buffers
    async with listener(page) as (one, _):
        slow = [await asyncio.open_connection(*one.address) for _ in range(MAX_OPEN)]
        for number, (_, writer) in enumerate(slow):
            writer.write(GET if number % 2 else b"GET /me")  # half of them read nothing
            await writer.drain()
        assert (await ask(one.address))[2] == page.decode()
        for reader, _ in slow[::2]:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
        async with asyncio.timeout(20):
            while one._open:
                await asyncio.wait(set(one._open))
        for _, writer in slow:
            writer.transport.abort()
        assert (await ask(one.address))[2] == page.decode()


async def test_closing_ends_what_is_under_way() -> None:
    async with listener() as (one, _):
        reader, writer = await asyncio.open_connection(*one.address)
        writer.write(b"GET /")
        assert (await ask(one.address))[0] == 200  # so that one has been taken too
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_a_page_that_cannot_be_made_breaks_no_more_than_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> bytes:
        raise ValueError("no")

    one = MetricsListener(HERE, fail, lambda: True)
    await one.start()
    assert (await ask(one.address))[0] == 500
    assert "metrics_failed" in caplog.text
    assert (await ask(one.address, b"GET /healthz HTTP/1.1\r\n\r\n"))[0] == 200
    await one.close()


# ---- what would grow


def connection(peer: PeerId, out: int = 10, back: int = 5, path: str = "relay") -> Any:
    stats = SimpleNamespace(bytes_out=out, bytes_in=back, lost=1, path=path, rtt_s=0.02)
    return SimpleHashable(peer, stats)


class SimpleHashable:
    def __init__(self, peer: PeerId, stats: Any) -> None:
        self.peer, self._stats = peer, stats

    def stats(self) -> Any:
        return self._stats


def family(found: list[Metric], name: str) -> Metric:
    return next(one for one in found if one.name == name)


def test_traffic_only_grows_whatever_comes_and_goes() -> None:
    traffic, peer = Traffic(), Identity.generate().peer_id
    first, second = connection(peer, 100), connection(peer, 50)
    traffic.update([first, second])
    assert traffic.by_path["relay", "out"] == 150
    first._stats.bytes_out = 130
    first._stats.path = "direct-lan"
    traffic.update([second])  # the first one is over: its last bytes count
    assert (traffic.by_path["relay", "out"], traffic.by_path["direct-lan", "out"]) == (150, 30)
    assert traffic.by_peer[peer][0] == 180
    traffic.update([])
    assert (sum(traffic.by_path.values()), traffic.by_peer, traffic.lost) == (190, {}, 2)
    assert not traffic._seen


def test_a_peer_with_the_same_short_id_does_not_spoil_the_page_and_many_do_not_swell_it() -> None:
    raw = Identity.generate().peer_id.raw
    twins = [PeerId(raw), PeerId(raw[:-1] + bytes([raw[-1] ^ 1]))]
    assert twins[0].short == twins[1].short
    others = [Identity.generate(number.to_bytes(32, "big")).peer_id for number in range(1, 100)]
    traffic = Traffic()
    traffic.update([connection(peer, 1000 - number) for number, peer in enumerate([*twins, *others])])
    found = list(metrics._peers(traffic))
    shown = [sample.labels["peer"] for sample in family(found, "swarmnode_peer_rtt_seconds").samples]
    assert len(shown) == len(set(shown)) == MAX_PEERS
    assert shown[0] == twins[0].short
    assert family(found, "swarmnode_peers_without_series").samples[0].value == 101 - MAX_PEERS
    assert len(re.findall("relay", str(family(found, "swarmnode_peers").samples))) == 1
