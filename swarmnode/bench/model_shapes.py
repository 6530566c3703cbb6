"""The shapes of public mixture-of-experts models, as far as they decide what a token sends and gets back.

Pure data, read by `bench/wire.py`. From the models' published configurations (`config.json`: hidden_size,
moe_intermediate_size, num_experts, num_experts_per_tok, first_k_dense_replace, …). What could not be taken from one is
named in `assumed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. `d` is the width of what experts are given and give back: hidden_size, or less where they are latent.

    d_ff: inner width of one expert. layers: those with experts. shared: inner width of what every token goes through
    beside them, 0 for none. weights "before": the router's weights multiply x, as in llama4.
    """

    name: str
    d: int
    d_ff: int
    n_expert: int
    k: int
    layers: int
    shared: int = 0
    weights: Literal["after", "before"] = "after"
    assumed: str = ""


MODELS: tuple[ModelShape, ...] = (
    ModelShape("Step-3.7-Flash", 4096, 1280, 288, 8, 42, 1280, assumed="as Step-3.5-Flash"),
    ModelShape("Qwen3.5-122B", 3072, 1024, 256, 8, 48, 1024),
    ModelShape("GLM-4.5/4.6", 5120, 1536, 160, 8, 89, 1536),
    ModelShape("GLM-5.2", 6144, 2048, 256, 8, 75, 2048, assumed="as GLM-5"),
    ModelShape("MiniMax-M2", 3072, 1536, 256, 8, 62),
    ModelShape("MiniMax-M3", 6144, 3072, 128, 4, 57, 3072, assumed="all widths; 128 experts and top-4 are published"),
    ModelShape("DeepSeek-V3/R1", 7168, 2048, 256, 8, 58, 2048),
    ModelShape("Kimi-K3", 3584, 3072, 896, 16, 92, 3072, assumed="all figures; that its experts are latent is known"),
    ModelShape("Qwen3-235B", 4096, 1536, 128, 8, 94),
    ModelShape("gpt-oss-120b", 2880, 2880, 128, 4, 36),
    ModelShape("Llama-4-Maverick", 5120, 8192, 128, 1, 24, 8192, "before"),
    ModelShape("Mixtral-8x22B", 6144, 16384, 8, 2, 56),
)
