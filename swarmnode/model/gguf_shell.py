"""A model's shell: all of its metadata and shapes in one sparse file that holds no weights.

With it llama.cpp can be asked whether it accepts a model before gigabytes of it are copied or downloaded. Caller:
onboarding.
"""

from __future__ import annotations

from pathlib import Path

from swarmnode.errors import ModelError
from swarmnode.model.gguf_encode import TensorInfo, encode_header, padded
from swarmnode.model.gguf_file import GgufFile


def write_shell(gguf: GgufFile, out: Path) -> int:
    """Write the shell of a model; its logical length. Raises ModelError where `out` cannot be written."""
    infos = [TensorInfo(tensor.name, tensor.ggml_type, tensor.ne) for tensor in gguf.tensors.values()]
    pairs = [gguf.metadata.raw(key) for key in gguf.metadata if not key.startswith("split.")]
    header = encode_header(pairs, infos, gguf.alignment)
    length = len(header) + sum(padded(info.n_bytes, gguf.alignment) for info in infos)
    try:
        with out.open("wb") as file:
            file.write(header)
            file.truncate(length)
    except OSError as error:
        raise ModelError(f"{out}: cannot be written ({error.strerror})") from error
    return length
