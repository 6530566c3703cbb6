"""What a model needs, from its metadata and tensor directory alone: no tensor is read, no model is loaded.

Pure. `needs_of` takes anything that has a GGUF's header (a file on disk, or one on a web server). What decides memory
is read off the tensors' shapes where they say it, since metadata only repeats them; approximations are named in the
docstrings. Called by the gate, `swarmnode plan` and the page of models.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from swarmnode.errors import DenseModel, NotGguf
from swarmnode.model.gguf_file import EXPERT_TENSOR

_SHARED = re.compile(r"^blk\.[0-9]{1,6}\.ffn_(gate_up|gate|up|down)_shexp\.weight$")
_OF_LAYER = re.compile(r"^blk\.([0-9]{1,6})\.(.+)$")

F16_BYTES: Final = 2  # what the KV cache holds
F32_BYTES: Final = 4  # what running states and activations are held in
MOST: Final = 1 << 53  # nothing of a header is believed to be larger: JSON's exact integers

# A node's process before it has a model (Python, numpy, QUIC, llama.cpp) as measured, and llama.cpp's vocabulary.
PROCESS_BYTES: Final = 100 << 20
TOKEN_BYTES: Final = 150
RESIDUAL_ROWS: Final = 8  # of the model's width, per token: the stream, its norm, queries, keys, values
LOGIT_ROWS: Final = 16  # that are held at a time: one per generation, and one per draft
BATCH: Final = 512  # tokens of a prompt in one step, parts.BATCH
DEFAULT_SITE_S: Final = 0.0015  # of a layer, beside the round trip: frames, the hook, a worker's engine


class TensorLike(Protocol):
    """A line of a tensor directory; `ne` as GGUF has it (ne[0] innermost)."""

    @property
    def ne(self) -> tuple[int, ...]: ...

    @property
    def n_bytes(self) -> int: ...


class HeaderLike(Protocol):
    """A GGUF's header, all parts together: `model.gguf_file.GgufFile` is one."""

    @property
    def architecture(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, object]: ...

    @property
    def tensors(self) -> Mapping[str, TensorLike]: ...


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The figures of a model that decide who can run it.

    n_layers: blocks that are run (without next-token-prediction ones); n_sites: MoE calls per token, each a round trip
    where its experts are elsewhere. n_expert, n_used: of the site that has most. d_in, d_out: width of a row on its way
    to an expert and back. expert_bytes: mean over all experts of all sites. dense_bytes: what the backbone loads.
    kv_bytes_per_token: F16, per token of context and sequence; state_bytes: of recurrent layers, per sequence, F32.
    vocabulary: tokens. n_params 0 where not known. assumed: what is not from a file or a publication.
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
    assumed: str = ""

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
        kv += _kv_values(found, layer, numbers) * F16_BYTES
        state += _state_values(found, numbers) * F32_BYTES
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


def seconds_per_token(
    needs: ModelNeeds, rtt_s: float, *, accepted_per_step: float = 1.0, per_site_s: float = DEFAULT_SITE_S
) -> float:
    """A decode waits for one round trip per site and step; `accepted_per_step` tokens come of a step, on the average.

    Without the backbone's own computing. With some sites' experts on the backbone, see `with_sites`.
    """
    return needs.n_sites * (rtt_s + per_site_s) / max(accepted_per_step, 1e-9)


def with_sites(needs: ModelNeeds, n_sites: int) -> ModelNeeds:
    """The same model with so many sites left that need a round trip."""
    return replace(needs, n_sites=n_sites)


class _Numbers:
    """Integers of the metadata under `ARCH.key`, believed only as far as they can be meant."""

    def __init__(self, metadata: Mapping[str, object], arch: str, name: str) -> None:
        self._metadata, self._arch, self._name = metadata, arch, name

    def one(self, key: str, default: int, layer: int | None = None) -> int:
        """The value; of an array the layer's, or its largest. Raises NotGguf for what is no count."""
        full = f"{self._arch}.{key}"
        if full not in self._metadata:
            return default
        value = self._metadata[full]
        if isinstance(value, list):
            numbers = [item for item in value if isinstance(item, int)]
            if len(numbers) != len(value) or not numbers:
                raise NotGguf(f"{self._name}: metadata key {full} is no list of counts")
            value = numbers[layer] if layer is not None and layer < len(numbers) else max(numbers)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise NotGguf(f"{self._name}: metadata key {full} is no count: {str(value)[:40]}")
        return value


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


def _kv_values(found: Mapping[str, TensorLike], layer: int, numbers: _Numbers) -> int:
    """Values that the cache holds per token of context for one layer.

    Latent attention (MLA) keeps its latent and one rotary key, and no values; from a file without split-up matrices
    (older ones) llama.cpp keeps full keys and values. An indexer's keys come on top. Recurrent layers keep none. Layers
    that compress their cache or share another's (deepseek4, gemma4) are counted in full, pooled keys (glm5-next) not.
    """
    if _is_recurrent(found):
        return 0
    heads = numbers.one("attention.head_count", 0, layer)
    kv_heads = numbers.one("attention.head_count_kv", heads, layer)
    key = numbers.one("attention.key_length", 0, layer)
    value = numbers.one("attention.value_length", key, layer)
    indexer = next((found[n].ne[1] for n in _INDEXERS if n in found and len(found[n].ne) > 1), 0)
    latent = found.get("attn_kv_a_mqa.weight")
    if latent is not None and len(latent.ne) > 1:
        if "attn_kv_b.weight" in found and "attn_k_b.weight" not in found:
            return heads * (key + value) + indexer
        return latent.ne[1] + indexer
    keys = found.get("attn_k.weight")
    if keys is not None and len(keys.ne) > 1:
        values = found.get("attn_v.weight", keys)
        return keys.ne[1] + (values.ne[1] if len(values.ne) > 1 else keys.ne[1]) + indexer
    fused = found.get("attn_qkv.weight") or found.get("attn_kv.weight")
    if fused is not None and len(fused.ne) > 1:
        width = numbers.one("embedding_length", 0)
        one = key or (width // heads if heads else 0)
        return kv_heads * (one + (value or one)) + indexer if one else fused.ne[1]
    return 0


_INDEXERS = ("indexer.attn_k.weight", "indexer.k_proj.weight")
_RECURRENT = ("ssm_", "shortconv.", "time_mix_")
_LIGHTNING = {"attn_norm_2.weight", "attn_gate.weight", "attn_qkv.weight"}  # of minimax-01's linear attention


def _is_recurrent(found: Mapping[str, TensorLike]) -> bool:
    """Whether a layer keeps a running state and no tokens."""
    return any(name.startswith(_RECURRENT) for name in found) or found.keys() >= _LIGHTNING


def _state_values(found: Mapping[str, TensorLike], numbers: _Numbers) -> int:
    """Values of one layer's running state, per sequence: llama.cpp's hparams n_embd_r and n_embd_s."""
    if "shortconv.conv.weight" in found:
        return numbers.one("embedding_length", 0) * max(0, numbers.one("shortconv.l_cache", 1) - 1)
    if found.keys() >= _LIGHTNING:
        heads = max(1, numbers.one("attention.head_count", 1))
        return heads * (found["attn_qkv.weight"].ne[-1] // (3 * heads)) ** 2
    if not any(name.startswith("ssm_") for name in found):
        return 0
    past = max(0, numbers.one("ssm.conv_kernel", 1) - 1)
    if "ssm_conv1d_q.weight" in found:  # Kimi's delta attention: three convolutions, a matrix per head
        heads, head = numbers.one("attention.head_count", 0), numbers.one("kda.head_dim", 0)
        return 3 * past * heads * head + heads * head * head
    inner, size = numbers.one("ssm.inner_size", 0), numbers.one("ssm.state_size", 0)
    return past * (inner + 2 * numbers.one("ssm.group_count", 0) * size) + inner * size


def _vocabulary(header: HeaderLike) -> int:
    for name in ("output.weight", "token_embd.weight"):
        tensor = header.tensors.get(name)
        if tensor is not None and len(tensor.ne) > 1:
            return min(tensor.ne[1], MOST)
    return 0
