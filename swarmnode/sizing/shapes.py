"""The mixture-of-experts models of the roadmap: what decides their memory and their bytes, without any of their files.

Pure data, from the models' published configurations (`config.json`: hidden_size, moe_intermediate_size, num_experts,
num_experts_per_tok, first_k_dense_replace, …) and from what llama.cpp makes of them. What could not be taken from one
is named in `assumed`. Parameters are worked out from the shapes; tests hold them to the published totals. Called by
`swarmnode plan`, the gate of real shapes, the page of models, `bench wire`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Final, Literal

from swarmnode.compute.ggml_types import TYPE_BY_NAME, tensor_bytes
from swarmnode.errors import UsageError
from swarmnode.sizing.needs import F16_BYTES, F32_BYTES, ModelNeeds

# Bits per weight of what is not routed experts, as GGUFs of these models have it. Q4_K_M: attention and shared experts
# mostly Q4_K (4.5) with some Q6_K (6.56), the output matrix Q6_K. gpt-oss's published GGUF keeps all of it at Q8_0.
DENSE_BITS: Final = {"Q4_K_M": 5.0, "Q8_0": 8.5}
DenseType = Literal["Q4_K_M", "Q8_0"]
# What llama.cpp's quantiser makes of the experts' ffn_down in a Q4_K_M file, in the layers of `uses_more_bits`.
FINER: Final = {"Q4_K": "Q6_K"}


def uses_more_bits(layer: int, n_layers: int) -> bool:
    """Whether a Q4_K_M file has this layer's ffn_down in a finer type: `use_more_bits` of llama.cpp's quantiser."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. `d` is the width of what experts are given and give back: hidden_size, or less where they are latent.

    d_ff: inner width of one expert. layers: those with experts. shared: inner width of what every token goes through
    beside them, 0 for none. weights "before": the router's weights multiply x, as in llama4.

    arch: its name in llama.cpp. published, active: parameters in all and per token, as published, billions. size_mb:
    one expert by the roadmap, MB, 0 where it says nothing. blocks: all layers. width: hidden_size. attention:
    parameters of one block's attention, mean. dense_ff: inner width of the blocks without experts. latent: parameters
    per MoE layer that lead into and out of the experts' width. kv: values in the cache per token of context, all
    layers. state: values of running states, all layers, per sequence. expert_type, dense_type: as usually quantised;
    Q4_K: as in a Q4_K_M file, where some layers have ffn_down finer. every: of the last blocks each n-th has experts.
    biases: experts have some. variant: of `architectures.variants`, which its experts are like. names: what else people
    call it.
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
    arch: str = ""
    published: float = 0.0
    active: float = 0.0
    size_mb: float = 0.0
    blocks: int = 0
    width: int = 0
    vocab: int = 0
    context: int = 0
    attention: int = 0
    dense_ff: int = 0
    latent: int = 0
    kv: int = 0
    state: int = 0
    expert_type: str = "Q4_K"
    dense_type: DenseType = "Q4_K_M"
    every: int = 1
    biases: bool = False
    variant: str = "base"
    names: tuple[str, ...] = ()

    def is_called(self, text: str) -> bool:
        """Whether this is the model's name, or one of those that people call it. Only letters and digits count."""
        return _plain(text) in self.plain_names

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The name and the other ones, letters and digits alone."""
        return tuple(_plain(name) for name in (self.name, *self.names))

    @property
    def expert_params(self) -> int:
        """Of one expert: gate, up, down."""
        return 3 * self.d * self.d_ff

    @property
    def expert_bytes(self) -> int:
        """Of one expert, all of it of `expert_type`."""
        return self._expert_bytes(self.expert_type)

    @property
    def finer_layers(self) -> int:
        """Of the layers with experts, those whose experts have a finer ffn_down."""
        with_experts = range(self.blocks - 1 - (self.layers - 1) * self.every, self.blocks, self.every)
        return sum(uses_more_bits(n, self.blocks) for n in with_experts) if self.expert_type in FINER else 0

    @property
    def experts_total_bytes(self) -> int:
        """Of all experts of all layers, as usually quantised."""
        finer = self.finer_layers
        layers = (self.layers - finer) * self.expert_bytes
        if finer:
            layers += finer * self._expert_bytes(FINER[self.expert_type])
        return layers * self.n_expert

    @property
    def quantised(self) -> str:
        """The kind of file that is meant: Q4_K_M or MXFP4."""
        return "Q4_K_M" if self.expert_type in FINER else self.expert_type

    @property
    def quantisation(self) -> str:
        """What is assumed of the types, for people."""
        dense = f"the rest {self.dense_type}"
        if self.expert_type not in FINER:
            return f"experts in {self.expert_type}, as they were trained, {dense}"
        finer = f"{FINER[self.expert_type]} for their ffn_down in {self.finer_layers} of {self.layers} layers"
        return f"a {self.quantised} file: experts in {self.expert_type}, with {finer}"

    def _expert_bytes(self, down: str) -> int:
        """With `down` the type of its ffn_down."""
        weights = 2 * tensor_bytes(TYPE_BY_NAME[self.expert_type].id, (self.d, self.d_ff))
        weights += tensor_bytes(TYPE_BY_NAME[down].id, (self.d_ff, self.d))
        return weights + (F32_BYTES * (2 * self.d_ff + self.d) if self.biases else 0)

    @property
    def router_params(self) -> int:
        """Of all layers; kept in F32."""
        return self.layers * self.n_expert * self.width

    @property
    def dense_params(self) -> int:
        """What the backbone has: attention, blocks without experts, shared experts, embeddings (in and out), router."""
        return (
            self.blocks * self.attention
            + (self.blocks - self.layers) * 3 * self.width * self.dense_ff
            + self.layers * (3 * self.width * self.shared + self.latent)
            + 2 * self.vocab * self.width
            + self.router_params
        )

    @property
    def params(self) -> int:
        """All parameters."""
        return self.dense_params + self.layers * self.n_expert * self.expert_params

    @property
    def active_params(self) -> int:
        """Those that one token touches; of the embeddings only the output."""
        return self.dense_params - self.vocab * self.width + self.layers * self.k * self.expert_params


def _gqa(width: int, heads: int, kv_heads: int, head: int, *, gate: bool = False) -> int:
    """Parameters of grouped-query attention: q, k, v and output; `gate`: as many again as q."""
    return width * head * (heads * (3 if gate else 2) + 2 * kv_heads)


def _mla(width: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, value: int) -> int:
    """Parameters of multi-head latent attention (DeepSeek-V3)."""
    queries = width * q_rank + q_rank * heads * (nope + rope)
    return queries + width * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * width


# Means over blocks of two kinds: a quarter attends to everything.
_STEP_ATTENTION = (12 * _gqa(4096, 64, 8, 128) + 33 * _gqa(4096, 96, 8, 128)) // 45
_QWEN35_ATTENTION = (12 * _gqa(3072, 32, 2, 256, gate=True) + 36 * (3072 * (12288 + 8192) + 8192 * 3072)) // 48
_K3_DELTA = 7168 * 12288 * 5 + 7168 * 128 + 128 * 12288
_K3_ATTENTION = (24 * (_mla(7168, 96, 1536, 512, 128, 64, 128) + 7168 * 12288) + 69 * _K3_DELTA) // 93

MODELS: tuple[ModelShape, ...] = (
    ModelShape(
        "Step-3.7-Flash", 4096, 1280, 288, 8, 42, 1280,
        assumed="widths as Step-3.5-Flash's",
        arch="step35", published=196, active=11, blocks=45, width=4096, vocab=128_896, context=262_144,
        attention=_STEP_ATTENTION, dense_ff=11_264, kv=45 * 2 * 8 * 128,
        variant="clamp",
        names=("Step-3.5-Flash", "Step-3"),
    ),
    ModelShape(
        "Qwen3.5-122B", 3072, 1024, 256, 8, 48, 1024,
        arch="qwen35moe", published=122, active=10, size_mb=5.3, blocks=48, width=3072, vocab=248_320, context=262_144,
        attention=_QWEN35_ATTENTION, kv=12 * 2 * 2 * 256, state=36 * (3 * (8192 + 2 * 16 * 128) + 128 * 8192),
        names=("Qwen3.5-122B-A10B",),
    ),
    ModelShape(
        "GLM-4.5/4.6", 5120, 1536, 160, 8, 89, 1536,
        arch="glm4moe", published=355, active=32, size_mb=13, blocks=92, width=5120, vocab=151_552, context=202_752,
        attention=_gqa(5120, 96, 8, 128), dense_ff=12_288, kv=92 * 2 * 8 * 128,
        names=("GLM-4.5", "GLM-4.6", "GLM-4.7"),
    ),
    ModelShape(
        "GLM-5.2", 6144, 2048, 256, 8, 75, 2048,
        arch="glm-dsa", published=744, active=40, blocks=78, width=6144, vocab=154_880, context=1_048_576,
        attention=_mla(6144, 64, 2048, 512, 192, 64, 256) + 21 * (2048 * 4096 + 6144 * 160) // 78, dense_ff=12_288,
        kv=78 * (512 + 64) + 78 * 128,
        names=("GLM-5", "GLM-5.1"),
    ),
    ModelShape(
        "MiniMax-M2", 3072, 1536, 256, 8, 62,
        arch="minimax-m2", published=230, active=10, size_mb=8, blocks=62, width=3072, vocab=200_064, context=196_608,
        attention=_gqa(3072, 48, 8, 128), kv=62 * 2 * 8 * 128,
        names=("MiniMax-M2.1", "MiniMax-M2.5", "MiniMax-M2.7"),
    ),
    ModelShape(
        "MiniMax-M3", 6144, 3072, 128, 4, 57, 3072,
        arch="minimax-m3", published=428, active=23, blocks=60, width=6144, vocab=200_064, context=1_048_576,
        attention=_gqa(6144, 64, 4, 128) + 57 * 6144 * 5 * 128 // 60, dense_ff=12_288,
        kv=60 * 2 * 4 * 128 + 57 * 128,
    ),
    ModelShape(
        "DeepSeek-V3/R1", 7168, 2048, 256, 8, 58, 2048,
        arch="deepseek2", published=671, active=37, size_mb=25, blocks=61, width=7168, vocab=129_280, context=163_840,
        attention=_mla(7168, 128, 1536, 512, 128, 64, 128), dense_ff=18_432, kv=61 * (512 + 64),
        names=("DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.1", "DeepSeek-V3.1-Terminus"),
    ),
    ModelShape(
        "Kimi-K3", 3584, 3072, 896, 16, 92, 6144,
        arch="kimi-k3", published=2800, active=104, blocks=93, width=7168, vocab=163_840, context=1_048_576,
        attention=_K3_ATTENTION, dense_ff=33_792, latent=2 * 7168 * 3584,
        kv=24 * (512 + 64), state=69 * (3 * 3 * 12_288 + 96 * 128 * 128), expert_type="MXFP4",
    ),
    ModelShape(
        "Qwen3-235B", 4096, 1536, 128, 8, 94,
        arch="qwen3moe", published=235, active=22, size_mb=11, blocks=94, width=4096, vocab=151_936, context=262_144,
        attention=_gqa(4096, 64, 4, 128), kv=94 * 2 * 4 * 128,
        names=("Qwen3-235B-A22B",),
    ),
    ModelShape(
        "gpt-oss-120b", 2880, 2880, 128, 4, 36,
        arch="gpt-oss", published=116.8, active=5.1, size_mb=14, blocks=36, width=2880, vocab=201_088, context=131_072,
        attention=_gqa(2880, 64, 8, 64), kv=36 * 2 * 8 * 64, expert_type="MXFP4", dense_type="Q8_0", biases=True,
    ),
    ModelShape(
        "Llama-4-Maverick", 5120, 8192, 128, 1, 24, 8192, "before",
        arch="llama4", published=400, active=17, size_mb=70, blocks=48, width=5120, vocab=202_048, context=1_048_576,
        attention=_gqa(5120, 40, 8, 128), dense_ff=16_384, kv=48 * 2 * 8 * 128,
        every=2,
        names=("Llama-4-Maverick-17B-128E",),
    ),
    ModelShape(
        "Mixtral-8x22B", 6144, 16384, 8, 2, 56,
        arch="llama", published=141, active=39, size_mb=170, blocks=56, width=6144, vocab=32_768, context=65_536,
        attention=_gqa(6144, 48, 8, 128), kv=56 * 2 * 8 * 128,
        names=("Mixtral-8x22B-Instruct",),
    ),
)  # fmt: skip


def needs_of_shape(shape: ModelShape) -> ModelNeeds:
    """The same figures that `needs_of` reads off a file, for a model without one."""
    router = shape.router_params
    return ModelNeeds(
        name=shape.name,
        architecture=shape.arch,
        n_layers=shape.blocks,
        n_sites=shape.layers,
        n_expert=shape.n_expert,
        n_used=shape.k,
        d_in=shape.d,
        d_out=shape.d,
        expert_bytes=shape.experts_total_bytes // (shape.layers * shape.n_expert),
        experts_total_bytes=shape.experts_total_bytes,
        dense_bytes=int((shape.dense_params - router) * DENSE_BITS[shape.dense_type] / 8) + router * F32_BYTES,
        shared_expert=shape.shared > 0,
        kv_bytes_per_token=shape.kv * F16_BYTES,
        context_length=shape.context,
        n_params=shape.params,
        state_bytes=shape.state * F32_BYTES,
        vocabulary=shape.vocab,
        quantised=shape.quantised,
        assumed="; ".join(filter(None, (shape.quantisation, shape.assumed))),
    )


# What may stand behind a model's name without making it another one, letters and digits alone: how it was quantised and
# packed, what it was tuned for, when it came out.
_SAME_MODEL: Final = re.compile(
    r"(?:ud|i1|imat(?:rix)?|i?q[1-8](?:xxs|xs|nl|k(?:xl|[sml])?|[01sm])?|tq[12]0|mxfp4(?:moe)?|nvfp4|b?f(?:p)?(?:8|16|32)|"
    r"int[48]|[348]bit|awq|gptq|mlx|gguf|hf|instruct|it|chat|base|thinking|reasoning|(?:0[1-9]|1[0-2]|2[4-9])[0-9]{2})+"
)
_WORDS: Final = re.compile(r"[0-9]+(?:\.[0-9]+)*|[a-z]+")  # "Qwen3.5-122B": qwen, 3.5, 122, b
_MOST_NAME: Final = 200


def find_shape(text: str) -> ModelShape:
    """The model that a name means: of the table, one of its other names, or its architecture in llama.cpp.

    Case, spaces and punctuation do not matter. Behind a name may stand how the model is quantised, packed and tuned
    ("GLM-4.6-UD-Q4_K_XL"); anything else there makes it another model ("gpt-oss-20b", "GLM-4.5-Air"). Whole words of a
    name are enough where one model alone has them ("maverick"). Whoever shows the result says which model was taken,
    see `ModelShape.is_called`.

    Raises UsageError naming the nearest, or those that it could mean.
    """
    wanted = _plain(text) if len(text) <= _MOST_NAME else ""
    listed = ", ".join(shape.name for shape in MODELS)
    if not wanted:
        raise UsageError(f"no model is called {text[:80]!r}; the table has {listed}")
    called = [shape for shape in MODELS if any(_continues(wanted, name) for name in shape.plain_names)]
    # "llama" is what llama.cpp calls Mixtral's architecture, and a part of another one's name.
    part = [
        shape
        for shape in MODELS
        if wanted == _plain(shape.arch) or (len(wanted) > 2 and any(wanted in name for name in shape.plain_names))
    ]
    for found in (called, part):
        if len(found) > 1:
            raise UsageError(f"{text[:80]!r} may mean {' or '.join(shape.name for shape in found)}: say which")
        if found and (found is called or wanted == _plain(found[0].arch) or _has_words(found[0], wanted)):
            return found[0]
    by_plain = {name: shape.name for shape in MODELS for name in (*shape.plain_names, _plain(shape.arch))}
    close = difflib.get_close_matches(wanted, by_plain, 4, 0.5)
    begun = [name for name in by_plain if len(name) > 4 and wanted.startswith(name)]
    near = list(dict.fromkeys(by_plain[name] for name in (*begun, *close)))
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {listed}."
    raise UsageError(f"{text[:80]!r} is no file and not in the table: {hint} A GGUF or its http(s) address will do too")


def _continues(wanted: str, name: str) -> bool:
    """Whether a text is a name, or one with what leaves it the same model."""
    return wanted == name or (wanted.startswith(name) and _SAME_MODEL.fullmatch(wanted, len(name)) is not None)


def _has_words(shape: ModelShape, wanted: str) -> bool:
    """Whether whole words of a name that stand side by side are the wanted text: "glm4" is none of "GLM-4.5"."""
    for name in (shape.name, *shape.names):
        words = [_plain(word) for word in _WORDS.findall(name.lower())]
        texts = ("".join(words[a:b]) for a in range(len(words)) for b in range(a + 1, len(words) + 1))
        if wanted in texts:
            return True
    return False


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
