"""How much a layer keeps of the tokens before: data about attention and recurrent layers, as llama.cpp names them.

Pure. Kinds of layers are known by their tensors, never by the architecture's name, so that a model that is made of
known parts needs no new line. The tables at the top are the data: what a new kind of layer needs is a line there. Read
by `needs.py` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeGuard


class TensorLike(Protocol):
    """A line of a tensor directory; `ne` as GGUF has it (ne[0] innermost)."""

    @property
    def ne(self) -> tuple[int, ...]: ...

    @property
    def n_bytes(self) -> int: ...


class Counts(Protocol):
    """The counts of a model's metadata, without the architecture's name before them."""

    def one(self, key: str, default: int, layer: int | None = None) -> int:
        """The value; of an array the layer's, or its largest."""


Tensors = Mapping[str, TensorLike]  # of one layer, by their names without "blk.N."


@dataclass(frozen=True, slots=True)
class RunningState:
    """A kind of layer that keeps a running state and no tokens.

    known_by: tensors that all stand in such a layer, or beginnings of names of which one does. values: of the state,
    per sequence, as llama.cpp's hparams n_embd_r and n_embd_s have it; None where it is too small to be counted.
    """

    what: str
    known_by: tuple[str, ...]
    values: Callable[[Tensors, Counts], int] | None
    beginnings: bool = False

    def is_one(self, found: Tensors) -> bool:
        """Whether a layer is of this kind."""
        if self.beginnings:
            return any(name.startswith(self.known_by) for name in found)
        return all(name in found for name in self.known_by)


def _past(counts: Counts) -> int:
    """Tokens that a convolution looks back."""
    return max(0, counts.one("ssm.conv_kernel", 1) - 1)


def _short_convolution(_found: Tensors, counts: Counts) -> int:
    return counts.one("embedding_length", 0) * max(0, counts.one("shortconv.l_cache", 1) - 1)


def _linear_attention(found: Tensors, counts: Counts) -> int:
    heads = max(1, counts.one("attention.head_count", 1))
    return heads * (found["attn_qkv.weight"].ne[-1] // (3 * heads)) ** 2


def _delta_attention(_found: Tensors, counts: Counts) -> int:
    heads, head = counts.one("attention.head_count", 0), counts.one("kda.head_dim", 0)
    return 3 * _past(counts) * heads * head + heads * head * head


def _state_space(_found: Tensors, counts: Counts) -> int:
    inner, size = counts.one("ssm.inner_size", 0), counts.one("ssm.state_size", 0)
    return _past(counts) * (inner + 2 * counts.one("ssm.group_count", 0) * size) + inner * size


# ---- the data; the first kind that a layer is one of counts

RUNNING: Final = (
    RunningState("a short convolution alone (lfm2)", ("shortconv.conv.weight",), _short_convolution),
    RunningState(
        "linear attention (minimax-01)",
        ("attn_norm_2.weight", "attn_gate.weight", "attn_qkv.weight"),
        _linear_attention,
    ),
    RunningState(
        "delta attention (Kimi): three convolutions, a matrix per head", ("ssm_conv1d_q.weight",), _delta_attention
    ),
    RunningState("a state space (Mamba, gated delta nets)", ("ssm_",), _state_space, beginnings=True),
    RunningState("time mixing (RWKV) and other short convolutions", ("time_mix_", "shortconv."), None, beginnings=True),
)
INDEXER_KEYS: Final = ("indexer.attn_k.weight", "indexer.k_proj.weight")  # on top of whatever attention there is
LATENT: Final = "attn_kv_a_mqa.weight"  # MLA: its latent and one rotary key are kept, and no values
# Files with the first of these and without the second: llama.cpp keeps full keys and values of latent attention too.
LATENT_WHOLE, LATENT_SPLIT = "attn_kv_b.weight", "attn_k_b.weight"
KEYS, VALUES = "attn_k.weight", "attn_v.weight"  # without VALUES, keys are the values
FUSED: Final = ("attn_qkv.weight", "attn_kv.weight")  # the heads' counts and lengths say what of it are keys, values


def state_values(found: Tensors, counts: Counts) -> int:
    """Values of one layer's running state, per sequence; 0 of a layer that has none."""
    kind = next((one for one in RUNNING if one.is_one(found)), None)
    return kind.values(found, counts) if kind is not None and kind.values is not None else 0


def cached_values(found: Tensors, layer: int, counts: Counts) -> int:
    """Values that the cache holds per token of context for one layer; none for one with a running state.

    Layers that compress their cache or share another's (deepseek4, gemma4) are counted in full, pooled keys (glm5-next)
    not.
    """
    if any(kind.is_one(found) for kind in RUNNING):
        return 0
    heads = counts.one("attention.head_count", 0, layer)
    kv_heads = counts.one("attention.head_count_kv", heads, layer)
    key = counts.one("attention.key_length", 0, layer)
    value = counts.one("attention.value_length", key, layer)
    indexer = next((found[name].ne[1] for name in INDEXER_KEYS if _is_matrix(found.get(name))), 0)
    if _is_matrix(latent := found.get(LATENT)):
        if LATENT_WHOLE in found and LATENT_SPLIT not in found:
            return heads * (key + value) + indexer
        return latent.ne[1] + indexer
    if _is_matrix(keys := found.get(KEYS)):
        values = found.get(VALUES)
        return keys.ne[1] + (values.ne[1] if _is_matrix(values) else keys.ne[1]) + indexer
    fused = next((found[name] for name in FUSED if name in found), None)
    if _is_matrix(fused):
        width = counts.one("embedding_length", 0)
        one = key or (width // heads if heads else 0)
        return kv_heads * (one + (value or one)) + indexer if one else fused.ne[1]
    return 0


def _is_matrix(tensor: TensorLike | None) -> TypeGuard[TensorLike]:
    return tensor is not None and len(tensor.ne) > 1
