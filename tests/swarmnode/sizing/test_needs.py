"""What is read off a header: against the demo model, against llama.cpp's own caches, against real nodes' memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.architectures.tiny_model import write_tiny_model
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.errors import DenseModel, ModelError, NotGguf
from swarmnode.local_swarm import LocalSwarm
from swarmnode.model.gguf_file import GgufFile
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import onboard
from swarmnode.sizing.needs import ModelNeeds, memory_of, needs_of
from tests.swarmnode.sizing.headers import FakeHeader, FakeMetadata, FakeTensor, needs

DEMO = Path(__file__).parents[3] / "swarmnode" / "data" / "pystdlib-moe-15m-Q4_K_M.gguf"


def test_the_demo_model() -> None:
    found = needs_of(GgufFile.open(DEMO))
    assert (found.n_layers, found.n_sites, found.n_expert, found.n_used) == (4, 4, 16, 4)
    assert (found.d_in, found.d_out, found.context_length) == (256, 256, 512)
    assert found.shared_expert
    assert found.experts_in_all == 64
    assert found.dense_bytes + found.experts_total_bytes < DEMO.stat().st_size
    assert found.dense_bytes + found.experts_total_bytes > 0.98 * DEMO.stat().st_size - (1 << 17)


def test_parts_make_no_difference_and_the_pack_says_the_same(tmp_path: Path) -> None:
    model = RandomModel(n_layers=3)
    (whole,) = write_random_model(model, tmp_path / "whole.gguf")
    parts = write_random_model(model, tmp_path / "parts.gguf", parts=3)
    found = needs_of(GgufFile.open(whole))
    assert needs_of(GgufFile.open(parts[1])) == found
    manifest = onboard(whole, tmp_path / "pack").manifest
    assert found.n_sites == len(manifest.sites)
    assert found.expert_bytes == manifest.expert_bytes(0)
    assert found.experts_total_bytes == sum(t.stride * t.ne[-1] for t in manifest.tensors)


def test_layers_that_predict_further_tokens_are_not_run() -> None:
    header = FakeHeader(FakeMetadata({"arch.block_count": 4, "arch.nextn_predict_layers": 1}))
    for n in range(1, 4):
        header.experts(n)
    found = needs_of(header)
    assert (found.n_layers, found.n_sites) == (3, 2)
    assert found.experts_total_bytes == 2 * 4 * 3 * 64 * 32


def test_biases_are_the_experts_and_the_backbones() -> None:
    header = FakeHeader().experts(0)
    before = needs_of(header)
    header.tensors["blk.0.ffn_up_exps.bias"] = FakeTensor((32, 4), 512)
    found = needs_of(header)
    assert found.expert_bytes == before.expert_bytes + 128
    assert found.dense_bytes == before.dense_bytes + 512


@pytest.mark.parametrize(
    ("tensors", "kv", "state"),
    [
        ({"attn_k": (64, 32), "attn_v": (64, 16)}, 48, 0),
        ({"attn_qkv": (64, 192)}, 2 * 2 * 16, 0),
        ({"attn_kv_a_mqa": (64, 40), "attn_k_b": (1, 1), "attn_v_b": (1, 1)}, 40, 0),
        ({"attn_kv_a_mqa": (64, 40), "attn_kv_b": (1, 1)}, 4 * (16 + 16), 0),
        ({"attn_k": (64, 32), "attn_v": (64, 32), "indexer.attn_k": (64, 8)}, 72, 0),
        ({"ssm_conv1d": (4, 1), "attn_qkv": (64, 192)}, 0, 3 * (128 + 2 * 2 * 8) + 128 * 8),
        ({"ssm_conv1d_q": (4, 1), "attn_k": (64, 32), "attn_v": (64, 32)}, 0, 3 * 3 * 4 * 16 + 4 * 16 * 16),
        ({"shortconv.conv": (3, 64)}, 0, 2 * 64),
        ({}, 0, 0),
    ],
)
def test_what_a_layer_keeps_of_a_token(tensors: dict[str, Any], kv: int, state: int) -> None:
    numbers = {
        "embedding_length": 64, "attention.head_count": 4, "attention.head_count_kv": [2, 2],
        "attention.key_length": 16, "attention.value_length": 16, "ssm.conv_kernel": 4, "ssm.inner_size": 128,
        "ssm.state_size": 8, "ssm.group_count": 2, "kda.head_dim": 16, "shortconv.l_cache": 3,
    }  # fmt: skip
    found = needs_of(
        FakeHeader(FakeMetadata({f"arch.{key}": value for key, value in numbers.items()}))
        .experts(0)
        .layer(0, **tensors)
    )
    assert (found.kv_bytes_per_token, found.state_bytes) == (2 * kv, 4 * state)


@pytest.mark.parametrize("arch", ["glm4moe", "deepseek2", "llama4", "qwen35moe", "kimi-k3", "glm-dsa"])
def test_the_cache_is_what_llama_cpp_makes_of_it(arch: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf", arch)
    found = needs_of(GgufFile.open(path))
    sizes = []
    with (
        contextlib.closing(LlamaModel(path, remote_experts=False)) as model,
        contextlib.closing(LlamaContext(model, n_context=128, n_batch=64, threads=1)) as context,
    ):
        for position in (0, 32):
            context.decode([5] * 32, position)
            sizes.append(context._lib.llama_state_seq_get_size(context.handle, 0))
    per_token = (sizes[1] - sizes[0]) / 32
    assert found.kv_bytes_per_token <= per_token <= found.kv_bytes_per_token + 32  # positions and the like
    assert found.state_bytes == pytest.approx(sizes[0] - 32 * per_token, abs=256)
    sites = onboard(path, tmp_path / "pack").manifest.sites
    assert (found.n_sites, found.n_expert) == (len(sites), max(site.n_expert for site in sites))
    assert (found.d_in, found.d_out) == (sites[0].d_in, sites[0].d_out)


@pytest.mark.slow
async def test_memory_is_that_of_a_real_backbone(tmp_path: Path) -> None:
    model = RandomModel(
        d_model=1024, n_layers=4, n_ff_expert=512, n_expert=8, n_used=4, vocab=20_000, dense_type="Q8_0", context=4096
    )
    (path,) = write_random_model(model, tmp_path / "model.gguf")
    estimate = memory_of(needs_of(GgufFile.open(path)), 4096).total
    async with LocalSwarm(tmp_path, onboard(path, tmp_path / "pack").path) as swarm:
        await swarm.start(["1/1"], backbone=["--no-local-experts", "--context", "4096"])
        request = {"prompt": "a b c d e f g h " * 60, "max_tokens": 4}
        assert [event async for event in swarm.backbone.generate(request)][-1]["event"] == "result"
        memory = (await swarm.backbone.status())["memory"]
    assert 0.75 * memory < estimate < 1.3 * memory


def test_memory_grows_with_what_is_asked() -> None:
    base = memory_of(needs(), 4096)
    assert memory_of(needs(), 8192).cache == 2 * base.cache
    assert memory_of(needs(), 4096, sequences=2).cache == 2 * base.cache
    assert memory_of(needs(), 4096, batch=128).compute < base.compute
    assert base.total == base.dense + base.cache + base.compute + base.process


def test_a_key_of_every_layer_is_read_once_and_within_bounds() -> None:
    class Counting(FakeMetadata):
        asked = 0

        def integers(self, key: str) -> tuple[int, ...] | None:
            self.asked += 1
            return super().integers(key)

    header = FakeHeader(Counting({"arch.attention.head_count": [4] * 60_000, "arch.attention.key_length": 8})).experts(
        0
    )
    for n in range(2000):
        header.layer(n, attn_qkv=(64, 192))
    assert needs_of(header).kv_bytes_per_token == 2000 * 2 * 4 * (8 + 8)
    assert isinstance(header.metadata, Counting)
    assert header.metadata.asked < 10
    header.metadata["arch.attention.head_count"] = [4] * 70_000  # what no model has is not looked at
    with pytest.raises(NotGguf, match=r"arch\.attention\.head_count is no count"):
        needs_of(header)


def test_a_real_files_array_is_read_as_far_as_it_is_one_of_counts(tmp_path: Path) -> None:
    (path,) = write_random_model(RandomModel(), tmp_path / "m.gguf")
    name = b"qwen2moe.context_length"
    data = path.read_bytes()
    at = data.index(name) + len(name)
    path.write_bytes(data[:at] + b"\x06\x00\x00\x00" + data[at + 4 :])  # the same bytes, said to be a float
    with pytest.raises(NotGguf, match=r"qwen2moe\.context_length is no count"):
        needs_of(GgufFile.open(path))


def test_what_is_no_such_model() -> None:
    with pytest.raises(DenseModel, match="no routed experts"):
        needs_of(FakeHeader().layer(0, attn_k=(64, 32)))
    with pytest.raises(NotGguf, match=r"arch\.expert_used_count"):
        needs_of(FakeHeader(FakeMetadata({"arch.expert_used_count": "two"})).experts(0))
    with pytest.raises(NotGguf, match=r"arch\.attention\.head_count"):
        needs_of(FakeHeader(FakeMetadata({"arch.attention.head_count": [1, "x"]})).experts(0).layer(0, attn_qkv=(4, 4)))


_KEYS = st.sampled_from(
    ["block_count", "nextn_predict_layers", "expert_used_count", "embedding_length", "attention.head_count",
     "attention.head_count_kv", "attention.key_length", "attention.value_length", "context_length", "ssm.conv_kernel",
     "ssm.inner_size", "ssm.state_size", "ssm.group_count", "kda.head_dim", "shortconv.l_cache"]
)  # fmt: skip
_PARTS = st.sampled_from(
    ["attn_k", "attn_v", "attn_qkv", "attn_kv", "attn_kv_a_mqa", "attn_kv_b", "attn_k_b", "ssm_a", "ssm_conv1d_q",
     "shortconv.conv", "attn_norm_2", "attn_gate", "indexer.attn_k", "ffn_up_exps", "ffn_down_exps", "ffn_up_chexps"]
)  # fmt: skip
_NUMBERS = st.integers(-1, 1 << 40)
_VALUES = st.one_of(_NUMBERS, st.booleans(), st.floats(), st.text(max_size=4), st.lists(_NUMBERS, max_size=3))
_SHAPES = st.lists(st.integers(1, 1 << 62), min_size=1, max_size=4).map(tuple)


@given(
    metadata=st.dictionaries(_KEYS, _VALUES, max_size=8),
    tensors=st.dictionaries(st.tuples(st.integers(0, 3), _PARTS), _SHAPES, max_size=12),
)
def test_any_header_gives_figures_or_one_line(metadata: dict[str, Any], tensors: dict[Any, Any]) -> None:
    header = FakeHeader(FakeMetadata({f"arch.{key}": value for key, value in metadata.items()}))
    for (layer, part), ne in tensors.items():
        header.layer(layer, **{part: ne})
    try:
        found = needs_of(header)
    except ModelError:
        return
    assert isinstance(found, ModelNeeds)
    assert found.n_sites > 0
    assert found.expert_bytes > 0
    assert min(found.kv_bytes_per_token, found.state_bytes, found.dense_bytes) >= 0
    assert memory_of(found, 4096).total > 0
