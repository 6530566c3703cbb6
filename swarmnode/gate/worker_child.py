"""A worker process of the gate: serves the experts of some sites straight from the GGUF, to one peer, until its
standard input ends. Started by `worker_process.py`; prints one line of JSON when it can be dialled.

    python -m swarmnode.gate.worker_child MANIFEST GGUF START:STOP PEER THREADS DEVICE

It is what `swarmnode up --experts` runs, without the copy of the slices and the rest of a node. Ctrl-C in a terminal
reaches it too; it leaves that to the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from pathlib import Path

from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.ggml import engine_build
from swarmnode.compute.recipe import recipes_hash
from swarmnode.dispatch.hello import ModelKey
from swarmnode.dispatch.lane import dispatch_lane
from swarmnode.dispatch.worker import ExpertWorker
from swarmnode.errors import ComputeError, SwarmnodeError
from swarmnode.gate.experts import site_engine
from swarmnode.model.manifest import Manifest, load_manifest
from transport.endpoint import Endpoint
from transport.errors import EndpointClosed, TransportError
from transport.identity import Identity, PeerId


def main(arguments: list[str]) -> int:
    """Run until standard input ends. One line on standard error, and 1, where it cannot, or where serving fails."""
    faulthandler.enable()  # a mapped file that is cut under us kills the process: say so at least
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    manifest_file, source, sites, peer, threads, device = arguments
    start, _, stop = sites.partition(":")
    try:
        manifest = load_manifest(Path(manifest_file))
        group = range(int(start), int(stop))
        engine = site_engine(Path(source), manifest, group, threads=int(threads), device=device)
        try:
            asyncio.run(_serve(engine, manifest, PeerId.parse(peer)))
        finally:
            engine.close()
    except (SwarmnodeError, TransportError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    except Exception as error:  # whoever waits for answers hears of it at once
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(engine: ExpertEngine, manifest: Manifest, peer: PeerId) -> None:
    stop = asyncio.Event()
    threading.Thread(target=_wait_for_eof, args=(asyncio.get_running_loop(), stop), daemon=True).start()
    key = ModelKey(manifest.model_hash, recipes_hash(manifest.sites), engine_build(), manifest.name)
    endpoint = await Endpoint.bind(Identity.generate(), listen=("127.0.0.1", 0), admit=peer.__eq__)
    worker = ExpertWorker(engine, manifest.sites, model=key, name="gate")
    serving = asyncio.create_task(_accept(endpoint, worker))
    stopping = asyncio.create_task(stop.wait())
    try:
        print(json.dumps({"peer": str(endpoint.peer_id), "port": endpoint.address[1]}), flush=True)
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await serving
            raise ComputeError("the worker's endpoint has closed")
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    finally:
        serving.cancel()
        stopping.cancel()
        await worker.close("the gate is through")
        await endpoint.close()
        await asyncio.gather(serving, stopping, return_exceptions=True)


async def _accept(endpoint: Endpoint, worker: ExpertWorker) -> None:
    async with asyncio.TaskGroup() as sessions:
        while True:
            try:
                connection = await endpoint.accept()
            except EndpointClosed:
                return
            if connection.lane == dispatch_lane(connection.peer):
                sessions.create_task(worker.serve(connection))
            else:
                await connection.close(1, "this node serves experts alone")


def _wait_for_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop has ended before
        loop.call_soon_threadsafe(stop.set)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
