"""Making a pack takes nothing away: neither an older pack with its verdict, nor files that are somebody else's."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarmnode.architectures.tiny_model import write_tiny_model
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.errors import BrokenModel, Cancelled, ModelError, NotGguf
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack, onboard
from swarmnode.parts import resolve_pack

from .cli.test_cli import run
from .model.http_server import serve

SHAPE = RandomModel()


def make(path: Path, n_expert: int = SHAPE.n_expert, seed: int = SHAPE.seed) -> Path:
    [made] = write_random_model(replace(SHAPE, n_expert=n_expert, seed=seed), path)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def note(event: str, **fields: object) -> None: ...


def interrupted(stage: str, _done: int, _total: int) -> None:
    if stage == "trace":
        raise Cancelled("interrupted")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make(tmp_path / "m.gguf")


@pytest.fixture
def pack(model: Path, tmp_path: Path) -> ModelPack:
    made = onboard(model, tmp_path / "pack")
    made.verdict_file.write_text("a night's work")
    return made


class TestWhatFails:
    def test_a_touched_file_and_an_interruption(self, model: Path, pack: ModelPack) -> None:
        before = contents(pack.path)
        os.utime(model, ns=(1, 1))
        with pytest.raises(Cancelled):
            onboard(model, pack.path, interrupted)
        assert contents(pack.path) == before
        again = onboard(model, pack.path)
        assert again.source == model
        assert again.backbone_known
        assert again.manifest == pack.manifest
        assert pack.verdict_file.read_text() == "a night's work"
        assert set(contents(pack.path)) == set(before)

    def test_a_model_that_broke(self, model: Path, pack: ModelPack) -> None:
        before = contents(pack.path)
        data = bytearray(model.read_bytes())
        at = pack.manifest.tensors[0].offset
        data[at : at + 4] = b"\xff\xff\xff\xff"
        model.write_bytes(data)
        with pytest.raises(BrokenModel):
            onboard(model, pack.path)
        assert contents(pack.path) == before
        model.write_bytes(b"junk")
        with pytest.raises(NotGguf):
            onboard(model, pack.path)
        assert contents(pack.path) == before

    def test_a_new_folder_is_not_left_behind(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(Cancelled):
            onboard(model, tmp_path / "new", interrupted)
        assert not (tmp_path / "new").exists()
        (tmp_path / "mine").mkdir()
        with pytest.raises(Cancelled):
            onboard(model, tmp_path / "mine", interrupted)
        assert (tmp_path / "mine").is_dir()


class TestWhatIsReplaced:
    def test_another_model_at_the_same_place(self, model: Path, pack: ModelPack) -> None:
        """The verdict stays, and says itself that it is about something else."""
        make(model, n_expert=12)
        assert onboard(model, pack.path).manifest.n_expert == 12
        assert pack.verdict_file.exists()

    def test_the_same_model_from_another_place(self, model: Path, pack: ModelPack, tmp_path: Path) -> None:
        copy = tmp_path / "renamed.gguf"
        model.rename(copy)
        again = onboard(copy, pack.path)
        assert (again.source, again.manifest.model_hash) == (copy, pack.manifest.model_hash)
        assert pack.verdict_file.read_text() == "a night's work"

    def test_a_downloaded_model_in_the_pack_of_its_address(self, model: Path, tmp_path: Path) -> None:
        with serve() as site:
            site.add(model, "/m.gguf")
            far = onboard(site.url + "/m.gguf", tmp_path / "pack")
            assert onboard(model, far.path).source == model
            site.add(make(tmp_path / "o.gguf", n_expert=12), "/o.gguf")
            with pytest.raises(ModelError, match=r"holds the pack of another model \(.*\); give another folder"):
                onboard(site.url + "/o.gguf", far.path)


class TestWhatIsRefused:
    @pytest.mark.parametrize("shape", [{"n_expert": 12}, {"seed": 9}])
    def test_another_models_pack(self, pack: ModelPack, tmp_path: Path, shape: dict[str, int]) -> None:
        """Of another shape before anything is read, of the same shape when its bytes are known."""
        before = contents(pack.path)
        other = make(tmp_path / "other.gguf", **shape)
        with pytest.raises(ModelError, match=r"holds the pack of another model \(.*\); give another folder \(--out\)"):
            onboard(other, pack.path)
        assert contents(pack.path) == before

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("manifest.json", '{"name": "my web app", "icons": []}'),
            ("manifest.json", ""),
            ("backbone.gguf", "mine"),
        ],
    )
    def test_what_is_no_packs(
        self, model: Path, tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / name).write_text(text)
        before = contents(folder)
        code, _, err = run(capsys, "onboard", str(model), "--out", str(folder))
        assert code == 1
        assert "give another folder (--out)" in err
        assert err.count("\n") == 1
        assert contents(folder) == before
        with serve() as site:
            site.add(model, "/m.gguf")
            with pytest.raises(ModelError, match="give another folder"):
                onboard(site.url + "/m.gguf", folder)
        assert contents(folder) == before

    def test_an_older_manifest_of_ours_is_made_anew(self, model: Path, pack: ModelPack, tmp_path: Path) -> None:
        manifest = json.loads((pack.path / "manifest.json").read_text()) | {"format": 0}
        (pack.path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ModelError, match="made from another file"):
            onboard(make(tmp_path / "other.gguf"), pack.path)
        assert onboard(model, pack.path).manifest == pack.manifest


def test_a_download_that_is_interrupted_after_it_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.model.backbone_file.SYNC_BYTES", 1 << 14)
    with serve() as site:
        site.add(make(tmp_path / "m.gguf"), "/m.gguf")
        site.add(make(tmp_path / "o.gguf", seed=9), "/o.gguf")
        with pytest.raises(Cancelled):
            onboard(site.url + "/m.gguf", tmp_path / "pack", interrupted)
        with pytest.raises(Cancelled):
            onboard(site.url + "/o.gguf", tmp_path / "pack", interrupted)
        parts = {path.name: path.stat().st_size for path in (tmp_path / "pack").glob(".backbone-*.part")}
        assert len(parts) == 2  # another address's download is not in the way
        before = site.sent
        pack = onboard(site.url + "/m.gguf", tmp_path / "pack")
        header = 4 * 131_072  # read in doubling steps
        assert site.sent - before < header + 3 * (1 << 14)
        pack.verify_backbone()
        assert len(list(pack.path.glob(".backbone-*.part"))) == 1


def test_every_part_is_the_same_model(tmp_path: Path) -> None:
    parts = write_random_model(SHAPE, tmp_path / "m.gguf", parts=3)
    packs = [resolve_pack(part, note) for part in parts]
    assert [pack.path for pack in packs] == [packs[0].path] * 3
    assert packs[0].path.name.startswith("m-00001-of-00003-")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["onboard", ""], "onboard what?"),
        (["onboard", "{model}", "--out", ""], "--out is empty"),
        (["gate", ""], "which model?"),
        (["up", "--model", " "], "--model is empty"),
    ],
)
def test_nothing_where_a_name_is_wanted(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *(one.format(model=model) for one in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_packs_backbone_file_is_no_model(pack: ModelPack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It loads, and its experts are a hole: zeros."""
    link = tmp_path / "whole.gguf"
    link.symlink_to(pack.backbone)
    for file in (pack.backbone, link):
        for arguments in (["onboard", str(file)], ["gate", str(file)]):
            code, out, err = run(capsys, *arguments)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert f"{file}: a model pack's file, without experts; give the pack ({pack.path})" in err
    code, _, err = run(
        capsys, "up", "--model", str(pack.path), "--mode", "partial", "--speculate", str(pack.backbone),
        "--listen", "127.0.0.1:0", "--no-lan", "--state", str(tmp_path / "state"), "--headless",
    )  # fmt: skip
    assert code == 2
    assert "without experts" in err


@pytest.mark.parametrize("folder", [".", "..", "/"])
def test_a_folder_is_no_model(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    code, _, err = run(capsys, "onboard", folder)
    assert (code, err.count("\n")) == (1, 1)


@pytest.mark.skipif(os.name == "nt", reason="no file has such a name there")
@pytest.mark.parametrize("name", ["a\nb.gguf", "a:b.gguf"])
def test_a_name_that_no_manifest_takes(model: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    file = model.rename(model.with_name(name))
    said: set[str] = set()
    commands = (["onboard", str(file)], ["gate", str(file)], ["plan", str(file), "--devices", "2x8G"])
    for command in commands:
        code, _, err = run(capsys, *command)
        assert code == 1
        said.add(err)
    [line] = said
    assert line.count("\n") == 1
    assert "rename the file" in line


@pytest.mark.parametrize(("arch", "tensor"), [("gpt-oss", "ffn_gate_inp.bias"), ("jamba", "ssm_a")])
def test_minus_infinity_that_llama_cpp_runs(tmp_path: Path, arch: str, tensor: str) -> None:
    """An expert that is switched off, a state that keeps nothing."""
    model = write_tiny_model(tmp_path / "m.gguf", arch)
    where = next(one for name, one in GgufFile.open(model).tensors.items() if name.endswith(tensor))
    with model.open("r+b") as file:
        file.seek(where.offset)
        file.write(np.float32(-np.inf).tobytes())
    pack = onboard(model, tmp_path / "pack")
    whole = LlamaModel(model, remote_experts=False)
    try:
        context = LlamaContext(whole, n_context=16, n_batch=8, threads=1)
        try:
            context.decode([1, 2, 3], 0)
            assert np.isfinite(context.logits(-1)).all()
        finally:
            context.close()
    finally:
        whole.close()
    assert pack.manifest.architecture == arch
