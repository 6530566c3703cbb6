"""One client of a worker: its HELLO, its calls, and the answers it has not taken yet.

A shell around one `FrameLink`, loop thread only. Which calls are taken on, and when they run, is decided by
its owner, `worker.py`, through `Owner`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from swarmnode.compute.recipe import Site
from swarmnode.dispatch.admission import AdmissionLimits, Ticket
from swarmnode.dispatch.frame_link import FrameLink
from swarmnode.dispatch.frames import TO_WORKER, CallFrame, Cancel, Frame, Hello, Key, Refuse
from swarmnode.dispatch.hello import check_key
from swarmnode.dispatch.options import WorkerOptions
from swarmnode.errors import BadFrame
from transport.connection import Connection

FINISH_S = 2.0  # for a client to close its side once nothing more will come
PAIR_BYTES = 4 + 2 + 4  # what one pair takes in a CALL at most
HEAD_BYTES = 64  # and what stands before the pairs


@dataclass(slots=True, eq=False)
class Job:
    """An admitted call: its frame, its site, when it came, against which version of the experts served it was checked
    (`served.py`), and whether its answer is still wanted.
    """

    session: Session
    frame: CallFrame
    site: Site
    arrived: float
    version: int = 0
    cancelled: bool = False


class Owner(Protocol):
    """What a session needs of its worker."""

    def welcome(self) -> bytes:
        """Return the WELCOME frame of this moment."""

    def admit(self, session: Session, frame: CallFrame) -> Ticket[Job] | Refuse:
        """Queue a call for the engine, or return why not."""

    def pump(self) -> None:
        """Give the engine what it has room for."""

    def cancel(self, ticket: Ticket[Job]) -> Refuse | None:
        """Stop a call; None when its refusal follows later."""

    def release(self, ticket: Ticket[Job]) -> None:
        """Note that an answer has left, or never will."""


class Session:
    """See the module."""

    def __init__(
        self, owner: Owner, connection: Connection, ours: Key, limits: AdmissionLimits, options: WorkerOptions
    ) -> None:
        self._owner, self._connection, self._ours = owner, connection, ours
        self._options = options
        self._max_bulk = limits.max_bytes + limits.max_pairs * PAIR_BYTES + HEAD_BYTES
        self._link: FrameLink | None = None
        self._open: dict[int, Ticket[Job]] = {}  # calls without an answer yet
        self._unwritten: set[Ticket[Job]] = set()  # answers the transport has not taken yet
        self.greeted = False

    @property
    def broken(self) -> bool:
        """Whether the client was dropped for a fault of its own."""
        return self._link is not None and self._link.broken

    @property
    def bytes_in(self) -> int:
        """Bytes of all frames received."""
        return self._link.bytes_in if self._link is not None else 0

    @property
    def bytes_out(self) -> int:
        """Bytes of all frames sent."""
        return self._link.bytes_out if self._link is not None else 0

    async def run(self) -> str:
        """Serve until the stream ends; return why. Raises TimeoutError, HelloMismatch, BadFrame, TransportError."""
        async with asyncio.timeout(self._options.hello_timeout_s):
            stream = await self._connection.accept_stream()
            link = self._link = FrameLink(
                self._connection, stream, TO_WORKER, stall_s=self._options.stall_s, max_bulk=self._max_bulk
            )
            first = await link.first_frame()
        if first is None:
            return link.ended.result()
        if not isinstance(first, Hello):
            raise BadFrame(f"the client began with {first.type.name}, not with HELLO")
        link.send(self._owner.welcome())
        try:
            check_key(self._ours, first.key)
        except BaseException:
            await link.finish(FINISH_S)  # it can name both values too
            raise
        self.greeted = True
        link.deliver(self._on_frame, lambda _: None)
        return await asyncio.shield(link.ended)

    def send(self, frame: bytes) -> None:
        """Send a frame that answers no call, to a client that has been let in."""
        if self.greeted and self._link is not None:
            self._link.send(frame)

    def answer(self, ticket: Ticket[Job], frame: bytes) -> None:
        """Send the answer to an admitted call; the call counts until the transport has it."""
        self._open.pop(ticket.job.frame.id, None)
        if self._link is None or self._link.ended.done():
            self._owner.release(ticket)
            return
        self._unwritten.add(ticket)
        self._link.send(frame, lambda: self._written(ticket))

    async def leave(self, why: str) -> None:
        """Send what is left, end the stream, give the client a moment to close, then close."""
        if self._link is not None:
            await self._link.finish(FINISH_S)
        await self.close(why)

    async def close(self, why: str = "") -> None:
        """End the stream if it has not ended, close the connection, release what will never be written."""
        if self._link is None:
            await self._connection.close(0, why[:200])
        else:
            await self._link.close(why)
        while self._unwritten:
            self._owner.release(self._unwritten.pop())

    def _written(self, ticket: Ticket[Job]) -> None:
        if ticket in self._unwritten:
            self._unwritten.remove(ticket)
            self._owner.release(ticket)

    def _on_frame(self, frame: Frame) -> None:
        match frame:
            case CallFrame():
                self._on_call(frame)
            case Cancel():
                ticket = self._open.get(frame.id)  # none: it was answered in the meantime
                if ticket is not None and (refusal := self._owner.cancel(ticket)) is not None:
                    del self._open[frame.id]
                    self.send(refusal.encode())
            case _:
                raise BadFrame(f"a {frame.type.name} frame in mid-stream")

    def _on_call(self, frame: CallFrame) -> None:
        if frame.id in self._open:
            raise BadFrame(f"call {frame.id} is still open and was begun again")
        admitted = self._owner.admit(self, frame)
        if isinstance(admitted, Refuse):
            self.send(admitted.encode())
            return
        self._open[frame.id] = admitted
        self._owner.pump()
