"""Broken models on a web server: refused for their headers, before anything else is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode import onboard as onboarding
from swarmnode.errors import BrokenModel, UnknownArchitecture
from swarmnode.model.gguf_metadata import ValueType
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import onboard
from tests.swarmnode.model.gguf_editor import Editor
from tests.swarmnode.model.http_server import Site, serve


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        yield site


@pytest.fixture
def whole(tmp_path: Path) -> Editor:
    """A backbone of a few MB, so that what is downloaded of it shows."""
    [path] = write_random_model(RandomModel(d_model=256, n_layers=2, vocab=3000), tmp_path / "whole.gguf")
    return Editor.of(path)


def test_figures_that_contradict_each_other(site: Site, whole: Editor, tmp_path: Path) -> None:
    whole.set("qwen2moe.expert_count", ValueType.UINT32, 9)
    url = site.add(whole.write(tmp_path / "far.gguf"))
    with pytest.raises(BrokenModel, match=r"^far.gguf: blk.0.ffn_gate_exps.weight stacks 8 experts, but .* is 9$"):
        onboard(url, tmp_path / "pack")
    assert site.sent < 600_000
    assert not (tmp_path / "pack").exists()


def test_llama_cpp_is_asked_before_a_large_backbone_is_downloaded(
    site: Site, whole: Editor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onboarding, "ASK_BYTES", 1 << 20)
    for key in [key for key in whole.pairs if key.startswith("qwen2moe.")]:
        whole.pairs[key.replace("2moe", "9moe")] = whole.pairs.pop(key).replace(b"qwen2moe", b"qwen9moe")
    whole.set("general.architecture", ValueType.STRING, "qwen9moe")
    url = site.add(whole.write(tmp_path / "far.gguf"))
    with pytest.raises(UnknownArchitecture, match=r"^far.gguf: this llama.cpp does not know .* 'qwen9moe'; update"):
        onboard(url, tmp_path / "pack")
    assert site.sent < 600_000


def test_an_expert_that_is_no_number(site: Site, whole: Editor, tmp_path: Path) -> None:
    name = "blk.1.ffn_down_exps.weight"
    data = bytearray(whole.lines[whole.index(name)].data)
    data[-34:-32] = b"\x00\x7e"  # the scale of the last block of Q8_0
    whole.change(name, data=bytes(data))
    url = site.add(whole.write(tmp_path / "far.gguf"))
    with pytest.raises(BrokenModel, match=rf"^far.gguf: {name} of expert 7 holds NaN or infinity"):
        onboard(url, tmp_path / "pack", hash_all=True)
