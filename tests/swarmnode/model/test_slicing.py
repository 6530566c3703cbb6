from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.ggml_types import BLOCK_TYPES, TYPE_BY_NAME
from swarmnode.errors import ModelError
from swarmnode.model.slicing import aligned_empty, cut, expert_digest, is_aligned, slice_shape


@st.composite
def stacks(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """A ggml type and the shape of a stack of it: weights, one row per expert, one value per expert."""
    block = BLOCK_TYPES[draw(st.sampled_from(sorted(BLOCK_TYPES)))]
    row = block.elements * draw(st.integers(1, 3))
    inner = draw(st.lists(st.integers(1, 5), max_size=2))
    n_expert = draw(st.integers(1, 9))
    if block.elements == 1 and draw(st.booleans()):
        return block.id, (n_expert,)
    return block.id, (row, *inner, n_expert)


@given(stacks())
def test_slices_of_all_experts_are_the_tensor(stack: tuple[int, tuple[int, ...]]) -> None:
    ggml_type, ne = stack
    block = BLOCK_TYPES[ggml_type]
    shape = slice_shape("t", ggml_type, ne)
    data = bytes(n * 37 % 251 for n in range(math.prod(ne) // block.elements * block.bytes))
    slices = [cut(data, shape, expert) for expert in range(ne[-1])]
    assert b"".join(slices) == data
    assert shape.n_expert == ne[-1]
    assert shape.ne == (ne[:-1] or (1,))
    assert shape.stride == len(data) // ne[-1] == math.prod(shape.ne) // block.elements * block.bytes
    assert shape.stride % block.bytes == 0


@pytest.mark.parametrize("block", BLOCK_TYPES.values(), ids=lambda block: block.name)
def test_every_type_cuts_at_blocks_with_odd_row_counts(block: object) -> None:
    assert isinstance(block, type(TYPE_BY_NAME["F32"]))
    shape = slice_shape("t", block.id, (block.elements, 7, 3))
    assert (shape.ne, shape.stride) == ((block.elements, 7), 7 * block.bytes)
    if block.elements > 1:
        with pytest.raises(ModelError, match="not whole"):
            slice_shape("t", block.id, (block.elements + 1, 7, 3))
        with pytest.raises(ModelError, match="not whole"):
            slice_shape("t", block.id, (block.elements,))  # one value per expert


def test_biases_and_scales() -> None:
    f32 = TYPE_BY_NAME["F32"].id
    assert slice_shape("b", f32, (2880, 32)).stride == 2880 * 4
    assert slice_shape("s", f32, (32,)) == slice_shape("s", f32, (1, 32))


@pytest.mark.parametrize(("ggml_type", "ne"), [(4, (32, 2)), (0, ()), (0, (0, 3)), (999, (1, 1))])
def test_what_cannot_be_cut_is_a_model_error(ggml_type: int, ne: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="cannot be cut"):
        slice_shape("t", ggml_type, ne)


def test_wrong_expert_or_wrong_stack() -> None:
    shape = slice_shape("t", TYPE_BY_NAME["F32"].id, (2, 3))
    for expert in (-1, 3):
        with pytest.raises(ModelError, match="does not exist"):
            cut(bytes(24), shape, expert)
    with pytest.raises(ModelError, match="24 expected"):
        cut(bytes(23), shape, 0)


def test_digest_does_not_depend_on_pieces() -> None:
    assert expert_digest([b"gate", b"up"]) == expert_digest([b"g", b"ateu", b"p"])


@given(st.integers(1, 1000))
def test_aligned_memory(n_bytes: int) -> None:
    memory = aligned_empty(n_bytes)
    assert len(memory) == n_bytes
    assert is_aligned(memory)
