"""GGUF's key-value pairs: their types, their values decoded on demand, and their exact bytes.

Not a parser: `gguf_header.py` has checked every length before it makes a `Metadata`. Callers read it through
`GgufFile.metadata`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

MAX_INTEGERS = 65_536  # an array with more is no list of figures: a vocabulary, or junk of 128 MiB

MetadataValue = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class ValueType(IntEnum):
    """GGUF's metadata value types."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALARS: Mapping[int, struct.Struct] = {
    ValueType.UINT8: struct.Struct("<B"),
    ValueType.INT8: struct.Struct("<b"),
    ValueType.UINT16: struct.Struct("<H"),
    ValueType.INT16: struct.Struct("<h"),
    ValueType.UINT32: U32,
    ValueType.INT32: struct.Struct("<i"),
    ValueType.FLOAT32: struct.Struct("<f"),
    ValueType.BOOL: struct.Struct("<?"),
    ValueType.UINT64: U64,
    ValueType.INT64: struct.Struct("<q"),
    ValueType.FLOAT64: struct.Struct("<d"),
}


INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
FLOATS: Mapping[int, str] = {ValueType.FLOAT32: "<f4", ValueType.FLOAT64: "<f8"}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one key-value pair lies in the metadata's bytes."""

    start: int
    value: int  # after the value type; for an array after its item type and count
    end: int
    value_type: int
    item_type: int
    count: int


class Metadata(Mapping[str, MetadataValue]):
    """The key-value pairs in file order. A value is decoded when asked for; `raw` gives a pair's exact bytes.

    Text that is not UTF-8 (some vocabularies hold such tokens) reads with replacement characters; `raw` has
    the bytes.
    """

    def __init__(self, blob: bytes, entries: dict[str, Entry]) -> None:
        self._blob = blob
        self._entries = entries

    def __getitem__(self, key: str) -> MetadataValue:
        entry = self._entries[key]
        if entry.value_type != ValueType.ARRAY:
            return self._text(entry.value) if entry.value_type == ValueType.STRING else self._scalar(entry)
        if entry.item_type != ValueType.STRING:
            values = SCALARS[entry.item_type].iter_unpack(self._blob[entry.value : entry.end])
            return [value for (value,) in values]
        return [raw.decode("utf-8", "replace") for raw in self.byte_strings(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def raw(self, key: str) -> bytes:
        """The pair as it stands in the file: key, value type, value."""
        entry = self._entries[key]
        return self._blob[entry.start : entry.end]

    def byte_strings(self, key: str) -> list[bytes]:
        """The items of an array of strings as they stand in the file; none where the value is something else."""
        entry = self._entries.get(key)
        if entry is None or entry.value_type != ValueType.ARRAY or entry.item_type != ValueType.STRING:
            return []
        blob, unpack, at = self._blob, U64.unpack_from, entry.value
        found = []
        for _ in range(entry.count):
            start = at + 8
            at = start + unpack(blob, at)[0]
            found.append(blob[start:at])
        return found

    def value_type(self, key: str) -> ValueType:
        """ARRAY for arrays, whatever their items."""
        return ValueType(self._entries[key].value_type)

    def array_length(self, key: str) -> int | None:
        """The number of items without decoding them; None where the value is no array."""
        entry = self._entries[key]
        return entry.count if entry.value_type == ValueType.ARRAY else None

    def item_type(self, key: str) -> ValueType:
        """The type of an array's items; of any other value its own."""
        return ValueType(self._entries[key].item_type)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """The value as ints, one per layer where it is an array; None where it is absent or something else."""
        entry = self._entries.get(key)
        if entry is None or not 0 < entry.count <= MAX_INTEGERS or entry.item_type not in INTEGERS:
            return None
        return tuple(value for (value,) in SCALARS[entry.item_type].iter_unpack(self._blob[entry.value : entry.end]))

    def integer(self, key: str) -> int | None:
        """The value as an int, or the largest of an array of ints; None where it is something else."""
        numbers = self.integers(key)
        return max(numbers) if numbers is not None else None

    def floats(self, key: str) -> npt.NDArray[np.float32] | npt.NDArray[np.float64] | None:
        """A float or an array of them, as a view; None where the value is something else."""
        entry = self._entries.get(key)
        if entry is None or entry.item_type not in FLOATS:
            return None
        return np.frombuffer(self._blob, FLOATS[entry.item_type], entry.count, entry.value)

    def text(self, key: str) -> str | None:
        """The value as a string, None where it is absent or something else."""
        if key not in self._entries or self._entries[key].value_type != ValueType.STRING:
            return None
        return self._text(self._entries[key].value)

    def _text(self, at: int) -> str:
        length = U64.unpack_from(self._blob, at)[0]
        return self._blob[at + 8 : at + 8 + length].decode("utf-8", "replace")

    def _scalar(self, entry: Entry) -> int | float | bool:
        value: int | float | bool = SCALARS[entry.value_type].unpack_from(self._blob, entry.value)[0]
        return value
