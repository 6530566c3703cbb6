"""What placement is worth on real routing: `python -m swarmnode.bench.placement [--tokens N] [--json]`.

The demo model runs over held-out text, its experts computed in this process; every choice of the router is noted. The
first half of the tokens is what placement is made from, the second half what it is judged by.

Two tables. Workers: how many distinct workers a token's selected experts live on, per site, when all hold equally much:
split by load alone (EPLB's packing), split by co-activation at the same balance and at 1.2, and as the planner places
them (whole sites). Balance is the busiest worker's load over the mean on the first half: for a split the worst site's,
for the plan over all sites. Local budget: blocking round trips per token when the backbone holds a share of all experts
itself: chosen for whole selections by the planner, and the hottest of each site for comparison.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.backbone.hook import F32, I32, EvalHook
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import Session
from swarmnode.backbone.trace import trace_model
from swarmnode.bench.command import Result, parser, run_command
from swarmnode.bench.command import count as at_least_one
from swarmnode.bench.fidelity import held_out_tokens
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.demo import MODEL
from swarmnode.errors import UsageError
from swarmnode.model.manifest import Manifest
from swarmnode.model.source_bank import SourceBank
from swarmnode.onboard import onboard
from swarmnode.placement.coactivation import balance, load_only, split, workers_per_token
from swarmnode.placement.planner import PlanRequest, WorkerSpec, estimate, plan
from swarmnode.placement.request import bools
from swarmnode.placement.routing import RoutingStats

Trace = Mapping[int, I32]  # site -> choices [tokens, n_used]

CHUNK = 512  # tokens evaluated together, each chunk a text of its own
WORKERS = (2, 3, 4, 8)
BUDGETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_RTT_S = 0.02


@dataclass(frozen=True, slots=True)
class _Rows:
    rows: F32

    def result(self) -> F32:
        return self.rows


@dataclass(slots=True)
class RoutedExperts:
    """Computes all experts here and keeps what was asked for."""

    engine: ExpertEngine
    choices: dict[int, list[I32]] = field(default_factory=dict)

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> _Rows:
        """See `hook.Experts`."""
        self.choices.setdefault(site, []).append(ids.copy())
        n, k = ids.shape
        token = np.repeat(np.arange(n, dtype=np.int32), k)
        flat = np.ascontiguousarray(ids.reshape(-1)), np.ascontiguousarray(weights.reshape(-1))
        return _Rows(self.engine.partial_sums(site, x, token, *flat, token, n))


def capture(tokens: int) -> tuple[Manifest, Trace]:
    """Run the demo model over so many tokens of held-out text (whole chunks) and note the router's choices."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        pack = onboard(MODEL, Path(name) / "pack")
        bank = SourceBank(MODEL, pack.manifest)
        stacked = {site.index: bank.stacked(site.index) for site in pack.manifest.sites}
        experts = RoutedExperts(ExpertEngine(ExpertBank(pack.manifest.sites, stacked)))
        model = LlamaModel(pack.backbone, remote_experts=True)
        try:
            hook = EvalHook(trace_model(model, {t.name: t.ne for t in pack.manifest.tensors}), experts)
            context = LlamaContext(model, n_context=CHUNK, n_batch=CHUNK, threads=1, callback=hook)
            try:
                text = held_out_tokens(model, -(-tokens // CHUNK) * CHUNK)
                experts.choices.clear()
                session = Session(model, context, hook)
                for at in range(0, len(text), CHUNK):
                    context.clear()
                    session.evaluate(text[at : at + CHUNK], 0, all_logits=True)
            finally:
                context.close()
        finally:
            model.close()
            experts.engine.close()
    return pack.manifest, {site: np.concatenate(found) for site, found in experts.choices.items()}


def statistics(trace: Trace, sites: Mapping[int, int]) -> RoutingStats:
    """What a backbone would know after this trace; without decay, so that the whole of it counts."""
    stats = RoutingStats(sites, half_life=1e9)
    for site, ids in trace.items():
        for at in range(0, len(ids), CHUNK):
            stats.note(site, ids[at : at + CHUNK])
    stats.flush()
    return stats


@dataclass(frozen=True, slots=True)
class Halves:
    """What placement is made from, and what it is judged by."""

    manifest: Manifest
    known: RoutingStats
    judged: RoutingStats

    @classmethod
    def of(cls, manifest: Manifest, trace: Trace) -> Halves:
        """The first and the second half of a trace."""
        sites = {site.index: site.n_expert for site in manifest.sites}
        half = len(next(iter(trace.values()))) // 2
        first = statistics({site: ids[:half] for site, ids in trace.items()}, sites)
        return cls(manifest, first, statistics({site: ids[half:] for site, ids in trace.items()}, sites))

    @property
    def total_bytes(self) -> int:
        """All experts."""
        return sum(self.manifest.expert_bytes(site.index) * site.n_expert for site in self.manifest.sites)

    def request(self, stats: RoutingStats, workers: list[WorkerSpec], local_budget: int = 0) -> PlanRequest:
        """A planner's question with these statistics."""
        sites = self.manifest.sites
        pairs = {site.index: found for site in sites if (found := stats.pairs(site.index)) is not None}
        return PlanRequest(
            expert_bytes={site.index: self.manifest.expert_bytes(site.index) for site in sites},
            n_expert={site.index: site.n_expert for site in sites},
            weights={site.index: stats.weights(site.index) for site in sites},
            pairs=pairs,
            samples={site.index: stats.samples(site.index) for site in sites},
            workers=workers,
            k={site.index: site.n_used for site in sites},
            local_budget=local_budget,
            replicas=1,
            d_bytes=2 * sites[0].d_out,
        )


def workers_table(halves: Halves) -> list[dict[str, Any]]:
    """One row per number of workers."""
    rows = []
    for count in WORKERS:
        by_load = _split_sites(halves, count, None)
        bound = max(by_load["balance"], 1.05)
        together, looser = _split_sites(halves, count, bound), _split_sites(halves, count, max(bound, 1.2))
        planned = _planned(halves, count)
        row: dict[str, Any] = {"workers": count}
        for name, found in (
            ("load_only", by_load),
            ("coactivation", together),
            ("coactivation_1.2", looser),
            ("planned", planned),
        ):
            row[name] = round(found["per_token"], 3)
            row[f"{name}_balance"] = round(found["balance"], 3)
            if found is not by_load:
                row[f"{name}_fewer"] = round(1 - found["per_token"] / by_load["per_token"], 3)
        rows.append(row)
    return rows


def _split_sites(halves: Halves, count: int, bound: float | None) -> dict[str, float]:
    """Every site over all workers: by load alone without a bound, else by co-activation within it."""
    per_token, worst = [], 1.0
    for site in halves.manifest.sites:
        n, weights = site.n_expert, halves.known.weights(site.index)
        if bound is None:
            worker = load_only(weights, [-(-n // count)] * count)
        else:
            pairs = halves.known.pairs(site.index)
            assert pairs is not None  # the demo model has 16 experts
            worker = split(weights, pairs, [-(-n // count) + 2] * count, max_over_mean=bound)
        per_token.append(workers_per_token(worker, halves.judged.samples(site.index), count))
        worst = max(worst, balance(worker, weights, count))
    return {"per_token": float(np.mean(per_token)), "balance": worst}


def _planned(halves: Halves, count: int) -> dict[str, float]:
    largest = max(halves.manifest.expert_bytes(site.index) for site in halves.manifest.sites)
    workers = [WorkerSpec(f"w{i}", halves.total_bytes // count + largest, _RTT_S) for i in range(count)]
    placement = plan(halves.request(halves.known, workers))
    found = estimate(halves.request(halves.judged, workers), placement.holdings, placement.local)
    loads = np.zeros(count)
    for number, worker in enumerate(workers):
        for site, held in placement.holdings.get(worker.peer, {}).items():
            weights = halves.known.weights(site)
            loads[number] += float(weights[bools(held, len(weights))].sum())
    return {"per_token": found.workers_per_token, "balance": float(loads.max() / loads.mean())}


def budget_table(halves: Halves) -> list[dict[str, Any]]:
    """One row per share of all experts that the backbone holds itself."""
    rows = []
    workers = [WorkerSpec("w", halves.total_bytes, _RTT_S)]
    everything = {site.index: (1 << site.n_expert) - 1 for site in halves.manifest.sites}
    judged = halves.request(halves.judged, workers)
    for share in BUDGETS:
        budget = round(halves.total_bytes * share)
        placement = plan(halves.request(halves.known, workers, budget))
        planned = estimate(judged, {"w": everything}, placement.local)
        hottest = estimate(judged, {"w": everything}, _hottest(halves, share))
        rows.append(
            {
                "local_share": share,
                "experts": sum(held.bit_count() for held in placement.local.values()),
                "round_trips_per_token": round(planned.round_trips_per_token, 3),
                "hottest_of_each_site": round(hottest.round_trips_per_token, 3),
            }
        )
    return rows


def _hottest(halves: Halves, share: float) -> dict[int, int]:
    chosen = {}
    for site in halves.manifest.sites:
        hottest: NDArray[np.int64] = np.argsort(-halves.known.weights(site.index), kind="stable")
        chosen[site.index] = sum(1 << int(expert) for expert in hottest[: int(site.n_expert * share)])
    return chosen


def run(tokens: int = 8192) -> dict[str, Any]:
    """Both tables over so many tokens of held-out text."""
    manifest, trace = capture(tokens)
    halves = Halves.of(manifest, trace)
    return {
        "model": manifest.name,
        "tokens": len(next(iter(trace.values()))),
        "sites": len(manifest.sites),
        "rows": workers_table(halves),
        "local_budget": budget_table(halves),
    }


def _show(result: Result, _given: argparse.Namespace) -> None:
    print(
        f"{result['model']}, {result['sites']} sites, {result['tokens']} tokens of held-out text, half of them to judge"
    )
    print("distinct workers per token and site (max/mean load) · fewer than by load alone")
    for row in result["rows"]:
        cells = [f"{row['workers']} workers: load only {row['load_only']:.2f} ({row['load_only_balance']:.2f})"]
        for name in ("coactivation", "coactivation_1.2", "planned"):
            cells.append(f"{name} {row[name]:.2f} ({row[name + '_balance']:.2f}) −{row[name + '_fewer']:.0%}")
        print("  " + " · ".join(cells))
    print("blocking round trips per token, by the share of all experts that the backbone holds itself")
    for row in result["local_budget"]:
        print(
            f"  {row['local_share']:4.0%} ({row['experts']:2} experts): {row['round_trips_per_token']:.2f} · "
            f"hottest of each site {row['hottest_of_each_site']:.2f}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    made = parser("python -m swarmnode.bench.placement", __doc__)
    made.add_argument("--tokens", type=at_least_one, default=8192, help="half of them to judge by")

    def measure(given: argparse.Namespace) -> Result:
        if given.tokens < 2:
            raise UsageError("--tokens: at least 2, half of them to judge by")
        return run(given.tokens)

    return run_command(made, arguments, measure, _show)


if __name__ == "__main__":
    raise SystemExit(main())
