"""A value that is no number, wherever it lies, is one line when a model is onboarded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from swarmnode.errors import BrokenModel, ModelError
from swarmnode.model.backbone_file import remote_weights
from swarmnode.model.backbone_values import check_values
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import onboard
from tests.swarmnode.model.gguf_editor import Editor


def nothing(_done: int, _total: int) -> None: ...


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_no_numbers_are_found(tmp_path: Path, kind: str, value: float) -> None:
    [path] = write_random_model(RandomModel(), tmp_path / "r.gguf")
    whole = Editor.of(path)

    def values(bad: float) -> np.ndarray:
        all_of_them = np.ones((6, 700), np.float32)
        all_of_them[4, 3] = bad
        if kind == "BF16":
            return (all_of_them.view(np.uint32) >> 16).astype(np.uint16)
        return all_of_them.astype(np.float16 if kind == "F16" else np.float32)

    for bad, passes in ((value, False), (-3e4, True)):
        edited = whole.copy()
        edited.add("blk.1.ffn_down_exps.bias", (700, 6), values(bad), kind)
        opened = GgufFile.open(edited.write(tmp_path / "m.gguf"))
        if passes:
            check_values(opened, remote_weights(opened), "model", nothing)
            continue
        with pytest.raises(BrokenModel, match=r"model: blk.1.ffn_down_exps.bias of expert 4 holds NaN or infinity"):
            check_values(opened, remote_weights(opened), "model", nothing)


@pytest.mark.parametrize("tensor", ["output_norm.weight", "blk.1.attn_norm.weight", "token_embd.weight"])
def test_nan_that_no_logit_shows(tmp_path: Path, tensor: str) -> None:
    """ggml quantises what comes out of a norm, and that skips NaN: logits are finite, and the same everywhere."""
    file = tmp_path / "q.gguf"
    write_random_model(RandomModel(dense_type="Q8_0"), file)
    where = GgufFile.open(file).tensors[tensor]
    value = np.float32(np.nan) if where.ggml_type == 0 else np.float16(np.inf)  # a block's scale
    with file.open("r+b") as opened:
        opened.seek(where.offset)
        opened.write(value.tobytes())
    with pytest.raises(ModelError, match=rf"q\.gguf: {tensor} holds NaN or infinity; fetch the file again$"):
        onboard(file, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize(("value", "passes"), [(np.inf, True), (-np.inf, True), (np.nan, False)])
def test_infinity_where_it_means_something(tmp_path: Path, value: float, passes: bool) -> None:
    [path] = write_random_model(RandomModel(), tmp_path / "r.gguf")
    edited = Editor.of(path)
    edited.add("blk.1.exp_probs_b.bias", (6,), np.array([0, 0, value, 0, 0, 0], np.float32))
    opened = GgufFile.open(edited.write(tmp_path / "m.gguf"))
    if passes:
        check_values(opened, remote_weights(opened), "model", nothing)
        return
    with pytest.raises(BrokenModel, match=r"^model: blk.1.exp_probs_b.bias holds NaN; fetch the file again$"):
        check_values(opened, remote_weights(opened), "model", nothing)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tensor", ["blk.1.ffn_gate_inp.bias", "blk.1.ssm_a"])
@pytest.mark.parametrize(("value", "said"), [(-np.inf, ""), (np.inf, "+infinity"), (np.nan, "NaN")])
def test_minus_infinity_where_it_alone_means_something(
    tmp_path: Path, tensor: str, kind: str, value: float, said: str
) -> None:
    """A router's bias of an expert that is switched off, and a state that keeps nothing."""
    [path] = write_random_model(RandomModel(), tmp_path / "r.gguf")
    edited = Editor.of(path)
    values = np.array([0, 0, value, -1, 0, 0], np.float32)
    if kind == "BF16":
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = values.astype(np.float16 if kind == "F16" else np.float32)
    edited.add(tensor, (6,), stored, kind)
    opened = GgufFile.open(edited.write(tmp_path / "m.gguf"))
    if not said:
        check_values(opened, remote_weights(opened), "model", nothing)
        return
    with pytest.raises(BrokenModel, match=rf"^model: {tensor} holds {re.escape(said)}; fetch the file again$"):
        check_values(opened, remote_weights(opened), "model", nothing)


def test_the_routers_matrix_is_finite(tmp_path: Path) -> None:
    [path] = write_random_model(RandomModel(), tmp_path / "r.gguf")
    opened = GgufFile.open(path)
    where = opened.tensors["blk.1.ffn_gate_inp.weight"]
    with path.open("r+b") as file:
        file.seek(where.offset)
        file.write(np.float32(-np.inf).tobytes())
    with pytest.raises(BrokenModel, match=r"ffn_gate_inp\.weight holds NaN or infinity"):
        check_values(GgufFile.open(path), remote_weights(opened), "model", nothing)
