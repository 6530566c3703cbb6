"""What dispatching one MoE layer costs on loopback, and where the time goes.

Worker processes as `swarmnode up` starts them; the backbone's parts (llama.cpp, hook, client, endpoint) in this process
so that the hook can be timed. `total` runs from the hook's first touch of x to the answer standing in the graph; the
shared expert runs inside it.

    overhead   total − kernel: what dispatch costs
    kernel     ggml's own compute in the worker process, mean per call of the slowest worker
    hook       copying x, ids and weights out, submitting, adding up and writing the rows back
    engine     the busiest worker's engine call, kernels included
    path       the rest: threads woken, encode, QUIC both ways, decode

Called by `swarmnode bench dispatch` and `python -m swarmnode.bench.dispatch`.
"""

from __future__ import annotations

import asyncio
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swarmnode.backbone.graph_trace import GraphPlan, SitePlan
from swarmnode.backbone.hook import EvalHook
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import Session
from swarmnode.backbone.trace import trace_model
from swarmnode.bench.clients import attached_client
from swarmnode.bench.command import parser, run_command
from swarmnode.control import request_one
from swarmnode.demo import MODEL
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.local_swarm import LocalSwarm
from swarmnode.model.random_model import RandomModel, write_random_model
from swarmnode.onboard import ModelPack, onboard

# The layer shape of Qwen3.5-122B (d 3072, experts of 1024, top-8) with 32 experts, so that it fits anywhere.
LARGE = RandomModel(
    d_model=3072,
    n_layers=1,
    n_ff_expert=1024,
    n_expert=32,
    n_used=8,
    expert_types={"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"},
    dense_type="Q8_0",
    n_ff_shared=1024,
    head_size=128,
)
_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One row: how many workers, what comes back, how."""

    workers: int
    mode: Literal["exact", "partial"]
    wire: Literal["f32", "f16"]


CASES = (Case(1, "exact", "f32"), Case(3, "exact", "f32"), Case(1, "partial", "f16"), Case(3, "partial", "f16"))


class TimedHook(EvalHook):
    """Notes when each site's call began and ended on the decode thread (microseconds)."""

    def __init__(self, plan: GraphPlan, client: ExpertClient) -> None:
        super().__init__(plan, client)
        self._client_of_stats = client
        self._busy_before = 0.0
        self._began: dict[int, tuple[float, float]] = {}
        self.rows: list[tuple[int, float, float, float]] = []  # site, total, hook, busiest worker

    def _send(self, site: SitePlan) -> None:
        self._busy_before = self._busy(site)
        began = time.perf_counter()
        super()._send(site)
        self._began[site.site.index] = (began, time.perf_counter() - began)

    def _put_back(self, site: SitePlan) -> None:
        waited_before = self._waited(site)
        began = time.perf_counter()
        super()._put_back(site)
        ended = time.perf_counter()
        start, sending = self._began[site.site.index]
        putting = ended - began - (self._waited(site) - waited_before)
        busy = self._busy(site) - self._busy_before
        self.rows.append((site.site.index, (ended - start) * 1e6, (sending + putting) * 1e6, busy * 1e6))

    def _busy(self, site: SitePlan) -> float:
        return self._client_of_stats.site_stats()[site.site.index].longest_busy_s

    def _waited(self, site: SitePlan) -> float:
        return self._client_of_stats.site_stats()[site.site.index].wait_s


def run(quick: bool = False) -> dict[str, Any]:
    """Measure; medians in microseconds per layer and decode step. Starts and ends processes of this machine."""
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> dict[str, Any]:
    steps = 24 if quick else 120
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        models = {"demo: d 256, ff 256, top 4, Q4_K": MODEL}
        if not quick:
            write_random_model(LARGE, folder / "large.gguf")
            models["layer: d 3072, ff 1024, top 8, Q4_K"] = folder / "large.gguf"
        for number, (label, model) in enumerate(models.items()):
            pack = onboard(model, folder / f"pack-{number}")
            for case in CASES:
                at = folder / f"{number}-{case.workers}-{case.mode}"
                rows.append({"model": label, **await _measure(pack, case, at, steps)})
    return {"machine": f"{platform.machine()}, {platform.python_version()}, loopback", "rows": rows}


async def _measure(pack: ModelPack, case: Case, folder: Path, steps: int) -> dict[str, Any]:
    options = DispatchOptions(mode=case.mode, wire_out=case.wire, wire_back=case.wire)
    async with LocalSwarm(folder, pack.path) as swarm:
        await swarm.start_workers([f"{i + 1}/{case.workers}" for i in range(case.workers)])
        async with attached_client(pack, swarm.workers, options) as client:
            await asyncio.to_thread(_decode, pack, client, _WARM_STEPS)
            before = await _served(swarm)
            timings = await asyncio.to_thread(_decode, pack, client, steps)
            served = zip(before, await _served(swarm), strict=True)
    kernel = max((after[1] - start[1]) / max(1, after[0] - start[0]) for start, after in served)
    total, hook, busy = (statistics.median(t[i] for t in timings) for i in (1, 2, 3))
    return {
        "workers": case.workers,
        "mode": case.mode,
        "wire": case.wire,
        "total_us": round(total),
        "kernel_us": round(kernel),
        "overhead_us": round(total - kernel),
        "hook_us": round(hook),
        "engine_us": round(busy),
        "path_us": round(total - hook - busy),
        "n": len(timings),
    }


def _decode(pack: ModelPack, client: ExpertClient, steps: int) -> list[tuple[int, float, float, float]]:
    """`steps` single-token evaluations of the pack's backbone, of any tokens: what is timed does not depend on them."""
    model = LlamaModel(pack.backbone, remote_experts=True)
    plan = trace_model(model, {t.name: t.ne for t in pack.manifest.tensors})
    hook = TimedHook(plan, client)
    context = LlamaContext(model, n_context=256, n_batch=8, threads=1, callback=hook)
    session = Session(model, context, hook)
    try:
        for position in range(steps):
            session.evaluate([position % model.n_vocab], position)
    finally:
        session.close()
    return hook.rows


async def _served(swarm: LocalSwarm) -> list[tuple[int, float]]:
    """Calls and kernel microseconds of each worker so far."""
    states = [await request_one(node.state, "status") for node in swarm.workers]
    return [(s["status"]["served_calls"], s["status"]["served_kernel_ms"] * 1e3) for s in states]


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m swarmnode.bench.dispatch [--quick] [--json]`."""
    made = parser("python -m swarmnode.bench.dispatch", __doc__)
    made.add_argument("--quick", action="store_true", help="fewer repetitions")
    return run_command(made, arguments, lambda given: run(quick=given.quick))


if __name__ == "__main__":
    raise SystemExit(main())
