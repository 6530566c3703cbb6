from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.errors import ManifestMismatch, ModelError, RecipeError
from swarmnode.model import manifest as manifest_module
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.manifest import (
    Manifest,
    build_manifest,
    check_source,
    compute_model_hash,
    decode_manifest,
    digest_experts,
    encode_manifest,
    load_manifest,
    save_manifest,
)
from swarmnode.model.random_model import RandomModel, write_random_model

from .conftest import Sample, swiglu_sites


def test_digests_are_over_the_slices_in_the_order_of_the_site(sample: Sample) -> None:
    for site in range(2):
        for expert in range(6):
            expected = hashlib.sha256(b"".join(sample.slices(site, expert))).hexdigest()
            assert sample.manifest.digests[site][expert] == expected


def test_digest_progress_ends_at_the_total(sample: Sample) -> None:
    seen: list[tuple[int, int]] = []
    digest_experts(sample.gguf, sample.sites, lambda done, total: seen.append((done, total)), threads=1)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    weights = sum(tensor.n_bytes for tensor in sample.gguf.expert_tensors().values())
    assert seen[-1] == (weights, weights)


def test_describes_the_model(sample: Sample) -> None:
    m = sample.manifest
    assert (m.architecture, m.n_layers, m.d_model, m.n_expert, m.n_used) == ("qwen2moe", 2, 128, 6, 2)
    assert m.shared_expert
    assert m.source_files[0].name == "tiny.gguf"
    assert m.source_files[0].size == sample.path.stat().st_size
    tensor = m.tensor("blk.1.ffn_up_exps.weight")
    data = sample.path.read_bytes()[tensor.offset : tensor.offset + 6 * tensor.stride]
    assert b"".join(sample.slices(1, e)[1] for e in range(6)) == data
    assert m.expert_bytes(0) == sum(map(len, sample.slices(0, 0)))


def test_model_hash_depends_on_content_alone(sample: Sample, tmp_path: Path) -> None:
    def hash_of(path: Path) -> str:
        gguf = GgufFile.open(path)
        return build_manifest(gguf, sample.sites, digest_experts(gguf, sample.sites)).model_hash

    assert hash_of(Path(shutil.copy(sample.path, tmp_path / "renamed.gguf"))) == sample.manifest.model_hash
    assert hash_of(sample.parts[1]) == sample.manifest.model_hash
    altered = bytearray(sample.path.read_bytes())
    altered[sample.manifest.tensor("blk.0.ffn_down_exps.weight").offset + 100] ^= 1
    (tmp_path / "altered.gguf").write_bytes(altered)
    assert hash_of(tmp_path / "altered.gguf") != sample.manifest.model_hash


def test_saves_and_loads(sample: Sample, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "manifest.json"
    save_manifest(sample.manifest, path)
    save_manifest(sample.manifest, path)
    assert load_manifest(path) == sample.manifest
    assert [file.name for file in path.parent.iterdir()] == ["manifest.json"]


def test_files_that_cannot_be_read_or_written(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"absent.json: cannot be read \(No such file"):
        load_manifest(tmp_path / "absent.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        save_manifest(sample.manifest, tmp_path / "file" / "manifest.json")
    save_manifest(sample.manifest, tmp_path / "manifest.json")
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", 1000)
    with pytest.raises(ManifestMismatch, match="at most 1000 are read"):
        load_manifest(tmp_path / "manifest.json")


Change = Callable[[dict[str, Any]], None]  # Any: a JSON document


def first(document: dict[str, Any], key: str, **values: object) -> None:
    document[key][0].update(values)


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "format": (lambda d: d.update(format=2), "reads format 1"),
    "no sites": (lambda d: d.update(sites=[], digests=[]), "0 sites"),
    "site index": (lambda d: first(d, "sites", index=1), "calls itself 1"),
    "unknown tensor": (lambda d: first(d, "sites", tensors=["a"]), "does not list"),
    "expert count": (lambda d: first(d, "sites", n_expert=5), "not one digest per expert"),
    "too many used": (lambda d: first(d, "sites", n_used=7), "6 experts"),
    "digest missing": (lambda d: d["digests"][0].pop(), "not one digest"),
    "digest list missing": (lambda d: d["digests"].pop(), "not one list"),
    "digest no hash": (lambda d: d["digests"][0].__setitem__(0, "f" * 64 + "\n"), "regex"),
    "stride": (lambda d: first(d, "tensors", stride=32), "its shape makes"),
    "ggml type": (lambda d: first(d, "tensors", ggml_type=4), "cannot be cut"),
    "dimensions": (lambda d: first(d, "tensors", ne=[1, 1, 1, 1, 6]), "shape"),
    "overflow": (lambda d: first(d, "tensors", ne=[1 << 52, 1 << 52, 6]), "its shape makes"),
    "file number": (lambda d: first(d, "tensors", file=1), "not listed"),
    "offset": (lambda d: first(d, "tensors", offset=1 << 40), "ends at byte"),
    "path in a name": (lambda d: first(d, "source_files", name="../../etc/passwd"), "no plain file name"),
    "model hash": (lambda d: d.update(model_hash="0" * 64), "model_hash says"),
    "tokenizer": (lambda d: d.update(tokenizer_hash="0" * 64), "model_hash says"),
    "other digest": (lambda d: d["digests"][0].__setitem__(0, "f" * 64), "model_hash says"),
    "unknown field": (lambda d: d.update(extra=1), "unknown field"),
    "negative": (lambda d: d.update(d_model=-1), "d_model"),
    "huge": (lambda d: d.update(d_model=10**30), "not a manifest"),
    "line break": (lambda d: d.update(name="a\nb"), "control characters"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(sample: Sample, case: str) -> None:
    change, message = CONTRADICTIONS[case]
    document = msgspec.json.decode(encode_manifest(sample.manifest))
    change(document)
    with pytest.raises(ManifestMismatch, match=message) as caught:
        decode_manifest(msgspec.json.encode(document), "peer's manifest")
    assert str(caught.value).startswith("peer's manifest: ")
    assert "\n" not in str(caught.value)


def test_unusable_recipes_are_refused(sample: Sample) -> None:
    document = msgspec.json.decode(encode_manifest(sample.manifest))
    document["sites"][0]["recipe"]["steps"][2]["op"] = "FORMAT_DISK"
    with pytest.raises(RecipeError):
        decode_manifest(msgspec.json.encode(document))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_mutation_is_refused_or_equal(sample: Sample, data: st.DataObject) -> None:
    raw = bytearray(encode_manifest(sample.manifest))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    with contextlib.suppress(ManifestMismatch, RecipeError):
        decoded = decode_manifest(bytes(raw))
        assert decoded.model_hash == compute_model_hash(decoded)


@pytest.mark.parametrize("data", [b"", b"[", b"null", b"[" * 100_000, b'{"format":' + b"1" * 5000 + b"}", b"\xff"])
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestMismatch, match="not a manifest"):
        decode_manifest(data)


def test_sites_of_another_model_are_refused(sample: Sample, tmp_path: Path) -> None:
    shape = RandomModel(d_model=128, n_layers=1, n_ff_expert=64, n_expert=4, vocab=300, n_ff_shared=64)
    gguf = GgufFile.open(write_random_model(shape, tmp_path / "other.gguf")[0])
    with pytest.raises(ManifestMismatch, match="file lacks"):
        digest_experts(gguf, [msgspec.structs.replace(sample.sites[1], n_expert=4)])
    with pytest.raises(ManifestMismatch, match="stacks 4 experts"):
        digest_experts(gguf, sample.sites[:1])
    own = swiglu_sites(shape)
    with pytest.raises(ManifestMismatch, match="not one list of digests"):
        build_manifest(gguf, own, ())
    with pytest.raises(ManifestMismatch, match=r"blk.0.ffn_gate_exps.weight is type 8.*onboarded"):
        check_source(sample.manifest, gguf)


def test_backbone_hash_is_not_the_models(sample: Sample) -> None:
    digests: tuple[tuple[str, ...], ...] = sample.manifest.digests
    other = build_manifest(sample.gguf, sample.sites, digests, backbone_sha256="ab" * 32)
    assert isinstance(other, Manifest)
    assert other.backbone_sha256 == "ab" * 32
    assert other.model_hash == sample.manifest.model_hash
