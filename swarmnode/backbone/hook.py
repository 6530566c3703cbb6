"""The evaluation hook: sends x away where the experts begin, puts their sum back where it is first used.

llama.cpp calls it for every graph node (`cb_eval`), on the decode thread. A naive callback costs more than the model,
so nodes are only counted, and memory is touched for the few that matter. Nothing is raised through the callback: an
exception is kept, the evaluation stopped, and `check` raises it after `llama_decode` has returned.

Not here: which worker computes what (`dispatch.client`), what the graph looks like (`graph_trace`).
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from swarmnode.backbone.graph_trace import GraphPlan, SitePlan, TracedNode
from swarmnode.compute import ggml, ggml_enums
from swarmnode.errors import TraceError

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

_SKIP, _KEEP, _STOP, _ASK = 1, 2, 4, 8  # bits of a node's action
_FLAGS_AT = ggml.TensorStruct.flags.offset
_COMPUTE_OFF = ~ggml_enums.FLAG_COMPUTE
_NAME_AT = ggml.TensorStruct.name.offset


class PendingRows(Protocol):
    """A site's answer on its way.

    Two things are used where there are: `fail(error)`, from any thread, has `result` raise at once; `asked` is empty,
    once the rows are there, where no other node was asked for them.
    """

    def result(self) -> F32:
        """Block until the combined rows [n_tokens, d_out] are there, or raise a DispatchError."""


class Experts(Protocol):
    """Whoever computes Σ wᵢ·Eᵢ(x) for a site (dispatch.client.ExpertClient, or a test's own)."""

    def submit(self, site: int, x: F32, ids: I32, weights: F32) -> PendingRows:
        """Start a site's call: x [rows, d_in], ids and weights [n_tokens, n_used]. Returns at once."""


class GraphRecorder:
    """Records one evaluation: what `plan_graph` reads. Computes nothing of the experts."""

    def __init__(self) -> None:
        self.nodes: list[TracedNode] = []
        self.error: BaseException | None = None
        self._index: dict[int, int] = {}

    def __call__(self, address: int, ask: bool, _user_data: int | None) -> bool:
        """The callback. It never asks for data."""
        if ask and self.error is None:
            try:
                self._record(address)
            except BaseException as error:
                self.error = error
        return False

    def _record(self, address: int) -> None:
        tensor = ggml.TensorStruct.from_address(address)
        sources: list[int | str] = []
        for source in filter(None, tensor.src):
            index = self._index.get(source)
            sources.append(_name(source) if index is None else index)
        op = ggml.op_name(tensor.op)
        if op == "MUL_MAT_ID":
            tensor.flags &= _COMPUTE_OFF
        self._index[address] = len(self.nodes)
        self.nodes.append(
            TracedNode(
                name=_name(address),
                op=op,
                ne=tuple(tensor.ne),
                nb=tuple(tensor.nb),
                params=tuple(tensor.op_params),
                sources=tuple(sources),
                view_offset=tensor.view_offs,
            )
        )


def _name(address: int) -> str:
    name: bytes = ggml.TensorStruct.from_address(address).name
    return name.decode("utf-8", "replace")


class _Work:
    """What one plan wants done at each node."""

    def __init__(self, plan: GraphPlan) -> None:
        self.actions = bytearray(plan.n_nodes)
        self.dispatch: dict[int, SitePlan] = {}
        self.inject: dict[int, list[SitePlan]] = {}
        for index in plan.skip:
            self.actions[index] |= _SKIP
        for site in plan.sites:
            self.dispatch[site.dispatch_after] = site
            self.inject.setdefault(site.inject_after, []).append(site)
            for index in (site.x, site.ids, site.output) + (() if site.weights is None else (site.weights,)):
                self.actions[index] |= _KEEP
            self.actions[site.dispatch_after] |= _STOP
            self.actions[site.inject_after] |= _STOP

    def before(self, at: int) -> object:
        """What is done below node `at`, to be compared."""
        sent = {index: (s.site.index, s.x, s.ids, s.weights) for index, s in self.dispatch.items() if index < at}
        written = {i: [(s.site.index, s.output) for s in sites] for i, sites in self.inject.items() if i < at}
        return self.actions[:at], sent, written


class _Program:
    """What to do at each node, as long as the graph may be any of `plans`; at a node with _ASK they part.

    Raises TraceError where they cannot be told apart, or want something else done before.
    """

    def __init__(self, plans: tuple[GraphPlan, ...], known: int) -> None:
        """`known`: up to this node they are known to agree."""
        plan = plans[0]
        self.plans = plans
        self.n_nodes = plan.n_nodes
        self.names = [name.encode() for name in plan.names]
        work = _Work(plan)
        self.actions, self.dispatch, self.inject = work.actions, work.dispatch, work.inject
        self.branches: dict[tuple[str, str], _Program] = {}
        if len(plans) > 1:
            self._part(known)

    def _part(self, known: int) -> None:
        least = min(plan.n_nodes for plan in self.plans)
        at = next((i for i in range(known, least) if len({_mark(plan, i) for plan in self.plans}) > 1), None)
        if at is None:
            raise TraceError("one of this model's graphs is the beginning of another; this is not supported")
        if any(_Work(plan).before(at) != _Work(self.plans[0]).before(at) for plan in self.plans[1:]):
            raise TraceError(
                "this model's graphs use the experts in different ways before they can be told apart; "
                "this is not supported"
            )
        self.actions[at] |= _ASK
        for mark in {_mark(plan, at) for plan in self.plans}:
            self.branches[mark] = _Program(tuple(plan for plan in self.plans if _mark(plan, at) == mark), at + 1)


def _mark(plan: GraphPlan, index: int) -> tuple[str, str]:
    return plan.ops[index], plan.names[index]


class EvalHook:
    """Runs a plan during `llama_decode`. One per llama context, sharing nothing with others'; its decode thread only.

    Call `begin` before each decode and `check` after it. `round_trips` counts the calls that another node was waited
    for, so far.
    """

    def __init__(self, plan: GraphPlan, experts: Experts) -> None:
        self._experts = experts
        self._root = _Program((plan, *plan.others), 0)
        self._follow(self._root)
        self._next = 0
        self._kept: dict[int, int] = {}
        self._pending: dict[int, PendingRows | None] = {}  # by site
        self._waiting: PendingRows | None = None
        self._error: BaseException | None = None
        self._cancel: BaseException | None = None
        self.round_trips = 0

    def _follow(self, program: _Program) -> None:
        self._program = program
        self._n_nodes, self._actions = program.n_nodes, program.actions

    def begin(self) -> None:
        """Forget the last evaluation."""
        self._next = 0
        self._error = self._cancel = None
        self._pending.clear()

    def cancel(self, error: BaseException) -> None:
        """From any thread: stop the evaluation at the next site, or now if it waits; `check` then raises `error`."""
        self._cancel = error  # before the look at what is waited for: `_put_back` does it the other way round
        _fail(self._waiting, error)

    def check(self) -> None:
        """Raise what went wrong inside the evaluation; nobody needs then what is still on its way."""
        if self._error is not None:
            for pending in self._pending.values():
                _fail(pending, self._error)
            raise self._error

    def __call__(self, address: int, ask: bool, _user_data: int | None) -> bool:
        """The callback: `ask` before a node is computed; again without it after a node this returned True for."""
        if not ask:
            return self._stop_at(self._next - 1 if self._next else self._n_nodes - 1)
        index = self._next
        if not index and self._program is not self._root:
            self._follow(self._root)
        action = self._actions[index]
        if action & _ASK and self._error is None:
            action = self._part(index, address)
        self._next = index + 1 if index + 1 < self._n_nodes else 0
        if not action:
            return False
        if action & _SKIP:
            flags = ctypes.c_int32.from_address(address + _FLAGS_AT)
            flags.value &= _COMPUTE_OFF
        if action & _KEEP:
            self._kept[index] = address
        if action & _STOP:
            self._kept[index] = address
            return True
        return self._error is not None

    def _part(self, index: int, address: int) -> int:
        """Find out which graph this is; the action at this node, where the graphs that it may be are no longer one."""
        while self._actions[index] & _ASK:
            tensor = ggml.TensorStruct.from_address(address)
            program = self._program.branches.get((ggml.op_name(tensor.op), _name(address)))
            if program is None:
                self._error = TraceError(_other_graph(_name(address), self._program.names[index].decode()))
                return _STOP
            self._follow(program)
        return self._actions[index]

    def _stop_at(self, index: int) -> bool:
        if self._error is not None:
            return False
        try:
            if self._cancel is not None:
                raise self._cancel
            if self._actions[index] & _STOP:
                self._check_name(index)
                for site in self._program.inject.get(index, ()):
                    self._put_back(site)
                starting = self._program.dispatch.get(index)
                if starting is not None:
                    self._send(starting)
        except BaseException as error:
            self._error = error
            return False
        return True

    def _check_name(self, index: int) -> None:
        name = ctypes.string_at(self._kept[index] + _NAME_AT)
        if name != self._program.names[index]:
            raise TraceError(_other_graph(name.decode("utf-8", "replace"), self._program.names[index].decode()))

    def _send(self, site: SitePlan) -> None:
        ids = read_ids(self._kept[site.ids])
        if not len(ids):
            self._pending[site.site.index] = None
            return
        x = read_rows(self._kept[site.x])
        if site.weights is None:
            weights = np.ones(ids.shape, np.float32)
        else:
            weights = read_rows(self._kept[site.weights]).reshape(ids.shape)
        self._pending[site.site.index] = self._experts.submit(site.site.index, x, ids, weights)

    def _put_back(self, site: SitePlan) -> None:
        pending = self._pending.pop(site.site.index)
        if pending is None:
            return
        self._waiting = pending
        try:
            if self._cancel is not None:
                raise self._cancel
            rows = pending.result()
        finally:
            self._waiting = None
        self.round_trips += bool(getattr(pending, "asked", True))
        write_rows(self._kept[site.output], rows)


def _other_graph(evaluated: str, traced: str) -> str:
    return (
        f"llama.cpp evaluated {evaluated} where {traced} was traced; "
        "the graph changed after loading, which this version does not support"
    )


def _fail(pending: PendingRows | None, error: BaseException) -> None:
    fail = getattr(pending, "fail", None)
    if fail is not None:
        fail(error)


def read_rows(address: int) -> F32:
    """A contiguous copy of an F32 tensor as rows [.., ne[0]], whatever its strides. TraceError for another type."""
    return _read(address, ggml_enums.F32, np.dtype(np.float32))  # type: ignore[return-value]  # as the dtype says


def read_ids(address: int) -> I32:
    """The same for I32."""
    return _read(address, ggml_enums.I32, np.dtype(np.int32))  # type: ignore[return-value]  # as the dtype says


def _read(address: int, ggml_type: int, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Copies, because the allocator reuses the memory as soon as the callback returns."""
    tensor = ggml.TensorStruct.from_address(address)
    if tensor.type != ggml_type:
        raise TraceError(f"tensor {_name(address)} has ggml type {tensor.type}, not {ggml_type}")
    ne, nb = list(tensor.ne), list(tensor.nb)
    if 0 in ne:
        return np.empty((0, ne[0]), dtype)
    size = 4 + sum((n - 1) * b for n, b in zip(ne, nb, strict=True))
    raw = np.empty(size, np.uint8)
    ggml.backend_tensor_get(address, raw.ctypes.data, 0, size)
    if nb[0] == 4 and size == 4 * ne[0] * ne[1] * ne[2] * ne[3]:
        return raw.view(dtype).reshape(-1, ne[0])
    dense = np.lib.stride_tricks.as_strided(raw[:4].view(dtype), tuple(reversed(ne)), tuple(reversed(nb)))
    return np.ascontiguousarray(dense).reshape(-1, ne[0])


def write_rows(address: int, rows: F32) -> None:
    """Overwrite a contiguous F32 tensor [.., n_tokens, d] with rows [n_tokens, d]."""
    tensor = ggml.TensorStruct.from_address(address)
    ne = list(tensor.ne)
    shape = (ne[1] * ne[2] * ne[3], ne[0])
    if tensor.type != ggml_enums.F32 or rows.shape != shape:
        raise TraceError(f"tensor {_name(address)} takes F32 rows {shape}, got {rows.dtype} {rows.shape}")
    data = np.ascontiguousarray(rows, np.float32)
    ggml.backend_tensor_set(address, data.ctypes.data, 0, data.nbytes)
