"""Generations on one llama context: tokenize, prefill, decode, sample, stream, stop. Several at once, in one thread.

Each step evaluates together the next tokens of every generation that is past its prompt (with the drafts after them)
and one chunk of one prompt: one pass over the graph, so one round trip per layer for all of them. What a generation
wants and what follows from its logits is in `sequence.py`; this room owns the context, its decode thread, and who has
which of the context's sequences.

The same code serves the swarm (a context whose hook dispatches experts) and the plain local run it is compared with.
With one generation and no drafts, every batch has the shape that it has there. Not here: HTTP, which context a request
goes to (`runner.py`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from swarmnode.backbone.hook import EvalHook
from swarmnode.backbone.llama import Chunk, LlamaContext, LlamaModel
from swarmnode.backbone.sampling import SamplerChain
from swarmnode.backbone.sequence import (
    GenerateRequest,
    GenerateResult,
    Generation,
    GenerationTotals,
    Message,
    OnLogits,
    OnToken,
    StoppedBy,
    TokenEvent,
)
from swarmnode.backbone.speculation import Drafter
from swarmnode.errors import Cancelled, UsageError

__all__ = ["GenerateRequest", "GenerateResult", "MakeDrafter", "Message", "Session", "StoppedBy", "TokenEvent"]

MakeDrafter = Callable[[], Drafter | None]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Job:
    """A generation and who waits for it."""

    generation: Generation
    future: Future[GenerateResult] = field(default_factory=Future)
    began: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """A decode: seconds, round trips waited for, generations and tokens in it."""

    seconds: float
    trips: int
    generations: int
    tokens: int


class Session:
    """Generates on one context, up to `context.n_seq` at once; more wait in order.

    Thread safe but for `evaluate`. `round_trips` tells how many site calls of this context have waited for another node
    so far (default: as its hook counts them); `release` wakes a decode thread that waits for experts, with an error:
    for experts whose pending rows cannot be failed one by one. `drafter` makes what drafts for a generation, unless
    that is given one of its own. `prompt_chunk` says how many of at most so many tokens of a prompt suit one step.
    """

    def __init__(
        self,
        model: LlamaModel,
        context: LlamaContext,
        hook: EvalHook | None = None,
        *,
        round_trips: Callable[[], int] | None = None,
        release: Callable[[Exception], object] | None = None,
        drafter: MakeDrafter | None = None,
        prompt_chunk: Callable[[int], int] | None = None,
    ) -> None:
        self.model, self.context, self.hook = model, context, hook
        self.totals = GenerationTotals()  # written by the decode thread
        self._round_trips = round_trips or ((lambda: hook.round_trips) if hook is not None else (lambda: 0))
        self._release = release
        self._drafter = drafter
        self._prompt_chunk = prompt_chunk or (lambda most: most)
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._active: list[_Job] = []
        self._free = list(range(context.n_seq))[::-1]
        self._in_step: tuple[_Job, ...] = ()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def n_seq(self) -> int:
        """How many generations run at once."""
        return self.context.n_seq

    def interrupt(self) -> None:
        """Wake generations whose `cancelled` event was just set, also where they wait for a worker.

        An evaluation is broken off only where nobody else needs it; otherwise they leave after it.
        """
        with self._lock:  # within it, so that what is broken off is not already the next step, of somebody else
            if not self._in_step or not all(job.generation.cancelled.is_set() for job in self._in_step):
                return
            error = Cancelled("cancelled")
            if self.hook is not None:
                self.hook.cancel(error)
            if self._release is not None:
                self._release(error)

    def close(self) -> None:
        """End what runs and what waits, and free the context and the model."""
        with self._lock:
            self._closed = True
            jobs, thread = [*self._active, *self._waiting], self._thread
        for job in jobs:
            job.generation.cancelled.set()
        self.interrupt()
        if thread is not None:
            thread.join()
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
        """One decode on sequence 0 with the hook around it, while nothing generates; raises the hook's own error."""
        if self.hook is not None:
            self.hook.begin()
        self._decode([Chunk(tokens, position, 0, len(tokens) if all_logits else 1)])

    def generate(
        self,
        request: GenerateRequest,
        on_token: OnToken | None = None,
        on_logits: OnLogits | None = None,
        cancelled: threading.Event | None = None,
        drafter: MakeDrafter | None = None,
    ) -> GenerateResult:
        """Generate until the model ends, a limit, a stop string, or `cancelled` is set (then call `interrupt` too).

        `on_token` and `on_logits` are called on the decode thread; a logits row is a view valid during the call. Raises
        UsageError before anything is computed, DispatchError where the experts cannot be had.
        """
        cancelled = cancelled if cancelled is not None else threading.Event()
        future = self.submit(request, on_token, on_logits, cancelled, drafter)
        try:
            return future.result()
        except BaseException:
            if not future.done():  # Ctrl-C
                cancelled.set()
                self.interrupt()
            raise

    def submit(
        self,
        request: GenerateRequest,
        on_token: OnToken | None = None,
        on_logits: OnLogits | None = None,
        cancelled: threading.Event | None = None,
        drafter: MakeDrafter | None = None,
    ) -> Future[GenerateResult]:
        """As `generate`, at once: the result, or the error, is the future's. Raises UsageError here."""
        prompt = self.prompt_tokens(request)
        request.sampling.check(self.model.n_vocab)
        guess, speculation = self._drafter_of(request, drafter or self._drafter)
        banned = self.model.end_tokens if request.ignore_end else ()
        generation = Generation(
            request,
            prompt,
            vocabulary=self.model,
            sampler=SamplerChain(request.sampling, self.model.n_vocab, banned),
            n_context=self.context.n_context,
            most_drafts=self.context.take_back,
            drafter=guess,
            speculation=speculation,
            on_token=on_token,
            on_logits=on_logits,
            cancelled=cancelled,
            totals=self.totals,
        )
        job = _Job(generation)
        job.future.set_running_or_notify_cancel()  # it is ended by its event, not by whoever holds the future
        with self._lock:
            if self._closed:
                generation.close()
                raise Cancelled("this session is closed")
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
                self._thread.start()
        return job.future

    def _drafter_of(self, request: GenerateRequest, make: MakeDrafter | None) -> tuple[Drafter | None, str]:
        """What drafts for a request, and what its result says about it."""
        if request.speculate is False:
            return None, "off"
        if make is None:
            return None, "off" if request.speculate is None else "this node has nothing that drafts"
        if not self.context.take_back:
            return None, f"the recurrent layers of {self.model.architecture} cannot take back a draft"
        if self.context.n_batch < 2:
            return None, "a step has room for one token here (--batch 1)"
        made = make()
        if made is not None:
            return made, "on"
        return None, "off" if request.speculate is None else "what drafts on this node is busy with other generations"

    # From here on the decode thread. It ends when nothing is left to do, and begins anew with the next request.

    def _work(self) -> None:
        while True:
            try:
                while self._admit():
                    self._drop_cancelled()
                    for job in [job for job in self._active if not job.began]:
                        self._try(job, self._begin, job)
                    if self._active:
                        self._step()
                return
            except BaseException as error:  # a mistake in here: nobody is left waiting for it
                self._start_over(error)

    def _start_over(self, error: BaseException) -> None:
        """End with an error all that were active, or else all that wait, and be ready for whoever comes next."""
        with self._lock:
            jobs = self._active or list(self._waiting)
            if not self._active:
                self._waiting.clear()
            self._active = []
            self._free = list(range(self.context.n_seq))[::-1]
            self._in_step = ()
        with contextlib.suppress(Exception):  # the next to begin does it too
            self.context.clear()
        for job in jobs:
            with contextlib.suppress(Exception):
                job.generation.close()
            if not job.future.done():
                job.future.set_exception(error)

    def _admit(self) -> bool:
        """Give free sequences to those that wait longest; False where nothing is left to do, and the thread ends."""
        with self._lock:
            while self._waiting and self._free:
                job = self._waiting.popleft()
                job.generation.sequence = self._free.pop()
                self._active.append(job)
            if not self._active:
                self._thread = None
            return bool(self._active)

    def _begin(self, job: _Job) -> None:
        if any(other.began for other in self._active):
            self.context.forget(job.generation.sequence)
        else:
            self.context.clear()
        job.began = True
        job.generation.begin()

    def _step(self) -> None:
        """One decode of what the active generations want, and what follows from it."""
        parts = self._plan()
        error = self._evaluate(parts) if parts else None
        if error is not None:
            self._broken_off(parts, error)

    def _evaluate(self, parts: list[tuple[_Job, Chunk]]) -> Exception | None:
        """Decode these chunks and give each generation what is its own; returns the error that broke it off."""
        with self._lock:
            self._in_step = tuple(job for job, _ in parts)
            if self.hook is not None:
                self.hook.begin()
            unwanted = all(job.generation.cancelled.is_set() for job in self._in_step)
        started, trips = time.perf_counter(), self._round_trips()
        try:
            if unwanted:  # since it was last looked at
                return None
            rows = self._decode([chunk for _, chunk in parts])
        except Exception as error:
            return error
        finally:
            with self._lock:
                self._in_step = ()
        seconds, trips = time.perf_counter() - started, self._round_trips() - trips
        total = sum(len(chunk.tokens) for _, chunk in parts)
        for (job, chunk), own in zip(parts, rows, strict=True):
            if not job.generation.cancelled.is_set():
                self._try(job, self._follow, job, chunk, own, _Step(seconds, trips, len(parts), total))
        return None

    def _follow(self, job: _Job, chunk: Chunk, rows: range, step: _Step) -> None:
        generation = job.generation
        forget = generation.evaluated(chunk, rows, self.context, step.trips)
        if generation.stopped_by is not None:
            self._end(job, None)
            return
        if forget is not None:
            self.context.forget(chunk.sequence, forget)
        generation.stepped(len(chunk.tokens), step.seconds, step.generations, step.tokens)

    def _plan(self) -> list[tuple[_Job, Chunk]]:
        """Who gets how much of the next batch: each step its token, drafts an equal share, the prompt the rest.

        Recurrent layers take steps of one length only in one evaluation; so several at once go without drafts there.
        """
        steps = [job for job in self._active if not job.generation.prefilling]
        prompts = [job for job in self._active if job.generation.prefilling]
        room = self.context.n_batch
        may_differ = len(steps) == 1 or not self.model.is_recurrent
        parts: list[tuple[_Job, Chunk]] = []
        for number, job in enumerate(steps):
            if job.generation.cancelled.is_set():  # perhaps while a draft model guessed for those before it
                continue
            share = room // (len(steps) - number + bool(prompts)) if may_differ else 1
            chunk = self._try(job, job.generation.wants, max(1, share))
            if chunk is not None:
                parts.append((job, chunk))
                room -= len(chunk.tokens)
        if prompts and room:
            parts.append((prompts[0], prompts[0].generation.wants(max(1, min(room, self._prompt_chunk(room))))))
        return parts

    def _decode(self, chunks: list[Chunk]) -> list[range]:
        try:
            return self.context.decode_chunks(chunks)
        finally:
            if self.hook is not None:
                self.hook.check()

    def _broken_off(self, parts: list[tuple[_Job, Chunk]], error: Exception) -> None:
        """Take back a step that failed, and evaluate each of its generations once more, alone: who fails again, ends.

        So nobody ends by what another one brought into the step. Recurrent layers cannot take it back, and may have
        been moving the states of generations that were not in it: with them, all end that have evaluated anything.
        """
        if self.model.is_recurrent:
            in_step = {job for job, _ in parts}
            for job in list(self._active):
                if job in in_step or not job.generation.untouched:
                    self._fail(job, error)
            self.context.clear()
            return
        for _, chunk in parts:
            self.context.forget(chunk.sequence, chunk.position)
        for job, chunk in parts:
            retries = len(parts) > 1 and not job.generation.cancelled.is_set()
            again = self._evaluate([(job, chunk)]) if retries else error
            if again is not None:
                self._fail(job, again)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._active if job.generation.cancelled.is_set()]:
            self._end(job, None)

    def _try(self, job: _Job, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What fails here is this generation's own: its callback, its sampler, its drafter."""
        try:
            return work(*args, **kwargs)
        except BaseException as error:
            self._end(job, error)
            return None

    def _fail(self, job: _Job, error: Exception) -> None:
        """End a generation whose step was broken off: with its result where it was to be ended, else with the error."""
        self._end(job, None if job.generation.cancelled.is_set() else error)

    def _end(self, job: _Job, error: BaseException | None) -> None:
        """Free a generation's sequence and give its result, or its error, to who waits for it."""
        with self._lock:
            self._active.remove(job)
            self._free.append(job.generation.sequence)
        result: GenerateResult | None = None
        try:
            with contextlib.closing(job.generation):
                if self._active:
                    self.context.forget(job.generation.sequence)
                if error is None:
                    result = job.generation.end()
        except BaseException as failed:  # of its callback, too: nobody else would give it to who waits
            job.future.set_exception(error or failed)
            return
        if result is not None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)
