"""What the expert engine costs on top of ggml: a call of it against ggml's own graph of the same experts.

Both sides run in this process, on the same weights with the same threads, one after the other in pairs; the
figures are medians. `kernel` is the compute of the graph that a local llama.cpp would run (n_used experts
per token, one batch); `engine` is everything that `ExpertEngine.raw_rows` does, from numpy arrays to numpy
arrays. Called by `swarmnode bench engine` and by `python -m swarmnode.bench.engine`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict, cast

import numpy as np

from swarmnode.bench.command import count as at_least_one
from swarmnode.bench.command import parser, positive, run_command
from swarmnode.bench.local_graph import LocalGraph
from swarmnode.bench.synthetic import random_stacks, swiglu_site
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.ggml_types import TYPE_BY_NAME


@dataclass(frozen=True, slots=True)
class Case:
    """d_model × n_ff experts, `n_expert` of them held, `n_used` for each of `n_rows` tokens."""

    d_model: int
    n_ff: int
    n_expert: int
    n_used: int
    n_rows: int
    kinds: tuple[str, str, str]


class Row(TypedDict):
    """One case; `ratio` is kernel_us ÷ engine_us, the share of the kernel's throughput that is kept."""

    shape: str
    type: str
    n_rows: int
    engine_us: float
    kernel_us: float
    overhead_us: float
    ratio: float


class Result(TypedDict):
    """What `bench engine --json` prints."""

    rows: list[Row]


_Q4_K_M = ("Q4_K", "Q4_K", "Q6_K")  # up, gate, down as Q4_K_M files have them in the layers it favours

QUICK = (Case(256, 256, 8, 4, 1, _Q4_K_M), Case(256, 256, 8, 4, 8, ("Q8_0", "Q8_0", "Q8_0")))
# the demo model; a decode step and small batches of a model of 3072 × 1024 experts, 64 of them held
FULL = (
    *(Case(256, 256, 16, 4, n, _Q4_K_M) for n in (1, 4, 16, 64)),
    *(Case(3072, 1024, 64, 8, n, _Q4_K_M) for n in (1, 4, 16, 64)),
)


def run(quick: bool = False, *, threads: int = 1, seconds: float = 3.0) -> Result:
    """Measure every case for about `seconds` each (a tenth of a second when quick)."""
    cases = QUICK if quick else FULL
    budget = 0.1 if quick else seconds
    rows: list[Row] = []
    bank: ExpertBank | None = None
    held: tuple[object, ...] = ()
    for case in cases:
        wanted = (case.d_model, case.n_ff, case.n_expert, case.n_used, case.kinds)
        if bank is None or wanted != held:
            if bank is not None:
                bank.close()
            bank, held = _make_bank(case), wanted
        rows.append(_measure(bank, case, threads, budget))
    if bank is not None:
        bank.close()
    return {"rows": rows}


def _make_bank(case: Case) -> ExpertBank:
    up, gate, down = (TYPE_BY_NAME[kind].id for kind in case.kinds)
    site, shapes = swiglu_site(case.d_model, case.n_ff, case.n_expert, case.n_used, types=(up, gate, down))
    return ExpertBank([site], {0: random_stacks(shapes, range(case.n_expert), distinct=2)}, "cpu")


def _measure(bank: ExpertBank, case: Case, threads: int, seconds: float) -> Row:
    random = np.random.default_rng(0)
    x = random.standard_normal((case.n_rows, case.d_model), np.float32)
    chosen = [random.permutation(case.n_expert)[: case.n_used] for _ in range(case.n_rows)]
    ids = np.array(chosen, np.int32)
    experts = ids.reshape(-1)
    rows = np.repeat(np.arange(case.n_rows, dtype=np.int32), case.n_used)
    engine = ExpertEngine(bank, threads=threads)
    local = LocalGraph(bank.sites[0], case.n_rows, bank.device, threads=threads)
    local.set_inputs(x, ids)
    engine_us, kernel_us = _in_pairs(lambda: engine.raw_rows(0, x, rows, experts), local.compute, seconds)
    local.close()
    engine.close()
    return {
        "shape": f"{case.d_model}x{case.n_ff}, top {case.n_used} of {case.n_expert}",
        "type": "/".join(dict.fromkeys(case.kinds)),
        "n_rows": case.n_rows,
        "engine_us": round(engine_us, 1),
        "kernel_us": round(kernel_us, 1),
        "overhead_us": round(engine_us - kernel_us, 1),
        "ratio": round(kernel_us / engine_us, 4),
    }


def _in_pairs(first: Callable[[], object], second: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Median µs of both, taken in turns so that a busy moment of the machine meets both alike."""
    timings: tuple[list[float], list[float]] = ([], [])
    for function in (first, second):
        function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(timings[0]) < 5:
        order = (0, 1) if len(timings[0]) % 2 else (1, 0)
        for side in order:
            start = time.perf_counter()
            (first, second)[side]()
            timings[side].append((time.perf_counter() - start) * 1e6)
    return statistics.median(timings[0]), statistics.median(timings[1])


def table(result: Result) -> str:
    """The rows for people."""
    lines = [f"{'experts':<26}{'type':<12}{'rows':>5}{'engine µs':>12}{'ggml µs':>12}{'over µs':>10}{'ratio':>8}"]
    lines += [
        f"{r['shape']:<26}{r['type']:<12}{r['n_rows']:>5}{r['engine_us']:>12,.1f}{r['kernel_us']:>12,.1f}"
        f"{r['overhead_us']:>10,.1f}{r['ratio']:>8.3f}"
        for r in result["rows"]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or JSON with --json."""
    made = parser("python -m swarmnode.bench.engine", __doc__)
    made.add_argument("--quick", action="store_true", help="two small cases, for a test")
    made.add_argument("--threads", type=at_least_one, default=1)
    made.add_argument("--seconds", type=positive, default=3.0, help="time for each case")

    def measure(given: argparse.Namespace) -> Result:
        return run(given.quick, threads=given.threads, seconds=given.seconds)

    return run_command(made, arguments, measure, lambda result, _given: print(table(cast("Result", result))))


if __name__ == "__main__":
    raise SystemExit(main())
