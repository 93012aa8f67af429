"""Contract: captures into conditional bodies - a body is filled when its capture ends well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.contract import Bench, copy_1d, covers, fill_1d, refused
from helpers.kernels import add_one, count_down, fill_value, scale, set_value, write_cluster_size

from graphcore.driver.records import (
    CaptureState,
    ChildParams,
    ConditionalParams,
    GraphHandle,
    HostParams,
    KernelParams,
    LaunchConfig,
    NodeKind,
)


def _body(bench: Bench) -> tuple[GraphHandle, int, GraphHandle]:
    """A graph with an IF node that is taken, its handle, its body."""
    graph = bench.new_graph()
    handle, _, bodies = bench.add_conditional(graph, "if", default=1)
    return graph, handle, bodies[0]


@covers("begin_capture", "end_capture", "create_conditional")
def test_a_capture_into_a_conditional_body_makes_the_body(bench: Bench) -> None:
    x = bench.put([1])
    graph, handle, body = _body(bench)
    with bench.capturing(graph=body) as captured:
        bench.launch(add_one, x, 1)
        bench.launch(set_value, handle, 0)
        assert bench.driver.nodes(body) == []
    assert captured == [body]
    first, second = bench.driver.nodes(body)
    assert [(edge.source, edge.target) for edge in bench.driver.edges(body)] == [(first, second)]
    bench.run(graph, times=2)
    assert bench.get(x, 1) == [3]


@covers("begin_capture", "end_capture", "capture_status")
def test_a_capture_for_a_body_takes_nodes_in_a_graph_of_its_own(bench: Bench) -> None:
    x = bench.put([1])
    graph, _, body = _body(bench)
    with bench.capturing(graph=body):
        bench.launch(add_one, x, 1)
        status = bench.driver.capture_status(bench.stream.handle)
        assert status.graph not in (None, body, graph)
        assert status.graph is not None
        assert list(status.frontier) == bench.driver.nodes(status.graph)
        added = bench.add_kernel(status.graph, scale, x, 5.0, 1, after=status.frontier)
        bench.driver.set_capture_frontier(bench.stream.handle, [added])
        bench.launch(add_one, x, 1)
    bench.run(graph)
    assert bench.get(x, 1) == [11]


@covers("end_capture", "node_params", "edges")
def test_launch_attributes_and_programmatic_edges_move_into_the_body(
    bench: Bench,
) -> None:
    out, x = bench.alloc(4), bench.put([1])
    graph, _, body = _body(bench)
    shape = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    late = LaunchConfig((1, 1, 1), (32, 1, 1), programmatic=True)
    with bench.capturing(graph=body):
        bench.launch(write_cluster_size, out, config=shape)
        bench.launch(add_one, x, 1)
        bench.launch(scale, x, 3.0, 1, config=late)
    params = [bench.driver.node_params(node) for node in bench.driver.nodes(body)]
    assert isinstance(params[0], KernelParams)
    assert params[0].config.cluster == (2, 1, 1)
    assert {edge.data for edge in bench.driver.edges(body)} == {(0, 0, 0), (1, 0, 1)}
    bench.run(graph)
    assert bench.get(out, 1, "int32") == [2]
    assert bench.get(x, 1) == [6]


@covers("instantiate", "copy", "fill", "end_capture")
def test_captured_copies_fills_and_child_graphs_run_in_a_body(bench: Bench) -> None:
    x, y, z = bench.put([1]), bench.alloc(4), bench.alloc(4)
    child = bench.new_graph()
    bench.add_kernel(child, scale, x, 7.0, 1)
    graph, _, body = _body(bench)
    with bench.capturing(graph=body):
        bench.launch(add_one, x, 1)
        bench.driver.copy(copy_1d(y, x, 4), bench.stream.handle)
        bench.driver.fill(fill_1d(z, 0, 1), bench.stream.handle)
        status = bench.driver.capture_status(bench.stream.handle)
        assert status.graph is not None
        called = bench.add(status.graph, ChildParams(child), status.frontier)
        bench.driver.set_capture_frontier(bench.stream.handle, [called])
    kinds = [bench.driver.node_kind(node) for node in bench.driver.nodes(body)]
    assert kinds == [NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET, NodeKind.CHILD]
    bench.run(graph)
    assert [bench.get(address, 1) for address in (x, y, z)] == [[14], [2], [0]]


@covers("begin_capture", "record_event", "wait_event")
def test_a_fork_inside_a_body_capture_moves_as_a_diamond(bench: Bench) -> None:
    x, y = bench.put([1]), bench.put([1])
    side, forked, joined = bench.new_stream(), bench.new_event(), bench.new_event()
    graph, _, body = _body(bench)
    with bench.capturing(graph=body):
        bench.launch(add_one, x, 1)
        bench.driver.record_event(forked.handle, bench.stream.handle)
        bench.driver.wait_event(side.handle, forked.handle)
        bench.launch(scale, y, 5.0, 1, stream=side)
        bench.launch(scale, x, 3.0, 1)
        bench.driver.record_event(joined.handle, side.handle)
        bench.driver.wait_event(bench.stream.handle, joined.handle)
        bench.launch(add_one, y, 1)
    first, on_side, on_main, last = bench.driver.nodes(body)
    edges = {(edge.source, edge.target) for edge in bench.driver.edges(body)}
    assert edges == {(first, on_side), (first, on_main), (on_side, last), (on_main, last)}
    bench.run(graph)
    assert [bench.get(x, 1), bench.get(y, 1)] == [[6], [6]]


@covers("begin_capture", "end_capture")
def test_a_while_loop_of_a_captured_body_runs_in_one_launch(bench: Bench) -> None:
    x, counter = bench.put([0]), bench.put([20], "int32")
    graph = bench.new_graph()
    handle, _, bodies = bench.add_conditional(graph, "while", default=1)
    with bench.capturing(graph=bodies[0]):
        for _ in range(5):
            bench.launch(add_one, x, 1)
        bench.launch(count_down, handle, counter)
    bench.run(graph)
    assert bench.get(x, 1) == [100]


@covers("begin_capture", "create_conditional")
def test_a_conditional_added_to_a_captured_body_by_hand_has_its_own_body_captured(
    bench: Bench,
) -> None:
    x, counter = bench.put([0]), bench.put([3], "int32")
    graph, _, body = _body(bench)
    with bench.capturing(graph=body):
        bench.launch(add_one, x, 1)
    handle = bench.driver.create_conditional(body, 1)
    node = bench.add(body, ConditionalParams(handle, "while"), bench.driver.nodes(body))
    params = bench.driver.node_params(node)
    assert isinstance(params, ConditionalParams)
    with bench.capturing(graph=params.bodies[0]):
        bench.launch(add_one, x, 1)
        bench.launch(count_down, handle, counter)
    bench.run(graph)
    assert bench.get(x, 1) == [4]


@covers("update_exec")
def test_an_update_reaches_into_captured_bodies(bench: Bench) -> None:
    x = bench.alloc(4)

    def build(value: float) -> GraphHandle:
        graph, _, body = _body(bench)
        with bench.capturing(graph=body):
            bench.launch(fill_value, x, value, 1)
        return graph

    executable = bench.run(build(1.0))
    assert bench.get(x, 1) == [1]
    assert bench.driver.update_exec(executable, build(2.0)).result.value == "success"
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


def _splice_host_child(bench: Bench) -> None:
    child = bench.new_graph()
    bench.add(child, HostParams(lambda: None))
    status = bench.driver.capture_status(bench.stream.handle)
    assert status.graph is not None
    called = bench.add(status.graph, ChildParams(child), status.frontier)
    bench.driver.set_capture_frontier(bench.stream.handle, [called])


def _splice_conditional(bench: Bench) -> None:
    graph = bench.driver.capture_status(bench.stream.handle).graph
    assert graph is not None
    bench.add_conditional(graph, "if")


STAYING: dict[str, Callable[[Bench], object]] = {
    "host": lambda bench: bench.driver.launch_host(lambda: None, bench.stream.handle),
    "event_record": lambda bench: bench.driver.record_event(
        bench.new_event().handle, bench.stream.handle, external=True
    ),
    "conditional": _splice_conditional,
    "child_with_host": _splice_host_child,
}


@covers("end_capture", "launch_host", "record_event", "create_conditional")
@pytest.mark.parametrize("kind", STAYING)
def test_a_captured_node_that_cannot_move_leaves_the_body_as_it_was(
    bench: Bench, kind: str
) -> None:
    x = bench.put([1])
    graph, _, body = _body(bench)
    before = bench.add_kernel(body, add_one, x, 1)
    bench.driver.begin_capture(bench.stream.handle, "thread_local", graph=body)
    bench.launch(add_one, x, 1)
    STAYING[kind](bench)
    with refused("NOT_SUPPORTED"):
        bench.driver.end_capture(bench.stream.handle)
    assert bench.driver.capture_status(bench.stream.handle).state is CaptureState.NONE
    assert bench.driver.nodes(body) == [before]
    bench.run(graph)
    assert bench.get(x, 1) == [2]
