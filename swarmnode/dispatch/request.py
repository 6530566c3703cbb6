"""What the decode thread asked for, the share of it that one attempt computes, and the sum of the shares.

Pure. A `Request` is one layer's call as llama.cpp sees it; `call.py` cuts its pairs up; a `Share` is one such
piece as arrays, ready for an engine or for the wire. `combine` puts the rows together again, on the decode
thread. A pair is a (token, rank) of the router's choice and is numbered token × n_used + rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarmnode.compute.chunks import MIN_CHUNK
from swarmnode.compute.engine_api import Engine
from swarmnode.compute.recipe import Site
from swarmnode.dispatch.codec import F32, WireType, decode_rows, encode_rows
from swarmnode.dispatch.frames import U8, U16, Answer, CallFrame
from swarmnode.errors import BadAnswer, BadFrame, DispatchError

I32 = NDArray[np.int32]
Pairs = NDArray[np.intp]
COMBINE_BLOCK = 1 << 18  # values weighted at a time: 1 MB stays in the cache


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call of one site. Shapes: x [n_tokens or n_pairs, d_in], experts and weights [n_pairs]."""

    site: Site
    n_tokens: int
    x: F32
    experts: I32
    weights: F32
    partial: bool  # sum on the worker; else the raw rows of all pairs come back
    encoded: dict[WireType, tuple[WireType, memoryview]] = field(
        default_factory=dict
    )  # x, once for all who get it whole

    @property
    def row_per_pair(self) -> bool:
        """Whether x was weighted before the experts, and so has one row per pair."""
        return self.site.recipe.weights == "before"

    def pairs_in(self, max_bytes: int) -> int:
        """Return how many pairs a call may have so that neither x nor its answer exceeds `max_bytes`.

        Counted as F32, which rows may be widened to on the way. Where rows belong to tokens, there are never
        more than n_tokens of them. Partial sums are cut between tokens: there a token counts as all its pairs, also for
        a worker that gets only some of them.
        """
        limit = len(self.experts)
        for d, per_pair in ((self.site.d_in, self.row_per_pair), (self.site.d_out, not self.partial)):
            if per_pair or self.n_tokens * d * 4 > max_bytes:
                together = self.site.n_used if self.partial and not per_pair else 1
                limit = min(limit, max_bytes // (d * 4) * together)
        # A call of few pairs is no reason to count a worker as too small.
        return limit if limit < len(self.experts) else max(limit, MIN_CHUNK)

    def share(self, chosen: Sequence[int] | Pairs) -> Share:
        """Return the part of this request that consists of these pairs (ascending)."""
        pairs = np.asarray(chosen, np.intp)
        whole = len(pairs) == len(self.experts)
        experts, weights = (self.experts, self.weights) if whole else (self.experts[pairs], self.weights[pairs])
        if self.n_tokens == 1:
            tokens, index = np.zeros(1, np.intp), np.zeros(len(pairs), np.int32)
        else:
            tokens, index = _runs(pairs // self.site.n_used)
        if self.row_per_pair:
            rows = np.arange(len(pairs), dtype=np.int32)
            return Share(self, pairs, tokens, self.x[pairs], rows, index, experts, None)
        x = self.x if len(tokens) == self.n_tokens else self.x[_slice_of(tokens)]
        return Share(self, pairs, tokens, x, index, index, experts, weights)


def _runs(ascending: Pairs) -> tuple[Pairs, I32]:
    """Return the distinct values, and which of them each value is: np.unique of what is sorted, without sorting."""
    new = np.empty(len(ascending), np.bool_)
    new[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    index = np.cumsum(new, dtype=np.int32)
    index -= 1
    return ascending[new], index


def _slice_of(tokens: Pairs) -> slice | Pairs:
    """The same rows as a slice, where they follow each other: that copies nothing."""
    if not len(tokens):
        return slice(0, 0)
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else tokens


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Some pairs of a request. `rows[i]` is the row of x, `index[i]` the row of `tokens`, that pair i belongs to."""

    request: Request
    pairs: Pairs
    tokens: Pairs  # the tokens these pairs touch, ascending
    x: F32
    rows: I32
    index: I32
    experts: I32
    weights: F32 | None  # None where x is already weighted

    @property
    def n_rows_back(self) -> int:
        """Rows of the answer."""
        return len(self.tokens) if self.request.partial else len(self.pairs)

    def frame(self, call_id: int, wire_out: WireType, wire_back: WireType) -> CallFrame:
        """Return this share as a CALL."""
        request = self.request
        if self.x is not request.x:
            wire, data = encode_rows(self.x, wire_out)
        elif (known := request.encoded.get(wire_out)) is not None:
            wire, data = known
        else:
            wire, data = request.encoded[wire_out] = encode_rows(self.x, wire_out)
        # A site with more experts than a byte can name still has calls without such.
        narrow = request.site.n_expert <= 256 or int(self.experts.max(initial=0)) < 256
        return CallFrame(
            id=call_id,
            site=request.site.index,
            partial=request.partial,
            row_per_pair=request.row_per_pair,
            wire_out=wire,
            wire_back=wire_back,
            n_tokens=len(self.tokens),
            n_rows=len(self.x),
            tokens=self.index.view(np.uint32),
            experts=self.experts.astype(U8 if narrow else U16),
            weights=self.weights if request.partial else None,
            rows=data,
        )

    def read(self, answer: Answer, wire_back: WireType | None = None) -> F32:
        """Return the rows of the answer. Raises BadAnswer unless their shape fits and all are finite.

        `wire_back` is the type that was asked for: a coarser one would pass for rows that are exact. None takes any.
        """
        if answer.n_rows != self.n_rows_back:
            raise BadAnswer(f"answered {answer.n_rows} rows where {self.n_rows_back} were asked for")
        if wire_back is not None and answer.wire not in (wire_back, WireType.F32):
            raise BadAnswer(f"answered in wire type {answer.wire} where {wire_back.name} was asked for")
        try:
            rows = decode_rows(answer.rows, WireType(answer.wire), answer.n_rows, self.request.site.d_out)
        except BadFrame as error:
            raise BadAnswer(str(error)) from None
        except ValueError:
            raise BadAnswer(f"answered in the unknown wire type {answer.wire}") from None
        if not np.isfinite(rows).all():
            raise BadAnswer("answered NaN or infinity")
        return rows

    def compute(self, engine: Engine) -> F32:
        """Compute this share on an engine of this process."""
        site = self.request.site.index
        if not self.request.partial:
            return engine.raw_rows(site, self.x, self.rows, self.experts)
        return engine.partial_sums(site, self.x, self.rows, self.experts, self.weights, self.index, len(self.tokens))


def make_request(site: Site, x: F32, ids: I32, weights: F32, *, partial: bool) -> Request:
    """Check and flatten what the hook hands over; the arrays are kept, not copied. Raises DispatchError.

    Shapes: ids and weights [n, n_used]; x [n, d_in], or [n × n_used, d_in] (also [n, n_used, d_in]) where the
    recipe has its weights before the experts.
    """
    where = f"layer {site.layer}"
    if ids.ndim != 2 or ids.shape[1] != site.n_used or weights.shape != ids.shape:
        raise DispatchError(f"{where}: ids {ids.shape} and weights {weights.shape}; both must be [n, {site.n_used}]")
    n_tokens = len(ids)
    n_rows = n_tokens * site.n_used if site.recipe.weights == "before" else n_tokens
    if x.shape[-1:] != (site.d_in,) or x.size != n_rows * site.d_in:
        raise DispatchError(f"{where}: x is {x.shape}; it must be [{n_rows}, {site.d_in}]")
    experts = np.ascontiguousarray(ids, np.int32).reshape(-1)
    chosen = experts.tolist()
    if chosen and not (min(chosen) >= 0 and max(chosen) < site.n_expert):
        raise DispatchError(f"{where}: the router chose an expert outside 0…{site.n_expert - 1}")
    rows = np.ascontiguousarray(x, np.float32).reshape(n_rows, site.d_in)
    if not np.isfinite(rows).all():
        # Every worker would answer NaN and be blamed for it.
        raise DispatchError(f"{where}: x holds NaN or infinity before any expert saw it; check the model file")
    flat = np.ascontiguousarray(weights, np.float32).reshape(-1)
    return Request(site, n_tokens, rows, experts, flat, partial)


def combine(request: Request, parts: Sequence[tuple[Share, F32]]) -> F32:
    """Add the rows of shares that cover every pair once up to float32[n_tokens, d_out].

    Exact mode multiplies and adds in rank order, ((e0·w0 + e1·w1) + e2·w2)…, each step rounded to float32:
    what ggml's MUL and chain of ADD do, bit for bit. Partial sums are added in the order of `parts`.
    """
    site, n = request.site, request.n_tokens
    if request.partial:
        return _sum_partials(parts, n, site.d_out)
    if len(parts) == 1 and len(parts[0][0].pairs) == n * site.n_used:
        raw = parts[0][1]
    else:
        raw = np.empty((n * site.n_used, site.d_out), np.float32)
        for share, rows in parts:
            raw[share.pairs] = rows
    total = np.empty((n, site.d_out), np.float32)
    ranked = raw.reshape(n, site.n_used, site.d_out)
    weights = None if request.row_per_pair else request.weights.reshape(n, site.n_used, 1)
    step = max(1, COMBINE_BLOCK // (site.n_used * site.d_out))
    for start in range(0, n, step):
        _add_ranks(ranked[start : start + step], weights, start, total[start : start + step])
    return total


def _add_ranks(rows: F32, weights: F32 | None, start: int, out: F32) -> None:
    """out = ((rows[:, 0] + rows[:, 1]) + rows[:, 2])…, each times its weight first."""
    weighted = rows if weights is None else rows * weights[start : start + len(rows)]
    if rows.shape[1] == 1:
        out[:] = weighted[:, 0]
        return
    np.add(weighted[:, 0], weighted[:, 1], out=out)
    for rank in range(2, rows.shape[1]):
        out += weighted[:, rank]


def _sum_partials(parts: Sequence[tuple[Share, F32]], n: int, d_out: int) -> F32:
    if len(parts) == 1 and len(parts[0][0].tokens) == n:
        return parts[0][1].copy()
    total = np.zeros((n, d_out), np.float32)
    add_partials(total, parts)
    return total


def add_partials(total: F32, parts: Sequence[tuple[Share, F32]]) -> None:
    """Add partial sums to float32[n_tokens, d_out], in the order of `parts`: a large call's as they come."""
    for share, rows in parts:
        total[_slice_of(share.tokens)] += rows
