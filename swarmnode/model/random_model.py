"""Random-weight Mixture-of-Experts models as GGUF files (architecture qwen2moe), for tests and benchmarks.

Quantised weights are made as blocks directly: random bytes with the scales set so that the weights' size is
that of a trained layer and activations stay finite; nothing is quantised, and memory stays at a few MB
whatever the model's size. A real layer shape, for example 256 experts of 3072 × 1024 in Q4_K, takes a few
seconds.

Not a model anyone should talk to. Callers: tests, `swarmnode bench`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from swarmnode.compute.ggml_types import TYPE_BY_NAME, tensor_bytes
from swarmnode.model.atomic_file import atomic_writer
from swarmnode.model.gguf_encode import TensorInfo, encode_array, encode_header, encode_pair, padded
from swarmnode.model.gguf_metadata import ValueType
from swarmnode.model.random_blocks import random_blocks

_U32, _F32, _TEXT = ValueType.UINT32, ValueType.FLOAT32, ValueType.STRING
_ALIGNMENT = 32
_PIECE_VALUES = 1 << 20  # weights made at once


@dataclass(frozen=True, slots=True)
class RandomModel:
    """The shape of a model. Types are ggml type names, for example "Q4_K".

    `head_size` must divide `d_model`. The vocabulary is byte tokens and invented words, at least 259 of them.
    """

    d_model: int = 256
    n_layers: int = 2
    n_ff_expert: int = 256
    n_expert: int = 8
    n_used: int = 2
    vocab: int = 512
    expert_types: Mapping[str, str] = field(default_factory=lambda: {"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"})
    dense_type: str = "F32"
    n_ff_shared: int = 256
    head_size: int = 64
    context: int = 512
    chat_template: str = ""
    seed: int = 0

    def tensors(self) -> list[TensorInfo]:
        """The tensor directory, in the order written."""
        d, dense = self.d_model, TYPE_BY_NAME[self.dense_type].id

        def one(name: str, *ne: int, ggml_type: int = 0) -> TensorInfo:
            return TensorInfo(name, ggml_type, ne)

        infos = [
            one("token_embd.weight", d, self.vocab, ggml_type=dense),
            one("output_norm.weight", d),
            one("output.weight", d, self.vocab, ggml_type=dense),
        ]
        for layer in range(self.n_layers):
            blk = f"blk.{layer}"
            infos += [one(f"{blk}.attn_norm.weight", d), one(f"{blk}.ffn_norm.weight", d)]
            for name in "qkv":
                infos += [
                    one(f"{blk}.attn_{name}.weight", d, d, ggml_type=dense),
                    one(f"{blk}.attn_{name}.bias", d),
                ]
            infos.append(one(f"{blk}.attn_output.weight", d, d, ggml_type=dense))
            infos.append(one(f"{blk}.ffn_gate_inp.weight", d, self.n_expert))
            for name, rows in (("gate", "in"), ("up", "in"), ("down", "out")):
                wide, high = (d, self.n_ff_expert) if rows == "in" else (self.n_ff_expert, d)
                kind = TYPE_BY_NAME[self.expert_types[name]].id
                infos.append(one(f"{blk}.ffn_{name}_exps.weight", wide, high, self.n_expert, ggml_type=kind))
            shared = self.n_ff_shared
            infos += [
                one(f"{blk}.ffn_gate_inp_shexp.weight", d),
                one(f"{blk}.ffn_gate_shexp.weight", d, shared, ggml_type=dense),
                one(f"{blk}.ffn_up_shexp.weight", d, shared, ggml_type=dense),
                one(f"{blk}.ffn_down_shexp.weight", shared, d, ggml_type=dense),
            ]
        return infos

    def pairs(self) -> list[bytes]:
        """The metadata, encoded."""
        heads = self.d_model // self.head_size
        words = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
        kinds = [2, 3, 3] + [6] * 256  # unknown, control, byte
        more = self.vocab - len(words)
        words += [f"t{n}".encode() for n in range(more)]
        numbers = {
            "context_length": self.context,
            "embedding_length": self.d_model,
            "block_count": self.n_layers,
            "feed_forward_length": self.n_ff_expert,
            "attention.head_count": heads,
            "attention.head_count_kv": heads,
            "expert_count": self.n_expert,
            "expert_used_count": self.n_used,
            "expert_feed_forward_length": self.n_ff_expert,
            "expert_shared_feed_forward_length": self.n_ff_shared,
            "vocab_size": self.vocab,
        }
        return [
            encode_pair("general.architecture", _TEXT, "qwen2moe"),
            encode_pair("general.name", _TEXT, f"random-{self.n_layers}x{self.n_expert}-{self.seed}"),
            *(encode_pair(f"qwen2moe.{key}", _U32, value) for key, value in numbers.items()),
            encode_pair("qwen2moe.attention.layer_norm_rms_epsilon", _F32, 1e-6),
            encode_pair("qwen2moe.rope.freq_base", _F32, 10_000.0),
            encode_pair("tokenizer.ggml.model", _TEXT, "llama"),
            encode_array("tokenizer.ggml.tokens", _TEXT, words),
            encode_array("tokenizer.ggml.scores", _F32, [0.0] * self.vocab),
            encode_array("tokenizer.ggml.token_type", ValueType.INT32, kinds + [1] * more),
            encode_pair("tokenizer.ggml.bos_token_id", _U32, 1),
            encode_pair("tokenizer.ggml.eos_token_id", _U32, 2),
            *([encode_pair("tokenizer.chat_template", _TEXT, self.chat_template)] if self.chat_template else []),
        ]


def write_random_model(model: RandomModel, path: Path, *, parts: int = 1) -> list[Path]:
    """Write `model` to `path`, or split in `parts` to STEM-00001-of-00003.gguf and so on beside it.

    Returns the files. The tensors' bytes depend on `model` alone: split or single, on any system, they are
    the same. Raises ModelError where a file cannot be written, ValueError for a shape that is no model.
    """
    if model.vocab < 259 or model.d_model % model.head_size or not 0 < model.n_used <= model.n_expert:
        raise ValueError(f"no model has vocab {model.vocab}, d {model.d_model}, top-{model.n_used}")
    tensors = model.tensors()
    if parts == 1:
        _write(path, model, model.pairs(), tensors)
        return [path]
    share = -(-len(tensors) // parts)
    paths = [path.with_name(f"{path.stem}-{n + 1:05d}-of-{parts:05d}.gguf") for n in range(parts)]
    for n, part in enumerate(paths):
        split = [
            encode_pair("split.no", ValueType.UINT16, n),
            encode_pair("split.count", ValueType.UINT16, parts),
            encode_pair("split.tensors.count", ValueType.INT32, len(tensors)),
        ]
        pairs = model.pairs() + split if n == 0 else split
        _write(part, model, pairs, tensors[n * share : (n + 1) * share])
    return paths


def _write(path: Path, model: RandomModel, pairs: Sequence[bytes], tensors: Sequence[TensorInfo]) -> None:
    with atomic_writer(path) as file:
        file.write(encode_header(pairs, tensors, _ALIGNMENT))
        for tensor in tensors:
            for piece in _tensor_data(model, tensor):
                file.write(piece)
            file.write(bytes(padded(tensor.n_bytes, _ALIGNMENT) - tensor.n_bytes))


def _tensor_data(model: RandomModel, tensor: TensorInfo) -> Iterator[bytes]:
    """A tensor's bytes, in pieces of whole rows; seeded by the model's seed and the tensor's name."""
    rng = np.random.default_rng([model.seed, *tensor.name.encode()])
    if tensor.name.endswith("_norm.weight"):
        yield np.ones(math.prod(tensor.ne), dtype="<f4").tobytes()
        return
    # Rows of a unit vector's size keep activations of the same size from layer to layer.
    size = 1.0 if tensor.name == "token_embd.weight" else 1.0 / math.sqrt(tensor.ne[0])
    rows = math.prod(tensor.ne[1:])
    step = max(1, _PIECE_VALUES // tensor.ne[0])
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield random_blocks(tensor.ggml_type, tensor_bytes(tensor.ggml_type, (tensor.ne[0], count)), size, rng)
