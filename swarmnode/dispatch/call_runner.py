"""The calls of one client that are in progress: what `call.py` decides is carried out, what happens is told to it.

Owned by `client.py`; loop thread only, but for what is marked otherwise. It keeps which attempt belongs to which call,
the one timer, and who else hears of an attempt: the spot checks, the pieces' queues, the counters. Not the decision who
is asked, and nothing of how workers come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from swarmnode.dispatch.call import Call
from swarmnode.dispatch.call_actions import Action, Cancel, Fail, Finish, Late, RunLocal, Send
from swarmnode.dispatch.checks import Checks, Verdict
from swarmnode.dispatch.codec import F32
from swarmnode.dispatch.frames import Answer
from swarmnode.dispatch.health import DECODE_PAIRS
from swarmnode.dispatch.local_experts import LocalExperts
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.pending import PendingRows
from swarmnode.dispatch.piece_queue import PieceQueues
from swarmnode.dispatch.prober import Prober
from swarmnode.dispatch.quarantine import OnQuarantine, Quarantine
from swarmnode.dispatch.remote_worker import RemoteWorker
from swarmnode.dispatch.replicas import LOCAL
from swarmnode.dispatch.request import Share
from swarmnode.dispatch.roster import Roster
from swarmnode.dispatch.swarm_view import RequestView, SwarmView
from swarmnode.dispatch.watch import Watch
from swarmnode.errors import CallFailed

log = logging.getLogger(__name__)


class CallRunner:
    """See the module: implements `remote_worker.WorkerEvents` and `pending.Owner`. Made on the loop thread.

    `make_checks` makes the spot checks of these calls; `on_quarantine` as in ExpertClient.
    """

    def __init__(
        self,
        roster: Roster,
        local: LocalExperts | None,
        options: DispatchOptions,
        make_checks: Callable[[CallRunner], Checks],
        on_quarantine: OnQuarantine | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._options, self._local = options, local
        self._workers = roster.attached
        self.roster = roster
        self.next_attempt = itertools.count(1).__next__
        self.pieces = PieceQueues(self._loop, options, self._hand_over)
        self.swarm = SwarmView(roster, self.pieces, local, options)
        self.quarantine = Quarantine(roster, self.distrust, on_quarantine)
        self._prober = Prober(roster, options.probe_s, self.next_attempt)
        self._watch = Watch(roster.attached, options.late_slack_s, self._on_silent)
        self._active: dict[int, PendingRows] = {}  # by id(); those whose call is on the loop
        self._submitted: set[PendingRows] = set()  # all that somebody may wait for
        self._owners: dict[int, PendingRows] = {}  # attempt -> its call
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf
        self._closed = False
        self._checks = make_checks(self)

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._active)

    def close(self) -> None:
        """From here on, time alone changes nothing."""
        self._closed = True
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()

    # On any thread.

    def submit(self, pending: PendingRows) -> None:
        """Begin a call: where its experts are all kept here, without the loop. Raises CallFailed if that is closed."""
        request = pending.request
        self._submitted.add(pending)
        try:
            if self._local is not None and self._local.keeps_all(request):
                share = request.share(range(len(request.experts)))
                self._local.run(share, lambda future: self._from_kept(pending, share, future))
            else:
                self._loop.call_soon_threadsafe(self._start, pending)
        except RuntimeError:
            self._submitted.discard(pending)
            raise CallFailed("the event loop that reaches the workers is closed") from None

    def fail_all(self, error: Exception) -> None:
        """Release every thread that waits for rows, at once."""
        for pending in list(self._submitted):
            pending.fail(error)

    # What the workers report (WorkerEvents).

    def on_sent(self, attempt: int, share: Share, size: int) -> None:
        """See WorkerEvents."""
        pending = self._owners.get(attempt)
        if pending is not None and pending.call is not None:
            pending.stats.requests += 1
            pending.stats.bytes_out += size
            now = time.monotonic()
            self.pieces.sent(pending.asked[attempt], attempt, share, size, now)
            pending.call.sent(attempt, now)
            self._arm(pending.call.next_due())
            if len(share.pairs) > DECODE_PAIRS:
                self._watch.begun()

    def on_answer(self, attempt: int, rows: F32, answer: Answer, size: int) -> None:
        """See WorkerEvents."""
        pending = self._owners.get(attempt)
        if pending is None:
            self._checks.computed(attempt, rows)
            return
        pending.stats.bytes_back += size
        pending.keep(attempt, rows, answer)
        share, number = pending.shares[attempt], pending.asked.get(attempt, LOCAL)
        self.pieces.answered(number, attempt, share, answer, size)
        if self._checks.answered(attempt, number, share, rows) is Verdict.COUNTS:
            pending.counts(attempt)
            self.advance(pending, lambda call, now: call.answered(attempt, now))

    def on_failure(self, attempt: int, why: str, *, overloaded: bool) -> None:
        """See WorkerEvents."""
        pending = self._owners.get(attempt)
        if pending is None:
            self._checks.dropped(attempt)
            return
        self._checks.forget(attempt)
        self.pieces.settled(pending.asked.get(attempt, LOCAL), attempt)
        self.advance(pending, lambda call, now: call.failed(attempt, why, now, overloaded=overloaded))

    def on_bad_answer(self, worker: RemoteWorker, why: str) -> None:
        """See WorkerEvents."""
        if worker.bad_answers >= self._options.check.bad_answers_allowed:
            self.quarantine.add(worker, f"{why}, {worker.bad_answers} times")

    def on_lost(self, worker: RemoteWorker, why: str) -> None:
        """See WorkerEvents."""
        self.roster.lost(worker)
        self.pieces.lost(worker.number)
        log.info("dispatch_worker_lost peer=%s why=%r", worker.peer, why)
        for pending in list(self._active.values()):
            self.advance(pending, lambda call, now: call.worker_lost(worker.number, why, now))
        self._checks.lost(worker.number)

    def _on_silent(self, worker: RemoteWorker) -> None:
        log.info("dispatch_worker_silent peer=%s", worker.peer)
        for pending in list(self._active.values()):
            self.advance(pending, lambda call, now: call.silent(worker.number, now))

    # What the checks ask for (check_host.py).

    def pending(self, attempt: int) -> PendingRows | None:
        """Return the call that an attempt belongs to, while it is in progress."""
        return self._owners.get(attempt)

    def compute_here(self, attempt: int, share: Share) -> bool:
        """Have this node's own engine compute a share, for a check. False if there is none."""
        if self._local is None:
            return False
        self._local.run(share, lambda future: self._from_local(attempt, future))
        return True

    def distrust(self, number: int, why: str) -> None:
        """Do without a worker in all calls: also without what it has answered to them."""
        for pending in list(self._active.values()):
            self.advance(pending, lambda call, now: call.distrust(number, why, now))
        self._checks.lost(number)

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
            swarm=RequestView(self.swarm, pending.request),
            next_attempt=self.next_attempt,
            policy=self._options.call,
            kept=self._local.kept(site.index) if self._local is not None else 0,
            per_token=site.n_used if pending.request.partial else 0,
        )
        self._active[id(pending)] = pending
        self.advance(pending, functools.partial(_begin, pending))
        self._prober.begun(pending.request)

    def advance(self, pending: PendingRows, event: Callable[[Call, float], list[Action]]) -> None:
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
            case Send(pairs=pairs):
                if len(pairs) <= DECODE_PAIRS or self.pieces.may_go(pending, action):
                    return self._send(pending, call, action)
            case RunLocal(attempt, pairs):
                if self._local is None:
                    return call.failed(attempt, "no local engine", time.monotonic())
                share = pending.request.share(pairs)
                self._owners[attempt], pending.shares[attempt] = pending, share
                self._local.run(share, lambda future: self._from_local(attempt, future))
            case Cancel(attempt, number):
                self._checks.forget(attempt)
                if (worker := self._workers.get(number)) is not None:
                    worker.cancel(attempt)
                    self.pieces.settled(number, attempt)
            case Late(_, number):
                pending.stats.late += 1
                if (worker := self._workers.get(number)) is not None:
                    worker.late(time.monotonic())
            case Finish(attempts):
                self.pieces.finished(pending.request, pending.age_s)
                pending.finish(attempts)
            case Fail(error):
                pending.stats.failed_calls += 1
                pending.fail(error)
        return ()

    def _send(self, pending: PendingRows, call: Call, send: Send) -> Sequence[Action]:
        worker = self._workers.get(send.worker)
        if worker is None:
            return call.failed(send.attempt, "left the swarm", time.monotonic())
        share = pending.request.share(send.pairs)
        self._owners[send.attempt], pending.shares[send.attempt] = pending, share
        pending.asked[send.attempt] = send.worker
        self._checks.asked(send.attempt, send.worker, share)
        worker.ask(send.attempt, share)
        return ()

    def _hand_over(self, pending: PendingRows, send: Send) -> bool:
        """Send a piece that has waited, if it is still wanted (PieceQueues)."""
        if pending.call is None or not pending.call.wants(send.attempt):
            return False
        self.advance(pending, lambda call, _now: list(self._send(pending, call, send)))
        return True

    def _from_local(self, attempt: int, future: Future[F32]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            self._loop.call_soon_threadsafe(self._on_local, attempt, future)

    def _from_kept(self, pending: PendingRows, share: Share, future: Future[F32]) -> None:
        """On the local engine's thread: a call that nobody else was needed for is done, or begins anew with others."""
        if not future.cancelled() and future.exception() is None:
            pending.finish_here(share, future.result())
            self._submitted.discard(pending)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: PendingRows notices
            self._loop.call_soon_threadsafe(self._start, pending)

    def _on_local(self, attempt: int, future: Future[F32]) -> None:
        pending = self._owners.get(attempt)
        if pending is None:
            if future.cancelled() or future.exception() is not None:
                self._checks.dropped(attempt)
            else:
                self._checks.computed(attempt, future.result())
            return
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self.advance(pending, lambda call, now: call.failed(attempt, str(error) or type(error).__name__, now))
            return
        pending.keep(attempt, future.result(), None)
        pending.counts(attempt)
        self.advance(pending, lambda call, now: call.answered(attempt, now))

    def _forget(self, pending: PendingRows) -> None:
        self._submitted.discard(pending)
        self._active.pop(id(pending), None)
        large = len(pending.request.experts) > DECODE_PAIRS
        self.pieces.forget(pending.request)
        for attempt in pending.shares:
            self._owners.pop(attempt, None)
            self._checks.forget(attempt)
            if large:
                self.pieces.settled(pending.asked.get(attempt, LOCAL), attempt)

    def on_failed(self, pending: PendingRows) -> None:
        """See pending.Owner. Perhaps the loop does not know yet: then what the call has asked for is withdrawn."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: then nothing is in progress
            self._loop.call_soon_threadsafe(self._withdraw, pending)

    def _withdraw(self, pending: PendingRows) -> None:
        """Have the workers hear that nobody waits for a call any more."""
        if id(pending) in self._active:
            self.advance(pending, lambda call, now: [])

    def check_alive(self, pending: PendingRows) -> None:
        """See pending.Owner."""
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
            self.advance(pending, lambda call, now: call.tick(now))


def _begin(pending: PendingRows, call: Call, now: float) -> list[Action]:
    actions = call.start(now)
    pending.cut_into(call.cells)
    return actions
