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

Called by `python -m swarmnode.bench.tampering [--runs N] [--rows N] [--quick] [--json]` and by the tests.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.backbone.llama import LlamaModel
from swarmnode.bench.command import parser, run_command
from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.expert_bank import ExpertBank
from swarmnode.compute.recipe import Site
from swarmnode.demo import MODEL
from swarmnode.dispatch.checks import Checks
from swarmnode.dispatch.codec import F32, WireType, decode_rows, encode_rows
from swarmnode.dispatch.replicas import LOCAL, Candidate
from swarmnode.dispatch.request import I32, Request, Share, combine, make_request
from swarmnode.dispatch.row_screen import COARSEST_SCREENED, RowScreen
from swarmnode.dispatch.spot_check import CheckPolicy, SpotChecks, agrees
from swarmnode.gate.forward import CHUNK, Forward
from swarmnode.gate.text import held_out_tokens
from swarmnode.model.last_matrix import LastMatrices
from swarmnode.model.source_bank import SourceBank
from swarmnode.onboard import onboard, trace_model

LIMIT = 200  # tokens within which a cheat is to be caught
ONE_IN = 50
WORKERS = 4
LARGE_ROWS = 48 * 8  # per token
MODELS = ("demo", "large")
ERRORS = ("noise 0.1", "noise 0.3", "scaled", "other expert", "other token", "zeros", "negated")
WIRES = tuple(wire.name.lower() for wire in WireType)
QUICK: Mapping[str, Any] = {"runs": 3, "rows": 4800, "wires": ("f16",), "errors": ("noise 0.3",)}


# ---- the rows


@dataclass(slots=True)
class _SiteRows:
    """All that one site was asked: requests of one token each, and rows [n_tokens, k, d_out]."""

    site: Site
    requests: list[Request] = field(default_factory=list)
    experts: list[list[int]] = field(default_factory=list)  # of each
    exact: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    other: F32 = field(default_factory=lambda: np.empty(0, np.float32))  # of the expert beside
    sent: F32 = field(default_factory=lambda: np.empty(0, np.float32))  # honest, over the wire of the moment


@dataclass(frozen=True, slots=True)
class _Ready:
    rows: F32

    def result(self) -> F32:
        return self.rows


class _Kept:
    """Computes all experts here and keeps what was asked for, a batch at a time."""

    def __init__(self, engine: ExpertEngine, sites: Sequence[Site]) -> None:
        self._engine, self._sites = engine, {site.index: site for site in sites}
        self.batches: dict[int, list[tuple[Request, F32, F32]]] = {site.index: [] for site in sites}

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> _Ready:
        """See `hook.Experts`."""
        described = self._sites[site]
        request = make_request(described, x.copy(), ids.copy(), weights.copy(), partial=False)
        share = request.share(range(len(request.experts)))
        rows = share.compute(self._engine)
        beside = (share.experts + 1) % described.n_expert
        other = self._engine.raw_rows(site, share.x, share.rows, beside.astype(np.int32))
        self.batches[site].append((request, rows, other))
        return _Ready(combine(request, [(share, rows)]))

    def rows(self) -> list[_SiteRows]:
        """Token by token."""
        found = []
        for index, batches in self.batches.items():
            site = self._sites[index]
            of_site = _SiteRows(site)
            for request, _, _ in batches:
                per = len(request.x) // request.n_tokens
                ids = request.experts.reshape(-1, site.n_used)
                weights = request.weights.reshape(-1, site.n_used)
                of_site.requests += [
                    make_request(
                        site, request.x[t * per : (t + 1) * per], ids[t : t + 1], weights[t : t + 1], partial=False
                    )
                    for t in range(request.n_tokens)
                ]
            of_site.experts = [request.experts.tolist() for request in of_site.requests]
            shape = -1, site.n_used, site.d_out
            of_site.exact = np.concatenate([rows for _, rows, _ in batches]).reshape(shape)
            of_site.other = np.concatenate([other for _, _, other in batches]).reshape(shape)
            found.append(of_site)
        return found

    def over(self, wire: WireType, sites: Sequence[_SiteRows]) -> None:
        """Make `sent` of every site: x and the rows in this type."""
        for of_site in sites:
            parts = []
            for request, _, _ in self.batches[of_site.site.index]:
                share = request.share(range(len(request.experts)))
                x = through(share.x, wire)
                parts.append(through(self._engine.raw_rows(of_site.site.index, x, share.rows, share.experts), wire))
            of_site.sent = np.concatenate(parts).reshape(of_site.exact.shape)


def through(rows: F32, wire: WireType) -> F32:
    """Rows as they arrive."""
    used, data = encode_rows(rows, wire)
    return decode_rows(data, used, *rows.shape)


# ---- the backbone


class _Backbone:
    """What checks see of their client; implements checks.CheckHost. It computes what it is asked at once."""

    def __init__(self, find: Callable[[Share], F32]) -> None:
        self._find = find
        self._attempts = 0
        self.queue: deque[tuple[int, Share]] = deque()
        self.again = 0
        self.convicted: set[int] = set()

    def next_attempt(self) -> int:
        self._attempts += 1
        return self._attempts

    def own_held(self, request: Request) -> int:
        return (1 << request.site.n_expert) - 1

    def candidates(self, request: Request) -> list[Candidate]:
        return []

    def compute_again(self, attempt: int, by: int, share: Share, subject: int) -> bool:
        assert by == LOCAL
        self.again += len(share.pairs)
        self.queue.append((attempt, share))
        return True

    def withdraw(self, attempt: int, by: int) -> None:
        self.queue = deque(one for one in self.queue if one[0] != attempt)

    def patience(self, by: int, n_pairs: int) -> float:
        return 1.0

    def release(self, attempt: int) -> None:
        """Nobody waits here."""

    def hold(self, attempt: int, seconds: float) -> None:
        """Nobody waits here."""

    def reject(self, attempt: int, why: str) -> None:
        raise AssertionError("with experts of its own a node convicts")

    def convict(self, worker: int, why: str, subject: int) -> None:
        self.convicted.add(worker)

    def suspect(self, worker: int, why: str) -> None:
        raise AssertionError("with experts of its own a node convicts")

    def peer(self, worker: int) -> str:
        return f"peer {worker}"

    def name(self, worker: int) -> str:
        return f"w{worker}"

    def computed(self, checks: Checks) -> None:
        """Let everything come that is computed."""
        while self.queue:
            attempt, share = self.queue.popleft()
            checks.computed(attempt, self._find(share))


Tamper = Callable[[_SiteRows, int, int], F32]  # site, token, rank -> the row instead


def tamper_with(error: str, source: np.random.Generator) -> Tamper:
    """One row, wrong in this way; it still has to travel."""

    def noise(of_site: _SiteRows, token: int, rank: int) -> F32:
        row = _row(of_site.exact, token, rank)
        added = source.standard_normal(len(row)).astype(np.float32)
        added *= np.float32(float(error.split()[1]) * np.linalg.norm(row) / np.linalg.norm(added))
        added += row
        return added

    def other_token(of_site: _SiteRows, token: int, rank: int) -> F32:
        expert = of_site.experts[token][rank]
        for _ in range(1000):
            at = int(source.integers(len(of_site.requests)))
            if expert in of_site.experts[at] and at != token:
                return _row(of_site.exact, at, of_site.experts[at].index(expert))
        return _row(of_site.other, token, rank)

    simple: dict[str, Tamper] = {
        "scaled": lambda of_site, token, rank: _row(of_site.exact, token, rank) * np.float32(1.3),
        "other expert": lambda of_site, token, rank: _row(of_site.other, token, rank),
        "other token": other_token,
        "zeros": lambda of_site, token, rank: np.zeros_like(_row(of_site.exact, token, rank)),
        "negated": lambda of_site, token, rank: np.negative(_row(of_site.exact, token, rank)),
    }
    return simple.get(error, noise)


def _row(rows: F32, token: int, rank: int) -> F32:
    row: F32 = rows[token, rank]
    return row


@dataclass(slots=True)
class _Run:
    caught: int | None = None  # tokens until then
    accused: int = 0  # honest workers
    rows: int = 0
    again: int = 0


class Simulation:
    """Dispatches the rows of `sites`, over and over, to `workers` workers."""

    def __init__(self, sites: Sequence[_SiteRows], screen: RowScreen, workers: int = WORKERS) -> None:
        self._sites, self._screen, self._workers = sites, screen, workers
        self._tokens = len(sites[0].requests)
        self._at: dict[int, tuple[_SiteRows, int]] = {
            id(request): (of_site, token) for of_site in sites for token, request in enumerate(of_site.requests)
        }

    def run(self, wire: WireType, seed: int, *, tokens: int, error: str = "", large: bool = False) -> _Run:
        """One run until the cheat is convicted, or for `tokens`; without `error` all are honest."""
        chance, source = random.Random(seed), np.random.default_rng(seed)
        screen = self._screen if wire <= COARSEST_SCREENED and not large else None
        host = _Backbone(self._exact)
        policy = SpotChecks(CheckPolicy(), chance.random, screened=screen is not None)
        checks = Checks(host, policy, lambda _site: wire, screen)
        owner = {
            of_site.site.index: (source.permutation(of_site.site.n_expert) % self._workers).tolist()
            for of_site in self._sites
        }
        tamper = tamper_with(error, source)
        per_token = sum(of_site.site.n_used for of_site in self._sites)
        at_once = max(1, LARGE_ROWS // per_token) if large else 1
        first = int(source.integers(self._tokens))
        result = _Run()
        for number in range(tokens * at_once):
            token = (first + number) % self._tokens
            for of_site in self._sites:
                for worker, share in self._shares(of_site, token, owner[of_site.site.index]):
                    rows = of_site.sent[token, share.pairs].copy()
                    if error and worker == 0:
                        for row in np.flatnonzero(source.random(len(rows)) < 1 / ONE_IN).tolist():
                            wrong = tamper(of_site, token, int(share.pairs[row]))
                            rows[row] = through(wrong[None, :], wire)[0]
                    attempt = host.next_attempt()
                    checks.asked(attempt, worker, share)
                    result.rows += len(share.pairs)
                    checks.answered(attempt, worker, share, rows)
                    host.computed(checks)
                    checks.forget(attempt)
                    result.again = host.again
                    if host.convicted:
                        result.accused += len(host.convicted - ({0} if error else set()))
                        if error and 0 in host.convicted:
                            result.caught = number // at_once + 1
                            return result
                        host.convicted.clear()
        return result

    def _exact(self, share: Share) -> F32:
        of_site, token = self._at[id(share.request)]
        rows: F32 = of_site.exact[token, share.pairs]
        return rows

    @staticmethod
    def _shares(of_site: _SiteRows, token: int, owner: Sequence[int]) -> Iterator[tuple[int, Share]]:
        asked: dict[int, list[int]] = {}
        for pair, expert in enumerate(of_site.experts[token]):
            asked.setdefault(owner[expert], []).append(pair)
        for worker, pairs in asked.items():
            yield worker, of_site.requests[token].share(pairs)


# ---- the measurement


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
            kept = _Kept(engine, sites)
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


def _honest(simulation: Simulation, found: Sequence[_SiteRows], wire: WireType) -> dict[str, Any]:
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
    made.add_argument("--runs", type=_positive, default=60, help="per case")
    made.add_argument("--rows", type=_positive, default=100_000, help="honest rows per type of wire")
    made.add_argument("--tokens", type=_positive, default=2 * LIMIT, help="until a run ends without a conviction")
    made.add_argument("--workers", type=_positive, default=WORKERS)
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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
