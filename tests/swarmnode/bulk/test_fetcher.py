from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

import swarmnode
from swarmnode.bulk.fetcher import Fetcher
from swarmnode.bulk.frames import Request
from swarmnode.bulk.provider import StoreProvider
from swarmnode.bulk.source import LocalSource, Source
from swarmnode.errors import FetchFailed, ModelError, SourceFailed
from swarmnode.model import store as store_module
from swarmnode.model.slicing import Buffer
from swarmnode.model.store import SliceStore
from tests.swarmnode.bulk.nodes import Model, Node, PartProvider, claims, half_an_expert, nodes
from transport.stream import Stream

ROOT = Path(swarmnode.__file__).parent.parent
SOME = {0: range(5), 2: range(2, 8)}
needs_sigkill = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")


@pytest.fixture
async def store(model: Model, store_folder: Path) -> AsyncIterator[SliceStore]:
    with SliceStore(store_folder, model.manifest) as opened:
        yield opened


async def run(fetcher: Fetcher) -> None:
    await asyncio.wait_for(fetcher.run(), 60)


def sent(node: Node) -> int:
    assert node.server is not None
    return node.server.bytes_sent


async def test_everything_from_one_peer(model: Model, store: SliceStore) -> None:
    seen: list[tuple[int, int, int]] = []
    async with nodes(model) as swarm:
        node = await swarm.serve()
        source = await swarm.source(node)
        fetcher = Fetcher(store, model.manifest, model.everything, lambda: [source], lambda *f: seen.append(f))
        await run(fetcher)
        model.check(store, model.everything)
        assert model.total <= fetcher.received_bytes <= 1.05 * model.total
        assert [figures[1] for figures in seen] == [model.total] * len(seen)
        assert seen == sorted(seen)
        assert seen[-1] == (model.total, model.total, fetcher.received_bytes)

        again = Fetcher(store, model.manifest, model.everything, lambda: [])
        await run(again)  # nothing is missing: nobody is needed
        assert again.received_bytes == 0


async def test_three_sources_share_the_work(model: Model, store: SliceStore) -> None:
    async with nodes(model) as swarm:
        parts = [
            PartProvider(model, {0: range(16), 1: range(8)}),
            PartProvider(model, {0: range(16), 1: range(4, 16)}),
            PartProvider(model, {0: range(16), 2: range(16)}),
        ]
        members = [await swarm.serve(part) for part in parts]
        sources = [await swarm.source(member) for member in members]
        fetcher = Fetcher(store, model.manifest, model.everything, lambda: sources)
        await run(fetcher)
        model.check(store, model.everything)
        asked = [read for part in parts for read in part.reads]
        assert len(asked) == len(set(asked)) == 48
        assert fetcher.received_bytes <= 1.05 * model.total


async def test_a_corrupt_peer_is_named_and_banned(model: Model, store: SliceStore) -> None:
    banned: list[tuple[str, str]] = []
    async with nodes(model) as swarm:
        bad = PartProvider(model, model.everything, corrupt=[(s, e) for s in range(3) for e in range(16)])
        sources = [await swarm.source(await swarm.serve(bad), "mallory"), await swarm.source(await swarm.serve())]
        fetcher = Fetcher(
            store, model.manifest, model.everything, lambda: sources, on_banned=lambda *who: banned.append(who)
        )
        await run(fetcher)
        model.check(store, model.everything)
        assert [name for name, _ in banned] == ["mallory"]
        assert "mallory sent a wrong expert" in banned[0][1]
        assert fetcher.banned == dict(banned)
        assert len(bad.reads) <= 2
        assert fetcher.received_bytes <= 1.05 * model.total


async def test_only_corrupt_peers_are_a_clear_error(model: Model, store: SliceStore) -> None:
    async with nodes(model) as swarm:
        bad = PartProvider(model, model.everything, corrupt=[(1, 5)])
        source = await swarm.source(await swarm.serve(bad), "mallory")
        fetcher = Fetcher(store, model.manifest, {1: [5]}, lambda: [source], patience_s=0.5)
        with pytest.raises(FetchFailed) as caught:
            await run(fetcher)
        assert str(caught.value) == (
            "nobody has expert 5 of site 1 (0.0 MB) for 0.5 s; mallory sent a wrong expert 5 of site 1; "
            "start a node that has them or give the model file"
        )


async def test_a_peer_that_vanishes_in_the_middle(model: Model, store: SliceStore) -> None:
    async with nodes(model) as swarm:
        first, second = await swarm.serve(), await swarm.serve()
        sources = [await swarm.source(first), await swarm.source(second)]
        killed: list[asyncio.Task[None]] = []

        def progress(done: int, total: int, received: int) -> None:
            if done > total // 3 and not killed:
                killed.append(asyncio.create_task(first.close()))

        fetcher = Fetcher(store, model.manifest, model.everything, lambda: sources, progress)
        await run(fetcher)
        model.check(store, model.everything)
        assert killed
        assert not fetcher.banned
        assert fetcher.received_bytes <= 1.05 * model.total


async def test_a_peer_that_stalls(model: Model, store: SliceStore) -> None:
    async def script(request: Request, stream: Stream) -> None:
        await stream.write(half_an_expert(model, request))
        await asyncio.sleep(60)

    async with nodes(model) as swarm:
        stalling = await swarm.source(await swarm.scripted(claims(model, script)), stall_s=0.4)
        good = await swarm.source(await swarm.serve())
        fetcher = Fetcher(store, model.manifest, SOME, lambda: [stalling, good])
        await run(fetcher)
        model.check(store, SOME)
        assert fetcher.received_bytes <= 12 * model.manifest.expert_bytes(0)


async def test_nobody_has_it(model: Model, store: SliceStore) -> None:
    async with nodes(model) as swarm:
        part = PartProvider(model, {0: range(16), 1: range(1, 16)})
        source = await swarm.source(await swarm.serve(part))
        fetcher = Fetcher(store, model.manifest, model.everything, lambda: [source], patience_s=0.5)
        with pytest.raises(
            FetchFailed,
            match=r"^nobody has experts 0 of site 1, 0 of site 2, 1 of site 2, 2 of site 2 and 13 more \(0.4 MB\) "
            r"for 0.5 s; start a node",
        ):
            await run(fetcher)
    assert store.missing(model.everything) == {1: [0], 2: list(range(16))}  # the rest has come


async def test_a_peer_that_claims_what_it_does_not_have(model: Model, store: SliceStore) -> None:
    async with nodes(model) as swarm:
        liar = PartProvider(model, model.everything, hidden=[(0, 3)])
        source = await swarm.source(await swarm.serve(liar), "liar")
        fetcher = Fetcher(store, model.manifest, {0: [2, 3]}, lambda: [source], patience_s=0.5)
        with pytest.raises(FetchFailed, match=r"nobody has expert 3 of site 0"):
            await run(fetcher)
        assert store.holdings() == {0: (2,)}


async def test_sources_may_come_late(model: Model, store: SliceStore) -> None:
    """From a worker that is itself still fetching, as it gets things; and from one that starts later."""
    async with nodes(model) as swarm:
        part = PartProvider(model, {0: range(16)})
        sources: list[Source] = [await swarm.source(await swarm.serve(part))]

        def progress(done: int, total: int, received: int) -> None:
            if done == total // 3:
                late = LocalSource(PartProvider(model, {1: range(16), 2: range(16)}), "late")
                asyncio.get_running_loop().call_later(0.3, sources.append, late)

        await run(Fetcher(store, model.manifest, model.everything, lambda: sources, progress))
        model.check(store, model.everything)


async def test_two_fetching_nodes_serve_each_other(model: Model, tmp_path: Path) -> None:
    with (
        SliceStore(tmp_path / "one", model.manifest) as one,
        SliceStore(tmp_path / "two", model.manifest) as two,
    ):
        one.fill_from_source(model.source, {0: range(16), 1: range(8)})
        two.fill_from_source(model.source, {1: range(8, 16), 2: range(16)})
        async with nodes(model) as swarm:
            ends = [await swarm.serve(StoreProvider(one)), await swarm.serve(StoreProvider(two))]
            sources = [await swarm.source(end) for end in ends]
            await asyncio.gather(
                run(Fetcher(one, model.manifest, model.everything, lambda: [sources[1]])),
                run(Fetcher(two, model.manifest, model.everything, lambda: [sources[0]])),
            )
        model.check(one, model.everything)
        model.check(two, model.everything)


async def test_a_source_with_a_bug_harms_nobody(
    model: Model, store: SliceStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Buggy(LocalSource):
        async def fetch(self, site: int, expert: int) -> Sequence[Buffer]:
            raise KeyError("oops")

    sources = [Buggy(model.provider(), "buggy"), LocalSource(model.provider(), "good")]
    await run(Fetcher(store, model.manifest, SOME, lambda: sources))
    model.check(store, SOME)
    assert "bulk_source_broke" in caplog.text


async def test_wrong_sizes_are_corrupt(model: Model, store: SliceStore) -> None:
    class Short(LocalSource):
        async def fetch(self, site: int, expert: int) -> Sequence[Buffer]:
            return [b"abc"]

    sources = [Short(model.provider(), "short"), LocalSource(model.provider(), "good")]
    fetcher = Fetcher(store, model.manifest, SOME, lambda: sources)
    await run(fetcher)
    model.check(store, SOME)
    assert list(fetcher.banned) == ["short"]


async def test_cancelled_it_keeps_what_has_come(model: Model, store_folder: Path) -> None:
    with SliceStore(store_folder, model.manifest) as store:
        enough = asyncio.Event()

        def progress(done: int, total: int, received: int) -> None:
            if done > total // 2:
                enough.set()

        source = LocalSource(model.provider(), "good")
        fetching = asyncio.create_task(
            Fetcher(store, model.manifest, model.everything, lambda: [source], progress).run()
        )
        await asyncio.wait_for(enough.wait(), 30)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        held = store.holdings()
        shutil.copytree(store_folder, store_folder.with_name("copy"))  # as a crash right now would leave it
    with SliceStore(store_folder.with_name("copy"), model.manifest) as reopened:
        assert reopened.holdings() == held
        reopened.verify()


async def test_no_room_is_told_before_anything_is_asked(
    model: Model, store: SliceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(store.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelError, match=r"1.3 MB are to be stored, 0.0 MB are free; make room"):
        await run(Fetcher(store, model.manifest, model.everything, lambda: []))


async def test_a_failing_disk_is_one_line(model: Model, store: SliceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    source = LocalSource(model.provider(), "good")
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "flush_file", full)
        with pytest.raises(ModelError, match=r"cannot be written \(No space left on device\)"):
            await run(Fetcher(store, model.manifest, SOME, lambda: [source]))
    await run(Fetcher(store, model.manifest, SOME, lambda: [source]))
    model.check(store, SOME)


async def test_a_member_that_is_busy_is_asked_again(model: Model, store: SliceStore) -> None:
    class Busy(LocalSource):
        calls = 0

        async def fetch(self, site: int, expert: int) -> Sequence[Buffer]:
            self.calls += 1
            if self.calls == 1:
                raise SourceFailed("busy", busy=True)
            return await super().fetch(site, expert)

    source = Busy(model.provider(), "busy")
    await run(Fetcher(store, model.manifest, {0: [1, 2]}, lambda: [source]))
    assert store.holdings() == {0: (1, 2)}


async def child(model: Model, store: Path, peers: Sequence[Node], **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("fetch_child.py")),
        str(model.folder),
        str(store),
        "0,1,2",
        *(f"{peer.endpoint.peer_id}@{peer.endpoint.address[1]}" for peer in peers),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


async def lines(process: asyncio.subprocess.Process, until: Callable[[str], bool]) -> list[str]:
    assert process.stdout is not None
    seen = []
    async with asyncio.timeout(60):
        while line := (await process.stdout.readline()).decode():
            seen.append(line.rstrip())
            if until(line):
                break
    return seen


@needs_sigkill
async def test_killed_in_the_middle_it_fetches_almost_nothing_twice(model: Model, store_folder: Path) -> None:
    chance = random.Random(4)
    async with nodes(model) as swarm:
        members = [await swarm.serve(), await swarm.serve()]
        kill_at = chance.uniform(0.3, 0.7) * model.total
        process = await child(model, store_folder, members)
        await lines(process, lambda line: line[0].isdigit() and int(line.split()[0]) >= kill_at)
        process.kill()
        await process.wait()
        before = sum(map(sent, members))
        assert 0.3 * model.total < before < 0.8 * model.total
        process = await child(model, store_folder, members)
        seen = await lines(process, lambda line: line.startswith("done"))
        assert await process.wait() == 0
        assert seen[-1] == "done"
        assert sum(map(sent, members)) <= 1.05 * model.total
    with SliceStore(store_folder, model.manifest) as store:
        model.check(store, model.everything)


@needs_sigkill
async def test_a_full_disk_is_one_line_and_nothing_is_lost(model: Model, store_folder: Path) -> None:
    limit = 10 * max(tensor.stride for tensor in model.manifest.tensors) + 100
    async with nodes(model) as swarm:
        members = [await swarm.serve()]
        process = await child(model, store_folder, members, LIMIT=str(limit))
        seen = await lines(process, lambda line: line.startswith("error"))
        assert await process.wait() == 0
        assert seen[-1] == f"error {store_folder}: cannot be written (File too large)"
        with SliceStore(store_folder, model.manifest) as store:
            held = sum(map(len, store.holdings().values()))
            assert held >= 10
            store.verify()
        process = await child(model, store_folder, members)
        await lines(process, lambda line: line.startswith("done"))
        assert await process.wait() == 0
        assert sum(map(sent, members)) <= 1.05 * model.total
    with SliceStore(store_folder, model.manifest) as store:
        model.check(store, model.everything)
