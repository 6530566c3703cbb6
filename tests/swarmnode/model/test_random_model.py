from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.model.backbone_file import remote_weights, write_backbone
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import build_manifest, digest_experts
from swarmnode.model.random_blocks import random_blocks, supported_types
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.model.store import SliceStore

from .conftest import Sample, swiglu_sites
from .ggml_oracle import tensors_that_ggml_reads


@pytest.mark.parametrize("name", supported_types())
def test_blocks_are_finite_and_of_the_size_asked_for(name: str) -> None:
    block = TYPE_BY_NAME[name]
    n_blocks = max(1, 50_000 // block.elements)
    raw = np.frombuffer(random_blocks(block.id, n_blocks * block.bytes, 0.02, np.random.default_rng(1)), np.uint8)
    if name == "Q1_0":  # one bit a weight, plus or minus the scale; the package cannot dequantise it
        values = raw.reshape(-1, block.bytes)[:, :2].copy().view(np.float16).astype(np.float32)
    else:
        typed = raw.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
        values = gguf.quants.dequantize(typed.reshape(1, -1), gguf.GGMLQuantizationType(block.id))
    assert np.isfinite(values).all()
    assert 0.015 < float(np.sqrt(np.mean(np.square(values.astype(np.float64))))) < 0.027
    if name != "Q1_0":
        assert abs(float(values.mean())) < 0.004


def test_types_that_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        random_blocks(TYPE_BY_NAME["Q8_K"].id, 292, 1.0, np.random.default_rng(0))


def test_seed_decides_the_bytes(sample: Sample, tmp_path: Path) -> None:
    [again] = write_random_model(sample.shape, tmp_path / "again.gguf")
    assert again.read_bytes() == sample.path.read_bytes()


def test_llama_cpps_parser_reads_all_parts(sample: Sample) -> None:
    assert list(tensors_that_ggml_reads(sample.path)) == list(sample.gguf.tensors)
    assert [name for part in sample.parts for name in tensors_that_ggml_reads(part)] == list(sample.gguf.tensors)


def test_impossible_shapes(tmp_path: Path) -> None:
    for shape in (RandomModel(vocab=10), RandomModel(d_model=100), RandomModel(n_used=9)):
        with pytest.raises(ValueError, match="no model has"):
            write_random_model(shape, tmp_path / "x.gguf")


def test_memory_stays_far_below_the_models_size(tmp_path: Path) -> None:
    """48 MiB of experts, 12 MiB each, go through every tool in pieces."""
    shape = RandomModel(
        d_model=1024,
        n_layers=1,
        n_ff_expert=1024,
        n_expert=4,
        vocab=300,
        expert_types={"gate": "F32", "up": "F32", "down": "F32"},
        dense_type="F16",
        n_ff_shared=64,
    )
    sites = swiglu_sites(shape)
    tracemalloc.start()
    try:
        [path] = write_random_model(shape, tmp_path / "wide.gguf")
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        model = GgufFile.open(path)
        manifest = build_manifest(model, sites, digest_experts(model, sites, threads=2))
        write_backbone(model, tmp_path / "backbone.gguf", remote_weights(model))
        with SliceStore(tmp_path / "store", manifest) as store:
            store.fill_from_source(path, {0: range(4)})
            store.verify()
            assert len(store.stacked(0)) == 3
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < 24 << 20
    assert read < 10 << 20  # pieces of 1 MiB; how many at once is the scheduler's choice
