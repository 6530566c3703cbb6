from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from swarmnode.bulk.download import fetch_backbone, fetch_manifest
from swarmnode.bulk.frames import AskBackbone, BackboneFollows, ManifestFollows, Request
from swarmnode.bulk.provider import SourceProvider
from swarmnode.errors import ModelError, SourceFailed
from swarmnode.model.backbone_file import backbone_digest, written_bytes
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import decode_manifest, encode_manifest
from tests.swarmnode.bulk.nodes import Model, Nodes, nodes
from transport.stream import Stream


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "pack" / "backbone.gguf"


@pytest.fixture
def partial(target: Path) -> Path:
    target.parent.mkdir()
    return target.with_name("backbone.gguf.part")


def end_of_data(model: Model) -> int:
    return written_bytes(GgufFile.open(model.backbone), model.manifest)


def there_is_none(target: Path) -> None:
    assert not target.exists()


def check(model: Model, target: Path) -> None:
    assert target.read_bytes() == model.backbone.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["backbone.gguf"]


async def test_manifest(model: Model) -> None:
    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve())
        encoded = await fetch_manifest(connection, model.hash)
        assert decode_manifest(encoded) == model.manifest
        with pytest.raises(SourceFailed, match="is not here"):
            await fetch_manifest(connection, bytes(32), "w")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ManifestFollows(5).encode() + b"hello", "the manifest from w: not a manifest of this version"),
        (ManifestFollows(1 << 40).encode(), "w answered with .*1099511627776.* where a manifest was asked for"),
        (ManifestFollows(500).encode() + b"hello", "w ended its answer 495 bytes too early"),
        (BackboneFollows(0, 1, 1).encode(), "where a manifest was asked for"),
    ],
)
async def test_bad_manifests(model: Model, answer: bytes, why: str) -> None:
    async def script(request: Request, stream: Stream) -> None:
        await stream.write(answer)
        await stream.finish()

    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.scripted(script))
        with pytest.raises(SourceFailed, match=why):
            await fetch_manifest(connection, model.hash, "w")


async def test_another_models_manifest(model: Model) -> None:
    async def script(request: Request, stream: Stream) -> None:
        data = encode_manifest(model.manifest)
        await stream.write(ManifestFollows(len(data)).encode() + data)
        await stream.finish()

    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.scripted(script))
        with pytest.raises(SourceFailed, match=r"w sent the manifest of model .*… for 0000000000000000…") as caught:
            await fetch_manifest(connection, bytes(32), "w")
        assert caught.value.corrupt


async def test_backbone(model: Model, target: Path) -> None:
    seen: list[tuple[int, int]] = []
    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve())
        await fetch_backbone(connection, model.manifest, target, lambda *figures: seen.append(figures))
        check(model, target)
        assert seen[-1] == (end_of_data(model), end_of_data(model))


@pytest.mark.parametrize("have", ["a byte", "some", "all data", "everything", "more"])
def test_a_part_is_gone_on_with(model: Model, target: Path, partial: Path, have: str) -> None:
    data, end = model.backbone.read_bytes(), end_of_data(model)
    longer = data + b"\1" * 99
    size = {"a byte": 1, "some": 1000, "all data": end, "everything": len(data), "more": len(longer)}[have]
    partial.write_bytes(longer[:size])

    async def fetch() -> None:
        async with nodes(model) as swarm:
            node = await swarm.serve()
            await fetch_backbone(await swarm.dial(node), model.manifest, target)
            assert node.server is not None
            assert node.server.bytes_sent == max(0, end - size)

    asyncio.run(fetch())
    check(model, target)


def test_a_wrong_part_is_fetched_again_and_accuses_nobody(model: Model, target: Path, partial: Path) -> None:
    partial.write_bytes(bytes(5000))

    async def fetch() -> None:
        async with nodes(model) as swarm:
            await fetch_backbone(await swarm.dial(await swarm.serve()), model.manifest, target)

    asyncio.run(fetch())
    check(model, target)


async def test_a_wrong_file_is_refused(model: Model, target: Path, tmp_path: Path) -> None:
    data = bytearray(model.backbone.read_bytes())
    data[end_of_data(model) - 100] ^= 1
    (tmp_path / "bad.gguf").write_bytes(data)
    async with nodes(model) as swarm:
        node = await swarm.serve(SourceProvider(model.manifest, model.source, tmp_path / "bad.gguf"))
        with pytest.raises(SourceFailed, match="w sent a backbone file that is not random-") as caught:
            await fetch_backbone(await swarm.dial(node), model.manifest, target, name="w")
        assert caught.value.corrupt
        assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (BackboneFollows(0, 4, 8).encode() + b"GGUF", "is not random-"),
        (BackboneFollows(0, 1 << 43, 1 << 43).encode(), r"8,796,093.0 MB of the backbone file are to be stored"),
        (BackboneFollows(7, 9, 9).encode(), "where a backbone file was asked for from byte 0"),
        (ManifestFollows(3).encode(), "where a backbone file was asked for from byte 0"),
        (b"", "ended its answer too early"),
    ],
)
async def test_bad_answers(model: Model, target: Path, answer: bytes, why: str) -> None:
    async def script(request: Request, stream: Stream) -> None:
        await stream.write(answer)
        await stream.finish()

    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.scripted(script))
        with pytest.raises((SourceFailed, ModelError), match=why):
            await fetch_backbone(connection, model.manifest, target)
        there_is_none(target)


async def test_a_peer_that_vanishes_leaves_the_part(model: Model, target: Path) -> None:
    data = model.backbone.read_bytes()

    async def cut_off(swarm: Nodes) -> None:
        async def script(request: Request, stream: Stream) -> None:
            assert isinstance(request, AskBackbone)
            end = end_of_data(model)
            await stream.write(BackboneFollows(request.offset, end, len(data)).encode())
            await stream.write(data[request.offset : end - 1000])
            await stream.finish()

        connection = await swarm.dial(await swarm.scripted(script))
        with pytest.raises(SourceFailed, match="1,000 bytes too early"):
            await fetch_backbone(connection, model.manifest, target)

    async with nodes(model) as swarm:
        await cut_off(swarm)
        there_is_none(target)
        await fetch_backbone(await swarm.dial(await swarm.serve()), model.manifest, target)
        check(model, target)


async def test_cancelled_in_the_middle(model: Model, target: Path) -> None:
    begun = asyncio.Event()

    async def script(request: Request, stream: Stream) -> None:
        await stream.write(BackboneFollows(0, 9000, 9000).encode() + bytes(500))
        begun.set()
        await asyncio.sleep(60)

    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.scripted(script))
        fetching = asyncio.create_task(fetch_backbone(connection, model.manifest, target))
        await begun.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        there_is_none(target)


async def test_without_a_known_digest_nothing_is_fetched(model: Model, target: Path) -> None:
    manifest = msgspec.structs.replace(model.manifest, backbone_sha256="")
    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve())
        with pytest.raises(ModelError, match="its manifest has no SHA-256 of it"):
            await fetch_backbone(connection, manifest, target)


async def test_no_room(model: Model, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(target.parent.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    async with nodes(model) as swarm:
        connection = await swarm.dial(await swarm.serve())
        with pytest.raises(ModelError, match=r"0.0 MB are free; make room"):
            await fetch_backbone(connection, model.manifest, target)


async def test_an_unreadable_backbone_is_refused(model: Model, target: Path, tmp_path: Path) -> None:
    (tmp_path / "none.gguf").write_bytes(b"not a GGUF file")
    async with nodes(model) as swarm:
        for path in (tmp_path / "none.gguf", tmp_path / "absent.gguf", None):
            node = await swarm.serve(SourceProvider(model.manifest, model.source, path))
            with pytest.raises(SourceFailed, match="backbone file") as caught:
                await fetch_backbone(await swarm.dial(node), model.manifest, target)
            assert caught.value.not_held
    assert backbone_digest(model.backbone, model.manifest) == model.manifest.backbone_sha256
