"""Tiny models: ordinary files, the same each time, and as small as said."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
from pathlib import Path

import numpy as np
import pytest

from swarmnode.architectures.metadata import VOCAB, Shape, metadata
from swarmnode.architectures.tiny_model import ARCHITECTURES, LISTED_FROM, write_tiny_model
from swarmnode.architectures.variants import PATTERNS, TYPES, VARIANTS, variants_of
from swarmnode.backbone.hook import GraphRecorder
from swarmnode.backbone.library import library
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.compute.ggml_types import BLOCK_TYPES
from swarmnode.errors import ModelError, UsageError
from swarmnode.model.gguf_file import GgufFile


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    one = write_tiny_model(tmp_path / "a" / "one.gguf", "qwen35moe", "merged", "Q4_0")
    other = write_tiny_model(tmp_path / "b" / "other.gguf", "qwen35moe", "merged", "Q4_0")
    assert one.read_bytes() == other.read_bytes()
    assert one.stat().st_size < 5_000_000
    assert [path.name for path in one.parent.iterdir()] == ["one.gguf"]


@pytest.mark.parametrize("ggml_type", TYPES)
def test_expert_weights_have_the_type_and_no_expert_is_like_another(tmp_path: Path, ggml_type: str) -> None:
    gguf = GgufFile.open(write_tiny_model(tmp_path / "m.gguf", "llama", ggml_type=ggml_type))
    for name, tensor in gguf.expert_tensors().items():
        assert BLOCK_TYPES[tensor.ggml_type].name == ggml_type, name
        raw = np.fromfile(tmp_path / "m.gguf", np.uint8, tensor.n_bytes, offset=tensor.offset)
        assert len({part.tobytes() for part in np.split(raw, tensor.ne[-1])}) == tensor.ne[-1]


def test_hashed_experts_are_a_table_of_different_ones(tmp_path: Path) -> None:
    gguf = GgufFile.open(write_tiny_model(tmp_path / "m.gguf", "deepseek4", "hash"))
    table = gguf.tensors["blk.0.ffn_gate_tid2eid.weight"]
    ids = np.fromfile(gguf.paths[0], "<i4", VOCAB * 3, offset=table.offset).reshape(VOCAB, 3)
    assert ids.min() == 0
    assert ids.max() == 7
    assert all(len(set(row)) == 3 for row in ids.tolist())


def test_what_there_is_not_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no variant upside"):
        write_tiny_model(tmp_path / "m.gguf", "llama", "upside")
    with pytest.raises(ModelError, match="unknown model architecture"):
        write_tiny_model(tmp_path / "m.gguf", "no-such-thing")
    assert not (tmp_path / "m.gguf").exists()


def graph_of(path: Path) -> list[tuple[object, ...]]:
    recorder = GraphRecorder()
    with contextlib.closing(LlamaModel(path, remote_experts=False)) as model:
        context = LlamaContext(model, n_context=32, n_batch=8, threads=1, callback=recorder)
        with contextlib.closing(context):
            context.decode([1, 1], 0, all_logits=True)
    return [(node.op, node.ne, node.params, node.sources) for node in recorder.nodes]


@pytest.mark.parametrize("arch", ["hy_v3", "deepseek4", "nemotron_h_moe", "step35", "ernie4_5-moe"])
def test_a_variant_has_another_graph(tmp_path: Path, arch: str) -> None:
    graphs = [graph_of(write_tiny_model(tmp_path / f"{name}.gguf", arch, name)) for name in variants_of(arch)]
    assert len(graphs) > 4
    assert all(one != other for one, other in itertools.combinations(graphs, 2))


def test_the_tables_name_architectures_that_there_are() -> None:
    assert len(set(ARCHITECTURES)) == len(ARCHITECTURES)
    for variant in VARIANTS.values():
        named = {*(variant.of or "").split(), *variant.not_of.split()}
        assert named <= set(ARCHITECTURES)
    assert all(PATTERNS[arch] in variants_of(arch) for arch in PATTERNS)
    assert all(metadata(arch, Shape())["expert_count"] == 8 for arch in ARCHITECTURES)


def test_the_list_is_of_the_installed_release() -> None:
    installed = importlib.metadata.version("llama-cpp-python")
    assert installed == LISTED_FROM, (
        f"llama-cpp-python {installed} is installed, and ARCHITECTURES was read off {LISTED_FROM}. Look through "
        "src/models of its llama.cpp for files that call build_moe_ffn, and add their names to _NAMES in "
        "swarmnode/architectures/tiny_model.py; look at llama-hparams.h and those graphs for new variants "
        "(variants.py); run `swarmnode gate --arch all`, then tools/models_page.py; then change LISTED_FROM"
    )


def test_the_library_knows_every_name() -> None:
    library_file = Path(str(library()._lib._name))
    data = library_file.read_bytes()
    assert [arch for arch in ARCHITECTURES if b"\0" + arch.encode() + b"\0" not in data] == []
