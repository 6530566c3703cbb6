"""One MoE layer with a known model's true shape and quantisation, and random weights: a GGUF and its manifest.

The recipe is the architecture's own, read off the graph of a tiny model of it; only the widths are replaced. Every
expert has its place in the file, under its true number. Only some are written: the rest of the file is a hole, read by
nobody.

Weights and rows lean towards one direction, as those of trained models lean towards some: with values that have nothing
in common an error of x grows on its way through an expert, as it does in no model that is of use, and no wire type has
a cosine like those measured on trained ones (see `weights.py`). Called by `real_shapes.py`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from swarmnode.architectures.tiny_model import write_tiny_model
from swarmnode.backbone.hook import F32
from swarmnode.compute.ggml_types import BLOCK_TYPES, TYPE_BY_NAME
from swarmnode.compute.recipe import Site
from swarmnode.errors import ModelError
from swarmnode.model.gguf_encode import TensorInfo, encode_header, encode_pair, padded
from swarmnode.model.gguf_file import EXPERT_TENSOR, GgufFile
from swarmnode.model.gguf_metadata import ValueType
from swarmnode.model.manifest import Manifest, build_manifest, save_manifest
from swarmnode.model.random_blocks import random_blocks
from swarmnode.model.slicing import slice_shape
from swarmnode.onboard import onboard
from swarmnode.sizing.shapes import ModelShape

_ALIGNMENT = 32
_PIECE = 8 << 20  # bytes made at once
_BIAS_SIZE = 0.05
SPREAD, LEAN = 1.0, 0.5  # of the rows: noise, and what they have in common; mean cosines are then the demo model's
_Q4_K_MEAN = 0.912  # of the mean that a Q4_K block's minima take away, in root mean squares of its values
_MXFP4_MEAN = 0.768  # how far the mean rises, in root mean squares, with the share of signs that are cleared


@dataclass(frozen=True, slots=True)
class RealLayer:
    """Files of a layer: `experts` are those that were written."""

    source: Path
    manifest_file: Path
    manifest: Manifest
    experts: tuple[int, ...]


def write_layer(shape: ModelShape, folder: Path, room: int, seed: int = 0) -> RealLayer:
    """Write a layer with as many experts as fit into `room` bytes.

    Raises ModelError where the architecture cannot be built here, where not as many experts fit as a token selects, and
    where the file cannot be written: also where its holes would take room of the file system.
    """
    tiny = onboard(write_tiny_model(folder / "tiny.gguf", shape.arch, shape.variant), folder / "tiny.pack").manifest
    # Some models clamp in some layers only: the layer with the most to do.
    traced = max(tiny.sites, key=lambda site: len(site.recipe.steps))
    site = msgspec.structs.replace(
        traced, index=0, d_in=shape.d, d_out=shape.d, n_expert=shape.n_expert, n_used=shape.k
    )
    if site.recipe.weights != shape.weights:
        raise ModelError(f"{shape.name}: the weights come {site.recipe.weights} the experts in {shape.arch}'s graph")
    tensors = [_tensor(name, shape) for name in site.tensors]
    each = sum(tensor.n_bytes // shape.n_expert for tensor in tensors)
    count = min(shape.n_expert, room // each)
    if count < shape.k:
        raise ModelError(
            f"{shape.name}: {shape.k} experts, as many as a token selects, take {shape.k * each / 1e6:.0f} MB, and "
            f"there is room for {room / 1e6:.0f} MB: free some memory and some of the temporary folder's disk"
        )
    experts = _spread(shape.n_expert, count)
    source = folder / "layer.gguf"
    try:
        if shape.n_expert * each > room and not _has_holes(folder):
            raise ModelError(
                f"{shape.name}: {folder}: its file system makes no files with holes, and a whole layer takes "
                f"{shape.n_expert * each / 1e6:.0f} MB, more than there is room for: set TMPDIR to a folder elsewhere"
            )
        _write(source, shape, site, tensors, experts, seed)
    except OSError as error:
        raise ModelError(f"{source}: cannot be written ({error.strerror})") from error
    # Nobody takes these experts from anywhere but this file, so nothing is hashed.
    manifest = build_manifest(GgufFile.open(source), [site], (("",) * shape.n_expert,))
    save_manifest(manifest, folder / "manifest.json")
    return RealLayer(source, folder / "manifest.json", manifest, experts)


def _has_holes(folder: Path) -> bool:
    """Whether what is left out of a file there takes no room."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(_PIECE)
        file.flush()
        blocks: int | None = getattr(os.fstat(file.fileno()), "st_blocks", None)  # Windows does not say
        return blocks is not None and blocks * 512 < _PIECE // 2


def _spread(n_expert: int, count: int) -> tuple[int, ...]:
    """`count` of all numbers, the first and the last among them."""
    return tuple(sorted(set(np.linspace(0, n_expert - 1, count).round().astype(int).tolist())))


def _tensor(name: str, shape: ModelShape) -> TensorInfo:
    match = EXPERT_TENSOR.match(name)
    if match is None:
        raise ModelError(f"{shape.name}: {name} is no expert tensor")
    _, part, _, kind = match.groups()
    inner = 2 * shape.d_ff if part == "gate_up" else shape.d_ff
    rows = shape.d if part == "down" else inner
    if kind == "scale":
        return TensorInfo(name, TYPE_BY_NAME["F32"].id, (shape.n_expert,))
    if kind == "bias":
        return TensorInfo(name, TYPE_BY_NAME["F32"].id, (rows, shape.n_expert))
    width = shape.d_ff if part == "down" else shape.d
    return TensorInfo(name, TYPE_BY_NAME[shape.expert_type].id, (width, rows, shape.n_expert))


def leaning_rows(n: int, d: int, rng: np.random.Generator) -> F32:
    """Rows that lean, float32[n, d], of about size 1."""
    found: F32 = SPREAD * rng.standard_normal((n, d), np.float32) + np.float32(LEAN)
    return found


def _leaning(data: bytes, tensor: TensorInfo, rng: np.random.Generator) -> bytes:
    """Blocks whose mean is not zero but 1 / ne[0]: a row of ones then gives 1, beside noise of size 1."""
    kind = BLOCK_TYPES[tensor.ggml_type]
    blocks = np.frombuffer(bytearray(data), np.uint8).reshape(-1, kind.bytes)
    mean = 1 / math.sqrt(tensor.ne[0])  # in root mean squares
    if kind.name == "Q4_K":
        minima = blocks[:, 2:4].copy().view("<f2")
        blocks[:, 2:4] = (minima * np.float16(1 - mean / _Q4_K_MEAN)).view(np.uint8)
    elif kind.name == "MXFP4":
        cleared = rng.random((len(blocks), kind.bytes - 1), np.float32) < mean / _MXFP4_MEAN
        blocks[:, 1:] &= np.where(cleared, 0x77, 0xFF).astype(np.uint8)
    return blocks.tobytes()


def _write(
    path: Path, shape: ModelShape, site: Site, tensors: Sequence[TensorInfo], experts: Sequence[int], seed: int
) -> None:
    numbers = {
        "block_count": site.layer + 1,
        "embedding_length": shape.width,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.k,
    }
    pairs = [
        encode_pair("general.architecture", ValueType.STRING, shape.arch),
        encode_pair("general.name", ValueType.STRING, f"{shape.name}, one layer, random"),
        *(encode_pair(f"{shape.arch}.{key}", ValueType.UINT32, value) for key, value in numbers.items()),
    ]
    header = encode_header(pairs, tensors, _ALIGNMENT)
    at = len(header)
    with path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            one = slice_shape(tensor.name, tensor.ggml_type, tensor.ne)
            size = _BIAS_SIZE if len(tensor.ne) < 3 else 1 / math.sqrt(tensor.ne[0])
            row = one.stride // max(1, math.prod(one.ne[1:]))
            piece = max(1, _PIECE // row) * row
            for expert in experts:
                # The same expert has the same bytes, however many are written.
                rng = np.random.default_rng([seed, expert, *tensor.name.encode()])
                file.seek(at + expert * one.stride)
                left = one.stride
                while left:
                    n = min(left, piece)
                    blocks = random_blocks(tensor.ggml_type, n, size, rng)
                    file.write(_leaning(blocks, tensor, rng) if len(tensor.ne) == 3 else blocks)
                    left -= n
            at += padded(tensor.n_bytes, _ALIGNMENT)
        file.truncate(at)
