"""The hook on the real graph: what is skipped, what is read, and what a changed graph does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from swarmnode.backbone.graph_trace import GraphPlan, SitePlan, with_others
from swarmnode.backbone.hook import EvalHook, read_ids, read_rows, write_rows
from swarmnode.backbone.llama import LlamaContext, LlamaModel
from swarmnode.backbone.session import Session
from swarmnode.backbone.trace import trace_model
from swarmnode.compute import ggml, ggml_enums
from swarmnode.compute.device import choose_device
from swarmnode.compute.engine import ExpertEngine
from swarmnode.errors import TraceError
from swarmnode.model.slicing import aligned_empty
from swarmnode.onboard import ModelPack

from .helpers import InProcessExperts


@pytest.fixture(scope="module")
def model(demo_pack: ModelPack) -> Iterator[LlamaModel]:
    model = LlamaModel(demo_pack.backbone, remote_experts=True)
    yield model
    model.close()


@contextlib.contextmanager
def tensor_of(values: NDArray[np.generic], ggml_type: int, ne: list[int], nb: list[int]) -> Iterator[int]:
    """A ggml tensor over these bytes with any shape and strides."""
    context = ggml.init(ggml.InitParams(1 << 16, None, True))
    address: int = ggml.new_tensor_1d(context, ggml_type, values.size)
    buffer = ggml.backend_dev_buffer_from_host_ptr(
        choose_device("cpu").address, values.ctypes.data, values.nbytes, values.nbytes
    )
    ggml.backend_tensor_alloc(buffer, address, values.ctypes.data)
    struct = ggml.TensorStruct.from_address(address)
    struct.ne[:] = ne
    struct.nb[:] = nb
    try:
        yield address
    finally:
        ggml.backend_buffer_free(buffer)
        ggml.free(context)


def aligned(values: NDArray[np.generic]) -> NDArray[np.generic]:
    out = aligned_empty(values.nbytes).view(values.dtype).reshape(values.shape)
    out[:] = values
    return out


def test_the_shipped_model_has_a_site_per_layer_that_overlaps_the_shared_expert(
    model: LlamaModel, demo_pack: ModelPack
) -> None:
    plan = trace_model(model, {t.name: t.ne for t in demo_pack.manifest.tensors})
    assert tuple(s.site for s in plan.sites) == demo_pack.manifest.sites
    assert [s.site.layer for s in plan.sites] == [0, 1, 2, 3]
    for site in plan.sites:
        assert site.dispatch_after < site.output
        assert site.inject_after - site.output >= 4  # the shared expert's nodes


def test_a_graph_that_is_not_the_traced_one_stops_with_both_names(
    model: LlamaModel, demo_pack: ModelPack, demo_engine: ExpertEngine
) -> None:
    plan = trace_model(model, {t.name: t.ne for t in demo_pack.manifest.tensors})
    names = list(plan.names)
    names[plan.sites[1].dispatch_after] = "something-else"
    experts = InProcessExperts(demo_engine)
    hook = EvalHook(dataclasses.replace(plan, names=tuple(names)), experts)
    context = LlamaContext(model, n_context=64, n_batch=16, threads=1, callback=hook)
    session = Session(model, context, hook)
    try:
        with pytest.raises(TraceError, match=r"evaluated ffn_norm-1 \(reshaped\) where something-else was traced"):
            session.evaluate([1, 2, 3], 0)
    finally:
        context.close()
    assert [site for site, _ in experts.calls] == [0]


def renamed(plan: GraphPlan, index: int, name: str) -> GraphPlan:
    """The plan of a graph that differs in one node."""
    return dataclasses.replace(plan, names=(*plan.names[:index], name, *plan.names[index + 1 :]))


@pytest.mark.parametrize("known", [True, False])
def test_of_several_graphs_the_one_that_is_evaluated_is_followed(
    model: LlamaModel, demo_pack: ModelPack, demo_engine: ExpertEngine, known: bool
) -> None:
    plan = trace_model(model, {t.name: t.ne for t in demo_pack.manifest.tensors})
    assert plan.others == ()
    later, earlier = plan.sites[2].dispatch_after, plan.sites[0].dispatch_after + 1
    one, other = renamed(plan, later, "a"), renamed(renamed(plan, earlier, "b"), later, "c")
    experts = InProcessExperts(demo_engine)
    hook = EvalHook(with_others(other, [one, plan] if known else [one]), experts)
    context = LlamaContext(model, n_context=64, n_batch=16, threads=1, callback=hook)
    session = Session(model, context, hook)
    try:
        if known:
            for at in range(3):
                session.evaluate([1], at)
            assert [site for site, _ in experts.calls] == [0, 1, 2, 3] * 3
        else:
            with pytest.raises(TraceError, match="where a was traced"):
                session.evaluate([1, 2, 3], 0)
            assert [site for site, _ in experts.calls] == [0, 1]
    finally:
        context.close()


def test_graphs_that_cannot_be_told_apart_are_refused(
    model: LlamaModel, demo_pack: ModelPack, demo_engine: ExpertEngine
) -> None:
    plan = trace_model(model, {t.name: t.ne for t in demo_pack.manifest.tensors})
    with pytest.raises(TraceError, match="depend on the number of tokens"):
        with_others(plan, [dataclasses.replace(plan, sites=plan.sites[:2])])
    shorter = GraphPlan(9, (), frozenset(), plan.names[:9], plan.ops[:9])
    with pytest.raises(TraceError, match="the beginning of another"):
        EvalHook(dataclasses.replace(plan, others=(shorter,)), InProcessExperts(demo_engine))


def parting_after(plan: GraphPlan, at: int, second: SitePlan) -> GraphPlan:
    """The plan of a graph that is the same up to `at`, where something else is to be done for the second site."""
    return renamed(dataclasses.replace(plan, sites=(plan.sites[0], second, *plan.sites[2:])), at, "other")


def test_graphs_that_ask_for_something_else_before_they_can_be_told_apart_are_refused(
    model: LlamaModel, demo_pack: ModelPack, demo_engine: ExpertEngine
) -> None:
    plan = trace_model(model, {t.name: t.ne for t in demo_pack.manifest.tensors})
    site, experts = plan.sites[1], InProcessExperts(demo_engine)
    parting = site.inject_after + 1
    for changed in (
        dataclasses.replace(site, inject_after=site.inject_after - 1),  # one would never be written, or twice
        dataclasses.replace(site, inject_after=parting + 1),
        dataclasses.replace(site, dispatch_after=site.dispatch_after + 1),
        dataclasses.replace(site, x=site.x - 1),
        dataclasses.replace(site, output=site.output + 1),
    ):
        other = parting_after(plan, parting, changed)
        for both in ((plan, other), (other, plan)):
            with pytest.raises(TraceError, match="before they can be told apart"):
                EvalHook(dataclasses.replace(both[0], others=both[1:]), experts)
    skips = renamed(dataclasses.replace(plan, skip=plan.skip - {min(plan.skip)}), parting, "other")
    with pytest.raises(TraceError, match="before they can be told apart"):
        EvalHook(dataclasses.replace(plan, others=(skips,)), experts)
    # They part where the first one asks.
    later = parting_after(plan, site.inject_after, dataclasses.replace(site, inject_after=parting))
    EvalHook(dataclasses.replace(plan, others=(later,)), experts)


def test_strided_ids_are_read_as_rows() -> None:
    argsort = aligned(np.arange(3 * 16, dtype=np.int32).reshape(3, 16))
    with tensor_of(argsort, ggml_enums.I32, [4, 3, 1, 1], [4, 64, 192, 192]) as address:  # top 4 of 16
        assert read_ids(address).tolist() == argsort[:, :4].tolist()


def test_three_dimensions_become_rows() -> None:
    values = aligned(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    with tensor_of(values, ggml_enums.F32, [4, 3, 2, 1], [4, 16, 48, 96]) as address:
        rows = read_rows(address)
        assert rows.tolist() == values.reshape(6, 4).tolist()
        write_rows(address, rows * 2)
        assert values.max() == 46
        assert rows.max() == 23  # what was read is a copy


def test_no_tokens_are_no_rows() -> None:
    values = aligned(np.zeros(4, np.float32))
    with tensor_of(values, ggml_enums.F32, [4, 0, 1, 1], [4, 16, 0, 0]) as address:
        assert read_rows(address).shape == (0, 4)


def test_wrong_types_and_shapes_are_refused() -> None:
    values = aligned(np.zeros((2, 4), np.float32))
    with tensor_of(values, ggml_enums.F32, [4, 2, 1, 1], [4, 16, 32, 32]) as address:
        with pytest.raises(TraceError, match="has ggml type 0, not 26"):
            read_ids(address)
        with pytest.raises(TraceError, match=r"takes F32 rows \(2, 4\), got float32 \(3, 4\)"):
            write_rows(address, np.zeros((3, 4), np.float32))
