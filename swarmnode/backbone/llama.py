"""A thin wrapper of llama.cpp's low-level bindings: a model, contexts, a decode. No sampling policy, no network.

Used twice with the same code: for the backbone, whose expert tensors live in the null buffer, and for the plain local
run it is compared with. Repacked kernels are off in both, so that their bits can be compared with the workers'.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.backbone.library import clear_errors, last_error, library
from swarmnode.backbone.null_buffer import NullBuffer
from swarmnode.errors import ComputeError, ModelError, UnknownArchitecture, UsageError

EvalCallback = Callable[[int, bool, "int | None"], bool]
ChatMessage = dict[str, str]

_LOAD_NONE, _LOAD_AUTO = 0, -1  # llama_load_mode
_ARCHITECTURE_ROOM = 128  # bytes
_PIECE_START = 64  # bytes; grows where a token is longer
_UNKNOWN_ARCHITECTURE = "unknown model architecture: "  # llama_model_create; a test holds it
_END = -1  # llama.cpp's "to the end" of a range of positions
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ


class LlamaModel:
    """Weights and vocabulary of a GGUF.

    With `remote_experts` the file is a sparse backbone: its expert weights are declared, never stored and never read.
    `take_back`: where layers keep a running state, contexts keep as many earlier ones of it (that much more memory, and
    another graph), so that drafts of this length can be taken back. What `progress` (0 to 1) raises ends the loading.
    With `header_only` no weight is read or kept: whether llama.cpp accepts the file's figures and shapes.
    Raises ModelError, with llama.cpp's own reason, for a file that cannot be loaded, or UnknownArchitecture.
    """

    def __init__(
        self,
        path: Path,
        *,
        remote_experts: bool,
        gpu_layers: int = 0,
        take_back: int = 0,
        header_only: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._lib = lib = library()
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
        if header_only:
            params.no_alloc = True
            params.load_mode = _LOAD_NONE
        clear_errors()
        with self._null.loading() if self._null is not None else contextlib.nullcontext():
            self._model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if stopped:
            self.close()
            raise stopped[0]
        if not self._model:
            reason = last_error()
            if _UNKNOWN_ARCHITECTURE in reason:
                raise UnknownArchitecture(
                    f"{path}: this llama.cpp does not know the architecture {reason.rpartition(': ')[2]}; "
                    "update swarmnode and llama-cpp-python"
                )
            raise ModelError(f"{path}: llama.cpp cannot load it: {reason}")
        self.n_vocab = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self.n_context_trained = int(lib.llama_model_n_ctx_train(self._model))
        self._sharing = threading.Lock()
        self._contexts = 0  # that use the weights
        self._closed = False
        self.take_back = take_back if self.is_recurrent else 0
        self._piece_cache: dict[int, bytes] = {}

    @property
    def handle(self) -> Any:
        """The `llama_model *`."""
        if not self._model or self._closed:
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

    @cached_property
    def architecture(self) -> str:
        """As in the GGUF's `general.architecture`."""
        room = ctypes.create_string_buffer(_ARCHITECTURE_ROOM)
        self._lib.llama_model_meta_val_str(self.handle, b"general.architecture", room, _ARCHITECTURE_ROOM)
        return room.value.decode("utf-8", "replace")

    @cached_property
    def is_recurrent(self) -> bool:
        """Does any layer keep a running state instead of every token's (recurrent and hybrid architectures)?"""
        lib = self._lib
        return bool(lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle))

    def close(self) -> None:
        """No more contexts; the weights are freed with the last of those there are."""
        with self._sharing:
            self._closed = True
            self._free_unused()

    def _joined(self) -> None:
        with self._sharing:
            self._contexts += 1

    def _left(self) -> None:
        with self._sharing:
            self._contexts -= 1
            self._free_unused()

    def _free_unused(self) -> None:
        if self._closed and not self._contexts and self._model:
            self._lib.llama_model_free(self._model)
            self._model = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence in a decode; logits are wanted of the last `outputs` of them."""

    tokens: Sequence[int]
    position: int
    sequence: int = 0
    outputs: int = 1


class LlamaContext:
    """KV cache and compute buffers of up to `n_seq` sequences of `n_context` tokens each. One thread at a time.

    The sequences share one cache ("unified"), so that whatever mix of them is decoded together is one evaluation of the
    graph: with experts on other nodes, one round trip per layer. Recurrent layers take equal lengths only, and a mix of
    lengths costs them an evaluation per length.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_context: int,
        n_batch: int,
        threads: int,
        callback: EvalCallback | None = None,
        n_seq: int = 1,
    ) -> None:
        if not 1 <= n_seq <= min(MAX_SEQUENCES, n_batch):
            raise UsageError(
                f"{n_seq} sequences do not fit: give 1 to {MAX_SEQUENCES}, and no more than the batch of {n_batch}"
            )
        self._lib = lib = library()
        self.model = model
        self.n_context, self.n_batch, self.n_seq = n_context, n_batch, n_seq
        params = lib.llama_context_default_params()
        params.n_ctx = n_context * n_seq
        params.n_batch = params.n_ubatch = n_batch
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        if model.take_back:
            params.n_rs_seq = model.take_back
            # One evaluation must be able to take the states that are kept, or llama.cpp ends the process.
            params.n_batch = params.n_ubatch = max(n_batch, model.take_back + 2)
        if n_seq > 1:
            params.n_seq_max = n_seq
            params.kv_unified = True
        if callback is not None:
            self._callback = lib.ggml_backend_sched_eval_callback(callback)
            params.cb_eval = self._callback
        clear_errors()
        self._context = lib.llama_init_from_model(model.handle, params)
        if not self._context:
            of = f"{n_context} tokens" + (f" in each of {n_seq} sequences" if n_seq > 1 else "")
            raise ComputeError(f"{model.path}: llama.cpp cannot make a context of {of}: {last_error()}")
        model._joined()
        self._tokens = np.zeros(n_batch, np.int32)
        self._positions = np.zeros(n_batch, np.int32)
        self._sequences = np.zeros(n_batch, np.int32)  # one per token
        self._wanted = np.zeros(n_batch, np.int8)
        self._batch = self._batch_of_these()
        self._began: dict[int, int] = {}  # sequence -> position of the first token of its last evaluation

    @property
    def handle(self) -> Any:
        """The `llama_context *`."""
        if self._context is None:
            raise ComputeError(f"{self.model.path}: the context is closed")
        return self._context

    def _batch_of_these(self) -> Any:
        """A `llama_batch` over this object's arrays: what is written there is what the next decode takes."""

        def at(array: NDArray[Any], kind: Any, index: int = 0) -> Any:
            return ctypes.cast(array.ctypes.data + index * array.itemsize, ctypes.POINTER(kind))

        self._counts = np.ones(self.n_batch, np.int32)  # every token belongs to one sequence
        ids = (at(self._sequences, ctypes.c_int32, i) for i in range(self.n_batch))
        self._ids = (ctypes.POINTER(ctypes.c_int32) * self.n_batch)(*ids)
        batch = self._lib.llama_batch()
        batch.token, batch.pos = at(self._tokens, ctypes.c_int32), at(self._positions, ctypes.c_int32)
        batch.n_seq_id = at(self._counts, ctypes.c_int32)
        batch.seq_id = ctypes.cast(self._ids, type(batch.seq_id))
        batch.logits = at(self._wanted, ctypes.c_int8)
        return batch

    def decode(self, tokens: Sequence[int], position: int, *, all_logits: bool = False) -> None:
        """Evaluate up to `n_batch` tokens of sequence 0 at `position`…; logits of the last, or of each (`all_logits`).

        Raises ComputeError; an evaluation stopped by the hook is one too (its own error says why).
        """
        self.decode_chunks([Chunk(tokens, position, 0, len(tokens) if all_logits else 1)])

    def decode_chunks(self, chunks: Sequence[Chunk]) -> list[range]:
        """Evaluate chunks of different sequences together, up to `n_batch` tokens; the rows of each for `logits`.

        Positions must continue what is kept of a sequence. Raises ComputeError as `decode` does.
        """
        rows: list[range] = []
        at = 0
        for chunk in chunks:
            count, end = len(chunk.tokens), at + len(chunk.tokens)
            if not 0 < count <= self.n_batch - at or chunk.position + count > self.n_context:
                raise ComputeError(
                    f"{count} tokens at position {chunk.position} do not fit: batch {self.n_batch}, "
                    f"context {self.n_context}" + (f", {at} tokens of other sequences" if at else "")
                )
            if not 0 <= chunk.sequence < self.n_seq or not 0 <= chunk.outputs <= count:
                raise ComputeError(f"no such sequence or rows: {chunk.sequence} of {self.n_seq}, {chunk.outputs} rows")
            self._tokens[at:end] = chunk.tokens
            self._positions[at:end] = range(chunk.position, chunk.position + count)
            self._sequences[at:end] = chunk.sequence
            self._wanted[at:end] = 0
            self._wanted[end - chunk.outputs : end] = 1
            rows.append(range(end - chunk.outputs, end))
            self._began[chunk.sequence] = chunk.position
            at = end
        self._batch.n_tokens = at
        status = self._lib.llama_decode(self.handle, self._batch)
        if status != 0:
            raise ComputeError(f"llama_decode failed with status {status}: {last_error()}")
        return rows

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        """A view [n_vocab] of the logits of a token of the last batch (-1: the last that has any), until the next."""
        pointer = self._lib.llama_get_logits_ith(self.handle, row)
        if not pointer:
            raise ComputeError(f"llama.cpp has no logits for row {row} of the last batch")
        return np.ctypeslib.as_array(pointer, (self.model.n_vocab,))

    def clear(self) -> None:
        """Forget every token."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self.handle), True)

    @property
    def take_back(self) -> int:
        """How many of the tokens that a decode evaluated of a sequence `forget` can take back before the next."""
        if self.model.is_recurrent:
            return int(self._lib.llama_n_rs_seq(self.handle)) if self.model.take_back else 0
        return self.n_batch

    def forget(self, sequence: int, position: int = 0) -> None:
        """Forget what a sequence has from `position` on, up to `take_back` tokens or the whole sequence.

        Raises ComputeError where llama.cpp cannot. Of recurrent layers it keeps no state from before the sequence's
        last evaluation: at least one token of that has to stay.
        """
        if self.model.is_recurrent and 0 < position <= self._began.get(sequence, 0):  # it would take another state
            raise ComputeError(
                f"the recurrent layers of {self.model.architecture} cannot take back a whole evaluation: "
                f"sequence {sequence} from {position} on"
            )
        memory = self._lib.llama_get_memory(self.handle)
        if not self._lib.llama_memory_seq_rm(memory, sequence, position, _END):
            raise ComputeError(f"llama.cpp cannot forget the tokens of sequence {sequence} from {position} on")

    def close(self) -> None:
        """Free the context."""
        if self._context is not None:
            self._lib.llama_free(self._context)
            self._context = None
            self.model._left()
