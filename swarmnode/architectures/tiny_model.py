"""A tiny random model of any architecture with routed experts, written as an ordinary GGUF of at most a few MB.

Metadata (`metadata.py`) → the tensors that llama.cpp makes of it (`discovery.py`) → those of them that are wanted → a
file that llama.cpp loads like any other. What it wants beside is told by its own errors: a file without data is loaded
until nothing is missing. Called by the gate (`check.py`), by tests, and for layers of real shapes.

Not a model anyone should talk to.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from swarmnode.architectures.discovery import Tensors, discover_tensors
from swarmnode.architectures.metadata import VOCAB, Shape, Value, least_layers, metadata
from swarmnode.architectures.refusal import refused
from swarmnode.architectures.variants import BASE, TYPES, VARIANTS, WIDE_TYPES, Variant
from swarmnode.architectures.weights import tensor_data, type_of
from swarmnode.backbone.llama import LlamaModel
from swarmnode.compute.ggml_types import TYPE_BY_NAME
from swarmnode.errors import ModelError, UsageError
from swarmnode.model.atomic_file import atomic_writer
from swarmnode.model.gguf_encode import TensorInfo, encode_array, encode_header, encode_pair, padded
from swarmnode.model.gguf_metadata import ValueType

# Every architecture whose graph calls llama.cpp's MoE function (the files of src/models that do), in the llama.cpp of
# this release of llama-cpp-python. The library itself cannot be asked; a test fails when another one is installed.
LISTED_FROM = "0.3.36"
_NAMES = """
    afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 deepseek2-ocr deepseek32
    deepseek4 dflash dots1 dots3note ernie4_5-moe exaone-moe gemma4 glm-dsa glm4moe glm5-next gpt-oss granite
    granite_swa granitehybrid granitemoe grok grovemoe hunyuan-moe hy_v3 hy_v4 jamba kimi-k3 kimi-linear laguna lfm2moe
    llada-moe llama llama-embed llama4 maple mellum mimo2 minicpm minimax-01 minimax-m2 minimax-m3 mistral3 mistral4
    nemotron_h_moe nomic-bert-moe olmoe phimoe qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe qwen4exp rnd1
    smallthinker step35
"""
ARCHITECTURES: tuple[str, ...] = tuple(_NAMES.split())

_ALIGNMENT = 32
_MOST_MISSING = 64  # tensors that a model may turn out to need
_LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")
_MISSING = re.compile(r"tensor '([^']+)'")
# Optional: factors and biases of any kind (less the router's and recurrent layers'), and what only a draft model has.
_OPTIONAL = re.compile(r"(?<!exp_probs_b)(?<!ssm_conv1d)\.(bias|scale|input_scale)$|rope_(freqs|factors)|\.nextn\.")
_DENSE = re.compile(r"^ffn_(gate|up|down)\.weight$")
_ROUTED = re.compile(r"^ffn_(gate_up|gate|up|down)_(ch)?exps\.weight$|_shexp\.weight$|^ffn_gate_inp|exp_probs_b")
_GATE_UP = "ffn_gate_up_exps.weight"


def write_tiny_model(path: Path, arch: str, variant: str = BASE, ggml_type: str = "F32") -> Path:
    """Write a tiny model whose expert weights have this type. The same arguments give the same bytes.

    Raises UsageError for a variant or type there is not, LlamaRefused, with llama.cpp's own line, where it cannot be
    built, ModelError and OSError where the file cannot be written.
    """
    if variant not in VARIANTS or ggml_type not in TYPES:
        raise UsageError(f"no variant {variant} or type {ggml_type}; there are {', '.join([*VARIANTS, *TYPES])}")
    what = f"{arch} ({variant}, {ggml_type})"
    kind = VARIANTS[variant]
    shape = kind.apply(shape_of(arch, wide=ggml_type in WIDE_TYPES))
    pairs = _pairs(arch, metadata(arch, shape))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tiny-", dir=path.parent) as folder:
        probe = Path(folder) / "probe.gguf"
        probe.write_bytes(encode_header(pairs, [], _ALIGNMENT))
        found = discover_tensors(probe, what)
        wanted = _complete(probe, what, pairs, found, _wanted(found, kind, shape))
    expert_type = TYPE_BY_NAME[ggml_type].id
    tensors = [TensorInfo(name, type_of(name, expert_type), ne) for name, ne in wanted.items()]
    with atomic_writer(path) as file:
        file.write(encode_header(pairs, tensors, _ALIGNMENT))
        for tensor in tensors:
            data = tensor_data(tensor, shape.experts)
            file.write(data.ljust(padded(len(data), _ALIGNMENT), b"\0"))
    return path


def shape_of(arch: str, *, wide: bool) -> Shape:
    """The shape of an architecture's base model; `wide` where every expert's rows are multiples of 256."""
    shape = Shape(d=256, heads=4, ff=256, ff_expert=256, latent=256) if wide else Shape()
    return replace(shape, layers=least_layers(arch))


def _wanted(found: Tensors, variant: Variant, shape: Shape) -> Tensors:
    """Of all the tensors there may be, those that the variant has."""
    experts = {m[1] for m in map(_LAYER.match, found) if m is not None and m[2].endswith("exps.weight")}
    wanted: Tensors = {}
    for name, ne in found.items():
        match = _LAYER.match(name)
        layer, part = (int(match[1]), match[2]) if match is not None else (-1, name)
        if match is not None and match[1] in experts:
            if _ROUTED.search(part) and layer < shape.leading_dense:
                continue
            if _DENSE.match(part) and layer >= shape.leading_dense:
                continue
        if part.startswith("ffn_gate_exps.") and not variant.gated:
            continue
        if part.endswith("_exps.scale"):
            if variant.scales:
                wanted[name] = ne
        elif part == _GATE_UP and not variant.merged:
            d, width, experts_of = ne
            for half in ("gate", "up") if variant.gated else ("up",):
                wanted[f"blk.{layer}.ffn_{half}_exps.weight"] = (d, width // 2, experts_of)
        elif not _OPTIONAL.search(name):
            wanted[name] = ne
    return _merged(wanted) if variant.merged else wanted


def _merged(wanted: Tensors) -> Tensors:
    """Gate and up as one tensor, in every layer that has both."""
    out = dict(wanted)
    for name in wanted:
        up = name.replace("ffn_gate_exps", "ffn_up_exps")
        if "ffn_gate_exps." not in name or name.endswith(".scale") or up not in wanted:
            continue
        one, other = out.pop(name), out.pop(up)
        axis = 1 if name.endswith(".weight") else 0
        ne = list(one)
        ne[axis] += other[axis]
        out[name.replace("ffn_gate_exps", "ffn_gate_up_exps")] = tuple(ne)
    return out


def _complete(probe: Path, what: str, pairs: list[bytes], found: Tensors, wanted: Tensors) -> Tensors:
    """Add what llama.cpp misses, kind by kind, until it loads the file."""
    why = ""
    for _ in range(_MOST_MISSING):
        tensors = [TensorInfo(name, type_of(name, TYPE_BY_NAME["F32"].id), ne) for name, ne in wanted.items()]
        header = encode_header(pairs, tensors, _ALIGNMENT)
        probe.write_bytes(header)
        os.truncate(probe, len(header) + sum(padded(tensor.n_bytes, _ALIGNMENT) for tensor in tensors))
        try:
            LlamaModel(probe, remote_experts=False).close()
        except ModelError as error:
            why = str(error).partition("cannot load it: ")[2]
            missing = _MISSING.search(why)
            if missing is None or missing[1] not in found:
                break
            wanted[missing[1]] = found[missing[1]]
        else:
            return wanted
    raise refused(f"{what}: llama.cpp cannot load it: {why}")


def _pairs(arch: str, values: dict[str, Value]) -> list[bytes]:
    pairs = [
        encode_pair("general.architecture", ValueType.STRING, arch),
        encode_pair("general.name", ValueType.STRING, f"tiny-{arch}"),
    ]
    pairs += [_pair(f"{arch}.{key}", value) for key, value in values.items()]
    words = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256  # unknown, control, byte
    more = VOCAB - len(words)
    return [
        *pairs,
        encode_pair("tokenizer.ggml.model", ValueType.STRING, "llama"),
        encode_array("tokenizer.ggml.tokens", ValueType.STRING, words + [f"t{n}".encode() for n in range(more)]),
        encode_array("tokenizer.ggml.scores", ValueType.FLOAT32, [0.0] * VOCAB),
        encode_array("tokenizer.ggml.token_type", ValueType.INT32, kinds + [1] * more),
        encode_pair("tokenizer.ggml.token_type_count", ValueType.UINT32, 1),
        encode_pair("tokenizer.ggml.bos_token_id", ValueType.UINT32, 1),
        encode_pair("tokenizer.ggml.eos_token_id", ValueType.UINT32, 2),
    ]


def _pair(name: str, value: Value) -> bytes:
    match value:
        case bool():
            return encode_pair(name, ValueType.BOOL, value)
        case float():
            return encode_pair(name, ValueType.FLOAT32, value)
        case int():
            return encode_pair(name, ValueType.UINT32, value)
        case str():
            return encode_pair(name, ValueType.STRING, value)
        case tuple():
            return encode_array(name, ValueType.UINT64, [int(one) for one in value])
    kind = ValueType.FLOAT32 if isinstance(value[0], float) else ValueType.UINT32
    return encode_array(name, kind, value)
