"""What computes experts, as everything else sees it; the argument checks and sums that all engines share.

A leaf: no ggml here. `engine.ExpertEngine` and `null_engine.NullEngine` implement the protocol;
`dispatch/worker.py` and `dispatch/client.py` (the backbone's own copy) call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from swarmnode.compute.recipe import Site
from swarmnode.errors import BadCall, NobodyHolds

F32Array: TypeAlias = npt.NDArray[np.float32]
I32Array: TypeAlias = npt.NDArray[np.int32]
SlotArray: TypeAlias = npt.NDArray[np.int32]
# Makes a prepared change of a site; returns what was held there before, which goes when nobody refers to it any more.
Swap: TypeAlias = Callable[[], object]


class Stack(Protocol):
    """What an engine needs of a stacked tensor; `model.slicing.StackedTensor` is one."""

    @property
    def ggml_type(self) -> int:
        """ggml's type id."""

    @property
    def ne(self) -> tuple[int, ...]:
        """Extents of one expert's slice, ne[0] innermost."""

    @property
    def experts(self) -> tuple[int, ...]:
        """The global expert id of each slot."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """All slots, one after the other: contiguous uint8 of shape (bytes,)."""


class Engine(Protocol):
    """Computes the experts it holds. Not thread safe: one thread at a time.

    A call is about pairs: pair i applies expert `experts[i]` (global id) to row `rows[i]` of `x`. x is
    float32 of shape (n_rows, d_in); rows, experts and tokens are int32 of shape (n_pairs,); weights float32
    (n_pairs,). Raises BadCall, NobodyHolds for experts not held here, ComputeError. NaN and Inf in x are
    computed with.
    """

    @property
    def holdings(self) -> Mapping[int, tuple[int, ...]]:
        """Site index -> global ids of the experts held: what held at one moment, and no later change shows in it."""

    def prepare(self, site: int, stacks: Mapping[str, Stack]) -> Swap:
        """Get ready to hold exactly these stacks of a site, by tensor name; none, or empty ones, for no expert.

        Any thread, at any time; what takes long (an upload) happens here, beside what is held. The result makes
        the change: it takes microseconds, and counts as a call, so nothing else of this engine may run meanwhile.
        Not called, it leaves no trace. Raises BadCall (no such site), RecipeError (stacks that do not fit it),
        ComputeError (no room beside what is held: give that up first).
        """

    def raw_rows(self, site: int, x: F32Array, rows: I32Array, experts: I32Array) -> F32Array:
        """The output row of every pair, unweighted: float32 of shape (n_pairs, d_out)."""

    def partial_sums(
        self,
        site: int,
        x: F32Array,
        rows: I32Array,
        experts: I32Array,
        weights: F32Array | None,
        tokens: I32Array,
        n_tokens: int,
    ) -> F32Array:
        """Per token the sum of weight × output row over its pairs: float32 (n_tokens, d_out), 0 where it
        has none.

        `tokens[i]` is the output row that pair i adds into. Without weights the rows are added as they are,
        which is what a recipe with weights "before" needs.
        """

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""


def slot_table(n_expert: int, experts: tuple[int, ...]) -> SlotArray:
    """Global expert id -> slot, −1 where it is not held."""
    table = np.full(n_expert, -1, np.int32)
    table[list(experts)] = np.arange(len(experts), dtype=np.int32)
    return table


def refuse_site(index: int, site: Site | None, experts: I32Array) -> NoReturn:
    """A call for a site of which nothing is held: NobodyHolds if the model has it, BadCall otherwise."""
    if site is None:
        raise BadCall(f"site {index}: this model has no such site")
    raise NobodyHolds(site.layer, {int(expert) for expert in experts})


def check_pairs(site: Site, table: SlotArray, x: F32Array, rows: I32Array, experts: I32Array) -> SlotArray:
    """Check a call's arguments and return the slot of every pair. Raises BadCall, NobodyHolds.

    On the hot path: a few numpy calls. The uint32 views make negative indices fail the same test as too
    large ones.
    """
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != site.d_in:
        raise BadCall(f"site {site.index}: x must be float32 (n_rows, {site.d_in}), is {_describe(x)}")
    for name, array in (("rows", rows), ("experts", experts)):
        check_vector(site, name, array, np.int32, len(rows))
    if len(rows) == 0:
        return rows
    if int(rows.view(np.uint32).max()) >= len(x):
        raise BadCall(f"site {site.index}: a pair names a row that x with {len(x)} rows does not have")
    try:
        slots = table.take(experts.view(np.uint32))
    except IndexError:
        raise BadCall(f"site {site.index}: an expert id is outside 0 … {site.n_expert - 1}") from None
    if int(slots.min()) < 0:
        raise NobodyHolds(site.layer, {int(e) for e in experts[slots < 0]})
    return slots


def check_sums(site: Site, weights: F32Array | None, tokens: I32Array, n_tokens: int, n_pairs: int) -> None:
    """Check the arguments that only partial sums have. Raises BadCall."""
    check_vector(site, "tokens", tokens, np.int32, n_pairs)
    if n_tokens < 0 or (n_pairs and int(tokens.view(np.uint32).max()) >= n_tokens):
        raise BadCall(f"site {site.index}: a pair names a token outside 0 … {n_tokens - 1}")
    if weights is None:
        return
    check_vector(site, "weights", weights, np.float32, n_pairs)
    if site.recipe.weights == "before":
        raise BadCall(f"site {site.index}: this model weights x before the experts; pass no weights")


def check_vector(site: Site, name: str, array: npt.NDArray[np.generic], dtype: type[np.generic], length: int) -> None:
    """One contiguous vector of the right dtype and length. Raises BadCall."""
    ok = isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1 and len(array) == length
    if not ok or not array.flags.c_contiguous:
        wanted = f"contiguous {dtype.__name__} ({length},)"
        raise BadCall(f"site {site.index}: {name} must be {wanted}, is {_describe(array)}")


def _describe(array: object) -> str:
    if isinstance(array, np.ndarray):
        return f"{array.dtype} {array.shape}"
    return type(array).__name__


def add_weighted_rows(out: F32Array, rows: F32Array, weights: F32Array | None, tokens: I32Array) -> None:
    """out[tokens[i]] += weights[i] · rows[i], in the order of the pairs, in float32.

    That is ((0 + w₀e₀) + w₁e₁) + … per token: the same bits as ggml's combine when a token's pairs come in
    rank order.
    """
    weighted = rows if weights is None else rows * weights[:, None]
    n_pairs = len(tokens)
    if n_pairs <= 16:  # a decode step: a loop over few pairs beats sorting them
        for i in range(n_pairs):
            out[tokens[i]] += weighted[i]
        return
    order = np.argsort(tokens, kind="stable")
    grouped = tokens[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    rank = np.arange(n_pairs) - np.repeat(starts, np.diff(np.r_[starts, n_pairs]))
    for r in range(int(rank.max()) + 1):  # within one rank every token occurs at most once
        chosen = order[rank == r]
        out[tokens[chosen]] += weighted[chosen]
