"""Any header whatever is a model or one line. First what reads it here, then onboarding, with llama.cpp behind it."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from swarmnode import onboard as onboarding
from swarmnode.compute.ggml_types import BLOCK_TYPES
from swarmnode.errors import EngineError, ModelError
from swarmnode.model.backbone_file import remote_weights
from swarmnode.model.backbone_values import check_values
from swarmnode.model.gguf_check import check_model
from swarmnode.model.gguf_encode import encode_pair
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.gguf_metadata import INTEGERS, SCALARS, ValueType
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import onboard
from tests.swarmnode.backbone.hybrid_model import write_hybrid_model
from tests.swarmnode.model.gguf_editor import Editor

SECONDS = 60  # far more than any of them takes
EDGES = st.sampled_from(
    [0, 1, 2, 3, 5, 127, 255, 256, 511, 512, 513, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
)
FLOATS = st.sampled_from([0.0, -1.0, 1e-30, 1e30, -1e30, float("inf"), float("-inf"), float("nan")])
TEXTS = st.sampled_from(
    [b"", b"x", b"\n", b"\xff\xfe", b"qwen2moe", b"llama", b"gpt2", b"none", b"%s%n", b"y" * 70_000]
)
NAMES = st.sampled_from(["blk.0.ffn_up_exps.scale", "blk.9.attn_q.weight", "blk.1.ffn_gate_exps.weight", "x", "y" * 63])
TYPES = st.sampled_from([*BLOCK_TYPES, 4, 31, 99, 2**32 - 1])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Editor]:
    folder = tmp_path_factory.mktemp("fuzz")
    shape = RandomModel(
        d_model=64,
        n_layers=2,
        n_ff_expert=32,
        n_expert=4,
        vocab=300,
        n_ff_shared=32,
        head_size=32,
        expert_types={"gate": "F32", "up": "F16", "down": "Q8_0"},
    )
    [path] = write_random_model(shape, folder / "r.gguf")
    return [Editor.of(path), Editor.of(write_hybrid_model(folder / "h.gguf", "kimi-linear"))]


def break_a_value(data: st.DataObject, edited: Editor) -> None:
    """Another value, another type, or no such key."""
    key = data.draw(st.sampled_from(list(edited.pairs)))
    what = data.draw(st.sampled_from(["number", "float", "text", "list", "gone", "again", "type"]))
    match what:
        case "number":
            kind = ValueType(data.draw(st.sampled_from(sorted(INTEGERS))))
            size = SCALARS[kind].size
            value = (data.draw(EDGES) % (1 << 8 * size)).to_bytes(size, "little")
            edited.set(key, kind, SCALARS[kind].unpack(value)[0])
        case "float":
            edited.set(key, ValueType.FLOAT32, data.draw(FLOATS))
        case "text":
            edited.set(key, ValueType.STRING, data.draw(TEXTS))
        case "list":
            kind = data.draw(st.sampled_from([ValueType.UINT32, ValueType.STRING, ValueType.FLOAT32, ValueType.BOOL]))
            item: str | int = "a" if kind == ValueType.STRING else 1
            edited.set_array(key, kind, [item] * data.draw(st.sampled_from([0, 1, 2, 3, 300])))
        case "gone":
            del edited.pairs[key]
        case "again":
            edited.pairs[key + " again"] = edited.pairs[key]
        case "type":
            start = 8 + len(key.encode())
            raw = edited.pairs[key]
            edited.pairs[key] = raw[:start] + struct.pack("<I", data.draw(st.integers(0, 14))) + raw[start + 4 :]


def break_a_tensor(data: st.DataObject, edited: Editor) -> None:
    """Another shape, type, place or name, or no such tensor."""
    if not edited.lines:
        return
    at = data.draw(st.integers(0, len(edited.lines) - 1))
    line = edited.lines[at]
    match data.draw(st.sampled_from(["one", "swap", "shape", "type", "offset", "name", "gone", "again"])):
        case "one":
            ne = list(line.ne) or [1]
            ne[data.draw(st.integers(0, len(ne) - 1))] = data.draw(EDGES)
            edited.lines[at] = replace(line, ne=tuple(ne))
        case "swap":
            edited.lines[at] = replace(line, ne=line.ne[::-1])
        case "shape":
            edited.lines[at] = replace(line, ne=tuple(data.draw(st.lists(EDGES, max_size=5))))
        case "type":
            edited.lines[at] = replace(line, ggml_type=data.draw(TYPES))
        case "offset":
            edited.lines[at] = replace(line, offset=data.draw(EDGES) // 32 * 32)
        case "name":
            edited.lines[at] = replace(line, name=data.draw(NAMES))
        case "gone":
            del edited.lines[at]
        case "again":
            edited.lines.append(line)


def broken(data: st.DataObject, models: list[Editor], *, most: int = 3) -> Editor:
    edited = models[data.draw(st.integers(0, len(models) - 1))].copy()
    for _ in range(data.draw(st.integers(1, most))):
        data.draw(st.sampled_from([break_a_value, break_a_tensor]))(data, edited)
    return edited


def expect_one_line(error: Exception, path: Path) -> None:
    text = str(error)
    assert text.isprintable(), text
    assert len(text.replace(str(path), "")) < 300, text


def read_all(path: Path) -> None:
    """All that is read of a model here."""
    began = time.monotonic()
    try:
        opened = GgufFile.open(path)
        check_model(opened)
        check_values(opened, remote_weights(opened), str(path), lambda _done, _total: None)
    except ModelError as error:
        expect_one_line(error, path)
    assert time.monotonic() - began < SECONDS


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_any_broken_field_is_one_line(tmp_path: Path, models: list[Editor], data: st.DataObject) -> None:
    read_all(broken(data, models).write_header(tmp_path / "f.gguf"))


@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_any_broken_byte_is_one_line(tmp_path: Path, models: list[Editor], data: st.DataObject) -> None:
    edited = models[data.draw(st.integers(0, len(models) - 1))]
    path = edited.write_header(tmp_path / "f.gguf")
    length = len(edited.header())
    with path.open("r+b") as file:
        for _ in range(data.draw(st.integers(1, 4))):
            file.seek(data.draw(st.integers(0, length)))
            file.write(data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f"])))
    os.truncate(path, data.draw(st.just(path.stat().st_size) | st.integers(0, length)))
    read_all(path)


@settings(max_examples=12, deadline=None, suppress_health_check=QUIET, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_onboarding_what_is_broken_is_one_line(tmp_path: Path, models: list[Editor], data: st.DataObject) -> None:
    """Here llama.cpp sees what the checks let through; where it ends its process, that is a line too."""
    path = broken(data, models, most=1).write(tmp_path / "f.gguf")
    pack = tmp_path / "pack"
    began = time.monotonic()
    try:
        done = onboard(path, pack)
    except (ModelError, EngineError) as error:
        expect_one_line(error, path)
        assert not pack.exists()
    else:
        for file in (done.backbone, *pack.iterdir()):
            file.unlink(missing_ok=True)
        pack.rmdir()
    assert time.monotonic() - began < SECONDS


# What llama.cpp answers with an assertion, and no check here can know for every architecture.
ENDS = {
    "a tokenizer without its tokens": (
        "tokenizer.ggml.model",
        encode_pair("tokenizer.ggml.model", ValueType.STRING, "bert"),
    ),
    "more groups used than there are": (
        "qwen2moe.expert_group_count",
        encode_pair("qwen2moe.expert_group_count", ValueType.UINT32, 4),
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_where_llama_cpp_ends_its_process(tmp_path: Path, models: list[Editor], case: str) -> None:
    edited = models[0].copy()
    key, pair = ENDS[case]
    edited.pairs[key] = pair
    path = edited.write(tmp_path / "f.gguf")
    with pytest.raises(ModelError, match=r"llama.cpp ended its process over this file") as caught:
        onboard(path, tmp_path / "pack")
    expect_one_line(caught.value, path)
    assert not (tmp_path / "pack").exists()


def test_an_architecture_of_the_future(tmp_path: Path, models: list[Editor]) -> None:
    edited = models[0].copy()
    for key in [key for key in edited.pairs if key.startswith("qwen2moe.")]:
        raw = edited.pairs.pop(key).replace(b"qwen2moe", b"qwen9moe")
        edited.pairs[key.replace("qwen2moe", "qwen9moe")] = raw
    edited.set("general.architecture", ValueType.STRING, "qwen9moe")
    path = edited.write(tmp_path / "f.gguf")
    with pytest.raises(
        ModelError, match=r"f.gguf: this llama.cpp does not know the architecture 'qwen9moe'; update"
    ) as caught:
        onboard(path, tmp_path / "pack")
    expect_one_line(caught.value, path)


def test_large_models_are_refused_before_they_are_copied(
    tmp_path: Path, models: list[Editor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onboarding, "ASK_BYTES", 0)
    stages: list[str] = []
    edited = models[0].copy()
    edited.set("qwen2moe.attention.head_count", ValueType.UINT32, 31)
    path = edited.write(tmp_path / "f.gguf")
    with pytest.raises(ModelError, match=r"f.gguf: llama.cpp cannot load it: check_tensor_dims") as caught:
        onboard(path, tmp_path / "pack", lambda stage, _done, _total: stages.append(stage))
    expect_one_line(caught.value, path)
    assert "backbone" not in stages
    for model in models:
        path = model.write(tmp_path / "f.gguf")
        assert onboard(path, tmp_path / f"pack{len(model.lines)}").manifest.sites
