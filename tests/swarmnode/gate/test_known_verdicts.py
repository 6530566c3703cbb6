"""What is known of a model holds for it under every name and at every place of this machine."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmnode.config import build_config
from swarmnode.demo import MODEL, DemoOptions, run_demo
from swarmnode.demo_view import SilentView
from swarmnode.errors import GateFailed
from swarmnode.gate import gate_failure, load_verdict, save_verdict, wires_allowed
from swarmnode.gate.known_verdicts import keep_verdict, known_file, known_verdict
from swarmnode.gate.verdict import Verdict
from swarmnode.gate.verdict_file import bound_of
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack
from swarmnode.parts import dispatch_options, resolve_pack
from tests.swarmnode.gate.samples import site, verdict


def note(event: str, **fields: object) -> None: ...


def good(pack: ModelPack, **changed: Any) -> Verdict:
    sites = [site(one.layer, one.d_in, one.d_out) for one in pack.manifest.sites]
    return msgspec.structs.replace(verdict(*sites, bound=bound_of(pack)), **changed)


def bad(pack: ModelPack) -> Verdict:
    return good(pack, local_differ=3)


class TestAModelThatFailed:
    def test_under_another_name(self, tmp_path: Path) -> None:
        [file] = write_random_model(RandomModel(), tmp_path / "m.gguf")
        pack = resolve_pack(file, note)
        assert keep_verdict(pack, bad(pack)) == ""
        moved = resolve_pack(file.rename(tmp_path / "mm.gguf"), note)
        assert moved.path != pack.path
        with pytest.raises(GateFailed, match="failed its gate"):
            gate_failure(moved, force=False)
        assert "used all the same" in gate_failure(moved, force=True)

    def test_from_any_part(self, tmp_path: Path) -> None:
        """Also where its pack was lost, and where the parts are one file elsewhere."""
        parts = write_random_model(RandomModel(), tmp_path / "m.gguf", parts=3)
        pack = resolve_pack(parts[0], note)
        assert keep_verdict(pack, bad(pack)) == ""
        for part in parts:
            with pytest.raises(GateFailed):
                gate_failure(resolve_pack(part, note), force=False)
        shutil.rmtree(pack.path)
        with pytest.raises(GateFailed):
            gate_failure(resolve_pack(parts[1], note), force=False)
        [whole] = write_random_model(RandomModel(), tmp_path / "whole.gguf")
        with pytest.raises(GateFailed):
            gate_failure(resolve_pack(whole, note), force=False)

    def test_as_the_model_of_a_swarm(self, demo_pack: ModelPack, tmp_path: Path) -> None:
        keep_verdict(ModelPack(tmp_path, demo_pack.manifest, None), bad(demo_pack))
        joined = ModelPack(tmp_path / "joined", demo_pack.manifest, None)
        config = build_config({"model": tmp_path, "threads": 1}, None, state_dir=tmp_path)
        with pytest.raises(GateFailed):
            dispatch_options(config, joined, note)

    def test_in_the_demo(self, demo_pack: ModelPack, tmp_path: Path) -> None:
        keep_verdict(ModelPack(tmp_path, demo_pack.manifest, None), bad(demo_pack))
        with pytest.raises(GateFailed):
            asyncio.run(run_demo(DemoOptions(model=MODEL), SilentView()))

    def test_whatever_an_older_pack_says(self, demo_pack: ModelPack, tmp_path: Path) -> None:
        old, new = (ModelPack(tmp_path / name, demo_pack.manifest, None) for name in ("old", "new"))
        save_verdict(old, good(old))
        assert keep_verdict(new, bad(new)) == ""
        with pytest.raises(GateFailed):
            gate_failure(old, force=False)

    def test_until_it_is_gated_again(self, demo_pack: ModelPack, tmp_path: Path) -> None:
        """By a copy too; with less than was measured before it stays a failed one."""
        first, copy = (ModelPack(tmp_path / name, demo_pack.manifest, None) for name in ("first", "copy"))
        keep_verdict(first, bad(first))
        less = good(copy, exact_positions=0, local_differ=None, not_exact="on a GPU")
        assert keep_verdict(copy, less) != ""
        with pytest.raises(GateFailed):
            gate_failure(copy, force=False)
        assert keep_verdict(copy, good(copy)) == ""
        assert gate_failure(copy, force=False) == ""
        assert known_verdict(ModelPack(tmp_path / "third", demo_pack.manifest, None)) == good(copy)


def test_a_model_that_passed_has_its_wires_everywhere(demo_pack: ModelPack, tmp_path: Path) -> None:
    pack, joined = (ModelPack(tmp_path / name, demo_pack.manifest, None) for name in ("pack", "joined"))
    assert known_verdict(joined) == "not gated yet"
    keep_verdict(pack, good(pack))
    assert wires_allowed(joined, "int8", "int8") == ({}, [])
    assert load_verdict(joined) == "not gated yet"
    assert known_file(pack) == pack.verdict_file
    assert known_file(joined).is_relative_to(tmp_path / "cache")


def test_another_engine_or_model_is_another_matter(
    demo_pack: ModelPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = ModelPack(tmp_path / "pack", demo_pack.manifest, None)
    keep_verdict(pack, bad(pack))
    other = ModelPack(tmp_path, msgspec.structs.replace(demo_pack.manifest, backbone_sha256="a" * 64), None)
    assert gate_failure(other, force=False) == ""
    monkeypatch.setattr("swarmnode.gate.verdict_file.engine_build", lambda: "another")
    assert gate_failure(ModelPack(tmp_path, demo_pack.manifest, None), force=False) == ""


def test_a_cache_that_cannot_be_written(
    demo_pack: ModelPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SWARMNODE_CACHE", str(tmp_path / "file"))
    pack = ModelPack(tmp_path / "pack", demo_pack.manifest, None)
    assert keep_verdict(pack, bad(pack)) == ""
    assert "verdict_not_remembered" in caplog.text
    with pytest.raises(GateFailed):
        gate_failure(pack, force=False)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff" * 100])
def test_a_damaged_copy_says_nothing(demo_pack: ModelPack, tmp_path: Path, data: bytes) -> None:
    pack, joined = (ModelPack(tmp_path / name, demo_pack.manifest, None) for name in ("pack", "joined"))
    keep_verdict(pack, bad(pack))
    [file] = (tmp_path / "cache" / "verdicts").glob("*/verdict.json")
    file.write_bytes(data)
    assert gate_failure(joined, force=False) == ""
    with pytest.raises(GateFailed):
        gate_failure(pack, force=False)
