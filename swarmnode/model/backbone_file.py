"""The backbone's GGUF: the model as it is, less the data of the expert weights that live on other nodes.

llama.cpp wants every tensor of the architecture to be in the file, so the remote ones stay in its
directory: last, with a type that takes almost no room, and behind them a hole instead of data (the file is
sparse: its length is logical). The backbone gives those tensors a buffer without memory and never computes
them. Metadata is copied byte by byte; a model split in parts becomes one file. Equal input gives equal
bytes. Caller: onboarding.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.errors import ManifestMismatch, ModelError
from swarmnode.model.atomic_file import atomic_writer, sync_folder
from swarmnode.model.gguf_encode import TensorInfo, encode_header, padded
from swarmnode.model.gguf_file import EXPERT_TENSOR, GgufFile, GgufTensor, SourceReader
from swarmnode.model.manifest import Manifest

# What a remote tensor is declared as, smallest first. Q1_0 takes 1.125 bits a weight in blocks of 128;
# where a row is not whole blocks of it, Q4_0 and F16 are the smallest that every backend of llama.cpp has
# kernels for, which its loader asks.
HOLE_TYPES = ("Q1_0", "Q4_0", "F16")
SYNC_BYTES = 8 << 20  # how often a file that can be gone on with is flushed: at most twice this is fetched again


@dataclass(frozen=True, slots=True)
class BackboneInfo:
    """What was written. `sha256` is over the first `data_bytes`; the rest of `logical_bytes` reads zero."""

    sha256: str
    data_bytes: int
    logical_bytes: int


def hole_type(ne0: int) -> int:
    """The ggml type of a remote tensor with rows of `ne0` values."""
    return next(TYPE_BY_NAME[name].id for name in HOLE_TYPES if ne0 % TYPE_BY_NAME[name].elements == 0)


def remote_weights(gguf: GgufFile) -> set[str]:
    """All expert weights that can be made remote: every stacked weight of at least two dimensions per expert.

    Biases and scales stay: they are small. Raises DenseModel where there is no expert.
    """
    tensors = gguf.expert_tensors()
    return {name for name, tensor in tensors.items() if name.endswith(".weight") and len(tensor.ne) == 3}


def write_backbone(
    gguf: GgufFile,
    out: Path,
    remote: set[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    part: Path | None = None,
) -> BackboneInfo:
    """Write the backbone file of `gguf` to `out`, whole or not at all, without the `remote` weights.

    With `part` what was written stays there when the work is interrupted, and the next call with the same `gguf` goes
    on where it was; the caller answers for `part` being of this very source. `progress(bytes done, bytes in all)`.

    Raises ManifestMismatch for a remote name that is no expert weight of this model, TruncatedFile where
    the source ends early, ModelError where `out` cannot be written.
    """
    for name in sorted(remote):
        if name not in gguf.tensors or not EXPERT_TENSOR.match(name) or not name.endswith(".weight"):
            raise ManifestMismatch(f"{gguf.paths[0]}: {name} is not an expert weight of this model")
    kept = [tensor for name, tensor in gguf.tensors.items() if name not in remote]
    holes = [tensor for name, tensor in gguf.tensors.items() if name in remote]
    infos = [TensorInfo(t.name, t.ggml_type, t.ne) for t in kept]
    hole_infos = [TensorInfo(t.name, hole_type(t.ne[0]), t.ne) for t in holes]
    pairs = [gguf.metadata.raw(key) for key in gguf.metadata if not key.startswith("split.")]
    header = encode_header(pairs, infos + hole_infos, gguf.alignment)
    data_bytes = len(header) + sum(padded(tensor.n_bytes, gguf.alignment) for tensor in kept)
    logical_bytes = data_bytes + sum(padded(info.n_bytes, gguf.alignment) for info in hole_infos)

    with gguf.reader() as reader, atomic_writer(out) if part is None else _kept_writer(part, out) as file:
        digest, done = _already(file, header, data_bytes)
        if done < len(header):
            file.write(header)
            digest.update(header)
            done = len(header)
        todo = _rest(kept, len(header), done, gguf.alignment)
        reader.expect([(tensor.file, tensor.offset + skip, tensor.n_bytes - skip) for tensor, skip, _ in todo])
        total = sum(tensor.n_bytes for tensor in kept)
        read = total - sum(tensor.n_bytes - skip for tensor, skip, _ in todo)
        for tensor, skip, padding in todo:
            for chunk in reader.chunks(tensor.file, tensor.offset + skip, tensor.n_bytes - skip):
                if part is not None and done // SYNC_BYTES != (done + len(chunk)) // SYNC_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                read += len(chunk)
                if progress is not None:
                    progress(read, total)
            file.write(bytes(padding))
            digest.update(bytes(padding))
            done += padding
        file.flush()
        os.truncate(file.fileno(), logical_bytes)
    return BackboneInfo(digest.hexdigest(), data_bytes, logical_bytes)


def _rest(kept: list[GgufTensor], start: int, done: int, alignment: int) -> list[tuple[GgufTensor, int, int]]:
    """(tensor, bytes of it that are there, bytes of padding that are due) for what is not written yet."""
    todo = []
    for tensor in kept:
        end = start + padded(tensor.n_bytes, alignment)
        if end > done:
            skip = min(max(0, done - start), tensor.n_bytes)
            todo.append((tensor, skip, end - max(done, start + tensor.n_bytes)))
        start = end
    return todo


def _already(file: IO[bytes], header: bytes, limit: int) -> tuple[hashlib._Hash, int]:
    """Digest and length of what a file holds of a backbone file from an earlier attempt; it is cut to that length.

    Only what is known to have been flushed counts: all but the last SYNC_BYTES and a bit.
    """
    file.seek(0, os.SEEK_END)
    length = max(0, min(file.tell(), limit) // SYNC_BYTES - 1) * SYNC_BYTES
    file.seek(0)
    digest = hashlib.sha256()
    if length < len(header) or file.read(len(header)) != header:
        length = 0
    else:
        digest.update(header)
        left = length - len(header)
        while left:
            chunk = file.read(min(left, 1 << 20))
            digest.update(chunk)
            left -= len(chunk)
    file.seek(length)
    file.truncate()
    return digest, length


@contextlib.contextmanager
def _kept_writer(part: Path, out: Path) -> Iterator[IO[bytes]]:
    """`part` to go on with; when the block ends well it becomes `out`, otherwise it stays."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        with part.open("r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(out)
        sync_folder(out.parent)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written ({error.strerror})") from error


def written_bytes(backbone: GgufFile, manifest: Manifest) -> int:
    """How many bytes of a backbone file are not hole: everything before the first remote tensor."""
    remote = {t.name for t in manifest.tensors if t.name.endswith(".weight") and len(t.ne) == 3}
    return min((t.offset for name, t in backbone.tensors.items() if name in remote), default=backbone.sizes[0])


def backbone_digest(path: Path, manifest: Manifest, progress: Callable[[int, int], None] | None = None) -> str:
    """SHA-256 of the written part of a backbone file: everything before the first remote tensor.

    Raises NotGguf or TruncatedFile for a file that is none.
    """
    gguf = GgufFile.open(path)
    length = written_bytes(gguf, manifest)
    digest = hashlib.sha256()
    with SourceReader(gguf.paths) as reader:
        for chunk in reader.chunks(0, 0, length):
            digest.update(chunk)
            if progress is not None:
                progress(reader.bytes_read, length)
    return digest.hexdigest()
