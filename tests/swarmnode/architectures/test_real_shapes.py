"""Layers of real shapes, through a worker process and the wire."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.architectures import real_layer, real_shapes
from swarmnode.architectures.real_layer import write_layer
from swarmnode.architectures.real_shapes import SHAPES, check_shape, gate_shapes, objection
from swarmnode.errors import ModelError, UsageError
from swarmnode.model.gguf_file import GgufFile
from swarmnode.sizing.needs import needs_of
from swarmnode.sizing.shapes import MODELS, find_shape

MOST_CPU_TOKENS = 8


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_shapes, "MOST_TOKENS", MOST_CPU_TOKENS)


def test_a_small_layer_of_gpt_oss(tmp_path: Path) -> None:
    """Biases, a clamped GLU, MXFP4, and numbers above 255."""
    shape = replace(find_shape("gpt-oss"), d=256, d_ff=128, n_expert=300, width=256)
    result = check_shape(shape, tmp_path, 20 * shape.expert_bytes, lambda: None)
    assert result.error == ""
    assert result.passed
    assert result.identical
    assert (result.experts, result.written, result.k) == (300, 20, 4)
    assert result.bytes_per_expert == shape.expert_bytes
    assert "ADD_ID" in result.recipe
    assert result.layer_cosine["fp8"] < result.layer_cosine["int8"] < result.layer_cosine["f16"] < 1
    bytes_of = result.token_bytes
    assert bytes_of["exact"] > bytes_of["partial_f32"] > bytes_of["f16"] > bytes_of["int8"] == bytes_of["fp8"]


def test_weights_that_come_before_the_experts(tmp_path: Path) -> None:
    shape = replace(find_shape("maverick"), d=1024, d_ff=512, n_expert=8, width=1024)
    result = check_shape(shape, tmp_path, 8 << 20, lambda: None)
    assert result.error == ""
    assert result.written == 8


@pytest.mark.parametrize("name", SHAPES)
def test_every_layer_can_be_written(name: str, tmp_path: Path) -> None:
    """The true shape, with as few experts as a token needs; the file is mostly hole."""
    shape = find_shape(name)
    layer = write_layer(replace(shape, k=1), tmp_path, shape.expert_bytes)
    assert layer.manifest.expert_bytes(0) == shape.expert_bytes
    assert layer.experts == (0,)
    assert layer.source.stat().st_blocks * 512 < 2 * shape.expert_bytes + (1 << 20)
    found = needs_of(GgufFile.open(layer.source))
    assert (found.n_expert, found.d_in, found.d_out) == (shape.n_expert, shape.d, shape.d)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_qwen_as_it_is() -> None:
    heard = []
    (result,) = gate_shapes(["Qwen3.5-122B"], lambda *what: heard.append(what), room=80 << 20)
    assert result.error == ""
    assert (result.d, result.d_ff, result.experts, result.written) == (3072, 1024, 256, 15)
    assert result.bytes_per_expert / 1e6 == pytest.approx(5.3, rel=0.01)
    assert 12_300 < result.token_bytes["f16"] < 12_600  # 6,144 bytes each way
    assert heard[0] == ("Qwen3.5-122B", 0, 1)
    assert heard[-1] == ("Qwen3.5-122B", 1, 1)


@pytest.mark.usefixtures("quick")
def test_ctrl_c_ends_it_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupted(_name: str, _done: int, _total: int) -> None:
        if any(tmp_path.glob("*/manifest.json")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gate_shapes(["qwen3moe"], interrupted, room=8 * find_shape("qwen3moe").expert_bytes)
    assert not list(tmp_path.iterdir())


def test_no_more_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(find_shape("qwen3moe"), d=256, d_ff=256, n_expert=16, width=256)
    result = check_shape(shape, tmp_path / "a", (shape.k - 1) * shape.expert_bytes, lambda: None)
    assert not result.passed
    assert result.error.startswith(
        "Qwen3-235B: 8 experts, as many as a token selects, take 1 MB, and there is room for"
    )
    assert not (tmp_path / "a" / "layer.gguf").exists()
    monkeypatch.setattr(real_layer, "_has_holes", lambda _folder: False)
    with pytest.raises(ModelError, match="makes no files with holes, and a whole layer takes 2 MB"):
        write_layer(shape, tmp_path / "b", 8 * shape.expert_bytes)
    assert not (tmp_path / "b" / "layer.gguf").exists()
    assert len(write_layer(shape, tmp_path / "c", 16 * shape.expert_bytes).experts) == 16  # then there are no holes


def test_unknown_names_and_the_table() -> None:
    assert len(MODELS) == len(SHAPES)
    with pytest.raises(UsageError):
        gate_shapes(["nobody"], lambda *_: None)


def test_what_does_not_pass(tmp_path: Path) -> None:
    shape = replace(find_shape("qwen3moe"), arch="no-such", d=256, d_ff=256, n_expert=4)
    result = check_shape(shape, tmp_path, 1 << 20, lambda: None)
    assert not result.passed
    assert result.error
    assert "\n" not in result.error
    result.identical, result.layer_cosine = True, {"partial_f32": 1.0, "f16": 1.0, "int8": 0.9, "fp8": float("nan")}
    assert "int8" in objection(result)
    result.layer_cosine["int8"] = 1.0
    assert "fp8" in objection(result)
