"""Packs made from a web server: the shipped model behind one on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode import parts
from swarmnode.config import build_config
from swarmnode.demo import MODEL
from swarmnode.errors import Cancelled, DenseModel, DownloadFailed, ModelError, SourceChanged, SourceFailed
from swarmnode.model.folder_lock import FolderLock
from swarmnode.model.manifest import is_hashed
from swarmnode.onboard import ModelPack, onboard

from .cli.test_cli import run
from .model.http_server import Site, serve


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        site.add(MODEL, "/m.gguf")
        yield site


def test_makes_the_same_pack_from_few_bytes(site: Site, demo_pack: ModelPack, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    pack = onboard(site.url + "/m.gguf", tmp_path / "pack", lambda *at: stages.append(at))
    assert pack.backbone.read_bytes() == demo_pack.backbone.read_bytes()
    assert pack.backbone_known
    assert pack.url == site.url + "/m.gguf"
    assert pack.source is None
    manifest = pack.manifest
    assert not is_hashed(manifest)
    assert (manifest.sites, manifest.tensors, manifest.backbone_sha256) == (
        demo_pack.manifest.sites,
        demo_pack.manifest.tensors,
        demo_pack.manifest.backbone_sha256,
    )
    experts = sum(tensor.stride * tensor.ne[-1] for tensor in manifest.tensors)
    assert site.sent <= (MODEL.stat().st_size - experts) * 1.05 + 2 * 131_072  # the header is read in doubling steps
    assert {stage for stage, _, _ in stages} == {"headers", "backbone", "values", "trace"}
    assert all(sum(1 for stage, done, total in stages if stage == name and done == total) for name, _, _ in stages)

    before = len(site.asked)
    assert onboard(site.url + "/m.gguf", tmp_path / "pack").manifest == manifest
    assert len(site.asked) - before <= 3  # headers only

    full = onboard(site.url + "/m.gguf", tmp_path / "pack", hash_all=True)
    assert full.manifest.digests == demo_pack.manifest.digests
    assert full.manifest.model_hash == demo_pack.manifest.model_hash
    assert onboard(site.url + "/m.gguf", tmp_path / "pack").manifest == full.manifest

    site.tags["/m.gguf"] = '"new"'
    with pytest.raises(SourceChanged, match=r"is another file now than when .* was made; remove that folder"):
        onboard(site.url + "/m.gguf", tmp_path / "pack")


def test_an_interrupted_download_leaves_no_pack_and_is_gone_on_with(site: Site, tmp_path: Path) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if stage == "backbone" and done > total // 2:
            raise Cancelled("interrupted")

    with pytest.raises(Cancelled):
        onboard(site.url + "/m.gguf", tmp_path / "pack", progress)
    assert sorted(path.name[:10] for path in (tmp_path / "pack").iterdir()) == [".backbone-", "lock"]
    pack = onboard(site.url + "/m.gguf", tmp_path / "pack")
    assert sorted(path.name for path in pack.path.iterdir()) == [
        "backbone.gguf",
        "lock",
        "manifest.json",
        "source.json",
    ]


def test_two_do_not_download_into_one_pack(site: Site, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    first = FolderLock(tmp_path / "pack")
    with pytest.raises(ModelError, match="used by another swarmnode"):
        onboard(site.url + "/m.gguf", tmp_path / "pack")
    first.release()
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be written"):
        onboard(site.url + "/m.gguf", tmp_path / "file" / "pack")


def test_what_cannot_be_onboarded(site: Site, tmp_path: Path) -> None:
    from swarmnode.model.random_model import RandomModel, write_random_model

    shape = RandomModel(d_model=128, n_layers=1, n_ff_expert=64, n_expert=4, vocab=300, n_ff_shared=64)
    [moe] = write_random_model(shape, tmp_path / "moe.gguf")
    data = moe.read_bytes().replace(b"_exps.weight", b"_none.weight")
    site.files["/dense.gguf"] = data
    with pytest.raises(DenseModel, match="this one is dense"):
        onboard(site.url + "/dense.gguf", tmp_path / "pack")
    with pytest.raises(DownloadFailed, match="no such file"):
        onboard(site.url + "/absent.gguf", tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_a_worker_serves_from_an_address(
    site: Site, demo_pack: ModelPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "default_cache_dir", lambda: tmp_path / "cache")
    events: list[str] = []

    def report(event: str, **fields: object) -> None:
        events.append(event)

    url = site.url + "/m.gguf"
    pack = parts.resolve_pack(Path(url), report)  # an address that was taken for a path
    before = site.sent
    config = build_config({"model": pack.path, "experts": "0-2", "threads": 1}, None, state_dir=tmp_path / "state")
    worker = parts.WorkerParts(config, pack, report)
    assert "slices" in events
    owned = sum(3 * pack.manifest.expert_bytes(site.index) for site in pack.manifest.sites)
    assert owned <= site.sent - before <= 1.05 * owned
    worker.close()
    digests = json.loads((pack.path / "digests.json").read_text())["sites"]
    assert all(digests[str(s.index)]["1"] == demo_pack.manifest.digests[s.index][1] for s in pack.manifest.sites)

    site.files.clear()
    assert parts.resolve_pack(url, report) == pack  # without the server
    config = build_config({"model": pack.path, "experts": "3", "threads": 1}, None, state_dir=tmp_path / "state")
    with pytest.raises(SourceFailed, match="no such file"):
        parts.WorkerParts(config, pack, report)


def test_on_the_command_line(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "onboard", site.url + "/m.gguf", "-o", str(tmp_path / "pack"), "--json")
    assert (code, json.loads(out)["hashed"], err) == (0, False, "")
    code, out, _ = run(capsys, "onboard", site.url + "/m.gguf", "-o", str(tmp_path / "pack"))
    assert (code, "come straight from that address" in out) == (0, True)
    code, out, _ = run(capsys, "onboard", site.url + "/m.gguf", "-o", str(tmp_path / "pack"), "--hash")
    assert (code, "come straight from that address" in out) == (0, False)
    code, _, err = run(capsys, "onboard", site.url + "/absent.gguf", "--out", str(tmp_path / "other"))
    assert code == 1
    assert err == f"swarmnode: {site.url}/absent.gguf: no such file on the server (404 Not Found)\n"
    code, _, err = run(capsys, "onboard", "https://me:secret@host/m.gguf")
    assert (code, "SWARMNODE_HTTP_TOKEN" in err, "secret" in err) == (2, True, False)
