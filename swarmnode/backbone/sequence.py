"""One generation as a state machine: what it wants evaluated next, and what follows from the logits.

A generation is prefilled chunk by chunk, then steps: its last token and the drafts after it are evaluated together, and
each row's token is *sampled as if nothing had been drafted*. While it equals the draft, the next row stands for the
prefix that plain decoding would have there, so it is sampled too; the first that differs is kept (it came from the
right prefix) and the rows after it are never looked at. Hence the distribution of the output is the plain one whatever
is drafted, and every emitted token takes exactly one draw of the sampler: equal logits and an equal seed give the same
tokens. What may differ is the last bits of the logits, because the shape of a batch changes them in llama.cpp itself.

Made and driven by `session.py`, which owns the context; not thread safe. Not here: queues, threads, llama.cpp.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmnode.backbone.llama import Chunk
from swarmnode.backbone.sampling import Sampling
from swarmnode.backbone.speculation import Drafter
from swarmnode.backbone.text_stream import TextStream
from swarmnode.errors import UsageError

StoppedBy = Literal["end", "length", "context", "stop", "cancelled"]
F32 = NDArray[np.float32]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One chat message."""

    role: str
    content: str


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to generate: a plain `prompt`, or `messages` for the model's chat template, never both.

    With `digests`, every event carries the SHA-256 of the logits row its token was chosen from. With `ignore_end` the
    model cannot end by itself. `speculate` false drafts nothing; null and true draft where the session can.
    """

    prompt: str = ""
    messages: tuple[Message, ...] = ()
    max_tokens: int = 128
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    digests: bool = False
    ignore_end: bool = False
    speculate: bool | None = None

    def check(self) -> None:
        """Raise UsageError for what cannot be meant."""
        if bool(self.prompt) == bool(self.messages):
            more = ", not both" if self.prompt else "; an empty prompt generates nothing"
            raise UsageError("give a prompt or chat messages" + more)
        if not 1 <= self.max_tokens <= 1 << 20:
            raise UsageError(f"max tokens {self.max_tokens} is out of range: give 1 to {1 << 20}")
        if len(self.stop) > 64 or not all(0 < len(s) <= 1024 for s in self.stop):
            raise UsageError("at most 64 stop strings of 1 to 1024 characters")


class TokenEvent(msgspec.Struct, frozen=True):
    """One generated token: the text it made certain (often less or more than its own piece)."""

    index: int
    token: int
    text: str
    digest: str = ""


class GenerateResult(msgspec.Struct, frozen=True):
    """The whole of a generation. Times are seconds.

    `steps` are the decodes after the prompt in which it had tokens; `accepted_per_step` the tokens that came of one,
    `blocking_round_trips_per_token` the waits for other nodes per such token, `tokens_per_s` their rate. `speculation`
    is "on", "off", or why nothing could be drafted; `drafted` and `drafts_accepted` count tokens.
    """

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
    speculation: str = "off"
    drafted: int = 0
    drafts_accepted: int = 0


@dataclass(slots=True)
class GenerationTotals:
    """What all generations of a session have done since it was made, counted as in GenerateResult.

    `step_tokens` came of the `steps` after the prompts; `round_trips` were waited for in these steps.
    """

    prompt_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    drafted: int = 0
    drafts_accepted: int = 0
    round_trips: int = 0


class Sampler(Protocol):
    """What chooses tokens (sampling.SamplerChain)."""

    def sample(self, context: object, row: int) -> int:
        """Choose from row `row` of the context's last batch, and remember the choice."""
        ...

    def accept(self, token: int) -> None:
        """Remember a token that was not chosen here."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


class Logits(Protocol):
    """Where the rows of the last decode are (llama.LlamaContext)."""

    @property
    def handle(self) -> object:
        """What `Sampler.sample` takes."""
        ...

    def logits(self, row: int) -> F32:
        """One row [n_vocab], valid until the next decode."""
        ...


class Vocabulary(Protocol):
    """What a generation asks of the model (llama.LlamaModel)."""

    def is_end(self, token: int) -> bool:
        """Does this token end a generation?"""
        ...

    def piece(self, token: int) -> bytes:
        """Return its bytes."""
        ...


OnToken = Callable[[TokenEvent], None]
OnLogits = Callable[[int, F32], None]


class Generation:
    """See the module. `n_context` limits its own tokens, `most_drafts` what can be taken back of one step.

    `totals`: where what it does is counted too.

    `cancelled` may be set from any thread. The owner alternates `wants` with the decode of that chunk and `evaluated`,
    until `stopped_by` says why it ended; `end` then gives the result.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompt: list[int],
        *,
        vocabulary: Vocabulary,
        sampler: Sampler,
        n_context: int,
        most_drafts: int = 1 << 20,
        drafter: Drafter | None = None,
        speculation: str = "off",
        on_token: OnToken | None = None,
        on_logits: OnLogits | None = None,
        cancelled: threading.Event | None = None,
        totals: GenerationTotals | None = None,
    ) -> None:
        self._totals = totals if totals is not None else GenerationTotals()
        self.cancelled = cancelled if cancelled is not None else threading.Event()
        self.stopped_by: StoppedBy | None = None
        self.sequence = 0  # of the context; the session's choice
        self._request, self._prompt = request, prompt
        self._vocabulary, self._sampler, self._n_context = vocabulary, sampler, n_context
        self._drafter, self._speculation, self._most_drafts = drafter, speculation, most_drafts
        self._on_token, self._on_logits = on_token, on_logits
        self._stream = TextStream(request.stop)
        self._text: list[str] = []
        self._position = 0  # tokens evaluated and kept
        self._count = 0  # tokens emitted
        self._last = -1  # emitted, not yet evaluated
        self._drafts: list[int] = []
        self._steps = self._sampled = self._drafted = self._accepted = self._trips = 0
        self._started = self._prefilled = time.perf_counter()

    @property
    def prefilling(self) -> bool:
        """Is there anything left of the prompt?"""
        return self._position < len(self._prompt)

    @property
    def untouched(self) -> bool:
        """Is nothing of it evaluated yet?"""
        return self._position == 0

    def begin(self) -> None:
        """Start the clock; the drafter and the sampler see the prompt."""
        self._started = self._prefilled = time.perf_counter()
        for token in self._prompt:
            self._sampler.accept(token)
        if self._drafter is not None:
            self._drafter.accept(self._prompt)

    def wants(self, room: int) -> Chunk:
        """What to evaluate next, at least 1 and at most `room` tokens: a chunk of the prompt, or a step."""
        if self.prefilling:
            return Chunk(self._prompt[self._position : self._position + room], self._position, self.sequence)
        # The last token of all need not be evaluated, and a draft must fit the context with the token after it.
        most = min(room, self._request.max_tokens - self._count, self._n_context - self._position) - 1
        most = max(0, min(most, self._most_drafts))
        self._drafts = self._drafter.draft(most)[:most] if self._drafter is not None else []
        tokens = [self._last, *self._drafts]
        return Chunk(tokens, self._position, self.sequence, len(tokens))

    def evaluated(self, chunk: Chunk, rows: range, source: Logits, trips: int) -> int | None:
        """Take the logits of `chunk`; `trips` round trips were waited for.

        Returns the position from which on this sequence must be forgotten, None where all of it counts.
        """
        if self.prefilling:
            self._position += len(chunk.tokens)
            self._totals.prompt_tokens += len(chunk.tokens)
            if not self.prefilling:
                self._prefilled = time.perf_counter()
                self._take([], rows, source, self._position)
            return None
        taken = self._take(self._drafts, rows, source, self._position + 1)
        self._steps += 1
        self._trips += trips
        self._sampled += taken
        self._drafted += len(self._drafts)
        self._accepted += taken - 1
        self._position += taken
        totals = self._totals
        totals.steps += 1
        totals.step_tokens += taken
        totals.drafted += len(self._drafts)
        totals.drafts_accepted += taken - 1
        totals.round_trips += trips
        return self._position if taken < len(chunk.tokens) else None

    def stepped(self, n_tokens: int, seconds: float, generations: int, batch_tokens: int) -> None:
        """Tell the drafter what a decode with `n_tokens` of this generation took."""
        if self._drafter is not None and self.stopped_by is None:
            self._drafter.stepped(n_tokens, seconds, generations, batch_tokens)

    def _take(self, drafts: list[int], rows: range, source: Logits, evaluated: int) -> int:
        """Sample row after row while the drafts are right; returns how many rows counted.

        `evaluated` is how many tokens of this sequence the first row has seen.
        """
        fresh: list[int] = []
        for number, row in enumerate(rows):
            token = self._choose(row, source)
            fresh.append(token)
            if self.stopped_by is None and evaluated + number >= self._n_context:
                self.stopped_by = "context"
            if self.stopped_by is not None or number >= len(drafts) or token != drafts[number]:
                break
        self._last = fresh[-1]
        if self._drafter is not None and self.stopped_by is None:
            self._drafter.accept(fresh)
        return len(fresh)

    def _choose(self, row: int, source: Logits) -> int:
        """Sample one row and emit its token; sets `stopped_by` where that is the last."""
        request = self._request
        digest = ""
        if request.digests or self._on_logits is not None:
            logits = source.logits(row)
            if request.digests:
                digest = hashlib.sha256(logits.data).hexdigest()
            if self._on_logits is not None:
                self._on_logits(self._count, logits)
        token = self._sampler.sample(source.handle, row)
        if self._vocabulary.is_end(token):
            self.stopped_by = "end"
            return token
        shown = self._stream.feed(self._vocabulary.piece(token))
        self._text.append(shown)
        if self._on_token is not None:
            self._on_token(TokenEvent(self._count, token, shown, digest))
        self._count += 1
        if self._stream.stopped_by is not None:
            self.stopped_by = "stop"
        elif self._count >= request.max_tokens:
            self.stopped_by = "length"
        return token

    def end(self) -> GenerateResult:
        """The result, after the text that was still held back has been emitted."""
        ended = time.perf_counter()
        rest = self._stream.finish()
        if rest:
            self._text.append(rest)
            if self._on_token is not None:
                self._on_token(TokenEvent(self._count, -1, rest))
        steps, sampled = self._steps, self._sampled
        took = ended - self._prefilled
        return GenerateResult(
            text="".join(self._text),
            tokens=self._count,
            prompt_tokens=len(self._prompt),
            prompt_s=self._prefilled - self._started,
            decode_s=took,
            tokens_per_s=sampled / took if sampled else 0.0,
            steps=steps,
            accepted_per_step=sampled / steps if steps else 0.0,
            blocking_round_trips_per_token=self._trips / sampled if sampled else 0.0,
            stopped_by=self.stopped_by or "cancelled",
            speculation=self._speculation,
            drafted=self._drafted,
            drafts_accepted=self._accepted,
        )

    def close(self) -> None:
        """Free the sampler, and the drafter where it holds anything."""
        self._sampler.close()
        close = getattr(self._drafter, "close", None)
        if close is not None:
            close()
