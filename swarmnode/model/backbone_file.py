"""The backbone's GGUF: the model as it is, less the data of the expert weights that live on other nodes.

llama.cpp wants every tensor of the architecture to be in the file, so the remote ones stay in its
directory: last, with a type that takes almost no room, and behind them a hole instead of data (the file is
sparse: its length is logical). The backbone gives those tensors a buffer without memory and never computes
them. Metadata is copied byte by byte; a model split in parts becomes one file. Equal input gives equal
bytes. Caller: onboarding.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.errors import ManifestMismatch
from swarmnode.model.atomic_file import atomic_writer
from swarmnode.model.gguf_encode import TensorInfo, encode_header, padded
from swarmnode.model.gguf_file import EXPERT_TENSOR, GgufFile, SourceReader
from swarmnode.model.manifest import Manifest

# What a remote tensor is declared as, smallest first. Q1_0 takes 1.125 bits a weight in blocks of 128;
# where a row is not whole blocks of it, Q4_0 and F16 are the smallest that every backend of llama.cpp has
# kernels for, which its loader asks.
HOLE_TYPES = ("Q1_0", "Q4_0", "F16")


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
    gguf: GgufFile, out: Path, remote: set[str], progress: Callable[[int, int], None] | None = None
) -> BackboneInfo:
    """Write the backbone file of `gguf` to `out`, whole or not at all, without the `remote` weights.

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

    total = sum(tensor.n_bytes for tensor in kept)
    digest = hashlib.sha256(header)
    data_bytes = len(header)
    with SourceReader(gguf.paths) as reader, atomic_writer(out) as file:
        file.write(header)
        for tensor in kept:
            for chunk in reader.chunks(tensor.file, tensor.offset, tensor.n_bytes):
                file.write(chunk)
                digest.update(chunk)
                if progress is not None:
                    progress(reader.bytes_read, total)
            padding = bytes(padded(tensor.n_bytes, gguf.alignment) - tensor.n_bytes)
            file.write(padding)
            digest.update(padding)
            data_bytes += tensor.n_bytes + len(padding)
        file.flush()
        logical_bytes = data_bytes + sum(padded(info.n_bytes, gguf.alignment) for info in hole_infos)
        os.truncate(file.fileno(), logical_bytes)
    return BackboneInfo(digest.hexdigest(), data_bytes, logical_bytes)


def backbone_digest(path: Path, manifest: Manifest, progress: Callable[[int, int], None] | None = None) -> str:
    """SHA-256 of the written part of a backbone file: everything before the first remote tensor.

    Raises NotGguf or TruncatedFile for a file that is none.
    """
    gguf = GgufFile.open(path)
    remote = {t.name for t in manifest.tensors if t.name.endswith(".weight") and len(t.ne) == 3}
    length = min((t.offset for name, t in gguf.tensors.items() if name in remote), default=gguf.sizes[0])
    digest = hashlib.sha256()
    with SourceReader(gguf.paths) as reader:
        for chunk in reader.chunks(0, 0, length):
            digest.update(chunk)
            if progress is not None:
                progress(reader.bytes_read, length)
    return digest.hexdigest()
