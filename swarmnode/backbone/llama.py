"""A thin wrapper of llama.cpp's low-level bindings: a model, a context, a decode. No sampling policy, no network.

Used twice with the same code: for the backbone, whose expert tensors live in the null buffer, and for the plain local
run it is compared with. Repacked kernels are off in both, so that their bits can be compared with the workers'.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.backbone.null_buffer import NullBuffer
from swarmnode.compute import ggml
from swarmnode.errors import ComputeError, ModelError, UsageError

EvalCallback = Callable[[int, bool, "int | None"], bool]
ChatMessage = dict[str, str]

_LOAD_NONE, _LOAD_AUTO = 0, -1  # llama_load_mode
_PIECE_START = 64  # bytes; grows where a token is longer
_log_lines: list[str] = []
_log_callback: Any = None


def _library() -> Any:
    """The bindings, imported late (0.3 s) and initialised once, with llama.cpp's own log kept for error messages."""
    global _log_callback  # noqa: PLW0603  (llama.cpp has one process-wide log)
    from llama_cpp import llama_cpp as lib  # noqa: PLC0415

    if _log_callback is None:
        ggml.check_layout()

        def keep(level: int, text: bytes, _user_data: Any) -> None:
            if level >= 4:  # GGML_LOG_LEVEL_ERROR
                _log_lines.append(text.decode("utf-8", "replace").strip())
                del _log_lines[:-20]

        _log_callback = lib.llama_log_callback(keep)
        lib.llama_log_set(_log_callback, None)
        lib.llama_backend_init()
    return lib


def _last_error() -> str:
    """The first of llama.cpp's error lines since they were cleared: those after it only pass it on."""
    return _log_lines[0].rpartition("error loading model: ")[2] if _log_lines else "llama.cpp gave no reason"


class LlamaModel:
    """Weights and vocabulary of a GGUF.

    With `remote_experts` the file is a sparse backbone: its expert weights are declared, never stored and never read.
    What `progress` (0 to 1) raises ends the loading. Raises ModelError, with llama.cpp's own reason, for a file that
    cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        *,
        remote_experts: bool,
        gpu_layers: int = 0,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._lib = lib = _library()
        self.path = path
        self._null = NullBuffer() if remote_experts else None
        params = lib.llama_model_default_params()
        params.use_extra_bufts = False
        params.n_gpu_layers = gpu_layers
        stopped: list[BaseException] = []
        if progress is not None:

            def report(done: float, _user_data: Any) -> bool:
                try:
                    progress(done)
                except BaseException as error:  # nothing may be raised through llama.cpp
                    stopped.append(error)
                return not stopped

            self._progress = lib.llama_progress_callback(report)
            params.progress_callback = self._progress
        if self._null is not None:
            params.tensor_buft_overrides = self._null.overrides()
            params.load_mode = _LOAD_NONE
        _log_lines.clear()
        with self._null.loading() if self._null is not None else contextlib.nullcontext():
            self._model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if stopped:
            self.close()
            raise stopped[0]
        if not self._model:
            raise ModelError(f"{path}: llama.cpp cannot load it: {_last_error()}")
        self.n_vocab = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self.n_context_trained = int(lib.llama_model_n_ctx_train(self._model))
        self._piece_cache: dict[int, bytes] = {}

    @property
    def handle(self) -> Any:
        """The `llama_model *`."""
        if not self._model:
            raise ComputeError(f"{self.path}: the model is closed")
        return self._model

    @property
    def vocabulary(self) -> Any:
        """The `llama_vocab *`; it lives in the model."""
        return self._lib.llama_model_get_vocab(self.handle)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; `special` adds the model's BOS where it wants one and parses special tokens."""
        raw = text.encode("utf-8", "surrogatepass")
        room = len(raw) + 16
        while True:
            tokens = (ctypes.c_int32 * room)()
            n = self._lib.llama_tokenize(self.vocabulary, raw, len(raw), tokens, room, special, special)
            if n >= 0:
                return list(tokens[:n])
            if -n <= room:
                raise ComputeError(f"llama.cpp cannot tokenize a text of {len(raw)} bytes")
            room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, however long; control tokens are empty unless `special`."""
        cached = None if special else self._piece_cache.get(token)
        if cached is not None:
            return cached
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token {token} does not exist: this model's are 0 to {self.n_vocab - 1}")
        room = _PIECE_START
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = self._lib.llama_token_to_piece(self.vocabulary, token, buffer, room, 0, special)
            if n >= 0:
                break
            room = -n
        piece = buffer.raw[:n]
        if not special:
            self._piece_cache[token] = piece
        return piece

    def is_end(self, token: int) -> bool:
        """Does this token end a generation (EOS, end of turn)?"""
        return bool(self._lib.llama_vocab_is_eog(self.vocabulary, token))

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """All tokens that end a generation."""
        return tuple(token for token in range(self.n_vocab) if self.is_end(token))

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> str:
        """The model's own chat template applied to messages; UsageError where it has none or refuses them."""
        template = self._lib.llama_model_chat_template(self.handle, None)
        if not template:
            raise UsageError("this model has no chat template: give a plain prompt")
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # noqa: PLC0415

        def text(token: int) -> str:
            return self.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

        bos = self._lib.llama_vocab_bos(self.vocabulary)
        eos = self._lib.llama_vocab_eos(self.vocabulary)
        try:
            formatter = Jinja2ChatFormatter(template.decode(), eos_token=text(eos), bos_token=text(bos))
            prompt: str = formatter(messages=list(messages)).prompt
        except Exception as error:  # a template is code that came with the file
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error
        first = text(bos)
        if first and self._lib.llama_vocab_get_add_bos(self.vocabulary):
            prompt = prompt.removeprefix(first)
        return prompt

    def close(self) -> None:
        """Free the weights. Contexts must be closed before."""
        if self._model:
            self._lib.llama_model_free(self._model)
        self._model = None


class LlamaContext:
    """KV cache and compute buffers of one sequence. One thread at a time."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_context: int,
        n_batch: int,
        threads: int,
        callback: EvalCallback | None = None,
    ) -> None:
        self._lib = lib = _library()
        self.model = model
        self.n_context, self.n_batch = n_context, n_batch
        params = lib.llama_context_default_params()
        params.n_ctx = n_context
        params.n_batch = params.n_ubatch = n_batch
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        if callback is not None:
            self._callback = lib.ggml_backend_sched_eval_callback(callback)
            params.cb_eval = self._callback
        _log_lines.clear()
        self._context = lib.llama_init_from_model(model.handle, params)
        if not self._context:
            raise ComputeError(f"{model.path}: llama.cpp cannot make a context of {n_context} tokens: {_last_error()}")
        self._batch = lib.llama_batch_init(n_batch, 0, 1)

    @property
    def handle(self) -> Any:
        """The `llama_context *`."""
        if self._context is None:
            raise ComputeError(f"{self.model.path}: the context is closed")
        return self._context

    def decode(self, tokens: Sequence[int], position: int, *, all_logits: bool = False) -> None:
        """Evaluate up to `n_batch` tokens at `position`…; logits of the last one, or of each with `all_logits`.

        Raises ComputeError; an evaluation stopped by the hook is one too (its own error says why).
        """
        count = len(tokens)
        if not 0 < count <= self.n_batch or position + count > self.n_context:
            raise ComputeError(
                f"{count} tokens at position {position} do not fit: batch {self.n_batch}, context {self.n_context}"
            )
        batch = self._batch
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == count - 1
        status = self._lib.llama_decode(self.handle, batch)
        if status != 0:
            raise ComputeError(f"llama_decode failed with status {status}: {_last_error()}")

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        """A view [n_vocab] of one token's logits, valid until the next decode."""
        pointer = self._lib.llama_get_logits_ith(self.handle, row)
        if not pointer:
            raise ComputeError(f"llama.cpp has no logits for row {row} of the last batch")
        return np.ctypeslib.as_array(pointer, (self.model.n_vocab,))

    def clear(self) -> None:
        """Forget every token."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self.handle), True)

    def close(self) -> None:
        """Free the context."""
        if self._context is not None:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._context)
            self._context = None
