"""Experts on workers that lie in this process: all that a call goes through but the network.

Each call is cut by who holds what, made a CALL frame, read, judged and computed as a worker does, from that worker's
own slices; the ANSWER frame is read as a client does. What the network itself could change is tested elsewhere, so this
is what tells whether an architecture runs in a swarm. Called by `check.py`; not thread safe.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from swarmnode.backbone.hook import F32, I32
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.admission import AdmissionLimits
from swarmnode.dispatch.call_check import check_call
from swarmnode.dispatch.codec import WireType
from swarmnode.dispatch.engine_thread import run_call
from swarmnode.dispatch.frame_decoder import FrameDecoder
from swarmnode.dispatch.frames import TO_CLIENT, TO_WORKER, Answer, CallFrame, Frame
from swarmnode.dispatch.hello import mask_of
from swarmnode.dispatch.request import Request, Share, combine, make_request
from swarmnode.errors import CallFailed
from swarmnode.gate.experts import Ready
from swarmnode.model.manifest import Manifest
from swarmnode.model.source_bank import SourceBank

FrameT = TypeVar("FrameT", bound=Frame)


@dataclass
class FramedWorker:
    """A worker's engine over the slices of some experts of each site, and its half of the stream."""

    sites: dict[int, Site]
    engine: ExpertEngine
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    decoder: FrameDecoder = field(default_factory=lambda: FrameDecoder(TO_WORKER))

    def answer(self, data: bytes) -> bytes:
        """The bytes that answer the bytes of a CALL. Raises CallFailed where the worker refuses."""
        frame = _only(self.decoder.feed(data), CallFrame)
        held = mask_of(self.engine.holdings.get(frame.site, ()))
        refusal = check_call(frame, self.sites, held, self.limits)
        if refusal is not None:
            raise CallFailed(f"a worker refuses: {refusal[1]}")
        result = run_call(self.engine, self.sites[frame.site], frame, time.monotonic())
        if result.refused is not None:
            raise CallFailed(f"a worker cannot compute: {result.failed}")
        return result.frame


class FramedExperts:
    """See the module; `Experts` of `backbone/hook.py`, in exact mode. Expert e is on worker e modulo their number."""

    def __init__(self, manifest: Manifest, source: SourceBank, *, workers: int = 3) -> None:
        self._sites = {site.index: site for site in manifest.sites}
        self._decoder = FrameDecoder(TO_CLIENT)
        self._calls = 0
        self.workers: list[FramedWorker] = []
        try:
            for number in range(workers):
                held = {
                    site.index: source.stacked(site.index, range(number, site.n_expert, workers))
                    for site in manifest.sites
                }
                bank = ExpertBank(manifest.sites, held, "cpu")
                try:
                    self.workers.append(FramedWorker(self._sites, ExpertEngine(bank)))
                finally:
                    bank.close()  # it goes when the engine does
        except BaseException:
            self.close()
            raise

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> Ready:
        """See `hook.Experts`."""
        request = make_request(self._sites[site], x, ids, weights, partial=False)
        owner = request.experts % len(self.workers)
        parts = [
            self._ask(worker, request, np.flatnonzero(owner == number)) for number, worker in enumerate(self.workers)
        ]
        return Ready(combine(request, [part for part in parts if part is not None]))

    def _ask(
        self, worker: FramedWorker, request: Request, pairs: np.ndarray[tuple[int], np.dtype[np.intp]]
    ) -> tuple[Share, F32] | None:
        if not len(pairs):
            return None
        share = request.share(pairs)
        self._calls += 1
        data = worker.answer(share.frame(self._calls, WireType.F32, WireType.F32).encode())
        answer = _only(self._decoder.feed(data), Answer)
        if answer.id != self._calls:
            raise CallFailed(f"call {self._calls} is answered as {answer.id}")
        return share, share.read(answer, WireType.F32)

    def close(self) -> None:
        """Free the engines."""
        for worker in self.workers:
            worker.engine.close()


def _only(frames: list[Frame], kind: type[FrameT]) -> FrameT:
    if len(frames) != 1 or not isinstance(frames[0], kind):
        raise CallFailed(f"{len(frames)} frames where one {kind.__name__} was due")
    return frames[0]
