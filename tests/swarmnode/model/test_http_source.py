from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from swarmnode.bulk.fetcher import Fetcher
from swarmnode.bulk.source import Source
from swarmnode.errors import ModelError, SourceFailed, UsageError
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.http_source import HttpSource
from swarmnode.model.manifest import (
    Manifest,
    SourceFile,
    build_manifest,
    decode_manifest,
    encode_manifest,
    is_hashed,
    told_address,
)
from swarmnode.model.recorded_digests import RecordedDigests
from swarmnode.model.store import SliceStore

from .conftest import Sample
from .http_server import Handler, Site, serve

ALL = {0: range(6), 1: range(6)}


@pytest.fixture
def site(sample: Sample) -> Iterator[Site]:
    with serve() as site:
        site.add(sample.path)
        site.tags[f"/{sample.path.name}"] = '"v1"'
        yield site


def unhashed(sample: Sample, *files: SourceFile, tag: str = '"v1"', url: str = "") -> Manifest:
    """The sample's manifest as from a web server."""
    files = files or (SourceFile(sample.path.name, sample.path.stat().st_size, url, tag),)
    digests = tuple(("",) * site.n_expert for site in sample.sites)
    return build_manifest(sample.gguf, sample.sites, digests, source_files=files)


@pytest.fixture
async def source(sample: Sample, site: Site) -> AsyncIterator[HttpSource]:
    source = HttpSource(unhashed(sample), f"{site.url}/{sample.path.name}", back_off_s=0.001)
    yield source
    await source.close()


def whole(slices: object) -> list[bytes]:
    return [bytes(piece) for piece in slices]  # type: ignore[attr-defined]


async def test_an_expert(source: HttpSource, sample: Sample, site: Site) -> None:
    as_source: Source = source
    assert as_source.held(1) is None
    assert whole(await as_source.fetch(1, 4)) == sample.slices(1, 4)
    assert as_source.received_bytes == site.sent == sample.manifest.expert_bytes(1)
    assert len(site.asked) == 3


async def test_neighbours_come_together(source: HttpSource, sample: Sample, site: Site) -> None:
    wanted = [(0, 4), (0, 2), (1, 0), (0, 3), (0, 3), (0, 0)]
    found = await asyncio.gather(*(source.fetch(*one) for one in wanted))
    assert [whole(slices) for slices in found] == [sample.slices(*one) for one in wanted]
    assert len(site.asked) == 3 * 3  # experts 2 to 4 of site 0, 0 of site 0, 0 of site 1
    assert site.sent == 3 * sample.manifest.expert_bytes(0) + 2 * sample.manifest.expert_bytes(1)


async def test_fills_a_store_with_no_byte_too_many(sample: Sample, site: Site, tmp_path: Path) -> None:
    manifest = unhashed(sample)
    recorded = RecordedDigests(manifest, tmp_path / "digests.json")
    source = HttpSource(manifest, f"{site.url}/{sample.path.name}", recorded, back_off_s=0.001)
    site.drop_after = [100, 0, 1000]
    with SliceStore(tmp_path / "store", manifest) as store:
        fetcher = Fetcher(store, manifest, ALL, lambda: [source])
        await fetcher.run()
        total = sum(6 * manifest.expert_bytes(site) for site in (0, 1))
        assert total <= site.sent <= 1.05 * total
        assert fetcher.received_bytes == total
        store.verify()
        for number in ALL:
            assert store.holdings()[number] == tuple(range(6))
    await source.close()
    again = RecordedDigests(manifest, tmp_path / "digests.json")
    assert [[again.get(site, e) for e in range(6)] for site in (0, 1)] == [list(row) for row in sample.manifest.digests]


async def test_a_model_in_parts(sample: Sample, tmp_path: Path) -> None:
    with serve() as site:
        urls = [site.add(part) for part in sample.parts]
        parts = GgufFile.open(sample.parts[0])
        manifest = build_manifest(parts, sample.sites, sample.manifest.digests)
        for url in urls:
            source = HttpSource(manifest, url, back_off_s=0.001)
            assert whole(await source.fetch(0, 5)) == sample.slices(0, 5)
            await source.close()
        with pytest.raises(UsageError, match=r"has 3 parts; give the address of NAME-00001-of-00003.gguf"):
            HttpSource(manifest, site.url + "/other.gguf")


@pytest.mark.parametrize("habit", ["tag", "size", "content"])
async def test_another_file_there(sample: Sample, site: Site, habit: str) -> None:
    path = f"/{sample.path.name}"
    manifest = unhashed(sample)
    source = HttpSource(manifest, site.url + path, back_off_s=0.001)
    await source.fetch(0, 0)
    if habit == "tag":
        site.tags[path] = '"v2"'
    elif habit == "size":
        site.files[path] += b"x"
    else:
        site.files[path] = bytes(len(site.files[path]))
    with pytest.raises(SourceFailed) as caught:
        await source.fetch(0, 0)
    assert caught.value.corrupt
    assert ("other bytes for expert 0 of site 0" if habit == "content" else "not the same file any more") in str(
        caught.value
    )
    await source.close()


async def test_not_the_file_of_the_manifest(sample: Sample, site: Site) -> None:
    other = unhashed(sample, SourceFile(sample.path.name, sample.path.stat().st_size + 64))
    source = HttpSource(other, f"{site.url}/{sample.path.name}", back_off_s=0.001)
    with pytest.raises(SourceFailed, match="not the same file any more") as caught:
        await source.fetch(0, 0)
    assert caught.value.corrupt
    await source.close()


async def test_a_server_that_fails(source: HttpSource, sample: Sample, site: Site) -> None:
    site.files.clear()
    with pytest.raises(SourceFailed, match="no such file") as caught:
        await source.fetch(0, 0)
    assert not caught.value.corrupt
    with pytest.raises(SourceFailed, match="does not exist"):
        await source.fetch(0, 6)
    site.add(sample.path)
    assert whole(await source.fetch(0, 0)) == sample.slices(0, 0)


async def test_cancelled_and_closed(source: HttpSource, sample: Sample, site: Site) -> None:
    asked, over = threading.Event(), threading.Event()

    def habit(handler: Handler) -> bool:
        asked.set()
        over.wait(30)
        return False

    site.habit = habit
    fetching = [asyncio.ensure_future(source.fetch(0, expert)) for expert in (0, 1)]
    other = asyncio.ensure_future(source.fetch(1, 1))
    await asyncio.to_thread(asked.wait, 30)
    fetching[0].cancel()
    await asyncio.gather(fetching[0], return_exceptions=True)
    assert fetching[0].cancelled()
    over.set()
    assert whole(await fetching[1]) == sample.slices(0, 1)
    assert whole(await other) == sample.slices(1, 1)
    over.clear()
    late = asyncio.ensure_future(source.fetch(0, 2))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(source.close())
    await asyncio.sleep(0)
    over.set()
    await closing
    with pytest.raises(SourceFailed, match=r"given up|closed"):
        await late
    with pytest.raises(SourceFailed, match="was closed here"):
        await source.fetch(0, 0)


async def test_addresses_that_only_the_manifest_names(sample: Sample, site: Site) -> None:
    url = f"{site.url}/{sample.path.name}"
    plain = unhashed(sample, url=url)
    assert told_address(plain) == ""
    with pytest.raises(ModelError, match="names no address to take experts from"):
        HttpSource(plain)
    secure = unhashed(sample, url=url.replace("http:", "https:"))
    assert told_address(secure).startswith("https://")
    source = HttpSource(secure, back_off_s=0.001)
    with pytest.raises(SourceFailed, match="TLS"):
        await source.fetch(0, 0)
    await source.close()


def test_a_manifest_without_digests(sample: Sample) -> None:
    manifest = unhashed(sample, url="https://host/tiny.gguf")
    assert not is_hashed(manifest)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    # Two nodes of different versions must agree on both.
    assert sample.manifest.model_hash == "5f9af68e39ba304374e23137db9eb6004447ac2005a46794f23ab0eb31d6e71c"
    assert manifest.model_hash == "d8739a81d7235fecb0c7ec49b8c3126d6495d4a7ead6a9348d1d0a0f56ab1ba5"
    hashes = {manifest.model_hash}
    size = sample.path.stat().st_size
    for other in (
        SourceFile("tiny.gguf", size, "https://host/tiny.gguf", '"v2"'),
        SourceFile("tiny.gguf", size, "https://other/tiny.gguf", '"v1"'),
        SourceFile("tiny.gguf", size + 1, "https://host/tiny.gguf", '"v1"'),
    ):
        hashes.add(unhashed(sample, other).model_hash)
    half = (sample.manifest.digests[0], ("",) * 6)
    files = manifest.source_files
    hashes.add(build_manifest(sample.gguf, sample.sites, half, source_files=files).model_hash)
    assert len(hashes) == 5
    # With all digests the address does not matter, as for a file.
    full = build_manifest(sample.gguf, sample.sites, sample.manifest.digests, source_files=files)
    assert full.model_hash == sample.manifest.model_hash


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("url", "https://user@host/x", "an address that is none"),
        ("url", "file:///etc/passwd", "an address that is none"),
        ("url", "https://host/x?key=1", "an address that is none"),
        ("url", "https://host/" + "x" * 3000, "not a manifest"),
        ("tag", "a\nb", "control characters"),
        ("tag", "x" * 300, "not a manifest"),
    ],
)
def test_hostile_addresses_are_refused(sample: Sample, field: str, value: str, message: str) -> None:
    document = msgspec.json.decode(encode_manifest(unhashed(sample)))
    document["source_files"][0][field] = value
    with pytest.raises(ModelError, match=message):
        decode_manifest(msgspec.json.encode(document))


class TestRecorded:
    """digests.json"""

    def test_survives(self, sample: Sample, tmp_path: Path) -> None:
        path = tmp_path / "digests.json"
        first = RecordedDigests(sample.manifest, path)
        assert first.note(1, 3, "a" * 64)
        assert first.note(1, 3, "a" * 64)
        assert not first.note(1, 3, "b" * 64)
        first.save()
        assert RecordedDigests(sample.manifest, path).get(1, 3) == "a" * 64
        assert RecordedDigests(unhashed(sample), path).get(1, 3) == ""  # another model

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[" * 100_000, b"\xff", b'{"model_hash": "x"}', b'{"sites": {"0": {"99": "x"}}}']
    )
    def test_damaged_counts_as_empty(self, sample: Sample, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "digests.json").write_bytes(content)
        assert RecordedDigests(sample.manifest, tmp_path / "digests.json").get(0, 0) == ""

    def test_places_that_do_not_exist(self, sample: Sample, tmp_path: Path) -> None:
        document = {"model_hash": sample.manifest.model_hash, "sites": {"0": {"6": "a" * 64}, "1": {"0": "b" * 64}}}
        (tmp_path / "digests.json").write_bytes(msgspec.json.encode(document))
        assert RecordedDigests(sample.manifest, tmp_path / "digests.json").get(1, 0) == ""
