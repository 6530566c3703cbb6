"""The table of models: its sums are the published ones, and names find them."""

from __future__ import annotations

import pytest

from swarmnode.architectures.tiny_model import ARCHITECTURES
from swarmnode.errors import UsageError
from swarmnode.sizing.needs import memory_of
from swarmnode.sizing.shapes import MODELS, ModelShape, find_shape, needs_of_shape, uses_more_bits


def test_there_are_the_twelve_of_the_roadmap() -> None:
    assert len(MODELS) == len({shape.name for shape in MODELS}) == 12
    assert {shape.arch for shape in MODELS} <= set(ARCHITECTURES)


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_shapes_add_up_to_the_published_size(shape: ModelShape) -> None:
    assert shape.params / 1e9 == pytest.approx(shape.published, rel=0.02)
    assert shape.active_params / 1e9 == pytest.approx(shape.active, rel=0.11)  # who counts which embedding differs


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_needs(shape: ModelShape) -> None:
    needs = needs_of_shape(shape)
    assert needs.experts_in_all == shape.layers * shape.n_expert
    assert needs.shared_expert == (shape.shared > 0)
    if shape.size_mb:
        assert shape.expert_bytes / 1e6 == pytest.approx(shape.size_mb, rel=0.06)
    assert memory_of(needs, 8192).total < 40 << 30


def test_the_quantisers_layers() -> None:
    """What llama.cpp 0.3.36's `use_more_bits` says of 48 layers: the first and the last eighth, and each third between.

    llama-quant.cpp: i < n/8 || i >= 7*n/8 || (i - n/8) % 3 == 2.
    """
    finer = [layer for layer in range(48) if uses_more_bits(layer, 48)]
    assert finer == [*range(6), 8, 11, 14, 17, 20, 23, 26, 29, 32, 35, 38, 41, *range(42, 48)]


# Published Q4_K_M files are a few GiB larger: their dense weights.
@pytest.mark.parametrize(
    ("name", "gib", "more"),
    [("Qwen3-235B", 127.9, 1.0748), ("DeepSeek-R1", 366.9, 1.0711), ("maverick", 218.0, 1.0764), ("kimi", 1347.1, 1.0),
     ("gpt-oss", 56.9, 1.0)],
)  # fmt: skip
def test_experts_are_those_of_a_usual_file(name: str, gib: float, more: float) -> None:
    shape = find_shape(name)
    needs = needs_of_shape(shape)
    assert needs.experts_total_bytes / 2**30 == pytest.approx(gib, abs=0.1)
    assert needs.expert_bytes / shape.expert_bytes == pytest.approx(more, abs=1e-4)
    assert needs.quantised == ("MXFP4" if more == 1 else "Q4_K_M")
    assert shape.expert_type in needs.assumed


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("GLM-4.6", "GLM-4.5/4.6"), ("glm 4.6", "GLM-4.5/4.6"), ("GLM-4.6-UD-Q4_K_XL", "GLM-4.5/4.6"),
        ("glm4moe", "GLM-4.5/4.6"), ("glm-5.2", "GLM-5.2"), ("Maverick", "Llama-4-Maverick"),
        ("deepseek-r1", "DeepSeek-V3/R1"), ("DEEPSEEK2", "DeepSeek-V3/R1"), ("gptoss", "gpt-oss-120b"),
        ("qwen3moe", "Qwen3-235B"), ("Qwen3.5", "Qwen3.5-122B"), ("kimi", "Kimi-K3"), ("mixtral", "Mixtral-8x22B"),
        ("step", "Step-3.7-Flash"), ("minimax m3", "MiniMax-M3"), ("gpt-oss-120b-mxfp4.gguf", "gpt-oss-120b"),
        ("Qwen3-235B-A22B-Instruct-2507-Q4_K_M", "Qwen3-235B"), ("DeepSeek-R1-0528", "DeepSeek-V3/R1"),
        ("llama4", "Llama-4-Maverick"), ("glm-4.5 iq2_xxs", "GLM-4.5/4.6"),
    ],
)  # fmt: skip
def test_names(text: str, name: str) -> None:
    assert find_shape(text).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("glm", "GLM-4.5/4.6 or GLM-5.2"), ("GML-4.6", "did you mean GLM-4.5/4.6"), ("llama-2-7b", "A GGUF"),
        ("gpt-oss-20b", "did you mean gpt-oss-120b"), ("Llama-4-Scout", "did you mean Llama-4-Maverick"),
        ("GLM-4.5-Air", "did you mean GLM-4.5/4.6"), ("GLM-4.5-Air-Q4_K_M", "did you mean GLM-4.5/4.6"),
        ("deepseek2-lite", "did you mean DeepSeek-V3/R1"), ("llama", "Llama-4-Maverick or Mixtral-8x22B"),
        ("glm-4", "did you mean GLM-4.5/4.6"), ("qwen3", "Qwen3.5-122B or Qwen3-235B"),
        ("DeepSeek-V3.2", "did you mean DeepSeek-V3/R1"), ("Mixtral-8x7B", "did you mean Mixtral-8x22B"),
        ("", "no model"), ("GLM-4.6" + " " * 300 + "Air", "no model"), ("\x00\u202e", "no model"),
        ("x" * 10_000, "xxx"),
    ],
)  # fmt: skip
def test_unknown_names(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        find_shape(text)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("shape", MODELS, ids=lambda shape: shape.name)
def test_every_name_of_a_model_finds_it_and_no_other_one(shape: ModelShape) -> None:
    for name in (shape.name, *shape.names):
        assert find_shape(name) is find_shape(f"{name}-Q4_K_M.gguf") is shape
        assert shape.is_called(name)
    assert not shape.is_called(shape.name + "-lite")
