"""Does the ctypes mirror of ggml fit the installed library? Nothing may touch a tensor before this passed.

Not a version check: the library makes tensors whose every field is known, and the mirror must read the
same. A layout that changed silently is memory corruption. Called through `ggml.check_layout` by everything
that opens a device.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import sizeof

from swarmnode.compute import ggml
from swarmnode.compute.ggml_enums import (
    F16,
    F32,
    FLAG_COMPUTE,
    FLAG_INPUT,
    FLAG_OUTPUT,
    GLU_OPS,
    I32,
    MATMUL_TYPES,
    UNARY_OPS,
)
from swarmnode.compute.ggml_types import BLOCK_TYPES
from swarmnode.errors import LayoutMismatch

OBJECT_SIZE = 32  # sizeof(struct ggml_object), which precedes every tensor in a context


@functools.cache
def check() -> None:
    """Raise LayoutMismatch, naming the field and both versions, unless the mirror fits."""
    _expect("sizeof(ggml_tensor)", sizeof(ggml.TensorStruct), ggml.tensor_overhead() - OBJECT_SIZE)
    context = ggml.init(ggml.InitParams(64 * ggml.tensor_overhead() + 65536, None, True))
    if not context:
        raise LayoutMismatch(_message("ggml_init", "a context", "NULL"))
    try:
        _check_leaf(context)
        _check_view(context)
        _check_operations(context)
    finally:
        ggml.free(context)
    _check_tables()
    _check_data()


def _message(what: str, expected: object, found: object) -> str:
    return (
        f"ggml layout: {what} is {found}, expected {expected}: the mirror is of llama-cpp-python "
        f"{ggml.MIRROR_VERSION}, installed is {ggml.installed_version()}; install the mirror's version"
    )


def _expect(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise LayoutMismatch(_message(what, expected, found))


def _check_leaf(context: int) -> None:
    address = ggml.new_tensor_3d(context, F16, 7, 5, 3)
    ggml.set_name(address, b"layout.probe")
    leaf = ggml.TensorStruct.from_address(address)
    _expect("type", F16, leaf.type)
    _expect("ne", [7, 5, 3, 1], list(leaf.ne))
    _expect("nb", [2, 14, 70, 210], list(leaf.nb))
    _expect("name", b"layout.probe", leaf.name)
    _expect("op of a leaf", "NONE", ggml.op_name(0) if leaf.op == 0 else leaf.op)
    _expect("flags", 0, leaf.flags)
    _expect("pointers", [None] * 14, [*leaf.src, leaf.view_src, leaf.buffer, leaf.data, leaf.extra])
    ggml.set_input(address)
    _expect("input flag", FLAG_INPUT, leaf.flags)
    ggml.set_output(address)
    _expect("output flag", FLAG_INPUT | FLAG_OUTPUT, leaf.flags)


def _check_view(context: int) -> None:
    source = ggml.new_tensor_2d(context, F32, 8, 6)
    view = ggml.TensorStruct.from_address(ggml.view_2d(context, source, 3, 2, 32, 68))
    _expect("op of a view", "VIEW", _name_of(view.op))
    _expect("view_src", source, view.view_src)
    _expect("view_offs", 68, view.view_offs)
    _expect("src of a view", source, view.src[0])
    _expect("ne of a view", [3, 2, 1, 1], list(view.ne))
    _expect("nb of a view", [4, 32], list(view.nb[:2]))


def _check_operations(context: int) -> None:
    rows = ggml.new_tensor_3d(context, F32, 32, 1, 2)
    ids = ggml.new_tensor_2d(context, I32, 1, 2)
    stack = ggml.new_tensor_3d(context, F16, 32, 64, 4)
    product_address = ggml.mul_mat_id(context, stack, rows, ids)
    product = ggml.TensorStruct.from_address(product_address)
    _expect("op of mul_mat_id", "MUL_MAT_ID", _name_of(product.op))
    _expect("src of mul_mat_id", [stack, rows, ids, None], list(product.src[:4]))
    _expect("ne of mul_mat_id", [64, 1, 2, 1], list(product.ne))
    clamped = ggml.TensorStruct.from_address(ggml.clamp(context, product_address, -1.5, 2.5))
    floats = (ctypes.c_float * 2).from_buffer_copy(bytes(clamped.op_params)[:8])
    _expect("op_params of clamp", [-1.5, 2.5], list(floats))
    halved_address = ggml.glu(context, product_address, GLU_OPS.index("SWIGLU"), True)
    halved = ggml.TensorStruct.from_address(halved_address)
    _expect("op_params of glu", [GLU_OPS.index("SWIGLU"), 1, 0, 0], list(halved.op_params[:4]))
    graph = ggml.new_graph_custom(context, 32, False)
    ggml.build_forward_expand(graph, halved_address)
    _expect("nodes of the graph", 2, ggml.graph_n_nodes(graph))
    _expect("last node of the graph", halved_address, ggml.graph_node(graph, -1))
    _expect("compute flag", FLAG_COMPUTE, product.flags)


def _name_of(op: int) -> str:
    """An op id as a name, without asking the library about an id that it may not have."""
    return ggml.op_name(op) if 0 <= op < 128 and op < _safe_ops() else f"id {op}"


@functools.cache
def _safe_ops() -> int:
    """Ids up to that of GLU, the last op the engine uses, are known to exist once it is found there."""
    context = ggml.init(ggml.InitParams(8 * ggml.tensor_overhead(), None, True))
    row = ggml.new_tensor_1d(context, F32, 8)
    glu = ggml.TensorStruct.from_address(ggml.glu(context, row, 0, False))
    op: int = glu.op
    ggml.free(context)
    return op + 1 if 0 < op < 128 else 0


def _check_tables() -> None:
    for number, name in enumerate(UNARY_OPS):
        _expect(f"unary op {number}", name, ggml.unary_op_name(number).decode())
    for number, name in enumerate(GLU_OPS):
        _expect(f"GLU op {number}", name, ggml.glu_op_name(number).decode())
    for number in sorted(MATMUL_TYPES):
        block = BLOCK_TYPES[number]
        _expect(f"type {number}", block.name, ggml.type_name(number).decode().upper())
        _expect(f"block of {block.name}", block.elements, ggml.blck_size(number))
        _expect(f"bytes of {block.name}", block.bytes, ggml.type_size(number))


def _check_data() -> None:
    """The pointers that an allocated tensor gets: `data` and `buffer`."""
    context = ggml.init(ggml.InitParams(4 * ggml.tensor_overhead(), None, False))
    try:
        address = ggml.new_tensor_2d(context, F32, 4, 2)
        tensor = ggml.TensorStruct.from_address(address)
        _expect("data", ggml.get_data(address), tensor.data)
        _expect("nbytes", 32, ggml.nbytes(address))
    finally:
        ggml.free(context)
