from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.bulk.frames import (
    Absent,
    AskExperts,
    AskHoldings,
    ExpertFollows,
    FailCode,
    Failed,
    HoldingsFollow,
    ManifestFollows,
    Request,
)
from swarmnode.bulk.server import BulkServer
from swarmnode.bulk.source import LocalSource, PeerSource
from swarmnode.errors import SourceFailed
from tests.swarmnode.bulk.nodes import Model, PartProvider, claims, half_an_expert, head, nodes
from transport.stream import Stream


async def test_many_fetches_are_few_requests(model: Model) -> None:
    async with nodes(model) as swarm:
        node = await swarm.serve()
        source = await swarm.source(node)
        assert source.held(0) == 0xFFFF
        assert source.held(7) == 0
        fetched = await asyncio.gather(*(source.fetch(site, e) for site in range(3) for e in range(16)))
        for n, slices in enumerate(fetched):
            assert b"".join(slices) == model.slices(n // 16, n % 16)
            assert [len(piece) for piece in slices] == [t.stride for t in model.manifest.site_tensors(n // 16)]
        assert node.server is not None
        assert node.server.requests == 1 + 3  # its holdings, and one per site
        assert source.received_bytes < 1.01 * model.total


async def test_another_model_is_told_at_once(model: Model) -> None:
    async with nodes(model) as swarm:
        node = await swarm.serve()
        other = msgspec.structs.replace(model.manifest, model_hash="ab" * 32)
        with pytest.raises(SourceFailed, match=r"w refused: model abababababababab… is not here") as caught:
            await PeerSource.open(await swarm.dial(node), other, "w")
        assert caught.value.not_held


async def test_what_was_forgotten_is_no_longer_held(model: Model) -> None:
    provider = PartProvider(model, {0: {1, 2}}, hidden=[(0, 2)])
    async with nodes(model) as swarm:
        source = await swarm.source(await swarm.serve(provider))
        assert source.held(0) == 0b110
        assert b"".join(await source.fetch(0, 1)) == model.slices(0, 1)
        with pytest.raises(SourceFailed, match="node 0 does not have expert 2 of site 0 any more") as caught:
            await source.fetch(0, 2)
        assert caught.value.not_held
        assert source.held(0) == 0b010
        provider.hidden.clear()
        await source.refresh()
        assert source.held(0) == 0b110


async def test_without_a_digest_nothing_is_taken_from_a_peer(model: Model) -> None:
    rows = [list(row) for row in model.manifest.digests]
    rows[1][4] = ""
    manifest = msgspec.structs.replace(model.manifest, digests=tuple(map(tuple, rows)))
    async with nodes(model) as swarm:
        source = await PeerSource.open(await swarm.dial(await swarm.serve()), manifest)
        assert source.held(1) == 0xFFFF & ~(1 << 4)
        with pytest.raises(SourceFailed, match="no digest") as caught:
            await source.fetch(1, 4)
        assert caught.value.not_held


@pytest.mark.parametrize(
    ("answer", "why", "kind"),
    [
        (b"", "node 0 ended its answer too early", "lost"),
        (b"\x83\x01", "ended its answer too early", "lost"),
        (Absent(9).encode(), "Absent.* is due", "corrupt"),
        (ExpertFollows(3, 1 << 60).encode(), "size=1152921504606846976.* is due", "corrupt"),
        (ExpertFollows(4, 5).encode(), "is due", "corrupt"),
        (ManifestFollows(3).encode() + b"abc", "is due", "corrupt"),
        (head(1, b"x" * 32), "kind 1 where an answer is due", "corrupt"),
        (b"\x83\x01\xff\xff", "1024 at most", "corrupt"),
        (head(131, b"", version=3), "protocol version 3, this node speaks 1", "corrupt"),
        (Failed(FailCode.BUSY, "later").encode(), "node 0 refused: later", "busy"),
        (Failed(FailCode.UNKNOWN_MODEL, "none\nsuch").encode(), "refused: none such", "not_held"),
    ],
)
async def test_bad_answers(model: Model, answer: bytes, why: str, kind: str) -> None:
    async def script(request: Request, stream: Stream) -> None:
        await stream.write(answer)
        await stream.finish()

    async with nodes(model) as swarm:
        source = await swarm.source(await swarm.scripted(claims(model, script)))
        with pytest.raises(SourceFailed, match=why) as caught:
            await asyncio.wait_for(source.fetch(0, 3), 20)
        failed = caught.value
        assert "\n" not in str(failed)
        assert [k for k in ("corrupt", "busy", "not_held") if getattr(failed, k)] == [kind] * (kind != "lost")


@pytest.mark.parametrize(
    "answer",
    [
        ManifestFollows(4).encode(),
        HoldingsFollow(1 << 50).encode(),
        HoldingsFollow(8).encode() + bytes.fromhex("0000110000000000"),
    ],
)
async def test_bad_holdings(model: Model, answer: bytes) -> None:
    async def script(request: Request, stream: Stream) -> None:
        await stream.write(answer)
        await stream.finish()

    async with nodes(model) as swarm:
        with pytest.raises(SourceFailed) as caught:
            await swarm.source(await swarm.scripted(script))
        assert caught.value.corrupt


async def test_silence_ends_a_fetch(model: Model) -> None:
    async def script(request: Request, stream: Stream) -> None:
        await stream.write(half_an_expert(model, request))
        await asyncio.sleep(60)

    async with nodes(model) as swarm:
        source = await swarm.source(await swarm.scripted(claims(model, script)), stall_s=0.4)
        results = await asyncio.wait_for(
            asyncio.gather(*(source.fetch(s, e) for s in range(3) for e in range(4)), return_exceptions=True), 20
        )
        assert {str(result) for result in results} == {"node 0 sent nothing for 0.4 s"}
        assert source._timer is None


async def test_a_peer_that_vanishes(model: Model) -> None:
    async def script(request: Request, stream: Stream) -> None:
        await stream.write(half_an_expert(model, request))
        await swarm.members[0].endpoint.close()

    async with nodes(model) as swarm:
        source = await swarm.source(await swarm.scripted(claims(model, script)))
        with pytest.raises(SourceFailed, match="node 0 was lost"):
            await asyncio.wait_for(source.fetch(0, 3), 30)
        assert source.held(0) == 0


async def test_given_up_fetches_end_the_request(model: Model) -> None:
    ended = asyncio.Event()

    async def script(request: Request, stream: Stream) -> None:
        await stream.write(half_an_expert(model, request))
        try:
            await stream.read(1)
            await stream.read(1)
        finally:
            ended.set()

    async with nodes(model) as swarm:
        source = await swarm.source(await swarm.scripted(claims(model, script)))
        first, second = (asyncio.create_task(source.fetch(0, e)) for e in (3, 4))
        while source.received_bytes < model.manifest.expert_bytes(0) // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        first.cancel()
        await asyncio.sleep(0)
        assert source._open
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await asyncio.wait_for(ended.wait(), 20)
        while source._open:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_closing_ends_everything(model: Model) -> None:
    async def script(request: Request, stream: Stream) -> None:
        await asyncio.sleep(60)

    async with nodes(model) as swarm:
        source = await swarm.source(await swarm.scripted(claims(model, script)))
        fetching = [asyncio.create_task(source.fetch(s, e)) for s in range(3) for e in range(3)]
        await asyncio.sleep(0.05)
        await source.close()
        results = await asyncio.gather(*fetching, return_exceptions=True)
        assert all(isinstance(result, SourceFailed) for result in results)
        with pytest.raises(SourceFailed, match="was closed here"):
            await source.fetch(0, 0)


async def test_both_ends_of_a_connection_may_ask(model: Model) -> None:
    async with nodes(model) as swarm:
        node = await swarm.serve()
        source = await swarm.source(node)
        await source.fetch(0, 0)
        provider = model.provider()
        serving = asyncio.create_task(BulkServer(lambda _: provider).serve(await swarm.dial(node)))
        back = await PeerSource.open(node.connections[0], model.manifest)
        assert b"".join(await back.fetch(1, 1)) == model.slices(1, 1)
        await back.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_local_files_are_a_source_too(model: Model) -> None:
    source = LocalSource(model.provider(), "this machine")
    assert source.held(2) == 0xFFFF
    slices = await source.fetch(2, 7)
    assert b"".join(bytes(piece) for piece in slices) == model.slices(2, 7)
    with pytest.raises(SourceFailed, match="this machine: expert 99 of site 2 does not exist"):
        await source.fetch(2, 99)


@settings(max_examples=30)
@given(answers=st.lists(st.binary(max_size=64), min_size=1, max_size=20))
def test_fuzz_answers(model: Model, answers: list[bytes]) -> None:
    """Whatever a peer answers, a fetch ends with slices of the right size or SourceFailed, and the next one works."""

    async def run() -> None:
        waiting = list(answers)

        async def script(request: Request, stream: Stream) -> None:
            if waiting and not isinstance(request, AskHoldings):
                await stream.write(waiting.pop() or b"\0")
                await stream.finish()
                return
            assert isinstance(request, AskExperts)
            await stream.write(ExpertFollows(request.experts[0], model.manifest.expert_bytes(0)).encode())
            await stream.write(model.slices(0, request.experts[0]))
            await stream.finish()

        async with nodes(model) as swarm:
            source = await swarm.source(await swarm.scripted(claims(model, script)))
            while waiting:
                with pytest.raises(SourceFailed):
                    await asyncio.wait_for(source.fetch(0, 3), 20)
            assert b"".join(await source.fetch(0, 3)) == model.slices(0, 3)

    asyncio.run(run())
