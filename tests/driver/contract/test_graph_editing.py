"""Contract: descriptions are edited, cloned and destroyed; edges and dependencies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from helpers.contract import Bench, copy_1d, copy_2d, covers, fill_1d, refused
from helpers.kernels import add_one, scale, write_cluster_size

from graphcore.driver import Driver
from graphcore.driver.records import (
    ChildParams,
    Edge,
    EmptyParams,
    KernelParams,
    LaunchConfig,
    MemsetParams,
    NodeHandle,
    NodeParams,
)


def chain(bench: Bench, count: int) -> tuple[int, list[NodeHandle]]:
    """A graph of ``count`` empty nodes, one after the other."""
    graph = bench.new_graph()
    nodes: list[NodeHandle] = []
    for _ in range(count):
        nodes.append(bench.add(graph, EmptyParams(), nodes[-1:]))
    return graph, nodes


def pairs(bench: Bench, graph: int) -> set[tuple[int, int]]:
    return {(edge.source, edge.target) for edge in bench.driver.edges(graph)}


@covers("create_graph", "destroy_graph", "nodes", "edges")
def test_a_new_graph_is_empty_and_runs(bench: Bench) -> None:
    graph = bench.driver.create_graph()
    assert bench.driver.nodes(graph) == []
    assert bench.driver.edges(graph) == []
    executable = bench.run(graph)
    bench.driver.destroy_graph(graph)
    bench.replay(executable)


@covers("nodes", "edges")
def test_nodes_come_in_the_order_they_were_added(bench: Bench) -> None:
    graph, nodes = chain(bench, 20)
    assert bench.driver.nodes(graph) == nodes
    assert pairs(bench, graph) == set(pairwise(nodes))
    assert all(edge.data == (0, 0, 0) for edge in bench.driver.edges(graph))


@covers("add_edges", "remove_edges")
def test_edges_are_added_and_removed(bench: Bench) -> None:
    graph = bench.new_graph()
    a, b, c = (bench.add(graph, EmptyParams()) for _ in range(3))
    bench.driver.add_edges(graph, [Edge(a, b), Edge(b, c)])
    assert pairs(bench, graph) == {(a, b), (b, c)}
    bench.driver.remove_edges(graph, [Edge(a, b)])
    assert pairs(bench, graph) == {(b, c)}
    bench.driver.add_edges(graph, [])
    assert pairs(bench, graph) == {(b, c)}


@covers("add_edges")
def test_an_added_edge_orders_what_runs(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    scaled = bench.add_kernel(graph, scale, x, 10.0, 1)
    added = bench.add_kernel(graph, add_one, x, 1)
    bench.driver.add_edges(graph, [Edge(added, scaled)])
    bench.run(graph)
    assert bench.get(x, 1) == [20]


@covers("add_edges")
def test_an_edge_that_exists_is_refused_and_none_is_added(bench: Bench) -> None:
    graph, (a, b, c) = chain(bench, 3)
    with refused("INVALID_VALUE"):
        bench.driver.add_edges(graph, [Edge(a, c), Edge(a, b)])
    assert pairs(bench, graph) == {(a, b), (b, c)}


@covers("remove_edges")
def test_an_edge_that_does_not_exist_cannot_be_removed(bench: Bench) -> None:
    graph, (a, b, c) = chain(bench, 3)
    with refused("INVALID_VALUE"):
        bench.driver.remove_edges(graph, [Edge(a, c)])
    assert pairs(bench, graph) == {(a, b), (b, c)}


@covers("add_edges", "add_node")
def test_nodes_of_another_graph_are_no_dependencies(bench: Bench) -> None:
    graph, nodes = chain(bench, 2)
    other, strangers = chain(bench, 1)
    with refused("INVALID_VALUE"):
        bench.driver.add_edges(graph, [Edge(strangers[0], nodes[1])])
    with refused("INVALID_VALUE"):
        bench.add(graph, EmptyParams(), strangers)
    assert bench.driver.nodes(graph) == nodes
    assert bench.driver.nodes(other) == strangers


@covers("add_node")
def test_a_dependency_named_twice_is_refused(bench: Bench) -> None:
    graph, nodes = chain(bench, 1)
    with refused("INVALID_VALUE"):
        bench.add(graph, EmptyParams(), [nodes[0], nodes[0]])
    assert bench.driver.nodes(graph) == nodes


@covers("instantiate", "add_edges")
def test_a_cycle_cannot_be_instantiated(bench: Bench) -> None:
    graph, nodes = chain(bench, 3)
    bench.driver.add_edges(graph, [Edge(nodes[2], nodes[0])])
    with refused("INVALID_VALUE"):
        bench.driver.instantiate(graph)


@covers("destroy_node")
def test_a_destroyed_node_takes_its_edges_along(bench: Bench) -> None:
    graph, (a, b, c) = chain(bench, 3)
    bench.driver.destroy_node(b)
    assert bench.driver.nodes(graph) == [a, c]
    assert bench.driver.edges(graph) == []


@covers("clone_graph")
def test_a_clone_has_the_same_nodes_and_edges_and_lives_alone(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.driver.create_graph()
    first = bench.add_kernel(graph, add_one, x, 1)
    bench.add_kernel(graph, scale, x, 3.0, 1, after=[first])
    clone = bench.keep_graph(bench.driver.clone_graph(graph))
    kinds = [bench.driver.node_kind(node) for node in bench.driver.nodes(graph)]
    assert [bench.driver.node_kind(node) for node in bench.driver.nodes(clone)] == kinds
    assert len(bench.driver.edges(clone)) == 1
    assert not set(bench.driver.nodes(clone)) & set(bench.driver.nodes(graph))
    bench.driver.destroy_graph(graph)
    bench.run(clone)
    assert bench.get(x, 1) == [6]


@covers("clone_graph")
def test_a_clone_of_a_graph_with_a_child_has_a_child_of_its_own(bench: Bench) -> None:
    x = bench.put([1])
    inner = bench.new_graph()
    bench.add_kernel(inner, add_one, x, 1)
    outer = bench.new_graph()
    bench.add(outer, ChildParams(inner))
    clone = bench.keep_graph(bench.driver.clone_graph(outer))
    children = [bench.driver.node_params(bench.driver.nodes(graph)[0]) for graph in (outer, clone)]
    assert all(isinstance(child, ChildParams) for child in children)
    assert children[0] != children[1]
    bench.run(clone)
    assert bench.get(x, 1) == [2]


@covers("clone_graph")
def test_a_graph_with_a_conditional_cannot_be_cloned_or_embedded(bench: Bench) -> None:
    graph = bench.new_graph()
    bench.add_conditional(graph, "if")
    with refused("NOT_SUPPORTED"):
        bench.driver.clone_graph(graph)
    with refused("NOT_SUPPORTED"):
        bench.add(bench.new_graph(), ChildParams(graph))


CHANGES: dict[str, Callable[[Bench, int, int], tuple[NodeParams, NodeParams]]] = {
    "kernel_arguments": lambda bench, x, y: (
        bench.kernel_params(add_one, x, 1),
        bench.kernel_params(add_one, y, 1),
    ),
    "kernel_function": lambda bench, x, _: (
        bench.kernel_params(add_one, x, 1),
        bench.kernel_params(scale, x, 2.0, 1),
    ),
    "memcpy": lambda _, x, y: (copy_1d(y, x, 4), copy_2d(x, y, 2, 2, 2, 2)),
    "memset": lambda _, x, y: (fill_1d(x, 1, 1), MemsetParams(y, 3, 1, 2, height=2, pitch=2)),
}


@covers("set_node_params", "node_params")
@pytest.mark.parametrize("change", CHANGES)
def test_a_description_takes_any_new_parameters_of_its_kind(bench: Bench, change: str) -> None:
    x, y = bench.put([1]), bench.put([1])
    before, after = CHANGES[change](bench, x, y)
    graph = bench.new_graph()
    node = bench.add(graph, before)
    bench.driver.set_node_params(node, after)
    read = bench.driver.node_params(node)
    if isinstance(read, KernelParams) and isinstance(after, KernelParams):
        assert (read.function, read.arguments) == (after.function, after.arguments)
        assert (read.config.grid, read.config.block) == (after.config.grid, after.config.block)
    else:
        assert read == after


@covers("set_node_params")
def test_a_description_takes_new_launch_attributes(bench: Bench) -> None:
    out = bench.alloc(4)
    graph = bench.new_graph()
    shape = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    node = bench.add_kernel(graph, write_cluster_size, out, config=shape)
    wider = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(4, 1, 1))
    bench.driver.set_node_params(node, bench.kernel_params(write_cluster_size, out, config=wider))
    bench.run(graph)
    assert bench.get(out, 1, "int32") == [4]


@covers("set_node_params")
def test_parameters_of_another_kind_are_refused(bench: Bench) -> None:
    x = bench.put([1])
    node = bench.add_kernel(bench.new_graph(), add_one, x, 1)
    with refused("INVALID_VALUE"):
        bench.driver.set_node_params(node, fill_1d(x, 0, 1))
    assert isinstance(bench.driver.node_params(node), KernelParams)


@covers("set_node_params")
def test_a_child_nodes_graph_does_not_change_in_a_description(bench: Bench) -> None:
    graph = bench.new_graph()
    child = bench.add(graph, ChildParams(bench.new_graph()))
    with refused("NOT_SUPPORTED"):
        bench.driver.set_node_params(child, ChildParams(bench.new_graph()))


@covers("add_node", "edges")
def test_a_programmatic_kernel_node_makes_programmatic_edges(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    first = bench.add_kernel(graph, add_one, x, 1)
    config = LaunchConfig((1, 1, 1), (32, 1, 1), programmatic=True)
    second = bench.add_kernel(graph, scale, x, 2.0, 1, after=[first], config=config)
    assert bench.driver.edges(graph) == [Edge(first, second, (1, 0, 1))]
    bench.driver.remove_edges(graph, bench.driver.edges(graph))
    assert bench.driver.edges(graph) == []


@covers("add_edges")
def test_edges_keep_their_data(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    first, second = (bench.add_kernel(graph, add_one, x, 1) for _ in range(2))
    edge = Edge(first, second, (1, 0, 1))
    bench.driver.add_edges(graph, [edge])
    assert bench.driver.edges(graph) == [edge]
    with refused("INVALID_VALUE"):
        bench.driver.remove_edges(graph, [Edge(first, second)])
    assert bench.driver.edges(graph) == [edge]


@covers("add_edges")
def test_edges_added_together_keep_their_data_each(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    a, b, c = (bench.add_kernel(graph, add_one, x, 1) for _ in range(3))
    edges = {Edge(a, b), Edge(b, c, (1, 0, 1))}
    bench.driver.add_edges(graph, edges)
    assert set(bench.driver.edges(graph)) == edges


@covers("add_edges", "add_node")
@pytest.mark.parametrize("way", ["edge", "node"])
def test_in_a_conditional_body_edges_keep_their_data_too(bench: Bench, way: str) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    _, _, (body,) = bench.add_conditional(graph, "if", default=1)
    first = bench.add_kernel(body, add_one, x, 1)
    if way == "edge":
        second = bench.add_kernel(body, scale, x, 5.0, 1)
        bench.driver.add_edges(body, [Edge(first, second, (1, 0, 1))])
    else:
        late = LaunchConfig((1, 1, 1), (32, 1, 1), programmatic=True)
        second = bench.add_kernel(body, scale, x, 5.0, 1, after=[first], config=late)
    assert bench.driver.edges(body) == [Edge(first, second, (1, 0, 1))]
    bench.run(graph)
    assert bench.get(x, 1) == [10]


@covers("destroy_graph")
def test_executables_outlive_their_graph(graphcore_driver: Driver) -> None:
    bench = Bench(graphcore_driver)
    x = bench.put([1])
    graph = graphcore_driver.create_graph()
    bench.add_kernel(graph, add_one, x, 1)
    executable = bench.instantiate(graph)
    graphcore_driver.destroy_graph(graph)
    bench.replay(executable, times=2)
    assert bench.get(x, 1) == [3]
    bench.close()
