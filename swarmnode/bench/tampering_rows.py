"""The rows that `bench tampering` plays with: what a model asks its experts for, their answers, and how these travel.

Kept while the model reads a text, token by token; tampered with in `tampering_simulation.py`. Called by `tampering.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swarmnode.compute.engine import ExpertEngine
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.codec import F32, WireType, decode_rows, encode_rows
from swarmnode.dispatch.request import I32, Request, combine, make_request


@dataclass(slots=True)
class SiteRows:
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


class KeptRows:
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

    def rows(self) -> list[SiteRows]:
        """Token by token."""
        found = []
        for index, batches in self.batches.items():
            site = self._sites[index]
            of_site = SiteRows(site)
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

    def over(self, wire: WireType, sites: Sequence[SiteRows]) -> None:
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
