"""Random weights of a sensible size for a tensor of any name: activations stay finite through any number of layers.

Deterministic: a tensor's bytes hang on its name, type and shape alone. Called by `tiny_model.py`.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

from swarmnode.architectures.metadata import VOCAB
from swarmnode.compute import ggml
from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.model.gguf_encode import TensorInfo
from swarmnode.model.gguf_file import EXPERT_TENSOR

F32 = NDArray[np.float32]
SPREAD, LEAN = 0.7, 1.0  # which give lowest cosines like those of the trained demo model
_I32 = TYPE_BY_NAME["I32"].id


def type_of(name: str, expert_type: int) -> int:
    """The ggml type of a tensor: `expert_type` for stacked weights, I32 for tables, F32 for the rest."""
    if name.endswith("_tid2eid.weight"):
        return _I32
    is_expert = name.endswith(".weight") and EXPERT_TENSOR.match(name) is not None
    return expert_type if is_expert else TYPE_BY_NAME["F32"].id


def tensor_data(tensor: TensorInfo, experts: int) -> bytes:
    """The bytes of a tensor, without padding."""
    name, ne = tensor.name, tensor.ne
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if tensor.ggml_type == _I32:  # the experts of each token, none of them twice
        order = np.argsort(rng.random((VOCAB, experts)), axis=1).astype("<i4")
        return order[:, : ne[0]].tobytes()
    values: F32 = rng.standard_normal(ne[::-1], dtype=np.float32)
    if name.endswith(("norm.weight", "scale", "_scale.weight", "_base.weight")) or "_norm_" in name:
        values = np.asarray(1 + values / 8, np.float32)
    elif "ssm_a" in name:  # a decay
        values = -np.abs(values)
    elif name.endswith("bias") or len(ne) == 1:
        values /= 10
    else:
        values = _matrix(name, values)
    return _encoded(values.astype("<f4"), tensor)


def _matrix(name: str, values: F32) -> F32:
    """Rows that keep the size of what they multiply, and lean towards where that leans: as those of trained models do.

    Without that, a small error of x would be a larger one of an expert's output than it is in any model that is of use,
    and no wire would have a lowest cosine like those of trained ones. What leans is the embedding, towards 1 and
    towards alternating signs (LayerNorm takes the first away); experts read both, everything else the first.
    """
    width = values.shape[-1]
    signs = np.where(np.arange(width) % 2, -1, 1).astype(np.float32)
    if name.startswith("token_embd"):
        return np.asarray(SPREAD * values + (1 + signs) / math.sqrt(2), np.float32)
    reads_model = "exps." in name and "down" not in name
    lean = 1 + signs if reads_model else np.ones(width, np.float32)
    return np.asarray(SPREAD * values / math.sqrt(width) + LEAN * lean / width, np.float32)


def _encoded(values: F32, tensor: TensorInfo) -> bytes:
    if tensor.ggml_type == TYPE_BY_NAME["F32"].id:
        return values.tobytes()
    # The first expert's rows are quantised; the others have the same rows in another order. Quantising takes long.
    rows = np.ascontiguousarray(values[0], np.float32)
    one = np.empty((rows.shape[0], tensor.n_bytes // values.shape[0] // rows.shape[0]), np.uint8)
    written = ggml.quantize_chunk(
        tensor.ggml_type, rows.ctypes.data, one.ctypes.data, 0, rows.shape[0], rows.shape[1], None
    )
    if written != one.size:
        raise ValueError(f"{tensor.name}: {written} bytes quantised, {one.size} expected")
    return b"".join(np.roll(one, 7 * expert, axis=0).tobytes() for expert in range(values.shape[0]))
