"""llama.cpp's own GGUF parser, through ctypes, as the judge of files that we write."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import pytest


class _Params(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def tensors_that_ggml_reads(path: Path) -> dict[str, tuple[int, int]]:
    """Name -> (type, offset within the data); fails where gguf_init_from_file refuses the file."""
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        pytest.skip("llama-cpp-python is not installed")
    [library, *_] = sorted((Path(spec.origin).parent / "lib").glob("*ggml-base.*"))
    ggml = ctypes.CDLL(str(library))
    ggml.gguf_init_from_file.restype = ctypes.c_void_p
    ggml.gguf_init_from_file.argtypes = (ctypes.c_char_p, _Params)
    ggml.gguf_get_tensor_name.restype = ctypes.c_char_p
    ggml.gguf_get_n_tensors.restype = ggml.gguf_get_tensor_offset.restype = ctypes.c_int64
    context = ctypes.c_void_p(ggml.gguf_init_from_file(str(path).encode(), _Params(True, None)))
    assert context, f"ggml refuses {path}"
    try:
        return {
            ggml.gguf_get_tensor_name(context, ctypes.c_int64(n)).decode(): (
                ggml.gguf_get_tensor_type(context, ctypes.c_int64(n)),
                ggml.gguf_get_tensor_offset(context, ctypes.c_int64(n)),
            )
            for n in range(ggml.gguf_get_n_tensors(context))
        }
    finally:
        ggml.gguf_free(context)
