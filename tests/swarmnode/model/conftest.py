"""Tiny models: a single file, the same split in parts, their sites and their manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from swarmnode.compute.recipe import Recipe, Site, Step
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import Manifest, build_manifest, digest_experts
from swarmnode.model.random_model import RandomModel, write_random_model

# What llama.cpp's graph of qwen2moe yields: gate and up, SwiGLU (ggml's GLU op 2), down.
SWIGLU = Recipe(
    steps=(
        Step("MUL_MAT_ID", ("t0", "x")),
        Step("MUL_MAT_ID", ("t1", "x")),
        Step("GLU", ("s0", "s1"), (2,)),
        Step("MUL_MAT_ID", ("t2", "s2")),
    ),
    weights="after",
)


def swiglu_sites(shape: RandomModel) -> tuple[Site, ...]:
    return tuple(
        Site(
            index=layer,
            layer=layer,
            d_in=shape.d_model,
            d_out=shape.d_model,
            n_expert=shape.n_expert,
            n_used=shape.n_used,
            tensors=tuple(f"blk.{layer}.ffn_{name}_exps.weight" for name in ("gate", "up", "down")),
            recipe=SWIGLU,
        )
        for layer in range(shape.n_layers)
    )


@dataclass(frozen=True)
class Sample:
    """A tiny model on disk."""

    shape: RandomModel
    path: Path
    parts: tuple[Path, ...]
    gguf: GgufFile
    sites: tuple[Site, ...]
    manifest: Manifest

    def slices(self, site: int, expert: int) -> list[bytes]:
        """An expert's bytes, cut from the file by hand."""
        data = self.path.read_bytes()
        tensors = [self.gguf.tensors[name] for name in self.sites[site].tensors]
        strides = [tensor.n_bytes // self.shape.n_expert for tensor in tensors]
        return [
            data[t.offset + expert * stride : t.offset + (expert + 1) * stride]
            for t, stride in zip(tensors, strides, strict=True)
        ]


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    folder = tmp_path_factory.mktemp("sample")
    shape = RandomModel(
        d_model=128,
        n_layers=2,
        n_ff_expert=64,
        n_expert=6,
        n_used=2,
        vocab=300,
        expert_types={"gate": "Q4_0", "up": "Q8_0", "down": "Q5_1"},
        n_ff_shared=64,
        seed=11,
    )
    [path] = write_random_model(shape, folder / "tiny.gguf")
    parts = write_random_model(shape, folder / "split.gguf", parts=3)
    gguf = GgufFile.open(path)
    sites = swiglu_sites(shape)
    manifest = build_manifest(gguf, sites, digest_experts(gguf, sites))
    return Sample(shape, path, tuple(parts), gguf, sites, manifest)
