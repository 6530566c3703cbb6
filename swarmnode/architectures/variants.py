"""What of an architecture's expert FFN can be otherwise: the variants that a tiny model comes in.

Pure. A variant changes a shape, metadata, or which of the optional tensors are there; never code. `VARIANTS` says what
each one is, `variants_of` which ones change an architecture's graph: the lists are of what llama.cpp reads, and were
found by comparing the graphs. Called by `tiny_model.py` and `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from swarmnode.architectures.metadata import Shape, Value

BASE = "base"
# ggml types that expert tensors are tried in; those of 256 want rows that long.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
WIDE_TYPES = frozenset({"Q4_K", "Q5_K", "Q6_K", "IQ4_XS"})
# Whose experts are computed differently from each other's: what the types are tried with.
PATTERNS: Mapping[str, str] = {
    "deepseek4": "clamp",
    "gpt-oss": BASE,
    "grovemoe": BASE,
    "kimi-k3": BASE,
    "llama4": BASE,
    "nemotron_h_moe": BASE,
    "qwen3moe": BASE,
    "qwen35moe": "merged_scales",
    "step35": "clamp",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """`used` and `leading_dense` change the shape, `extra` the metadata, the rest which tensors there are.

    `of` names the architectures whose graph it changes (None: all), `not_of` those of them that have no such variant.
    """

    what: str
    of: str | None = ""
    not_of: str = ""
    used: int | None = None  # experts per token
    leading_dense: int = 0  # layers without experts before the others
    extra: Callable[[Shape], Mapping[str, Value]] = lambda _shape: {}
    merged: bool = False  # gate and up in one tensor
    scales: bool = False  # a factor per expert
    gated: bool = True  # False: no gate

    def apply(self, shape: Shape) -> Shape:
        """The shape of this variant of a model."""
        changed = replace(shape, used=self.used or shape.used, leading_dense=self.leading_dense)
        return replace(changed, extra=dict(self.extra(changed)))

    def changes(self, arch: str) -> bool:
        """Whether it is another graph than the base model's of this architecture."""
        return (self.of is None or arch in self.of.split()) and arch not in self.not_of.split()


# Biases per expert are no variant: gpt-oss has them always, nothing else can.
VARIANTS: Mapping[str, Variant] = {
    BASE: Variant("three of eight experts in every layer that can have them", of=None),
    "merged": Variant(
        "gate and up in one tensor",
        of="cohere2moe deepseek2 deepseek2-ocr gemma4 granite_swa hy_v3 mistral4 qwen35moe qwen3next qwen4exp",
        merged=True,
    ),
    "scales": Variant(
        "a scale per expert",
        of="cohere2moe deepseek32 dots3note gemma4 glm-dsa hy_v3 llama llama-embed mellum mistral3 nemotron_h_moe "
        "qwen35moe qwen3moe qwen3next qwen4exp",
        scales=True,
    ),
    "merged_scales": Variant(
        "gate and up in one tensor, a scale per expert",
        of="cohere2moe gemma4 hy_v3 qwen35moe qwen3next qwen4exp",
        merged=True,
        scales=True,
    ),
    "ungated": Variant(
        "no gate",
        of="ernie4_5-moe granite granitehybrid granitemoe grok hy_v3 llama llama-embed mimo2 minicpm minimax-01 "
        "mistral3 step35",
        gated=False,
    ),
    "clamp": Variant(
        "SwiGLU with a limit that is reached",
        of="bailingmoe3 deepseek4 dflash glm5-next hy_v4 maple step35",
        extra=lambda _s: {"swiglu_clamp_exp": 0.5, "swiglu_clamp_shexp": 0.5},
    ),
    "leading_dense": Variant(
        "the first layer is dense",
        of="afmoe bailingmoe2 bailingmoe3 cohere2moe deepseek deepseek2 deepseek2-ocr deepseek32 dots1 dots3note "
        "ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next hy_v3 hy_v4 kimi-k3 kimi-linear laguna lfm2moe mimo2 "
        "minimax-m3 mistral4 step35",
        leading_dense=1,
    ),
    "interleaved": Variant(
        "experts in every other layer",
        of="ernie4_5-moe llama4",
        extra=lambda _s: {"interleave_moe_layer_step": 2},
    ),
    "groups": Variant(
        "experts of the two best groups of four",
        of=None,
        not_of="grovemoe",
        extra=lambda _s: {"expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "hash": Variant(
        "experts by the token's hash in the first layer", "deepseek4", extra=lambda _s: {"hash_layer_count": 1}
    ),
    "latent": Variant(
        "experts of a narrower width than the model", "nemotron_h_moe", extra=lambda s: {"moe_latent_size": s.latent}
    ),
    "top1": Variant("one expert per token", of=None, used=1),
    "varying": Variant(
        "another number of experts in each layer",
        of="nemotron_h_moe",
        extra=lambda s: {"expert_used_count": [2 + layer % 3 for layer in range(s.layers)]},
    ),
    "no_shared": Variant(
        "no shared expert",
        of="afmoe bailingmoe3 cohere2moe ernie4_5-moe exaone-moe glm4moe granite granite_swa granitehybrid granitemoe "
        "hunyuan-moe hy_v3 qwen2moe qwen35moe qwen3next qwen4exp step35",
        extra=lambda _s: {"expert_shared_count": 0, "expert_shared_feed_forward_length": 0},
    ),
    "softmax": Variant(
        "router weights by softmax, not normalised",
        of="afmoe bailingmoe bailingmoe2 bailingmoe3 cohere2moe deepseek deepseek2 deepseek2-ocr deepseek32 dots1 "
        "dots3note exaone-moe glm-dsa glm4moe glm5-next hy_v3 hy_v4 kimi-k3 kimi-linear laguna lfm2moe minimax-m2 "
        "minimax-m3 mistral4 nemotron_h_moe smallthinker step35",
        extra=lambda _s: {"expert_gating_func": 1, "expert_weights_norm": False, "expert_weights_scale": 1.0},
    ),
}


def variants_of(arch: str) -> tuple[str, ...]:
    """The variants whose graphs differ from the base model's of this architecture, and that one first."""
    return tuple(name for name, variant in VARIANTS.items() if variant.changes(arch))
