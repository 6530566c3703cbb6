"""How soon a worker that tampers is found out, and whether an honest one is ever accused: the demo model's real rows.

The demo model reads held-out text, its experts computed here; every row is kept as it is and as it comes over each type
of wire. Then tokens are dispatched without a network, through the product's own policy (`dispatch/checks.py`,
`spot_check.py`, `row_screen.py`): the experts are spread over some workers, the first of which replaces one row in
fifty; this node has all experts, as a founder with the model's file has, and in F32 and F16 a screen.

    noise 0.1, noise 0.3   added, of so many times the row's length
    scaled                 1.3 times as long
    other expert           another expert's answer to the same token
    other token            the same expert's answer to another token
    zeros, negated         nothing, and the opposite

`caught` is the share of runs in which it was convicted within LIMIT tokens; `p50`, `p95`, `most` are tokens until then,
empty where that took longer than --tokens. `again` is the share of all rows that were computed once more, the mean and
the most of any run. `model` is the demo model as it is, or `large`: as many rows per token as 48 layers of top 8 have,
and no screen. `honest`: rows of honest workers, ALL of them compared as a check compares, how many would have been
accused, their lowest cosine, and the convictions of the policy itself over the same rows.

The rows are kept by `tampering_rows.py`, the play is `tampering_simulation.py`.

Called by `python -m swarmnode.bench.tampering [--runs N] [--rows N] [--quick] [--json]` and by the tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.backbone.llama import LlamaModel
from swarmnode.backbone.trace import trace_model
from swarmnode.bench.command import count as at_least_one
from swarmnode.bench.command import parser, run_command
from swarmnode.bench.tampering_rows import KeptRows, SiteRows
from swarmnode.bench.tampering_simulation import ONE_IN, WORKERS, Simulation
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.demo import MODEL
from swarmnode.dispatch.codec import WireType
from swarmnode.dispatch.row_screen import RowScreen
from swarmnode.dispatch.spot_check import agrees
from swarmnode.gate.forward import CHUNK, Forward
from swarmnode.gate.text import held_out_tokens
from swarmnode.model.last_matrix import LastMatrices
from swarmnode.model.source_bank import SourceBank
from swarmnode.onboard import onboard

LIMIT = 200  # tokens within which a cheat is to be caught
MODELS = ("demo", "large")
ERRORS = ("noise 0.1", "noise 0.3", "scaled", "other expert", "other token", "zeros", "negated")
WIRES = tuple(wire.name.lower() for wire in WireType)
QUICK: Mapping[str, Any] = {"runs": 3, "rows": 4800, "wires": ("f16",), "errors": ("noise 0.3",)}


def run(
    *,
    runs: int = 60,
    rows: int = 100_000,
    tokens: int = 2 * LIMIT,
    wires: Sequence[str] = WIRES,
    errors: Sequence[str] = ERRORS,
    models: Sequence[str] = MODELS,
    workers: int = WORKERS,
    progress: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Measure: `runs` per case, `rows` honest rows per type of wire. On one core, for minutes."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name:
        pack = onboard(MODEL, Path(name) / "pack")
        manifest = pack.manifest
        sites = manifest.sites
        count = -(-rows // sum(site.n_used for site in sites))
        bank = SourceBank(MODEL, manifest)
        experts = ExpertBank(sites, {site.index: bank.stacked(site.index) for site in sites})
        with closing(ExpertEngine(experts)) as engine:
            experts.close()
            kept = KeptRows(engine, sites)
            model = LlamaModel(pack.backbone, remote_experts=True)
            try:
                plan = trace_model(model, {tensor.name: tensor.ne for tensor in manifest.tensors})
                text = held_out_tokens(model, count)
                with closing(Forward(model, plan, kept)) as forward:
                    for at in range(0, count, CHUNK):
                        forward.logits(text[at : at + CHUNK])
            finally:
                model.close()
            found = kept.rows()
            screen = RowScreen(LastMatrices({site.index: site for site in sites}, bank.stacked))
            for site in sites:
                for expert in range(site.n_expert):
                    screen.prepare(site.index, expert)
            simulation = Simulation(found, screen, workers)
            honest, table = [], []
            for wire in (WireType[one.upper()] for one in wires):
                kept.over(wire, found)
                honest.append(_honest(simulation, found, wire))
                progress(f"honest {honest[-1]}")
                for which in models:
                    for error in errors:
                        table.append(_case(simulation, wire, which, error, runs, tokens))
                        progress(str(table[-1]))
        bank.close()
    return {"workers": workers, "one row in": ONE_IN, "runs": runs, "limit": LIMIT, "honest": honest, "rows": table}


def _honest(simulation: Simulation, found: Sequence[SiteRows], wire: WireType) -> dict[str, Any]:
    compared = accused = 0
    lowest = 1.0
    for of_site in found:
        exact, sent = (rows.reshape(-1, of_site.site.d_out) for rows in (of_site.exact, of_site.sent))
        compared += len(exact)
        accused += int((~agrees(sent, exact, wire)).sum())
        a, b = exact.astype(np.float64), sent.astype(np.float64)
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        lowest = min(lowest, float(((a * b).sum(axis=1)[lengths > 0] / lengths[lengths > 0]).min(initial=1.0)))
    played = simulation.run(wire, 0, tokens=len(found[0].requests))
    return {
        "wire": wire.name.lower(),
        "rows": compared,
        "accused": accused,
        "lowest_cosine": round(lowest, 6),
        "convicted": played.accused,
        "again": round(played.again / played.rows, 4),
    }


def _case(simulation: Simulation, wire: WireType, model: str, error: str, runs: int, tokens: int) -> dict[str, Any]:
    large = model == "large"
    done = [
        simulation.run(wire, seed, tokens=tokens if not large else LIMIT, error=error, large=large)
        for seed in range(runs)
    ]
    needed = sorted(one.caught if one.caught is not None else sys.maxsize for one in done)
    shares = [one.again / one.rows for one in done]

    def shown(at: int) -> int | None:
        return needed[at] if needed[at] < sys.maxsize else None

    return {
        "model": model,
        "wire": wire.name.lower(),
        "error": error,
        "caught": round(sum(one <= LIMIT for one in needed) / runs, 3),
        "p50": shown((runs - 1) // 2),
        "p95": shown(min(runs - 1, -(-runs * 95 // 100) - 1)),
        "most": shown(runs - 1),
        "again": round(sum(one.again for one in done) / sum(one.rows for one in done), 4),
        "again_most": round(max(shares), 4),
        "others_accused": sum(one.accused for one in done),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    made = parser("python -m swarmnode.bench.tampering", __doc__)
    made.add_argument("--runs", type=at_least_one, default=60, help="per case")
    made.add_argument("--rows", type=at_least_one, default=100_000, help="honest rows per type of wire")
    made.add_argument("--tokens", type=at_least_one, default=2 * LIMIT, help="until a run ends without a conviction")
    made.add_argument("--workers", type=at_least_one, default=WORKERS)
    made.add_argument("--wire", choices=WIRES, action="append", help="several times for several; all without")
    made.add_argument("--error", choices=ERRORS, action="append", help="likewise")
    made.add_argument("--model", choices=MODELS, action="append", help="likewise")
    made.add_argument("--quick", action="store_true", help="a few runs in F16 with noise: seconds")

    def measure(given: argparse.Namespace) -> Mapping[str, Any]:
        if given.quick:
            return run(**QUICK, workers=given.workers)
        return run(
            runs=given.runs,
            rows=given.rows,
            tokens=given.tokens,
            wires=given.wire or WIRES,
            errors=given.error or ERRORS,
            models=given.model or MODELS,
            workers=given.workers,
            progress=lambda text: print(text, file=sys.stderr),
        )

    return run_command(made, arguments, measure)


if __name__ == "__main__":
    raise SystemExit(main())
