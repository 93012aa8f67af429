"""Contract: changes of nodes of inner graphs, of copies and fills of rows, of switched nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from helpers.contract import Bench, copy_1d, copy_2d, covers, fill_1d, refused
from helpers.kernels import add_one, fill_value, scale

from graphcore.driver.records import (
    ChildParams,
    ConditionalParams,
    CopyOperand,
    EmptyParams,
    GraphHandle,
    MemcpyParams,
    MemsetParams,
    NodeHandle,
    NodeParams,
    UpdateResult,
)


def single(bench: Bench, params: NodeParams) -> tuple[GraphHandle, NodeHandle]:
    graph = bench.new_graph()
    return graph, bench.add(graph, params)


def filling(bench: Bench, x: int, value: float) -> NodeParams:
    return bench.kernel_params(fill_value, x, value, 1)


# ---- nodes of inner graphs ----------------------------------------------------------------------


def _in_child(bench: Bench, params: NodeParams) -> tuple[GraphHandle, NodeHandle]:
    graph, child = single(bench, ChildParams(single(bench, params)[0]))
    embedded = bench.driver.node_params(child)
    assert isinstance(embedded, ChildParams)
    return graph, bench.driver.nodes(embedded.graph)[0]


def _in_grandchild(bench: Bench, params: NodeParams) -> tuple[GraphHandle, NodeHandle]:
    inner, _ = single(bench, ChildParams(single(bench, params)[0]))
    graph, child = single(bench, ChildParams(inner))
    embedded = bench.driver.node_params(child)
    assert isinstance(embedded, ChildParams)
    second = bench.driver.node_params(bench.driver.nodes(embedded.graph)[0])
    assert isinstance(second, ChildParams)
    return graph, bench.driver.nodes(second.graph)[0]


def _in_body(bench: Bench, params: NodeParams) -> tuple[GraphHandle, NodeHandle]:
    graph = bench.new_graph()
    _, _, bodies = bench.add_conditional(graph, "if", default=1)
    return graph, bench.add(bodies[0], params)


INNER: dict[str, Callable[[Bench, NodeParams], tuple[GraphHandle, NodeHandle]]] = {
    "child": _in_child,
    "grandchild": _in_grandchild,
    "body": _in_body,
}


@covers("set_exec_node_params")
@pytest.mark.parametrize("place", INNER)
def test_one_node_of_an_inner_graph_changes_in_the_executable(bench: Bench, place: str) -> None:
    x = bench.alloc(4)
    graph, node = INNER[place](bench, filling(bench, x, 1.0))
    executable = bench.run(graph)
    assert bench.get(x, 1) == [1]
    bench.driver.set_exec_node_params(executable, node, filling(bench, x, 2.0))
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


@covers("set_node_enabled", "node_enabled")
@pytest.mark.parametrize("place", INNER)
def test_one_node_of_an_inner_graph_is_switched_off(bench: Bench, place: str) -> None:
    x = bench.put([5])
    graph, node = INNER[place](bench, filling(bench, x, 1.0))
    executable = bench.instantiate(graph)
    bench.driver.set_node_enabled(executable, node, False)
    assert bench.driver.node_enabled(executable, node) is False
    bench.replay(executable)
    assert bench.get(x, 1) == [5]


@covers("set_node_params", "instantiate")
@pytest.mark.parametrize("place", INNER)
def test_a_description_of_an_inner_graph_changes_before_it_is_instantiated(
    bench: Bench, place: str
) -> None:
    x = bench.alloc(4)
    graph, node = INNER[place](bench, filling(bench, x, 1.0))
    bench.driver.set_node_params(node, filling(bench, x, 2.0))
    bench.run(graph)
    assert bench.get(x, 1) == [2]


# ---- children that change -----------------------------------------------------------------------


def _chain(bench: Bench, x: int, count: int) -> GraphHandle:
    graph = bench.new_graph()
    last: list[NodeHandle] = []
    for _ in range(count):
        last = [bench.add_kernel(graph, add_one, x, 1, after=last)]
    return graph


CHILDREN: dict[str, tuple[Callable[[Bench, int], GraphHandle], UpdateResult]] = {
    "same": (lambda bench, x: _chain(bench, x, 2), UpdateResult.SUCCESS),
    "a_node_more": (lambda bench, x: _chain(bench, x, 3), UpdateResult.TOPOLOGY_CHANGED),
    "a_node_less": (lambda bench, x: _chain(bench, x, 1), UpdateResult.TOPOLOGY_CHANGED),
    "no_nodes": (lambda bench, _: bench.new_graph(), UpdateResult.TOPOLOGY_CHANGED),
}


@covers("update_exec")
@pytest.mark.parametrize("case", CHILDREN)
def test_an_update_compares_the_topology_of_child_graphs(bench: Bench, case: str) -> None:
    x = bench.put([0])
    build, result = CHILDREN[case]
    executable = bench.instantiate(single(bench, ChildParams(_chain(bench, x, 2)))[0])
    new, _ = single(bench, ChildParams(build(bench, x)))
    assert bench.driver.update_exec(executable, new).result is result
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


@covers("set_exec_node_params")
@pytest.mark.parametrize("case", [case for case in CHILDREN if case != "same"])
def test_a_child_of_another_topology_is_refused_for_one_node(bench: Bench, case: str) -> None:
    x = bench.put([0])
    graph, node = single(bench, ChildParams(_chain(bench, x, 2)))
    executable = bench.instantiate(graph)
    with refused("GRAPH_EXEC_UPDATE_FAILURE"):
        new = CHILDREN[case][0](bench, x)
        bench.driver.set_exec_node_params(executable, node, ChildParams(new))
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


@covers("update_exec")
def test_a_refusal_inside_a_child_names_the_inner_node(bench: Bench) -> None:
    x = bench.alloc(64)
    executable = bench.instantiate(_in_child(bench, copy_2d(x, x + 32, 2, 2, 4, 4))[0])
    new, inner = _in_child(bench, copy_2d(x, x + 32, 2, 3, 4, 4))
    answer = bench.driver.update_exec(executable, new)
    assert answer.result is UpdateResult.PARAMETERS_CHANGED
    assert answer.node == inner


# ---- copies and fills in two dimensions ---------------------------------------------------------


@dataclass(frozen=True)
class Case2D:
    """A change of a copy or fill of rows; the update's answer, and that of the one-node call."""

    after: Callable[[int], NodeParams]
    update: UpdateResult
    alone: bool


REFUSED, ACCEPTED = UpdateResult.PARAMETERS_CHANGED, UpdateResult.SUCCESS
COPIES: dict[str, Case2D] = {
    "same": Case2D(lambda x: copy_2d(x, x + 64, 2, 2, 4, 4), ACCEPTED, alone=True),
    "dst_address": Case2D(lambda x: copy_2d(x + 1, x + 64, 2, 2, 4, 4), REFUSED, alone=False),
    "src_address": Case2D(lambda x: copy_2d(x, x + 65, 2, 2, 4, 4), REFUSED, alone=False),
    "width": Case2D(lambda x: copy_2d(x, x + 64, 3, 2, 4, 4), REFUSED, alone=False),
    "dst_pitch": Case2D(lambda x: copy_2d(x, x + 64, 2, 2, 8, 4), REFUSED, alone=False),
    "src_pitch": Case2D(lambda x: copy_2d(x, x + 64, 2, 2, 4, 8), REFUSED, alone=False),
    "one_row": Case2D(lambda x: copy_1d(x, x + 64, 2), REFUSED, alone=False),
    "depth": Case2D(
        lambda x: MemcpyParams(
            CopyOperand(x, pitch=4, rows=2), CopyOperand(x + 64, pitch=4, rows=2), 2, 2, 2
        ),
        REFUSED,
        alone=False,
    ),
}
FILLS: dict[str, Case2D] = {
    "same": Case2D(lambda x: MemsetParams(x, 1, 1, 2, 2, 4), ACCEPTED, alone=True),
    "address": Case2D(lambda x: MemsetParams(x + 8, 1, 1, 2, 2, 4), ACCEPTED, alone=True),
    "value": Case2D(lambda x: MemsetParams(x, 7, 1, 2, 2, 4), ACCEPTED, alone=True),
    "width": Case2D(lambda x: MemsetParams(x, 1, 1, 3, 2, 4), REFUSED, alone=False),
    "pitch": Case2D(lambda x: MemsetParams(x, 1, 1, 2, 2, 8), REFUSED, alone=False),
    "element_size": Case2D(lambda x: MemsetParams(x, 1, 2, 2, 2, 4), REFUSED, alone=False),
    "one_row": Case2D(lambda x: fill_1d(x, 1, 2, 1), REFUSED, alone=False),
}
CASES_2D: dict[str, tuple[Callable[[int], NodeParams], Case2D]] = {
    **{f"copy_{n}": (lambda x: copy_2d(x, x + 64, 2, 2, 4, 4), c) for n, c in COPIES.items()},
    **{f"fill_{n}": (lambda x: MemsetParams(x, 1, 1, 2, 2, 4), c) for n, c in FILLS.items()},
}


def _bytes_after(bench: Bench, graph: GraphHandle | None, executable: int, x: int) -> list[int]:
    bench.driver.write(x, bytes(range(128)))
    if graph is not None:
        executable = bench.instantiate(graph)
    bench.replay(executable)  # type: ignore[arg-type]
    return bench.get(x, 128, "uint8")


@covers("update_exec", "set_exec_node_params")
@pytest.mark.parametrize("way", ["update", "alone"])
@pytest.mark.parametrize("case", CASES_2D)
def test_a_change_of_rows_is_taken_or_refused_and_runs_what_it_says(
    bench: Bench, case: str, way: str
) -> None:
    x = bench.alloc(128)
    before, change = CASES_2D[case]
    old, node = single(bench, before(x))
    new, _ = single(bench, change.after(x))
    executable = bench.instantiate(old)
    if way == "update":
        answer = bench.driver.update_exec(executable, new)
        assert answer.result is change.update
        is_taken = change.update is ACCEPTED
    else:
        is_taken = change.alone
        if is_taken:
            bench.driver.set_exec_node_params(executable, node, change.after(x))
        else:
            with refused("INVALID_VALUE"):
                bench.driver.set_exec_node_params(executable, node, change.after(x))
    control = new if is_taken else old
    assert _bytes_after(bench, None, executable, x) == _bytes_after(bench, control, 0, x)


# ---- switched nodes -----------------------------------------------------------------------------


SWITCHED: dict[str, Callable[[Bench, int, int], NodeParams]] = {
    "kernel": lambda bench, x, step: bench.kernel_params(fill_value, x, 1.0 + step, 1),
    "memcpy": lambda _, x, step: copy_1d(x, x + 16 * (1 + step), 4),
    "memset": lambda _, x, step: fill_1d(x, 1 + step, 1),
}


@covers("set_node_enabled", "node_enabled", "update_exec", "set_exec_node_params")
@pytest.mark.parametrize("way", ["update", "alone"])
@pytest.mark.parametrize("kind", SWITCHED)
def test_a_change_leaves_a_node_switched_off_and_counts_when_it_is_on_again(
    bench: Bench, kind: str, way: str
) -> None:
    x = bench.put(range(16), "int32")
    graph, node = single(bench, SWITCHED[kind](bench, x, 0))
    executable = bench.instantiate(graph)
    bench.driver.set_node_enabled(executable, node, False)
    changed = SWITCHED[kind](bench, x, 1)
    new, _ = single(bench, changed)
    if way == "update":
        assert bench.driver.update_exec(executable, new).result is UpdateResult.SUCCESS
    else:
        bench.driver.set_exec_node_params(executable, node, changed)
    assert bench.driver.node_enabled(executable, node) is False
    bench.replay(executable)
    assert bench.get(x, 1, "int32") == [0]
    bench.driver.set_node_enabled(executable, node, True)
    bench.replay(executable)
    expected = bench.get(x, 4, "uint8")
    bench.driver.write(x, bytes(4))
    bench.run(new)
    assert expected == bench.get(x, 4, "uint8") != [0] * 4


@covers("set_node_enabled", "update_exec")
def test_a_refused_update_leaves_a_node_switched_off(bench: Bench) -> None:
    x = bench.put([1])
    graph, node = single(bench, bench.kernel_params(scale, x, 5.0, 1))
    executable = bench.instantiate(graph)
    bench.driver.set_node_enabled(executable, node, False)
    new, _ = single(bench, EmptyParams())
    assert bench.driver.update_exec(executable, new).result is UpdateResult.NODE_TYPE_CHANGED
    assert bench.driver.node_enabled(executable, node) is False
    bench.replay(executable)
    assert bench.get(x, 1) == [1]


# ---- conditionals, deeper -----------------------------------------------------------------------


@covers("update_exec", "create_conditional")
def test_an_update_reaches_into_bodies_of_bodies(bench: Bench) -> None:
    x = bench.alloc(4)

    def build(value: float) -> GraphHandle:
        graph = bench.new_graph()
        _, _, outer = bench.add_conditional(graph, "if", default=1)
        _, _, inner = bench.add_conditional(outer[0], "if", default=1)
        bench.add(inner[0], filling(bench, x, value))
        return graph

    executable = bench.run(build(1.0))
    assert bench.get(x, 1) == [1]
    assert bench.driver.update_exec(executable, build(2.0)).result is UpdateResult.SUCCESS
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


@covers("set_exec_node_params", "set_node_params")
@pytest.mark.parametrize("place", ["description", "executable"])
def test_a_conditional_node_takes_no_new_parameters(bench: Bench, place: str) -> None:
    graph = bench.new_graph()
    handle, node, _ = bench.add_conditional(graph, "if")
    executable = bench.instantiate(graph)
    with refused("NOT_SUPPORTED"):
        if place == "description":
            bench.driver.set_node_params(node, ConditionalParams(handle, "while"))
        else:
            bench.driver.set_exec_node_params(executable, node, ConditionalParams(handle, "while"))


@covers("destroy_node", "instantiate")
def test_a_conditional_node_is_destroyed_with_its_bodies(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    _, node, bodies = bench.add_conditional(graph, "if", default=1)
    bench.add_kernel(bodies[0], add_one, x, 1)
    bench.driver.destroy_node(node)
    assert bench.driver.nodes(graph) == []
    # its handle is used by no node any more
    with refused("INVALID_VALUE"):
        bench.driver.instantiate(graph)
