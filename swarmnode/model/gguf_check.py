"""Does a model's metadata agree with its own tensor directory? Asked before anything is written and before llama.cpp
sees the file: it ends the process over some figures that cannot be.

Only what holds of every architecture is asked, by the keys that all of them have (`ARCHITECTURE.block_count` and so
on); what belongs to one architecture is llama.cpp's to refuse. No tensor is read. Caller: onboarding.
Invariant: a model that llama.cpp runs, and that gives numbers, passes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from swarmnode.compute.ggml_enums import MATMUL_TYPES
from swarmnode.compute.ggml_types import BLOCK_TYPES
from swarmnode.errors import BrokenModel
from swarmnode.model.gguf_file import EXPERT_TENSOR, GgufFile, GgufTensor
from swarmnode.model.gguf_metadata import FLOATS, INTEGERS, Metadata, ValueType

MAX_BLOCKS = 1 << 16
MANY_BLOCKS = 512  # llama.cpp ends the process over more; fewer that are missing it names itself
MAX_EXPERTS = 1 << 16
MAX_WIDTH = 1 << 24  # of anything in a graph; the widest vocabulary of today is 0.26 million

_BLOCK = re.compile(r"^blk\.([0-9]{1,9})\.")
# Elsewhere infinity may mean "no such limit".
_NEVER_INFINITE = re.compile(r"(epsilon|freq_base|scale|factor)$")
# Vocabularies that are not in the file.
_NO_VOCABULARY = ("none", "no_vocab")
_SHOWN = 80


def check_model(gguf: GgufFile) -> None:
    """Refuse a model whose figures contradict its tensors, or whose experts nothing here can compute.

    Raises BrokenModel (one line that names key or tensor and both values), NotGguf, DenseModel.
    """
    figures = _Figures(str(gguf.paths[0]), gguf.architecture, gguf.metadata)
    experts = gguf.expert_tensors()
    _check_floats(figures)
    _check_blocks(figures, gguf.tensors)
    _check_experts(figures, experts)
    _check_vocabulary(figures, gguf.tensors)
    _check_places(gguf)


@dataclass(frozen=True, slots=True)
class _Figures:
    """A model's metadata, with the errors about it."""

    path: str
    architecture: str
    metadata: Metadata

    def key(self, name: str) -> str:
        """The full key."""
        return f"{self.architecture}.{name}"

    def refuse(self, message: str) -> NoReturn:
        """Raise."""
        _refuse(self.path, message)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """One figure, or one per block. Refuses what is there and no integer or list of integers."""
        key = self.key(name)
        if key not in self.metadata:
            return None
        values = self.metadata.integers(key)
        if values is None:
            self.refuse(f"{key} is {_what(self.metadata, key)}, must be an integer")
        return values

    def within(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """The figures under `name`, which must be there, each of `low` to `high`."""
        values = self.integers(name)
        if values is None:
            self.refuse(f"the metadata key {self.key(name)} is missing")
        for value in values:
            if not low <= value <= high:
                self.refuse(f"{self.key(name)} is {value}, must be {low} to {high}")
        return values


def _refuse(path: str, message: str) -> NoReturn:
    raise BrokenModel(f"{path}: {message}")


def _what(metadata: Metadata, key: str) -> str:
    kind, item = metadata.value_type(key), metadata.item_type(key)
    return f"{metadata.array_length(key)} values of {item.name}" if kind == ValueType.ARRAY else kind.name


def _check_floats(figures: _Figures) -> None:
    """No figure of the architecture is NaN, nor infinite where everything is multiplied with it."""
    for key in figures.metadata:
        if not key.startswith((figures.architecture + ".", "tokenizer.ggml.scores")):
            continue
        values = figures.metadata.floats(key)
        if values is None:
            continue
        if np.isnan(values).any():
            figures.refuse(f"{key[:_SHOWN]} is not a number (NaN); fetch the file again")
        if key.endswith("epsilon") and (values < 0).any():
            figures.refuse(f"{key[:_SHOWN]} is {values.min():g}; it cannot be negative")
        if _NEVER_INFINITE.search(key) and np.isinf(values).any():
            figures.refuse(f"{key[:_SHOWN]} is infinite; fetch the file again")


def _check_blocks(figures: _Figures, tensors: Mapping[str, GgufTensor]) -> None:
    [n_blocks, *more] = figures.within("block_count", 1, MAX_BLOCKS)
    if more:
        figures.refuse(f"{figures.key('block_count')} is {_what(figures.metadata, figures.key('block_count'))}")
    last = -1
    for name in tensors:
        found = _BLOCK.match(name)
        if found is not None and int(found[1]) >= n_blocks:
            figures.refuse(f"holds {name}, but {figures.key('block_count')} is {n_blocks} (0 to {n_blocks - 1})")
        last = max(last, int(found[1]) if found is not None else -1)
    if n_blocks > max(MANY_BLOCKS, last + 1):
        figures.refuse(f"{figures.key('block_count')} is {n_blocks}, the last block there is is blk.{last}")
    nextn = figures.integers("nextn_predict_layers")
    if nextn is not None and not 0 <= max(nextn) <= n_blocks:
        figures.refuse(f"{figures.key('nextn_predict_layers')} is {max(nextn)} of {n_blocks} blocks")
    widths = figures.within("embedding_length", 1, MAX_WIDTH)
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and embedding.ne[0] not in widths:
        shape, key = list(embedding.ne), figures.key("embedding_length")
        figures.refuse(f"token_embd.weight has shape {shape}, but {key} is {widths[0]}")


def _check_experts(figures: _Figures, experts: Mapping[str, GgufTensor]) -> None:
    counts = figures.within("expert_count", 1, MAX_EXPERTS)
    stacks: dict[tuple[str, str | None], dict[str, GgufTensor]] = defaultdict(dict)
    for name, tensor in experts.items():
        found = EXPERT_TENSOR.match(name)
        if found is None:
            continue
        layer, part, chunked, kind = found.groups()
        stacks[layer, chunked][f"{part}.{kind}"] = tensor
        if kind == "weight":
            _check_weight(figures, tensor)
        if chunked is None and tensor.ne[-1] not in counts:
            figures.refuse(f"{name} stacks {tensor.ne[-1]} experts, but {figures.key('expert_count')} is {counts[0]}")
    _check_routing(figures, max(counts))
    for stack in stacks.values():
        _check_stack(figures, stack)


def _check_routing(figures: _Figures, n_expert: int) -> None:
    """How many experts a token may have, one figure or one per block, and of which groups."""
    key = figures.key("expert_used_count")
    used = figures.within("expert_used_count", 0, n_expert)
    if max(used) < 1:
        figures.refuse(f"{key} is 0: no expert is ever used")
    blocks = (figures.integers("block_count") or (0,))[0]
    if figures.metadata.value_type(key) == ValueType.ARRAY and len(used) != blocks:
        figures.refuse(f"{key} has {len(used)} values for {blocks} blocks")
    n_groups = max(figures.integers("expert_group_count") or (0,))
    n_used = max(figures.integers("expert_group_used_count") or (0,))
    if n_groups > 1 and n_expert % n_groups:
        figures.refuse(f"{figures.key('expert_group_count')} is {n_groups}, which does not divide {n_expert} experts")
    if n_groups > 1 and not 0 <= n_used <= n_groups:
        figures.refuse(f"{figures.key('expert_group_used_count')} is {n_used} of {n_groups} groups")


def _check_weight(figures: _Figures, tensor: GgufTensor) -> None:
    if len(tensor.ne) != 3:
        figures.refuse(f"{tensor.name} has shape {list(tensor.ne)}; a stack of experts has three dimensions")
    if tensor.ggml_type not in MATMUL_TYPES:
        known = BLOCK_TYPES[tensor.ggml_type].name
        figures.refuse(f"{tensor.name} has type {known}, with which no expert is computed; take another quantisation")


def _check_stack(figures: _Figures, stack: Mapping[str, GgufTensor]) -> None:
    """The tensors of one layer's experts fit each other."""
    first = next(iter(stack.values()))
    for tensor in stack.values():
        if tensor.ne[-1] != first.ne[-1]:
            figures.refuse(f"{first.name} stacks {first.ne[-1]} experts, {tensor.name} stacks {tensor.ne[-1]}")
    gate, up, down = (stack.get(f"{part}.weight") for part in ("gate", "up", "down"))
    merged = stack.get("gate_up.weight")
    _same(figures, gate, up, lambda a, b: a.ne == b.ne)
    # What comes out of one goes into the other; gate and up may lie in one tensor, under either name.
    _same(figures, up, down, lambda a, b: a.ne[1] == b.ne[0] or (gate is None and a.ne[1] == 2 * b.ne[0]))
    _same(figures, merged, down, lambda a, b: a.ne[1] == 2 * b.ne[0])
    for part in ("gate", "up", "down", "gate_up"):
        _same(figures, stack.get(f"{part}.bias"), stack.get(f"{part}.weight"), lambda a, b: a.ne[0] == b.ne[1])


def _same(
    figures: _Figures, a: GgufTensor | None, b: GgufTensor | None, fits: Callable[[GgufTensor, GgufTensor], bool]
) -> None:
    if a is not None and b is not None and not fits(a, b):
        figures.refuse(f"{a.name} has shape {list(a.ne)}, which does not fit {b.name} with {list(b.ne)}")


def _check_vocabulary(figures: _Figures, tensors: Mapping[str, GgufTensor]) -> None:
    metadata = figures.metadata
    key = "tokenizer.ggml.tokens"
    if key not in metadata or metadata.text("tokenizer.ggml.model") in _NO_VOCABULARY:
        return
    n_tokens = _array(figures, key, {ValueType.STRING})
    if not n_tokens:
        figures.refuse(f"{key} is empty")
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and (len(embedding.ne) != 2 or embedding.ne[1] != n_tokens):
        figures.refuse(f"the vocabulary has {n_tokens} tokens, token_embd.weight has shape {list(embedding.ne)}")
    _check_different(figures, key)
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if key in metadata and (n := _array(figures, key, INTEGERS | FLOATS.keys())) < n_tokens:
            figures.refuse(f"the vocabulary has {n_tokens} tokens, {key} {n} values")
    if "tokenizer.ggml.merges" in metadata:
        _array(figures, "tokenizer.ggml.merges", {ValueType.STRING})


def _check_different(figures: _Figures, key: str) -> None:
    """No two tokens are the same text: llama.cpp, which gives empty ones a name, ends the process."""
    texts = figures.metadata.byte_strings(key)
    if any(0 in text for text in texts):  # where C's strings end
        texts = [text.partition(b"\0")[0] for text in texts]
    if len(set(texts)) >= len(texts) - max(0, texts.count(b"") - 1):
        return
    first: dict[bytes, int] = {}
    for position, text in enumerate(texts):
        if text and first.setdefault(text, position) != position:
            same = repr(text.decode("utf-8", "replace"))[:_SHOWN]
            figures.refuse(f"tokens {first[text]} and {position} of the vocabulary are the same: {same}")


def _array(figures: _Figures, key: str, items: Collection[int]) -> int:
    """The length of an array of such items; anything else is refused."""
    length = figures.metadata.array_length(key)
    if length is None or figures.metadata.item_type(key) not in items:
        figures.refuse(f"{key} is {_what(figures.metadata, key)}, not a list as a vocabulary has it")
    return length


def _check_places(gguf: GgufFile) -> None:
    """No two tensors share bytes: the directory of a damaged or forged file may say so."""
    ends = [0] * len(gguf.paths)
    last = [""] * len(gguf.paths)
    for tensor in sorted(gguf.tensors.values(), key=lambda tensor: (tensor.file, tensor.offset)):
        if tensor.offset < ends[tensor.file]:
            path = gguf.paths[tensor.file]
            _refuse(str(path), f"the data of {last[tensor.file]} and {tensor.name} overlap; fetch the file again")
        ends[tensor.file], last[tensor.file] = tensor.offset + tensor.n_bytes, tensor.name
