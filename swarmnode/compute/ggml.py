"""ggml through ctypes: the library, the struct mirror, the prototypes. No logic of its own.

Importing this module loads the ggml that ships inside llama-cpp-python (without importing that package).
Every pointer is a plain int address, 0 or None being NULL; `TensorStruct.from_address(tensor)` gives access
to the fields. A function here has ggml's name without the prefix `ggml_`. Callers: `device.py`,
`expert_bank.py`, `graph.py`, `engine.py`, and `backbone/`, which shares the process and therefore must
share this one copy of the library.

OMP_WAIT_POLICY=passive is set on import when the variable is unset: OpenMP's default is that idle threads
spin, which on shared cores makes single steps several times slower. It has no effect once an OpenMP runtime
is loaded, so import this module before llama_cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from ctypes import c_bool, c_char, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path
from typing import Any

from swarmnode.errors import EngineError

# The llama-cpp-python whose headers the mirror below was written from.
MIRROR_VERSION = "0.3.36"


def engine_build() -> str:
    """What computes here, for HELLO and for messages: equal strings mean the same ggml sources."""
    return f"llama-cpp-python {installed_version()}"


def installed_version() -> str:
    """The installed version of llama-cpp-python. Raises EngineError when there is none."""
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        raise EngineError(
            f"llama-cpp-python is not installed; run pip install llama-cpp-python=={MIRROR_VERSION}"
        ) from None


def library_dir() -> Path:
    """Where llama-cpp-python keeps its shared libraries."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError(f"llama_cpp cannot be found; run pip install llama-cpp-python=={MIRROR_VERSION}")
    return Path(spec.submodule_search_locations[0]) / "lib"


def _load() -> tuple[ctypes.CDLL, ...]:
    """The libraries to search for a symbol, in order.

    On POSIX the handle of libggml also finds the symbols of libggml-base and libggml-cpu, which it is
    linked with. The package holds each library under several names, as separate files: opening another one
    than llama_cpp did would make a second copy, with its own registry. So the name that is in use already,
    if any, is taken.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    directory = library_dir()
    try:
        if sys.platform == "win32":
            os.add_dll_directory(str(directory))
            return tuple(ctypes.CDLL(str(directory / name)) for name in ("ggml.dll", "ggml-base.dll"))
        paths = sorted([*directory.glob("libggml.so*"), *directory.glob("libggml.*dylib")])
        for path in paths:
            with contextlib.suppress(OSError):
                return (ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW),)
        if not paths:
            raise EngineError(f"{directory} has no libggml; reinstall llama-cpp-python")
        return (ctypes.CDLL(str(paths[0])),)
    except OSError as error:
        raise EngineError(f"cannot load ggml from {directory}: {error}; reinstall llama-cpp-python") from error


_libraries = _load()
# The same handles, for calls that keep the GIL. Letting go of it for a microsecond's work can cost a switch interval
# (5 ms) each time, when another thread is busy: the event loop of a node is.
_quick_libraries = tuple(ctypes.PyDLL(library._name, handle=library._handle) for library in _libraries)

# What may take long: computing, copying, opening devices, allocating. Everything else only writes headers.
_BLOCKING = frozenset(
    {
        "ggml_quantize_chunk",
        "ggml_backend_load_all_from_path",
        "ggml_backend_dev_init",
        "ggml_backend_dev_buffer_from_host_ptr",
        "ggml_backend_free",
        "ggml_backend_graph_compute",
        "ggml_backend_tensor_set",
        "ggml_backend_tensor_get",
        "ggml_backend_buffer_free",
        "ggml_backend_buft_alloc_buffer",
        "ggml_gallocr_free",
    }
)


# Any: ctypes converts arguments and results as declared, which the type system cannot see.
def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    for library in _libraries if name in _BLOCKING else _quick_libraries:
        function = getattr(library, name, None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
            return function  # type: ignore[no-any-return]
    raise EngineError(f"llama-cpp-python {installed_version()}, as installed, has no {name}; install {MIRROR_VERSION}")


class TensorStruct(ctypes.Structure):
    """struct ggml_tensor. Pointers are addresses."""

    _fields_ = (
        ("type", c_int),
        ("buffer", c_void_p),
        ("ne", c_int64 * 4),
        ("nb", c_size_t * 4),
        ("op", c_int),
        ("op_params", c_int32 * 16),
        ("flags", c_int32),
        ("src", c_void_p * 10),
        ("view_src", c_void_p),
        ("view_offs", c_size_t),
        ("data", c_void_p),
        ("name", c_char * 64),
        ("extra", c_void_p),
        ("padding", c_char * 8),
    )


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class BufferTypeInterface(ctypes.Structure):
    """struct ggml_backend_buffer_type_i: the callbacks of a buffer type, in order."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in ("get_name", "alloc_buffer", "get_alignment", "get_max_size", "get_alloc_size", "is_host")
    )


class BufferType(ctypes.Structure):
    """struct ggml_backend_buffer_type."""

    _fields_ = (("iface", BufferTypeInterface), ("device", c_void_p), ("context", c_void_p))


class BufferInterface(ctypes.Structure):
    """struct ggml_backend_buffer_i: the callbacks of a buffer, in order."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            "free_buffer", "get_base", "init_tensor", "memset_tensor", "set_tensor", "get_tensor",
            "set_tensor_2d", "get_tensor_2d", "cpy_tensor", "clear", "reset",
        )
    )  # fmt: skip


_P, _I64, _SIZE = c_void_p, c_int64, c_size_t

# ---- names and sizes
op_name_bytes = _function("ggml_op_name", c_char_p, c_int)
unary_op_name = _function("ggml_unary_op_name", c_char_p, c_int)
glu_op_name = _function("ggml_glu_op_name", c_char_p, c_int)
type_name = _function("ggml_type_name", c_char_p, c_int)
blck_size = _function("ggml_blck_size", c_int64, c_int)
type_size = _function("ggml_type_size", c_size_t, c_int)
nbytes = _function("ggml_nbytes", c_size_t, _P)
version = _function("ggml_version", c_char_p)
status_to_string = _function("ggml_status_to_string", c_char_p, c_int)

# ---- contexts, tensors, graphs
init = _function("ggml_init", _P, InitParams)
free = _function("ggml_free", None, _P)
tensor_overhead = _function("ggml_tensor_overhead", c_size_t)
graph_overhead_custom = _function("ggml_graph_overhead_custom", c_size_t, c_size_t, c_bool)
new_tensor_1d = _function("ggml_new_tensor_1d", _P, _P, c_int, _I64)
new_tensor_2d = _function("ggml_new_tensor_2d", _P, _P, c_int, _I64, _I64)
new_tensor_3d = _function("ggml_new_tensor_3d", _P, _P, c_int, _I64, _I64, _I64)
set_name = _function("ggml_set_name", _P, _P, c_char_p)
set_input = _function("ggml_set_input", None, _P)
set_output = _function("ggml_set_output", None, _P)
get_data = _function("ggml_get_data", _P, _P)
new_graph_custom = _function("ggml_new_graph_custom", _P, _P, c_size_t, c_bool)
build_forward_expand = _function("ggml_build_forward_expand", None, _P, _P)
graph_n_nodes = _function("ggml_graph_n_nodes", c_int, _P)
graph_node = _function("ggml_graph_node", _P, _P, c_int)

# ---- operations
mul_mat_id = _function("ggml_mul_mat_id", _P, _P, _P, _P, _P)
add_id = _function("ggml_add_id", _P, _P, _P, _P, _P)
get_rows = _function("ggml_get_rows", _P, _P, _P, _P)
glu = _function("ggml_glu", _P, _P, _P, c_int, c_bool)
glu_split = _function("ggml_glu_split", _P, _P, _P, _P, c_int)
unary = _function("ggml_unary", _P, _P, _P, c_int)
clamp = _function("ggml_clamp", _P, _P, _P, c_float, c_float)
scale_bias = _function("ggml_scale_bias", _P, _P, _P, c_float, c_float)
add = _function("ggml_add", _P, _P, _P, _P)
sub = _function("ggml_sub", _P, _P, _P, _P)
mul = _function("ggml_mul", _P, _P, _P, _P)
div = _function("ggml_div", _P, _P, _P, _P)
sqr = _function("ggml_sqr", _P, _P, _P)
cont = _function("ggml_cont", _P, _P, _P)
reshape_1d = _function("ggml_reshape_1d", _P, _P, _P, _I64)
reshape_3d = _function("ggml_reshape_3d", _P, _P, _P, _I64, _I64, _I64)
repeat_4d = _function("ggml_repeat_4d", _P, _P, _P, _I64, _I64, _I64, _I64)
view_2d = _function("ggml_view_2d", _P, _P, _P, _I64, _I64, _SIZE, _SIZE)
view_3d = _function("ggml_view_3d", _P, _P, _P, _I64, _I64, _I64, _SIZE, _SIZE, _SIZE)

# ---- quantisation (tests and benchmarks make weights with it)
quantize_chunk = _function("ggml_quantize_chunk", c_size_t, c_int, _P, _P, _I64, _I64, _I64, _P)
quantize_requires_imatrix = _function("ggml_quantize_requires_imatrix", c_bool, c_int)

# ---- devices: what a build can compute on
backend_load_all_from_path = _function("ggml_backend_load_all_from_path", None, c_char_p)
backend_dev_count = _function("ggml_backend_dev_count", c_size_t)
backend_dev_get = _function("ggml_backend_dev_get", _P, c_size_t)
backend_dev_name = _function("ggml_backend_dev_name", c_char_p, _P)
backend_dev_description = _function("ggml_backend_dev_description", c_char_p, _P)
backend_dev_type = _function("ggml_backend_dev_type", c_int, _P)
backend_dev_memory = _function("ggml_backend_dev_memory", None, _P, _P, _P)
backend_dev_init = _function("ggml_backend_dev_init", _P, _P, c_char_p)
backend_dev_buffer_type = _function("ggml_backend_dev_buffer_type", _P, _P)
backend_dev_buffer_from_host_ptr = _function("ggml_backend_dev_buffer_from_host_ptr", _P, _P, _P, _SIZE, _SIZE)
backend_dev_supports_op = _function("ggml_backend_dev_supports_op", c_bool, _P, _P)
backend_dev_backend_reg = _function("ggml_backend_dev_backend_reg", _P, _P)
backend_reg_get_proc_address = _function("ggml_backend_reg_get_proc_address", _P, _P, c_char_p)

# ---- backends (streams) and buffers
backend_free = _function("ggml_backend_free", None, _P)
backend_graph_compute = _function("ggml_backend_graph_compute", c_int, _P, _P)
backend_tensor_set = _function("ggml_backend_tensor_set", None, _P, _P, _SIZE, _SIZE)
backend_tensor_get = _function("ggml_backend_tensor_get", None, _P, _P, _SIZE, _SIZE)
backend_tensor_alloc = _function("ggml_backend_tensor_alloc", c_int, _P, _P, _P)
backend_buffer_init = _function("ggml_backend_buffer_init", _P, _P, BufferInterface, _P, _SIZE)
backend_buffer_free = _function("ggml_backend_buffer_free", None, _P)
backend_buffer_get_base = _function("ggml_backend_buffer_get_base", _P, _P)
backend_buffer_is_host = _function("ggml_backend_buffer_is_host", c_bool, _P)
backend_buffer_set_usage = _function("ggml_backend_buffer_set_usage", None, _P, c_int)
backend_buft_alloc_buffer = _function("ggml_backend_buft_alloc_buffer", _P, _P, _SIZE)
backend_buft_get_alloc_size = _function("ggml_backend_buft_get_alloc_size", _SIZE, _P, _P)
backend_buft_is_host = _function("ggml_backend_buft_is_host", c_bool, _P)
gallocr_new = _function("ggml_gallocr_new", _P, _P)
gallocr_free = _function("ggml_gallocr_free", None, _P)
gallocr_reserve = _function("ggml_gallocr_reserve", c_bool, _P, _P)
gallocr_alloc_graph = _function("ggml_gallocr_alloc_graph", c_bool, _P, _P)
gallocr_get_buffer_size = _function("ggml_gallocr_get_buffer_size", _SIZE, _P, c_int)

# callbacks of a buffer type made in Python (the backbone's null buffer)
TENSOR_ALIGNMENT = 32
BUFFER_USAGE_WEIGHTS = 1
GetName = ctypes.CFUNCTYPE(_P, _P)
AllocBuffer = ctypes.CFUNCTYPE(_P, _P, _SIZE)
GetSize = ctypes.CFUNCTYPE(_SIZE, _P)
GetAllocSize = ctypes.CFUNCTYPE(_SIZE, _P, _P)
IsHost = ctypes.CFUNCTYPE(c_bool, _P)
FreeBuffer = ctypes.CFUNCTYPE(None, _P)
GetBase = ctypes.CFUNCTYPE(_P, _P)
MemsetTensor = ctypes.CFUNCTYPE(None, _P, _P, c_uint8, _SIZE, _SIZE)
SetTensor = ctypes.CFUNCTYPE(None, _P, _P, _P, _SIZE, _SIZE)
GetTensor = SetTensor
Clear = ctypes.CFUNCTYPE(None, _P, c_uint8)
SetThreads = ctypes.CFUNCTYPE(None, _P, c_int)


class GgufInitParams(ctypes.Structure):
    """struct gguf_init_params."""

    _fields_ = (("no_alloc", c_bool), ("context", c_void_p))


gguf_init_from_file = _function("gguf_init_from_file", c_void_p, c_char_p, GgufInitParams)
gguf_free = _function("gguf_free", None, c_void_p)


def op_name(op: int) -> str:
    """ggml's name of an op id read from a tensor of the checked library, as "MUL_MAT_ID"."""
    name: bytes = op_name_bytes(op)
    return name.decode()


def check_layout() -> None:
    """Compare the mirror with tensors made by the library, once per process. Raises LayoutMismatch."""
    from swarmnode.compute.layout import check  # noqa: PLC0415  it needs the prototypes above

    check()
