"""A GGUF taken apart so that tests can break one thing of it at a time, and put together again."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.model.gguf_encode import Scalar, encode_array, encode_pair, padded
from swarmnode.model.gguf_header import read_header
from swarmnode.model.gguf_metadata import ValueType

FARTHEST = 1 << 30  # where data is still written


@dataclass(frozen=True)
class Line:
    """A line of the tensor directory; `offset` from the beginning of the data, `data` what lies there."""

    name: str
    ggml_type: int
    ne: tuple[int, ...]
    offset: int
    data: bytes = field(repr=False, default=b"")


@dataclass
class Editor:
    """`pairs`: each key's bytes as they stand in the file. Nothing is checked when it is written."""

    pairs: dict[str, bytes]
    lines: list[Line]
    alignment: int = 32
    n_tensors: int | None = None
    n_pairs: int | None = None

    @classmethod
    def of(cls, path: Path) -> Editor:
        """Of one file, which may be a part."""
        header, _ = read_header(path)
        raw = path.read_bytes()
        lines = [
            Line(t.name, t.ggml_type, t.ne, t.offset - header.data_offset, raw[t.offset : t.offset + t.n_bytes])
            for t in header.tensors
        ]
        return cls({key: header.metadata.raw(key) for key in header.metadata}, lines, header.alignment)

    def copy(self) -> Editor:
        return replace(self, pairs=dict(self.pairs), lines=list(self.lines))

    def set(self, key: str, kind: ValueType, value: Scalar) -> None:
        self.pairs[key] = encode_pair(key, kind, value)

    def set_array(self, key: str, kind: ValueType, values: list[Scalar]) -> None:
        self.pairs[key] = encode_array(key, kind, values)

    def index(self, name: str) -> int:
        return next(i for i, line in enumerate(self.lines) if line.name == name)

    def change(self, name: str, **changes: Any) -> None:
        """Other fields for the line of a tensor."""
        at = self.index(name)
        self.lines[at] = replace(self.lines[at], **changes)

    def add(self, name: str, ne: tuple[int, ...], values: np.ndarray | None = None, kind: str = "F32") -> None:
        """A tensor more, of zeros where no values are given."""
        data = (np.zeros(int(np.prod(ne)), np.float32) if values is None else values).tobytes()
        self.lines.append(Line(name, TYPE_BY_NAME[kind].id, ne, 0, data))
        self.pack()

    def pack(self) -> None:
        """Offsets one after the other, as llama.cpp wants them, by the length of each line's data."""
        at = 0
        for i, line in enumerate(self.lines):
            self.lines[i] = replace(line, offset=at)
            at += padded(len(line.data), self.alignment)

    def header(self) -> bytes:
        n_tensors = len(self.lines) if self.n_tensors is None else self.n_tensors
        n_pairs = len(self.pairs) if self.n_pairs is None else self.n_pairs
        directory = b"".join(
            struct.pack("<Q", len(line.name.encode()))
            + line.name.encode()
            + struct.pack(f"<I{len(line.ne)}QIQ", len(line.ne), *line.ne, line.ggml_type, line.offset)
            for line in self.lines
        )
        return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_pairs) + b"".join(self.pairs.values()) + directory

    def write(self, path: Path) -> Path:
        header = self.header()
        start = padded(len(header), self.alignment)
        with path.open("wb") as file:
            file.write(header.ljust(start, b"\0"))
            for line in self.lines:
                if line.offset < FARTHEST:
                    file.seek(start + line.offset)
                    file.write(line.data.ljust(padded(len(line.data), self.alignment), b"\0"))
        return path

    def write_header(self, path: Path) -> Path:
        """The same, with holes for data: it costs nothing."""
        header = self.header()
        end = max((line.offset + len(line.data) for line in self.lines if line.offset < FARTHEST), default=0)
        with path.open("wb") as file:
            file.write(header)
            file.truncate(padded(len(header), self.alignment) + padded(end, self.alignment))
        return path
