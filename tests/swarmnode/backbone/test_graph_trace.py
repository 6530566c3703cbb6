"""Hand-made graphs in the shapes that llama.cpp's build_moe_ffn makes; the real one is in test_hook.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from swarmnode.backbone.graph_trace import GraphPlan, TracedNode, plan_graph
from swarmnode.compute.recipe import Step
from swarmnode.errors import DenseModel, TraceError

D, FF, E, K, N = 8, 6, 5, 3, 2  # width, expert width, experts, used, tokens


@dataclass
class Graph:
    nodes: list[TracedNode] = field(default_factory=list)

    def add(
        self,
        op: str,
        ne: tuple[int, ...],
        *sources: int | str,
        params: tuple[int, ...] = (),
        nb: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> int:
        a, b, c, d = (*ne, 1, 1, 1)[:4]
        s0, s1, s2, s3 = (*(nb or (4, 4 * a, 4 * a * b)), 4 * a * b * c)[:4]
        padded = (*params, *(0,) * 16)[:16]
        name = f"{op.lower()}-{len(self.nodes)}"
        self.nodes.append(TracedNode(name, op, (a, b, c, d), (s0, s1, s2, s3), padded, sources, offset))
        return len(self.nodes) - 1

    def router(self, layer: int, used: int = K) -> tuple[int, int, int, int]:
        """norm, x, ids, weights"""
        norm = self.add("RMS_NORM", (D, N), f"inp.{layer}")
        probs = self.add("SOFT_MAX", (E, N), norm)
        ids = self.add("VIEW", (used, N), self.add("ARGSORT", (E, N), probs), nb=(4, 4 * E, 4 * E * N))
        weights = self.add("GET_ROWS", (1, used, N), probs, ids)
        x = self.add("RESHAPE", (D, 1, N), norm)
        return norm, x, ids, weights

    def combine(self, rows: int, used: int = K) -> int:
        views = [
            self.add("VIEW", (D, N), rows, nb=(4, 4 * D * used, 4 * D * used * N), offset=4 * D * i)
            for i in range(used)
        ]
        total = views[0]
        for view in views[1:]:
            total = self.add("ADD", (D, N), total, view)
        return self.add("CONT", (D, N), total) if used == 1 else total

    def plan(self) -> GraphPlan:
        names = ("gate", "up", "gate_up", "down")
        ne = {f"blk.{n}.ffn_{t}_{c}exps.weight": (1, 1, E) for n in range(4) for t in names for c in ("", "ch")}
        return plan_graph(self.nodes, ne)


def weight(layer: int, part: str, kind: str = "weight") -> str:
    return f"blk.{layer}.ffn_{part}_exps.{kind}"


def standard(graph: Graph, layer: int = 0, used: int = K) -> tuple[int, int, int, int, int]:
    """Separate gate and up, SwiGLU: x, ids, weights, first expert node, output."""
    _, x, ids, weights = graph.router(layer, used)
    gate = graph.add("MUL_MAT_ID", (FF, used, N), weight(layer, "gate"), x, ids)
    up = graph.add("MUL_MAT_ID", (FF, used, N), weight(layer, "up"), x, ids)
    glu = graph.add("GLU", (FF, used, N), gate, up, params=(2,))
    down = graph.add("MUL_MAT_ID", (D, used, N), weight(layer, "down"), glu, ids)
    rows = graph.add("MUL", (D, used, N), down, weights)
    return x, ids, weights, gate, graph.combine(rows, used)


def test_standard_site_with_a_shared_expert_behind_it() -> None:
    graph = Graph()
    x, ids, weights, first, output = standard(graph)
    shared = graph.add("MUL_MAT", (D, N), "blk.0.ffn_down_shexp.weight", x)
    consumer = graph.add("ADD", (D, N), output, shared)
    plan = graph.plan()
    (site,) = plan.sites
    assert (site.x, site.ids, site.weights, site.output) == (x, ids, weights, output)
    assert site.dispatch_after == first - 1
    assert site.inject_after == consumer - 1 == shared
    assert plan.skip == frozenset(range(first, output + 1))
    assert (site.site.d_in, site.site.d_out, site.site.n_expert, site.site.n_used) == (D, D, E, K)
    assert site.site.recipe.weights == "after"
    assert site.site.recipe.steps == (
        Step("MUL_MAT_ID", ("t0", "x")),
        Step("MUL_MAT_ID", ("t1", "x")),
        Step("GLU", ("s0", "s1"), (2,)),
        Step("MUL_MAT_ID", ("t2", "s2")),
    )
    assert site.site.tensors == (weight(0, "gate"), weight(0, "up"), weight(0, "down"))


def test_without_a_shared_expert_the_answer_is_wanted_at_once() -> None:
    graph = Graph()
    *_, output = standard(graph)
    graph.add("ADD", (D, N), output, "inp")
    assert graph.plan().sites[0].inject_after == output


def test_merged_gate_up_is_cut_along_the_row() -> None:
    graph = Graph()
    _, x, ids, weights = graph.router(0)
    both = graph.add("MUL_MAT_ID", (2 * FF, K, N), weight(0, "gate_up"), x, ids)
    strides = graph.nodes[both].nb
    gate = graph.add("VIEW", (FF, K, N), both, nb=strides)
    up = graph.add("VIEW", (FF, K, N), both, nb=strides, offset=4 * FF)
    glu = graph.add("GLU", (FF, K, N), gate, up, params=(2,))
    down = graph.add("MUL_MAT_ID", (D, K, N), weight(0, "down"), glu, ids)
    graph.add("ADD", (D, N), graph.combine(graph.add("MUL", (D, K, N), down, weights)), "inp")
    steps = graph.plan().sites[0].site.recipe.steps
    assert [s.params for s in steps if s.op == "VIEW"] == [(0, FF), (FF, FF)]


def test_biases_and_scales_become_tensors_of_the_site() -> None:
    graph = Graph()
    _, x, ids, weights = graph.router(0)
    up = graph.add("MUL_MAT_ID", (FF, K, N), weight(0, "up"), x, ids)
    scale = graph.add("RESHAPE", (1, E), weight(0, "up", "scale"))
    scale = graph.add("GET_ROWS", (1, K, N), graph.add("REPEAT", (1, E, N), scale), ids)
    scaled = graph.add("MUL", (FF, K, N), up, scale)
    biased = graph.add("ADD_ID", (FF, K, N), scaled, weight(0, "up", "bias"), ids)
    act = graph.add("UNARY", (FF, K, N), biased, params=(6,))
    down = graph.add("MUL_MAT_ID", (D, K, N), weight(0, "down"), act, ids)
    graph.add("ADD", (D, N), graph.combine(graph.add("MUL", (D, K, N), down, weights)), "inp")
    site = graph.plan().sites[0].site
    assert site.tensors == (weight(0, "up"), weight(0, "up", "scale"), weight(0, "up", "bias"), weight(0, "down"))
    assert site.recipe.steps == (
        Step("MUL_MAT_ID", ("t0", "x")),
        Step("GET_ROWS", ("t1",)),
        Step("MUL", ("s0", "s1")),
        Step("ADD_ID", ("s2", "t2")),
        Step("UNARY", ("s3",), (6,)),
        Step("MUL_MAT_ID", ("t3", "s4")),
    )


@pytest.mark.parametrize("used", [1, 2])
def test_weights_before_the_experts(used: int) -> None:
    graph = Graph()
    norm, _, ids, weights = graph.router(0, used)
    repeated = graph.add("REPEAT", (D, used, N), norm)
    x = graph.add("MUL", (D, used, N), repeated, weights)
    gate = graph.add("MUL_MAT_ID", (FF, used, N), weight(0, "gate"), x, ids)
    up = graph.add("MUL_MAT_ID", (FF, used, N), weight(0, "up"), x, ids)
    glu = graph.add("GLU", (FF, used, N), gate, up, params=(2,))
    down = graph.add("MUL_MAT_ID", (D, used, N), weight(0, "down"), glu, ids)
    output = graph.combine(down, used)
    graph.add("ADD", (D, N), output, "inp")
    site = graph.plan().sites[0]
    assert site.weights is None
    assert site.x == x
    assert site.output == output
    assert site.site.recipe.weights == "before"


def test_two_sites_in_one_layer_and_more_layers() -> None:
    graph = Graph()
    *_, first = standard(graph, 0)
    graph.add("ADD", (D, N), first, "inp")
    *_, output = standard(graph, 1)
    _, _, ids, weights = graph.router(1)
    second = graph.add("RESHAPE", (D, 1, N), output)
    gate = graph.add("MUL_MAT_ID", (FF, K, N), "blk.1.ffn_gate_chexps.weight", second, ids)
    act = graph.add("UNARY", (FF, K, N), gate, params=(10,))
    down = graph.add("MUL_MAT_ID", (D, K, N), "blk.1.ffn_down_chexps.weight", act, ids)
    closing = graph.combine(graph.add("MUL", (D, K, N), down, weights))
    with pytest.raises(TraceError, match="layer 1: nothing in the graph uses"):
        graph.plan()
    graph.add("ADD", (D, N), closing, output)
    sites = graph.plan().sites
    assert [(s.site.index, s.site.layer, s.site.tensors[0]) for s in sites] == [
        (0, 0, weight(0, "gate")),
        (1, 1, weight(1, "gate")),
        (2, 1, "blk.1.ffn_gate_chexps.weight"),
    ]
    assert sites[1].inject_after < sites[2].dispatch_after < sites[2].inject_after


def test_a_graph_without_experts_is_a_dense_model() -> None:
    graph = Graph()
    graph.add("MUL_MAT", (D, N), "blk.0.ffn_up.weight", "inp")
    with pytest.raises(DenseModel, match="Mixture-of-Experts"):
        graph.plan()


def test_what_is_not_understood_is_named() -> None:
    graph = Graph()
    _, x, ids, weights = graph.router(0)
    outside = graph.add("SCALE", (FF, K, N), x)
    up = graph.add("MUL_MAT_ID", (FF, K, N), weight(0, "up"), x, ids)
    mixed = graph.add("ADD", (FF, K, N), up, outside)
    down = graph.add("MUL_MAT_ID", (D, K, N), weight(0, "down"), mixed, ids)
    graph.add("ADD", (D, N), graph.combine(graph.add("MUL", (D, K, N), down, weights)), "inp")
    with pytest.raises(TraceError, match=r"add-8.*scale-6.*outside the experts"):
        graph.plan()
    unfinished = Graph(graph.nodes[:10])
    with pytest.raises(TraceError, match="the end of the experts that start at mul_mat_id-7 was not found"):
        unfinished.plan()
