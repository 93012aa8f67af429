"""Update rules over generated graphs, and the rules for memory nodes."""

from __future__ import annotations

import itertools

import pytest
from helpers.contract import Bench, refused
from helpers.kernels import add_one, fill_value, scale, write_cluster_size
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    Edge,
    EmptyParams,
    FreeParams,
    GraphHandle,
    LaunchConfig,
    MemsetParams,
    RawUpdate,
    UpdateResult,
)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A graph's size and edges, from earlier to later nodes."""
    count = draw(st.integers(1, 7))
    possible = list(itertools.combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
    return count, edges


def build(
    bench: Bench, x: int, shape: tuple[int, list[tuple[int, int]]], value: float
) -> GraphHandle:
    """Node i writes ``value`` + i to element i."""
    count, edges = shape
    graph = bench.new_graph()
    nodes = [
        bench.add_kernel(graph, fill_value, x + 4 * index, value + index, 1)
        for index in range(count)
    ]
    bench.driver.add_edges(graph, [Edge(nodes[a], nodes[b]) for a, b in edges])
    return graph


@settings(max_examples=100, deadline=None)
@given(shapes())
def test_a_graph_built_in_the_same_way_updates_and_runs_as_the_new_one(
    shape: tuple[int, list[tuple[int, int]]],
) -> None:
    bench = Bench(EmulatedDriver())
    x = bench.put([0.0] * 7)
    executable = bench.instantiate(build(bench, x, shape, 100))
    new = build(bench, x, shape, 200)
    assert bench.driver.update_exec(executable, new) == RawUpdate(UpdateResult.SUCCESS)
    bench.replay(executable)
    count = shape[0]
    assert bench.get(x, count) == [200 + index for index in range(count)]
    bench.close()


@settings(max_examples=100, deadline=None)
@given(shapes(), shapes())
def test_a_refused_update_changes_nothing_and_an_accepted_one_keeps_every_order(
    first: tuple[int, list[tuple[int, int]]], second: tuple[int, list[tuple[int, int]]]
) -> None:
    bench = Bench(EmulatedDriver(order="adversarial"))
    x = bench.put([0.0] * 7)
    executable = bench.instantiate(build(bench, x, first, 100))
    answer = bench.driver.update_exec(executable, build(bench, x, second, 200))
    bench.driver.write(x, bytes(28))
    bench.replay(executable)
    accepted = answer.result is UpdateResult.SUCCESS
    base = 200 if accepted else 100
    count = first[0]
    assert bench.get(x, count) == [base + index for index in range(count)]
    if accepted:
        assert (first[0], len(first[1])) == (second[0], len(second[1]))
    else:
        assert answer.result is UpdateResult.TOPOLOGY_CHANGED
    bench.close()


def test_dependencies_are_paired_in_the_order_of_their_edges() -> None:
    bench = Bench(EmulatedDriver())
    x = bench.put([1])

    def join(*, swapped: bool) -> GraphHandle:
        graph = bench.new_graph()
        added = bench.add_kernel(graph, add_one, x, 1)
        filled = bench.add(graph, MemsetParams(x + 256, 0, 1, 1))
        after = [filled, added] if swapped else [added, filled]
        bench.add(graph, EmptyParams(), after)
        return graph

    bench.alloc(512)
    executable = bench.instantiate(join(swapped=False))
    assert bench.driver.update_exec(executable, join(swapped=False)).result is UpdateResult.SUCCESS
    answer = bench.driver.update_exec(executable, join(swapped=True))
    assert answer.result is UpdateResult.NODE_TYPE_CHANGED
    bench.close()


def test_a_dependency_already_paired_with_another_is_named() -> None:
    bench = Bench(EmulatedDriver())

    def shape(edges: list[tuple[int, int]]) -> tuple[GraphHandle, list[int]]:
        graph = bench.new_graph()
        nodes = [bench.add(graph, EmptyParams()) for _ in range(4)]
        bench.driver.add_edges(graph, [Edge(nodes[a], nodes[b]) for a, b in edges])
        return graph, list(nodes)

    # two sinks with a source of their own each, against two sinks that share one
    old, _ = shape([(0, 2), (1, 3)])
    new, nodes = shape([(0, 2), (0, 3)])
    executable = bench.instantiate(old)
    answer = bench.driver.update_exec(executable, new)
    # node 1 became a third sink
    assert answer.result is UpdateResult.TOPOLOGY_CHANGED
    assert answer.node in nodes
    old, _ = shape([(0, 1), (0, 2), (1, 3), (2, 3)])
    new, nodes = shape([(0, 1), (1, 2), (1, 3), (2, 3)])
    answer = bench.driver.update_exec(bench.instantiate(old), new)
    assert answer.result is UpdateResult.TOPOLOGY_CHANGED
    assert answer.node in nodes
    assert answer.from_node in nodes
    bench.close()


def test_fewer_sinks_than_before_is_a_topology_change() -> None:
    bench = Bench(EmulatedDriver())

    def shape(edges: list[tuple[int, int]]) -> GraphHandle:
        graph = bench.new_graph()
        nodes = [bench.add(graph, EmptyParams()) for _ in range(4)]
        bench.driver.add_edges(graph, [Edge(nodes[a], nodes[b]) for a, b in edges])
        return graph

    executable = bench.instantiate(shape([(0, 1), (0, 2)]))
    answer = bench.driver.update_exec(executable, shape([(0, 1), (1, 3)]))
    assert answer.result is UpdateResult.TOPOLOGY_CHANGED
    bench.close()


def test_nodes_that_no_sink_reaches_are_a_topology_change() -> None:
    bench = Bench(EmulatedDriver())

    def shape(edges: list[tuple[int, int]]) -> GraphHandle:
        graph = bench.new_graph()
        nodes = [bench.add(graph, EmptyParams()) for _ in range(4)]
        bench.driver.add_edges(graph, [Edge(nodes[a], nodes[b]) for a, b in edges])
        return graph

    executable = bench.instantiate(shape([(1, 2), (2, 3), (1, 3)]))
    cyclic = shape([(1, 2), (2, 3), (3, 1)])
    assert bench.driver.update_exec(executable, cyclic) == RawUpdate(UpdateResult.TOPOLOGY_CHANGED)
    bench.close()


def test_another_programmatic_edge_is_a_topology_change() -> None:
    bench = Bench(EmulatedDriver())
    x = bench.put([1])

    def chain(data: tuple[int, int, int]) -> GraphHandle:
        graph = bench.new_graph()
        nodes = [bench.add_kernel(graph, add_one, x, 1) for _ in range(2)]
        bench.driver.add_edges(graph, [Edge(nodes[0], nodes[1], data)])
        return graph

    executable = bench.instantiate(chain((0, 0, 0)))
    answer = bench.driver.update_exec(executable, chain((1, 0, 1)))
    assert answer.result is UpdateResult.TOPOLOGY_CHANGED
    bench.close()


def test_a_node_cannot_depend_on_itself() -> None:
    bench = Bench(EmulatedDriver())
    graph = bench.new_graph()
    node = bench.add(graph, EmptyParams())
    with refused("INVALID_VALUE"):
        bench.driver.add_edges(graph, [Edge(node, node)])
    bench.close()


# ---- memory nodes -------------------------------------------------------------------------------


def _allocating(bench: Bench, size: int) -> GraphHandle:
    graph = bench.new_graph()
    alloc = bench.add(graph, AllocParams(size))
    params = bench.driver.node_params(alloc)
    assert isinstance(params, AllocParams)
    bench.add(graph, FreeParams(params.address), [alloc])
    return graph


def test_an_executable_that_owns_memory_takes_another_graph_that_does_and_is_its_only_one() -> None:
    bench = Bench(EmulatedDriver())
    graph = _allocating(bench, 64)
    executable = bench.instantiate(graph)
    assert bench.driver.update_exec(executable, graph).result is UpdateResult.SUCCESS
    bench.replay(executable, times=2)
    for size in (64, 128):
        new = _allocating(bench, size)
        assert bench.driver.update_exec(executable, new).result is UpdateResult.SUCCESS
        bench.replay(executable, times=2)
        with refused("NOT_SUPPORTED"):
            bench.driver.instantiate(new)
    taken = _allocating(bench, 64)
    bench.instantiate(taken)
    with refused("NOT_SUPPORTED"):
        bench.driver.update_exec(executable, taken)
    bench.close()


def test_only_an_executable_that_was_not_uploaded_takes_another_cluster() -> None:
    bench = Bench(EmulatedDriver())
    out = bench.alloc(4)

    def graph(size: int) -> GraphHandle:
        handle = bench.new_graph()
        config = LaunchConfig((8, 1, 1), (32, 1, 1), cluster=(size, 1, 1))
        bench.add_kernel(handle, write_cluster_size, out, config=config)
        return handle

    for before in ("nothing", "upload", "launch"):
        executable = bench.instantiate(graph(2))
        if before == "upload":
            bench.driver.upload(executable, bench.stream.handle)
        elif before == "launch":
            bench.replay(executable)
        assert bench.driver.update_exec(executable, graph(4)).result is UpdateResult.SUCCESS
        bench.replay(executable)
        assert bench.get(out, 1, "int32") == [4 if before == "nothing" else 2]
    # no cluster at all is never taken
    executable = bench.instantiate(graph(2))
    assert bench.driver.update_exec(executable, graph(1)).result is UpdateResult.SUCCESS
    bench.replay(executable)
    assert bench.get(out, 1, "int32") == [2]
    bench.close()


def test_a_fill_in_two_dimensions_takes_another_address_and_value() -> None:
    bench = Bench(EmulatedDriver())
    x = bench.alloc(64)

    def filling(address: int, value: int) -> GraphHandle:
        graph = bench.new_graph()
        bench.add(graph, MemsetParams(address, value, 1, 2, height=2, pitch=4))
        return graph

    executable = bench.instantiate(filling(x, 1))
    answer = bench.driver.update_exec(executable, filling(x + 32, 2))
    assert answer.result is UpdateResult.SUCCESS
    bench.replay(executable)
    assert bench.get(x + 32, 6, "uint8") == [2, 2, 255, 255, 2, 2]
    bench.close()


def test_a_child_graph_of_another_topology_cannot_be_put_into_one_node() -> None:
    bench = Bench(EmulatedDriver())
    x = bench.put([1])
    inner = bench.new_graph()
    bench.add_kernel(inner, add_one, x, 1)
    other = bench.new_graph()
    bench.add_kernel(other, scale, x, 5.0, 1, after=[bench.add_kernel(other, add_one, x, 1)])
    graph = bench.new_graph()
    node = bench.add(graph, ChildParams(inner))
    executable = bench.instantiate(graph)
    with refused("GRAPH_EXEC_UPDATE_FAILURE"):
        bench.driver.set_exec_node_params(executable, node, ChildParams(other))
    bench.replay(executable)
    assert bench.get(x, 1) == [2]
    bench.close()


def test_a_bound_launchs_exception_is_raised_again_and_a_result_is_not() -> None:
    driver = EmulatedDriver()
    driver.raise_launch(None)
    driver.raise_launch(0)
    with pytest.raises(KeyError, match="from the launch"):
        driver.raise_launch(KeyError("from the launch"))
