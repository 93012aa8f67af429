"""Building: topology, labels, names and owners of a plan's graph, and what stops it."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphcore_kernels import strided_copy
from helpers.contract import Bench
from helpers.kernels import ONE_BLOCK, add_one, axpy, scale, set_value
from helpers.plan_sites import GRAPH_WAYS, WAYS, Site, make_graph
from helpers.tensors import filled

import graphcore
from graphcore import Buffer, GraphPlan, kernel, open_driver
from graphcore.driver import Driver
from graphcore.driver.records import ConditionalParams, KernelParams, LaunchConfig, NodeKind
from graphcore.errors import (
    CaptureError,
    ConfigurationError,
    CudaError,
    LifecycleError,
    PlanError,
)


def _layers(plan: GraphPlan, count: int = 3) -> None:
    """Two branches a layer that meet in the next."""
    x, y = plan.buffer("x", (4,)), plan.buffer("y", (4,))
    for layer in range(count):
        with plan.annotate(f"layer {layer}"):
            plan.launch(add_one, ONE_BLOCK, x, 4, name=f"add {layer}")
            with plan.annotate("side"):
                plan.launch(scale, ONE_BLOCK, y, 2.0, 4, name=f"scale {layer}")
            plan.launch(axpy, ONE_BLOCK, 1.0, x, y, 4, name=f"meet {layer}")


def _tensors(driver: Driver) -> dict[str, torch.Tensor]:
    return {"x": filled(driver, 1.0), "y": filled(driver, 1.0)}


# ---- what the graph looks like ------------------------------------------------------------------


@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_the_edges_are_the_plans_and_labels_come_with_the_nodes(bench: Bench, way: str) -> None:
    plan = GraphPlan()
    _layers(plan)
    snapshot = make_graph(plan, _tensors(bench.driver), way, driver=bench.driver).snapshot()
    assert set(snapshot.edges) == {
        (source, node.index) for node in plan.nodes for source in plan.after_of(node)
    }
    assert [node.label for node in snapshot.nodes] == [
        label for layer in range(3)
        for label in (f"layer {layer}", f"layer {layer}/side", f"layer {layer}")
    ]  # fmt: skip


@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_a_node_is_found_by_its_name_in_the_plan(bench: Bench, way: str) -> None:
    plan = GraphPlan()
    _layers(plan)
    graph = make_graph(plan, _tensors(bench.driver), way, driver=bench.driver)
    assert list(graph.plan_nodes) == [node.name for node in plan.nodes]
    (handle,) = graph.plan_nodes["scale 1"]
    node = graph.snapshot().find(handle)
    assert node is not None
    assert (node.index, node.name) == (4, "scale")


@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_an_explicit_order_replaces_the_derived_one(bench: Bench, way: str) -> None:
    plan = GraphPlan()
    x, y = plan.buffer("x", (4,)), plan.buffer("y", (4,))
    first = plan.launch(add_one, ONE_BLOCK, x, 4)
    plan.launch(add_one, ONE_BLOCK, y, 4, after=[first])
    snapshot = make_graph(plan, _tensors(bench.driver), way, driver=bench.driver).snapshot()
    assert snapshot.edges == ((0, 1),)


def test_a_condition_that_keeps_its_value_keeps_it_from_launch_to_launch(bench: Bench) -> None:
    site = Site(bench)
    x = site.put("x", [0])
    taken = site.plan.condition("taken", default=None)
    with site.plan.if_then(taken) as body:
        body.launch(add_one, ONE_BLOCK, x, 1)
    site.plan.launch(set_value, ONE_BLOCK, taken, 1)
    graph = site.graph()
    with graph.instantiate() as executable:
        executable.launch(bench.stream)  # whose first value is nobody's promise
        bench.stream.synchronize()
        site.buffers["x"].write([0])
        executable.launch(bench.stream)
        executable.launch(bench.stream)
        bench.stream.synchronize()
    assert site.read("x") == [2]


# ---- what the graph owns ------------------------------------------------------------------------


@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_the_graph_owns_everything_it_works_with(way: str) -> None:
    driver = open_driver("emulated")
    plan = GraphPlan()
    x = plan.buffer("x", (4,))
    event = plan.event("done")

    class Fire:
        def __call__(self) -> None:
            fired.append(1)

    fired: list[int] = []
    fire, tensor = Fire(), torch.zeros(4)
    plan.launch(add_one, ONE_BLOCK, x, 4)
    plan.callback(fire)
    plan.record(event)
    watched = [weakref.ref(fire), weakref.ref(tensor)]
    graph = make_graph(plan, {"x": tensor}, way, driver=driver)
    executable = graph.instantiate()
    graph.close()
    del fire, plan, x, tensor, event, graph
    gc.collect()
    assert all(ref() is not None for ref in watched)
    executable.launch()
    executable.launch()
    assert fired == [1, 1]
    owned = watched[1]()
    assert owned is not None
    assert owned.tolist() == [2, 2, 2, 2]
    del owned
    executable.close()
    del executable
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_an_embedded_graph_gives_its_owners_to_the_graph() -> None:
    driver = open_driver("emulated")
    inner = GraphPlan("inner")
    inner.launch(add_one, ONE_BLOCK, inner.buffer("part", (4,)), 4)
    tensor = torch.zeros(4)
    watched = weakref.ref(tensor)
    child = inner.build({"part": tensor}, driver=driver)
    plan = GraphPlan()
    plan.embed(child)
    graph = plan.build({}, driver=driver)
    child.close()
    del tensor, child
    gc.collect()
    graph.instantiate().launch()
    found = watched()
    assert found is not None
    assert found.tolist() == [1, 1, 1, 1]
    assert "part" in graph.owners.labels()


@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_a_plans_graph_is_pointed_at_other_buffers_by_their_names(bench: Bench, way: str) -> None:
    plan = GraphPlan()
    x, y = plan.buffer("x", (4,)), plan.buffer("y", (4,))
    plan.launch(add_one, ONE_BLOCK, x, 4)
    plan.memcpy(y[1:], x[1:])
    plan.launch(scale, ONE_BLOCK, y[2:], 3.0, 2)
    tensors = {"x": filled(bench.driver, 0.0), "y": filled(bench.driver, 0.0)}
    other = filled(bench.driver, 10.0)
    with make_graph(plan, tensors, way, driver=bench.driver).instantiate() as executable:
        executable.rebind({"x": other})
        executable.launch(bench.stream)
        bench.stream.synchronize()
    assert tensors["x"].tolist() == [0, 0, 0, 0]
    assert other.tolist() == [11, 11, 11, 11]
    assert tensors["y"].tolist() == [0, 11, 33, 33]


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_with_copies_is_embedded_in_a_body_with_kernels_in_their_place(
    bench: Bench, way: str
) -> None:
    inner = Site(bench, "inner")
    x, y, z = (inner.put(name, [1.0, 2.0]) for name in "xyz")
    innermost = GraphPlan("innermost")
    innermost.memcpy(innermost.buffer("to", (2,)), innermost.buffer("of", (2,)))
    inner.plan.launch(add_one, ONE_BLOCK, x, 2)
    inner.plan.memcpy(y, x)
    inner.plan.embed(innermost, {"to": z, "of": y})
    inner.plan.launch(scale, ONE_BLOCK, z, 10.0, 2)
    site = Site(bench)
    site.buffers = {"x": inner.buffers["x"]}
    outer, taken = site.plan.buffer("x", (2,)), site.plan.condition("taken")
    site.plan.launch(set_value, ONE_BLOCK, taken, 1)
    graph = inner.graph()
    with site.plan.if_then(taken) as body:
        body.embed(graph, reads=[outer], writes=[outer])
    if way != "run":
        nodes = list(site.graph(way).snapshot().nodes[1].bodies[0].walk())
        assert [node.kind for node in nodes].count(NodeKind.MEMCPY) == 0
        assert [node.kind for node in nodes].count(NodeKind.CHILD) == 2
        assert sum(node.name.startswith("strided_copy") for node in nodes) == 2
    site.do(way)
    assert [inner.read(name) for name in "xyz"] == [[2, 3], [2, 3], [20, 30]]
    # the graph itself is as it was
    kinds = [node.kind for node in graph.snapshot().walk()]
    assert kinds.count(NodeKind.MEMCPY) == 2


def test_a_body_holds_no_graph_with_a_callback(bench: Bench) -> None:
    inner = GraphPlan("inner")
    inner.callback(lambda: None)
    graph = inner.build({}, driver=bench.driver)
    site = Site(bench)
    taken = site.plan.condition("taken")
    site.plan.launch(set_value, ONE_BLOCK, taken, 1)
    with site.plan.if_then(taken) as body:
        body.embed(graph)
    with pytest.raises(PlanError, match=r"node 'graph': .*conditional body.*kind host"):
        site.graph(check=False)


@pytest.mark.parametrize("way", WAYS)
def test_a_callback_of_an_embedded_plan_fires_at_every_launch(bench: Bench, way: str) -> None:
    fired: list[int] = []
    inner = GraphPlan("inner")
    part = inner.buffer("part", (1,))
    inner.launch(add_one, ONE_BLOCK, part, 1)
    inner.callback(lambda: fired.append(1), reads=[part])
    site = Site(bench)
    x = site.put("x", [0, 0])
    for index in range(2):
        site.plan.embed(inner, {"part": x[index:][:1]})
    site.do(way, times=3)
    assert len(fired) == 6
    assert site.read("x") == [3, 3]


# ---- what stops it ------------------------------------------------------------------------------


def _closed_graph(driver: Driver) -> Any:
    graph = GraphPlan().build({}, driver=driver)
    graph.close()
    return graph


def _foreign_graph(_: Driver) -> Any:
    return GraphPlan().build({}, driver=open_driver("emulated"))


def _conditional_graph(driver: Driver) -> Any:
    plan = GraphPlan()
    taken = plan.condition("taken")
    plan.launch(set_value, ONE_BLOCK, taken, 1)
    with plan.if_then(taken) as body:
        body.join()
    return plan.build({}, driver=driver)


def _memory_graph(driver: Driver) -> Any:
    plan = GraphPlan()
    plan.deallocate(plan.allocate("scratch", (4,)))
    return plan.build({}, driver=driver)


GRAPHS: dict[str, tuple[Callable[[Driver], Any], type[Exception], str]] = {
    "closed": (_closed_graph, LifecycleError, "closed"),
    "of_another_driver": (_foreign_graph, PlanError, "node 'graph'.*of emulated:0"),
    "with_a_conditional": (_conditional_graph, PlanError, "node 'graph'.*kind conditional"),
    "with_memory": (_memory_graph, PlanError, "node 'graph'.*kind alloc"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", GRAPHS)
def test_a_graph_that_cannot_be_embedded_is_refused(bench: Bench, case: str, way: str) -> None:
    make, error, words = GRAPHS[case]
    site = Site(bench)
    x = site.put("x", [1])
    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    site.plan.embed(make(bench.driver))
    with pytest.raises(error, match=words):
        site.do(way)
    assert site.read("x") == [1]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_in_a_body_needs_the_copy_kernel(bench: Bench, way: str) -> None:
    site = Site(bench)
    x, y = site.put("x", [1, 2]), site.put("y", [0, 0])
    taken = site.plan.condition("taken")
    site.plan.launch(set_value, ONE_BLOCK, taken, 1)
    with site.plan.if_then(taken) as body:
        body.memcpy(y, x)
    with pytest.raises(PlanError, match=r"node 'copy x to y'.*copy_kernel.*conditional body"):
        site.do(way, copy_kernel=None)
    assert site.read("y") == [0, 0]
    site.do(way)
    assert site.read("y") == [1, 2]


@pytest.mark.parametrize("way", WAYS)
def test_a_scattered_copy_needs_the_copy_kernel(bench: Bench, way: str) -> None:
    site = Site(bench)
    x, y = site.put("x", [1, 2, 3]), site.put("y", [0, 0, 0])
    site.plan.memcpy(y, x[::-1])
    with pytest.raises(PlanError, match=r"copy_kernel.*strides \(-1,\).*strided_copy"):
        site.do(way, copy_kernel=None)
    site.do(way)
    assert site.read("y") == [3, 2, 1]


def test_a_copy_kernel_is_an_object_that_plans_copies() -> None:
    with pytest.raises(ConfigurationError, match=r"copy_kernel: expected an object with plan"):
        GraphPlan().build({}, copy_kernel=strided_copy.__call__)


@pytest.mark.parametrize("way", WAYS)
def test_a_condition_set_outside_the_body_that_holds_its_node_is_explained(
    bench: Bench, way: str
) -> None:
    site = Site(bench)
    outer, inner = site.plan.condition("outer"), site.plan.condition("inner")
    site.plan.launch(set_value, ONE_BLOCK, outer, 1)
    site.plan.launch(set_value, ONE_BLOCK, inner, 1, name="too early")
    with site.plan.if_then(outer) as body, body.if_then(inner) as innermost:
        innermost.join()
    with pytest.raises(PlanError, match=r"node 'too early': condition 'inner'"):
        site.do(way, check=False)


@pytest.mark.parametrize("way", WAYS)
def test_events_are_checked_by_name(bench: Bench, way: str) -> None:
    site = Site(bench)
    site.plan.wait(site.plan.event("go", external=True))
    other = open_driver("emulated").event()
    wrong: dict[str, tuple[Any, str]] = {
        "missing": ({}, r"events\['go'\]: expected an Event"),
        "unknown": ({"go": bench.new_event(), "no": bench.new_event()}, r"got \['no'\] too"),
        "foreign": ({"go": other}, r"events\['go'\].*another driver"),
        "no_event": ({"go": 3}, r"events\['go'\].*got int"),
        "no_mapping": ([other], "events: expected a mapping"),
    }
    for events, words in wrong.values():
        with pytest.raises(PlanError, match=words):
            site.do(way, events=events)
    site.do(way, events={"go": bench.new_event()})


@pytest.mark.parametrize("way", WAYS)
def test_the_drivers_refusal_names_the_node_and_leaves_nothing(bench: Bench, way: str) -> None:
    site = Site(bench)
    x = site.put("x", [1])
    odd = LaunchConfig((1, 1, 1), (32, 1, 1), shared_bytes=1 << 24)  # more than any device has
    site.plan.launch(add_one, odd, x, 1, name="odd")
    with pytest.raises((CudaError, CaptureError)) as caught:
        site.do(way)
    if way != "run":
        notes = [*getattr(caught.value, "__notes__", ()),
                 *getattr(caught.value.__cause__, "__notes__", ())]  # fmt: skip
        assert any("'odd'" in note for note in notes)
    bench.stream.synchronize()
    assert site.read("x") == [1]


def test_a_kernel_without_reference_is_told_when_it_runs_without_a_device() -> None:
    bare = kernel("bare", "f32* x", 'extern "C" __global__ void bare(float* x) {}')
    plan = GraphPlan()
    plan.launch(bare, ONE_BLOCK, plan.buffer("x", (1,)))
    driver = open_driver("emulated")
    graph = plan.build({"x": Buffer.allocate(1, driver=driver)})
    with pytest.raises(ConfigurationError, match="no Python reference"):
        graph.instantiate().launch()


# ---- compiled plans -----------------------------------------------------------------------------


def test_a_compiled_plan_launches_its_graph(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(bench)
    site.plan.launch(add_one, ONE_BLOCK, site.put("x", [0]), 1)
    with caplog.at_level(logging.INFO, "graphcore"):
        compiled = site.plan.compile(site.buffers, driver=bench.driver)
    assert "built as a graph of 1 node" in caplog.text
    assert not compiled.is_eager
    with compiled:
        for _ in range(3):
            compiled.launch(bench.stream)
        compiled.driver.synchronize()
    assert site.read("x") == [3]
    assert compiled.driver is bench.driver
    with pytest.raises(LifecycleError, match="closed"):
        compiled.launch()


def test_graphcore_disable_lets_a_compiled_plan_run_directly_and_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRAPHCORE_DISABLE", "1")
    site = Site(bench)
    x = site.put("x", [0])
    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    with caplog.at_level(logging.INFO, "graphcore"):
        compiled = site.plan.compile(site.buffers, driver=bench.driver)
    assert "GRAPHCORE_DISABLE=1" in caplog.text
    assert compiled.is_eager
    assert compiled.executable is None
    compiled.launch(bench.stream)
    compiled.launch(bench.stream)
    compiled.driver.synchronize()
    assert site.read("x") == [2]
    for way in GRAPH_WAYS:
        with pytest.raises(CaptureError, match=r"GRAPHCORE_DISABLE=1.*plan\.run"):
            site.graph(way)
    with pytest.raises(PlanError, match="missing"):
        site.plan.compile({})


def test_public_names_are_there() -> None:
    assert graphcore.CompiledPlan.__name__ == "CompiledPlan"


def test_the_body_of_a_plan_reads_back_with_its_parameters(bench: Bench) -> None:
    site = Site(bench)
    x = site.put("x", [1.0, 2.0])
    taken = site.plan.condition("taken")
    site.plan.launch(set_value, ONE_BLOCK, taken, 1)
    with site.plan.if_then(taken) as body:
        body.memset(x, 0)
        body.join()
        body.launch(scale, ONE_BLOCK, x, 3.0, 2)
    node = site.graph().snapshot().nodes[1]
    assert isinstance(node.params, ConditionalParams)
    kinds = [each.kind for each in node.bodies[0].nodes]
    assert kinds == [NodeKind.MEMSET, NodeKind.EMPTY, NodeKind.KERNEL]
    assert isinstance(node.bodies[0].nodes[2].params, KernelParams)
    assert node.bodies[0].edges == ((0, 1), (1, 2))


@pytest.mark.parametrize("way", WAYS)
def test_a_body_without_nodes_does_nothing(bench: Bench, way: str) -> None:
    site = Site(bench)
    x, taken = site.put("x", [1.0]), site.plan.condition("taken")
    site.plan.launch(set_value, ONE_BLOCK, taken, 1)
    with site.plan.if_else(taken) as (_, other):
        other.launch(add_one, ONE_BLOCK, x, 1)
    site.do(way)
    assert site.read("x") == [1]
