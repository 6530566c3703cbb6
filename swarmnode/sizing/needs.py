"""What a model needs, from its metadata and tensor directory alone: no tensor is read, no model is loaded.

Pure. `needs_of` takes anything that has a GGUF's header (a file on disk, or one on a web server). What decides memory
is read off the tensors' shapes where they say it, since metadata only repeats them; what each kind of layer keeps of a
token is data of `layer_kinds.py`; approximations are named in the docstrings. Called by the gate, `swarmnode plan` and
the page of models.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from swarmnode.errors import DenseModel, NotGguf
from swarmnode.model.gguf_file import EXPERT_TENSOR
from swarmnode.sizing.layer_kinds import TensorLike, cached_values, state_values

_SHARED = re.compile(r"^blk\.[0-9]{1,6}\.ffn_(gate_up|gate|up|down)_shexp\.weight$")
_OF_LAYER = re.compile(r"^blk\.([0-9]{1,6})\.(.+)$")

F16_BYTES: Final = 2  # what the KV cache holds
F32_BYTES: Final = 4  # what running states and activations are held in
MOST: Final = 1 << 53  # nothing of a header is believed to be larger: JSON's exact integers
MOST_COUNT: Final = 1 << 31  # of a number in the metadata

# A node's process before it has a model (Python, numpy, QUIC, llama.cpp) as measured, and llama.cpp's vocabulary.
PROCESS_BYTES: Final = 100 << 20
TOKEN_BYTES: Final = 150
RESIDUAL_ROWS: Final = 8  # of the model's width, per token: the stream, its norm, queries, keys, values
LOGIT_ROWS: Final = 16  # that are held at a time: one per generation, and one per draft
BATCH: Final = 512  # tokens of a prompt in one step, parts.BATCH


class MetadataLike(Protocol):
    """A GGUF's key-value pairs, as `model.gguf_metadata.Metadata` has them."""

    def __contains__(self, key: object) -> bool: ...

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Ints, one per layer where it is an array; None where it is absent, something else, or too long."""


class HeaderLike(Protocol):
    """A GGUF's header, all parts together: `model.gguf_file.GgufFile` is one."""

    @property
    def architecture(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def metadata(self) -> MetadataLike: ...

    @property
    def tensors(self) -> Mapping[str, TensorLike]: ...


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The figures of a model that decide who can run it.

    n_layers: blocks that are run (without next-token-prediction ones); n_sites: MoE calls per token, each a round trip
    where its experts are elsewhere. n_expert, n_used: of the site that has most. d_in, d_out: width of a row on its way
    to an expert and back. expert_bytes: mean over all experts of all sites. dense_bytes: what the backbone loads.
    kv_bytes_per_token: F16, per token of context and sequence; state_bytes: of recurrent layers, per sequence, F32.
    vocabulary: tokens. n_params 0 where not known. quantised: the kind of file that is taken for granted, "" where
    there is a file. assumed: what is not from a file or a publication. cannot_run: why no devices
    can run it, "" where some could.
    """

    name: str
    architecture: str
    n_layers: int
    n_sites: int
    n_expert: int
    n_used: int
    d_in: int
    d_out: int
    expert_bytes: int
    experts_total_bytes: int
    dense_bytes: int
    shared_expert: bool
    kv_bytes_per_token: int
    context_length: int
    n_params: int = 0
    state_bytes: int = 0
    vocabulary: int = 0
    quantised: str = ""
    assumed: str = ""
    cannot_run: str = ""

    @property
    def experts_in_all(self) -> int:
        """Of all sites together."""
        return round(self.experts_total_bytes / self.expert_bytes) if self.expert_bytes else 0


@dataclass(frozen=True, slots=True)
class BackboneMemory:
    """Bytes that a backbone takes, without experts: see `memory_of`."""

    dense: int
    cache: int
    compute: int
    process: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.dense + self.cache + self.compute + self.process


def needs_of(header: HeaderLike) -> ModelNeeds:
    """Read the figures off a header.

    A site is a layer with stacked expert weights (grovemoe's second set counts as one more). Layers that only predict
    further tokens (`nextn_predict_layers`, the last ones) are in no graph: their experts count nowhere.

    Raises DenseModel where there is no expert, NotGguf for metadata that cannot be meant.
    """
    arch, name = header.architecture, header.name
    numbers = _Numbers(header.metadata, arch, name)
    n_blocks = numbers.one("block_count", 0)
    n_layers = n_blocks - min(numbers.one("nextn_predict_layers", 0), n_blocks)
    sites: dict[tuple[int, str], dict[str, TensorLike]] = defaultdict(dict)
    dense = params = 0
    shared = False
    layers: dict[int, dict[str, TensorLike]] = defaultdict(dict)
    for tensor_name, tensor in header.tensors.items():
        params += math.prod(tensor.ne)
        match = EXPERT_TENSOR.match(tensor_name)
        if match is not None:
            is_run = not n_blocks or int(match[1]) < n_layers
            if is_run:
                sites[int(match[1]), match[3] or ""][tensor_name] = tensor
            # Biases and scales are small, and llama.cpp wants them also where the experts are elsewhere.
            if not is_run or (tensor_name.endswith(".weight") and len(tensor.ne) == 3):
                continue
        dense += tensor.n_bytes
        shared = shared or _SHARED.match(tensor_name) is not None
        of_layer = _OF_LAYER.match(tensor_name)
        if of_layer is not None and (not n_blocks or int(of_layer[1]) < n_layers):
            layers[int(of_layer[1])][of_layer[2]] = tensor
    stacks = {
        place: found
        for place, found in sites.items()
        if any(key.endswith(".weight") and len(tensor.ne) == 3 for key, tensor in found.items())
    }
    if not stacks:
        raise DenseModel(
            f"{name}: no routed experts (architecture {arch}); swarmnode runs Mixture-of-Experts models, this one is "
            "dense"
        )
    n_expert = max(tensor.ne[-1] for found in stacks.values() for tensor in found.values())
    slices = sum(_stack_experts(found) for found in stacks.values())
    total = sum(tensor.n_bytes for found in stacks.values() for tensor in found.values())
    widths = _widths(next(iter(stacks.values())))
    d_in, d_out = (width or numbers.one("embedding_length", 0) for width in widths)
    n_used = min(max(1, numbers.one("expert_used_count", 1)), n_expert)
    kv, state = 0, 0
    for layer, found in layers.items():
        kv += cached_values(found, layer, numbers) * F16_BYTES
        state += state_values(found, numbers) * F32_BYTES
    return ModelNeeds(
        name=name,
        architecture=arch,
        n_layers=n_layers or len(layers),
        n_sites=len(stacks),
        n_expert=n_expert,
        n_used=n_used,
        d_in=d_in,
        d_out=d_out,
        expert_bytes=total // max(slices, 1),
        experts_total_bytes=total,
        dense_bytes=dense,
        shared_expert=shared,
        kv_bytes_per_token=kv,
        context_length=numbers.one("context_length", 0),
        n_params=params,
        state_bytes=state,
        vocabulary=_vocabulary(header),
    )


def memory_of(
    needs: ModelNeeds, context: int, *, sequences: int = 1, batch: int = BATCH, logit_rows: int = LOGIT_ROWS
) -> BackboneMemory:
    """What a backbone process takes without any expert, bytes; `context` in tokens, of each of `sequences`.

    `batch`: tokens of a prompt in one step; `logit_rows`: how many of them have their logits asked for at a time.

    dense: all tensors but the expert weights, loaded into memory as they are in the file. cache: KV in F16 and running
    states in F32; llama.cpp keeps layers with a sliding window in full. compute: what a batch of a prompt touches of
    llama.cpp's buffers (the residual stream and what is made of it, the attention mask; the chosen experts' own rows
    are reserved and never touched), the rows that are under way to and from workers, and a few rows of logits.
    process: before there is a model, and the vocabulary.

    Beside the resident memory of real `up` backbones after a prompt of a thousand tokens it is 6 % less (demo model,
    121 MB), 3 %, 2 % and 1.5 % less (d 1024 and 2048; 0.5, 1.4 and 1.7 GB) and 11 % more (d 4096, top 8, 0.7 GB).
    """
    cache = sequences * (context * needs.kv_bytes_per_token + needs.state_bytes)
    tokens = min(batch, context)
    rows = RESIDUAL_ROWS * needs.d_in + 2 * needs.n_used * needs.d_out
    compute = F32_BYTES * (tokens * (rows + context) + logit_rows * needs.vocabulary)
    return BackboneMemory(needs.dense_bytes, cache, compute, PROCESS_BYTES + TOKEN_BYTES * needs.vocabulary)


class _Numbers:
    """Integers of the metadata under `ARCH.key`, believed only as far as they can be meant; each is read once."""

    def __init__(self, metadata: MetadataLike, arch: str, name: str) -> None:
        self._metadata, self._arch, self._name = metadata, arch, name
        self._read: dict[str, tuple[tuple[int, ...], int]] = {}  # the numbers, and the largest of them

    def one(self, key: str, default: int, layer: int | None = None) -> int:
        """The value; of an array the layer's, or its largest. Raises NotGguf for what is no count."""
        if key not in self._read:
            read = self._numbers(f"{self._arch}.{key}")
            self._read[key] = read, max(read, default=0)
        numbers, largest = self._read[key]
        if not numbers:
            return default
        return numbers[layer] if layer is not None and layer < len(numbers) else largest

    def _numbers(self, full: str) -> tuple[int, ...]:
        """Those of a key, () where it is absent."""
        if full not in self._metadata:
            return ()
        numbers = self._metadata.integers(full)
        if not numbers or not all(0 <= number < MOST_COUNT for number in numbers):
            raise NotGguf(f"{self._name}: metadata key {full} is no count, nor a list of one for each layer")
        return numbers


def _stack_experts(found: Mapping[str, TensorLike]) -> int:
    return max(tensor.ne[-1] for key, tensor in found.items() if key.endswith(".weight") and len(tensor.ne) == 3)


def _widths(found: Mapping[str, TensorLike]) -> tuple[int, int]:
    """(d_in, d_out) of a site; 0 where no tensor says it."""
    d_in = d_out = 0
    for key, tensor in found.items():
        if key.endswith(".weight") and len(tensor.ne) == 3:
            if "_down_" in key:
                d_out = tensor.ne[1]
            else:
                d_in = tensor.ne[0]
    return d_in, d_out


def _vocabulary(header: HeaderLike) -> int:
    for name in ("output.weight", "token_embd.weight"):
        tensor = header.tensors.get(name)
        if tensor is not None and len(tensor.ne) > 1:
            return min(tensor.ne[1], MOST)
    return 0
