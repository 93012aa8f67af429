"""Contract: executables - launching, changing single nodes, switching nodes off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy
import pytest
from helpers.contract import Bench, copy_1d, copy_2d, covers, fill_1d, in_thread, refused
from helpers.kernels import add_one, fill_value, scale, write_cluster_size, write_shape

from graphcore.driver import LEGACY_STREAM
from graphcore.driver.records import (
    ChildParams,
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
)


@covers("instantiate", "add_node", "set_node_params", "destroy_node")
def test_an_executable_is_a_copy_of_its_graph_as_it_was(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    first = bench.add_kernel(graph, add_one, x, 1)
    second = bench.add_kernel(graph, scale, x, 10.0, 1, after=[first])
    executable = bench.instantiate(graph)
    bench.driver.set_node_params(first, bench.kernel_params(scale, x, 0.0, 1))
    bench.driver.destroy_node(second)
    bench.replay(executable)
    assert bench.get(x, 1) == [20]


@covers("launch_graph")
def test_launches_of_one_executable_follow_each_other(bench: Bench) -> None:
    x = bench.put([0])
    graph = bench.new_graph()
    bench.add_kernel(graph, add_one, x, 1)
    executable = bench.instantiate(graph)
    other = bench.new_stream()
    for _ in range(10):
        bench.driver.launch_graph(executable, bench.stream.handle)
        bench.driver.launch_graph(executable, other.handle)
    bench.driver.synchronize()
    assert bench.get(x, 1) == [20]


@covers("bind_launch")
def test_a_launch_bound_to_the_legacy_stream_works_on_a_thread_that_never_used_the_driver(
    bench: Bench,
) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    bench.add_kernel(graph, add_one, x, 1)
    launch = bench.driver.bind_launch(bench.instantiate(graph), LEGACY_STREAM)
    result = in_thread(launch)
    assert not result
    assert bench.get(x, 1) == [2]


@covers("bind_launch", "raise_launch")
def test_a_bound_launch_launches_and_its_result_is_success(bench: Bench) -> None:
    x = bench.put([0])
    graph = bench.new_graph()
    bench.add_kernel(graph, add_one, x, 1)
    launch = bench.driver.bind_launch(bench.instantiate(graph), bench.stream.handle)
    assert bench.get(x, 1) == [0]
    for _ in range(3):
        assert not launch()
    bench.driver.raise_launch(None)
    assert bench.get(x, 1) == [3]


@covers("upload")
def test_an_upload_runs_nothing(bench: Bench) -> None:
    x = bench.put([0])
    graph = bench.new_graph()
    bench.add_kernel(graph, add_one, x, 1)
    executable = bench.instantiate(graph)
    bench.driver.upload(executable, bench.stream.handle)
    assert bench.get(x, 1) == [0]
    bench.replay(executable)
    assert bench.get(x, 1) == [1]


@covers("instantiate")
def test_an_executable_made_to_use_node_priorities_runs(bench: Bench) -> None:
    x = bench.put([0])
    graph = bench.new_graph()
    config = LaunchConfig((1, 1, 1), (32, 1, 1), priority=-1)
    bench.add_kernel(graph, add_one, x, 1, config=config)
    executable = bench.instantiate(graph, use_node_priority=True)
    bench.replay(executable)
    assert bench.get(x, 1) == [1]


@pytest.mark.exclusive
@covers("destroy_exec", "memory_info")
def test_destroying_executables_gives_their_memory_back(bench: Bench) -> None:
    x = bench.put([0])
    graph = bench.new_graph()
    last: list[NodeHandle] = []
    for _ in range(64):
        last = [bench.add_kernel(graph, add_one, x, 1, after=last)]
    free = []
    for _ in range(4):
        executables = [bench.driver.instantiate(graph) for _ in range(8)]
        for executable in executables:
            bench.replay(executable)
        for executable in executables:
            bench.driver.destroy_exec(executable)
        free.append(bench.driver.memory_info()[0])
    assert free[-1] == free[1]


@covers("launch_graph", "add_node")
def test_a_long_chain_runs_in_order(bench: Bench) -> None:
    x = bench.put([0])
    graph = bench.new_graph()
    last: list[NodeHandle] = []
    expected = numpy.float32(0)
    for index in range(40):
        kernel, arguments = (add_one, (x, 1)) if index % 2 else (scale, (x, 2.0, 1))
        last = [bench.add_kernel(graph, kernel, *arguments, after=last)]
        expected = expected + numpy.float32(1) if index % 2 else expected * numpy.float32(2)
    bench.run(graph)
    assert bench.get(x, 1) == [expected]
    assert expected == 2**20 - 1


# ---- one node of an executable ------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Parameters before and after, and what two addresses hold after each launch."""

    before: NodeParams
    after: NodeParams
    address: int
    dtype: str
    value_before: float
    value_after: float


def _kernel_argument(bench: Bench) -> Change:
    x = bench.alloc(4)
    return Change(
        bench.kernel_params(fill_value, x, 3.0, 1),
        bench.kernel_params(fill_value, x, 4.0, 1),
        x,
        "float32",
        3,
        4,
    )


def _kernel_function(bench: Bench) -> Change:
    x = bench.put([5])
    after = bench.kernel_params(scale, x, 3.0, 1)
    return Change(bench.kernel_params(add_one, x, 1), after, x, "float32", 6, 18)


def _kernel_shape(bench: Bench) -> Change:
    out = bench.alloc(28)
    before, after = (
        bench.kernel_params(write_shape, out, config=LaunchConfig((blocks, 1, 1), (32, 1, 1)))
        for blocks in (2, 5)
    )
    return Change(before, after, out, "int32", 2, 5)


def _memcpy(bench: Bench) -> Change:
    dst, first, second = bench.alloc(4), bench.put([1]), bench.put([2])
    return Change(copy_1d(dst, first, 4), copy_1d(dst, second, 4), dst, "float32", 1, 2)


def _memset(bench: Bench) -> Change:
    x = bench.alloc(8)
    return Change(fill_1d(x, 1, 1), fill_1d(x, 2, 2), x, "int32", 1, 2)


CHANGES: dict[str, Callable[[Bench], Change]] = {
    "kernel_argument": _kernel_argument,
    "kernel_function": _kernel_function,
    "kernel_shape": _kernel_shape,
    "memcpy_source": _memcpy,
    "memset_value_and_width": _memset,
}


@covers("set_exec_node_params", "launch_graph", "node_params")
@pytest.mark.parametrize("change", CHANGES)
def test_one_nodes_parameters_change_in_the_executable_only(bench: Bench, change: str) -> None:
    case = CHANGES[change](bench)
    graph = bench.new_graph()
    node = bench.add(graph, case.before)
    described = bench.driver.node_params(node)
    executable = bench.run(graph)
    assert bench.get(case.address, 1, case.dtype) == [case.value_before]
    bench.driver.set_exec_node_params(executable, node, case.after)
    bench.replay(executable)
    assert bench.get(case.address, 1, case.dtype) == [case.value_after]
    assert bench.driver.node_params(node) == described


@covers("set_exec_node_params")
def test_a_host_nodes_callback_changes(bench: Bench) -> None:
    calls: list[str] = []
    graph = bench.new_graph()
    node = bench.add(graph, HostParams(lambda: calls.append("before")))
    executable = bench.run(graph)
    after = HostParams(lambda: calls.append("after"))
    bench.driver.set_exec_node_params(executable, node, after)
    bench.replay(executable)
    assert calls == ["before", "after"]


@covers("set_exec_node_params")
def test_an_event_nodes_event_changes(bench: Bench) -> None:
    start, first, second = (bench.new_event(timing=True) for _ in range(3))
    bench.driver.record_event(start.handle, bench.stream.handle)
    graph = bench.new_graph()
    node = bench.add(graph, EventParams(first.handle, NodeKind.EVENT_RECORD))
    executable = bench.instantiate(graph)
    after = EventParams(second.handle, NodeKind.EVENT_RECORD)
    bench.driver.set_exec_node_params(executable, node, after)
    bench.replay(executable)
    assert bench.driver.elapsed_ms(start.handle, second.handle) > 0
    with refused("INVALID_HANDLE"):
        bench.driver.elapsed_ms(start.handle, first.handle)


@covers("set_exec_node_params")
def test_a_child_nodes_graph_changes(bench: Bench) -> None:
    x = bench.put([1])
    children = []
    for value in (2.0, 3.0):
        child = bench.new_graph()
        bench.add_kernel(child, fill_value, x, value, 1)
        children.append(child)
    graph = bench.new_graph()
    node = bench.add(graph, ChildParams(children[0]))
    executable = bench.run(graph)
    assert bench.get(x, 1) == [2]
    bench.driver.set_exec_node_params(executable, node, ChildParams(children[1]))
    bench.replay(executable)
    assert bench.get(x, 1) == [3]


@covers("set_exec_node_params")
def test_a_change_of_one_kernel_leaves_its_cluster_as_it_was(bench: Bench) -> None:
    out, other = bench.alloc(4), bench.alloc(4)
    graph = bench.new_graph()
    shape = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    node = bench.add_kernel(graph, write_cluster_size, out, config=shape)
    executable = bench.instantiate(graph)
    params = bench.kernel_params(write_cluster_size, other, config=shape)
    bench.driver.set_exec_node_params(executable, node, params)
    bench.replay(executable)
    assert bench.get(other, 1, "int32") == [2]


@covers("bind_exec_kernel_update")
def test_a_bound_kernel_update_changes_the_node_each_time(bench: Bench) -> None:
    x = bench.alloc(4)
    graph = bench.new_graph()
    params = bench.kernel_params(fill_value, x, 1.0, 1)
    node = bench.add(graph, params)
    executable = bench.instantiate(graph)
    update = bench.driver.bind_exec_kernel_update(executable, node, params)
    for value in (2.0, 3.0):
        update(replace(params, arguments=fill_value.pack(x, value, 1)))
        bench.replay(executable)
        assert bench.get(x, 1) == [value]


REFUSED_CHANGES: dict[str, Callable[[Bench, int], tuple[NodeParams, NodeParams]]] = {
    "another_kind": lambda bench, x: (
        bench.kernel_params(fill_value, x, 3.0, 1),
        fill_1d(x, 0, 1),
    ),
    "memcpy_becomes_2d": lambda _, x: (copy_1d(x, x + 32, 4), copy_2d(x, x + 32, 2, 2, 2, 2)),
    "memcpy_2d": lambda _, x: (
        copy_2d(x, x + 32, 2, 2, 4, 4),
        copy_2d(x + 4, x + 32, 2, 2, 4, 4),
    ),
    "memcpy_from_host": lambda bench, x: (
        copy_1d(x, x + 32, 4),
        copy_1d(x, bench.pin(b"1234"), 4, src_memory=MemoryKind.HOST),
    ),
    "memset_becomes_2d": lambda _, x: (
        fill_1d(x, 1, 4, 1),
        MemsetParams(x, 1, 1, 2, height=2, pitch=2),
    ),
    "memset_2d_height": lambda _, x: (
        MemsetParams(x, 1, 1, 2, height=2, pitch=4),
        MemsetParams(x, 1, 1, 2, height=3, pitch=4),
    ),
}


@covers("set_exec_node_params")
@pytest.mark.parametrize("change", REFUSED_CHANGES)
def test_a_change_the_driver_cannot_make_is_refused_and_nothing_changes(
    bench: Bench, change: str
) -> None:
    x = bench.alloc(64)
    before, after = REFUSED_CHANGES[change](bench, x)
    graph = bench.new_graph()
    node = bench.add(graph, before)
    executable = bench.instantiate(graph)
    with refused("INVALID_VALUE"):
        bench.driver.set_exec_node_params(executable, node, after)
    control = bench.instantiate(graph)
    results = []
    for each in (executable, control):
        bench.driver.write(x, bytes(range(64)))
        bench.replay(each)
        results.append(bench.get(x, 64, "uint8"))
    assert results[0] == results[1] != list(range(64))


@covers("set_exec_node_params")
def test_an_empty_node_has_no_parameters_to_change(bench: Bench) -> None:
    graph = bench.new_graph()
    node = bench.add(graph, EmptyParams())
    executable = bench.instantiate(graph)
    with refused("NOT_SUPPORTED"):
        bench.driver.set_exec_node_params(executable, node, EmptyParams())
    with refused("NOT_SUPPORTED"):
        bench.driver.set_node_params(node, EmptyParams())


@covers("set_exec_node_params", "set_node_enabled", "node_enabled")
def test_a_node_of_another_graph_is_not_the_executables(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    bench.add_kernel(graph, add_one, x, 1)
    executable = bench.instantiate(graph)
    stranger = bench.add_kernel(bench.new_graph(), add_one, x, 1)
    params = bench.kernel_params(scale, x, 5.0, 1)
    with refused("INVALID_VALUE"):
        bench.driver.set_exec_node_params(executable, stranger, params)
    with refused("INVALID_VALUE"):
        bench.driver.set_node_enabled(executable, stranger, False)
    with refused("INVALID_VALUE"):
        bench.driver.node_enabled(executable, stranger)
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


# ---- switching nodes off ------------------------------------------------------------------------


def _switchable(bench: Bench, kind: str) -> tuple[NodeParams, int]:
    x, y = bench.put([1]), bench.alloc(4)
    if kind == "kernel":
        return bench.kernel_params(fill_value, y, 5.0, 1), y
    if kind == "memcpy":
        return copy_1d(y, x, 4), y
    return fill_1d(y, 0, 1), y


@covers("set_node_enabled", "node_enabled")
@pytest.mark.parametrize("kind", ["kernel", "memcpy", "memset"])
def test_a_node_that_is_off_does_nothing_until_it_is_on_again(bench: Bench, kind: str) -> None:
    params, y = _switchable(bench, kind)
    graph = bench.new_graph()
    node = bench.add(graph, params)
    executable = bench.instantiate(graph)
    assert bench.driver.node_enabled(executable, node) is True
    bench.driver.set_node_enabled(executable, node, False)
    assert bench.driver.node_enabled(executable, node) is False
    bench.replay(executable)
    assert bench.get(y, 4, "uint8") == [255] * 4
    bench.driver.set_node_enabled(executable, node, True)
    bench.replay(executable)
    assert bench.get(y, 4, "uint8") != [255] * 4


@covers("set_node_enabled", "node_enabled")
@pytest.mark.parametrize("kind", ["host", "empty", "child", "event"])
def test_nodes_of_other_kinds_cannot_be_switched(bench: Bench, kind: str) -> None:
    def params() -> NodeParams:
        return {
            "host": lambda: HostParams(lambda: None),
            "empty": EmptyParams,
            "child": lambda: ChildParams(bench.new_graph()),
            "event": lambda: EventParams(bench.new_event().handle, NodeKind.EVENT_RECORD),
        }[kind]()

    graph = bench.new_graph()
    node = bench.add(graph, params())
    executable = bench.instantiate(graph)
    with refused("INVALID_VALUE"):
        bench.driver.set_node_enabled(executable, node, False)
    with refused("INVALID_VALUE"):
        bench.driver.node_enabled(executable, node)


@covers("set_node_enabled", "launch_graph")
def test_a_node_that_is_off_still_orders_its_neighbours(bench: Bench) -> None:
    x = bench.put([1])
    graph: GraphHandle = bench.new_graph()
    first = bench.add_kernel(graph, add_one, x, 1)
    middle = bench.add_kernel(graph, scale, x, 0.0, 1, after=[first])
    bench.add_kernel(graph, scale, x, 10.0, 1, after=[middle])
    executable = bench.instantiate(graph)
    bench.driver.set_node_enabled(executable, middle, False)
    bench.replay(executable)
    assert bench.get(x, 1) == [20]
