"""Serves the experts of this node to any number of backbones.

The shell around `admission.py`, `call_check.py`, `changes.py` and the engine's thread; one `Session` per connection.
Not the engine, and not where slices come from. Made by the node on its event loop; `serve` runs as one task per
accepted connection.

Each CALL gets exactly one ANSWER or REFUSE. Everything a client sends is checked before the engine sees it, the bytes
of its rows last, where they are decoded (`engine_thread.py`). A client that breaks the protocol, says nothing, or
does not read its answers loses its connection, and nobody else notices.

What is served may change at any time (`change`), also from nothing and to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnode.compute.engine_api import Engine, Stack
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.admission import Admission, AdmissionLimits, Ticket
from swarmnode.dispatch.call_check import Refusal, check_call
from swarmnode.dispatch.changes import DROP_GRACE_S, Changes
from swarmnode.dispatch.codec import WireType, rows_size
from swarmnode.dispatch.engine_thread import EngineThread, Result, run_call
from swarmnode.dispatch.engine_times import EngineTimes
from swarmnode.dispatch.frames import (
    CallFrame,
    Goodbye,
    HoldingsUpdate,
    Limits,
    Refuse,
    RefuseCode,
    Welcome,
)
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.idle_test import IdleTest, seconds_per_row
from swarmnode.dispatch.options import WorkerOptions
from swarmnode.dispatch.views import WorkerStats
from swarmnode.dispatch.worker_session import Job, Session
from swarmnode.errors import PeerFault
from transport.connection import Connection
from transport.errors import TransportError

# Calls taken from admission at a time: while one runs in the engine's thread the next is there already, so the
# engine does not wait for the loop; more would take the choice of the next client away from admission.
ENGINE_DEPTH = 2
# A call expected to take less than this runs on the loop's own thread, if the engine is free: it costs less than
# the two thread changes it saves, and its answer leaves in the same datagram as the acknowledgement of the call.
INLINE_S = 700e-6
# The most x and answer such a call may have, counted as F32: what the engine's time does not show is copied in tens
# of microseconds then. One token's pairs fit: 8 rows of 7,168 values and their x.
INLINE_BYTES = 1 << 18
LEAVE_GRACE_S = 0.5  # how long calls are still taken after GOODBYE: those that crossed it
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Totals:
    calls: int = 0
    pairs: int = 0
    refused: Counter[RefuseCode] = field(default_factory=Counter)
    dropped: int = 0
    busy_s: float = 0.0
    queued_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    last_fault: str = ""


class ExpertWorker:
    """See the module. Must be made on the loop thread. The engine stays its owner's; nobody else may call it."""

    def __init__(
        self,
        engine: Engine,
        sites: Iterable[Site],
        *,
        model: ModelKey,
        name: str,
        limits: AdmissionLimits | None = None,
        options: WorkerOptions | None = None,
    ) -> None:
        self._engine = engine
        self._sites = {site.index: site for site in sites}
        self._key = model.key(name)
        self._limits = limits or AdmissionLimits()
        self._options = options or WorkerOptions()
        alike: dict[object, list[int]] = {}
        for site in self._sites.values():
            alike.setdefault((site.d_in, site.d_out, site.recipe), []).append(site.index)
        self._alike = list(alike.values())
        self._admission: Admission[Job] = Admission(self._limits)
        self._thread = EngineThread(asyncio.get_running_loop(), engine)
        self._changes = Changes(self, engine, self._thread, self._sites)
        self._served = self._changes.served
        self._announced = self._served.announced()
        self._running = 0  # calls and tests given to the engine
        self._times = EngineTimes()
        self._idle_test = IdleTest()
        self._tests: list[tuple[int, Sequence[int]]] = []  # (site, experts) still to be tested
        self._sessions: set[Session] = set()
        self._leaving = False  # GOODBYE was said
        self._closing = False  # no call is taken any more
        self._idle = asyncio.Event()
        self._idle.set()
        self._totals = _Totals()

    async def serve(self, connection: Connection) -> None:
        """Serve one client until its connection ends, and close it. A peer's fault is logged, not raised."""
        if self._leaving:
            await connection.close(0, "this worker is leaving")
            return
        session = Session(self, connection, self._key, self._limits, self._options)
        self._sessions.add(session)
        why = ""
        try:
            why = await session.run()
        except (TransportError, PeerFault) as error:
            why = str(error)
        except TimeoutError:
            why = f"no HELLO within {self._options.hello_timeout_s:g} s"
        finally:
            self._sessions.discard(session)
            self._admission.drop(session)
            await session.close(why)
            self._note_end(session, connection, why)

    @property
    def holdings(self) -> Mapping[int, int]:
        """What clients are told: site -> bitmap of the experts served, for sites with any."""
        return {held.site: held.mask for held in self._announced}

    @property
    def busy(self) -> bool:
        """Whether calls are waiting or being computed. Loop thread; costs nothing."""
        return self._admission.calls > 0

    def announce_holdings(self) -> None:
        """Take over what the engine holds now, changed by its owner, and tell all clients. Loop thread."""
        self._served.read(self._engine.holdings)
        self.announce()

    async def change(self, sites: Mapping[int, Mapping[str, Stack]], *, grace_s: float = DROP_GRACE_S) -> None:
        """Serve exactly these stacks at these sites (site -> tensor name -> stack, none for no expert). Loop thread.

        Sites that lose nothing come first, and their experts are announced. Then the lost ones of the others are
        announced no more, are computed for another `grace_s` where there are clients, and are let go. Calls go on all
        the while; nothing fails but calls for what was dropped, as NOT_HELD. When it returns, the memory of what was
        replaced is free, unless another engine still computes with it.

        Changes wait for each other. Raises what `Engine.prepare` does, and DispatchError once this worker is leaving:
        what was done up to then stays and is announced, as after a cancellation.
        """
        await self._changes.change(sites, grace_s)

    def stats(self) -> WorkerStats:
        """Return the figures. Any thread."""
        totals, sessions = self._totals, list(self._sessions)
        row_s = self._times.row_s(self._alike)
        return WorkerStats(
            clients=sum(session.greeted for session in sessions),
            waiting=self._admission.waiting,
            in_flight=self._admission.calls,
            calls=totals.calls,
            pairs=totals.pairs,
            refused={code.name.lower(): n for code, n in totals.refused.copy().items()},
            dropped_clients=totals.dropped,
            busy_s=totals.busy_s,
            queued_s=totals.queued_s,
            bytes_in=totals.bytes_in + sum(session.bytes_in for session in sessions),
            bytes_out=totals.bytes_out + sum(session.bytes_out for session in sessions),
            last_fault=totals.last_fault,
            load=self._admission.pairs,
            rows_per_s=len(row_s) / sum(row_s.values()) if row_s else 0.0,
            row_s=row_s,
            changes=self._changes.count,
            leaving=self._leaving,
        )

    def test_speed(self) -> None:
        """Have the engine show what a row takes if few calls have lately; `stats` has it then. See `idle_test.py`.

        Loop thread; for its owner to call every few seconds.
        """
        if self._closing or self._admission.calls or self._changes.busy:
            return
        if not self._idle_test.due(time.monotonic(), self._totals.calls):
            return
        self._tests = list(self._idle_test.choose(self._alike, self._sites, self._served.taken).items())
        self._test_next()

    async def leave(self, why: str = "leaving", *, grace_s: float = LEAVE_GRACE_S) -> None:
        """Say goodbye, so that clients ask others from now on, and serve what they have asked; `close` comes after.

        Calls that crossed the goodbye are taken for another `grace_s`. Returns when everything is answered, or after
        `drain_s`.
        """
        self._say_goodbye(why)
        if self.has_clients():
            await asyncio.sleep(grace_s)
        self._closing = True
        await self._drain()

    async def close(self, why: str = "shutting down") -> None:
        """Leave: take no new calls, say goodbye, finish what was admitted, close the connections and the thread."""
        self._closing = True
        self._say_goodbye(why)
        await self._drain()
        await asyncio.gather(*(session.leave(why) for session in list(self._sessions)))
        if not await asyncio.to_thread(self._thread.close, self._options.drain_s):
            log.warning("engine_still_running after_s=%g", self._options.drain_s)
        self._changes.give_up()

    # What the sessions call (worker_session.Owner).

    def welcome(self) -> bytes:
        """See Owner."""
        limits = Limits(self._limits.max_pairs, self._limits.max_bytes, self._limits.calls_of_one)
        return Welcome(self._key, limits, self._announced).encode()

    def admit(self, session: Session, frame: CallFrame) -> Ticket[Job] | Refuse:
        """See Owner."""
        if self._closing:
            return self._refuse(frame.id, RefuseCode.SHUTTING_DOWN, "this worker is leaving")
        refusal = self._judge(frame)
        if refusal is not None:
            return self._refuse(frame.id, *refusal)
        site = self._sites[frame.site]
        n_back = frame.n_tokens if frame.partial else frame.n_pairs
        nbytes = len(frame.rows) + rows_size(WireType.F32, n_back, site.d_out)
        job = Job(session, frame, site, time.monotonic(), self._served.version)
        ticket = self._admission.offer(session, job, frame.n_pairs, nbytes)
        if isinstance(ticket, str):
            return self._refuse(frame.id, RefuseCode.OVERLOADED, ticket)
        self._idle.clear()
        return ticket

    def pump(self) -> None:
        """See Owner."""
        while self._running < ENGINE_DEPTH and (ticket := self._admission.take()) is not None:
            job = ticket.job
            if job.version != self._served.version and (refusal := self._judge(job.frame)) is not None:
                job.session.answer(ticket, self._refuse(job.frame.id, *refusal).encode())
                continue
            self._running += 1
            if self._fits_loop(ticket):
                self._settle(ticket, run_call(self._engine, job.site, job.frame, job.arrived))
            else:
                self._thread.run(job.site, job.frame, job.arrived, functools.partial(self._done, ticket))

    def cancel(self, ticket: Ticket[Job]) -> Refuse | None:
        """See Owner."""
        ticket.job.cancelled = True
        if not self._admission.withdraw(ticket):
            return None
        self._update_idle()
        return self._refuse(ticket.job.frame.id, RefuseCode.CANCELLED, "cancelled")

    def release(self, ticket: Ticket[Job]) -> None:
        """See Owner."""
        self._admission.release(ticket)
        self._update_idle()

    # What the changes call (changes.Owner).

    def announce(self) -> None:
        """See Owner."""
        announced = self._served.announced()
        if announced == self._announced:
            return
        self._announced = announced
        update = HoldingsUpdate(announced).encode()
        for session in self._sessions:
            session.send(update)

    def has_clients(self) -> bool:
        """See Owner."""
        return any(session.greeted for session in self._sessions)

    def on_changed(self, site: int) -> None:
        """See Owner."""
        self._times.changed(site)

    def _judge(self, frame: CallFrame) -> Refusal | None:
        return check_call(frame, self._sites, self._served.taken(frame.site), self._limits)

    def _fits_loop(self, ticket: Ticket[Job]) -> bool:
        """Whether the call just taken may run on the loop thread: see INLINE_S and INLINE_BYTES."""
        if self._running > 1 or self._changes.busy or ticket.nbytes > INLINE_BYTES:
            return False
        return self._times.expected(ticket.job.frame.site, ticket.pairs) < INLINE_S

    def _done(self, ticket: Ticket[Job], result: Result) -> None:
        """Take a result from the engine's thread, which has been given the next call before."""
        self._settle(ticket, result)
        self.pump()

    def _test_next(self) -> None:
        """Give the engine one site to test: a call that comes meanwhile waits for no other."""
        if self._tests:
            site, experts = self._tests.pop()
            self._running += 1
            test = functools.partial(seconds_per_row, self._engine, self._sites[site], experts, time.monotonic)
            self._thread.run_action(test, functools.partial(self._tested, site))

    def _tested(self, site: int, row_s: object, raised: BaseException | None) -> None:
        """Take what a test of the engine has shown; make the next one unless there is something else to do by now."""
        self._running -= 1
        if isinstance(row_s, float):
            self._times.tested(self._alike, {site: row_s})
        else:  # an expert may have been let go just before
            log.info("idle_test_failed", exc_info=raised)
        self.pump()
        if self._closing or self._admission.calls or self._changes.busy:
            self._tests.clear()
        self._test_next()

    def _settle(self, ticket: Ticket[Job], result: Result) -> None:
        self._running -= 1
        job, totals = ticket.job, self._totals
        totals.busy_s += result.busy_s
        totals.queued_s += result.queued_s
        if result.refused is not None:
            totals.refused[result.refused] += 1
            if result.refused is RefuseCode.COMPUTE_FAILED:
                totals.last_fault = result.failed
        else:
            self._times.add(job.frame.site, ticket.pairs, result.busy_s)
            totals.calls += 1
            totals.pairs += ticket.pairs
        frame = result.frame
        if job.cancelled:
            frame = self._refuse(job.frame.id, RefuseCode.CANCELLED, "cancelled").encode()
        job.session.answer(ticket, frame)

    def _refuse(self, call_id: int, code: RefuseCode, why: str) -> Refuse:
        self._totals.refused[code] += 1
        return Refuse(call_id, code, why)

    def _update_idle(self) -> None:
        if not self._admission.calls:
            self._idle.set()

    def _note_end(self, session: Session, connection: Connection, why: str) -> None:
        self._update_idle()
        totals = self._totals
        totals.bytes_in += session.bytes_in
        totals.bytes_out += session.bytes_out
        log.info("dispatch_session_ended peer=%s why=%r", connection.peer.short, why)
        if session.broken or not session.greeted:
            totals.dropped += 1
            totals.last_fault = f"client {connection.peer.short}: {why}"

    def _say_goodbye(self, why: str) -> None:
        if self._leaving:
            return
        self._leaving = True
        self._changes.stop()
        goodbye = Goodbye(why).encode()
        for session in self._sessions:
            session.send(goodbye)

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_s):
                await self._idle.wait()
