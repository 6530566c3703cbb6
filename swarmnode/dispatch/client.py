"""Calls experts on other nodes: what the backbone's hook sees of the swarm.

The composer of a backbone's side of dispatch, and its public face: workers are attached here, calls begin here, figures
are read here. What becomes of a call is `call_runner.py`'s; who is asked, `call.py`'s; whether an answer is right,
`checks.py`'s. Not the hook. Made and attached by nodes; called by the hook.

Threads: made and attached on the event loop; `submit` and `result` run on decode threads. A call crosses to
the loop once (`call_soon_threadsafe`), all its workers are written to in that turn, answers are parsed as
they arrive, and the decode thread wakes when the last one needed is there and adds the rows up itself. A call whose
experts are all kept here goes to the local engine's thread and back, and never sees the loop.

A large call goes in pieces, which may have to wait for their turn (`piece_queue.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping

from swarmnode.compute.engine_api import Engine
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.call_runner import CallRunner
from swarmnode.dispatch.check_host import RunnerCheckHost
from swarmnode.dispatch.checks import Checks
from swarmnode.dispatch.codec import F32, WireType
from swarmnode.dispatch.frames import Hello
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.local_experts import LocalExperts
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.pending import PendingRows
from swarmnode.dispatch.quarantine import OnQuarantine
from swarmnode.dispatch.remote_worker import RemoteWorker, attach_worker
from swarmnode.dispatch.request import I32, make_request
from swarmnode.dispatch.roster import Roster
from swarmnode.dispatch.row_screen import Screen
from swarmnode.dispatch.spot_check import SpotChecks
from swarmnode.dispatch.views import SiteStats, WorkerView
from swarmnode.errors import Cancelled, DispatchError
from transport.connection import Connection
from transport.stream import Stream

_UNFORESEEABLE = secrets.SystemRandom()
OnRouting = Callable[[int, I32], None]
log = logging.getLogger(__name__)


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
        self._options = options = options or DispatchOptions()
        self._sites = {site.index: site for site in sites}
        self._key = model.key(node)
        self._local = LocalExperts(local) if local is not None else None
        self._on_routing = on_routing
        self._numbers = itertools.count()
        self._stats = {index: SiteStats() for index in self._sites}
        self._closed = False

        def make_checks(calls: CallRunner) -> Checks:
            policy = SpotChecks(options.check, random, screened=screen is not None)
            return Checks(RunnerCheckHost(calls, options), policy, options.coarsest_wire, screen)

        self._roster = Roster()
        self._calls = CallRunner(self._roster, self._local, options, make_checks, on_quarantine)

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
        self._calls.quarantine.mark(worker)
        self._roster.add(worker)
        self._calls.pieces.attached(number, connection, worker.limits.max_calls)
        worker.begin(self._calls)
        return worker

    async def detach(self, worker: RemoteWorker, why: str = "detached") -> None:
        """Stop calling a worker and close its connection; what it was asked goes to others at once."""
        await worker.close(why)

    async def close(self) -> None:
        """Release every waiting thread, say goodbye to all workers, and close their connections."""
        self._closed = True
        self._calls.close()
        self.cancel_all(Cancelled("the dispatch client was closed"))
        await asyncio.gather(*(worker.close("client closed") for worker in list(self._roster.attached.values())))
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
        pending = PendingRows(request, self._stats[site], self._calls)
        if request.n_tokens == 0:  # a prompt chunk whose logits nobody wants reaches the last layer so
            pending.finish(())
            return pending
        if self._on_routing is not None:
            self._report_routing(site, ids)
        self._calls.submit(pending)
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
        return self._calls.quarantine.peers()

    def cancel_all(self, error: Exception | None = None) -> None:
        """Release every thread that waits for rows, at once; their `result` raises `error`."""
        self._calls.fail_all(error or Cancelled("cancelled"))

    def workers(self) -> list[WorkerView]:
        """Return the attached workers' figures."""
        now = time.monotonic()
        return [worker.view(now) for worker in list(self._roster.attached.values())]

    def wires(self, site: int) -> tuple[WireType, WireType]:
        """Return the types in which x goes out to a site and its answers come back."""
        return self._options.wires(site)

    def prompt_chunk(self, most: int) -> int:
        """Return how many of `most` tokens of a prompt should go in one step, as far as the workers' pace is known."""
        return self._calls.pieces.prompt_chunk(self._sites.values(), most)

    def recent(self, peer: str) -> tuple[float | None, float] | None:
        """Return what a peer's last calls of decode size took, s, and their rows.

        None if it is not attached, or most likely gone: nothing comes from it, and it acknowledges no ping.
        """
        now = time.monotonic()
        for worker in reversed(self._roster.attached.values()):
            if worker.peer == peer and not worker.leaving and not worker.unheard(now):
                return worker.latency.recent_s, worker.latency.recent_pairs
        return None

    @property
    def busy(self) -> bool:
        """Whether a call is under way. Loop thread; costs nothing."""
        return self._calls.busy

    def site_stats(self) -> dict[int, SiteStats]:
        """Return a copy of every site's counters."""
        return {index: dataclasses.replace(stats) for index, stats in self._stats.items()}
