"""What a tiny model of each architecture says of itself: GGUF metadata, as data.

Pure. One set of keys serves nearly all: llama.cpp reads what an architecture has and ignores the rest. `_OWN` holds
what single architectures need beyond it (figures after llama.cpp's tests/test-llama-archs.cpp, cut down to what they
read). Called by `tiny_model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

Value = bool | int | float | str | list[int] | list[float] | tuple[np.uint64, ...]

VOCAB = 272  # three special tokens, 256 bytes, and a few words
CONTEXT = 256
_KV_RANK, _ROPE, _NOPE = 32, 16, 32  # of latent attention (MLA)
_PLE_HEADS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a tiny model is, and what a variant changes (`extra`: keys without the architecture's name)."""

    d: int = 64
    heads: int = 2
    layers: int = 2
    ff: int = 96
    ff_expert: int = 64
    latent: int = 32
    experts: int = 8
    used: int = 3
    leading_dense: int = 0
    extra: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return self.d // self.heads


def metadata(arch: str, shape: Shape) -> dict[str, Value]:
    """The keys of a tiny model, without the architecture's name before them. Any architecture has an answer."""
    pairs = _common(shape)
    for names, own in _OWN:
        if arch in names.split():
            pairs |= own(shape)
    pairs |= dict(shape.extra)
    return {key: value for key, value in pairs.items() if value != []}


def least_layers(arch: str) -> int:
    """How many layers an architecture must have to have one of each kind."""
    return _LAYERS.get(arch, 2)


# llama4 and gemma4 have a pattern of four and five layers, nemotron-h one kind of part per layer.
_LAYERS = {"llama4": 4, "gemma4": 5, "nemotron_h_moe": 4, "deepseek4": 4}


def _common(s: Shape) -> dict[str, Value]:
    return {
        "vocab_size": VOCAB,
        "context_length": CONTEXT,
        "embedding_length": s.d,
        "block_count": s.layers,
        "leading_dense_block_count": s.leading_dense,
        "feed_forward_length": s.ff,
        "logit_scale": 1.0,
        "residual_scale": 1.0,
        "full_attention_interval": 2,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.heads,
        "attention.clamp_kqv": 8.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": _KV_RANK,
        "attention.kv_lora_rank": _KV_RANK,
        "attention.sliding_window": 16,  # shorter than what the gate evaluates
        "attention.sliding_window_pattern": 2,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131072,  # everything: what a smaller one chooses hangs on the last bit
        "attention.indexer.block_size": 4,
        "attention.indexer.local_blocks": 1,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "rope.dimension_sections": [s.head // 4] * 4,
        "expert_count": s.experts,
        "expert_used_count": s.used,
        "expert_feed_forward_length": s.ff_expert,
        "expert_shared_feed_forward_length": 48,
        "expert_shared_count": 1,
        "expert_latent_length": s.latent,
        "expert_gating_func": 2,  # sigmoid
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_group_scale": 1.0,
        "experts_per_group": 2,
        "expert_chunk_feed_forward_length": s.ff_expert,
        "interleave_moe_layer_step": 1,
        "ssm.inner_size": 2 * s.d,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 2 * s.head,
        "ssm.time_step_rank": s.heads,
        "ssm.group_count": 2,
        "kda.head_dim": 32,
        "kda.gate_lower_bound": -5.0,
        "shortconv.l_cache": 3,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    }


def _second_recurrent(s: Shape, kv_heads: int) -> dict[str, Value]:
    return {
        "attention.head_count": [0 if layer == 1 else s.heads for layer in range(s.layers)],
        "attention.head_count_kv": [0 if layer == 1 else kv_heads for layer in range(s.layers)],
    }


def _latent_attention(s: Shape) -> dict[str, Value]:
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": _KV_RANK + _ROPE,
        "attention.value_length": _KV_RANK,
        "attention.key_length_mla": _NOPE + _ROPE,
        "attention.value_length_mla": 32,
        "rope.dimension_count": _ROPE,
        "rope.dimension_sections": [2, 3, 3, 0],
    }


def _every_other_slides(s: Shape) -> dict[str, Value]:
    return {"attention.sliding_window_pattern": [layer % 2 for layer in range(s.layers)]}


def _every_other_indexes(s: Shape) -> dict[str, Value]:
    return {"attention.indexer.types": [1 - layer % 2 for layer in range(s.layers)]}


def _hyper_connections(s: Shape) -> dict[str, Value]:
    return {
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.low_rank": 8,
        "hyper_connection.magnitude": 2.0,
    }


def _ngram_embeddings(s: Shape) -> dict[str, Value]:
    numbers = [np.uint64(head * VOCAB) for head in range(_PLE_HEADS)]
    return {
        "attention.compress_ratios": [4] * s.layers,
        "ple.layers": [0],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 0,
        "embedding_length_per_layer_input": s.d // _PLE_HEADS,
        "ple.layer_multipliers": (np.uint64(1), np.uint64(3), np.uint64(5)),
        "ple.head_offsets": tuple(numbers),
        "ple.head_vocab_sizes": (np.uint64(VOCAB),) * _PLE_HEADS,
    }


def _deepseek4(s: Shape) -> dict[str, Value]:
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": 64,  # it is rotated by a Hadamard matrix, of 64 or more
        "attention.value_length": 64,
        "rope.dimension_count": 32,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 16,
        "attention.compress_ratios": [0, 0, 4, 128],
        "attention.compress_rope_freq_base": 160_000.0,
        "hash_layer_count": 0,
        "swiglu_clamp_exp": 10.0,
        "expert_gating_func": 4,  # sqrtsoftplus
    }


def _dflash(s: Shape) -> dict[str, Value]:
    """A draft model of deepseek4's kind."""
    return {
        **_deepseek4(s),
        "target_layers": [0, 1],
        "attention.compress_ratios": [0] * s.layers,
        "rope.dimension_sections": [],
    }


def _gemma4(s: Shape) -> dict[str, Value]:
    return {
        "attention.sliding_window_pattern": [int(layer % 5 != 4) for layer in range(s.layers)],
        "attention.key_length_swa": s.head,
        "attention.value_length_swa": s.head,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 32,
        "rope.freq_base_swa": 10_000.0,
    }


def _dots3note(s: Shape) -> dict[str, Value]:
    mla = _latent_attention(s)
    return {
        "attention.kv_lora_rank_swa": _KV_RANK,
        **{f"{key}_swa": mla[key] for key in mla if key.startswith(("attention.key", "attention.value"))},
        "rope.freq_base_swa": 10_000.0,
    }


def _glm5(s: Shape) -> dict[str, Value]:
    return {
        "attention.head_count_kv": [0 if layer == 1 else 1 for layer in range(s.layers)],
        "attention.key_length": _KV_RANK,
        "attention.key_length_mla": _NOPE,
        "rope.dimension_count": 0,
    }


def _nemotron(s: Shape) -> dict[str, Value]:
    """A part per layer: attention, recurrent, experts, experts."""
    heads: list[int] = [0 if layer % 4 == 1 else s.heads for layer in range(s.layers)]
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "feed_forward_length": [s.ff if layer % 4 > 1 else 0 for layer in range(s.layers)],
    }


_MLA = "deepseek2 deepseek32 glm-dsa dots3note kimi-linear bailingmoe3 kimi-k3 glm5-next mistral4 hy_v4"
_OWN: tuple[tuple[str, Callable[[Shape], dict[str, Value]]], ...] = (
    (_MLA, _latent_attention),
    ("jamba granitehybrid lfm2moe", lambda s: _second_recurrent(s, s.heads)),
    ("kimi-linear bailingmoe3 kimi-k3", lambda s: _second_recurrent(s, 1)),
    ("cohere2moe mimo2 step35 granite_swa dots3note maple", _every_other_slides),
    ("dots3note hy_v4", _every_other_indexes),
    ("qwen4exp glm5-next deepseek4 hy_v4 dflash", _hyper_connections),
    ("qwen4exp glm5-next", _ngram_embeddings),
    ("dots3note", _dots3note),
    ("nomic-bert-moe", lambda _s: {"moe_every_n_layers": 2}),
    ("deepseek4", _deepseek4),
    ("dflash", _dflash),
    ("gemma4", _gemma4),
    ("nemotron_h_moe", _nemotron),
    ("glm5-next", _glm5),
    ("qwen4exp", lambda s: {"attention.indexer.key_length": s.head}),
    ("hy_v4", lambda s: {"swiglu_clamp_exp": 10.0}),
    ("maple", lambda s: {"swiglu_clamp_exp": 7.0}),
    ("bailingmoe3", lambda s: {"swiglu_clamp_exp": [0.0] + [4.0] * (s.layers - 1)}),
    ("minimax-m3", lambda s: {"attention.indexer.head_count": s.heads, "rope.dimension_count": 32}),
)
