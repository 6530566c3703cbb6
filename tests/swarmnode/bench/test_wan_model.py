"""Models of a published layer shape: true widths, as many experts as fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.bench import wan_model
from swarmnode.bench.wan_model import ShapedModel, parse_shape, shaped_model, written
from swarmnode.errors import UsageError
from swarmnode.model.gguf_file import GgufFile
from swarmnode.sizing.shapes import MODELS


def test_a_shape_has_the_models_own_widths(tmp_path: Path) -> None:
    shaped = shaped_model("qwen3.5-122b:3", room=4 << 30, folder=tmp_path)
    model = shaped.model
    assert (model.d_model, model.n_ff_expert, model.n_used, model.n_ff_shared) == (3072, 1024, 8, 1024)
    assert (model.n_layers, model.n_expert, shaped.path.name) == (3, 32, shaped.path.name)
    assert re.fullmatch(r"Qwen3\.5-122B-3x32of32-[0-9a-f]{12}\.gguf", shaped.path.name)
    assert "3 of 48 layers, 32 of 256 experts" in shaped.note


def test_experts_are_as_many_as_there_is_room_for(tmp_path: Path) -> None:
    whole = sum(one.n_bytes for one in shaped_model("Mixtral-8x22B:1", room=8 << 30, folder=tmp_path).model.tensors())
    fewer = shaped_model("Mixtral-8x22B:1", room=whole - 1, folder=tmp_path)
    assert fewer.model.n_expert == 7
    assert sum(one.n_bytes for one in fewer.model.tensors()) < whole
    with pytest.raises(UsageError, match="2 experts of 1 layers do not fit 1 MB; take fewer"):
        shaped_model("Mixtral-8x22B:1", room=1 << 20, folder=tmp_path)


def test_a_file_that_is_there_is_taken_whatever_is_free_today(tmp_path: Path) -> None:
    whole = shaped_model("Mixtral-8x22B:1", room=8 << 30, folder=tmp_path)
    size = sum(one.n_bytes for one in whole.model.tensors())
    fewer = shaped_model("Mixtral-8x22B:1", room=size - 1, folder=tmp_path)
    fewer.path.write_bytes(b"GGUF")
    for room in (1 << 20, size - 1, 8 << 30):
        assert shaped_model("Mixtral-8x22B:1", room=room, folder=tmp_path) == fewer
    whole.path.write_bytes(b"GGUF")  # and the one with more experts first
    assert shaped_model("Mixtral-8x22B:1", room=1 << 20, folder=tmp_path) == whole


def test_fewer_experts_that_were_asked_for_are_not_all_that_fit(tmp_path: Path) -> None:
    asked = shaped_model("Qwen3.5-122B:1:9", room=4 << 30, folder=tmp_path)
    asked.path.write_bytes(b"GGUF")
    assert shaped_model("Qwen3.5-122B:1", room=4 << 30, folder=tmp_path).model.n_expert == 32
    assert shaped_model("Qwen3.5-122B:1:9", room=1 << 20, folder=tmp_path) == asked


def test_a_file_of_another_form_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shaped_model("Qwen3.5-122B:1:9", room=4 << 30, folder=tmp_path)
    before.path.write_bytes(b"GGUF")
    monkeypatch.setattr(wan_model, "_LEAST_SHARED", 512)  # of no matter here: it has a shared expert of its own
    assert shaped_model("Qwen3.5-122B:1:9", room=4 << 30, folder=tmp_path).path == before.path
    monkeypatch.setattr(wan_model, "MODELS", [replace(shape, d_ff=512) for shape in MODELS])
    assert shaped_model("Qwen3.5-122B:1:9", room=4 << 30, folder=tmp_path).path != before.path


def test_every_published_shape_can_be_written(tmp_path: Path) -> None:
    for shape in MODELS:
        shaped = shaped_model(f"{shape.name}:1", room=4 << 30, folder=tmp_path)
        assert shaped.model.n_expert >= shaped.model.n_used == shape.k
        assert shaped.model.d_model % shaped.model.head_size == 0
        assert "/" not in shaped.path.name
        assert shaped.model.tensors()


@pytest.mark.parametrize("text", ["Qwen3.5-122B", "Qwen3.5-122B:0", "Qwen3.5-122B:3:4", "GPT-1:3", ":3", "a:99999"])
def test_a_shape_that_is_not_there_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--shape"):
        parse_shape(text)


def test_a_file_is_written_once(tmp_path: Path) -> None:
    shaped = shaped_model("Qwen3.5-122B:1:8", folder=tmp_path)
    small = replace(shaped.model, d_model=256, n_ff_expert=256, n_ff_shared=256)
    made = written(ShapedModel(small, tmp_path / "small.gguf", ""))
    before = made.stat().st_mtime_ns
    assert written(ShapedModel(small, made, "")).stat().st_mtime_ns == before
    assert GgufFile.open(made).metadata["qwen2moe.expert_used_count"] == 8
