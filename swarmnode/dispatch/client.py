"""Calls experts on other nodes: what the backbone's hook sees of the swarm.

The shell around `call.py`. It owns the attached workers, the calls in progress, one timer, and one thread for
the local engine. Not the hook, and not the decision who is asked.

Threads: made and attached on the event loop; `submit` and `result` run on decode threads. A call crosses to
the loop once (`call_soon_threadsafe`), all its workers are written to in that turn, answers are parsed as
they arrive, and the decode thread wakes when the last one needed is there and adds the rows up itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from swarmnode.compute.engine_api import Engine
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.call import Action, Call, Cancel, Fail, Finish, Late, RunLocal, Send
from swarmnode.dispatch.codec import F32
from swarmnode.dispatch.frames import Answer
from swarmnode.dispatch.hello import ModelKey, mask_of
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.pending import PendingRows
from swarmnode.dispatch.remote_worker import RemoteWorker, attach_worker
from swarmnode.dispatch.replicas import LOCAL, Candidate
from swarmnode.dispatch.request import I32, Request, Share, make_request
from swarmnode.dispatch.views import SiteStats, WorkerView
from swarmnode.errors import CallFailed, Cancelled, DispatchError
from transport.connection import Connection

log = logging.getLogger(__name__)


class ExpertClient:
    """See the module. Must be made on the loop thread. Only this client may call `local`; its owner closes it."""

    def __init__(
        self,
        sites: Iterable[Site],
        *,
        model: ModelKey,
        options: DispatchOptions | None = None,
        local: Engine | None = None,
        node: str = "",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._options = options or DispatchOptions()
        self._sites = {site.index: site for site in sites}
        self._key = model.key(node)
        self._local = _LocalEngine(local) if local is not None else None
        self._workers: dict[int, RemoteWorker] = {}
        self._numbers = itertools.count()
        self._next_attempt = itertools.count(1).__next__
        self._active: dict[int, PendingRows] = {}  # by id(); those whose call is on the loop
        self._submitted: set[PendingRows] = set()  # all that somebody may wait for
        self._owners: dict[int, PendingRows] = {}  # attempt -> its call
        self._stats = {index: SiteStats() for index in self._sites}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf
        self._closed = False

    # On the loop thread.

    async def attach(self, connection: Connection) -> RemoteWorker:
        """Make the worker at the other end callable; it is detached by itself when the connection ends.

        The connection belongs to this client from here on. Raises HelloMismatch, BadFrame, CallRefused,
        TransportError, and DispatchError once this client is closed; whatever it raises, it has closed the connection.
        """
        if self._closed:
            await connection.close(0, "client closed")
            raise DispatchError("this client is closed")
        number = next(self._numbers)
        worker = await attach_worker(connection, number, self._key, self._sites, self._options)
        if self._closed:
            await worker.close("client closed")
            raise DispatchError("this client is closed")
        for older in self._workers.values():
            if older.peer == worker.peer:
                older.retire()  # the peer came back on a new connection; the old one may answer what it has
        self._workers[number] = worker
        worker.begin(self)
        return worker

    async def detach(self, worker: RemoteWorker, why: str = "detached") -> None:
        """Stop calling a worker and close its connection; what it was asked goes to others at once."""
        await worker.close(why)

    async def close(self) -> None:
        """Release every waiting thread, say goodbye to all workers, and close their connections."""
        self._closed = True
        self.cancel_all(Cancelled("the dispatch client was closed"))
        await asyncio.gather(*(worker.close("client closed") for worker in list(self._workers.values())))
        if self._timer is not None:
            self._timer.cancel()
        if self._local is not None:
            await asyncio.to_thread(self._local.close)

    # On decode threads.

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> PendingRows:
        """Begin a call and return at once. Shapes: x [n, d_in], ids and weights [n, n_used].

        Where the recipe has its weights before the experts, x is [n × n_used, d_in] and the weights are not
        used. The arrays must stay as they are until the result is there. Raises DispatchError where they do
        not fit.
        """
        if site not in self._sites:
            raise DispatchError(f"the model has no site {site}")
        if self._closed:
            raise DispatchError("this client is closed")
        partial = self._options.mode == "partial"
        request = make_request(self._sites[site], x, ids, weights, partial=partial)
        pending = PendingRows(request, self._stats[site], self._check_alive)
        if request.n_tokens == 0:  # a prompt chunk whose logits nobody wants reaches the last layer so
            pending.finish(())
            return pending
        self._submitted.add(pending)
        try:
            self._loop.call_soon_threadsafe(self._start, pending)
        except RuntimeError:
            self._submitted.discard(pending)
            raise CallFailed("the event loop that reaches the workers is closed") from None
        return pending

    # On any thread.

    def cancel_all(self, error: Exception | None = None) -> None:
        """Release every thread that waits for rows, at once; their `result` raises `error`."""
        error = error or Cancelled("cancelled")
        for pending in list(self._submitted):
            pending.fail(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: then nothing is in progress
            self._loop.call_soon_threadsafe(self._drop_done)

    def workers(self) -> list[WorkerView]:
        """Return the attached workers' figures."""
        now = time.monotonic()
        return [worker.view(now) for worker in list(self._workers.values())]

    def site_stats(self) -> dict[int, SiteStats]:
        """Return a copy of every site's counters."""
        return {index: dataclasses.replace(stats) for index, stats in self._stats.items()}

    # What the workers report (WorkerEvents).

    def on_sent(self, attempt: int, share: Share, size: int) -> None:
        """See WorkerEvents."""
        pending = self._owners.get(attempt)
        if pending is not None and pending.call is not None:
            pending.stats.requests += 1
            pending.stats.bytes_out += size
            pending.call.sent(attempt, time.monotonic())
            self._arm(pending.call.next_due())

    def on_answer(self, attempt: int, rows: F32, answer: Answer, size: int) -> None:
        """See WorkerEvents."""
        pending = self._owners.get(attempt)
        if pending is not None:
            pending.stats.bytes_back += size
            pending.keep(attempt, rows, answer)
            self._advance(pending, lambda call, now: call.answered(attempt, now))

    def on_failure(self, attempt: int, why: str, *, overloaded: bool) -> None:
        """See WorkerEvents."""
        pending = self._owners.get(attempt)
        if pending is not None:
            self._advance(pending, lambda call, now: call.failed(attempt, why, now, overloaded=overloaded))

    def on_lost(self, worker: RemoteWorker, why: str) -> None:
        """See WorkerEvents."""
        self._workers.pop(worker.number, None)
        log.info("dispatch_worker_lost peer=%s why=%r", worker.peer, why)
        for pending in list(self._active.values()):
            self._advance(pending, lambda call, now: call.worker_lost(worker.number, why, now))

    # Calls in progress.

    def _start(self, pending: PendingRows) -> None:
        if pending.done:
            self._submitted.discard(pending)
            return
        site = pending.request.site
        pending.call = Call(
            layer=site.layer,
            experts=pending.request.experts.tolist(),
            n_expert=site.n_expert,
            swarm=_RequestView(self, pending.request),
            next_attempt=self._next_attempt,
            policy=self._options.call,
        )
        self._active[id(pending)] = pending
        self._advance(pending, lambda call, now: call.start(now))

    def _advance(self, pending: PendingRows, event: Callable[[Call, float], list[Action]]) -> None:
        """Give a call an event and carry out what follows. Whatever fails here, the waiting thread is released."""
        call = pending.call
        if call is None:
            return
        try:
            # A call that was cancelled from another thread needs nothing any more, whatever has happened to it.
            actions = deque(call.cancel() if pending.done else event(call, time.monotonic()))
            while actions:
                actions.extend(self._carry_out(pending, call, actions.popleft()))
        except Exception as error:
            log.exception("dispatch_call_failed_internally layer=%d", call.layer)
            call.done = True
            pending.fail(CallFailed(f"layer {call.layer}: internal error: {error!r}"))
        if call.done or pending.done:
            self._forget(pending)
        else:
            self._arm(call.next_due())

    def _carry_out(self, pending: PendingRows, call: Call, action: Action) -> Sequence[Action]:
        match action:
            case Send(attempt, number, pairs):
                worker = self._workers.get(number)
                if worker is None:
                    return call.failed(attempt, "left the swarm", time.monotonic())
                share = pending.request.share(pairs)
                self._owners[attempt], pending.shares[attempt] = pending, share
                worker.ask(attempt, share)
            case RunLocal(attempt, pairs):
                if self._local is None:
                    return call.failed(attempt, "no local engine", time.monotonic())
                share = pending.request.share(pairs)
                self._owners[attempt], pending.shares[attempt] = pending, share
                self._local.run(share, lambda future: self._from_local(attempt, future))
            case Cancel(attempt, number):
                if (worker := self._workers.get(number)) is not None:
                    worker.cancel(attempt)
            case Late(_, number):
                pending.stats.late += 1
                if (worker := self._workers.get(number)) is not None:
                    worker.health.fault("late", time.monotonic())
            case Finish(attempts):
                pending.finish(attempts)
            case Fail(error):
                pending.stats.failed_calls += 1
                pending.fail(error)
        return ()

    def _from_local(self, attempt: int, future: Future[F32]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            self._loop.call_soon_threadsafe(self._on_local, attempt, future)

    def _on_local(self, attempt: int, future: Future[F32]) -> None:
        pending = self._owners.get(attempt)
        if pending is None or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._advance(pending, lambda call, now: call.failed(attempt, str(error) or type(error).__name__, now))
            return
        pending.keep(attempt, future.result(), None)
        self._advance(pending, lambda call, now: call.answered(attempt, now))

    def _forget(self, pending: PendingRows) -> None:
        self._submitted.discard(pending)
        self._active.pop(id(pending), None)
        for attempt in pending.shares:
            self._owners.pop(attempt, None)

    def _drop_done(self) -> None:
        """Withdraw what belongs to calls that were cancelled from another thread."""
        for pending in list(self._active.values()):
            if pending.done:
                self._advance(pending, lambda call, now: [])

    def _check_alive(self, pending: PendingRows) -> None:
        if self._loop.is_closed():
            pending.fail(CallFailed("the event loop that reaches the workers is closed"))

    # The one timer: at the earliest moment at which time alone changes anything.

    def _arm(self, due: float) -> None:
        if due >= self._timer_due or self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_due = None, math.inf
        for pending in list(self._active.values()):
            self._advance(pending, lambda call, now: call.tick(now))

    # What a call may ask about the workers (see _RequestView).

    def candidates(self, request: Request) -> list[Candidate]:
        """Return the workers that take calls of this request now."""
        now = time.monotonic()
        seen = (worker.candidate(request, now) for worker in self._workers.values())
        return [candidate for candidate in seen if candidate is not None]

    def local_candidate(self, site: Site) -> Candidate | None:
        """Return the local engine as a candidate, if there is one for this site."""
        if self._local is None or not (held := self._local.held(site)):
            return None
        return Candidate(LOCAL, "this node", held)

    def late_after(self, number: int, n_pairs: int) -> float:
        """Return how long an attempt may take."""
        options, worker = self._options, self._workers.get(number)
        if worker is None:
            return options.late_ceiling_s
        return worker.latency.late_after(
            n_pairs,
            factor=options.late_factor,
            floor_s=options.late_floor_s,
            ceiling_s=options.late_ceiling_s,
        )


class _RequestView:
    """The swarm as the call for one request sees it (call.Swarm)."""

    def __init__(self, client: ExpertClient, request: Request) -> None:
        self._client, self._request = client, request

    def candidates(self) -> list[Candidate]:
        return self._client.candidates(self._request)

    def local(self) -> Candidate | None:
        return self._client.local_candidate(self._request.site)

    def late_after(self, worker: int, n_pairs: int) -> float:
        return self._client.late_after(worker, n_pairs)


class _LocalEngine:
    """The backbone's own engine in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-experts")
        self._held: dict[int, tuple[tuple[int, ...], int]] = {}

    def held(self, site: Site) -> int:
        """Return the bitmap of the experts held at a site; worked out again only when they have changed."""
        experts = self._engine.holdings.get(site.index, ())
        known = self._held.get(site.index)
        if known is None or known[0] is not experts:
            known = self._held[site.index] = (experts, mask_of(experts))
        return known[1]

    def run(self, share: Share, done: Callable[[Future[F32]], None]) -> None:
        self._thread.submit(share.compute, self._engine).add_done_callback(done)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
