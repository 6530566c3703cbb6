"""Weights that are no numbers, in every type that has scales, as ggml itself judges them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from swarmnode.compute import ggml
from swarmnode.compute.ggml_types import BLOCK_TYPES, TYPE_BY_NAME
from swarmnode.errors import BrokenModel
from swarmnode.model.digests import digest_experts
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.gguf_values import checked, first_not_finite
from swarmnode.model.random_blocks import random_blocks, supported_types
from tests.swarmnode.model.conftest import Sample
from tests.swarmnode.model.gguf_editor import Editor


def ggml_says(ggml_type: int, data: bytes) -> bool:
    base = ctypes.CDLL(str(next(path for path in ggml.library_dir().iterdir() if "ggml-base" in path.name)))
    base.ggml_validate_row_data.restype = ctypes.c_bool
    base.ggml_validate_row_data.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    return bool(base.ggml_validate_row_data(ggml_type, data, len(data)))


# Those that hold no expert's weights, and IQ1_M, which spreads its scale over bits: see the next test.
OTHERS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "IQ1_M")


@pytest.mark.parametrize("name", [kind.name for kind in BLOCK_TYPES.values() if kind.name not in OTHERS])
def test_every_type_as_ggml_judges_it(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    kind = TYPE_BY_NAME[name]
    n = 6
    rng = np.random.default_rng(1)
    fine = random_blocks(kind.id, n * kind.bytes, 1.0, rng) if name in supported_types() else bytes(n * kind.bytes)
    assert ggml_says(kind.id, fine)
    assert first_not_finite(kind.id, np.frombuffer(fine, np.uint8)) is None
    found = 0
    for at in range(kind.bytes):
        broken = bytearray(fine)
        for bad in (b"\x00\x7c", b"\xff\xff", b"\x80\x7f"):
            broken[4 * kind.bytes + at : 4 * kind.bytes + at + 2] = bad
            where = first_not_finite(kind.id, np.frombuffer(broken, np.uint8))
            assert (where is None) == ggml_says(kind.id, bytes(broken)), (at, bad)
            assert where in (None, 4, 5)
            found += where is not None
    assert found or name == "NVFP4"
    capfd.readouterr()


def test_a_scale_that_is_spread_over_bits_as_ggml_judges_it(capfd: pytest.CaptureFixture[str]) -> None:
    kind = TYPE_BY_NAME["IQ1_M"]
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (2000, kind.bytes), np.uint8)
    blocks[:, 53::2] |= rng.choice(np.array([0, 0xC0, 0xF0], np.uint8), (2000, 2))  # or few are infinite
    verdicts = [first_not_finite(kind.id, block) is None for block in blocks]
    assert verdicts == [ggml_says(kind.id, block.tobytes()) for block in blocks]
    assert 100 < sum(verdicts) < 1900
    fine, bad = blocks[verdicts.index(True)], blocks[verdicts.index(False)]
    assert first_not_finite(kind.id, np.concatenate([fine, fine, bad, fine, bad])) == 2
    capfd.readouterr()


@pytest.mark.parametrize("cut", [1, 7, 18, 100, 10_000])
def test_blocks_that_lie_in_two_pieces(cut: int) -> None:
    kind = TYPE_BY_NAME["Q4_0"]
    data = bytearray(random_blocks(kind.id, 50 * kind.bytes, 1.0, np.random.default_rng(2)))

    def pieces() -> list[memoryview]:
        return [memoryview(data)[at : at + cut] for at in range(0, len(data), cut)]

    assert b"".join(checked(pieces(), kind.id, str)) == data
    data[33 * kind.bytes : 33 * kind.bytes + 2] = b"\x00\xfe"
    with pytest.raises(BrokenModel, match=r"^33$"):
        list(checked(pieces(), kind.id, str))


def test_an_expert_that_is_no_number_is_named_when_the_model_is_hashed(sample: Sample, tmp_path: Path) -> None:
    edited = Editor.of(sample.path)
    name = "blk.1.ffn_gate_exps.weight"
    data = bytearray(edited.lines[edited.index(name)].data)
    at = len(data) // 6 * 3 + 18 * 9  # a block of the fourth expert
    data[at : at + 2] = b"\x00\x7e"
    edited.change(name, data=bytes(data))
    opened = GgufFile.open(edited.write(tmp_path / "m.gguf"))
    with pytest.raises(BrokenModel, match=rf"m.gguf: {name} of expert 3 holds NaN or infinity; fetch the file again"):
        digest_experts(opened, sample.sites)
