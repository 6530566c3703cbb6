"""One generation at a time on one llama context: tokenize, prefill, decode, sample, stream, stop.

`Session.generate` blocks; the node runs it in a thread of its own. The same code serves the swarm (a context whose hook
dispatches experts) and the plain local run it is compared with. Not here: HTTP, queues of requests, speculation.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmnode.backbone.hook import EvalHook
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.sampling import SamplerChain, Sampling
from swarmnode.backbone.text_stream import TextStream
from swarmnode.errors import Cancelled, UsageError

StoppedBy = Literal["end", "length", "context", "stop", "cancelled"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message."""

    role: str
    content: str


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to generate: a plain `prompt`, or `messages` for the model's chat template, never both.

    With `digests`, every event carries the SHA-256 of the logits row its token was chosen from. With `ignore_end` the
    model cannot end by itself.
    """

    prompt: str = ""
    messages: tuple[Message, ...] = ()
    max_tokens: int = 128
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    digests: bool = False
    ignore_end: bool = False

    def check(self) -> None:
        """Raise UsageError for what cannot be meant."""
        if bool(self.prompt) == bool(self.messages):
            more = ", not both" if self.prompt else "; an empty prompt generates nothing"
            raise UsageError("give a prompt or chat messages" + more)
        if not 1 <= self.max_tokens <= 1 << 20:
            raise UsageError(f"max tokens {self.max_tokens} is out of range: give 1 to {1 << 20}")
        if len(self.stop) > 64 or any(len(s) > 1024 for s in self.stop):
            raise UsageError("at most 64 stop strings of at most 1024 characters")


class TokenEvent(msgspec.Struct, frozen=True):
    """One generated token: the text it made certain (often less or more than its own piece)."""

    index: int
    token: int
    text: str
    digest: str = ""


class GenerateResult(msgspec.Struct, frozen=True):
    """The whole of a generation. `steps` are decodes after the prompt; times are seconds."""

    text: str
    tokens: int
    prompt_tokens: int
    prompt_s: float
    decode_s: float
    tokens_per_s: float
    steps: int
    accepted_per_step: float
    blocking_round_trips_per_token: float
    stopped_by: StoppedBy


class Session:
    """Generates on one context. Not thread safe: one `generate` at a time, `interrupt` from any thread.

    `round_trips` tells how many site calls have waited for another node so far; `release` wakes a decode thread that
    waits for experts, with an error. Both are None for a local run.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: LlamaContext,
        hook: EvalHook | None = None,
        *,
        round_trips: Callable[[], int] | None = None,
        release: Callable[[Exception], object] | None = None,
    ) -> None:
        self.model, self.context, self.hook = model, context, hook
        self._round_trips = round_trips or (lambda: 0)
        self._release = release
        self._cancelled = threading.Event()

    def interrupt(self) -> None:
        """Wake a generation whose `cancelled` event was just set, also one that waits for a worker."""
        error = Cancelled("cancelled")
        if self.hook is not None:
            self.hook.cancel(error)
        if self._release is not None:
            self._release(error)

    def close(self) -> None:
        """Free the context and the model."""
        self.context.close()
        self.model.close()

    def prompt_tokens(self, request: GenerateRequest) -> list[int]:
        """The request's prompt as token ids, at least one; UsageError when it does not fit the context."""
        request.check()
        if request.messages:
            text = self.model.chat_prompt([{"role": m.role, "content": m.content} for m in request.messages])
        else:
            text = request.prompt
        tokens = self.model.tokenize(text)
        if not tokens:
            raise UsageError("the prompt has no tokens")
        if len(tokens) >= self.context.n_context:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens and the context {self.context.n_context}: "
                "shorten it or start with a larger --context"
            )
        return tokens

    def evaluate(self, tokens: list[int], position: int, *, all_logits: bool = False) -> None:
        """One decode with the hook around it; raises the hook's own error where it has one."""
        if self.hook is None:
            self.context.decode(tokens, position, all_logits=all_logits)
            return
        self.hook.begin()
        if self._cancelled.is_set():
            raise Cancelled("cancelled")
        try:
            self.context.decode(tokens, position, all_logits=all_logits)
        finally:
            self.hook.check()

    def generate(
        self,
        request: GenerateRequest,
        on_token: Callable[[TokenEvent], None] | None = None,
        on_logits: Callable[[int, NDArray[np.float32]], None] | None = None,
        cancelled: threading.Event | None = None,
    ) -> GenerateResult:
        """Generate until the model ends, a limit, a stop string, or `cancelled` is set (then call `interrupt` too).

        `on_token` and `on_logits` are called on this thread; a logits row is a view valid during the call. Raises
        UsageError before anything is computed, DispatchError where the experts cannot be had.
        """
        self._cancelled = cancelled if cancelled is not None else threading.Event()
        prompt = self.prompt_tokens(request)
        banned = self.model.end_tokens if request.ignore_end else ()
        sampler = SamplerChain(request.sampling, self.model.n_vocab, banned)
        try:
            return self._run(request, prompt, sampler, on_token, on_logits)
        finally:
            sampler.close()

    def _run(
        self,
        request: GenerateRequest,
        prompt: list[int],
        sampler: SamplerChain,
        on_token: Callable[[TokenEvent], None] | None,
        on_logits: Callable[[int, NDArray[np.float32]], None] | None,
    ) -> GenerateResult:
        stream = TextStream(request.stop)
        text: list[str] = []
        stopped_by: StoppedBy = "length"
        count = steps = 0
        trips_before = self._round_trips()
        started = prefilled = time.perf_counter()
        try:
            self.context.clear()
            for at in range(0, len(prompt), self.context.n_batch):
                self.evaluate(prompt[at : at + self.context.n_batch], at)
            for token in prompt:
                sampler.accept(token)
            prefilled = time.perf_counter()
            trips_before = self._round_trips()
            position = len(prompt)
            while True:
                if self._cancelled.is_set():
                    raise Cancelled("cancelled")
                logits = self.context.logits()
                digest = hashlib.sha256(logits.data).hexdigest() if request.digests else ""
                if on_logits is not None:
                    on_logits(count, logits)
                token = sampler.sample(self.context.handle, -1)
                if self.model.is_end(token):
                    stopped_by = "end"
                    break
                shown = stream.feed(self.model.piece(token))
                text.append(shown)
                if on_token is not None:
                    on_token(TokenEvent(count, token, shown, digest))
                count += 1
                if stream.stopped_by is not None:
                    stopped_by = "stop"
                    break
                if count >= request.max_tokens:
                    break
                if position >= self.context.n_context:
                    stopped_by = "context"
                    break
                self.evaluate([token], position)
                position += 1
                steps += 1
        except Cancelled:
            stopped_by = "cancelled"
        ended = time.perf_counter()
        rest = stream.finish()
        if rest:
            text.append(rest)
            if on_token is not None:
                on_token(TokenEvent(count, -1, rest))
        trips = self._round_trips() - trips_before
        return GenerateResult(
            text="".join(text),
            tokens=count,
            prompt_tokens=len(prompt),
            prompt_s=prefilled - started,
            decode_s=ended - prefilled,
            tokens_per_s=steps / (ended - prefilled) if steps else 0.0,
            steps=steps,
            accepted_per_step=1.0 if steps else 0.0,
            blocking_round_trips_per_token=trips / steps if steps else 0.0,
            stopped_by=stopped_by,
        )
