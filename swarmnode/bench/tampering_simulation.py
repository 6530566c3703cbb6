"""The play of `bench tampering`: tokens are dispatched without a network, a worker cheats, the backbone checks.

The policy is the product's own (`dispatch/checks.py`, `spot_check.py`, `row_screen.py`); what is played here is its
client and the workers. Called by `tampering.py`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.bench.tampering_rows import SiteRows, through
from swarmnode.dispatch.checks import Checks
from swarmnode.dispatch.codec import F32, WireType
from swarmnode.dispatch.replicas import LOCAL, Candidate
from swarmnode.dispatch.request import Request, Share
from swarmnode.dispatch.row_screen import COARSEST_SCREENED, RowScreen
from swarmnode.dispatch.spot_check import CheckPolicy, SpotChecks

ONE_IN = 50  # rows that the cheat replaces
WORKERS = 4
LARGE_ROWS = 48 * 8  # per token


class CheckingBackbone:
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


Tamper = Callable[[SiteRows, int, int], F32]  # site, token, rank -> the row instead


def tamper_with(error: str, source: np.random.Generator) -> Tamper:
    """One row, wrong in this way; it still has to travel."""

    def noise(of_site: SiteRows, token: int, rank: int) -> F32:
        row = _row(of_site.exact, token, rank)
        added = source.standard_normal(len(row)).astype(np.float32)
        added *= np.float32(float(error.split()[1]) * np.linalg.norm(row) / np.linalg.norm(added))
        added += row
        return added

    def other_token(of_site: SiteRows, token: int, rank: int) -> F32:
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
class Run:
    """What came of one run."""

    caught: int | None = None  # tokens until then
    accused: int = 0  # honest workers
    rows: int = 0
    again: int = 0


class Simulation:
    """Dispatches the rows of `sites`, over and over, to `workers` workers."""

    def __init__(self, sites: Sequence[SiteRows], screen: RowScreen, workers: int = WORKERS) -> None:
        self._sites, self._screen, self._workers = sites, screen, workers
        self._tokens = len(sites[0].requests)
        self._at: dict[int, tuple[SiteRows, int]] = {
            id(request): (of_site, token) for of_site in sites for token, request in enumerate(of_site.requests)
        }

    def run(self, wire: WireType, seed: int, *, tokens: int, error: str = "", large: bool = False) -> Run:
        """One run until the cheat is convicted, or for `tokens`; without `error` all are honest."""
        chance, source = random.Random(seed), np.random.default_rng(seed)
        screen = self._screen if wire <= COARSEST_SCREENED and not large else None
        host = CheckingBackbone(self._exact)
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
        result = Run()
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
    def _shares(of_site: SiteRows, token: int, owner: Sequence[int]) -> Iterator[tuple[int, Share]]:
        asked: dict[int, list[int]] = {}
        for pair, expert in enumerate(of_site.experts[token]):
            asked.setdefault(owner[expert], []).append(pair)
        for worker, pairs in asked.items():
            yield worker, of_site.requests[token].share(pairs)
