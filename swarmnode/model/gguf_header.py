"""The header of one GGUF file: metadata and tensor directory, read with every length checked first.

Layout (little-endian, GGUF versions 2 and 3; string = u64 length, bytes):
    "GGUF" | u32 version | u64 n_tensors | u64 n_kv
    n_kv ×        string key | u32 value type | value         (an array: u32 item type, u64 count, items)
    n_tensors ×   string name | u32 n_dims | n_dims × u64 ne | u32 ggml type | u64 offset in the data
    padding to general.alignment (32 unless the metadata says otherwise) | data

Why not `gguf.GGUFReader`: it takes every count and length from the file as it stands (a hostile one makes it
allocate or loop without bound, or fail with any exception), it builds two numpy arrays per vocabulary entry (20 s
for 262,144 tokens and as many merges, where this takes 0.1 s), and it loses the exact bytes of a key's value,
which the backbone file needs.

This is the parser only: files split in parts, paths and tensor data are `gguf_file.py` and, for files on a web
server, `http_model.py`: its callers.
Invariant: any bytes whatever either parse or raise a ModelError, with memory and time bounded by
MAX_HEADER_BYTES.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swarmnode.compute.ggml_types import BLOCK_TYPES, tensor_bytes
from swarmnode.errors import NotGguf, TruncatedFile
from swarmnode.model.gguf_metadata import SCALARS, U32, U64, Entry, Metadata, ValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had 32-bit lengths and is not written since 2023
DEFAULT_ALIGNMENT = 32

MAX_HEADER_BYTES = 128 << 20  # the largest vocabularies of today (260,000 tokens and merges) take about 16 MiB
MAX_KEYS = 65_536
MAX_TENSORS = 65_536  # the largest models of today have about 2,000
MAX_KEY_BYTES = 65_535  # GGUF specification
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME less its NUL: llama.cpp refuses longer ones
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_ALIGNMENT = 1 << 20
MAX_STRINGS = 4 << 20  # in arrays: the largest vocabularies of today have 0.8 million tokens and merges
SHOWN = 80  # characters of a key that an error line repeats

# Types that llama.cpp had once. A file with them must be converted again.
_REMOVED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A line of the tensor directory; `offset` is absolute in its file, `ne` as in GGUF (ne[0] innermost)."""

    name: str
    ggml_type: int
    ne: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header."""

    metadata: Metadata
    alignment: int
    data_offset: int
    tensors: tuple[TensorEntry, ...]


class Readable(Protocol):
    """A file that is read forward."""

    def read(self, size: int, /) -> bytes | None:
        """At most `size` bytes; nothing at the end."""


class _Cursor:
    """Reads a file forward, keeping what it has read; never beyond the file's size or MAX_HEADER_BYTES."""

    def __init__(self, file: Readable, size: int, path: Path | str) -> None:
        self._file, self._size, self.path = file, size, path
        self.buffer = bytearray()
        self.at = 0
        self.n_strings = 0

    def need(self, n: int, what: str) -> None:
        """Make `n` more bytes available at `at`."""
        end = self.at + n
        if end <= len(self.buffer):
            return
        if end > self._size:
            raise TruncatedFile(
                f"{self.path}: the header's {what} needs {end} bytes, the file has {self._size}; fetch the file again"
            )
        if end > MAX_HEADER_BYTES:
            raise NotGguf(f"{self.path}: the header's {what} ends at byte {end}, more than {MAX_HEADER_BYTES}")
        # Doubling keeps the number of reads small and reads little of the data that follows a small header.
        goal = min(self._size, MAX_HEADER_BYTES, max(end, 2 * len(self.buffer), 1 << 16))
        while len(self.buffer) < goal:
            more = self._file.read(goal - len(self.buffer))
            if not more:
                raise TruncatedFile(f"{self.path}: shrank to {len(self.buffer)} bytes while it was read")
            self.buffer += more

    def u32(self, what: str) -> int:
        self.need(4, what)
        value: int = U32.unpack_from(self.buffer, self.at)[0]
        self.at += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        value: int = U64.unpack_from(self.buffer, self.at)[0]
        self.at += 8
        return value

    def skip(self, n: int, what: str) -> None:
        self.need(n, what)
        self.at += n

    def name(self, limit: int, what: str) -> str:
        length = self.u64(what)
        if not 0 < length <= limit:
            raise NotGguf(f"{self.path}: {what} of {length} bytes; 1 to {limit} are allowed")
        start = self.at
        self.skip(length, what)
        try:
            text = self.buffer[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise NotGguf(f"{self.path}: {what} at byte {start} is not UTF-8") from None
        if not text.isprintable():
            raise NotGguf(f"{self.path}: {what} {repr(text)[:SHOWN]} has control characters")
        return text


def read_header(path: Path) -> tuple[Header, int]:
    """Header and size of the file at `path`.

    Raises NotGguf or TruncatedFile; OSError where it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return parse_header(file, size, path), size


def parse_header(file: Readable, size: int, path: Path | str) -> Header:
    """The header that `file`, of `size` bytes in all, begins with; errors name it `path`.

    Raises NotGguf, TruncatedFile, and whatever `file.read` raises.
    """
    return _parse(_Cursor(file, size, path), size)


def _parse(cursor: _Cursor, size: int) -> Header:
    path = cursor.path
    if size < 24:
        raise NotGguf(f"{path}: {size} bytes are too few for a GGUF file")
    cursor.skip(4, "magic")
    if bytes(cursor.buffer[:4]) != MAGIC:
        raise NotGguf(f"{path}: not a GGUF file (it begins with {bytes(cursor.buffer[:4])!r})")
    version = cursor.u32("version")
    if version & 0xFFFF == 0:
        raise NotGguf(f"{path}: a big-endian GGUF file; convert it with `gguf-convert-endian FILE little`")
    if version not in VERSIONS:
        raise NotGguf(f"{path}: GGUF version {version}; this program reads versions 2 and 3")
    n_tensors, n_keys = cursor.u64("tensor count"), cursor.u64("key count")
    if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
        raise NotGguf(f"{path}: {n_tensors} tensors and {n_keys} keys; {MAX_TENSORS} and {MAX_KEYS} are allowed")

    start = cursor.at
    entries: dict[str, Entry] = {}
    for _ in range(n_keys):
        key_start = cursor.at - start
        key = cursor.name(MAX_KEY_BYTES, "metadata key")
        if key in entries:
            raise NotGguf(f"{path}: metadata key {key[:SHOWN]} appears twice")
        entries[key] = _read_value(cursor, key[:SHOWN], start, key_start)
    metadata = Metadata(bytes(memoryview(cursor.buffer)[start : cursor.at]), entries)

    infos = [_read_tensor_info(cursor) for _ in range(n_tensors)]
    alignment = _alignment(metadata, path)
    data_offset = -(-cursor.at // alignment) * alignment
    tensors = tuple(_place(info, data_offset, alignment, size, path) for info in infos)
    twice = next((name for name, n in Counter(tensor.name for tensor in tensors).items() if n > 1), None)
    if twice is not None:
        raise NotGguf(f"{path}: tensor {twice} appears twice; fetch the file again")
    return Header(metadata, alignment, data_offset, tensors)


def _read_value(cursor: _Cursor, key: str, base: int, key_start: int) -> Entry:
    value_type = cursor.u32(key)
    item_type, count, value = value_type, 1, cursor.at
    if value_type == ValueType.ARRAY:
        item_type, count = cursor.u32(key), cursor.u64(key)
        if item_type == ValueType.ARRAY:
            raise NotGguf(f"{cursor.path}: {key} is an array of arrays, which llama.cpp does not read either")
        value = cursor.at
    if item_type == ValueType.STRING:
        cursor.need(8 * count, key)  # each string has at least its length: bounds the loop
        cursor.n_strings += count
        if cursor.n_strings > MAX_STRINGS:
            raise NotGguf(f"{cursor.path}: {cursor.n_strings} strings up to {key}; at most {MAX_STRINGS} are read")
        _skip_strings(cursor, key, count)
    elif item_type in SCALARS:
        cursor.skip(SCALARS[item_type].size * count, key)
    else:
        raise NotGguf(f"{cursor.path}: {key} has unknown value type {item_type}")
    return Entry(key_start, value - base, cursor.at - base, value_type, item_type, count)


def _skip_strings(cursor: _Cursor, key: str, count: int) -> None:
    # The one hot loop: half a million strings in a large vocabulary, a few million in a hostile file.
    unpack, buffer, at = U64.unpack_from, cursor.buffer, cursor.at
    for _ in range(count):
        if at + 8 > len(buffer):
            cursor.at = at
            cursor.need(8, key)
        at += 8 + unpack(buffer, at)[0]
    cursor.need(at - cursor.at, key)
    cursor.at = at


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.name(MAX_TENSOR_NAME_BYTES, "tensor name")
    n_dims = cursor.u32(name)
    if not 1 <= n_dims <= MAX_DIMS:
        raise NotGguf(f"{cursor.path}: tensor {name} has {n_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    ne = tuple(cursor.u64(name) for _ in range(n_dims))
    return name, ne, cursor.u32(name), cursor.u64(name)


def _alignment(metadata: Metadata, path: Path | str) -> int:
    if "general.alignment" not in metadata:
        return DEFAULT_ALIGNMENT
    value = metadata.integer("general.alignment")
    is_u32 = metadata.value_type("general.alignment") == ValueType.UINT32
    if not is_u32 or value is None or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise NotGguf(f"{path}: general.alignment must be a power of two up to {MAX_ALIGNMENT} as UINT32")
    return value


def _place(
    info: tuple[str, tuple[int, ...], int, int], data_offset: int, alignment: int, size: int, path: Path | str
) -> TensorEntry:
    name, ne, ggml_type, offset = info
    if ggml_type in _REMOVED_TYPES:
        raise NotGguf(
            f"{path}: tensor {name} has ggml type {ggml_type} ({_REMOVED_TYPES[ggml_type]}), which llama.cpp no longer "
            "reads; fetch or make the model in another type"
        )
    if ggml_type not in BLOCK_TYPES:
        raise NotGguf(f"{path}: tensor {name} has ggml type {ggml_type}, which this program does not know; update it")
    if any(not 0 < n < 1 << 63 for n in ne):
        raise NotGguf(f"{path}: tensor {name} has shape {list(ne)}")
    try:
        n_bytes = tensor_bytes(ggml_type, ne)
    except ValueError as error:
        raise NotGguf(f"{path}: tensor {name}: {error}") from None
    if offset % alignment:
        raise NotGguf(f"{path}: tensor {name} starts at {offset}, not a multiple of the alignment {alignment}")
    end = data_offset + offset + n_bytes
    if end > size:
        raise TruncatedFile(
            f"{path}: tensor {name} ends at byte {end}, the file has {size} bytes; "
            "fetch it again or finish its download"
        )
    return TensorEntry(name, ggml_type, ne, data_offset + offset, n_bytes)
