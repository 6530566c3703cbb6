"""Changes what a worker serves while it serves: prepare, announce, take over between two calls, let go.

A shell around `served.py`, loop thread only. The engine prepares new stacks in a thread of asyncio's, beside what it
holds; its own thread takes them over between two calls, in microseconds, so that nobody waits. What was mapped before
is let go after that, again in another thread. Owned by `worker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from swarmnode.compute.engine_api import Engine, Stack
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.engine_thread import EngineThread
from swarmnode.dispatch.served import ServedExperts
from swarmnode.errors import ComputeError, DispatchError

# How long dropped experts are still computed after clients were told: a call that crossed the news comes within a round
# trip, and NOT_HELD for a later one is harmless.
DROP_GRACE_S = 1.0
_Done: TypeAlias = "asyncio.Future[tuple[object, BaseException | None]]"  # what was held before, or what was raised


class Owner(Protocol):
    """What the changes need of their worker."""

    def announce(self) -> None:
        """Tell all clients what is served, if they were told something else last."""

    def has_clients(self) -> bool:
        """Whether anybody may have calls under way."""

    def on_changed(self, site: int) -> None:
        """Hear that the engine holds other slices of a site."""


@dataclass(frozen=True, slots=True)
class _Swap:
    """A change that the engine's thread has been given and not told the end of."""

    site: int
    done: _Done


class Changes:
    """See the module. `served` says what is announced and taken at this moment; `count` sites were replaced so far."""

    def __init__(self, owner: Owner, engine: Engine, thread: EngineThread, sites: Mapping[int, Site]) -> None:
        self._owner, self._engine, self._thread = owner, engine, thread
        self.served = ServedExperts(sites)
        self.served.read(engine.holdings)
        self.count = 0
        self._turn = asyncio.Lock()
        self._swap: _Swap | None = None
        self._stopped = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether the engine's thread has a change to make, so that nothing may run on the loop."""
        return self._swap is not None

    async def change(self, sites: Mapping[int, Mapping[str, Stack]], grace_s: float) -> None:
        """See `ExpertWorker.change`."""
        served = self.served
        async with self._turn:
            while self._swap is not None:  # of a change that was cancelled
                await asyncio.wait({self._swap.done})
            self._check_staying()
            asked = {site: {e for stack in stacks.values() for e in stack.experts} for site, stacks in sites.items()}
            dropped = {site: mask for site in sites if (mask := served.dropped_by(site, asked[site]))}
            try:
                for site in sites:
                    if site not in dropped:
                        await self._replace(site, sites[site], 0)
                if dropped:
                    served.doom(dropped)
                    self._owner.announce()
                    if self._owner.has_clients():
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._stopped.wait(), grace_s)
                for site, mask in dropped.items():
                    await self._replace(site, sites[site], mask)
            finally:
                self._serve_held(site for site in dropped if self._swap is None or site != self._swap.site)
                self._owner.announce()

    def stop(self) -> None:
        """Begin no change any more; one that waits ends with DispatchError."""
        self._stopped.set()

    def give_up(self) -> None:
        """End a change whose engine does not come back."""
        if self._swap is not None and not self._swap.done.done():
            self._swap.done.set_result((None, DispatchError("the engine still runs; its experts were not changed")))

    async def _replace(self, site: int, stacks: Mapping[str, Stack], dropped: int) -> None:
        """Have the engine hold exactly these stacks of a site; calls for `dropped` are taken up to that moment."""
        swap = await asyncio.to_thread(self._engine.prepare, site, stacks)
        self._check_staying()
        self.served.cut(site, dropped)
        done: _Done = asyncio.get_running_loop().create_future()
        self._swap = _Swap(site, done)
        self._thread.run_action(swap, functools.partial(self._swapped, site, done))
        del swap  # it refers to the memory
        await asyncio.wait({done})
        before, raised = done.result()
        del done
        if raised is not None:
            raise raised if isinstance(raised, Exception) else ComputeError(f"site {site}: {type(raised).__name__}")
        last = [before]
        del before
        await asyncio.to_thread(last.clear)  # unmapping much may take long

    def _swapped(self, site: int, done: _Done, before: object, raised: BaseException | None) -> None:
        """Hear from the engine's thread that it has the new stacks of a site."""
        self._swap = None
        self.count += raised is None
        self._owner.on_changed(site)
        self._serve_held((site,))
        if not self._turn.locked():  # the change was cancelled; any other one announces at its end
            self._owner.announce()
        if not done.done():
            done.set_result((before, raised))

    def _serve_held(self, sites: Iterable[int]) -> None:
        """Serve whatever the engine holds of these sites."""
        holdings = self._engine.holdings
        for site in sites:
            self.served.settle(site, holdings.get(site, ()))

    def _check_staying(self) -> None:
        if self._stopped.is_set():
            raise DispatchError("this worker is leaving and changes no more what it serves")
