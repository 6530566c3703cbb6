from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tracemalloc
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarmnode.errors import DenseModel, ModelError, NotGguf, TruncatedFile
from swarmnode.model.gguf_encode import TensorInfo, encode_array, encode_header, encode_pair
from swarmnode.model.gguf_file import EXPERT_TENSOR, GgufFile, SourceReader
from swarmnode.model.gguf_metadata import ValueType

from .conftest import Sample

ARCHITECTURE = encode_pair("general.architecture", ValueType.STRING, "qwen2moe")
KEY = struct.pack("<Q", 1) + b"k"


def header(*pairs: bytes, tensors: tuple[TensorInfo, ...] = (), alignment: int = 32) -> bytes:
    return encode_header([ARCHITECTURE, *pairs], tensors, alignment)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_reads_what_the_gguf_package_reads(sample: Sample) -> None:
    reader = gguf.GGUFReader(sample.path)
    ours = sample.gguf
    assert [
        (t.name, int(t.tensor_type), tuple(t.shape.tolist()), t.data_offset, t.n_bytes) for t in reader.tensors
    ] == [(t.name, t.ggml_type, t.ne, t.offset, t.n_bytes) for t in ours.tensors.values()]
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == fields
    assert list(ours.metadata) == list(fields)
    assert ours.alignment == reader.alignment


def test_every_value_type(tmp_path: Path) -> None:
    scalars = {kind: True if kind == ValueType.BOOL else 7 for kind in ValueType if kind not in (8, 9)}
    pairs = [encode_pair(f"s{kind}", kind, value) for kind, value in scalars.items()]
    pairs += [encode_array(f"a{kind}", kind, [value, value]) for kind, value in scalars.items()]
    pairs += [
        encode_array("texts", ValueType.STRING, ["", "ü", b"\xff"]),
        encode_array("none", ValueType.STRING, []),
        encode_pair("text", ValueType.STRING, "ünï\ncode"),
    ]
    metadata = GgufFile.open(write(tmp_path / "a.gguf", header(*pairs))).metadata
    for kind, value in scalars.items():
        assert metadata[f"s{kind}"] == value
        assert metadata[f"a{kind}"] == [value, value]
        assert metadata.array_length(f"a{kind}") == 2
        assert metadata.value_type(f"a{kind}") == ValueType.ARRAY
    assert metadata["texts"] == ["", "ü", "\ufffd"]
    assert metadata["none"] == []
    assert metadata["text"] == metadata.text("text") == "ünï\ncode"
    assert metadata.integer("a5") == 7
    assert metadata.integer("s7") is metadata.integer("text") is metadata.integer("absent") is None
    assert [metadata.raw(key) for key in metadata] == [ARCHITECTURE, *pairs]


def test_alignment_is_respected(tmp_path: Path) -> None:
    tensors = (TensorInfo("a", 0, (3,)), TensorInfo("b", 0, (5,)))
    raw = header(encode_pair("general.alignment", ValueType.UINT32, 128), tensors=tensors, alignment=128)
    opened = GgufFile.open(write(tmp_path / "a.gguf", raw + bytes(148)))
    assert opened.alignment == 128
    assert opened.tensors["b"].offset == len(raw) + 128


HOSTILE = {
    "empty": (b"", NotGguf, "too few"),
    "other magic": (b"GGML" + bytes(60), NotGguf, "not a GGUF file"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), NotGguf, "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), NotGguf, "big-endian.*gguf-convert-endian"),
    "endless tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), NotGguf, "are allowed"),
    "endless keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), NotGguf, "are allowed"),
    "endless key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), NotGguf, "metadata key of"),
    "endless string": (header(KEY + struct.pack("<IQ", 8, 1 << 62)), TruncatedFile, "the file has"),
    "endless array": (header(KEY + struct.pack("<IIQ", 9, 0, 1 << 62)), TruncatedFile, "the file has"),
    "endless strings": (header(KEY + struct.pack("<IIQ", 9, 8, 1 << 60)), TruncatedFile, "the file has"),
    "nested array": (header(KEY + struct.pack("<IIQ", 9, 9, 1)), NotGguf, "array of arrays"),
    "unknown type": (header(KEY + struct.pack("<I", 13)), NotGguf, "unknown value type 13"),
    "key twice": (header(ARCHITECTURE), NotGguf, "appears twice"),
    "long key twice": (header(*[encode_pair("k" * 60_000, ValueType.BOOL, True)] * 2), NotGguf, "appears twice"),
    "alignment list": (header(encode_array("general.alignment", ValueType.UINT32, [8])), NotGguf, "power of two"),
    "much of them": (header(encode_pair("\0" * 999, ValueType.BOOL, True)), NotGguf, "control characters"),
    "control characters": (header(encode_pair("a\nb", ValueType.BOOL, True)), NotGguf, "control characters"),
    "not UTF-8": (header(encode_pair("\0", ValueType.BOOL, True).replace(b"\0", b"\xff")), NotGguf, "metadata key"),
    "alignment 0": (header(encode_pair("general.alignment", ValueType.UINT32, 0)), NotGguf, "power of two"),
    "alignment 48": (header(encode_pair("general.alignment", ValueType.UINT32, 48)), NotGguf, "power of two"),
    "alignment text": (header(encode_pair("general.alignment", ValueType.STRING, "8")), NotGguf, "power of two"),
    "tensor name": (header(tensors=(TensorInfo("n" * 64, 0, (1,)),)) + bytes(64), NotGguf, "tensor name of 64"),
    "zero dimension": (header(tensors=(TensorInfo("t", 0, (0, 4)),)), NotGguf, "shape"),
    "five dimensions": (header(tensors=(TensorInfo("t", 0, (1,) * 5),)), NotGguf, "5 dimensions"),
    "half a block": (
        header(tensors=(TensorInfo("t", 0, (31,)),)).replace(struct.pack("<QI", 31, 0), struct.pack("<QI", 31, 2)),
        NotGguf,
        "not whole blocks",
    ),
    "removed type": (
        header(tensors=(TensorInfo("t", 0, (32,)),)).replace(struct.pack("<QI", 32, 0), struct.pack("<QI", 32, 4)),
        NotGguf,
        "ggml type 4",
    ),
    "odd offset": (
        header(tensors=(TensorInfo("t", 0, (32,)),)).replace(
            struct.pack("<QIQ", 32, 0, 0), struct.pack("<QIQ", 32, 0, 4)
        ),
        NotGguf,
        "alignment",
    ),
    "huge tensor": (header(tensors=(TensorInfo("t", 0, (1 << 62, 1 << 62)),)), TruncatedFile, "tensor t ends at byte"),
    "tensor twice": (header(tensors=(TensorInfo("t", 0, (8,)),) * 2) + bytes(64), NotGguf, "appears twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_with_one_line(tmp_path: Path, case: str) -> None:
    data, error, message = HOSTILE[case]
    path = write(tmp_path / "h.gguf", data)
    with pytest.raises(error, match=message) as caught:
        GgufFile.open(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value).replace(str(path), "")) < 300
    assert str(path) in str(caught.value)


def test_truncated_tensor_is_named_with_both_sizes(sample: Sample, tmp_path: Path) -> None:
    last = list(sample.gguf.tensors.values())[-1]
    size = last.offset + last.n_bytes - 1
    path = write(tmp_path / "short.gguf", sample.path.read_bytes()[:size])
    with pytest.raises(TruncatedFile, match=rf"short.gguf: tensor {last.name} ends at byte {size + 1}.* {size} bytes"):
        GgufFile.open(path)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo") if hasattr(os, "mkfifo") else (tmp_path / "fifo").mkdir()
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "absent.gguf"):
        with pytest.raises(ModelError, match=r"regular file|cannot be read"):
            GgufFile.open(path)


def test_a_sparse_file_of_terabytes_costs_nothing(tmp_path: Path) -> None:
    """A header that claims an array as large as the file must not be believed."""
    path = write(tmp_path / "huge.gguf", header(KEY + struct.pack("<IIQ", 9, 8, 1 << 37)))
    os.truncate(path, 1 << 41)
    tracemalloc.start()
    try:
        with pytest.raises(NotGguf, match="more than"):
            GgufFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def small_model() -> bytes:
    tensors = (
        TensorInfo("blk.0.ffn_up_exps.weight", 2, (32, 2, 3)),
        TensorInfo("blk.0.ffn_up_exps.scale", 0, (3,)),
        TensorInfo("norm.weight", 0, (8,)),
    )
    raw = header(
        encode_pair("general.alignment", ValueType.UINT32, 32),
        encode_pair("qwen2moe.expert_count", ValueType.UINT32, 3),
        encode_array("tokenizer.ggml.tokens", ValueType.STRING, ["<s>", "ab", "c"]),
        encode_array("tokenizer.ggml.scores", ValueType.FLOAT32, [0.5, 1.0]),
        encode_pair("tokenizer.ggml.add_bos_token", ValueType.BOOL, True),
        tensors=tensors,
    )
    return raw + bytes(128 + 32 + 32)


SMALL = small_model()


def explore(path: Path) -> None:
    """Everything a caller reads."""
    opened = GgufFile.open(path)
    for key in opened.metadata:
        assert opened.metadata[key] is not None
        opened.metadata.integer(key)
    for tensor in opened.tensors.values():
        with SourceReader(opened.paths) as reader:
            assert len(reader.read(tensor.file, tensor.offset, tensor.n_bytes)) == tensor.n_bytes
    opened.expert_tensors()
    opened.hyperparameter("expert_count")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutation_opens_or_is_a_model_error(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(SMALL)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(SMALL) - 200))
        value = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8), bytes([1])]))
        raw[at : at + len(value)] = value
    raw = raw[: data.draw(st.just(len(raw)) | st.integers(0, len(raw)))]
    path = write(tmp_path / "f.gguf", bytes(raw))
    with contextlib.suppress(ModelError):
        explore(path)


def test_every_truncation_is_a_model_error(tmp_path: Path) -> None:
    path = write(tmp_path / "f.gguf", SMALL)
    explore(path)
    for size in range(len(SMALL) - 1, -1, -1):
        os.truncate(path, size)
        try:
            explore(path)
        except ModelError:
            continue
        assert size >= len(SMALL) - 32  # only the padding of the last tensor may be missing


def test_expert_tensor_names() -> None:
    for name in ("blk.0.ffn_gate_up_exps.weight", "blk.61.ffn_down_chexps.weight", "blk.3.ffn_up_exps.bias"):
        assert EXPERT_TENSOR.match(name)
    for name in (
        "blk.0.ffn_up.weight",
        "blk.0.ffn_up_shexp.weight",
        "blk.0.ffn_up_exps.weight2",
        "blk.٣.ffn_up_exps.bias",
    ):
        assert not EXPERT_TENSOR.match(name)


def test_dense_model(tmp_path: Path) -> None:
    path = write(tmp_path / "d.gguf", header(tensors=(TensorInfo("blk.0.ffn_up.weight", 0, (8,)),)) + bytes(32))
    with pytest.raises(DenseModel, match="no routed experts"):
        GgufFile.open(path).expert_tensors()


def test_no_architecture(tmp_path: Path) -> None:
    opened = GgufFile.open(write(tmp_path / "n.gguf", encode_header([], [], 32)))
    with pytest.raises(NotGguf, match="architecture"):
        _ = opened.architecture


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_part_opens_the_whole(sample: Sample, number: int) -> None:
    split = GgufFile.open(sample.parts[number])
    assert split.paths == sample.parts
    assert [(t.name, t.ne) for t in split.tensors.values()] == [(t.name, t.ne) for t in sample.gguf.tensors.values()]
    assert {t.file for t in split.tensors.values()} == {0, 1, 2}
    assert split.metadata["tokenizer.ggml.tokens"] == sample.gguf.metadata["tokenizer.ggml.tokens"]
    with SourceReader(split.paths) as ours, SourceReader(sample.gguf.paths) as theirs:
        for name, t in split.tensors.items():
            whole = sample.gguf.tensors[name]
            assert ours.read(t.file, t.offset, t.n_bytes) == theirs.read(0, whole.offset, whole.n_bytes)


def test_missing_foreign_and_renamed_parts_are_named(sample: Sample, tmp_path: Path) -> None:
    parts = [Path(shutil.copy(part, tmp_path)) for part in sample.parts]
    away = parts[1].rename(tmp_path / "away.gguf")
    with pytest.raises(ModelError, match=r"split-00002-of-00003.gguf: part 2 of 3 is missing"):
        GgufFile.open(parts[2])
    with pytest.raises(ModelError, match=r"away.gguf: part 2 of 3 must be named NAME-00002-of-00003.gguf"):
        GgufFile.open(away)
    shutil.copy(parts[0], parts[1])
    with pytest.raises(ModelError, match=r"split-00002-of-00003.gguf: its header does not say part 2 of 3"):
        GgufFile.open(parts[0])


def test_a_file_that_shrinks_while_it_is_read(sample: Sample, tmp_path: Path) -> None:
    opened = GgufFile.open(shutil.copy(sample.path, tmp_path))
    last = list(opened.tensors.values())[-1]
    os.truncate(opened.paths[0], last.offset + 5)
    with SourceReader(opened.paths) as reader, pytest.raises(TruncatedFile, match="are needed"):
        reader.read(last.file, last.offset, last.n_bytes)
