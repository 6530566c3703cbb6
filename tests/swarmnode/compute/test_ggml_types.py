from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest

from swarmnode.compute.ggml_types import BLOCK_TYPES, TYPE_BY_NAME, tensor_bytes


def test_table_is_the_installed_ggml() -> None:
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    [library, *_] = sorted((Path(spec.origin).parent / "lib").glob("*ggml-base.*"))
    ggml = ctypes.CDLL(str(library))
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ours = {t.id: (t.elements, t.bytes) for t in BLOCK_TYPES.values()}
    theirs = {n: (ggml.ggml_blck_size(n), ggml.ggml_type_size(n)) for n in ours}
    assert ours == theirs


def test_table_has_every_type_of_the_gguf_package() -> None:
    differing = {
        kind.name
        for kind, (elements, size) in gguf.GGML_QUANT_SIZES.items()
        if BLOCK_TYPES[int(kind)] != (kind.name, int(kind), elements, size)
    }
    # ggml's block_q8_1 is two half floats and 32 bytes; the package still has the two floats it once was.
    assert differing == {"Q8_1"}


def test_bytes_of_shapes() -> None:
    assert tensor_bytes(TYPE_BY_NAME["Q4_K"].id, (3072, 1024, 256)) == 3072 * 1024 * 256 // 256 * 144
    assert tensor_bytes(TYPE_BY_NAME["F32"].id, (1,)) == 4
    with pytest.raises(ValueError, match="not whole blocks"):
        tensor_bytes(TYPE_BY_NAME["Q4_K"].id, (255, 2))
