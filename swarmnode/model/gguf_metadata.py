"""GGUF's key-value pairs: their types, their values decoded on demand, and their exact bytes.

Not a parser: `gguf_header.py` has checked every length before it makes a `Metadata`. Callers read it through
`GgufFile.metadata`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

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
        texts, at = [], entry.value
        for _ in range(entry.count):
            texts.append(self._text(at))
            at += 8 + U64.unpack_from(self._blob, at)[0]
        return texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def raw(self, key: str) -> bytes:
        """The pair as it stands in the file: key, value type, value."""
        entry = self._entries[key]
        return self._blob[entry.start : entry.end]

    def value_type(self, key: str) -> ValueType:
        """ARRAY for arrays, whatever their items."""
        return ValueType(self._entries[key].value_type)

    def array_length(self, key: str) -> int | None:
        """The number of items without decoding them; None where the value is no array."""
        entry = self._entries[key]
        return entry.count if entry.value_type == ValueType.ARRAY else None

    def integer(self, key: str) -> int | None:
        """The value as an int, or the largest of an array of ints; None where it is something else."""
        if key not in self._entries:
            return None
        value = self[key]
        items = value if isinstance(value, list) else [value]
        numbers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        return max(numbers) if numbers and len(numbers) == len(items) else None

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
