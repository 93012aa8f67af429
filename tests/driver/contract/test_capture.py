"""Contract: captures that go well - what becomes a node, forks, joins, frontiers, modes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers.contract import Bench, copy_1d, covers, fill_1d, in_thread, refused
from helpers.kernels import ONE_BLOCK, add_one, scale

from graphcore.driver import LEGACY_STREAM, CaptureMode, Driver
from graphcore.driver.records import (
    CaptureState,
    ConditionalParams,
    EmptyParams,
    LaunchConfig,
    NodeKind,
)

MODES: list[CaptureMode] = ["global", "thread_local", "relaxed"]


@covers("begin_capture", "end_capture", "launch")
@pytest.mark.parametrize("mode", MODES)
def test_captured_work_runs_at_each_launch_and_not_before(bench: Bench, mode: CaptureMode) -> None:
    x = bench.put([1, 2])
    with bench.capturing(mode=mode) as captured:
        bench.launch(add_one, x, 2)
        bench.launch(scale, x, 2.0, 2)
    assert bench.get(x, 2) == [1, 2]
    bench.run(captured[0], times=2)
    assert bench.get(x, 2) == [10, 14]


@covers("copy", "fill", "launch_host", "launch", "nodes", "edges", "node_kind")
def test_every_kind_of_work_on_a_stream_becomes_a_node_after_the_one_before(
    bench: Bench,
) -> None:
    x, y = bench.put([1.0]), bench.put([2.0])
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        bench.driver.copy(copy_1d(y, x, 4), bench.stream.handle)
        bench.driver.fill(fill_1d(x, 0, 1), bench.stream.handle)
        bench.driver.launch_host(lambda: None, bench.stream.handle)
    nodes = bench.driver.nodes(captured[0])
    kinds = [bench.driver.node_kind(node) for node in nodes]
    assert kinds == [NodeKind.KERNEL, NodeKind.MEMCPY, NodeKind.MEMSET, NodeKind.HOST]
    edges = {(edge.source, edge.target) for edge in bench.driver.edges(captured[0])}
    assert edges == set(pairwise(nodes))
    bench.run(captured[0])
    assert bench.get(x, 1) == [0]
    assert bench.get(y, 1) == [2]


@covers("launch_host")
def test_a_captured_host_callback_fires_on_every_replay(bench: Bench) -> None:
    calls: list[int] = []
    with bench.capturing() as captured:
        bench.driver.launch_host(lambda: calls.append(len(calls)), bench.stream.handle)
    assert calls == []
    bench.run(captured[0], times=5)
    assert calls == [0, 1, 2, 3, 4]


@covers("capture_status")
def test_the_status_tells_whether_a_stream_captures_and_where_it_stands(bench: Bench) -> None:
    handle = bench.stream.handle
    assert bench.driver.capture_status(handle).state is CaptureState.NONE
    x = bench.put([1])
    with bench.capturing() as captured:
        empty = bench.driver.capture_status(handle)
        assert empty.state is CaptureState.ACTIVE
        assert empty.frontier == ()
        bench.launch(add_one, x, 1)
        after = bench.driver.capture_status(handle)
        assert after.graph == empty.graph
        assert after.sequence == empty.sequence != 0
        assert after.graph is not None
        assert list(after.frontier) == bench.driver.nodes(after.graph)
    assert captured[0] == after.graph
    assert bench.driver.capture_status(handle).state is CaptureState.NONE


@covers("capture_status")
def test_two_captures_never_have_the_same_sequence(bench: Bench) -> None:
    sequences = set()
    for _ in range(3):
        with bench.capturing():
            sequences.add(bench.driver.capture_status(bench.stream.handle).sequence)
    assert len(sequences) == 3


@covers("record_event", "wait_event", "end_capture")
def test_a_fork_and_a_join_make_a_diamond(bench: Bench) -> None:
    x, y = bench.put([1]), bench.put([1])
    side = bench.new_stream()
    forked, joined = bench.new_event(), bench.new_event()
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        bench.driver.record_event(forked.handle, bench.stream.handle)
        bench.driver.wait_event(side.handle, forked.handle)
        status = bench.driver.capture_status(side.handle)
        assert status.state is CaptureState.ACTIVE
        assert status.sequence == bench.driver.capture_status(bench.stream.handle).sequence
        bench.launch(scale, y, 5.0, 1, stream=side)
        bench.launch(scale, x, 3.0, 1)
        bench.driver.record_event(joined.handle, side.handle)
        bench.driver.wait_event(bench.stream.handle, joined.handle)
        bench.launch(add_one, y, 1)
    assert bench.driver.capture_status(side.handle).state is CaptureState.NONE
    first, on_side, on_main, last = bench.driver.nodes(captured[0])
    edges = {(edge.source, edge.target) for edge in bench.driver.edges(captured[0])}
    assert edges == {(first, on_side), (first, on_main), (on_side, last), (on_main, last)}
    bench.run(captured[0])
    assert bench.get(x, 1) == [6]
    assert bench.get(y, 1) == [6]


@covers("end_capture", "wait_event")
def test_a_forked_stream_without_work_of_its_own_needs_no_join(bench: Bench) -> None:
    x = bench.put([1])
    side = bench.new_stream()
    forked = bench.new_event()
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        bench.driver.record_event(forked.handle, bench.stream.handle)
        bench.driver.wait_event(side.handle, forked.handle)
        bench.launch(add_one, x, 1)
    bench.run(captured[0])
    assert bench.get(x, 1) == [3]


@covers("record_event", "wait_event", "node_kind", "elapsed_ms")
def test_external_events_become_nodes_and_happen_at_each_launch(bench: Bench) -> None:
    x = bench.put([1])
    start, end = bench.new_event(timing=True), bench.new_event(timing=True)
    with bench.capturing() as captured:
        bench.driver.record_event(start.handle, bench.stream.handle, external=True)
        bench.launch(add_one, x, 1)
        bench.driver.wait_event(bench.stream.handle, start.handle, external=True)
        bench.driver.record_event(end.handle, bench.stream.handle, external=True)
    kinds = [bench.driver.node_kind(node) for node in bench.driver.nodes(captured[0])]
    assert kinds == [
        NodeKind.EVENT_RECORD,
        NodeKind.KERNEL,
        NodeKind.EVENT_WAIT,
        NodeKind.EVENT_RECORD,
    ]
    bench.run(captured[0])
    assert bench.driver.query_event(end.handle) is True
    assert bench.driver.elapsed_ms(start.handle, end.handle) > 0


@covers("set_capture_frontier", "add_node")
def test_a_set_frontier_is_what_the_next_node_depends_on(bench: Bench) -> None:
    x = bench.put([1])
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        bench.launch(add_one, x, 1)
        status = bench.driver.capture_status(bench.stream.handle)
        assert status.graph is not None
        first = bench.driver.nodes(status.graph)[0]
        spliced = bench.add(status.graph, EmptyParams(), [first])
        bench.driver.set_capture_frontier(bench.stream.handle, [spliced])
        assert bench.driver.capture_status(bench.stream.handle).frontier == (spliced,)
        bench.launch(scale, x, 4.0, 1)
    first, second, empty, last = bench.driver.nodes(captured[0])
    edges = {(edge.source, edge.target) for edge in bench.driver.edges(captured[0])}
    # nodes taken out of the frontier this way need no join
    assert edges == {(first, second), (first, empty), (empty, last)}


@covers("set_capture_frontier")
def test_an_empty_frontier_makes_the_next_node_a_root(bench: Bench) -> None:
    x = bench.put([1])
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        bench.driver.set_capture_frontier(bench.stream.handle, [])
        bench.launch(add_one, x, 1)
    assert len(bench.driver.nodes(captured[0])) == 2
    assert bench.driver.edges(captured[0]) == []


@covers("set_capture_frontier")
def test_a_frontier_outside_a_capture_is_refused(bench: Bench) -> None:
    with refused("ILLEGAL_STATE"):
        bench.driver.set_capture_frontier(bench.stream.handle, [])


@covers("set_capture_frontier")
def test_a_frontier_of_another_graphs_nodes_is_refused(bench: Bench) -> None:
    stranger = bench.add(bench.new_graph(), EmptyParams())
    with bench.capturing(), refused("INVALID_VALUE"):
        bench.driver.set_capture_frontier(bench.stream.handle, [stranger])


@covers("begin_capture", "end_capture")
def test_a_capture_into_a_given_graph_adds_to_it(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    bench.add_kernel(graph, add_one, x, 1)
    with bench.capturing(graph=graph) as captured:
        assert bench.driver.capture_status(bench.stream.handle).graph == graph
        bench.launch(add_one, x, 1)
    assert captured == [graph]
    assert len(bench.driver.nodes(graph)) == 2
    assert bench.driver.edges(graph) == []


@covers("begin_capture", "end_capture")
def test_two_captures_into_one_graph_are_not_ordered(bench: Bench) -> None:
    x = bench.put([1, 1])
    graph = bench.new_graph()
    for address in (x, x + 4):
        with bench.capturing(graph=graph):
            bench.launch(add_one, address, 1)
            bench.launch(scale, address, 3.0, 1)
    assert len(bench.driver.nodes(graph)) == 4
    assert len(bench.driver.edges(graph)) == 2
    bench.run(graph)
    assert bench.get(x, 2) == [6, 6]


@covers("create_conditional", "add_node", "set_capture_frontier", "begin_capture")
def test_a_conditional_node_is_spliced_into_a_capture_under_way(bench: Bench) -> None:
    x = bench.put([1])
    side = bench.new_stream()
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        status = bench.driver.capture_status(bench.stream.handle)
        assert status.graph is not None
        handle = bench.driver.create_conditional(status.graph, 1)
        node = bench.add(status.graph, ConditionalParams(handle, "if"), status.frontier)
        params = bench.driver.node_params(node)
        assert isinstance(params, ConditionalParams)
        with bench.capturing(side, graph=params.bodies[0]):
            bench.launch(scale, x, 10.0, 1, stream=side)
        bench.driver.set_capture_frontier(bench.stream.handle, [node])
        bench.launch(add_one, x, 1)
    bench.run(captured[0])
    assert bench.get(x, 1) == [21]


@covers("launch", "edges")
def test_a_programmatic_launch_makes_a_programmatic_edge(bench: Bench) -> None:
    x = bench.put([1])
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        config = LaunchConfig((1, 1, 1), (32, 1, 1), programmatic=True)
        bench.launch(scale, x, 2.0, 1, config=config)
    (edge,) = bench.driver.edges(captured[0])
    assert edge.data == (1, 0, 1)


@covers("launch", "begin_capture")
def test_legacy_work_beside_a_non_blocking_capture_runs_at_once_and_is_not_in_it(
    bench: Bench,
) -> None:
    x, y = bench.put([1]), bench.put([1])
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        function = bench.driver.function(add_one)
        bench.driver.launch(function, ONE_BLOCK, add_one.pack(y, 1), LEGACY_STREAM)
    assert len(bench.driver.nodes(captured[0])) == 1
    assert bench.get(x, 1) == [1]
    assert bench.get(y, 1) == [2]


@covers("begin_capture", "end_capture")
def test_two_threads_capture_at_once(bench: Bench) -> None:
    x = bench.put([1])
    other = bench.new_stream()

    def capture_other() -> int:
        with bench.capturing(other) as captured:
            bench.launch(add_one, x, 1, stream=other)
        return len(bench.driver.nodes(captured[0]))

    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        assert in_thread(capture_other) == 1
    assert len(bench.driver.nodes(captured[0])) == 1


@covers("end_capture")
def test_a_relaxed_capture_may_be_ended_by_another_thread(bench: Bench) -> None:
    x = bench.put([1])
    bench.driver.begin_capture(bench.stream.handle, "relaxed")
    bench.launch(add_one, x, 1)
    graph = in_thread(lambda: bench.driver.end_capture(bench.stream.handle))
    bench.keep_graph(graph)
    assert len(bench.driver.nodes(graph)) == 1


@covers("exchange_capture_mode")
def test_exchanging_the_threads_mode_gives_the_one_before(graphcore_driver: Driver) -> None:
    before = graphcore_driver.exchange_capture_mode("relaxed")
    assert before == "global"
    assert graphcore_driver.exchange_capture_mode("thread_local") == "relaxed"
    assert graphcore_driver.exchange_capture_mode(before) == "thread_local"


@covers("exchange_capture_mode", "alloc")
def test_a_relaxed_thread_may_allocate_inside_its_capture(bench: Bench) -> None:
    x = bench.put([1])
    with bench.capturing(mode="global") as captured:
        before = bench.driver.exchange_capture_mode("relaxed")
        address = bench.driver.alloc(64)
        bench.driver.exchange_capture_mode(before)
        bench.launch(add_one, x, 1)
    bench.driver.free(address)
    assert len(bench.driver.nodes(captured[0])) == 1


@covers("alloc", "free")
def test_a_relaxed_capture_lets_allocations_through(bench: Bench) -> None:
    with bench.capturing(mode="relaxed"):
        bench.driver.free(bench.driver.alloc(64))


@covers("alloc")
@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_another_thread_may_allocate_during_a_capture_that_is_not_global(
    bench: Bench, mode: CaptureMode
) -> None:
    with bench.capturing(mode=mode):
        address = in_thread(lambda: bench.driver.alloc(64))
    bench.driver.free(address)


@covers("function")
def test_a_loaded_kernel_is_found_again_inside_a_capture(bench: Bench) -> None:
    loaded = bench.driver.function(add_one)
    with bench.capturing():
        assert bench.driver.function(add_one) == loaded


@covers("create_event", "create_stream", "create_graph")
def test_making_streams_events_and_graphs_is_allowed_inside_a_capture(bench: Bench) -> None:
    x = bench.put([1])
    with bench.capturing() as captured:
        bench.new_stream()
        bench.new_event()
        bench.new_graph()
        bench.launch(add_one, x, 1)
    assert len(bench.driver.nodes(captured[0])) == 1


@covers("recording")
def test_recording_is_in_force_inside_a_capture_without_adding_nodes_of_its_own(
    bench: Bench,
) -> None:
    x = bench.put([1])
    with bench.capturing() as captured, bench.driver.recording(bench.stream.handle):
        bench.launch(add_one, x, 1)
    assert len(bench.driver.nodes(captured[0])) == 1
