from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from swarmnode.errors import ManifestMismatch, ModelError
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import build_manifest, digest_experts
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.model.slicing import StackedTensor, is_aligned
from swarmnode.model.source_bank import SourceBank

from .conftest import Sample, swiglu_sites

UP = "blk.0.ffn_up_exps.weight"


def check_stack(sample: Sample, site: int, stacks: dict[str, StackedTensor], experts: tuple[int, ...]) -> None:
    """The stacks of a site are these experts' slices."""
    assert tuple(stacks) == sample.sites[site].tensors
    for n, stack in enumerate(stacks.values()):
        assert stack.experts == experts
        assert stack.data.tobytes() == b"".join(sample.slices(site, expert)[n] for expert in experts)
        assert len(stack.data) == len(experts) * stack.stride
        assert is_aligned(stack.data)
        assert not stack.data.flags.writeable


def test_all_experts_without_a_copy(sample: Sample) -> None:
    bank = SourceBank(sample.gguf, sample.manifest)
    for site in range(2):
        check_stack(sample, site, bank.stacked(site), (0, 1, 2, 3, 4, 5))
    check_stack(sample, 1, bank.stacked(1, [3, 2, 4]), (2, 3, 4))
    assert bank.copied_bytes == 0
    assert np.shares_memory(bank.stacked(0)[UP].data, bank.stacked(0)[UP].data)
    assert bank.holdings() == {0: (0, 1, 2, 3, 4, 5), 1: (0, 1, 2, 3, 4, 5)}


def test_scattered_experts_are_copied(sample: Sample) -> None:
    bank = SourceBank(sample.path, sample.manifest)
    check_stack(sample, 0, bank.stacked(0, {5, 0, 2}), (0, 2, 5))
    assert bank.copied_bytes == 3 * sample.manifest.expert_bytes(0)
    assert bank.stacked(0, []) == {}


def test_unaligned_experts_are_copied(tmp_path: Path) -> None:
    shape = RandomModel(
        d_model=64,
        n_layers=1,
        n_ff_expert=33,
        n_expert=3,
        vocab=300,
        expert_types={"gate": "Q4_0", "up": "Q4_0", "down": "F32"},
        n_ff_shared=64,
    )
    [path] = write_random_model(shape, tmp_path / "odd.gguf")
    gguf = GgufFile.open(path)
    sites = swiglu_sites(shape)
    manifest = build_manifest(gguf, sites, digest_experts(gguf, sites))
    odd = Sample(shape, path, (path,), gguf, sites, manifest)
    bank = SourceBank(gguf, manifest)
    check_stack(odd, 0, bank.stacked(0, [1, 2]), (1, 2))
    assert bank.copied_bytes > 0
    check_stack(odd, 0, bank.stacked(0), (0, 1, 2))


def test_split_files_and_views_that_outlive_the_bank(sample: Sample) -> None:
    bank = SourceBank(sample.parts[0], sample.manifest)
    stacks = bank.stacked(1)
    bank.close()
    check_stack(sample, 1, stacks, (0, 1, 2, 3, 4, 5))


def test_wrong_questions(sample: Sample, tmp_path: Path) -> None:
    bank = SourceBank(sample.gguf, sample.manifest)
    for site, experts in ((2, None), (-1, None), (0, [6]), (0, [-1])):
        with pytest.raises(ModelError, match="does not exist"):
            bank.stacked(site, experts)
    other = RandomModel(d_model=64, n_layers=2, n_ff_expert=64, n_expert=6, vocab=300, n_ff_shared=64)
    [path] = write_random_model(other, tmp_path / "other.gguf")
    with pytest.raises(ManifestMismatch, match="onboarded"):
        SourceBank(path, sample.manifest)


def test_a_file_cut_after_opening(sample: Sample, tmp_path: Path) -> None:
    path = Path(shutil.copy(sample.path, tmp_path))
    bank = SourceBank(path, sample.manifest)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="had"):
        bank.stacked(0)
