"""Where experts come from: what a source is to `fetcher.py`, a peer as a source, and this machine's own files as one.

`PeerSource` pipelines: what is asked for in one turn of the loop travels as few requests, a few of which are open at a
time, so that small experts on a long way cost no round trip each. It watches for silence. What it hands out is not
verified: the store's `add` does that. Experts that have no digest in the manifest are never taken from a peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.bulk.frames import (
    MAX_EXPERTS_ASKED,
    Absent,
    AskExperts,
    AskHoldings,
    ExpertFollows,
    HoldingsFollow,
    decode_holdings,
    mask_of,
    max_holdings_bytes,
)
from swarmnode.bulk.provider import SliceProvider
from swarmnode.bulk.reply import Reply, ask, patience
from swarmnode.errors import BadBulkFrame, ModelError, SourceFailed
from swarmnode.model.manifest import Manifest
from swarmnode.model.slicing import Buffer
from transport.connection import Connection

MAX_OPEN = 4  # requests at a time: what a server answers at a time, too
BATCH_BYTES = 4 << 20  # of one request, unless one expert has more
STALL_S = 8.0  # silence that ends all requests: below the transport's idle time-out, above any pause of a busy node
STALL_BYTES = 4096  # less than this in STALL_S is silence too
REFRESH_S = 5.0  # how old a peer's holdings may become while somebody asks for them
log = logging.getLogger(__name__)


class Source(Protocol):
    """Somebody who has experts. Two sources with one name are the same one: what one did wrong counts for both."""

    @property
    def name(self) -> str:
        """Unique among sources, for people too."""

    @property
    def received_bytes(self) -> int:
        """Bytes that have come from it so far, wanted or not."""

    def held(self, site: int) -> int | None:
        """Bitmap of the experts of a site that it has now; None: all."""

    async def fetch(self, site: int, expert: int) -> Sequence[Buffer]:
        """An expert's slices in the order of the site's tensors. Raises SourceFailed. May be called many times at
        once; cancelling it gives the expert up."""


@dataclass(slots=True, eq=False)
class _Wanted:
    site: int
    expert: int
    future: asyncio.Future[list[Buffer]]
    batch: _Batch | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    wanted: list[_Wanted]
    task: asyncio.Task[None] | None = None


class PeerSource:
    """A peer's experts over its bulk connection. Made by `open`. Does not close the connection.

    Bans go by the name, so give a peer the same one each time.
    """

    def __init__(self, connection: Connection, manifest: Manifest, name: str = "", *, stall_s: float = STALL_S) -> None:
        self.name = name or str(connection.peer)
        self.received_bytes = 0
        self.held_masks: dict[int, int] = {}
        self._connection, self._manifest, self._stall_s = connection, manifest, stall_s
        self._model_hash = bytes.fromhex(manifest.model_hash)
        self._n_expert = [site.n_expert for site in manifest.sites]
        self._verifiable = {
            site: mask_of(expert for expert, digest in enumerate(digests) if digest)
            for site, digests in enumerate(manifest.digests)
            if not all(digests)
        }
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Wanted] = deque()
        self._open: set[_Batch] = set()
        self._pumping = False
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = 0.0
        self._slice_bytes = 0  # received in answer to fetches
        self._marks: deque[int] = deque(maxlen=2)  # what that was at the last two looks for silence
        self._timer: asyncio.TimerHandle | None = None
        self._closed = ""

    @classmethod
    async def open(
        cls, connection: Connection, manifest: Manifest, name: str = "", *, stall_s: float = STALL_S
    ) -> PeerSource:
        """Ask for its holdings first. Raises SourceFailed, also where it has another model."""
        source = cls(connection, manifest, name, stall_s=stall_s)
        await source.refresh()
        return source

    def held(self, site: int) -> int | None:
        """As it said last, at most some seconds ago; nothing once the connection has ended."""
        if self._closed or self._connection.closed.done():
            return 0
        stale = self._loop.time() - self._refreshed_at > REFRESH_S
        if stale and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = self._loop.create_task(self._refresh_quietly())
        return self.held_masks.get(site, 0)

    async def refresh(self) -> None:
        """Ask for its holdings. Raises SourceFailed."""
        self._refreshed_at = self._loop.time()
        async with (
            patience(self._stall_s, self.name),
            ask(self._connection, AskHoldings(self._model_hash), self.name, self._heard) as reply,
        ):
            part = await reply.part()
            if not isinstance(part, HoldingsFollow) or part.size > max_holdings_bytes(self._n_expert):
                raise BadBulkFrame(f"{part} where its holdings were asked for")
            data = bytearray(part.size)
            await reply.fill(memoryview(data))
            held = decode_holdings(bytes(data), self._n_expert)
        self.held_masks = {site: mask & self._verifiable.get(site, mask) for site, mask in held.items()}

    async def fetch(self, site: int, expert: int) -> Sequence[Buffer]:
        """See Source."""
        if self._closed:
            raise SourceFailed(f"{self.name}: {self._closed}")
        if not self._manifest.digests[site][expert]:
            raise SourceFailed(f"expert {expert} of site {site} has no digest: not from {self.name}", not_held=True)
        wanted = _Wanted(site, expert, self._loop.create_future())
        self._waiting.append(wanted)
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)
        try:
            return await wanted.future
        except asyncio.CancelledError:
            wanted.future.cancel()
            batch = wanted.batch
            if batch is not None and batch.task is not None and all(other.future.done() for other in batch.wanted):
                batch.task.cancel()
            raise

    async def close(self) -> None:
        """Give up everything that was asked for."""
        self._closed = self._closed or "was closed here"
        self._give_up(self._closed)
        tasks = [batch.task for batch in self._open if batch.task is not None]
        if self._refreshing is not None:
            self._refreshing.cancel()
            tasks.append(self._refreshing)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _pump(self) -> None:
        self._pumping = False
        while self._waiting and len(self._open) < MAX_OPEN:
            batch = self._next_batch()
            if batch.wanted:
                self._open.add(batch)
                batch.task = self._loop.create_task(self._request(batch))
        self._watch()

    def _next_batch(self) -> _Batch:
        """The first that waits, and others of its site."""
        batch = _Batch([])
        left: deque[_Wanted] = deque()
        experts: set[int] = set()
        room = BATCH_BYTES
        for wanted in self._waiting:
            size = self._manifest.expert_bytes(wanted.site)
            if wanted.future.done():
                continue
            if not experts or (
                wanted.site == batch.wanted[0].site
                and wanted.expert not in experts
                and len(experts) < MAX_EXPERTS_ASKED
                and size <= room
            ):
                wanted.batch = batch
                batch.wanted.append(wanted)
                experts.add(wanted.expert)
                room -= size
            else:
                left.append(wanted)
        self._waiting = left
        return batch

    async def _request(self, batch: _Batch) -> None:
        why = SourceFailed(f"{self.name} was given up")
        try:
            site = batch.wanted[0].site
            request = AskExperts(self._model_hash, site, tuple(wanted.expert for wanted in batch.wanted))
            async with ask(self._connection, request, self.name, self._heard_slices) as reply:
                for wanted in batch.wanted:
                    await self._receive(reply, wanted)
        except SourceFailed as error:
            why = error
        except asyncio.CancelledError:  # nobody wants the rest, or it was given up: `_give_up` says why
            if self._closed:
                why = SourceFailed(f"{self.name}: {self._closed}")
        finally:
            self._open.discard(batch)
            for wanted in batch.wanted:
                _fail(wanted, why)
            self._pump()

    async def _receive(self, reply: Reply, wanted: _Wanted) -> None:
        part = await reply.part()
        strides = [tensor.stride for tensor in self._manifest.site_tensors(wanted.site)]
        if part == Absent(wanted.expert):
            if wanted.site in self.held_masks:
                self.held_masks[wanted.site] &= ~(1 << wanted.expert)
            place = f"expert {wanted.expert} of site {wanted.site}"
            _fail(wanted, SourceFailed(f"{self.name} does not have {place} any more", not_held=True))
            return
        if part != ExpertFollows(wanted.expert, sum(strides)):
            raise BadBulkFrame(f"{part} where {ExpertFollows(wanted.expert, sum(strides))} is due")
        slices: list[Buffer] = []
        for stride in strides:
            piece = bytearray(stride)
            await reply.fill(memoryview(piece))
            slices.append(piece)
        if not wanted.future.done():
            wanted.future.set_result(slices)

    def _heard(self, n: int) -> None:
        self.received_bytes += n

    def _heard_slices(self, n: int) -> None:
        self.received_bytes += n
        self._slice_bytes += n

    async def _refresh_quietly(self) -> None:
        try:
            await self.refresh()
        except SourceFailed as error:
            log.debug("bulk_refresh_failed source=%s why=%r", self.name, str(error))

    def _watch(self) -> None:
        """Look for silence while, and only while, something is asked for."""
        if self._open and self._timer is None:
            self._marks.clear()
            self._look()
        elif not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if len(self._marks) == 2 and self._slice_bytes - self._marks[0] < STALL_BYTES:
            self._timer = None
            self._give_up(f"sent nothing for {self._stall_s:g} s")
            return
        self._marks.append(self._slice_bytes)
        self._timer = self._loop.call_later(self._stall_s / 2, self._look)

    def _give_up(self, why: str) -> None:
        error = SourceFailed(f"{self.name} {why}")
        waiting, self._waiting = self._waiting, deque()
        for wanted in waiting:
            _fail(wanted, error)
        for batch in list(self._open):
            for wanted in batch.wanted:
                _fail(wanted, error)
            if batch.task is not None:
                batch.task.cancel()


class LocalSource:
    """What this machine has already, in another store or as the model's GGUF, as a source."""

    def __init__(self, provider: SliceProvider, name: str) -> None:
        self.name = name
        self.received_bytes = 0
        self._provider = provider
        self._masks = {site: mask_of(experts) for site, experts in provider.holdings().items()}

    def held(self, site: int) -> int | None:
        """As it was when this was made."""
        return self._masks.get(site, 0)

    async def fetch(self, site: int, expert: int) -> Sequence[Buffer]:
        """See Source."""
        try:
            slices = await asyncio.to_thread(self._read, site, expert)
        except ModelError as error:
            raise SourceFailed(f"{self.name}: {error}") from None
        self.received_bytes += sum(map(len, slices))
        return slices

    def _read(self, site: int, expert: int) -> list[Buffer]:
        data = memoryview(b"".join(bytes(piece) for piece in self._provider.read(site, expert)))
        slices: list[Buffer] = []
        for tensor in self._provider.manifest.site_tensors(site):
            slices.append(data[: tensor.stride])
            data = data[tensor.stride :]
        return slices


def _fail(wanted: _Wanted, error: SourceFailed) -> None:
    if not wanted.future.done():
        wanted.future.set_exception(error)
        wanted.future.exception()  # whoever asked may be gone: this one is not reported as forgotten
