"""Experts straight from a web server: a source for `bulk.fetcher.Fetcher` (it has `bulk.source.Source`'s shape).

Experts that lie beside each other and are wanted at the same time come in one request per tensor. Nothing is read but
the experts themselves: where they lie is in the manifest. An expert without a digest in the manifest is taken from
here, since the server's word is all there is, and its digest is recorded.

Whose address it is matters: one that the user of this node named may see the user's token and may be plain http; one
that only the manifest names (whoever brought the model to the swarm chose it) must be https, and sees no token.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from swarmnode.errors import Cancelled, ModelError, SourceChanged, SourceFailed, UsageError
from swarmnode.model.http_file import BACK_OFF_S, HttpFile, make_client
from swarmnode.model.http_url import file_name, shown, sibling
from swarmnode.model.manifest import ExpertTensor, Manifest, told_address
from swarmnode.model.recorded_digests import RecordedDigests
from swarmnode.model.slicing import Buffer, expert_digest

CONNECTIONS = 6
BATCH_BYTES = 8 << 20  # of one run of experts, unless one expert has more
MAX_JOBS = 4  # runs under way


@dataclass(slots=True, eq=False)
class _Wanted:
    site: int
    expert: int
    future: asyncio.Future[list[Buffer]]
    job: _Job | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """Neighbouring experts of a site, ascending. One expert may be wanted twice."""

    wanted: list[_Wanted]
    abort: threading.Event = field(default_factory=threading.Event)


class HttpSource:
    """See the module. Made on the loop; needs `close`. Cancelled fetches stop the download that they share when all
    of them are."""

    def __init__(
        self,
        manifest: Manifest,
        url: str = "",
        recorded: RecordedDigests | None = None,
        *,
        back_off_s: float = BACK_OFF_S,
    ) -> None:
        """`url`: the user's own, of the model's only file or any part; "": the manifest's.

        Raises ModelError where there is no address, UsageError where the environment's proxy cannot be used.
        """
        self._manifest = manifest
        urls = _named(manifest, url) if url else _told(manifest)
        self.name = shown(url or urls[0])
        self._recorded = recorded if recorded is not None else RecordedDigests(manifest, None)
        self._client = make_client()
        self._files = [
            HttpFile(one, self._client, size=said.size, tag=said.tag, named=bool(url), back_off_s=back_off_s)
            for one, said in zip(urls, manifest.source_files, strict=True)
        ]
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="http")
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Wanted] = deque()
        self._jobs: dict[_Job, asyncio.Task[None]] = {}
        self._pumping = self._closed = False

    @property
    def received_bytes(self) -> int:
        """Bytes of files that have come so far, wanted or not."""
        return sum(file.received_bytes for file in self._files)

    def held(self, site: int) -> int | None:
        """All."""
        return None

    async def fetch(self, site: int, expert: int) -> Sequence[Buffer]:
        """See bulk.source.Source. Raises SourceFailed; `corrupt` where the file is not the manifest's (any more)."""
        if self._closed:
            raise SourceFailed(f"{self.name}: was closed here")
        if not 0 <= site < len(self._manifest.sites) or not 0 <= expert < self._manifest.sites[site].n_expert:
            raise SourceFailed(f"{self.name}: expert {expert} of site {site} does not exist", not_held=True)
        wanted = _Wanted(site, expert, self._loop.create_future())
        self._waiting.append(wanted)
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)
        try:
            return await wanted.future
        except asyncio.CancelledError:
            wanted.future.cancel()
            if wanted.job is not None and all(other.future.done() for other in wanted.job.wanted):
                wanted.job.abort.set()
            raise

    async def close(self) -> None:
        """Give up what is under way; keep the recorded digests."""
        self._closed = True
        for wanted in self._waiting:
            _fail(wanted, SourceFailed(f"{self.name}: was closed here"))
        self._waiting.clear()
        for file in self._files:
            file.stop()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)
        await self._loop.run_in_executor(None, self._end)

    def _end(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()
        self._recorded.save()

    def _pump(self) -> None:
        self._pumping = False
        while self._waiting and len(self._jobs) < MAX_JOBS:
            job = self._next_job()
            if job.wanted:
                self._jobs[job] = self._loop.create_task(self._run(job))

    def _next_job(self) -> _Job:
        """The first that waits, and its neighbours in the file."""
        job = _Job([])
        alive = [wanted for wanted in self._waiting if not wanted.future.done()]
        if alive:
            site, expert = alive[0].site, alive[0].expert
            there = {wanted.expert for wanted in alive if wanted.site == site}
            room = max(1, BATCH_BYTES // self._manifest.expert_bytes(site))
            low = high = expert
            while high + 1 in there and high + 1 - low < room:
                high += 1
            while low - 1 in there and high + 1 - low < room:
                low -= 1
            job.wanted = [wanted for wanted in alive if wanted.site == site and low <= wanted.expert <= high]
            for wanted in job.wanted:
                wanted.job = job
        taken = set(map(id, job.wanted))
        self._waiting = deque(wanted for wanted in alive if id(wanted) not in taken)
        return job

    async def _run(self, job: _Job) -> None:
        site = job.wanted[0].site
        experts = [wanted.expert for wanted in job.wanted]
        first, count = min(experts), max(experts) - min(experts) + 1
        why = SourceFailed(f"{self.name}: was given up")
        try:
            reads = [
                self._loop.run_in_executor(self._pool, self._read, tensor, first, count, job.abort)
                for tensor in self._manifest.site_tensors(site)
            ]
            try:
                stacks = await asyncio.gather(*reads)
            finally:
                job.abort.set()  # where one failed, the others' bytes are of no use
            for wanted in job.wanted:
                slices: list[Buffer] = [stack[wanted.expert - first] for stack in stacks]
                if not wanted.future.done() and not self._manifest.digests[site][wanted.expert]:
                    await self._loop.run_in_executor(self._pool, self._note, site, wanted.expert, slices)
                if not wanted.future.done():
                    wanted.future.set_result(slices)
        except SourceChanged as error:
            why = SourceFailed(str(error), corrupt=True)
        except Cancelled:
            pass
        except ModelError as error:
            why = SourceFailed(str(error))
        except RuntimeError:  # the pool was shut down
            pass
        finally:
            del self._jobs[job]
            for wanted in job.wanted:
                _fail(wanted, why)
            self._pump()

    def _read(self, tensor: ExpertTensor, first: int, count: int, abort: threading.Event) -> list[Buffer]:
        """In the pool: slices of neighbouring experts of one tensor."""
        file = self._files[tensor.file]
        data = bytearray(count * tensor.stride)
        at = 0
        for piece in file.stream(tensor.offset + first * tensor.stride, len(data), abort):
            data[at : at + len(piece)] = piece
            at += len(piece)
        view = memoryview(data)
        return [view[n * tensor.stride : (n + 1) * tensor.stride] for n in range(count)]

    def _note(self, site: int, expert: int, slices: Sequence[Buffer]) -> None:
        if not self._recorded.note(site, expert, expert_digest(slices)):
            raise SourceChanged(f"{self.name}: gives other bytes for expert {expert} of site {site} than before")


def _told(manifest: Manifest) -> list[str]:
    if not told_address(manifest):
        raise ModelError(f"{manifest.name}: its manifest names no address to take experts from; give --source URL")
    return [source.url for source in manifest.source_files]


def _named(manifest: Manifest, url: str) -> list[str]:
    names = [source.name for source in manifest.source_files]
    if len(names) == 1:
        return [url]
    given = file_name(url)
    suffixes = [f"-{n + 1:05d}-of-{len(names):05d}.gguf" for n in range(len(names))]
    for suffix in suffixes:
        if given.endswith(suffix):
            stem = given.removesuffix(suffix)
            return [sibling(url, stem + other) for other in suffixes]
    raise UsageError(f"{shown(url)}: {manifest.name} has {len(names)} parts; give the address of NAME{suffixes[0]}")


def _fail(wanted: _Wanted, why: SourceFailed) -> None:
    if not wanted.future.done():
        wanted.future.set_exception(SourceFailed(str(why), not_held=why.not_held, busy=why.busy, corrupt=why.corrupt))
