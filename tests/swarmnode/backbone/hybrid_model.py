"""Tiny random models of architectures with recurrent layers and routed experts, made from metadata alone.

llama.cpp makes the tensors that an architecture has by its metadata, they are filled with noise, and it saves what it
has made. The figures are those of its own tests (tests/test-llama-archs.cpp), cut to what these architectures read.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from swarmnode.backbone.llama import _library
from swarmnode.compute import ggml

VOCAB = 300
# The running state can be taken back of these, and not of those.
TAKES_BACK = ("qwen35moe", "kimi-k3", "glm5-next", "qwen4exp", "deepseek4")
CANNOT = ("qwen3next", "kimi-linear")
_MLA = ("kimi-k3", "kimi-linear", "glm5-next")  # latent attention
_HYPER = ("qwen4exp", "glm5-next", "deepseek4")  # hyper-connections


class _Init(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def write_hybrid_model(path: Path, arch: str) -> Path:
    """A GGUF of a few MB (deepseek4: 80); raises AssertionError where llama.cpp makes no model of it."""
    lib: Any = _library()  # which keeps llama.cpp's log
    base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    base.gguf_init_from_file.restype = base.ggml_nbytes.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _Init]
    base.gguf_free.argtypes = base.ggml_nbytes.argtypes = [ctypes.c_void_p]
    about = path.with_suffix(".metadata")
    _write_metadata(about, arch)
    metadata = base.gguf_init_from_file(str(about).encode(), _Init(True, None))
    assert metadata

    def fill(tensor: int, _user_data: int | None) -> None:
        struct = ggml.TensorStruct.from_address(tensor)
        rng = np.random.default_rng(zlib.crc32(struct.name))
        values = (rng.standard_normal(math.prod(struct.ne)) * 0.1).astype(np.float32)
        if b"ssm_a" in struct.name:  # a decay
            values = -np.abs(values)
        if struct.name.endswith(b"norm.weight"):
            values += 1
        data = values if base.ggml_nbytes(tensor) == values.nbytes else values.astype(np.float16)
        ggml.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(fill)
    params = lib.llama_model_default_params()
    make, save = lib._lib.llama_model_init_from_user, lib._lib.llama_model_save_to_file
    make.restype, save.restype = ctypes.c_void_p, None
    make.argtypes = [ctypes.c_void_p, type(callback), ctypes.c_void_p, type(params)]
    save.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    model = make(metadata, callback, None, params)
    base.gguf_free(metadata)
    assert model, f"llama.cpp makes no {arch}"
    save(model, str(path).encode())
    lib.llama_model_free(ctypes.c_void_p(model))
    about.unlink()
    return path


def _write_metadata(path: Path, arch: str) -> None:
    layers, d, heads, ff = 2, 256, 2, 384
    if arch == "deepseek4":
        layers, d, heads, ff = 4, 512, 8, 1024
    elif arch in _MLA:
        d, heads, ff = 128, 1, 192
    per_layer = [heads, *[0] * (layers - 1)]  # the second is recurrent
    head = d // heads
    kv: dict[str, Any] = {
        "vocab_size": VOCAB,
        "context_length": 256,
        "embedding_length": d,
        "block_count": layers,
        "leading_dense_block_count": 1,
        "feed_forward_length": ff,
        "full_attention_interval": 2,
        "attention.head_count": per_layer if arch in _MLA and arch != "glm5-next" else heads,
        "attention.head_count_kv": per_layer if arch in _MLA else 1 if arch == "deepseek4" else heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": 64 if arch == "deepseek4" else 512,
        "attention.kv_lora_rank": 512,
        "attention.sliding_window": 32,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": head if arch == "qwen4exp" else 128,
        "attention.indexer.top_k": 131072,
        "attention.indexer.block_size": 4,
        "rope.dimension_sections": [head // 4] * 4,
        "expert_count": 2,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": ff,
        "expert_shared_feed_forward_length": ff // 2,
        "expert_latent_length": ff,
        "expert_gating_func": 4 if arch == "deepseek4" else 2,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 256,
        "ssm.state_size": 128,
        "ssm.time_step_rank": heads,
        "ssm.group_count": 2,
        "kda.head_dim": 128,
        "kda.gate_lower_bound": -5.0,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    }
    if arch in _MLA:
        nope = arch == "glm5-next"
        kv |= {
            "attention.key_length": 512 if nope else 576,
            "attention.value_length": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 0 if nope else 64,
        }
    if arch in _HYPER:
        kv |= {
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hyper_connection.low_rank": 8,
            "attention.compress_ratios": [0, 0, 4, 128] if arch == "deepseek4" else [4] * layers,
        }
    if arch == "deepseek4":
        kv |= {
            "attention.key_length": head,
            "attention.value_length": head,
            "rope.dimension_count": head // 2,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 32,
            "attention.compress_rope_freq_base": 160_000.0,
            "hash_layer_count": 0,
            "swiglu_clamp_exp": 10.0,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
        }
    elif arch in _HYPER:
        kv |= {
            "attention.indexer.kpool": 4,
            "attention.indexer.kpool_select_tail": True,
            "attention.indexer.local_blocks": 1,
            "ple.layers": [0],
            "ple.ngram_size": 3,
            "ple.heads_per_ngram": 2,
            "ple.conv_kernel": 4,
            "ple.eos_token_id": 0,
            "embedding_length_per_layer_input": d // 4,
            "ple.layer_multipliers": np.array([1, 3, 5], np.uint64),
            "ple.head_offsets": np.arange(4, dtype=np.uint64) * VOCAB,
            "ple.head_vocab_sizes": np.full(4, VOCAB, np.uint64),
        }
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in kv.items():
        name = f"{arch}.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case float():
                writer.add_float32(name, value)
            case int():
                writer.add_uint32(name, value)
            case _:
                kind = gguf.GGUFValueType.UINT32 if isinstance(value, list) else gguf.GGUFValueType.UINT64
                writer.add_key_value(name, list(map(int, value)), gguf.GGUFValueType.ARRAY, sub_type=kind)
    words = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    more = VOCAB - len(words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words + [f"t{n}".encode() for n in range(more)])
    writer.add_token_types(kinds + [1] * more)
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
