from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import gguf
import pytest

import swarmnode
from swarmnode.compute.ggml_types import BLOCK_TYPES
from swarmnode.errors import ManifestMismatch, ModelError, TruncatedFile
from swarmnode.model.backbone_file import hole_type, remote_weights, write_backbone
from swarmnode.model.gguf_encode import TensorInfo, encode_header, encode_pair
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.gguf_metadata import ValueType

from .conftest import Sample
from .ggml_oracle import tensors_that_ggml_reads

DEMO = Path(swarmnode.__file__).parent / "data" / "pystdlib-moe-15m-Q4_K_M.gguf"


def fields(path: Path) -> dict[str, object]:
    reader = gguf.GGUFReader(path)
    return {k: (f.types, f.contents()) for k, f in reader.fields.items() if not k.startswith("GGUF.")}


def check_cut(source: Path, out: Path) -> None:
    """`out` is `source` with all expert weights remote."""
    original = GgufFile.open(source)
    remote = remote_weights(original)
    info = write_backbone(original, out, remote)
    cut = GgufFile.open(out)

    assert fields(out) == fields(source)
    assert [cut.metadata.raw(key) for key in cut.metadata] == [original.metadata.raw(key) for key in original.metadata]
    assert list(cut.tensors) == [n for n in original.tensors if n not in remote] + [
        n for n in original.tensors if n in remote
    ]
    before = {t.name: t for t in gguf.GGUFReader(source).tensors}
    for tensor in gguf.GGUFReader(out).tensors:
        assert tensor.shape.tolist() == before[tensor.name].shape.tolist()
        if tensor.name in remote:
            assert tensor.tensor_type == gguf.GGMLQuantizationType(hole_type(int(tensor.shape[0])))
            assert tensor.data_offset >= info.data_bytes
            assert not tensor.data.any()
        else:
            assert tensor.tensor_type == before[tensor.name].tensor_type
            assert tensor.data.tobytes() == before[tensor.name].data.tobytes()
    assert list(tensors_that_ggml_reads(out)) == list(cut.tensors)

    stat = out.stat()
    assert stat.st_size == info.logical_bytes
    assert hashlib.sha256(out.read_bytes()[: info.data_bytes]).hexdigest() == info.sha256
    experts = sum(original.tensors[name].n_bytes for name in remote)
    assert info.data_bytes <= source.stat().st_size - experts + 4096
    if hasattr(stat, "st_blocks"):
        assert stat.st_blocks * 512 <= info.data_bytes + (64 << 10)


def test_cuts_a_tiny_model(sample: Sample, tmp_path: Path) -> None:
    check_cut(sample.path, tmp_path / "backbone.gguf")


def test_cuts_the_shipped_model(tmp_path: Path) -> None:
    check_cut(DEMO, tmp_path / "backbone.gguf")
    cut = GgufFile.open(tmp_path / "backbone.gguf")
    assert {BLOCK_TYPES[t.ggml_type].name for t in cut.expert_tensors().values()} == {"Q1_0"}


def test_same_bytes_every_time_and_from_split_files(sample: Sample, tmp_path: Path) -> None:
    remote = remote_weights(sample.gguf)
    outs = [tmp_path / name for name in ("a.gguf", "b.gguf", "split.gguf")]
    sources = (sample.gguf, sample.gguf, GgufFile.open(sample.parts[2]))
    infos = {write_backbone(source, out, remote) for source, out in zip(sources, outs, strict=True)}
    assert len(infos) == 1
    assert len({out.read_bytes() for out in outs}) == 1


def test_alignment_of_the_source_is_kept(tmp_path: Path) -> None:
    pairs = [
        encode_pair("general.architecture", ValueType.STRING, "qwen2moe"),
        encode_pair("general.alignment", ValueType.UINT32, 256),
    ]
    tensors = [
        TensorInfo("blk.0.ffn_up_exps.weight", 0, (33, 2, 2)),
        TensorInfo("a", 0, (3,)),
        TensorInfo("b", 0, (5,)),
    ]
    source = tmp_path / "source.gguf"
    source.write_bytes(encode_header(pairs, tensors, 256).ljust(2048, b"\7"))
    opened = GgufFile.open(source)
    write_backbone(opened, tmp_path / "out.gguf", {"blk.0.ffn_up_exps.weight"})
    cut = GgufFile.open(tmp_path / "out.gguf")
    assert cut.alignment == 256
    assert [t.offset % 256 for t in cut.tensors.values()] == [0, 0, 0]
    assert BLOCK_TYPES[cut.tensors["blk.0.ffn_up_exps.weight"].ggml_type].name == "F16"  # 33 is no whole block
    assert list(tensors_that_ggml_reads(tmp_path / "out.gguf")) == ["a", "b", "blk.0.ffn_up_exps.weight"]


@pytest.mark.parametrize(("ne0", "name"), [(3072, "Q1_0"), (256, "Q1_0"), (1440, "Q4_0"), (64, "Q4_0"), (100, "F16")])
def test_smallest_type_that_fits(ne0: int, name: str) -> None:
    assert BLOCK_TYPES[hole_type(ne0)].name == name


@pytest.mark.parametrize("name", ["blk.0.ffn_up_exps.bias", "blk.0.attn_q.weight", "blk.9.ffn_up_exps.weight"])
def test_only_expert_weights_of_the_model_can_be_remote(sample: Sample, tmp_path: Path, name: str) -> None:
    with pytest.raises(ManifestMismatch, match="not an expert weight"):
        write_backbone(sample.gguf, tmp_path / "out.gguf", {name})
    assert list(tmp_path.iterdir()) == []


def test_failure_leaves_the_old_file_and_nothing_else(sample: Sample, tmp_path: Path) -> None:
    source = Path(shutil.copy(sample.path, tmp_path / "source.gguf"))
    opened = GgufFile.open(source)
    out = tmp_path / "out.gguf"
    out.write_text("old")
    source.write_bytes(source.read_bytes()[:30_000])
    with pytest.raises(TruncatedFile):
        write_backbone(opened, out, remote_weights(opened))
    assert out.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"source.gguf", "out.gguf"}
    with pytest.raises(ModelError, match="cannot be written"):
        write_backbone(sample.gguf, out / "below a file.gguf", set())
