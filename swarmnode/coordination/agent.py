"""Carries out what a worker is to hold: fetches, verifies, maps, announces, drops what it is to hold no more. A shell.

The newest order counts; an older one is broken off where it is, and nothing that arrived is lost. Experts are served as
soon as their batch is there. What cannot be done (a full disk, nobody has an expert) is told in one line and tried
again.
Made by `node.py` on a worker of a swarm. The coordinator is `coordinator.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from swarmnode.bulk.fetcher import Fetcher
from swarmnode.bulk.source import Source
from swarmnode.dispatch.hello import experts_of, mask_of
from swarmnode.dispatch.worker import ExpertWorker
from swarmnode.errors import DispatchError, ModelError, SwarmnodeError
from swarmnode.model.manifest import Manifest
from swarmnode.model.store import SliceStore

T = TypeVar("T")
log = logging.getLogger(__name__)

BATCH_BYTES = 256 << 20  # fetched before they are served together
RETRY_S = 10.0


class HoldingsAgent:
    """See the module. `changed` is called whenever `held`, `carried_out` or `trouble` has changed."""

    def __init__(
        self,
        store: SliceStore,
        manifest: Manifest,
        worker: ExpertWorker,
        *,
        budget: int,
        local_file: Path | None,
        sources: Callable[[], Iterable[Source]],
        emit: Callable[..., None],
        changed: Callable[[], None],
    ) -> None:
        self._store, self._manifest, self._worker = store, manifest, worker
        self._budget, self._local_file, self._sources = budget, local_file, sources
        self._emit, self._changed = emit, changed
        self._order: tuple[int, dict[int, int]] | None = None
        self._news = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self.held: dict[int, int] = self._in_store()  # and served
        self.carried_out = 0
        self.trouble = ""
        self.fetched = 0  # bytes of slices, since the start

    @property
    def held_bytes(self) -> int:
        """Of the budget, what is used."""
        return self._bytes(self.held)

    def order(self, number: int, hold: Mapping[int, int]) -> None:
        """Hold exactly `hold` (site → mask). The last one that came counts: they come in order."""
        if self._order is not None and number == self._order[0]:
            return
        self._order = number, dict(hold)
        self._news.set()
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self._order is not None
            number, hold = self._order
            self._work = asyncio.create_task(self._carry_out(hold), name="carry out an assignment")
            try:
                await asyncio.wait({self._work})
            except asyncio.CancelledError:
                self._work.cancel()
                await asyncio.gather(self._work, return_exceptions=True)
                raise
            work, self._work = self._work, None
            if work.cancelled():
                continue
            error = work.exception()
            if error is None:
                self.carried_out, self.trouble = number, ""
                self._emit("holding", experts=sum(mask.bit_count() for mask in self.held.values()))
                self._changed()
                continue
            if not isinstance(error, SwarmnodeError):
                log.error("assignment_failed", exc_info=error)
            if isinstance(error, DispatchError):  # the worker is leaving
                await self._news.wait()
                continue
            why = str(error) if isinstance(error, SwarmnodeError) else f"{type(error).__name__}: {error}"
            if self.trouble != why:
                self.trouble = why
                self._emit("holding-trouble", error=why)
                self._changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._news.wait()
            self._news.set()

    # ---- how

    async def _carry_out(self, hold: dict[int, int]) -> None:
        stored = self._in_store()
        await self._serve(site for site in {*stored, *self.held} if stored.get(site) != self.held.get(site))
        extra = {site: mask & ~hold.get(site, 0) for site, mask in self.held.items()}
        missing = {site: mask & ~self.held.get(site, 0) for site, mask in hold.items()}
        if self._bytes(self.held) + self._bytes(missing) > self._budget:
            await self._drop(extra)  # no room for both
            extra = {}
        total = self._bytes(missing)
        if self._bytes(self.held) + total > self._budget:
            raise ModelError(
                f"assigned {total >> 20} MiB more than the budget of {self._budget >> 20} MiB: raise --memory"
            )
        done = 0
        for batch in self._batches(missing):
            await self._fetch(batch, done, total)
            done += self._bytes(batch)
            await self._serve(batch)
        await self._drop(extra)

    async def _fetch(self, batch: Mapping[int, int], before: int, total: int) -> None:
        count = self.fetched

        def progress(done: int, _of: int, received: int) -> None:
            self.fetched = count + done
            self._emit("slices", done=before + done, total=total, received=received)

        wanted = {site: experts_of(mask) for site, mask in batch.items()}
        if self._local_file is not None:
            file = self._local_file
            await in_thread(lambda: self._store.fill_from_source(file, wanted, lambda n, of: progress(n, of, 0)))
            return
        await Fetcher(self._store, self._manifest, wanted, self._sources, progress).run()

    async def _serve(self, changed: Iterable[int]) -> None:
        """Have the worker serve what the store has of these sites now."""
        sites = list(changed)
        if not sites:
            return
        stacks = await in_thread(lambda: {site: self._store.stacked(site) for site in sites})
        await self._worker.change(stacks)
        self.held = self._in_store()
        self._changed()

    async def _drop(self, extra: Mapping[int, int]) -> None:
        gone = {site: experts_of(mask) for site, mask in extra.items() if mask}
        if not gone:
            return

        def forget() -> None:
            for site, experts in gone.items():
                self._store.forget(site, experts)

        await in_thread(forget)
        await self._serve(gone)

    def _batches(self, missing: Mapping[int, int]) -> Iterable[dict[int, int]]:
        batch: dict[int, int] = {}
        size = 0
        for site, mask in sorted(missing.items()):
            if not mask:
                continue
            batch[site] = mask
            size += self._bytes({site: mask})
            if size >= BATCH_BYTES:
                yield batch
                batch, size = {}, 0
        if batch:
            yield batch

    def _in_store(self) -> dict[int, int]:
        return {site: mask_of(experts) for site, experts in self._store.holdings().items()}

    def _bytes(self, masks: Mapping[int, int]) -> int:
        return sum(mask.bit_count() * self._manifest.expert_bytes(site) for site, mask in masks.items())


async def in_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but a cancellation waits for the thread: two must not use the store at once."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
