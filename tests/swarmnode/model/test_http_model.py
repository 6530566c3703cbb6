from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import Cancelled, DownloadFailed, ModelError, NotGguf, SourceChanged, TruncatedFile
from swarmnode.model import backbone_file, http_model
from swarmnode.model.backbone_file import remote_weights, write_backbone
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.http_model import GAP_BYTES, FarModel, digest_far_experts, pieces_of

from .conftest import Sample
from .http_server import Handler, Site, serve


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        yield site


def far(url: str) -> FarModel:
    return FarModel(url, back_off_s=0.001)


def test_a_single_file(sample: Sample, site: Site) -> None:
    with far(site.add(sample.path)) as model:
        gguf = model.open()
        assert dict(gguf.tensors) == dict(sample.gguf.tensors)
        assert gguf.sizes == sample.gguf.sizes
        assert [str(path) for path in gguf.paths] == ["tiny.gguf"]
        assert gguf.name == sample.gguf.name


@pytest.mark.parametrize("given_part", [0, 1, 2])
def test_parts_are_found_by_their_names(sample: Sample, site: Site, given_part: int) -> None:
    urls = [site.add(part, f"/models/{part.name}") for part in sample.parts]
    with far(urls[given_part] + "?key=1") as model:
        gguf = model.open()
        local = GgufFile.open(sample.parts[0])
        assert dict(gguf.tensors) == dict(local.tensors)
        assert [(f.name, f.size, f.url) for f in model.source_files()] == [
            (part.name, part.stat().st_size, "") for part in sample.parts
        ]
        assert all("key=1" in asked[0] for asked in site.asked)
    with far(urls[0]) as model:
        model.open()
        assert [source.url for source in model.source_files()] == urls
        assert all(source.tag for source in model.source_files())


def test_missing_and_foreign_parts(sample: Sample, site: Site) -> None:
    url = site.add(sample.parts[0])
    with far(url) as model, pytest.raises(DownloadFailed, match=r"split-00002-of-00003.gguf: no such file"):
        model.open()
    site.add(sample.parts[0], f"/{sample.parts[1].name}")
    with far(url) as model, pytest.raises(ModelError, match="does not say part 2 of 3"):
        model.open()
    with far(site.add(sample.parts[0], "/renamed.gguf")) as model, pytest.raises(ModelError, match="must be named"):
        model.open()


def test_what_is_no_model(sample: Sample, site: Site) -> None:
    site.files["/text.gguf"] = b"hello " * 100
    with far(site.url + "/text.gguf") as model, pytest.raises(NotGguf, match=r"/text.gguf: not a GGUF file"):
        model.open()
    site.files["/cut.gguf"] = sample.path.read_bytes()[:-1000]
    with far(site.url + "/cut.gguf") as model, pytest.raises(TruncatedFile, match=r"/cut.gguf: tensor .* ends at byte"):
        model.open()


def test_a_large_header_is_read_forward(sample: Sample, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.model.http_file.HEAD_BYTES", 1000)
    with far(site.add(sample.path)) as model:
        assert dict(model.open().tensors) == dict(sample.gguf.tensors)


@pytest.mark.parametrize("piece", [4000, 1 << 20])
def test_the_backbone_file_is_the_same_and_only_its_bytes_are_read(
    sample: Sample, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(http_model, "PIECE_BYTES", piece)
    remote = remote_weights(sample.gguf)
    local = write_backbone(sample.gguf, tmp_path / "local", remote)
    site.add(sample.parts[0])
    urls = [site.add(part) for part in sample.parts]
    with far(urls[0]) as model:
        gguf = model.open()
        before = site.sent
        site.drop_after = [100, 10, 0]
        seen: list[tuple[int, int]] = []
        info = write_backbone(gguf, tmp_path / "far", remote, lambda *at: seen.append(at))
        dense = sum(t.n_bytes for name, t in gguf.tensors.items() if name not in remote)
        gaps = len(gguf.tensors) * 64
        assert site.sent - before <= dense + gaps
        assert seen[-1] == (dense, dense)
        assert [at for at, _ in seen] == sorted(at for at, _ in seen)
    assert info == local
    assert (tmp_path / "far").read_bytes() == (tmp_path / "local").read_bytes()


def test_digests_in_one_pass(sample: Sample, site: Site) -> None:
    with far(site.add(sample.path)) as model:
        gguf = model.open()
        before, seen = site.sent, []
        digests = digest_far_experts(gguf, sample.sites, lambda done, total: seen.append((done, total)))
        assert digests == sample.manifest.digests
        weights = sum(tensor.n_bytes for tensor in gguf.expert_tensors().values())
        assert site.sent - before == weights
        assert seen[-1] == (weights, weights)


def test_chance_reads(sample: Sample, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was announced, what is read is what is there."""
    monkeypatch.setattr(http_model, "PIECE_BYTES", 5000)
    data, chance = sample.path.read_bytes(), random.Random(3)
    with far(site.add(sample.path)) as model:
        gguf = model.open()
        for _ in range(10):
            ranges = []
            for _ in range(8):
                offset = chance.randrange(len(data) - 20_000)
                ranges.append((0, offset, chance.randrange(20_000)))
            ranges = sorted(ranges) if chance.random() < 0.5 else ranges
            with gguf.reader() as reader:
                reader.expect([one for one in ranges if chance.random() < 0.8])
                for file, offset, length in ranges:
                    read = b"".join(bytes(chunk) for chunk in reader.chunks(file, offset, length))
                    assert read == data[offset : offset + length]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1 << 26), st.integers(0, 1 << 24)), max_size=20))
def test_pieces_cover_what_is_expected(ranges: list[tuple[int, int, int]]) -> None:
    pieces = list(pieces_of(ranges))
    assert all(0 < end - start <= http_model.PIECE_BYTES for _, start, end in pieces)
    wanted = sum(length for _, _, length in ranges)
    assert wanted <= sum(end - start for _, start, end in pieces) <= wanted + GAP_BYTES * len(ranges)


def test_a_change_while_it_is_read(sample: Sample, site: Site, tmp_path: Path) -> None:
    url = site.add(sample.path)
    with far(url) as model:
        gguf = model.open()
        site.tags[f"/{sample.path.name}"] = '"new"'
        with pytest.raises(SourceChanged, match="not the same file any more"):
            write_backbone(gguf, tmp_path / "out", remote_weights(gguf))
    assert not (tmp_path / "out").exists()


def test_a_heartbeat_ends_what_hangs(sample: Sample, site: Site) -> None:
    over = threading.Event()
    beats = itertools.count()

    def heartbeat() -> None:
        if next(beats) == 1:
            raise Cancelled("enough")

    def habit(handler: Handler) -> bool:
        over.wait(30)
        return False

    url = site.add(sample.path)
    site.habit = habit
    model = FarModel(url, heartbeat=heartbeat)
    with pytest.raises(Cancelled, match="enough"):
        model.open()
    over.set()
    model.close()


def test_goes_on_after_an_interruption(
    sample: Sample, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backbone_file, "SYNC_BYTES", 10_000)
    monkeypatch.setattr(http_model, "PIECE_BYTES", 5000)
    remote = remote_weights(sample.gguf)
    local = write_backbone(sample.gguf, tmp_path / "local", remote)
    url, part = site.add(sample.path), tmp_path / ".part"
    dense = sum(t.n_bytes for name, t in sample.gguf.tensors.items() if name not in remote)
    for stop_at in (dense // 3, dense * 2 // 3):

        def progress(done: int, _total: int, stop_at: int = stop_at) -> None:
            if done > stop_at:
                raise Cancelled("interrupted")

        with far(url) as model, pytest.raises(Cancelled):
            write_backbone(model.open(), tmp_path / "out", remote, progress, part=part)
        assert not (tmp_path / "out").exists()
    with far(url) as model:
        gguf, before = model.open(), site.sent
        assert write_backbone(gguf, tmp_path / "out", remote, part=part) == local
        assert site.sent - before <= dense // 3 + 3 * 10_000
    assert (tmp_path / "out").read_bytes() == (tmp_path / "local").read_bytes()
    assert not part.exists()


def test_what_is_no_beginning_of_it_is_not_gone_on_with(sample: Sample, tmp_path: Path) -> None:
    remote = remote_weights(sample.gguf)
    local = write_backbone(sample.gguf, tmp_path / "local", remote)
    (tmp_path / ".part").write_bytes(b"nonsense" * 10_000_000)
    assert write_backbone(sample.gguf, tmp_path / "out", remote, part=tmp_path / ".part") == local
    assert (tmp_path / "out").read_bytes() == (tmp_path / "local").read_bytes()


CHILD = """
import sys
from pathlib import Path
from swarmnode.model import backbone_file, http_model
backbone_file.SYNC_BYTES, http_model.PIECE_BYTES = 10_000, 5000
with http_model.FarModel(sys.argv[1]) as model:
    gguf = model.open()
    out = Path(sys.argv[2])
    backbone_file.write_backbone(gguf, out, backbone_file.remote_weights(gguf), part=out.with_suffix(".part"))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no kill -9 there")
def test_kill_in_the_middle(sample: Sample, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone_file, "SYNC_BYTES", 10_000)
    remote = remote_weights(sample.gguf)
    local = write_backbone(sample.gguf, tmp_path / "local", remote)
    dense = sum(t.n_bytes for name, t in sample.gguf.tensors.items() if name not in remote)
    url, out = site.add(sample.path), tmp_path / "out.gguf"
    enough, over = threading.Event(), threading.Event()

    def habit(handler: Handler) -> bool:
        if site.sent > (64 << 10) + dense * 2 // 3:
            enough.set()
            over.wait(60)
        return False

    site.habit = habit
    with subprocess.Popen([sys.executable, "-c", CHILD, url, str(out)]) as child:
        assert enough.wait(60)
        child.send_signal(signal.SIGKILL)
    site.habit = lambda _handler: False
    over.set()
    with far(url) as model:
        gguf, before = model.open(), site.sent
        assert write_backbone(gguf, out, remote, part=out.with_suffix(".part")) == local
        assert site.sent - before <= dense // 3 + 2 * 10_000 + 4 * 5000 + dense // 10
    assert out.read_bytes() == (tmp_path / "local").read_bytes()
