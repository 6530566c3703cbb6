"""What a prompt costs over a thin link: tokens per second, and each layer's time beside what it cannot be less than.

Worker processes, the backbone's parts (llama.cpp, hook, client, endpoint) in this process, so that its layers can be
timed; the link is emulated at this end, one for all workers. The prompt is evaluated in batches of `batch`: one of a
single batch REPEAT times and for REPEAT_S, of which the median counts, a longer one once, since it is much the same
layer all along. The backbone's own time is measured in turns with it: a shared machine changes its pace by a third.
Every row is measured twice: with the backbone's own time in it, and the dispatch alone, calls of a batch of random rows
one after the other.

    layer_ms   the time of a layer and batch, the head's and embedding's included
    local_ms   the same with experts that answer at once: what this node computes itself
    send_ms, compute_ms, return_ms   what all bytes, and the rows of one worker, take alone
    cut_compute_ms   the same rows in pieces, each of which reads its weights anew
    bound_ms   local + round trip + the longest of these three
    ratio      bound_ms ÷ layer_ms
    alone_ms, alone_bound_ms, alone_ratio   the same without the backbone: dispatch alone
    alone_whole_ms   alone_ms with calls that are not cut

`model` says what the shape is: one layer of a real model's, or the demo model. A case `paced` has workers that compute
nothing and take as long as a worker would that needs PACE_S for a row and SETUP_ROWS of them for each expert of a call:
so a machine of two cores shows what several others would do. A case `real` computes. `streams 64` is a step of 64
generations: to the experts it is a prompt of 64 tokens.

Called by `python -m swarmnode.bench.prefill [--quick] [--json] [--rtt MS] [--mbit …] [--tokens …]`; says on standard
error what it is at. The paced workers are this module too (`… up …`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from swarmnode.backbone.hook import EvalHook, Experts, PendingRows
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import Session
from swarmnode.backbone.trace import trace_model
from swarmnode.bench import paced_worker
from swarmnode.bench.clients import attached_client
from swarmnode.bench.command import Result, count, not_negative, parser, positive, run_command
from swarmnode.bench.dispatch import LARGE
from swarmnode.compute.engine_api import F32Array, I32Array
from swarmnode.compute.recipe import Site
from swarmnode.demo import MODEL
from swarmnode.dispatch.client import ExpertClient
from swarmnode.dispatch.codec import WireName
from swarmnode.dispatch.cut_trials import FIRST
from swarmnode.dispatch.options import DispatchOptions
from swarmnode.errors import Cancelled
from swarmnode.local_swarm import NodeProcess
from swarmnode.model.random_model import write_random_model
from swarmnode.onboard import ModelPack, onboard
from transport.config import TransportConfig
from transport.emulation import LinkEmulation

PACE_S = 30e-6  # a row of 3,072 × 1,024 on eight cores
LAYER, DEMO = "one layer of d 3072, ff 1024, top 8 of 32", "demo: d 256, ff 256, top 4 of 16"
RATES = (100.0, 1000.0, math.inf)  # Mbit/s
BATCH, MOST_TOKENS = 2048, 1 << 17  # of a prompt's tokens
# Evaluations of a prompt of one batch: at least REPEAT, at most MOST_REPEATS, or so many seconds of them. One of
# several batches is evaluated once.
REPEAT, MOST_REPEATS, REPEAT_S = 3, 15, 4.0
# Of the dispatch alone: a congestion window takes some calls to open, and the first are cut and whole in turns; the
# median of the later ones counts.
ALONE_WARM, ALONE_CALLS, ALONE_S = 2 * FIRST + 1, 6, 5.0  # so many at most, or so many seconds and LEAST of them
LEAST = 2
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `rate`: Mbit/s each way. `pace_s`: of a row; 0 where the workers really compute."""

    model: str
    tokens: int
    batch: int
    rate: float
    rtt_ms: float = 80.0
    workers: int = 2
    pace_s: float = PACE_S
    wire: WireName = "f16"
    kind: Literal["prompt", "streams"] = "prompt"


def cases(rtt_ms: float, rates: Sequence[float], tokens: Sequence[int]) -> list[Case]:
    """All rows: prompts on both models, one in smaller batches, a step of 64 streams, one that really computes."""
    rows = []
    prompts = [(n, math.ceil(n / math.ceil(n / BATCH))) for n in tokens]  # batches alike: one bound is that of all
    for rate in rates:
        one = Case(LAYER, 2048, BATCH, rate, rtt_ms)
        rows += [replace(one, tokens=n, batch=batch) for n, batch in prompts]
        rows += [replace(one, batch=512), replace(one, tokens=64, batch=64, kind="streams")]
        rows += [replace(one, pace_s=0.0, workers=1, tokens=512, batch=512)]
        rows += [replace(one, model=DEMO, tokens=n, batch=batch, pace_s=0.0, workers=1) for n, batch in prompts]
    return rows


# ---- measuring


class _AtOnce:
    """Experts that answer with zeros before anybody waits; not any more once they are `ended`."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = {site.index: site for site in sites}
        self.ended = False

    def submit(self, site: int, x: F32Array, ids: I32Array, weights: F32Array) -> PendingRows:
        """See `hook.Experts`."""
        if self.ended:
            raise Cancelled("interrupted")
        return _Zeros(np.zeros((len(ids), self._sites[site].d_out), np.float32))


@dataclass(frozen=True, slots=True)
class _Zeros:
    rows: F32Array

    def result(self) -> F32Array:
        return self.rows


def run(
    quick: bool = False,
    *,
    rtt_ms: float = 80.0,
    rates: Sequence[float] = RATES,
    tokens: Sequence[int] = (2048, 8192),
    progress: Progress = lambda text: None,
) -> dict[str, Any]:
    """Measure all cases; blocks, and starts and ends processes of this machine. `quick`: two small ones."""
    small = Case(DEMO, 256, 256, 100.0, 10.0, workers=1, pace_s=10e-6)
    chosen = [small, replace(small, kind="streams", tokens=64, batch=64)] if quick else cases(rtt_ms, rates, tokens)
    return asyncio.run(_run(chosen, progress))


async def _run(chosen: Sequence[Case], progress: Progress) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        folder = Path(name)
        packs: dict[str, ModelPack] = {}
        for number, case in enumerate(chosen):
            progress(f"{number + 1} of {len(chosen)}: {_title(case)}, {_rate(case)}")
            pack = packs.get(case.model)
            if pack is None:
                pack = packs[case.model] = _pack(case.model, folder)
            row = await _measure(pack, case, folder / str(number))
            shown = "  {tokens_per_s} of {bound_tokens_per_s} tokens/s; ratio {ratio}, dispatch alone {alone_ratio}"
            progress(shown.format(**row))
            rows.append(row)
    machine = f"{platform.machine()}, {platform.python_version()}, emulated link, one thread of the backbone"
    return {"machine": machine, "rows": rows}


def _title(case: Case) -> str:
    return f"{case.kind} {case.tokens} in batches of {case.batch}, {case.model}"


def _rate(case: Case) -> str:
    return f"{case.rate:g} Mbit/s" if math.isfinite(case.rate) else "no limit of the rate"


def _pack(model: str, folder: Path) -> ModelPack:
    if model == DEMO:
        return onboard(MODEL, folder / "demo")
    write_random_model(LARGE, folder / "layer.gguf")
    return onboard(folder / "layer.gguf", folder / "layer")


@dataclass(frozen=True, slots=True)
class _Alone:
    """Calls one after the other: seconds of one, pieces for each worker, bytes each way, a worker's busy seconds."""

    seconds: float
    pieces: float
    out: float
    back: float
    busy_s: float


async def _measure(pack: ModelPack, case: Case, folder: Path) -> dict[str, Any]:
    async with _workers(pack, case, folder) as workers:
        async with attached_client(pack, workers, _options(case, cut=False), _link(case)) as client:
            whole = await asyncio.to_thread(_alone, pack, client, case, cut=False)
        async with attached_client(pack, workers, _options(case, cut=True), _link(case)) as client:
            cut = await asyncio.to_thread(_alone, pack, client, case, cut=True)  # so it has been measured, then
            nothing = _AtOnce(pack.manifest.sites)
            try:
                seconds, local_s = await asyncio.to_thread(_evaluate, pack, (client, nothing), case)
            finally:
                nothing.ended = True  # the thread would go on to the prompt's end
    layers = len(pack.manifest.sites) * math.ceil(case.tokens / case.batch)
    send, back, local, layer = (
        1e3 * s for s in (_line_s(cut.out, case), _line_s(cut.back, case), local_s / layers, seconds / layers)
    )
    compute = 1e3 * min(whole.busy_s, cut.busy_s)
    alone_bound = case.rtt_ms + max(send, compute, back)
    bound = local + alone_bound
    return {
        "case": f"{case.kind} {case.tokens}",
        "model": case.model,
        "compute": f"paced {case.pace_s * 1e6:g} µs" if case.pace_s else "real",
        "workers": case.workers,
        "batch": case.batch,
        "wire": case.wire,
        "mbit": case.rate if math.isfinite(case.rate) else None,
        "rtt_ms": case.rtt_ms,
        "tokens_per_s": round(case.tokens / seconds, 1),
        "bound_tokens_per_s": round(case.tokens / (bound * layers / 1e3), 1),
        "layer_ms": round(layer, 1),
        "bound_ms": round(bound, 1),
        "ratio": round(bound / layer, 3),
        "local_ms": round(local, 1),
        "send_ms": round(send, 1),
        "compute_ms": round(compute, 1),
        "cut_compute_ms": round(1e3 * cut.busy_s, 1),
        "return_ms": round(back, 1),
        "pieces": round(cut.pieces, 1),
        "alone_ms": round(1e3 * cut.seconds, 1),
        "alone_bound_ms": round(alone_bound, 1),
        "alone_ratio": round(alone_bound / (1e3 * cut.seconds), 3),
        "alone_whole_ms": round(1e3 * whole.seconds, 1),
    }


def _options(case: Case, *, cut: bool) -> DispatchOptions:
    options = DispatchOptions(mode="partial", wire_out=case.wire, wire_back=case.wire)
    return replace(options, call=replace(options.call, pieces=cut), late_ceiling_s=60.0)


def _line_s(size: float, case: Case) -> float:
    return size * 8 / (case.rate * 1e6)


def _alone(pack: ModelPack, client: ExpertClient, case: Case, *, cut: bool) -> _Alone:
    """Call the first site with a batch of random rows, again and again. In a thread of its own."""
    site, random = pack.manifest.sites[0], np.random.default_rng(0)
    x = random.standard_normal((case.batch, site.d_in)).astype(np.float32)
    ids = np.argsort(random.random((case.batch, site.n_expert)))[:, : site.n_used].astype(np.int32)
    weights = random.random((case.batch, site.n_used)).astype(np.float32)
    seconds: list[float] = []
    before = _totals(client)
    end = time.monotonic() + ALONE_S
    least = ALONE_WARM + LEAST if cut else LEAST
    while len(seconds) < least or (len(seconds) < ALONE_WARM + ALONE_CALLS and time.monotonic() < end):
        if len(seconds) in (1, ALONE_WARM):
            before = _totals(client)
        began = time.monotonic()
        client.submit(site.index, x, ids, weights).result()
        seconds.append(time.monotonic() - began)
    calls, *rest = (after - start for start, after in zip(before, _totals(client), strict=True))
    requests, out, back, busy = (value / calls for value in rest)
    counted = seconds[ALONE_WARM:] or seconds[1:]
    return _Alone(statistics.median(counted), requests / case.workers, out, back, busy)


def _link(case: Case) -> TransportConfig:
    rate = f",rate={case.rate:g}mbit" if math.isfinite(case.rate) else ""
    return TransportConfig(emulation=LinkEmulation.parse(f"rtt={case.rtt_ms:g}ms{rate}"))


@contextlib.asynccontextmanager
async def _workers(pack: ModelPack, case: Case, folder: Path) -> AsyncIterator[list[NodeProcess]]:
    module = paced_worker.__name__ if case.pace_s else "swarmnode"
    paced = [f"{paced_worker.PACED}{case.pace_s}"] if case.pace_s else []
    common = ["--model", str(pack.path), "--listen", "127.0.0.1:0", "--threads", "1", *paced]
    nodes: list[NodeProcess] = []
    try:
        for number in range(case.workers):
            share = ["--experts", f"{number + 1}/{case.workers}"]
            nodes.append(await NodeProcess.start(f"worker-{number + 1}", folder, [*common, *share], module))
        yield nodes
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


def _totals(client: ExpertClient) -> tuple[float, float, float, float, float]:
    """Calls, requests, bytes out, bytes back, and the busiest workers' seconds, of all layers."""
    stats = list(client.site_stats().values())
    # Of a call in pieces, `busy_s` adds up all pieces of all workers, who share its rows evenly.
    busy = sum(site.busy_s for site in stats) / max(1, len(client.workers()))
    sums = (sum(getattr(site, name) for site in stats) for name in ("calls", "requests", "bytes_out", "bytes_back"))
    calls, requests, out, back = sums
    return calls, requests, out, back, busy


def _evaluate(pack: ModelPack, both: Sequence[Experts], case: Case) -> list[float]:
    """Median seconds of the whole prompt with each of these experts, in turns. In a thread of its own."""
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(contextlib.closing(_session(pack, experts, case))) for experts in both]
        random, n_vocab = np.random.default_rng(0), sessions[0].model.n_vocab
        tokens = random.integers(0, n_vocab, case.tokens).tolist()
        for session in sessions:  # memory is touched for the first time
            session.evaluate(tokens[: min(64, case.batch)], 0, all_logits=True)
        found = [[_prompt_s(session, tokens, case.batch) for session in sessions]]
        while case.tokens <= case.batch and not _enough(len(found), sum(map(sum, found)) / len(both)):
            found.append([_prompt_s(session, tokens, case.batch) for session in sessions])
    return [statistics.median(one) for one in zip(*found, strict=True)]


def _enough(times: int, seconds: float) -> bool:
    return times >= MOST_REPEATS or (times >= REPEAT and seconds >= REPEAT_S)


def _session(pack: ModelPack, experts: Experts, case: Case) -> Session:
    model = LlamaModel(pack.backbone, remote_experts=True)
    plan = trace_model(model, {t.name: t.ne for t in pack.manifest.tensors})
    hook = EvalHook(plan, experts)
    context = LlamaContext(model, n_context=case.tokens + 8, n_batch=case.batch, threads=1, callback=hook)
    return Session(model, context, hook)


def _prompt_s(session: Session, tokens: list[int], batch: int) -> float:
    session.context.clear()
    began = time.perf_counter()
    for at in range(0, len(tokens), batch):
        # All logits, where each row is another generation's; so the last layer has all rows in both kinds.
        session.evaluate(tokens[at : at + batch], at, all_logits=True)
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    made = parser("python -m swarmnode.bench.prefill", __doc__)
    made.add_argument("--quick", action="store_true", help="two small cases, for a test")
    made.add_argument("--rtt", type=not_negative, default=80.0, help="milliseconds")
    made.add_argument("--mbit", type=_rates, default=RATES, help="such as 100,1000,inf")
    made.add_argument("--tokens", type=_counts, default=(2048, 8192), help="such as 2048,8192")

    def measure(chosen: argparse.Namespace) -> Result:
        return run(chosen.quick, rtt_ms=chosen.rtt, rates=chosen.mbit, tokens=chosen.tokens, progress=_tell)

    return run_command(made, arguments, measure)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rates(text: str) -> tuple[float, ...]:
    return tuple(math.inf if part == "inf" else positive(part) for part in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(count(part) for part in text.split(","))
    if max(counts) > MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"{max(counts)}: give {MOST_TOKENS:,} at most")
    return counts


if __name__ == "__main__":
    raise SystemExit(main())
