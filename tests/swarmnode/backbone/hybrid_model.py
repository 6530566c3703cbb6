"""Tiny random models of architectures with recurrent layers and routed experts."""

from __future__ import annotations

from pathlib import Path

from swarmnode.architectures.metadata import VOCAB
from swarmnode.architectures.tiny_model import write_tiny_model

__all__ = ["CANNOT", "TAKES_BACK", "VOCAB", "write_hybrid_model"]

# The running state can be taken back of these, and not of those.
TAKES_BACK = (
    "qwen35moe",
    "kimi-k3",
    "glm5-next",
    "qwen4exp",
    "deepseek4",
    "bailingmoe3",
    "lfm2moe",
    "nemotron_h_moe",
)
CANNOT = ("qwen3next", "kimi-linear", "jamba", "minimax-01", "granitehybrid")


def write_hybrid_model(path: Path, arch: str) -> Path:
    """A GGUF of a few MB. Raises ModelError where llama.cpp makes no model of it."""
    return write_tiny_model(path, arch)
