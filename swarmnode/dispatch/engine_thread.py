"""How a worker's engine is called: one function, and the thread that runs it for all but the shortest calls.

A shell around `Engine`, which is not thread safe: the loop thread may call `run_call` itself only while the
engine's thread has nothing to do. Who computes what, and in which order, is decided by `worker.py`, which owns
the thread, and by `admission.py`. Rows are decoded and encoded here, on the thread that computes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from swarmnode.errors import BadFrame

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Result:
    """The frame that answers a call, and the engine's time for it. `failed` says why it was `refused`."""

    frame: bytes
    busy_s: float
    queued_s: float
    refused: RefuseCode | None = None
    failed: str = ""


OnDone = Callable[[Result], None]
# Hears what an action returned, or what it raised.
OnAction = Callable[[object, BaseException | None], None]


def run_call(engine: Engine, site: Site, frame: CallFrame, arrived: float) -> Result:
    """Compute a checked call; whatever fails on the way becomes a refusal.

    The bytes of its rows are judged here, by `decode_rows`: what no encoder makes is a BAD_REQUEST.
    """
    started = time.monotonic()
    queued = started - arrived
    try:
        try:
            x = decode_rows(frame.rows, WireType(frame.wire_out), frame.n_rows, site.d_in)
        except BadFrame as error:
            return _refusal(frame, str(error), time.monotonic() - started, queued, RefuseCode.BAD_REQUEST)
        tokens, experts = frame.tokens.astype(np.int32), frame.experts.astype(np.int32)
        rows = np.arange(frame.n_pairs, dtype=np.int32) if frame.row_per_pair else tokens
        if frame.partial:
            weights = None if frame.weights is None else frame.weights.astype(np.float32)
            out = engine.partial_sums(site.index, x, rows, experts, weights, tokens, frame.n_tokens)
        else:
            out = engine.raw_rows(site.index, x, rows, experts)
        busy = time.monotonic() - started
        wire, data = encode_rows(out, WireType(frame.wire_back))
        answer = Answer(frame.id, wire, len(out), round(queued * 1e6), round(busy * 1e6), data)
        return Result(answer.encode(), busy, queued)
    except Exception as error:
        log.info("engine_failed site=%d pairs=%d", site.index, frame.n_pairs, exc_info=True)
        return _refusal(frame, f"{type(error).__name__}: {error}", time.monotonic() - started, queued)


class EngineThread:
    """Runs calls one after the other; `on_done` is called on the loop with the result of each."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self._loop = loop
        self._engine = engine
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="expert-engine", daemon=True)
        self._thread.start()

    def run(self, site: Site, frame: CallFrame, arrived: float, on_done: OnDone) -> None:
        """Have a checked call computed; see `run_call`."""
        self._queue.put(functools.partial(self._compute, site, frame, arrived, on_done))

    def run_action(self, action: Callable[[], object], on_done: OnAction) -> None:
        """Have something else done to the engine, after the calls that it has and before those it is given later."""
        self._queue.put(functools.partial(self._act, action, on_done))

    def close(self, timeout: float) -> bool:
        """Have the thread end after what it has; wait for it. False if it still runs then."""
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # it may keep a change's memory, and the next may be long in coming

    def _compute(self, site: Site, frame: CallFrame, arrived: float, on_done: OnDone) -> None:
        try:
            result = run_call(self._engine, site, frame, arrived)
        except BaseException as error:  # not even exit() may end this thread: every later call would hang
            log.exception("engine_thread_survived site=%d pairs=%d", site.index, frame.n_pairs)
            result = _refusal(frame, type(error).__name__, 0.0, 0.0)
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            self._loop.call_soon_threadsafe(on_done, result)

    def _act(self, action: Callable[[], object], on_done: OnAction) -> None:
        result: object = None
        raised: BaseException | None = None
        try:
            result = action()
        except BaseException as error:  # as above
            raised = error
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(on_done, result, raised)


def _refusal(
    frame: CallFrame, why: str, busy: float, queued: float, code: RefuseCode = RefuseCode.COMPUTE_FAILED
) -> Result:
    return Result(Refuse(frame.id, code, why).encode(), busy, queued, code, why)
