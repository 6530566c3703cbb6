"""Models whose figures contradict each other: one line that names both sides, before llama.cpp sees the file."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.errors import BrokenModel, DenseModel, ModelError, NotGguf
from swarmnode.model.gguf_check import check_model
from swarmnode.model.gguf_encode import encode_pair
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.gguf_metadata import ValueType
from swarmnode.model.random_model import RandomModel, write_random_model
from tests.swarmnode.backbone.hybrid_model import CANNOT, TAKES_BACK, write_hybrid_model
from tests.swarmnode.model.conftest import Sample
from tests.swarmnode.model.gguf_editor import Editor

U32, F32, TEXT, ARRAY = ValueType.UINT32, ValueType.FLOAT32, ValueType.STRING, ValueType.ARRAY
ARCH = "qwen2moe"
GATE, UP, DOWN = (f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
Edit = Callable[[Editor], None]


@pytest.fixture(scope="module")
def whole(sample: Sample) -> Editor:
    """Two layers, six experts of which two are used, width 128, 300 tokens."""
    return Editor.of(sample.path)


def number(key: str, value: int, kind: ValueType = U32) -> Edit:
    return lambda e: e.set(f"{ARCH}.{key}", kind, value)


def without(key: str) -> Edit:
    def edit(e: Editor) -> None:
        del e.pairs[key]

    return edit


def text(key: str, value: str) -> Edit:
    return lambda e: e.set(key, TEXT, value)


def texts(key: str, values: Sequence[str | bytes]) -> Edit:
    return lambda e: e.set_array(key, TEXT, list(values))


def all_of(*edits: Edit) -> Edit:
    def edit(e: Editor) -> None:
        for one in edits:
            one(e)

    return edit


def line(name: str, **changes: object) -> Edit:
    return lambda e: e.change(name, **changes)


def add(name: str, ne: tuple[int, ...], values: np.ndarray | None = None, kind: str = "F32") -> Edit:
    return lambda e: e.add(name, ne, values, kind)


def drop_experts(e: Editor) -> None:
    e.lines = [one for one in e.lines if "_exps" not in one.name]
    e.pack()


def overlap(e: Editor) -> None:
    e.lines[4] = replace(e.lines[4], offset=e.lines[3].offset)


def other_type(name: str, kind: str) -> Edit:
    """A stack of the same shape in a type with which nothing is multiplied."""

    def edit(e: Editor) -> None:
        found = e.lines[e.index(name)]
        block = TYPE_BY_NAME[kind]
        n = int(np.prod(found.ne)) // block.elements * block.bytes
        e.change(name, ggml_type=block.id, data=bytes(n))
        e.pack()

    return edit


BROKEN: dict[str, tuple[Edit, type[ModelError], str]] = {
    "no architecture": (without("general.architecture"), NotGguf, "general.architecture is missing"),
    "no experts": (drop_experts, DenseModel, "no routed experts.*this one is dense"),
    "fewer blocks": (number("block_count", 1), BrokenModel, r"holds blk.1.attn_norm.weight, but .*block_count is 1"),
    "no block": (number("block_count", 0), BrokenModel, "block_count is 0, must be 1 to"),
    "endless blocks": (number("block_count", 65535), BrokenModel, "is 65535, the last block there is is blk.1"),
    "2^63 blocks": (number("block_count", 1 << 63, ValueType.UINT64), BrokenModel, "is 9223372036854775808, must be"),
    "blocks as text": (lambda e: e.set(f"{ARCH}.block_count", TEXT, "2"), BrokenModel, "is STRING, must be an integer"),
    "no block count": (without(f"{ARCH}.block_count"), BrokenModel, "key qwen2moe.block_count is missing"),
    "two block counts": (lambda e: e.set_array(f"{ARCH}.block_count", U32, [2, 2]), BrokenModel, "2 values of UINT32"),
    "zero experts": (number("expert_count", 0), BrokenModel, "expert_count is 0, must be 1"),
    "more experts": (number("expert_count", 7), BrokenModel, "gate_exps.weight stacks 6 experts, but .* is 7"),
    "2^32 experts": (number("expert_count", 2**32 - 1), BrokenModel, "expert_count is 4294967295, must be 1"),
    "no expert count": (without(f"{ARCH}.expert_count"), BrokenModel, "key qwen2moe.expert_count is missing"),
    "none used": (number("expert_used_count", 0), BrokenModel, "no expert is ever used"),
    "more used": (number("expert_used_count", 7), BrokenModel, "expert_used_count is 7, must be 0 to 6"),
    "used, per layer": (
        lambda e: e.set_array(f"{ARCH}.expert_used_count", U32, [2, 2, 2]),
        BrokenModel,
        "has 3 values for 2 blocks",
    ),
    "groups": (number("expert_group_count", 4), BrokenModel, "is 4, which does not divide 6 experts"),
    "width": (number("embedding_length", 64), BrokenModel, r"token_embd.weight has shape \[128, 300\], but .* is 64"),
    "two counts in a layer": (
        all_of(add("blk.1.ffn_up_chexps.weight", (8, 4, 3)), add("blk.1.ffn_down_chexps.weight", (4, 8, 2))),
        BrokenModel,
        "blk.1.ffn_up_chexps.weight stacks 3 experts, blk.1.ffn_down_chexps.weight stacks 2",
    ),
    "scale of another count": (
        add("blk.1.ffn_up_exps.scale", (5,)),
        BrokenModel,
        "blk.1.ffn_up_exps.scale stacks 5 experts",
    ),
    "bias of another width": (
        add("blk.1.ffn_up_exps.bias", (32, 6)),
        BrokenModel,
        r"up_exps.bias has shape \[32, 6\], which does not fit blk.1.ffn_up_exps.weight with \[128, 64, 6\]",
    ),
    "gate and up differ": (
        line(GATE, ne=(128, 32, 6)),
        BrokenModel,
        r"has shape \[128, 32, 6\], which does not fit",
    ),
    "down and up differ": (line(DOWN, ne=(32, 128, 6)), BrokenModel, "which does not fit blk.1.ffn_down_exps.weight"),
    "a stack of two dimensions": (line(GATE, ne=(128 * 64, 6)), BrokenModel, "a stack of experts has three dimensions"),
    "integers": (other_type(UP, "I32"), BrokenModel, "up_exps.weight has type I32, with which no expert is computed"),
    "Q8_1": (other_type(UP, "Q8_1"), BrokenModel, "has type Q8_1, with which no expert"),
    "a type that was removed": (
        line(UP, ggml_type=31),
        NotGguf,
        r"ggml type 31 \(Q4_0_4_4\), which llama.cpp no longer",
    ),
    "a type of the future": (line(UP, ggml_type=77), NotGguf, "ggml type 77, which this program does not know"),
    "NaN": (lambda e: e.set(f"{ARCH}.rope.freq_base", F32, float("nan")), BrokenModel, "freq_base is not a number"),
    "infinite": (lambda e: e.set(f"{ARCH}.rope.freq_base", F32, float("inf")), BrokenModel, "freq_base is infinite"),
    "NaN in a list": (
        lambda e: e.set_array(f"{ARCH}.x", ValueType.FLOAT64, [0.0, float("nan")]),
        BrokenModel,
        "qwen2moe.x is not a number",
    ),
    "NaN in the vocabulary": (
        lambda e: e.set_array("tokenizer.ggml.scores", F32, [float("nan")] * 300),
        BrokenModel,
        "tokenizer.ggml.scores is not a number",
    ),
    "fewer tokens": (
        lambda e: e.set_array("tokenizer.ggml.tokens", TEXT, [f"t{n}" for n in range(299)]),
        BrokenModel,
        r"has 299 tokens, token_embd.weight has shape \[128, 300\]",
    ),
    "no tokens": (lambda e: e.set_array("tokenizer.ggml.tokens", TEXT, []), BrokenModel, "tokens is empty"),
    "tokens are numbers": (
        lambda e: e.set_array("tokenizer.ggml.tokens", U32, [1] * 300),
        BrokenModel,
        "is 300 values of UINT32, not a list as a vocabulary has it",
    ),
    "fewer scores": (
        lambda e: e.set_array("tokenizer.ggml.scores", F32, [0.0] * 5),
        BrokenModel,
        "300 tokens, tokenizer.ggml.scores 5 values",
    ),
    "fewer kinds": (
        lambda e: e.set_array("tokenizer.ggml.token_type", ValueType.INT32, [1] * 299),
        BrokenModel,
        "300 tokens, tokenizer.ggml.token_type 299 values",
    ),
    "a token twice": (
        lambda e: e.set_array("tokenizer.ggml.tokens", TEXT, [f"t{n % 250}" for n in range(300)]),
        BrokenModel,
        "tokens 0 and 250 of the vocabulary are the same: 't0'",
    ),
    "a token cut by its zero": (
        lambda e: e.set_array("tokenizer.ggml.tokens", TEXT, [f"t\0{n}" if n < 2 else f"u{n}" for n in range(300)]),
        BrokenModel,
        "tokens 0 and 1 of the vocabulary are the same: 't'",
    ),
    "a negative epsilon": (
        lambda e: e.set(f"{ARCH}.attention.layer_norm_rms_epsilon", F32, -1e-6),
        BrokenModel,
        "epsilon is -1e-06; it cannot be negative",
    ),
    "merges are one text": (
        lambda e: e.set("tokenizer.ggml.merges", TEXT, "a b"),
        BrokenModel,
        "merges is STRING, not a list",
    ),
    "overlapping tensors": (overlap, BrokenModel, "the data of .* and .* overlap"),
    "a tensor twice": (
        lambda e: e.lines.append(replace(e.lines[0], offset=e.lines[-1].offset)),
        NotGguf,
        "tensor token_embd.weight appears twice",
    ),
    "a key twice": (lambda e: e.pairs.update(again=e.pairs["general.name"]), NotGguf, "general.name appears twice"),
    "beyond the file": (line(DOWN, offset=1 << 40), ModelError, "ends at byte .*; fetch it again"),
    "2^63 values": (line(DOWN, ne=(1 << 63, 1, 6)), NotGguf, "has shape"),
    "2^189 values": (line(DOWN, ne=(1 << 62, 1 << 62, 1 << 62)), ModelError, "ends at byte"),
    "2^63 as an offset": (line(DOWN, offset=1 << 63), ModelError, "ends at byte"),
}


def one_line(error: ModelError, path: Path) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text.replace(str(path), "")) < 300
    assert str(path) in text
    return text


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_said_in_one_line(whole: Editor, tmp_path: Path, case: str) -> None:
    edit, kind, message = BROKEN[case]
    edited = whole.copy()
    edit(edited)
    path = edited.write(tmp_path / "m.gguf")
    with pytest.raises(kind, match=message) as caught:
        check_model(GgufFile.open(path))
    one_line(caught.value, path)


FINE: dict[str, Edit] = {
    "as it is": lambda _e: None,
    "experts used per layer": lambda e: e.set_array(f"{ARCH}.expert_used_count", U32, [0, 6]),
    "a limit that is none": lambda e: e.set(f"{ARCH}.swiglu_clamp_exp", F32, float("inf")),
    "unlikely tokens": lambda e: e.set_array("tokenizer.ggml.scores", F32, [float("-inf")] * 300),
    "tokens of no length, and other bytes": lambda e: e.set_array(
        "tokenizer.ggml.tokens", TEXT, [b"", b"", b"\0", b"\xff", b"\xfe", *(f"t{n}" for n in range(295))]
    ),
    "longer scores": lambda e: e.set_array("tokenizer.ggml.scores", F32, [0.0] * 301),
    "experts of their own width": all_of(
        line(GATE, ne=(64, 128, 6)), line(UP, ne=(64, 128, 6)), line(DOWN, ne=(128, 64, 6))
    ),
    "scales and biases": all_of(add("blk.0.ffn_up_exps.scale", (6,)), add("blk.0.ffn_up_exps.bias", (64, 6))),
    "groups": all_of(number("expert_group_count", 3), number("expert_group_used_count", 2)),
    "one group": all_of(number("expert_group_count", 1), number("expert_group_used_count", 1)),
    "another set of experts in a layer": add("blk.0.ffn_up_chexps.weight", (128, 32, 3)),
    "no vocabulary": all_of(text("tokenizer.ggml.model", "none"), texts("tokenizer.ggml.tokens", ["a"])),
}


@pytest.mark.parametrize("case", FINE)
def test_what_may_be_passes(whole: Editor, tmp_path: Path, case: str) -> None:
    edited = whole.copy()
    FINE[case](edited)
    check_model(GgufFile.open(edited.write(tmp_path / "m.gguf")))


def test_split_models_and_other_types_pass(sample: Sample, tmp_path: Path) -> None:
    check_model(GgufFile.open(sample.parts[1]))
    kinds = {"gate": "IQ4_XS", "up": "IQ4_XS", "down": "Q4_K"}
    [path] = write_random_model(RandomModel(n_layers=1, expert_types=kinds), tmp_path / "r.gguf")
    check_model(GgufFile.open(path))


@pytest.mark.parametrize("arch", [*TAKES_BACK, *CANNOT])
def test_hybrid_models_pass(tmp_path: Path, arch: str) -> None:
    check_model(GgufFile.open(write_hybrid_model(tmp_path / "h.gguf", arch)))


def test_parts_that_contradict_each_other(sample: Sample, tmp_path: Path) -> None:
    parts = [tmp_path / part.name for part in sample.parts]
    for part, copy in zip(sample.parts, parts, strict=True):
        copy.write_bytes(part.read_bytes())
    edited = Editor.of(parts[1])
    edited.set("general.architecture", TEXT, "qwen3moe")
    edited.write(parts[1])
    with pytest.raises(NotGguf, match=r"00002-of-00003.gguf: its general.architecture is not the first part's"):
        GgufFile.open(parts[0])


def test_junk_of_the_largest_size_takes_bounded_time_and_memory(tmp_path: Path, whole: Editor) -> None:
    """Arrays that fill the whole header: as a list of figures, and as strings of no length."""
    size = 100 << 20
    path = tmp_path / "junk.gguf"
    key = f"{ARCH}.block_count"
    name = struct.pack("<Q", len(key)) + key.encode()
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + encode_pair("general.architecture", TEXT, ARCH) + name
    for head, error in (
        (struct.pack("<IIQ", ARRAY, ValueType.UINT8, size), "is missing or no usable integer"),
        (struct.pack("<IIQ", ARRAY, TEXT, size // 8), "strings up to"),
    ):
        with path.open("wb") as file:
            file.write(start + head)
            file.truncate(len(start + head) + size)
        tracemalloc.start()
        try:
            with pytest.raises(ModelError, match=error):
                GgufFile.open(path).hyperparameter("block_count")
            assert tracemalloc.get_traced_memory()[1] < 3 * size
        finally:
            tracemalloc.stop()
