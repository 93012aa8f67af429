"""Contract: what the driver answers to a whole-graph update, and what runs afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from helpers.contract import Bench, copy_1d, copy_2d, covers, fill_1d
from helpers.kernels import (
    add_one,
    copy_bytes,
    fill_value,
    scale,
    write_cluster_size,
    write_shape,
)

from graphcore.driver.records import (
    ChildParams,
    ConditionalParams,
    Edge,
    EmptyParams,
    EventParams,
    GraphHandle,
    HostParams,
    LaunchConfig,
    MemoryKind,
    MemsetParams,
    NodeHandle,
    NodeKind,
    NodeParams,
    RawUpdate,
    UpdateResult,
)


def single(bench: Bench, params: NodeParams) -> GraphHandle:
    graph = bench.new_graph()
    bench.add(graph, params)
    return graph


def shaped(**changes: object) -> LaunchConfig:
    values: dict[str, object] = {"grid": (4, 1, 1), "block": (32, 1, 1)}
    return LaunchConfig(**{**values, **changes})  # type: ignore[arg-type]


# ---- one node, changed --------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A node before and after, and the driver's answer; ``named``: it names the node."""

    build: Callable[[Bench, int], tuple[NodeParams, NodeParams]]
    result: UpdateResult
    named: bool


def accepted(build: Callable[[Bench, int], tuple[NodeParams, NodeParams]]) -> Case:
    return Case(build, UpdateResult.SUCCESS, named=False)


def refusing(
    result: UpdateResult, build: Callable[[Bench, int], tuple[NodeParams, NodeParams]]
) -> Case:
    return Case(build, result, named=True)


def _shapes(**changes: object) -> Callable[[Bench, int], tuple[NodeParams, NodeParams]]:
    return lambda bench, x: (
        bench.kernel_params(write_shape, x, config=shaped()),
        bench.kernel_params(write_shape, x, config=shaped(**changes)),
    )


def _filling(bench: Bench, x: int, value: float) -> NodeParams:
    return bench.kernel_params(fill_value, x, value, 1)


CASES: dict[str, Case] = {
    "nothing": accepted(lambda bench, x: (_filling(bench, x, 1.0), _filling(bench, x, 1.0))),
    "argument_value": accepted(lambda bench, x: (_filling(bench, x, 1.0), _filling(bench, x, 2.0))),
    "argument_address": accepted(
        lambda bench, x: (_filling(bench, x, 1.0), _filling(bench, x + 64, 1.0))
    ),
    "grid": accepted(_shapes(grid=(8, 2, 1))),
    "block": accepted(_shapes(block=(64, 2, 1))),
    "shared_bytes": accepted(_shapes(shared_bytes=512)),
    "priority": accepted(_shapes(priority=-1)),
    "function": accepted(
        lambda bench, x: (
            bench.kernel_params(add_one, x, 1),
            bench.kernel_params(scale, x, 2.0, 1),
        )
    ),
    "cooperative": refusing(UpdateResult.ATTRIBUTES_CHANGED, _shapes(cooperative=True)),
    "kernel_to_memset": refusing(
        UpdateResult.NODE_TYPE_CHANGED,
        lambda bench, x: (_filling(bench, x, 1.0), fill_1d(x, 0, 1)),
    ),
    "empty_to_host": refusing(
        UpdateResult.NODE_TYPE_CHANGED, lambda *_: (EmptyParams(), HostParams(lambda: None))
    ),
    "memcpy_address": accepted(lambda _, x: (copy_1d(x, x + 64, 4), copy_1d(x + 8, x + 68, 4))),
    "memcpy_width": accepted(lambda _, x: (copy_1d(x, x + 64, 4), copy_1d(x, x + 64, 8))),
    "memcpy_host_source": refusing(
        UpdateResult.PARAMETERS_CHANGED,
        lambda bench, x: (
            copy_1d(x, x + 64, 4),
            copy_1d(x, bench.pin(b"abcd"), 4, src_memory=MemoryKind.HOST),
        ),
    ),
    "memcpy_2d_same": accepted(
        lambda _, x: (copy_2d(x, x + 64, 2, 2, 4, 4), copy_2d(x, x + 64, 2, 2, 4, 4))
    ),
    "memcpy_2d_height": refusing(
        UpdateResult.PARAMETERS_CHANGED,
        lambda _, x: (copy_2d(x, x + 64, 2, 2, 4, 4), copy_2d(x, x + 64, 2, 3, 4, 4)),
    ),
    "memcpy_1d_to_2d": refusing(
        UpdateResult.PARAMETERS_CHANGED,
        lambda _, x: (copy_1d(x, x + 64, 4), copy_2d(x, x + 64, 2, 2, 4, 4)),
    ),
    "memset_address": accepted(lambda _, x: (fill_1d(x, 1, 4), fill_1d(x + 16, 1, 4))),
    "memset_width": accepted(lambda _, x: (fill_1d(x, 1, 4), fill_1d(x, 1, 8))),
    "memset_value": accepted(lambda _, x: (fill_1d(x, 1, 4), fill_1d(x, 2, 4))),
    "memset_element_size": accepted(lambda _, x: (fill_1d(x, 1, 4, 4), fill_1d(x, 1, 4, 2))),
    "memset_2d_height": refusing(
        UpdateResult.PARAMETERS_CHANGED,
        lambda _, x: (
            MemsetParams(x, 1, 1, 2, height=2, pitch=4),
            MemsetParams(x, 1, 1, 2, height=3, pitch=4),
        ),
    ),
    "memset_1d_to_2d": refusing(
        UpdateResult.PARAMETERS_CHANGED,
        lambda _, x: (fill_1d(x, 1, 4, 1), MemsetParams(x, 1, 1, 2, height=2, pitch=4)),
    ),
    "host_callback": accepted(
        lambda bench, x: (HostParams(lambda: None), HostParams(lambda: None))
    ),
    "event": accepted(
        lambda bench, _: (
            EventParams(bench.new_event().handle, NodeKind.EVENT_RECORD),
            EventParams(bench.new_event().handle, NodeKind.EVENT_RECORD),
        )
    ),
}


def _bytes_after(bench: Bench, executable: int, x: int) -> list[int]:
    bench.driver.write(x, bytes(range(128)))
    bench.replay(executable)  # type: ignore[arg-type]
    return bench.get(x, 128, "uint8")


@covers("update_exec")
@pytest.mark.parametrize("case", CASES)
def test_an_update_answers_as_the_driver_does_and_runs_what_it_says(
    bench: Bench, case: str
) -> None:
    x = bench.alloc(128)
    before, after = CASES[case].build(bench, x)
    old, new = single(bench, before), single(bench, after)
    executable = bench.instantiate(old)
    answer = bench.driver.update_exec(executable, new)
    assert answer.result is CASES[case].result
    assert answer.node == (bench.driver.nodes(new)[0] if CASES[case].named else None)
    # an accepted update runs the new graph, a refused one leaves the old
    runs = new if answer.result is UpdateResult.SUCCESS else old
    control = bench.instantiate(runs)
    assert _bytes_after(bench, executable, x) == _bytes_after(bench, control, x)


@covers("update_exec")
def test_the_cases_would_notice_an_update_that_did_nothing(bench: Bench) -> None:
    x = bench.alloc(128)
    differ = 0
    for case in CASES.values():
        graphs = [single(bench, params) for params in case.build(bench, x)]
        first, second = (_bytes_after(bench, bench.instantiate(graph), x) for graph in graphs)
        differ += first != second
    assert differ >= 12


@covers("update_exec")
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1)], ids=str)
def test_another_cluster_size_is_accepted_and_not_applied(
    bench: Bench, before: int, after: int
) -> None:
    out, other = bench.alloc(4), bench.alloc(4)
    old, new = (
        single(
            bench,
            bench.kernel_params(write_cluster_size, address, config=shaped(cluster=(size, 1, 1))),
        )
        for address, size in ((out, before), (other, after))
    )
    executable = bench.run(old)
    assert bench.get(out, 1, "int32") == [before]
    assert bench.driver.update_exec(executable, new) == RawUpdate(UpdateResult.SUCCESS)
    bench.replay(executable)
    # the new address was taken, the new cluster was not
    assert bench.get(other, 1, "int32") == [before]


# ---- topology -----------------------------------------------------------------------------------


def wired(bench: Bench, count: int, edges: list[tuple[int, int]]) -> GraphHandle:
    """A graph of ``count`` equal kernels in creation order, with ``edges`` between them."""
    x = bench.alloc(4)
    graph = bench.new_graph()
    nodes: list[NodeHandle] = []
    for index in range(count):
        after = [nodes[source] for source, target in edges if target == index and source < index]
        nodes.append(bench.add_kernel(graph, fill_value, x, 1.0, 1, after=after))
    late = [Edge(nodes[a], nodes[b]) for a, b in edges if a > b]
    bench.driver.add_edges(graph, late)
    return graph


@dataclass(frozen=True)
class Topology:
    before: tuple[int, list[tuple[int, int]]]
    after: tuple[int, list[tuple[int, int]]]
    result: UpdateResult
    named: bool = False


TOPOLOGIES: dict[str, Topology] = {
    "one_node_more": Topology((2, [(0, 1)]), (3, [(0, 1), (1, 2)]), UpdateResult.TOPOLOGY_CHANGED),
    "one_node_less": Topology((3, [(0, 1), (1, 2)]), (2, [(0, 1)]), UpdateResult.TOPOLOGY_CHANGED),
    "an_edge_more": Topology(
        (3, [(0, 1), (1, 2)]),
        (3, [(0, 1), (1, 2), (0, 2)]),
        UpdateResult.TOPOLOGY_CHANGED,
        named=True,
    ),
    "an_edge_less": Topology(
        (3, [(0, 1), (1, 2), (0, 2)]),
        (3, [(0, 1), (1, 2)]),
        UpdateResult.TOPOLOGY_CHANGED,
        named=True,
    ),
    "an_edge_moved": Topology(
        (3, [(0, 1), (1, 2)]), (3, [(0, 1), (0, 2)]), UpdateResult.TOPOLOGY_CHANGED, named=True
    ),
    "an_edge_reversed_between_equals": Topology((2, [(0, 1)]), (2, [(1, 0)]), UpdateResult.SUCCESS),
    "the_same_diamond": Topology(
        (4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
        (4, [(0, 1), (0, 2), (1, 3), (2, 3)]),
        UpdateResult.SUCCESS,
    ),
}


@covers("update_exec")
@pytest.mark.parametrize("case", TOPOLOGIES)
def test_an_update_compares_topology(bench: Bench, case: str) -> None:
    topology = TOPOLOGIES[case]
    old, new = (wired(bench, *shape) for shape in (topology.before, topology.after))
    executable = bench.instantiate(old)
    answer = bench.driver.update_exec(executable, new)
    assert answer.result is topology.result
    assert (answer.node in bench.driver.nodes(new)) is topology.named


@covers("update_exec")
def test_nodes_are_paired_by_topology_so_a_reversed_edge_runs_reversed(bench: Bench) -> None:
    x = bench.put([1])

    def build(first: str) -> GraphHandle:
        graph = bench.new_graph()
        nodes = {
            "add": bench.add_kernel(graph, add_one, x, 1),
            "scale": bench.add_kernel(graph, scale, x, 10.0, 1),
        }
        second = "scale" if first == "add" else "add"
        bench.driver.add_edges(graph, [Edge(nodes[first], nodes[second])])
        return graph

    executable = bench.run(build("add"))
    assert bench.get(x, 1) == [20]
    answer = bench.driver.update_exec(executable, build("scale"))
    assert answer.result is UpdateResult.SUCCESS
    bench.replay(executable)
    assert bench.get(x, 1) == [201]


# ---- graphs inside graphs -----------------------------------------------------------------------


def _nested(bench: Bench, params: NodeParams) -> GraphHandle:
    graph = bench.new_graph()
    bench.add(graph, ChildParams(single(bench, params)))
    return graph


@covers("update_exec")
def test_an_update_reaches_into_child_graphs(bench: Bench) -> None:
    x = bench.alloc(4)
    executable = bench.run(_nested(bench, _filling(bench, x, 1.0)))
    answer = bench.driver.update_exec(executable, _nested(bench, _filling(bench, x, 2.0)))
    assert answer.result is UpdateResult.SUCCESS
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


@covers("update_exec")
def test_a_refusal_inside_a_child_graph_refuses_the_whole(bench: Bench) -> None:
    x = bench.put([0] * 16)
    executable = bench.instantiate(_nested(bench, copy_2d(x, x + 32, 2, 2, 4, 4)))
    answer = bench.driver.update_exec(executable, _nested(bench, copy_2d(x, x + 32, 2, 3, 4, 4)))
    assert answer.result is UpdateResult.PARAMETERS_CHANGED


def _conditional(bench: Bench, form: tuple[str, int], params: NodeParams) -> GraphHandle:
    graph = bench.new_graph()
    _, _, bodies = bench.add_conditional(graph, *form, default=1)
    bench.add(bodies[0], params)
    return graph


@covers("update_exec")
def test_an_update_reaches_into_conditional_bodies(bench: Bench) -> None:
    x = bench.alloc(4)
    executable = bench.run(_conditional(bench, ("if", 1), _filling(bench, x, 1.0)))
    assert bench.get(x, 1) == [1]
    new = _conditional(bench, ("if", 1), _filling(bench, x, 2.0))
    assert bench.driver.update_exec(executable, new).result is UpdateResult.SUCCESS
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


@covers("update_exec")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("if", 1), ("switch", 1)),
        (("if", 1), ("while", 1)),
        (("if", 1), ("if", 2)),
        (("switch", 2), ("switch", 3)),
    ],
    ids=["if_to_switch", "if_to_while", "an_else_more", "a_case_more"],
)
def test_another_form_of_conditional_is_not_supported(
    bench: Bench, before: tuple[str, int], after: tuple[str, int]
) -> None:
    x = bench.alloc(4)
    executable = bench.instantiate(_conditional(bench, before, _filling(bench, x, 1.0)))
    new = _conditional(bench, after, _filling(bench, x, 1.0))
    answer = bench.driver.update_exec(executable, new)
    assert answer.result is UpdateResult.NOT_SUPPORTED
    (node,) = bench.driver.nodes(new)
    assert answer.node == node
    assert isinstance(bench.driver.node_params(node), ConditionalParams)


# ---- use ----------------------------------------------------------------------------------------


@covers("update_exec", "end_capture", "destroy_graph")
def test_a_second_capture_of_the_same_work_updates_the_first(bench: Bench) -> None:
    src, first, second = bench.put([1, 2]), bench.alloc(8), bench.alloc(8)

    def capture(dst: int) -> GraphHandle:
        bench.driver.begin_capture(bench.stream.handle, "thread_local")
        bench.launch(copy_bytes, dst, src, 8)
        bench.launch(add_one, dst, 2)
        return bench.driver.end_capture(bench.stream.handle)

    old = capture(first)
    executable = bench.run(old)
    assert bench.get(first, 2) == [2, 3]
    new = capture(second)
    assert bench.driver.update_exec(executable, new).result is UpdateResult.SUCCESS
    # both descriptions may go: the executable has its own
    bench.driver.destroy_graph(old)
    bench.driver.destroy_graph(new)
    bench.poison(first, 8)
    bench.replay(executable)
    assert bench.get(second, 2) == [2, 3]
    assert bench.get(first, 8, "uint8") == [255] * 8


@covers("update_exec")
def test_a_refused_update_leaves_no_error_behind(bench: Bench) -> None:
    x = bench.put([1])
    executable = bench.instantiate(single(bench, bench.kernel_params(add_one, x, 1)))
    answer = bench.driver.update_exec(executable, single(bench, fill_1d(x, 0, 1)))
    assert answer.result is UpdateResult.NODE_TYPE_CHANGED
    bench.driver.synchronize()
    bench.replay(executable)
    bench.launch(add_one, x, 1)
    assert bench.get(x, 1) == [3]


@covers("update_exec", "set_node_enabled")
def test_a_node_switched_off_stays_off_through_an_update(bench: Bench) -> None:
    x = bench.put([1])
    graph = single(bench, bench.kernel_params(add_one, x, 1))
    (node,) = bench.driver.nodes(graph)
    executable = bench.instantiate(graph)
    bench.driver.set_node_enabled(executable, node, False)
    new = single(bench, bench.kernel_params(scale, x, 7.0, 1))
    assert bench.driver.update_exec(executable, new).result is UpdateResult.SUCCESS
    assert bench.driver.node_enabled(executable, node) is False
    bench.replay(executable)
    assert bench.get(x, 1) == [1]
