"""Which calls a worker takes on, and in which order its engine gets them.

Pure: a bounded set of queues, one per connected client, no clock and no threads. `worker.py` owns one and
touches it on the loop thread only. A call that does not fit is refused with a reason at once; nothing ever
waits to be admitted.

A call counts from its admission until its answer has been handed to the transport, so a client that does not
read its answers uses up its own allowance and nobody else's. Clients take turns, one call each (round robin).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job")


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds on what a worker has accepted and not yet answered. Bytes count x and answer together.

    A client that is alone gets what it is told (WELCOME): `calls_of_one` calls of at most `max_pairs` and `max_bytes`
    each way, whatever `pairs` and `bytes` are. Where others have calls here it may hold half of `bytes`, and all
    together `pairs` and `bytes`: half as much again as one alone, so that there is room for a second one at once.

    A call may be so large that each of hundreds of experts gets the rows that a batch of it is worth (32: 1,024 tokens
    of top-8 of 256, some 600 of them where they have 7,168 values); clients cut them as the link and others want it.
    """

    max_pairs: int = 16384  # of one call: a prompt chunk of 2,048 tokens, top-8
    max_bytes: int = 16 << 20  # of one call, each way, as F32: 1,365 rows of 3,072 values
    calls_per_peer: int = 8  # enough to keep the engine busy over a round trip
    calls: int = 128
    pairs: int = 12 * 16384
    bytes: int = 384 << 20

    @property
    def calls_of_one(self) -> int:
        """Calls of one client that are taken at a time."""
        return min(self.calls_per_peer, self.calls)


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[Job]):
    """An admitted call: whose it is, what to do, and what it counts for."""

    peer: Hashable
    job: Job
    pairs: int
    nbytes: int


class Admission(Generic[Job]):
    """The calls of one worker between their arrival and their answer."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._queues: OrderedDict[Hashable, deque[Ticket[Job]]] = OrderedDict()  # first in line takes its turn next
        self._held: dict[Hashable, int] = {}  # calls not yet released, per peer
        self._bytes: dict[Hashable, int] = {}  # of these
        self.calls = 0
        self.pairs = 0
        self.nbytes = 0

    def offer(self, peer: Hashable, job: Job, pairs: int, nbytes: int) -> Ticket[Job] | str:
        """Admit a call, or return why not."""
        limits = self._limits
        calls, held = self._held.get(peer, 0), self._bytes.get(peer, 0)
        if calls >= limits.calls_per_peer:
            return f"{limits.calls_per_peer} calls of yours are not answered yet"
        if self.calls >= limits.calls:
            return f"{limits.calls} calls are waiting here"
        if calls < self.calls:  # others have some here
            if self.pairs + pairs > limits.pairs:
                return f"{self.pairs} rows are waiting here, {limits.pairs} are the limit"
            if self.nbytes + nbytes > limits.bytes:
                return f"{self.nbytes} bytes are waiting here, {limits.bytes} are the limit"
            if held + nbytes > limits.bytes // 2 and held:
                return f"{held} bytes of yours are waiting here, {limits.bytes // 2} are the limit"
        ticket = Ticket(peer, job, pairs, nbytes)
        self._queues.setdefault(peer, deque()).append(ticket)
        self._held[peer] = calls + 1
        self._bytes[peer] = held + nbytes
        self.calls += 1
        self.pairs += pairs
        self.nbytes += nbytes
        return ticket

    def take(self) -> Ticket[Job] | None:
        """Return the next call to compute, None when none waits. It still counts until `release`."""
        if not self._queues:
            return None
        peer, queue = next(iter(self._queues.items()))
        ticket = queue.popleft()
        del self._queues[peer]
        if queue:
            self._queues[peer] = queue  # to the end of the line
        return ticket

    def withdraw(self, ticket: Ticket[Job]) -> bool:
        """Take a call out of its queue again; False when it is not in it any more. Releases it."""
        queue = self._queues.get(ticket.peer)
        if queue is None or ticket not in queue:
            return False
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.peer]
        self.release(ticket)
        return True

    def release(self, ticket: Ticket[Job]) -> None:
        """Note that the answer has left, or will never be sent. Once for each ticket."""
        self._held[ticket.peer] -= 1
        self._bytes[ticket.peer] -= ticket.nbytes
        if not self._held[ticket.peer]:
            del self._held[ticket.peer], self._bytes[ticket.peer]
        self.calls -= 1
        self.pairs -= ticket.pairs
        self.nbytes -= ticket.nbytes

    def drop(self, peer: Hashable) -> list[Ticket[Job]]:
        """Withdraw all that waits from a peer that is gone; what is being computed is released by its end."""
        dropped = list(self._queues.pop(peer, ()))
        for ticket in dropped:
            self.release(ticket)
        return dropped

    @property
    def waiting(self) -> int:
        """Calls not yet given to the engine."""
        return sum(map(len, self._queues.values()))
