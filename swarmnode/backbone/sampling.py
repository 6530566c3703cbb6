"""Sampling parameters and the chain of llama.cpp's own samplers they stand for. Called by `session.py`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from swarmnode.errors import UsageError

_MAX_BIASES = 4096


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the next token is chosen. `temperature` 0 is greedy and ignores the filters below it.

    `top_k` 0, `top_p` 1, `min_p` 0 and penalties of 1 (repeat) or 0 (frequency, presence) switch a filter off.
    `logit_bias` maps token ids to a number added to their logit; -100 or less bans a token for all that matters.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}

    def check(self, n_vocab: int) -> None:
        """Raise UsageError for the first value that cannot be meant."""
        ranges = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 1 << 20),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repeat_penalty", self.repeat_penalty, 0.01, 100.0),
            ("repeat_last_n", self.repeat_last_n, 0, 1 << 20),
            ("frequency_penalty", self.frequency_penalty, -100.0, 100.0),
            ("presence_penalty", self.presence_penalty, -100.0, 100.0),
            ("seed", self.seed, 0, 0xFFFFFFFE),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise UsageError(f"{name} {value} is out of range: give a number from {low} to {high}")
        if len(self.logit_bias) > _MAX_BIASES:
            raise UsageError(f"logit_bias has {len(self.logit_bias)} entries; at most {_MAX_BIASES}")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < n_vocab or math.isnan(bias):
                raise UsageError(f"logit_bias {token}: {bias} is wrong: tokens are 0 to {n_vocab - 1}, biases numbers")


class SamplerChain:
    """llama.cpp's samplers for one generation. Free with `close`; not thread safe."""

    def __init__(self, params: Sampling, n_vocab: int, banned: Sequence[int] = ()) -> None:
        """UsageError for parameters that cannot be meant; `banned` tokens are never chosen."""
        params.check(n_vocab)
        from llama_cpp import llama_cpp as lib  # noqa: PLC0415  (heavy: only where a model is loaded)

        self._lib: Any = lib
        self._chain: Any = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        add = lib.llama_sampler_chain_add
        bias = {**params.logit_bias, **dict.fromkeys(banned, -math.inf)}
        if bias:
            biases = (lib.llama_logit_bias * len(bias))(*bias.items())
            add(self._chain, lib.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))
        if params.repeat_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
            penalties = lib.llama_sampler_init_penalties(
                n_vocab,
                params.repeat_last_n,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            add(self._chain, penalties)
        if params.temperature <= 0.0:
            add(self._chain, lib.llama_sampler_init_greedy())
            return
        if params.top_k:
            add(self._chain, lib.llama_sampler_init_top_k(params.top_k))
        if params.top_p < 1.0:
            add(self._chain, lib.llama_sampler_init_top_p(ctypes.c_float(params.top_p), 1))
        if params.min_p > 0.0:
            add(self._chain, lib.llama_sampler_init_min_p(ctypes.c_float(params.min_p), 1))
        add(self._chain, lib.llama_sampler_init_temp(ctypes.c_float(params.temperature)))
        add(self._chain, lib.llama_sampler_init_dist(params.seed))

    def sample(self, context: Any, row: int) -> int:
        """Choose a token from logits row `row` of the last decode and remember it for the penalties."""
        return int(self._lib.llama_sampler_sample(self._chain, context, row))

    def accept(self, token: int) -> None:
        """Tell the penalties about a token that was not sampled here (the prompt's)."""
        self._lib.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free the chain and its samplers."""
        if self._chain is not None:
            self._lib.llama_sampler_free(self._chain)
            self._chain = None
