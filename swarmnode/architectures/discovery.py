"""Which tensors an architecture has by its metadata: llama.cpp is asked, so that no list of them is kept here.

`llama_model_init_from_user` makes a model of metadata alone. It makes every optional tensor too, so it tells what there
may be; what there must be is found out by loading a file without the rest (`tiny_model.py`, the only caller).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from swarmnode.architectures.refusal import refused
from swarmnode.backbone.library import clear_errors, last_error, library
from swarmnode.compute import ggml

Tensors = dict[str, tuple[int, ...]]  # name -> ne, without trailing ones


def discover_tensors(metadata: Path, what: str) -> Tensors:
    """All tensors of the model that a GGUF without tensors describes. ModelError, with llama.cpp's own line."""
    lib: Any = library()  # the bindings have no types
    found: Tensors = {}

    def note(tensor: int, _user_data: int | None) -> None:
        struct = ggml.TensorStruct.from_address(tensor)
        ne = list(struct.ne)
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        found[struct.name.decode()] = tuple(ne)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(note)
    params = lib.llama_model_default_params()
    make = lib._lib.llama_model_init_from_user  # which the bindings do not have
    make.restype = ctypes.c_void_p
    make.argtypes = [ctypes.c_void_p, type(callback), ctypes.c_void_p, type(params)]
    context = ggml.gguf_init_from_file(os.fsencode(metadata), ggml.GgufInitParams(True, None))
    if not context:
        raise refused(f"{what}: llama.cpp cannot read its metadata")
    clear_errors()
    try:
        model = make(context, callback, None, params)
    finally:
        ggml.gguf_free(context)
    if not model:
        raise refused(f"{what}: llama.cpp cannot build it: {last_error()}")
    lib.llama_model_free(ctypes.c_void_p(model))
    return found
