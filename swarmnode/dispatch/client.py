"""Calls experts on other nodes: what the backbone's hook sees of the swarm.

The shell around `call.py` and `checks.py`. It owns the attached workers, the calls in progress, one timer, and one
thread for the local engine. Not the hook, and not the decision who is asked.

Threads: made and attached on the event loop; `submit` and `result` run on decode threads. A call crosses to
the loop once (`call_soon_threadsafe`), all its workers are written to in that turn, answers are parsed as
they arrive, and the decode thread wakes when the last one needed is there and adds the rows up itself. A call whose
experts are all kept here goes to the local engine's thread and back, and never sees the loop.

A large call goes in pieces, which may have to wait for their turn (`piece_queue.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from swarmnode.compute.engine_api import Engine
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.call import Action, Call, Cancel, Fail, Finish, Late, RunLocal, Send
from swarmnode.dispatch.checks import Checks, Verdict
from swarmnode.dispatch.codec import F32, WireType
from swarmnode.dispatch.cutting import Shared
from swarmnode.dispatch.frames import Answer, Hello
from swarmnode.dispatch.health import DECODE_PAIRS
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.local_experts import LocalExperts
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.pending import PendingRows
from swarmnode.dispatch.piece_queue import PieceQueues
from swarmnode.dispatch.remote_worker import RemoteWorker, attach_worker
from swarmnode.dispatch.replicas import LOCAL, Candidate
from swarmnode.dispatch.request import I32, Request, Share, make_request
from swarmnode.dispatch.row_screen import Screen
from swarmnode.dispatch.spot_check import SpotChecks
from swarmnode.dispatch.views import SiteStats, WorkerView
from swarmnode.errors import CallFailed, Cancelled, DispatchError
from transport.connection import Connection
from transport.stream import Stream

MAX_FORMER = 4096  # workers that are gone and may be named yet: their answers may be under check
PROBE_EVERY_S = 1.0  # how often it is looked whether a worker has been idle for long
PROBE_UNSURE_S = 1.0  # for one whose speed is not known, or was another the last time: it takes some answers to be sure
_UNFORESEEABLE = secrets.SystemRandom()
OnRouting = Callable[[int, I32], None]
OnQuarantine = Callable[[str, str], None]
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Who:
    """What stays known of a worker whose connection has ended; see RemoteWorker."""

    number: int
    peer: str
    name: str
    label: str


class ExpertClient:
    """See the module. Must be made on the loop thread. Only this client may call `local`; its owner closes it.

    on_routing: called once per submit, on the decode thread, with the site and the experts chosen, int32[n, n_used],
      which it must not keep. on_quarantine: called on the loop thread with a peer and why its answers are not used any
      more in this run. random: the source of the spot checks' chance, in [0, 1). screen: see `row_screen.py`.
    """

    def __init__(
        self,
        sites: Iterable[Site],
        *,
        model: ModelKey,
        options: DispatchOptions | None = None,
        local: Engine | None = None,
        node: str = "",
        on_routing: OnRouting | None = None,
        on_quarantine: OnQuarantine | None = None,
        random: Callable[[], float] = _UNFORESEEABLE.random,
        screen: Screen | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._options = options or DispatchOptions()
        self._sites = {site.index: site for site in sites}
        self._key = model.key(node)
        self._local = LocalExperts(local) if local is not None else None
        self._on_routing, self._on_quarantine = on_routing, on_quarantine
        self._quarantined: dict[str, str] = {}  # peer -> why
        self._suspected: dict[str, str] = {}
        self._former: OrderedDict[int, _Who] = OrderedDict()  # workers that are gone, by number
        check = self._options.check
        self._checks = Checks(
            _CheckHost(self),
            SpotChecks(check, random, screened=screen is not None),
            self._options.coarsest_wire,
            screen,
        )
        self._probe_due = 0.0
        self._to_probe: list[RemoteWorker] = []
        self._workers: dict[int, RemoteWorker] = {}
        self._pieces = PieceQueues(self._loop, self._options, self._hand_over)
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

    @property
    def greeting(self) -> bytes:
        """What a stream to a worker begins with: for those who send it with the dial (Endpoint.dial_with)."""
        return Hello(self._key).encode()

    async def attach(self, connection: Connection, greeted: Stream | None = None) -> RemoteWorker:
        """Make the worker at the other end callable; it is detached by itself when the connection ends.

        `greeted`: a stream of this connection that began with `greeting`; without it, one is opened.

        The connection belongs to this client from here on. Raises HelloMismatch, BadFrame, CallRefused,
        TransportError, and DispatchError once this client is closed; whatever it raises, it has closed the connection.
        """
        if self._closed:
            await connection.close(0, "client closed")
            raise DispatchError("this client is closed")
        number = next(self._numbers)
        worker = await attach_worker(connection, number, self._key, self._sites, self._options, greeted)
        if self._closed:
            await worker.close("client closed")
            raise DispatchError("this client is closed")
        for older in self._workers.values():
            if older.peer == worker.peer:
                older.retire()  # the peer came back on a new connection; the old one may answer what it has
        worker.quarantined = self._quarantined.get(worker.peer, "")
        worker.suspected = self._suspected.get(worker.peer, "")
        self._workers[number] = worker
        self._pieces.attached(number, connection, worker.limits.max_calls)
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
        pending = PendingRows(request, self._stats[site], self)
        if request.n_tokens == 0:  # a prompt chunk whose logits nobody wants reaches the last layer so
            pending.finish(())
            return pending
        if self._on_routing is not None:
            self._report_routing(site, ids)
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
        return pending

    def _report_routing(self, site: int, ids: I32) -> None:
        assert self._on_routing is not None
        try:
            self._on_routing(site, ids)
        except Exception:  # statistics are not worth a generation
            log.exception("dispatch_on_routing_failed site=%d", site)
            self._on_routing = None

    # On any thread.

    def keep_local(self, masks: Mapping[int, int]) -> None:
        """Compute these experts (site -> bitmap) on this node's own engine before anybody is asked, from now on.

        What its engine does not hold is asked of others as before. Calls in progress are not changed.
        """
        if self._local is not None:
            self._local.keep(masks, self._sites)

    def quarantined(self) -> dict[str, str]:
        """Return the peers that are not asked any more in this run, and why."""
        return dict(self._quarantined)

    def cancel_all(self, error: Exception | None = None) -> None:
        """Release every thread that waits for rows, at once; their `result` raises `error`."""
        error = error or Cancelled("cancelled")
        for pending in list(self._submitted):
            pending.fail(error)

    def workers(self) -> list[WorkerView]:
        """Return the attached workers' figures."""
        now = time.monotonic()
        return [worker.view(now) for worker in list(self._workers.values())]

    def wires(self, site: int) -> tuple[WireType, WireType]:
        """Return the types in which x goes out to a site and its answers come back."""
        return self._options.wires(site)

    def prompt_chunk(self, most: int) -> int:
        """Return how many of `most` tokens of a prompt should go in one step, as far as the workers' pace is known."""
        return self._pieces.prompt_chunk(self._sites.values(), most)

    def recent(self, peer: str) -> tuple[float | None, float] | None:
        """Return what a peer's last calls of decode size took, s, and their rows; None if it is not attached."""
        for worker in reversed(self._workers.values()):
            if worker.peer == peer and not worker.leaving:
                return worker.latency.recent_s, worker.latency.recent_pairs
        return None

    @property
    def busy(self) -> bool:
        """Whether a call is under way. Loop thread; costs nothing."""
        return bool(self._active)

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
            now = time.monotonic()
            self._pieces.sent(pending.asked[attempt], attempt, share, size, now)
            pending.call.sent(attempt, now)
            self._arm(pending.call.next_due())

    def on_answer(self, attempt: int, rows: F32, answer: Answer, size: int) -> None:
        """See WorkerEvents."""
        pending = self._owners.get(attempt)
        if pending is None:
            self._checks.computed(attempt, rows)
            return
        pending.stats.bytes_back += size
        pending.keep(attempt, rows, answer)
        share, number = pending.shares[attempt], pending.asked.get(attempt, LOCAL)
        self._pieces.answered(number, attempt, share, answer, size)
        if self._checks.answered(attempt, number, share, rows) is Verdict.COUNTS:
            pending.counts(attempt)
            self._advance(pending, lambda call, now: call.answered(attempt, now))

    def on_failure(self, attempt: int, why: str, *, overloaded: bool) -> None:
        """See WorkerEvents."""
        pending = self._owners.get(attempt)
        if pending is None:
            self._checks.dropped(attempt)
            return
        self._checks.forget(attempt)
        self._pieces.settled(pending.asked.get(attempt, LOCAL), attempt)
        self._advance(pending, lambda call, now: call.failed(attempt, why, now, overloaded=overloaded))

    def on_bad_answer(self, worker: RemoteWorker, why: str) -> None:
        """See WorkerEvents."""
        if worker.bad_answers >= self._options.check.bad_answers_allowed:
            self.quarantine(worker, f"{why}, {worker.bad_answers} times")

    def on_lost(self, worker: RemoteWorker, why: str) -> None:
        """See WorkerEvents."""
        self._workers.pop(worker.number, None)
        self._pieces.lost(worker.number)
        self._former[worker.number] = _Who(worker.number, worker.peer, worker.name, worker.label)
        while len(self._former) > MAX_FORMER:
            self._former.popitem(last=False)
        log.info("dispatch_worker_lost peer=%s why=%r", worker.peer, why)
        for pending in list(self._active.values()):
            self._advance(pending, lambda call, now: call.worker_lost(worker.number, why, now))
        self._checks.lost(worker.number)

    def quarantine(self, worker: RemoteWorker | _Who, why: str) -> None:
        """Ask this worker's peer nothing more in this run; calls in progress do without it, also its answers.

        Whether it is connected or not: who disconnects before its answer is looked at gains nothing.
        """
        is_new = worker.peer not in self._quarantined
        why = self._quarantined.setdefault(worker.peer, why)
        for connected in self._connections_of(worker.peer):
            connected.quarantined = why
        gone = [former.number for former in self._former.values() if former.peer == worker.peer]
        for number in {worker.number, *gone, *(one.number for one in self._connections_of(worker.peer))}:
            self._distrust(number, why)
        if not is_new:
            return
        log.warning("dispatch_quarantined peer=%s name=%r why=%r", worker.peer, worker.name, why)
        if self._on_quarantine is not None:
            try:
                self._on_quarantine(worker.peer, why)
            except Exception:
                log.exception("dispatch_on_quarantine_failed peer=%s", worker.peer)

    def suspect(self, worker: RemoteWorker | _Who, why: str) -> None:
        """Ask this worker's peer last in this run: others say that it was wrong, and this node cannot tell."""
        if worker.peer in self._suspected:
            return
        self._suspected[worker.peer] = why
        log.warning("dispatch_suspected peer=%s name=%r why=%r", worker.peer, worker.name, why)
        for connected in self._connections_of(worker.peer):
            connected.suspected = why
            connected.health.fault(why, time.monotonic())

    def worker(self, number: int) -> RemoteWorker | _Who | None:
        """Return a worker, also one that is gone."""
        return self._workers.get(number) or self._former.get(number)

    def _connections_of(self, peer: str) -> list[RemoteWorker]:
        return [one for one in self._workers.values() if one.peer == peer]

    def _distrust(self, number: int, why: str) -> None:
        for pending in list(self._active.values()):
            self._advance(pending, lambda call, now: call.distrust(number, why, now))
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
            swarm=_RequestView(self, pending.request),
            next_attempt=self._next_attempt,
            policy=self._options.call,
            kept=self._local.kept(site.index) if self._local is not None else 0,
            per_token=site.n_used if pending.request.partial else 0,
        )
        self._active[id(pending)] = pending
        self._advance(pending, functools.partial(_begin, pending))
        now = time.monotonic()
        if now >= self._probe_due:
            self._probe_due, wait = now + PROBE_EVERY_S, self._options.probe_s
            self._to_probe = [w for w in self._workers.values() if w.wants_probe(now, wait, min(wait, PROBE_UNSURE_S))]
        if self._to_probe:
            self._probe(pending.request)

    def _probe(self, request: Request) -> None:
        """Send workers that nobody asks a copy of a small call: nobody waits for it, only its time is noted."""
        if len(request.experts) > DECODE_PAIRS:
            return
        experts = request.experts.tolist()
        for worker in list(self._to_probe):
            held = worker.held.get(request.site.index, 0)
            pairs = [pair for pair, expert in enumerate(experts) if held >> expert & 1]
            if pairs:
                self._to_probe.remove(worker)
                if not worker.leaving:
                    worker.ask(self._next_attempt(), request.share(pairs))

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
            case Send(pairs=pairs):
                if len(pairs) <= DECODE_PAIRS or self._pieces.may_go(pending, action):
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
                    self._pieces.settled(number, attempt)
            case Late(_, number):
                pending.stats.late += 1
                if (worker := self._workers.get(number)) is not None:
                    worker.late(time.monotonic())
            case Finish(attempts):
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
        self._advance(pending, lambda call, _now: list(self._send(pending, call, send)))
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
            self._advance(pending, lambda call, now: call.failed(attempt, str(error) or type(error).__name__, now))
            return
        pending.keep(attempt, future.result(), None)
        pending.counts(attempt)
        self._advance(pending, lambda call, now: call.answered(attempt, now))

    def _forget(self, pending: PendingRows) -> None:
        self._submitted.discard(pending)
        self._active.pop(id(pending), None)
        large = len(pending.request.experts) > DECODE_PAIRS
        for attempt in pending.shares:
            self._owners.pop(attempt, None)
            self._checks.forget(attempt)
            if large:
                self._pieces.settled(pending.asked.get(attempt, LOCAL), attempt)

    def on_failed(self, pending: PendingRows) -> None:
        """See pending.Owner. Perhaps the loop does not know yet: then what the call has asked for is withdrawn."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: then nothing is in progress
            self._loop.call_soon_threadsafe(self._withdraw, pending)

    def _withdraw(self, pending: PendingRows) -> None:
        """Have the workers hear that nobody waits for a call any more."""
        if id(pending) in self._active:
            self._advance(pending, lambda call, now: [])

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
            self._advance(pending, lambda call, now: call.tick(now))

    # What a call may ask about the workers (see _RequestView).

    def heard(self, number: int) -> float:
        """Return when a worker last gave a good answer."""
        worker = self._workers.get(number)
        return -math.inf if worker is None else worker.answered_at

    def answering_until(self, number: int) -> float:
        """Return until when what waits here for a worker waits rightly."""
        worker = self._workers.get(number)
        if worker is None:
            return -math.inf
        return self._pieces.answering_until(number, worker.answered_at, worker.latency)

    def candidates(self, request: Request) -> list[Candidate]:
        """Return the workers that take calls of this request now."""
        now = time.monotonic()
        seen = (worker.candidate(request, now) for worker in self._workers.values())
        found = [candidate for candidate in seen if candidate is not None]
        if len(request.experts) < self._options.call.spread_pairs or len(found) < 2:
            return found
        costs = self._pieces.costs(request)
        large = ((one, costs.get(one.worker, (0.0, 0.0))) for one in found)
        return [dataclasses.replace(one, pair_s=pair_s, start_s=start_s) for one, (pair_s, start_s) in large]

    def local_candidate(self, site: Site) -> Candidate | None:
        """Return the local engine as a candidate, if there is one for this site."""
        if self._local is None or not (held := self._local.held(site)):
            return None
        return Candidate(LOCAL, "this node", held)

    def late_after(self, number: int, n_pairs: int, attempt: int = 0) -> float:
        """Return how long an attempt may take from now; `attempt` is 0 for one that is not sent yet."""
        worker = self._workers.get(number)
        if worker is None:
            return self._options.late_ceiling_s
        return self._pieces.late_after(number, n_pairs, attempt, worker.latency)

    def cut(self, request: Request, loads: Sequence[Shared], units: int, most: int) -> tuple[int, ...]:
        """Return how to cut a large call."""
        return self._pieces.cut(request, loads, units, most)


def _begin(pending: PendingRows, call: Call, now: float) -> list[Action]:
    actions = call.start(now)
    pending.cut_into(call.cells)
    return actions


class _RequestView:
    """The swarm as the call for one request sees it (call.Swarm)."""

    def __init__(self, client: ExpertClient, request: Request) -> None:
        self._client, self._request = client, request

    def candidates(self) -> list[Candidate]:
        return self._client.candidates(self._request)

    def local(self) -> Candidate | None:
        return self._client.local_candidate(self._request.site)

    def late_after(self, worker: int, n_pairs: int, attempt: int) -> float:
        return self._client.late_after(worker, n_pairs, attempt)

    def heard(self, worker: int) -> float:
        return self._client.heard(worker)

    def answering_until(self, worker: int) -> float:
        return self._client.answering_until(worker)

    def cut(self, loads: Sequence[Shared], units: int, most: int) -> tuple[int, ...]:
        return self._client.cut(self._request, loads, units, most)


class _CheckHost:
    """The client as its checks see it (checks.CheckHost)."""

    def __init__(self, client: ExpertClient) -> None:
        self._client = client

    def next_attempt(self) -> int:
        return self._client._next_attempt()

    def own_held(self, request: Request) -> int:
        own = self._client.local_candidate(request.site)
        return 0 if own is None else own.held

    def candidates(self, request: Request) -> list[Candidate]:
        return self._client.candidates(request)

    def compute_again(self, attempt: int, by: int, share: Share, subject: int) -> bool:
        client = self._client
        pending, worker = client._owners.get(subject), client._workers.get(by)
        if by == LOCAL and client._local is not None:
            client._local.run(share, lambda future: client._from_local(attempt, future))
        elif worker is not None:
            worker.ask(attempt, share)
        else:
            return False
        if pending is not None:
            pending.stats.checked_rows += len(share.pairs)
            checked = client._workers.get(pending.asked.get(subject, LOCAL))
            if checked is not None:
                checked.checked_rows += len(share.pairs)
        return True

    def withdraw(self, attempt: int, by: int) -> None:
        if (worker := self._client._workers.get(by)) is not None:
            worker.cancel(attempt)

    def patience(self, by: int, n_pairs: int) -> float:
        return self._client._options.check.patience_s if by == LOCAL else self._client.late_after(by, n_pairs)

    def release(self, attempt: int) -> None:
        if (pending := self._client._owners.get(attempt)) is not None:
            pending.counts(attempt)
            self._client._advance(pending, lambda call, now: call.answered(attempt, now))

    def hold(self, attempt: int, seconds: float) -> None:
        if (pending := self._client._owners.get(attempt)) is not None:
            self._client._advance(pending, lambda call, now: call.checking(attempt, now, now + seconds))

    def reject(self, attempt: int, why: str) -> None:
        if (pending := self._client._owners.get(attempt)) is not None:
            pending.stats.mismatches += 1
            self._client._advance(pending, lambda call, now: call.reject(attempt, why, now))

    def convict(self, worker: int, why: str, subject: int) -> None:
        pending, guilty = self._client._owners.get(subject), self._client.worker(worker)
        if pending is not None:
            pending.stats.mismatches += 1
        if guilty is not None:
            self._client.quarantine(guilty, why)
        else:
            self._client._distrust(worker, why)

    def suspect(self, worker: int, why: str) -> None:
        if (known := self._client.worker(worker)) is not None:
            self._client.suspect(known, why)

    def name(self, worker: int) -> str:
        known = self._client.worker(worker)
        return f"worker {worker}" if known is None else known.label

    def peer(self, worker: int) -> str:
        known = self._client.worker(worker)
        return f"worker {worker}" if known is None else known.peer
