"""Reads the expert sites off one recorded evaluation of a model's graph. Pure.

`build_moe_ffn` is the one function behind every MoE architecture of llama.cpp, so its nodes are recognised by
structure, never by a model's name: a MUL_MAT_ID over a stacked expert weight starts a site, everything derived from it
belongs to the site, and the node that closes the combine ends it. Called by `onboard.py`, which writes the recipes into
a manifest, and by `node.py`, for the node indices the hook acts on.

    site:   x, ids, weights ──▶ [ expert nodes, never computed here ] ──▶ output ──▶ … ──▶ first consumer
                            dispatch_after                          inject_after

Between `dispatch_after` and `inject_after` llama.cpp computes whatever does not depend on the experts (the shared
expert, in most architectures), which hides that much of the round trip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarmnode.compute.recipe import Recipe, Site, Step
from swarmnode.errors import DenseModel, TraceError
from swarmnode.model.gguf_file import EXPERT_TENSOR


@dataclass(frozen=True, slots=True)
class TracedNode:
    """One node of a recorded graph, in execution order.

    `sources` are indices of earlier nodes, or the names of leaf tensors (weights and inputs). `params` are ggml's
    op_params (16 int32 words); `view_offset` is in bytes.
    """

    name: str
    op: str
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    params: tuple[int, ...]
    sources: tuple[int | str, ...]
    view_offset: int = 0


@dataclass(frozen=True, slots=True)
class SitePlan:
    """A site and the node indices the hook needs; `weights` is None where the rows of x are weighted already."""

    site: Site
    x: int
    ids: int
    weights: int | None
    output: int
    dispatch_after: int
    inject_after: int


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What the hook does at each node index of a graph of `n_nodes` nodes; `skip` are the expert nodes.

    `others`: the plans of the graphs that the model has for other numbers of tokens; most models have none. The hook
    tells by the nodes' names and ops which graph is evaluated.
    """

    n_nodes: int
    sites: tuple[SitePlan, ...]
    skip: frozenset[int]
    names: tuple[str, ...]
    ops: tuple[str, ...] = ()
    others: tuple[GraphPlan, ...] = ()

    def same_nodes(self, other: GraphPlan) -> bool:
        """Whether the other graph has the same nodes, of whatever shapes."""
        return self.names == other.names and self.ops == other.ops


def with_others(plan: GraphPlan, others: Sequence[GraphPlan]) -> GraphPlan:
    """A plan that knows the model's other graphs. Raises TraceError where those have other sites.

    Of graphs with the same nodes one is kept.
    """
    kept: list[GraphPlan] = []
    for other in others:
        if [site.site for site in other.sites] != [site.site for site in plan.sites]:
            raise TraceError("the experts of this model's graph depend on the number of tokens; this is not supported")
        if not any(other.same_nodes(known) for known in (plan, *kept)):
            kept.append(other)
    return replace(plan, others=tuple(kept))


class _OpenSite:
    """The expert nodes of one MoE call while the graph is read in order."""

    def __init__(self, layer: int, ids: int, x: int, first: int) -> None:
        self.layer, self.ids, self.x, self.first = layer, ids, x, first
        self.nodes: set[int] = set()
        self.weighted: int | None = None  # the MUL with the router weights
        self.weights: int | None = None
        self.row: int | None = None  # the node that holds one output row per (token, expert)
        self.views: set[int] = set()  # the n_used views of the weighted rows
        self.summed: set[int] = set()  # those that an ADD has consumed
        self.output: int | None = None


def plan_graph(nodes: Sequence[TracedNode], expert_ne: Mapping[str, tuple[int, ...]]) -> GraphPlan:
    """Find every site of a graph recorded with at least two tokens.

    `expert_ne` gives the dimensions of each stacked expert tensor by GGUF name. Raises DenseModel when there is no site
    and TraceError, with the node's name, where the structure is not understood.
    """
    found: list[_OpenSite] = []
    owner: dict[int, _OpenSite] = {}
    for index, node in enumerate(nodes):
        if node.op == "MUL_MAT_ID" and _expert_leaf(node.sources[0]):
            site = _site_of(found, index, node, nodes, owner)
        else:
            owners = {id(owner[s]): owner[s] for s in node.sources if isinstance(s, int) and s in owner}
            open_owners = [o for o in owners.values() if o.output is None]
            if not open_owners:
                continue
            if len(open_owners) > 1:
                raise TraceError(f"node {node.name}: mixes the experts of two sites; this graph is not understood")
            site = open_owners[0]
        site.nodes.add(index)
        owner[index] = site
        _advance(site, index, node, nodes)
    if not found:
        raise DenseModel("this model's graph calls no routed experts; use a Mixture-of-Experts GGUF")
    plans = tuple(_close(i, s, nodes, expert_ne) for i, s in enumerate(found))
    skip = frozenset(i for s in found for i in s.nodes)
    return GraphPlan(len(nodes), plans, skip, tuple(n.name for n in nodes), tuple(n.op for n in nodes))


def _expert_leaf(source: int | str) -> bool:
    return isinstance(source, str) and EXPERT_TENSOR.match(source) is not None


def _site_of(
    found: list[_OpenSite],
    index: int,
    node: TracedNode,
    nodes: Sequence[TracedNode],
    owner: Mapping[int, _OpenSite],
) -> _OpenSite:
    """The site a MUL_MAT_ID belongs to: its input's (it is `down`), the open one with these ids, or a new one."""
    weight, x, ids = node.sources[:3]
    if not isinstance(x, int) or not isinstance(ids, int):
        raise TraceError(f"node {node.name}: its rows or expert ids are not computed in the graph")
    if x in owner and owner[x].output is None:
        return owner[x]
    if found and found[-1].output is None and found[-1].ids == ids and found[-1].x == x:
        return found[-1]
    match = EXPERT_TENSOR.match(str(weight))
    assert match is not None
    found.append(_OpenSite(int(match.group(1)), ids, x, index))
    return found[-1]


def _advance(site: _OpenSite, index: int, node: TracedNode, nodes: Sequence[TracedNode]) -> None:
    """Follow the combine: rows → × weights → n_used views → ADD chain (or one CONT)."""
    n_used = nodes[site.ids].ne[0]
    if node.op == "MUL" and site.weighted is None:
        outside = [s for s in node.sources if isinstance(s, int) and s not in site.nodes]
        if len(outside) == 1 and not _scale_leaf(outside[0], nodes):
            inside = next(s for s in node.sources if s != outside[0])
            assert isinstance(inside, int)
            site.weighted, site.weights, site.row = index, outside[0], inside
            return
    if node.op == "VIEW" and _is_rank_view(node, nodes, n_used):
        source = node.sources[0]
        assert isinstance(source, int)
        if site.weighted is None:  # weights were applied before the experts
            site.weighted = site.row = source
        if source == site.weighted:
            site.views.add(index)
            return
    if site.views and len(site.views) == n_used:
        if n_used == 1 and node.op == "CONT":
            site.output = index
        elif node.op == "ADD":
            site.summed |= {s for s in node.sources if isinstance(s, int) and s in site.views}
            if len(site.summed) == n_used:
                site.output = index


def _is_rank_view(node: TracedNode, nodes: Sequence[TracedNode], n_used: int) -> bool:
    """Is this VIEW the output rows of one rank: [d, n_tokens] out of [d, n_used, n_tokens]?"""
    source = node.sources[0]
    if not isinstance(source, int):
        return False
    whole = nodes[source]
    return (
        whole.ne[1] == n_used
        and node.ne[0] == whole.ne[0]
        and node.ne[1] == whole.ne[2]
        and node.ne[2] == 1
        and node.nb[1] == whole.nb[2]
    )


def _scale_leaf(index: int, nodes: Sequence[TracedNode]) -> str | None:
    """The per-expert scale tensor behind GET_ROWS(REPEAT(RESHAPE(scale)), ids), if that is what this operand is."""
    if nodes[index].op != "GET_ROWS":
        return None
    source: int | str = nodes[index].sources[0]
    while isinstance(source, int) and nodes[source].op in ("RESHAPE", "REPEAT"):
        source = nodes[source].sources[0]
    return source if isinstance(source, str) and _expert_leaf(source) else None


def _close(
    number: int, site: _OpenSite, nodes: Sequence[TracedNode], expert_ne: Mapping[str, tuple[int, ...]]
) -> SitePlan:
    first = nodes[site.first].name
    if site.output is None or site.row is None:
        raise TraceError(f"layer {site.layer}: the end of the experts that start at {first} was not found")
    steps, tensors = _recipe_steps(site, nodes)
    weights_first = site.weights is None
    down = nodes[site.row]
    stack = expert_ne.get(tensors[0])
    if stack is None:
        raise TraceError(f"layer {site.layer}: tensor {tensors[0]} is in the graph but not in the file")
    consumers = [i for i in range(site.output + 1, len(nodes)) if site.output in nodes[i].sources]
    if not consumers:
        raise TraceError(f"layer {site.layer}: nothing in the graph uses the experts' output")
    before = [site.first - 1, site.x, site.ids] + ([] if site.weights is None else [site.weights])
    outside_last = max(i for i in before if i not in site.nodes)
    if outside_last >= site.output:
        raise TraceError(f"layer {site.layer}: the router's weights are computed after the experts' output")
    return SitePlan(
        site=Site(
            index=number,
            layer=site.layer,
            d_in=nodes[site.x].ne[0],
            d_out=down.ne[0],
            n_expert=stack[-1],
            n_used=nodes[site.ids].ne[0],
            tensors=tuple(tensors),
            recipe=Recipe(steps=tuple(steps), weights="before" if weights_first else "after"),
        ),
        x=site.x,
        ids=site.ids,
        weights=site.weights,
        output=site.output,
        dispatch_after=outside_last,
        inject_after=max(consumers[0] - 1, site.output),
    )


def _recipe_steps(site: _OpenSite, nodes: Sequence[TracedNode]) -> tuple[list[Step], list[str]]:
    """Translate the nodes up to the output row of a pair into recipe steps, in order."""
    assert site.row is not None
    steps: list[Step] = []
    tensors: list[str] = []
    step_of: dict[int, int] = {}

    def tensor(name: str) -> str:
        if name not in tensors:
            tensors.append(name)
        return f"t{tensors.index(name)}"

    def operand(source: int | str, node: TracedNode) -> str:
        if isinstance(source, str):
            if not _expert_leaf(source):
                raise TraceError(f"node {node.name}: an expert step uses {source}, which is no expert tensor")
            return tensor(source)
        if source in step_of:
            return f"s{step_of[source]}"
        if source == site.x:
            return "x"
        scale = _scale_leaf(source, nodes)
        if scale is None:
            raise TraceError(
                f"node {node.name}: an expert step uses {nodes[source].name}, which is outside the experts"
            )
        steps.append(Step(op="GET_ROWS", sources=(tensor(scale),)))
        step_of[source] = len(steps) - 1
        return f"s{step_of[source]}"

    for index in sorted(i for i in site.nodes if i <= site.row):
        node = nodes[index]
        takes_ids = node.op in ("MUL_MAT_ID", "ADD_ID")
        sources = tuple(operand(s, node) for s in node.sources[: 2 if takes_ids else None])
        params: tuple[int, ...]
        if node.op == "VIEW":
            if node.view_offset % node.nb[0] or node.view_offset >= nodes[_node_source(node)].nb[1]:
                raise TraceError(f"node {node.name}: a view that does not cut along the row")
            params = (node.view_offset // node.nb[0], node.ne[0])
        else:
            params = _without_trailing_zeros(node.params)
        steps.append(Step(op=node.op, sources=sources, params=params))
        step_of[index] = len(steps) - 1
    return steps, tensors


def _node_source(node: TracedNode) -> int:
    source = node.sources[0]
    if not isinstance(source, int):
        raise TraceError(f"node {node.name}: a view of a stored tensor inside the experts")
    return source


def _without_trailing_zeros(params: Sequence[int]) -> tuple[int, ...]:
    last = max((i for i, p in enumerate(params) if p), default=-1)
    return tuple(params[: last + 1])
