"""One worker as its client holds it: the dispatch stream, what was asked on it, and how it has done so far.

A shell around one `Connection`; loop thread only, except `view`. It knows attempts, not calls: what follows
from an answer or a failure is decided by `call_runner.py`, which hears of it through `WorkerEvents`.

Attempts beyond the worker's allowance wait here, not encoded yet, so a long prompt is never in memory twice.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from swarmnode.compute.chunks import MIN_CHUNK
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.codec import F32, WireType
from swarmnode.dispatch.failure_detector import unheard
from swarmnode.dispatch.frame_link import FrameLink
from swarmnode.dispatch.frames import (
    ANSWER_SIZE,
    MAX_BULK,
    TO_CLIENT,
    Answer,
    Cancel,
    Frame,
    Goodbye,
    Hello,
    HoldingsUpdate,
    Key,
    Limits,
    Refuse,
    RefuseCode,
    Welcome,
)
from swarmnode.dispatch.health import DECODE_PAIRS, Health, Latency
from swarmnode.dispatch.hello import check_key, experts_of, mask_of, unpack_holdings
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.dispatch.replicas import Candidate
from swarmnode.dispatch.request import Request, Share
from swarmnode.dispatch.views import WorkerView
from swarmnode.errors import BadAnswer, BadFrame, CallRefused
from transport.connection import Connection
from transport.stream import Stream

MAX_BYTES = MAX_BULK // 2  # of x, and of an answer's rows: their frames then fit the decoders
MAX_CALLS = 64
THIN_AGE = 8  # answers between two looks at whether a worker is slow for another reason than its distance


class WorkerEvents(Protocol):
    """What the owner hears, always on the loop thread."""

    def on_sent(self, attempt: int, share: Share, size: int) -> None:
        """Hear that a CALL left."""

    def on_answer(self, attempt: int, rows: F32, answer: Answer, size: int) -> None:
        """Hear a good answer."""

    def on_failure(self, attempt: int, why: str, *, overloaded: bool) -> None:
        """Hear that this attempt will have no answer."""

    def on_bad_answer(self, worker: RemoteWorker, why: str) -> None:
        """Hear that an answer was no answer at all; what it was to is heard of too, unless it was cancelled."""

    def on_lost(self, worker: RemoteWorker, why: str) -> None:
        """Hear that the worker is gone, with everything it was asked. Once, and the last event."""


@dataclass(slots=True)
class _Asked:
    share: Share
    sent_at: float = 0.0
    crowded: bool = False  # it left when large calls were under way
    cancelled: bool = False


class RemoteWorker:
    """See the module. Made by `attach_worker`."""

    def __init__(
        self,
        number: int,
        link: FrameLink,
        welcome: Welcome,
        sites: Mapping[int, Site],
        options: DispatchOptions,
    ) -> None:
        self.number = number
        self.peer = str(link.connection.peer)
        self.name = welcome.key.node or link.connection.peer.short
        # What a worker offers beyond this would only pile up here.
        offered = welcome.limits
        self.limits = Limits(offered.max_pairs, min(offered.max_bytes, MAX_BYTES), min(offered.max_calls, MAX_CALLS))
        self.held: Mapping[int, int] = unpack_holdings(welcome.holdings, sites)
        self.leaving = False
        self.quarantined = ""  # why it is never asked again
        self.suspected = ""  # why it is asked last
        self.bad_answers = 0
        self.checked_rows = 0  # computed once more by others
        self.latency = Latency(options.near_s, link.connection.stats().min_rtt_s or 0.0)
        self.health = Health(
            allowed=options.faults_allowed,
            suspension_s=options.suspension_s,
            max_suspension_s=options.max_suspension_s,
        )
        self._deadlines = options.deadlines
        self._link = link
        self.label = f"{self.name} ({link.connection.peer.short})"
        self._sites = sites
        self._wires: Mapping[int, tuple[WireType, WireType]] = {site: options.wires(site) for site in sites}
        self._events: WorkerEvents | None = None
        self._waiting: dict[int, Share] = {}  # attempts beyond the worker's allowance, in order
        self._asked: dict[int, _Asked] = {}  # sent, and neither answered nor refused yet
        self._cancelled = 0  # of those asked
        self._pairs_in_flight = 0
        self._large = 0  # calls of more than decode size, of those asked
        self.answered_at = -math.inf  # its last good answer
        self._calls = 0
        self._rows = 0
        self._silent_at = math.inf  # when it let a deadline pass; it was pinged then, and has said nothing since
        self._asked_at = time.monotonic()
        self._thin, self._thin_age = False, 0

    def begin(self, events: WorkerEvents) -> None:
        """Deliver to `events` from now on, also what has arrived since WELCOME."""
        self._events = events
        self._link.deliver(self._on_frame, self._lose)

    def candidate(self, request: Request, now: float) -> Candidate | None:
        """Return this worker as replica choice sees it for one request; None when it takes no calls of it."""
        held = 0 if self.leaving else self.held.get(request.site.index, 0)
        max_pairs = min(self.limits.max_pairs, request.pairs_in(self.limits.max_bytes))
        if not held or self.quarantined or max_pairs < MIN_CHUNK or not self.limits.max_calls:
            return None
        return Candidate(
            self.number,
            self.label,
            held,
            load=self._pairs_in_flight,
            latency_class=self._latency_class(),
            suspended=self._suspended(now),
            max_pairs=max_pairs,
            thin=self._thin,
            pair_s=self.latency.pair_s,
        )

    @property
    def connection(self) -> Connection:
        """What it is reached by."""
        return self._link.connection

    @property
    def large_calls(self) -> int:
        """How many calls of more than decode size it was sent and has not answered."""
        return self._large

    def late(self, now: float) -> None:
        """Note that a deadline passed. Until it says anything, this worker may be gone: others are asked first."""
        if self._silent_at == math.inf:
            self._silent_at = now
            self._link.connection.ping()
        self.health.fault("late", now)

    def unheard(self, now: float) -> bool:
        """Return whether nothing at all comes from this worker, so that it is most likely gone."""
        connection = self._link.connection
        return unheard(now, connection.heard_at, self._silent_at, connection.stats().rtt_s or 0.0)

    def wants_probe(self, now: float, idle_s: float, unsure_s: float) -> bool:
        """Return whether this worker should show its speed: nobody has asked it for `idle_s`, or for `unsure_s` where
        its last answer does not fit those before."""
        wait = unsure_s if self.latency.changing else idle_s
        if now - self._asked_at < wait or self._asked or self._waiting or self.leaving or self.quarantined:
            return False
        return not self._suspended(now)

    def _suspended(self, now: float) -> bool:
        if self.suspected or self._silent_at < math.inf or self.health.suspended(now) or self._answers_nothing(now):
            return True
        # A worker that does not even refuse what was cancelled is stuck; its allowance must not fill up with that.
        return self._cancelled * 2 >= self.limits.max_calls

    def _answers_nothing(self, now: float) -> bool:
        """Whether the oldest small call that it was sent and is wanted still is late: some checks have no deadline.

        One that died would collect them until its allowance is full, and what is sent for real would not leave.
        """
        oldest = next((one for one in self._asked.values() if not one.cancelled), None)
        if oldest is None or len(oldest.share.pairs) > DECODE_PAIRS or self._large:
            return False
        waited = now - max(oldest.sent_at, self.answered_at)
        if waited <= self._deadlines.floor_s:
            return False
        return waited > self.latency.late_after(len(oldest.share.pairs), self._deadlines)

    def _latency_class(self) -> int:
        known = self.latency.latency_class
        if known is not None:
            return known
        # Nothing asked yet: the lowest round trip is an optimist's guess, so that it gets its chance.
        return self.latency.class_of(self._link.connection.stats().min_rtt_s or 0.0)

    def ask(self, attempt: int, share: Share) -> None:
        """Send a share as a CALL, as soon as the worker's allowance permits."""
        self._pairs_in_flight += len(share.pairs)
        self._waiting[attempt] = share
        self._asked_at = time.monotonic()
        self._pump()

    def cancel(self, attempt: int) -> None:
        """Have no more interest in an answer."""
        share = self._waiting.pop(attempt, None)
        if share is not None:
            self._pairs_in_flight -= len(share.pairs)
            return
        asked = self._asked.get(attempt)
        if asked is not None and not asked.cancelled:
            asked.cancelled = True
            self._cancelled += 1
            self._link.send(Cancel(attempt).encode())

    def retire(self) -> None:
        """Take no new calls."""
        self.leaving = True

    async def close(self, why: str) -> None:
        """Close the connection; what was asked on it is lost."""
        self._lose(why)
        await self._link.close(why)

    def view(self, now: float) -> WorkerView:
        """Return the figures. Any thread."""
        stats = self._link.connection.stats()
        holdings = {site: experts_of(mask) for site, mask in self.held.items()}
        return WorkerView(
            peer=self.peer,
            name=self.name,
            path=stats.path,
            rtt_s=stats.rtt_s,
            holdings=holdings,
            experts=sum(map(len, holdings.values())),
            calls=self._calls,
            rows=self._rows,
            failures=self.health.failures,
            last_fault=self.health.last_fault,
            suspect=bool(self.quarantined) or self._suspended(now),
            leaving=self.leaving,
            in_flight=len(self._asked),
            bytes_out=self._link.bytes_out,
            bytes_in=self._link.bytes_in,
            p50_s=self.latency.percentile(50),
            p95_s=self.latency.percentile(95),
            checked_rows=self.checked_rows,
            quarantined=self.quarantined,
            recent_s=self.latency.recent_s,
            recent_rows=self.latency.recent_pairs,
        )

    def _pump(self) -> None:
        while self._waiting and len(self._asked) < self.limits.max_calls and self._events is not None:
            attempt = next(iter(self._waiting))
            share = self._waiting.pop(attempt)
            frame = share.frame(attempt, *self._wires[share.request.site.index]).encode()
            self._asked[attempt] = _Asked(share, time.monotonic(), crowded=self._large > 0)
            self._large += len(share.pairs) > DECODE_PAIRS
            self._link.send(frame)
            self._events.on_sent(attempt, share, len(frame))

    def _on_frame(self, frame: Frame) -> None:
        self._silent_at = math.inf
        match frame:
            case Answer():
                self._on_answer(frame)
            case Refuse():
                self._on_refuse(frame)
            case HoldingsUpdate():
                self.held = unpack_holdings(frame.holdings, self._sites)
            case Goodbye():
                self.leaving = True
            case _:
                raise BadFrame(f"a {frame.type.name} frame in mid-stream")
        self._pump()

    def _settled(self, attempt: int) -> _Asked | None:
        """Return what was asked; None, and a fault, for an answer to nothing."""
        asked = self._asked.pop(attempt, None)
        if asked is None:
            self.health.fault(f"answered call {attempt}, which is not open", time.monotonic())
            return None
        self._pairs_in_flight -= len(asked.share.pairs)
        self._large -= len(asked.share.pairs) > DECODE_PAIRS
        self._cancelled -= asked.cancelled
        return asked

    def _on_answer(self, answer: Answer) -> None:
        asked = self._settled(answer.id)
        if asked is None or self._events is None:
            return
        now = time.monotonic()
        try:
            rows = asked.share.read(answer, self._wires[asked.share.request.site.index][1])
        except BadAnswer as error:
            self.health.fault(str(error), now)
            self.bad_answers += 1
            if not asked.cancelled:
                self._events.on_failure(answer.id, str(error), overloaded=False)
            if self._events is not None:
                self._events.on_bad_answer(self, str(error))
            return
        self.health.success()
        self.answered_at = now
        if len(asked.share.pairs) > DECODE_PAIRS or not (asked.crowded or self._large):
            self.latency.add(len(asked.share.pairs), now - asked.sent_at)  # else its time is also that of large calls
        self._thin_age -= 1
        if self._thin_age < 0:
            self._thin_age = THIN_AGE
            self._thin = self.latency.thin(self._link.connection.stats().min_rtt_s or 0.0)
        self._calls += 1
        self._rows += len(asked.share.pairs)
        if not asked.cancelled:
            self._events.on_answer(answer.id, rows, answer, len(answer.rows) + ANSWER_SIZE)

    def _on_refuse(self, refuse: Refuse) -> None:
        asked = self._settled(refuse.id)
        if asked is None or self._events is None:
            return
        why = f"refused, {refuse.code.name.lower().replace('_', ' ')}: {refuse.why}"
        if refuse.code is RefuseCode.SHUTTING_DOWN:
            self.leaving = True  # as after GOODBYE
        if not self._harmless(refuse.code, asked):
            self.health.fault(why, time.monotonic())
        if not asked.cancelled:
            self._events.on_failure(refuse.id, why, overloaded=refuse.code is RefuseCode.OVERLOADED)

    def _harmless(self, code: RefuseCode, asked: _Asked) -> bool:
        """Whether a refusal is no fault of the worker: it said so in time, and what it says of itself agrees."""
        match code:
            case RefuseCode.OVERLOADED | RefuseCode.SHUTTING_DOWN:
                return True
            case RefuseCode.CANCELLED:
                return asked.cancelled
            case RefuseCode.NOT_HELD:  # unless it claims them still: it would be asked first for ever
                held = self.held.get(asked.share.request.site.index, 0)
                return bool(mask_of(asked.share.experts) & ~held)
            case _:
                return False

    def _lose(self, why: str) -> None:
        self.leaving = True
        self._waiting.clear()
        self._asked.clear()
        events, self._events = self._events, None
        if events is not None:
            events.on_lost(self, why)


async def attach_worker(
    connection: Connection,
    number: int,
    ours: Key,
    sites: Mapping[int, Site],
    options: DispatchOptions,
    greeted: Stream | None = None,
) -> RemoteWorker:
    """Open the dispatch stream and exchange HELLO. Closes the connection and raises when they do not fit.

    `greeted`: the stream on which HELLO has gone out already.

    Raises HelloMismatch, BadFrame, CallRefused (it closed the stream, or said nothing in time), TransportError.
    """
    link: FrameLink | None = None
    try:
        async with asyncio.timeout(options.hello_timeout_s):
            link = FrameLink(connection, greeted or await connection.open_stream(), TO_CLIENT, stall_s=options.stall_s)
            if greeted is None:
                link.send(Hello(ours).encode())
            first = await link.first_frame()
        if first is None:
            raise CallRefused(f"worker {connection.peer.short} ended the stream: {link.ended.result()}")
        if not isinstance(first, Welcome):
            raise BadFrame(f"worker {connection.peer.short} began with {first.type.name}, not with WELCOME")
        check_key(ours, first.key)
        return RemoteWorker(number, link, first, sites, options)
    except BaseException as error:
        why = str(error) or f"no WELCOME within {options.hello_timeout_s:g} s"
        await (connection.close(0, why[:200]) if link is None else link.close(why))
        if isinstance(error, TimeoutError):
            raise CallRefused(f"worker {connection.peer.short}: {why}") from None
        raise
