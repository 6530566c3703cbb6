"""A worker process on this machine and a client attached to it over QUIC, for as long as some blocking work takes.

The process (`worker_child.py`) ends with this one, however this one ends. Called by `wires.py` and
`architectures/real_shapes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from swarmnode.compute.ggml import engine_build
from swarmnode.compute.recipe import recipes_hash
from swarmnode.dispatch.call_actions import CallPolicy
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.lane import dispatch_lane
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.errors import ComputeError
from swarmnode.model.manifest import Manifest
from swarmnode.process_end import TAIL, process_end
from transport.endpoint import Endpoint
from transport.errors import TransportError
from transport.identity import Identity, PeerId

T = TypeVar("T")
HEARTBEAT_S = 0.1  # how soon Ctrl-C is noticed
STOP_S = 10.0
# One answer; its experts may have to be read from disk first. A worker that is gone is noticed by its process.
_PATIENCE = CallPolicy(give_up_s=600.0, patient=True)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker process serves: all experts of the sites of `group`, straight from `source`."""

    manifest_file: Path
    manifest: Manifest
    source: Path
    group: range
    threads: int
    device: str


def run_beside_worker(
    settings: WorkerSettings,
    work: Callable[[ExpertClient], T],
    check: Callable[[], None],
    options: DispatchOptions | None = None,
) -> T:
    """`work(client)` in a thread, its client attached to a worker process of its own; exact mode without `options`.

    `check` is called several times a second, on this thread; what it raises ends everything. Raises what `work` raises,
    and ComputeError where the worker process does not start or ends in the middle.
    """
    return asyncio.run(_run(settings, work, check, options or DispatchOptions()))


async def _run(
    settings: WorkerSettings,
    work: Callable[[ExpertClient], T],
    check: Callable[[], None],
    options: DispatchOptions,
) -> T:
    manifest = settings.manifest
    key = ModelKey(manifest.model_hash, recipes_hash(manifest.sites), engine_build(), manifest.name)
    async with (
        await Endpoint.bind(Identity.generate(), listen=("127.0.0.1", 0)) as endpoint,
        _process(settings, endpoint.peer_id) as worker,
    ):
        starting = asyncio.ensure_future(worker.ready())
        try:
            peer, port = await _unless_ended(worker, starting, check)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        client = ExpertClient(manifest.sites, model=key, options=replace(options, call=_PATIENCE))
        working: asyncio.Future[T] | None = None
        try:
            try:
                await client.attach(
                    await endpoint.dial(peer, [("127.0.0.1", port)], lane=dispatch_lane(endpoint.peer_id))
                )
            except TransportError as error:
                raise ComputeError(f"the gate's worker process cannot be reached: {error}") from None
            working = asyncio.ensure_future(asyncio.to_thread(work, client))
            return await _unless_ended(worker, working, check)
        finally:
            await client.close()  # whoever waits for rows is released
            if working is not None:
                await asyncio.gather(working, return_exceptions=True)


@contextlib.asynccontextmanager
async def _process(settings: WorkerSettings, peer: PeerId) -> AsyncIterator[_Process]:
    group = f"{settings.group.start}:{settings.group.stop}"
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "swarmnode.gate.worker_child", str(settings.manifest_file), str(settings.source),
            group, str(peer), str(settings.threads), settings.device,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )  # fmt: skip
        worker = _Process(process, errors)
        try:
            yield worker
        finally:
            await worker.stop()


class _Process:
    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._process, self._errors = process, errors

    async def ready(self) -> tuple[PeerId, int]:
        """Its key and port, once it can be dialled."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            raise self._gone()
        said = json.loads(line)
        return PeerId.parse(said["peer"]), int(said["port"])

    async def ended(self) -> ComputeError:
        """Wait until it has ended, and say how."""
        await self._process.wait()
        return self._gone()

    async def stop(self) -> None:
        """End it; by force where it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _gone(self) -> ComputeError:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - TAIL))
        end = process_end(self._process.returncode or 0, self._errors.read(TAIL))
        said = f": {end.said}" if end.said else ""
        return ComputeError(f"the gate's worker process ended too early ({end.how}){said}; run the same command again")


async def _unless_ended(worker: _Process, working: asyncio.Future[T], check: Callable[[], None]) -> T:
    """What comes of `working`, unless the process ends before, or `check` ends everything."""
    ended = asyncio.ensure_future(worker.ended())
    try:
        while not working.done():
            either: set[asyncio.Future[Any]] = {working, ended}
            await asyncio.wait(either, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            check()
            if ended.done():
                raise ended.result()
        return working.result()
    finally:
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
