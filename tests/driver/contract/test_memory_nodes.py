"""Contract: graphs that own memory - clones, children, second executables, updates, captures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.contract import Bench, copy_1d, covers, fill_1d, refused
from helpers.kernels import add_one, fill_value

from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    EmptyParams,
    FreeParams,
    GraphHandle,
    NodeHandle,
    UpdateResult,
)


def owning(
    bench: Bench, out: int, *, size: int = 64, value: int = 1, freed: bool = True
) -> tuple[GraphHandle, int, list[NodeHandle]]:
    """A graph that allocates, fills, copies 4 bytes to ``out``, frees: graph, address, nodes."""
    graph = bench.new_graph()
    alloc = bench.add(graph, AllocParams(size))
    params = bench.driver.node_params(alloc)
    assert isinstance(params, AllocParams)
    fill = bench.add(graph, fill_1d(params.address, value, 1), [alloc])
    copy = bench.add(graph, copy_1d(out, params.address, 4), [fill])
    nodes = [alloc, fill, copy]
    if freed:
        nodes.append(bench.add(graph, FreeParams(params.address), [copy]))
    return graph, params.address, nodes


@covers("launch_graph", "add_node")
def test_a_freed_allocation_has_the_same_address_at_each_launch(bench: Bench) -> None:
    out = bench.alloc(4)
    graph, address, nodes = owning(bench, out)
    executable = bench.run(graph, times=2)
    assert bench.get(out, 1, "int32") == [1]
    params = bench.driver.node_params(nodes[0])
    assert isinstance(params, AllocParams)
    assert params.address == address
    bench.poison(out, 4)
    bench.replay(executable, times=3)
    assert bench.get(out, 1, "int32") == [1]


@covers("launch_graph")
def test_launches_of_a_freeing_graph_need_no_wait_between_them(bench: Bench) -> None:
    out = bench.alloc(4)
    executable = bench.instantiate(owning(bench, out)[0])
    other = bench.new_stream()
    for _ in range(5):
        bench.driver.launch_graph(executable, bench.stream.handle)
        bench.driver.launch_graph(executable, other.handle)
    bench.driver.synchronize()
    assert bench.get(out, 1, "int32") == [1]


@covers("instantiate", "destroy_exec", "free")
def test_a_second_executable_is_possible_after_the_first_is_destroyed(bench: Bench) -> None:
    out = bench.alloc(4)
    graph, address, _ = owning(bench, out, freed=False)
    first = bench.driver.instantiate(graph)
    bench.replay(first)
    bench.driver.free(address)
    bench.driver.destroy_exec(first)
    bench.poison(out, 4)
    bench.run(graph)
    assert bench.get(out, 1, "int32") == [1]
    bench.driver.free(address)


@covers("free")
def test_an_allocation_that_did_not_happen_cannot_be_freed(bench: Bench) -> None:
    _, address, _ = owning(bench, bench.alloc(4), freed=False)
    with refused("INVALID_VALUE"):
        bench.driver.free(address)


@covers("launch_graph", "add_node")
def test_memory_of_one_graph_is_freed_by_another(bench: Bench) -> None:
    out = bench.alloc(4)
    graph, address, _ = owning(bench, out, freed=False)
    freeing = bench.new_graph()
    bench.add(freeing, FreeParams(address))
    first, second = bench.instantiate(graph), bench.instantiate(freeing)
    for _ in range(2):
        bench.replay(first)
        bench.replay(second)
    assert bench.get(out, 1, "int32") == [1]


@covers("allocation_of", "launch_graph")
def test_memory_that_a_launch_left_is_an_allocation(bench: Bench) -> None:
    graph, address, _ = owning(bench, bench.alloc(4), freed=False)
    bench.run(graph)
    found = bench.driver.allocation_of(address)
    assert found is not None
    assert found.base <= address < found.base + found.size
    bench.driver.free(address)


REFUSED_EDITS: dict[str, Callable[[Bench, GraphHandle, list[NodeHandle]], object]] = {
    "clone_graph": lambda bench, graph, _: bench.driver.clone_graph(graph),
    "embed": lambda bench, graph, _: bench.add(bench.new_graph(), ChildParams(graph)),
    "destroy_alloc": lambda bench, _, nodes: bench.driver.destroy_node(nodes[0]),
    "destroy_fill": lambda bench, _, nodes: bench.driver.destroy_node(nodes[1]),
    "destroy_free": lambda bench, _, nodes: bench.driver.destroy_node(nodes[3]),
    "remove_an_edge": lambda bench, graph, _: bench.driver.remove_edges(
        graph, bench.driver.edges(graph)[:1]
    ),
    "remove_edges": lambda bench, graph, _: bench.driver.remove_edges(
        graph, bench.driver.edges(graph)
    ),
}


@covers("clone_graph", "add_node", "destroy_node", "remove_edges")
@pytest.mark.parametrize("edit", REFUSED_EDITS)
def test_a_graph_that_owns_memory_refuses_to(bench: Bench, edit: str) -> None:
    out = bench.alloc(4)
    graph, _, nodes = owning(bench, out)
    with refused("NOT_SUPPORTED"):
        REFUSED_EDITS[edit](bench, graph, nodes)
    assert bench.driver.nodes(graph) == nodes
    assert len(bench.driver.edges(graph)) == 3
    bench.run(graph)
    assert bench.get(out, 1, "int32") == [1]


@covers("add_node", "add_edges")
def test_a_graph_that_owns_memory_still_grows(bench: Bench) -> None:
    out, x = bench.alloc(4), bench.put([1])
    graph, _, nodes = owning(bench, out)
    late = bench.add_kernel(graph, add_one, x, 1, after=nodes[-1:])
    bench.add(graph, EmptyParams(), [late])
    bench.run(graph)
    assert bench.get(x, 1) == [2]


@covers("set_node_params", "set_exec_node_params")
@pytest.mark.parametrize("place", ["description", "executable"])
@pytest.mark.parametrize("kind", ["alloc", "free"])
def test_memory_nodes_take_no_new_parameters(bench: Bench, kind: str, place: str) -> None:
    graph, address, nodes = owning(bench, bench.alloc(4))
    executable = bench.instantiate(graph)
    node = nodes[0] if kind == "alloc" else nodes[3]
    params = AllocParams(128) if kind == "alloc" else FreeParams(address)
    with refused("NOT_SUPPORTED"):
        if place == "description":
            bench.driver.set_node_params(node, params)
        else:
            bench.driver.set_exec_node_params(executable, node, params)


# ---- updates ------------------------------------------------------------------------------------


@covers("update_exec")
def test_the_same_graph_updates_its_only_executable(bench: Bench) -> None:
    out = bench.alloc(4)
    graph, _, nodes = owning(bench, out)
    executable = bench.run(graph)
    params = bench.driver.node_params(nodes[0])
    assert isinstance(params, AllocParams)
    bench.driver.set_node_params(nodes[1], fill_1d(params.address, 2, 1))
    assert bench.driver.update_exec(executable, graph).result is UpdateResult.SUCCESS
    bench.replay(executable)
    assert bench.get(out, 1, "int32") == [2]


UPDATES = {
    "another_graph_of_the_same_shape": ({}, UpdateResult.ERROR, True),
    "another_size": ({"size": 8192}, UpdateResult.ERROR, True),
    "no_free": ({"freed": False}, UpdateResult.TOPOLOGY_CHANGED, False),
}


@covers("update_exec")
@pytest.mark.parametrize("case", UPDATES)
def test_an_update_of_a_graph_that_owns_memory_answers(bench: Bench, case: str) -> None:
    out = bench.alloc(4)
    changes, result, named = UPDATES[case]
    executable = bench.instantiate(owning(bench, out)[0])
    new, _, nodes = owning(bench, out, value=2, **changes)  # type: ignore[arg-type]
    answer = bench.driver.update_exec(executable, new)
    assert answer.result is result
    assert (answer.node in nodes) is named
    bench.replay(executable)
    assert bench.get(out, 1, "int32") == [1]


@covers("update_exec")
def test_a_graph_that_owns_memory_and_has_another_executable_is_not_supported(
    bench: Bench,
) -> None:
    out = bench.alloc(4)
    executable = bench.instantiate(owning(bench, out)[0])
    taken, _, _ = owning(bench, out)
    bench.instantiate(taken)
    with refused("NOT_SUPPORTED"):
        bench.driver.update_exec(executable, taken)
    bench.replay(executable)
    assert bench.get(out, 1, "int32") == [1]


# ---- inside captures ----------------------------------------------------------------------------


@covers("add_node", "set_capture_frontier")
def test_memory_nodes_spliced_into_a_capture_serve_what_is_captured_next(bench: Bench) -> None:
    out = bench.alloc(4)
    handle = bench.stream.handle
    with bench.capturing() as captured:
        status = bench.driver.capture_status(handle)
        assert status.graph is not None
        alloc = bench.add(status.graph, AllocParams(64))
        params = bench.driver.node_params(alloc)
        assert isinstance(params, AllocParams)
        bench.driver.set_capture_frontier(handle, [alloc])
        bench.launch(fill_value, params.address, 3.0, 1)
        bench.driver.copy(copy_1d(out, params.address, 4), handle)
        after = bench.driver.capture_status(handle).frontier
        freed = bench.add(status.graph, FreeParams(params.address), after)
        bench.driver.set_capture_frontier(handle, [freed])
    bench.run(captured[0], times=2)
    assert bench.get(out, 1) == [3]
