"""Fills a slice store from several sources at once, until everything wanted is there.

A shell: `schedule.py` decides, sources deliver, the store verifies and writes in a thread of the fetcher's own. What
is on the way and what is not flushed yet are bounded together, so that a process killed at any moment fetches at most
5 % again (unless one expert alone is more). Sources may come and go while it runs. Whoever sent a wrong expert is
banned, by name; the expert is fetched elsewhere. Owned by whoever calls `run`; cancelling that keeps all that came.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from swarmnode.bulk.frames import experts_of, mask_of
from swarmnode.bulk.schedule import FetchSchedule, Held, Order
from swarmnode.bulk.source import Source
from swarmnode.errors import CorruptSlice, FetchFailed, SourceFailed
from swarmnode.model.manifest import Manifest
from swarmnode.model.slicing import Buffer
from swarmnode.model.store import SliceStore

IN_FLIGHT_SHARE, IN_FLIGHT_MAX = 0.025, 40_000_000  # of the bytes wanted; with what is not flushed: at most 64 MB
DIRTY_SHARE, DIRTY_MAX = 0.015, 24_000_000
PATIENCE_S = 30.0
TICK_S = 0.25  # how soon a new source, or what an old one has got, is noticed
ALIVE_BYTES = 16 * 1024  # so much within the patience is progress, too: an expert may be large and a link slow
NAMED = 4  # experts and sources that an error lists

Progress = Callable[[int, int, int], None]
OnBanned = Callable[[str, str], None]
log = logging.getLogger(__name__)


class Fetcher:
    """One fetch. `received_bytes` counts all that came from sources while it ran, wasted bytes too."""

    def __init__(
        self,
        store: SliceStore,
        manifest: Manifest,
        wanted: Mapping[int, Iterable[int]],
        sources: Callable[[], Iterable[Source]],
        progress: Progress | None = None,
        *,
        patience_s: float = PATIENCE_S,
        on_banned: OnBanned | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wanted`: site -> experts. `sources()` is asked several times a second. `progress(done, total, received)`
        in bytes, on the loop; `done` begins with what the store holds. `on_banned(source, why)`.
        `seed` (default: this node's turn of the clock) decides where to begin.

        Raises ModelError for an expert that does not exist.
        """
        self.received_bytes = 0
        self._store, self._manifest = store, manifest
        self._sources, self._progress, self._on_banned = sources, progress, on_banned
        self._patience_s, self._clock = patience_s, clock
        missing = {site: mask_of(experts) for site, experts in store.missing(wanted).items()}
        sizes = {site: manifest.expert_bytes(site) for site in wanted}
        self._total = sum(sizes[site] * len(set(experts)) for site, experts in wanted.items())
        self._missing = sum(mask.bit_count() * sizes[site] for site, mask in missing.items())
        self._done = self._total - self._missing
        self._dirty, self._max_dirty = 0, min(DIRTY_MAX, int(self._total * DIRTY_SHARE))
        self._schedule = FetchSchedule(
            missing,
            sizes,
            in_flight_bytes=min(IN_FLIGHT_MAX, int(self._total * IN_FLIGHT_SHARE)),
            seed=time.time_ns() >> 10 if seed is None else seed,
        )
        self._by_name: dict[str, Source] = {}
        self._counted: dict[int, tuple[Source, int]] = {}  # by id: a source's counter when it was last looked at
        self._tasks: dict[Order, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._fatal: BaseException | None = None
        self._quiet_since = 0.0
        self._looked_at = -TICK_S
        self._heard = 0  # received_bytes when there was progress last
        self._reported = (-1, -1)
        self._pool: ThreadPoolExecutor | None = None

    @property
    def banned(self) -> dict[str, str]:
        """Sources that are asked nothing any more, and why."""
        return dict(self._schedule.banned)

    async def run(self) -> None:
        """Return when everything is in the store and flushed.

        Raises FetchFailed when nobody delivered for `patience_s`, ModelError when the disk does not take it. What
        came until then is kept.
        """
        if not self._missing:
            self._report()
            return
        self._store.require_space(self._missing)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="slices")
        self._quiet_since = self._clock()
        ended_well = False
        try:
            while not self._schedule.is_done:
                self._look_at_sources()
                self._place_orders()
                self._check()
                self._report()
                await self._wait()
            ended_well = True
        finally:
            await self._wind_up(ended_well)
        self._report()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(TICK_S):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    def _look_at_sources(self) -> None:
        now = self._clock()
        if now - self._looked_at < TICK_S:
            return
        self._looked_at = now
        sources = list(self._sources())
        self._count(sources)
        self._by_name = {}
        offers: dict[str, Held] = {}
        for source in sources:
            held = {site: source.held(site) for site in self._schedule.pending()}
            offers[source.name] = None if None in held.values() else {s: mask for s, mask in held.items() if mask}
            self._by_name[source.name] = source
        self._schedule.offer(offers)

    def _count(self, sources: Iterable[Source]) -> None:
        """Add what has come since the last look; from now on these are looked at."""
        for source, before in self._counted.values():
            self.received_bytes += source.received_bytes - before
        self._counted = {id(source): (source, source.received_bytes) for source in sources}

    def _place_orders(self) -> None:
        now = self._clock()
        for order in self._schedule.overdue(now):
            self._give_up(order, "was too slow")
        for order in self._schedule.next(now):
            task = asyncio.get_running_loop().create_task(self._fetch(self._by_name[order.source], order))
            self._tasks[order] = task

    async def _fetch(self, source: Source, order: Order) -> None:
        """One order until it is in the store, or failed. Never raises but CancelledError."""
        try:
            try:
                slices = await source.fetch(order.site, order.expert)
            except SourceFailed as error:
                self._order_failed(order, str(error), error)
                return
            except Exception as error:
                log.exception("bulk_source_broke source=%s", source.name)
                self._order_failed(order, f"{source.name}: {error!r}", None)
                return
            self._schedule.received(order, self._clock())
            self._news.set()
            await self._keep(order, slices)
        finally:
            if self._tasks.get(order) is asyncio.current_task():  # it may have been given up and placed again
                del self._tasks[order]
            self._news.set()

    async def _keep(self, order: Order, slices: Iterable[Buffer]) -> None:
        assert self._pool is not None
        adding = asyncio.get_running_loop().run_in_executor(self._pool, self._add, order, list(slices))
        adding.add_done_callback(_retrieve)
        try:
            await asyncio.shield(adding)
        except CorruptSlice as error:
            why = f"{order.source} sent a wrong expert {order.expert} of site {order.site}"
            log.warning("bulk_corrupt source=%s why=%r", order.source, str(error))
            if self._schedule.corrupt(order, why):
                self._banned(order.source, why)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the disk: nothing more can be kept
            self._fatal = error
        else:
            self._schedule.stored(order)
            self._done += order.size
            self._quiet_since = self._clock()

    def _add(self, order: Order, slices: list[Buffer]) -> None:
        """In the pool's thread."""
        self._store.add(order.site, order.expert, slices)
        self._dirty += order.size
        if self._dirty >= self._max_dirty:
            self._dirty = 0
            self._store.flush()

    def _order_failed(self, order: Order, why: str, error: SourceFailed | None) -> None:
        if error is not None and error.corrupt:
            self._schedule.failed(order, self._clock(), why)
            if self._schedule.ban(order.source, why):
                self._banned(order.source, why)
            return
        log.info("bulk_failed source=%s site=%d expert=%d why=%r", order.source, order.site, order.expert, why)
        not_held, busy = (error.not_held, error.busy) if error is not None else (False, False)
        if self._schedule.failed(order, self._clock(), why, not_held=not_held, busy=busy):
            self._banned(order.source, self._schedule.banned[order.source])

    def _banned(self, source: str, why: str) -> None:
        log.warning("bulk_source_banned source=%s why=%r", source, why)
        if self._on_banned is not None:
            self._on_banned(source, why)
        for order in self._schedule.orders(source):
            self._give_up(order, "was banned")

    def _give_up(self, order: Order, why: str) -> None:
        task = self._tasks.get(order)
        if task is not None and order in self._schedule.orders(order.source):
            self._schedule.failed(order, self._clock(), f"{order.source} {why}")
            task.cancel()

    def _check(self) -> None:
        """Raise what ends the fetch."""
        if self._fatal is not None:
            raise self._fatal
        now = self._clock()
        if self.received_bytes - self._heard >= ALIVE_BYTES and self._schedule.in_flight:
            self._heard, self._quiet_since = self.received_bytes, now
        if now - self._quiet_since < self._patience_s or self._schedule.is_done:
            return
        raise FetchFailed(self._lament())

    def _lament(self) -> str:
        """Who did not deliver what."""
        absent = self._schedule.unobtainable()
        masks = absent or self._schedule.pending()
        sizes = {site: self._manifest.expert_bytes(site) for site in masks}
        mb = sum(mask.bit_count() * sizes[site] for site, mask in masks.items()) / 1e6
        named = [f"{e} of site {site}" for site, mask in masks.items() for e in experts_of(mask)]
        more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
        what = f"expert{'s' if len(named) > 1 else ''} {', '.join(named[:NAMED])}{more} ({mb:,.1f} MB)"
        if not named:
            what = f"what was asked for ({self._schedule.in_flight} experts)"
        who = "nobody has" if absent else "nobody delivers"
        reasons = [*self._schedule.banned.values(), *self._schedule.last_errors().values()]
        said = f"; {'; '.join(reasons[:NAMED])}" if reasons else ""
        return f"{who} {what} for {self._patience_s:g} s{said}; start a node that has them or give the model file"

    def _report(self) -> None:
        if self._progress is not None and self._reported != (self._done, self.received_bytes):
            self._reported = (self._done, self.received_bytes)
            self._progress(self._done, self._total, self.received_bytes)

    async def _wind_up(self, ended_well: bool) -> None:
        """End all tasks; keep what has come. Raises what the last flush raises, unless something else is raised."""
        assert self._pool is not None
        for task in self._tasks.values():
            task.cancel()
        flushing = asyncio.get_running_loop().run_in_executor(
            self._pool, self._store.flush
        )  # after what is being added
        ending: set[asyncio.Future[None]] = {flushing, *self._tasks.values()}
        interrupted = False
        while ending:
            try:
                _, ending = await asyncio.wait(ending)
            except asyncio.CancelledError:  # what has come is kept all the same
                interrupted = True
        self._pool.shutdown(wait=False)
        self._count(())
        error = flushing.exception()
        if error is not None and ended_well:
            raise error
        if interrupted:
            raise asyncio.CancelledError


def _retrieve(future: asyncio.Future[None]) -> None:
    """Take note of an exception that nobody may be waiting for any more."""
    if not future.cancelled():
        future.exception()
