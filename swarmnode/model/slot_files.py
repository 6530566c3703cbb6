"""The files of a slice store: one per (site, tensor, generation), slot after slot, no header.

A file begins with slot 0, so that its mapping begins at a page and slot i at i × stride, as ggml wants a
stack. Bytes behind the last indexed slot are leftovers that the next slot overwrites. Which slot holds what
is the index's business. Caller: `store.py`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmnode.errors import ModelError
from swarmnode.model.gguf_file import CHUNK_BYTES
from swarmnode.model.slicing import Buffer

FILE_NAME = re.compile(r"^site-[0-9]{5}-g[0-9]+-t[0-9]+\.slots$")


def slot_file(folder: Path, site: int, generation: int, tensor: int) -> Path:
    """The path of a site's slots of its tensor number `tensor`."""
    return folder / f"site-{site:05d}-g{generation}-t{tensor}.slots"


def write_slot(
    files: Sequence[Path], strides: Sequence[int], slot: int, slices: Iterable[Iterable[Buffer]]
) -> tuple[str, tuple[int, ...]]:
    """Write one expert's slices, each as pieces, to slot number `slot`; returns their SHA-256 and CRC-32s.

    Raises ValueError where a slice has not exactly its stride, OSError where the disk says no. Does not
    flush.
    """
    digest = hashlib.sha256()
    checks = []
    for path, stride, pieces in zip(files, strides, slices, strict=True):
        check = done = 0
        with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
            file.seek(slot * stride)
            for piece in pieces:
                done += len(piece)
                if done > stride:
                    break
                digest.update(piece)
                check = zlib.crc32(piece, check)
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
        if done != stride:
            raise ValueError(f"{path}: a slice of {done} bytes, {stride} expected")
        checks.append(check)
    return digest.hexdigest(), tuple(checks)


def read_slot(path: Path, stride: int, slot: int) -> Iterator[bytes]:
    """A slice in pieces; fewer bytes where the file ends early."""
    with path.open("rb", buffering=0) as file:
        file.seek(slot * stride)
        left = stride
        while left and (piece := file.read(min(left, CHUNK_BYTES))):
            left -= len(piece)
            yield piece


def flush_file(path: Path) -> None:
    """Flush everything written to the file, through whatever handle, to disk."""
    with path.open("r+b", buffering=0) as file:
        os.fsync(file.fileno())


def map_slots(path: Path, n_bytes: int) -> npt.NDArray[np.uint8]:
    """The first `n_bytes`, mapped read-only; the array keeps the mapping."""
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be mapped into memory ({error})") from error
