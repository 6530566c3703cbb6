"""The one thread that runs a worker's engine, and how calls get to it and answers back.

A shell around `Engine`, which is not thread safe. Not the order of calls: that is `admission.py`. Owned by
`worker.py`. Rows are decoded and encoded here too, so that the loop thread never touches more than a frame's
head.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from swarmnode.compute.engine_api import Engine
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.codec import WireType, decode_rows, encode_rows
from swarmnode.dispatch.frames import Answer, CallFrame, Refuse, RefuseCode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """The frame that answers a call, and the engine's time for it."""

    frame: bytes
    busy_s: float
    queued_s: float
    failed: str = ""


def run_call(engine: Engine, site: Site, frame: CallFrame, arrived: float) -> Result:
    """Compute a checked call; whatever the engine raises becomes a refusal."""
    started = time.monotonic()
    queued = started - arrived
    try:
        x = decode_rows(frame.rows, WireType(frame.wire_out), frame.n_rows, site.d_in)
        tokens, experts = frame.tokens.astype(np.int32), frame.experts.astype(np.int32)
        rows = np.arange(frame.n_pairs, dtype=np.int32) if frame.row_per_pair else tokens
        if frame.partial:
            weights = None if frame.weights is None else frame.weights.astype(np.float32)
            out = engine.partial_sums(site.index, x, rows, experts, weights, tokens, frame.n_tokens)
        else:
            out = engine.raw_rows(site.index, x, rows, experts)
        busy = time.monotonic() - started
        wire, data = encode_rows(out, WireType(frame.wire_back))
    except Exception as error:
        log.info("engine_failed site=%d pairs=%d", site.index, frame.n_pairs, exc_info=True)
        why = f"{type(error).__name__}: {error}"
        refusal = Refuse(frame.id, RefuseCode.COMPUTE_FAILED, why)
        return Result(refusal.encode(), time.monotonic() - started, queued, why)
    answer = Answer(frame.id, wire, len(out), round(queued * 1e6), round(busy * 1e6), data)
    return Result(answer.encode(), busy, queued)


class EngineThread:
    """Runs what it is given, one after the other; `on_done` is called on the loop with each result."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="expert-engine", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Result], on_done: Callable[[Result], None]) -> None:
        """Have `work` done in the thread and `on_done` called with its result on the loop."""

        def both() -> Callable[[], None]:
            result = work()
            return lambda: on_done(result)

        self._queue.put(both)

    def close(self, timeout: float) -> bool:
        """Have the thread end after what it has; wait for it. False if it still runs then."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            done = work()
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
                self._loop.call_soon_threadsafe(done)
