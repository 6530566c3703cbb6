"""Round trips that hide each other: `python -m swarmnode.bench.star [--quick] [--json]`.

    star      one layer whose experts live on four workers at 10, 30, 60 and 90 ms. All are asked at once, so the layer
              takes the longest round trip and not their sum: bound = 90 ms + the busiest worker's engine
    overlap   a layer with a shared expert, which the backbone computes while the others are on their way, so that the
              layer takes the longer of the two and not their sum: bound = max(round trip, shared expert). More tokens
              per step make the shared expert longer; the routed ones are tiny, so that the round trip is what is hidden

Worker processes as `swarmnode up` starts them, each with an emulated link of its own; the backbone's parts in this
process, so that the hook can be timed.

    layer_ms     from the hook's first touch of x to the answer standing in the graph; median
    remote_ms    from the dispatch of a layer to its last answer, while the layer is computed; mean
    compute_ms   star: the busiest worker's engine; overlap: the shared expert, measured alone; median
    bound_ms     see above; `ratio` is the layer's time to it
    hiding       the layer's time to the longer of remote and shared: what hiding itself costs, whatever the trip took
    sum_ms       what it would take one after the other
    trip_ms      overlap: the same calls with nothing beside them, from the dispatch to the answer; median. It has the
                 experts' own compute and the call's overhead, which no hiding takes away
    trip_ratio   the layer's time to the longer of trip and shared
    path_ms      overlap: the round trip as QUIC itself measures it meanwhile (smoothed, RFC 9002): the link and how
                 long two idle nodes take to wake up and answer; mean
    path_ratio   the layer's time to the longer of path and shared

The overlap is measured with remote experts of a real layer, with tiny ones (the frames are a real layer's still), and
with tiny ones of a narrow model, a datagram each way: there the trip is as near to the round trip as a call comes.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.backbone.graph_trace import GraphPlan, SitePlan
from swarmnode.backbone.hook import F32, I32, EvalHook, Experts, PendingRows
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import Session
from swarmnode.backbone.trace import trace_model
from swarmnode.bench.clients import attached_client
from swarmnode.bench.command import parser, run_command
from swarmnode.bench.dispatch import LARGE
from swarmnode.bench.swarm_start import all_started
from swarmnode.demo import MODEL
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.local_swarm import NodeProcess
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack, onboard

STAR_RTT_MS = (10.0, 30.0, 60.0, 90.0)
OVERLAP_RTT_MS = 80.0
OVERLAP_TOKENS = (1, 4, 8, 16, 24)  # per step; their rows fit the window of a connection that has been used a little
OVERLAP_ROUNDS = 3  # in turns with the trip and the shared expert alone
# d 3072 and top-8, a shared expert that takes as long as a round trip, routed ones of next to nothing.
OVERLAP = RandomModel(
    d_model=3072,
    n_layers=1,
    n_ff_expert=32,
    n_expert=16,
    n_used=8,
    dense_type="Q8_0",
    n_ff_shared=16384,
    head_size=128,
)
# The same with experts as a real layer has them; and the same weights of a shared expert in a narrow model.
OVERLAP_REAL = replace(OVERLAP, n_ff_expert=1024, expert_types={"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"})
OVERLAP_NARROW = replace(OVERLAP, d_model=256, n_expert=2, n_used=1, n_ff_shared=196608, head_size=64)
OVERLAPS = (
    ("layer: d 3072, experts of 32, shared 16384", OVERLAP, OVERLAP_TOKENS),
    ("layer: d 3072, experts of 1024, shared 16384", OVERLAP_REAL, OVERLAP_TOKENS[:3]),
    ("layer: d 256, experts of 32, shared 196608", OVERLAP_NARROW, OVERLAP_TOKENS),
)
_OPTIONS = DispatchOptions(mode="partial", wire_out="f16", wire_back="f16")
_CONTEXT, _BATCH = 256, 64
_WARM_STEPS = 8


class SpanHook(EvalHook):
    """Notes how long each site took on the decode thread, seconds."""

    def __init__(self, plan: GraphPlan, experts: Experts) -> None:
        super().__init__(plan, experts)
        self._began: dict[int, float] = {}
        self.spans: list[float] = []

    def _send(self, site: SitePlan) -> None:
        self._began[site.site.index] = time.perf_counter()
        super()._send(site)

    def _put_back(self, site: SitePlan) -> None:
        super()._put_back(site)
        self.spans.append(time.perf_counter() - self._began[site.site.index])


class NoExperts:
    """Answers at once, with nothing: what is left of a layer's time is this node's own."""

    def __init__(self, d_out: int) -> None:
        self._d_out = d_out

    def submit(self, _site: int, _x: F32, ids: I32, _weights: F32) -> PendingRows:
        """See `hook.Experts`."""
        return _Nothing(np.zeros((len(ids), self._d_out), np.float32))


class _Nothing:
    def __init__(self, rows: F32) -> None:
        self._rows = rows

    def result(self) -> F32:
        return self._rows


def run(quick: bool = False) -> dict[str, Any]:
    """Measure; starts and ends processes of this machine. `quick`: the demo model's star and one overlap."""
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        rows = [await star("demo: d 256, top 4, 4 layers", onboard(MODEL, folder / "demo"), folder / "s0", quick)]
        if not quick:
            write_random_model(LARGE, folder / "large.gguf")
            large = onboard(folder / "large.gguf", folder / "large")
            rows.append(await star("layer: d 3072, ff 1024, top 8", large, folder / "s1", quick))
        for number, (label, model, tokens) in enumerate(OVERLAPS[:1] if quick else OVERLAPS):
            place = folder / f"overlap{number}"
            write_random_model(model, place.with_suffix(".gguf"))
            pack = onboard(place.with_suffix(".gguf"), place)
            rows += await overlap(label, pack, folder / f"o{number}", tokens[:1] if quick else tokens)
    return {"rows": rows}


async def star(label: str, pack: ModelPack, folder: Path, quick: bool = False) -> dict[str, Any]:
    """One row: the layer time of four workers at STAR_RTT_MS that hold a quarter of each layer."""
    steps = 6 if quick else 40
    shares = [(f"{i + 1}/{len(STAR_RTT_MS)}", rtt) for i, rtt in enumerate(STAR_RTT_MS)]
    workers = await _start_workers(pack, folder, shares)
    try:
        async with attached_client(pack, workers, _OPTIONS) as client:
            await asyncio.to_thread(decode, pack, client, 1, 2 if quick else _WARM_STEPS)
            spans, remote, compute = await _timed(pack, client, 1, steps)
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))
    return {
        "part": "star",
        "model": label,
        "rtt_ms": "+".join(f"{rtt:g}" for rtt in STAR_RTT_MS),
        "tokens": 1,
        **_figures(spans, remote, compute, max(STAR_RTT_MS) / 1e3 + compute, remote, sum(STAR_RTT_MS) / 1e3 + compute),
    }


async def overlap(label: str, pack: ModelPack, folder: Path, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Rows by tokens per step: the layer time over one worker at OVERLAP_RTT_MS, beside the shared expert alone and the
    trip alone."""
    d_out = pack.manifest.sites[0].d_out
    workers = await _start_workers(pack, folder, [("all", OVERLAP_RTT_MS)])
    rows = []
    try:
        async with attached_client(pack, workers, _OPTIONS) as client:
            for count in tokens:
                steps = max(8, 32 // count)
                await asyncio.to_thread(decode, pack, client, count, _WARM_STEPS)
                trip, shared, layer, remote, path = (list[float]() for _ in range(5))
                for _ in range(OVERLAP_ROUNDS):
                    trip += await asyncio.to_thread(trips, pack, client, count, steps)
                    shared += await asyncio.to_thread(decode, pack, NoExperts(d_out), count, steps)
                    spans, mean, _engine = await _timed(pack, client, count, steps)
                    layer += spans
                    remote.append(mean)
                    path += [worker.rtt_s for worker in client.workers() if worker.rtt_s is not None]
                rows.append(
                    {
                        "part": "overlap",
                        "model": label,
                        "rtt_ms": f"{OVERLAP_RTT_MS:g}",
                        "tokens": count,
                        **_overlap_figures(layer, remote, shared, trip, path),
                    }
                )
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))
    return rows


def _overlap_figures(
    spans: Sequence[float],
    remotes: Sequence[float],
    shareds: Sequence[float],
    trips_s: Sequence[float],
    paths: Sequence[float],
) -> dict[str, Any]:
    rtt, remote, layer = OVERLAP_RTT_MS / 1e3, statistics.mean(remotes), statistics.median(spans)
    shared, trip, path = statistics.median(shareds), statistics.median(trips_s), statistics.mean(paths)
    figures = _figures(spans, remote, shared, max(rtt, shared), max(remote, shared), rtt + shared)
    return figures | {
        "trip_ms": round(trip * 1e3, 2),
        "trip_ratio": round(layer / max(trip, shared), 3),
        "path_ms": round(path * 1e3, 2),
        "path_ratio": round(layer / max(path, shared), 3),
    }


def trips(pack: ModelPack, experts: Experts, tokens: int, steps: int) -> list[float]:
    """Seconds of `steps` calls of the first site by themselves: random rows, experts evenly chosen."""
    site, rng = pack.manifest.sites[0], np.random.default_rng(tokens)
    weights = np.full((tokens, site.n_used), 1.0 / site.n_used, np.float32)
    found = []
    for _ in range(steps):
        x = rng.standard_normal((tokens, site.d_in)).astype(np.float32)
        ids = np.argsort(rng.random((tokens, site.n_expert)), axis=1)[:, : site.n_used].astype(np.int32)
        began = time.perf_counter()
        experts.submit(site.index, x, ids, weights).result()
        found.append(time.perf_counter() - began)
    return found


async def _timed(pack: ModelPack, client: ExpertClient, tokens: int, steps: int) -> tuple[list[float], float, float]:
    """Seconds: every layer; the mean from dispatch to the last answer; the mean of the busiest worker's engine."""
    before = client.site_stats()
    spans = await asyncio.to_thread(decode, pack, client, tokens, steps)
    after = client.site_stats()
    calls = sum(after[site].calls - before[site].calls for site in after)
    remote = sum(after[site].round_trip_s - before[site].round_trip_s for site in after)
    engine = sum(after[site].longest_busy_s - before[site].longest_busy_s for site in after)
    return spans, remote / max(1, calls), engine / max(1, calls)


def _figures(
    spans: Sequence[float], remote: float, compute: float, bound: float, longer: float, one_after_the_other: float
) -> dict[str, Any]:
    """The columns of the module's table; all in seconds."""
    layer = statistics.median(spans)
    return {
        "layer_ms": round(layer * 1e3, 2),
        "remote_ms": round(remote * 1e3, 2),
        "compute_ms": round(compute * 1e3, 2),
        "bound_ms": round(bound * 1e3, 2),
        "ratio": round(layer / bound, 3),
        "hiding": round(layer / longer, 3),
        "sum_ms": round(one_after_the_other * 1e3, 2),
        "n": len(spans),
        "trip_ms": None,
        "trip_ratio": None,
        "path_ms": None,
        "path_ratio": None,
    }


def decode(pack: ModelPack, experts: Experts, tokens: int, steps: int) -> list[float]:
    """Seconds of every layer in `steps` evaluations of so many tokens each. What they are does not matter."""
    model = LlamaModel(pack.backbone, remote_experts=True)
    plan = trace_model(model, {tensor.name: tensor.ne for tensor in pack.manifest.tensors})
    hook = SpanHook(plan, experts)
    context = LlamaContext(model, n_context=_CONTEXT, n_batch=_BATCH, threads=1, callback=hook)
    session = Session(model, context, hook)
    try:
        for step in range(steps):
            context.clear()
            session.evaluate([(step + i) % model.n_vocab for i in range(tokens)], 0, all_logits=True)
    finally:
        session.close()
    return hook.spans


async def _start_workers(pack: ModelPack, folder: Path, shares: Sequence[tuple[str, float]]) -> list[NodeProcess]:
    """One worker per share of the experts, each behind a round trip of its own, ms."""
    common = ["--model", str(pack.path), "--listen", "127.0.0.1:0", "--threads", "1"]
    return await all_started(
        NodeProcess.start(f"worker-{i}", folder, [*common, "--experts", share, "--emulate", f"rtt={rtt:g}ms"])
        for i, (share, rtt) in enumerate(shares)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m swarmnode.bench.star [--quick] [--json]`."""
    made = parser("star", __doc__)
    made.add_argument("--quick", action="store_true", help="the demo model's star and one overlap")
    return run_command(made, arguments, lambda given: run(quick=given.quick))


if __name__ == "__main__":
    raise SystemExit(main())
