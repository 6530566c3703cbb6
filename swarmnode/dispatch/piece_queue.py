"""The pieces of large calls on their way to each worker: how a call is cut, and how many of its pieces go at once.

A shell around `pieces.py`, loop thread only. To each worker goes one piece per turn of the loop, so that the first is
on its way while the next is encoded, and no more at once than keep it busy, so that a small call finds a short queue.
Calls that wait for the same worker take turns, so that none waits for all of another.
Owned by `client.py`, which reports what became of them. Calls of decode size are none of this.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarmnode.compute.recipe import Site
from swarmnode.dispatch.call_actions import Send
from swarmnode.dispatch.codec import rows_size
from swarmnode.dispatch.cut_trials import CutTrials
from swarmnode.dispatch.cutting import Shared
from swarmnode.dispatch.frames import ANSWER_SIZE, Answer
from swarmnode.dispatch.health import DECODE_PAIRS, Latency
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.pace import Pace, PaceMeter
from swarmnode.dispatch.pending import PendingRows
from swarmnode.dispatch.pieces import (
    Load,
    best_cut,
    duration,
    equal_cut,
    fewest,
    recommended_batch,
    token_seconds,
    window,
)
from swarmnode.dispatch.request import Request, Share
from transport.connection import Connection

PAIR_BYTES = 10  # of a CALL besides its rows: token, expert, weight; at most
HandOver = Callable[[PendingRows, Send], bool]


@dataclass(slots=True)
class _Worker:
    """One worker. `window`: pieces that keep it busy; `handed`: it was given one in this turn."""

    meter: PaceMeter
    connection: Connection
    max_calls: int  # that it takes at once
    window: int = 1
    waiting: dict[PendingRows, deque[Send]] = field(default_factory=dict)  # the call whose turn it is first
    handed: bool = False

    @property
    def has_room(self) -> bool:
        return self.meter.under_way < self.window and not self.handed

    def take(self) -> tuple[PendingRows, Send]:
        """Take the first piece of the call whose turn it is; this call comes last then."""
        pending, sends = next(iter(self.waiting.items()))
        send = sends.popleft()
        del self.waiting[pending]
        if sends:
            self.waiting[pending] = sends
        return pending, send


class PieceQueues:
    """See the module. `hand_over` sends a piece that has waited; False where nobody wants it any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: DispatchOptions, hand_over: HandOver) -> None:
        self._loop, self._options, self._hand_over = loop, options, hand_over
        self._workers: dict[int, _Worker] = {}
        self._turn_due = False
        self._trials = CutTrials()
        self._tried: dict[int, tuple[Hashable, int, bool]] = {}  # by the id() of a request: its kind, units, and how

    def attached(self, number: int, connection: Connection, max_calls: int) -> None:
        """Know a worker."""
        meter = PaceMeter(self._options.near_s, connection.stats().min_rtt_s or 0.0)
        self._workers[number] = _Worker(meter, connection, max_calls)

    def lost(self, number: int) -> None:
        """Forget a worker, and what waits for it."""
        self._workers.pop(number, None)

    def may_go(self, pending: PendingRows, send: Send) -> bool:
        """Whether a piece may go in this turn; else it waits, and is handed over later."""
        worker = self._workers.get(send.worker)
        if worker is None:
            return True
        if worker.has_room and not worker.waiting:
            self._go(worker)
            return True
        worker.waiting.setdefault(pending, deque()).append(send)
        self._wake()
        return False

    def sent(self, number: int, attempt: int, share: Share, size: int, now: float) -> None:
        """Hear that a call of `size` bytes left."""
        if len(share.pairs) > DECODE_PAIRS and (worker := self._workers.get(number)) is not None:
            row = self._row_bytes(share.request.site, rows=share.n_rows_back)[1]
            worker.meter.sent(attempt, len(share.pairs), size, now, ANSWER_SIZE + row)

    def answered(self, number: int, attempt: int, share: Share, answer: Answer, size: int) -> None:
        """Hear a good answer of `size` bytes: it shows the worker's pace."""
        worker = self._workers.get(number)
        if len(share.pairs) <= DECODE_PAIRS or worker is None:
            return
        worker.meter.answered(
            attempt,
            int(np.count_nonzero(np.bincount(share.experts))),
            size,
            busy_s=answer.busy_us / 1e6,
            queued_s=answer.queued_us / 1e6,
            rtt_s=worker.connection.stats().min_rtt_s or 0.0,
            now=time.monotonic(),
        )
        self._wake()

    def settled(self, number: int, attempt: int) -> None:
        """Hear that nothing is to be expected of an attempt any more."""
        if (worker := self._workers.get(number)) is not None:
            worker.meter.dropped(attempt)
            self._wake()

    def late_after(self, number: int, n_pairs: int, attempt: int, otherwise: Latency) -> float:
        """Return how long the answer to a call of any size may take from now; `otherwise` knows all calls' times."""
        worker = self._workers.get(number)
        if worker is None:
            return otherwise.late_after(n_pairs, self._options.deadlines)
        ahead_s = worker.meter.ahead(attempt) if worker.meter.under_way else 0.0
        if n_pairs <= DECODE_PAIRS:
            return ahead_s + otherwise.late_after(n_pairs, self._options.deadlines)
        return ahead_s + worker.meter.late_after(n_pairs, self._options.deadlines, otherwise)

    def answering_until(self, number: int, heard: float, otherwise: Latency) -> float:
        """Return until when a worker, last `heard` then, keeps what waits for it waiting rightly (see call.Swarm).

        Until the first of its pieces is late; where it has none, `queue_s` from its last answer to anything.
        """
        worker = self._workers.get(number)
        if worker is not None and worker.meter.under_way:
            return worker.meter.answering_until(self._options.deadlines, otherwise)
        return heard + self._options.call.queue_s

    def prompt_chunk(self, sites: Iterable[Site], most: int) -> int:
        """Return how many of `most` tokens of a prompt should go in one step. Any thread.

        `most` while nothing is measured. Like large calls are spread, each worker is taken to compute as much as it is
        fast; what waits for the longest round trip is all of them.
        """
        paces = [worker.meter.pace.coarse() for worker in list(self._workers.values())]
        largest = max(sites, key=lambda site: site.n_expert / site.n_used, default=None)
        if largest is None:
            return most
        partial = self._options.mode == "partial"
        token_s = token_seconds(paces, largest.n_used, self._row_bytes(largest), partial=partial)
        if not token_s:
            return most
        rtt_s = max(pace.rtt_s for pace in paces)
        return recommended_batch(rtt_s, token_s, n_expert=largest.n_expert, n_used=largest.n_used, most=most)

    def costs(self, request: Request) -> dict[int, tuple[float, float]]:
        """Return what a pair of a large call costs each worker, and what the call costs besides (s, 0 unknown)."""
        pairs = request.site.n_used if request.partial else 1  # that a row stands for at best
        row_bytes = max(self._row_bytes(request.site)) / pairs
        paces = {number: worker.meter.pace for number, worker in self._workers.items()}
        return {number: (pace.per_pair(row_bytes), pace.rtt_s) for number, pace in paces.items()}

    def cut(self, request: Request, loads: Sequence[Shared], units: int, most: int) -> tuple[int, ...]:
        """See call.Swarm: as suits the worker that will need the longest."""
        known = [(shared, worker) for shared in loads if (worker := self._workers.get(shared.worker)) is not None]
        if not self._options.call.pieces or not known:
            for _, worker in known:
                worker.window = worker.max_calls
            return equal_cut(units, most)
        longest = -1.0
        chosen: tuple[int, ...] = ()
        whole: tuple[int, ...] = ()
        plans: list[tuple[_Worker, Load, Pace]] = []
        for shared, worker in known:
            load, pace = self._load(request, shared, units), worker.meter.pace.coarse()
            cut = best_cut(load, pace, most, worker.max_calls)
            plans.append((worker, load, pace))
            if (lasts := duration(cut, load, pace, worker.max_calls)) > longest:
                longest, chosen, whole = lasts, cut, fewest(load, pace, most)
        kind = request.site.d_in, request.site.d_out, len(known), units.bit_length()
        if len(chosen) > len(whole) and not self._trials.should_cut(kind):
            chosen = whole
        self._tried.setdefault(id(request), (kind, units, len(chosen) > len(whole)))  # not what is asked anew
        for worker, load, pace in plans:
            worker.window = window(chosen, load, pace, worker.max_calls)
        return chosen

    def finished(self, request: Request, seconds: float) -> None:
        """Hear that a call has its result, so long after it began."""
        if (tried := self._tried.pop(id(request), None)) is not None:
            kind, units, was_cut = tried
            self._trials.took(kind, seconds / units, cut=was_cut)

    def forget(self, request: Request) -> None:
        """Hear that a call is over."""
        self._tried.pop(id(request), None)

    def _load(self, request: Request, shared: Shared, units: int) -> Load:
        out, back = self._row_bytes(request.site)
        # In tenths: much the same call is cut in the same way.
        pairs, touched = (round(10 * n / units) / 10 for n in (shared.pairs, shared.units))
        return Load(
            units=units,
            pairs_per_unit=pairs,
            experts=shared.experts,
            out_bytes=out * (pairs if request.row_per_pair else touched) + PAIR_BYTES * pairs,
            back_bytes=back * touched,
            whole_experts=not request.partial,
        )

    def _row_bytes(self, site: Site, rows: int = 1) -> tuple[int, int]:
        """A row of x on the wire, and a row of the answer; or so many rows."""
        wire_out, wire_back = self._options.wires(site.index)
        return rows_size(wire_out, rows, site.d_in), rows_size(wire_back, rows, site.d_out)

    # The turns.

    def _go(self, worker: _Worker) -> None:
        worker.handed = True
        if not self._turn_due:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _wake(self) -> None:
        if not self._turn_due and any(worker.waiting and worker.has_room for worker in self._workers.values()):
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Hand over what comes next, to each worker one piece."""
        self._turn_due = False
        for worker in list(self._workers.values()):
            worker.handed = False
        for worker in list(self._workers.values()):
            while worker.waiting and worker.has_room:
                if self._hand_over(*worker.take()):
                    self._go(worker)
