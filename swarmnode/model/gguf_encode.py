"""Bytes of a GGUF header: key-value pairs, tensor directory, padding. Pure; layout in `gguf_header.py`.

Callers: `backbone_file.py`, which copies pairs as they stand, and `random_model.py`, which makes its own.
(The `gguf` package's writer holds or re-encodes all it writes, and cannot describe a tensor whose data is a
hole.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmnode.compute.ggml_types import tensor_bytes
from swarmnode.model.gguf_header import MAGIC
from swarmnode.model.gguf_metadata import SCALARS, ValueType

VERSION = 3

Scalar = str | bytes | int | float | bool


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor to write: `ne` as GGUF has it (ne[0] innermost)."""

    name: str
    ggml_type: int
    ne: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its data, without padding."""
        return tensor_bytes(self.ggml_type, self.ne)


def padded(n: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-n // alignment) * alignment


def encode_pair(key: str, value_type: ValueType, value: Scalar) -> bytes:
    """One key with a scalar or string."""
    return _string(key) + struct.pack("<I", value_type) + _value(value_type, value)


def encode_array(key: str, item_type: ValueType, values: Sequence[Scalar]) -> bytes:
    """One key with an array of scalars or strings."""
    head = _string(key) + struct.pack("<IIQ", ValueType.ARRAY, item_type, len(values))
    return head + b"".join(_value(item_type, value) for value in values)


def encode_header(pairs: Sequence[bytes], tensors: Iterable[TensorInfo], alignment: int) -> bytes:
    """The header up to the first tensor's data; the tensors' data must follow in this order, each padded.

    llama.cpp refuses a file whose tensors do not lie one after the other.
    """
    directory, offset, count = [], 0, 0
    for tensor in tensors:
        directory.append(
            _string(tensor.name)
            + struct.pack(f"<I{len(tensor.ne)}QIQ", len(tensor.ne), *tensor.ne, tensor.ggml_type, offset)
        )
        offset += padded(tensor.n_bytes, alignment)
        count += 1
    header = MAGIC + struct.pack("<IQQ", VERSION, count, len(pairs)) + b"".join(pairs) + b"".join(directory)
    return header.ljust(padded(len(header), alignment), b"\0")


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _value(value_type: ValueType, value: Scalar) -> bytes:
    if isinstance(value, str | bytes):
        if value_type != ValueType.STRING:
            raise TypeError(f"text for a value of type {value_type.name}")
        return _string(value)
    return SCALARS[value_type].pack(value)
