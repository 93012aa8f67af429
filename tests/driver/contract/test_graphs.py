"""Contract: nodes of every kind are built, read back field by field, and run."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy
import pytest
from helpers.contract import Bench, copy_1d, copy_2d, covers, fill_1d, refused
from helpers.kernels import add_one, axpy, scale, write_cluster_size, write_shape

from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalParams,
    CopyOperand,
    EmptyParams,
    EventParams,
    FreeParams,
    HostParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeKind,
    NodeParams,
)


@dataclass(frozen=True)
class Built:
    """Parameters of a node, and a check that one launch of it did its work."""

    params: NodeParams
    assert_ran: Callable[[], None]


def _equals(bench: Bench, address: int, values: list[float], dtype: str = "float32") -> None:
    assert bench.get(address, len(values), dtype) == values


def _kernel(bench: Bench) -> Built:
    x, y = bench.put([1, 2]), bench.put([3, 4])
    params = bench.kernel_params(axpy, 2.0, x, y, 2, config=LaunchConfig((3, 1, 1), (64, 1, 1)))
    return Built(params, lambda: _equals(bench, y, [5, 8]))


def _kernel_shape(bench: Bench) -> Built:
    out = bench.alloc(28)
    config = LaunchConfig((2, 3, 1), (4, 2, 2), shared_bytes=256)
    params = bench.kernel_params(write_shape, out, config=config)
    return Built(params, lambda: _equals(bench, out, [2, 3, 1, 4, 2, 2, 256], "int32"))


def _kernel_cluster(bench: Bench) -> Built:
    out = bench.alloc(4)
    config = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(4, 1, 1))
    params = bench.kernel_params(write_cluster_size, out, config=config)
    return Built(params, lambda: _equals(bench, out, [4], "int32"))


def _kernel_cooperative(bench: Bench) -> Built:
    x = bench.put([1])
    config = LaunchConfig((2, 1, 1), (32, 1, 1), cooperative=True)
    params = bench.kernel_params(add_one, x, 1, config=config)
    return Built(params, lambda: _equals(bench, x, [2]))


def _memcpy_1d(bench: Bench) -> Built:
    src, dst = bench.put([1, 2, 3]), bench.alloc(12)
    return Built(copy_1d(dst, src, 12), lambda: _equals(bench, dst, [1, 2, 3]))


def _memcpy_2d(bench: Bench) -> Built:
    src, dst = bench.put(range(16), "uint8"), bench.alloc(12)
    expected = [0, 1, 255, 255, 8, 9, 255, 255, 255, 255, 255, 255]
    return Built(
        copy_2d(dst, src, 2, 2, 4, 8), lambda: _equals(bench, dst, list(expected), "uint8")
    )


def _memcpy_3d(bench: Bench) -> Built:
    data = numpy.arange(48).reshape(2, 4, 6)
    src, dst = bench.put(data, "uint8"), bench.alloc(30)
    params = MemcpyParams(
        CopyOperand(dst, pitch=5, rows=3), CopyOperand(src, pitch=6, rows=4), 4, 2, 2
    )

    def check() -> None:
        got = numpy.array(bench.get(dst, 30, "uint8")).reshape(2, 3, 5)
        assert (got[:, :2, :4] == data[:, :2, :4]).all()
        assert (got[:, 2:] == 255).all()

    return Built(params, check)


def _memcpy_from_host(bench: Bench) -> Built:
    pinned = bench.pin(struct.pack("=2f", 5, 6))
    dst = bench.alloc(8)
    params = copy_1d(dst, pinned, 8, src_memory=MemoryKind.HOST)
    return Built(params, lambda: _equals(bench, dst, [5, 6]))


def _memset(element_size: int, value: int) -> Callable[[Bench], Built]:
    def build(bench: Bench) -> Built:
        x = bench.alloc(4 * element_size)
        dtype = f"uint{8 * element_size}"
        ones = 2 ** (8 * element_size) - 1
        return Built(
            fill_1d(x, value, 3, element_size),
            lambda: _equals(bench, x, [value, value, value, ones], dtype),
        )

    return build


def _memset_2d(bench: Bench) -> Built:
    x = bench.alloc(12)
    params = MemsetParams(x, 7, 1, 2, height=3, pitch=4)
    return Built(params, lambda: _equals(bench, x, [7, 7, 255, 255] * 3, "uint8"))


PLAIN_KINDS: dict[str, Callable[[Bench], Built]] = {
    "kernel": _kernel,
    "kernel_shape": _kernel_shape,
    "kernel_cluster": _kernel_cluster,
    "kernel_cooperative": _kernel_cooperative,
    "memcpy_1d": _memcpy_1d,
    "memcpy_2d": _memcpy_2d,
    "memcpy_3d": _memcpy_3d,
    "memcpy_from_host": _memcpy_from_host,
    "memset_1": _memset(1, 0xAB),
    "memset_2": _memset(2, 0xABCD),
    "memset_4": _memset(4, 0xABCDEF01),
    "memset_2d": _memset_2d,
}


@covers("add_node", "node_kind", "node_params")
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_a_node_is_read_back_field_by_field_and_runs(bench: Bench, kind: str) -> None:
    built = PLAIN_KINDS[kind](bench)
    graph = bench.new_graph()
    node = bench.add(graph, built.params)
    assert bench.driver.nodes(graph) == [node]
    assert bench.driver.node_kind(node) is built.params.kind
    assert _without_priority(bench.driver.node_params(node)) == built.params
    bench.run(graph)
    built.assert_ran()


def _without_priority(params: NodeParams) -> NodeParams:
    # a device tells a number where none was asked for
    if isinstance(params, KernelParams):
        return replace(params, config=replace(params.config, priority=None))
    return params


@covers("node_params")
def test_a_kernels_priority_is_read_back(bench: Bench) -> None:
    x = bench.put([1])
    config = LaunchConfig((1, 1, 1), (32, 1, 1), priority=-1)
    node = bench.add_kernel(bench.new_graph(), add_one, x, 1, config=config)
    params = bench.driver.node_params(node)
    assert isinstance(params, KernelParams)
    assert params.config.priority == -1


@covers("add_node", "node_kind")
def test_a_host_node_fires_on_every_launch_also_when_its_graph_is_gone(bench: Bench) -> None:
    calls: list[int] = []
    graph = bench.driver.create_graph()
    node = bench.add(graph, HostParams(lambda: calls.append(1)))
    assert bench.driver.node_kind(node) is NodeKind.HOST
    assert isinstance(bench.driver.node_params(node), HostParams)
    executable = bench.instantiate(graph)
    bench.driver.destroy_graph(graph)
    bench.replay(executable, times=3)
    assert calls == [1, 1, 1]


@covers("add_node", "node_params")
def test_an_empty_node_joins(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    first = bench.add_kernel(graph, add_one, x, 1)
    empty = bench.add(graph, EmptyParams(), [first])
    bench.add_kernel(graph, scale, x, 5.0, 1, after=[empty])
    assert bench.driver.node_kind(empty) is NodeKind.EMPTY
    assert bench.driver.node_params(empty) == EmptyParams()
    bench.run(graph)
    assert bench.get(x, 1) == [10]


@covers("add_node", "node_params")
@pytest.mark.parametrize("kind", [NodeKind.EVENT_RECORD, NodeKind.EVENT_WAIT])
def test_an_event_node_is_read_back(bench: Bench, kind: NodeKind) -> None:
    event = bench.new_event()
    graph = bench.new_graph()
    node = bench.add(graph, EventParams(event.handle, kind))
    assert bench.driver.node_kind(node) is kind
    assert bench.driver.node_params(node) == EventParams(event.handle, kind)
    bench.run(graph)
    assert bench.driver.query_event(event.handle) is True


@covers("add_node", "node_params")
def test_a_child_node_holds_a_copy_of_its_graph(bench: Bench) -> None:
    x = bench.put([1])
    inner = bench.new_graph()
    bench.add_kernel(inner, add_one, x, 1)
    outer = bench.new_graph()
    child = bench.add(outer, ChildParams(inner))
    bench.add_kernel(outer, scale, x, 10.0, 1, after=[child])
    # what happens to the graph later does not reach the copy
    bench.add_kernel(inner, add_one, x, 1)
    params = bench.driver.node_params(child)
    assert isinstance(params, ChildParams)
    assert params.graph != inner
    assert len(bench.driver.nodes(params.graph)) == 1
    bench.run(outer)
    assert bench.get(x, 1) == [20]


@covers("destroy_graph")
def test_an_embedded_graph_is_not_the_callers_to_destroy(bench: Bench) -> None:
    outer = bench.new_graph()
    child = bench.add(outer, ChildParams(bench.new_graph()))
    params = bench.driver.node_params(child)
    assert isinstance(params, ChildParams)
    with refused("INVALID_VALUE"):
        bench.driver.destroy_graph(params.graph)
    assert bench.driver.nodes(outer) == [child]


@covers("add_node", "node_params")
@pytest.mark.parametrize(
    ("form", "size"), [("if", 1), ("if", 2), ("while", 1), ("switch", 3)], ids=str
)
def test_a_conditional_node_is_read_back_with_its_bodies(
    bench: Bench, form: str, size: int
) -> None:
    graph = bench.new_graph()
    handle, node, bodies = bench.add_conditional(graph, form, size)
    params = bench.driver.node_params(node)
    assert isinstance(params, ConditionalParams)
    assert bench.driver.node_kind(node) is NodeKind.CONDITIONAL
    assert (params.handle, params.form, params.size) == (handle, form, size)
    assert len(set(bodies)) == size
    assert [bench.driver.nodes(body) for body in bodies] == [[]] * size


# ---- memory that a graph owns -------------------------------------------------------------------


def _with_allocation(bench: Bench, *, freed: bool) -> tuple[int, int, int]:
    """A graph that allocates, fills, copies out to ``out``, and frees: graph, address, out."""
    out = bench.alloc(16)
    graph = bench.new_graph()
    alloc = bench.add(graph, AllocParams(16))
    params = bench.driver.node_params(alloc)
    assert isinstance(params, AllocParams)
    fill = bench.add(graph, fill_1d(params.address, 0x11, 16, 1), [alloc])
    copy = bench.add(graph, copy_1d(out, params.address, 16), [fill])
    if freed:
        bench.add(graph, FreeParams(params.address), [copy])
    return graph, params.address, out


@covers("add_node", "node_params")
def test_an_allocation_node_gives_memory_that_its_free_node_takes_back(bench: Bench) -> None:
    graph, address, out = _with_allocation(bench, freed=True)
    alloc, _, _, free = bench.driver.nodes(graph)
    assert bench.driver.node_params(alloc) == AllocParams(16, address)
    assert bench.driver.node_params(free) == FreeParams(address)
    assert address % 256 == 0
    bench.run(graph, times=3)
    assert bench.get(out, 16, "uint8") == [0x11] * 16


@covers("launch_graph", "free", "allocation_of")
def test_an_unfreed_allocation_stops_the_next_launch_until_it_is_freed(bench: Bench) -> None:
    graph, address, out = _with_allocation(bench, freed=False)
    executable = bench.run(graph)
    assert bench.driver.allocation_of(address) is not None
    assert bench.get(address, 16, "uint8") == [0x11] * 16
    bench.poison(out, 16)
    with refused("INVALID_VALUE"):
        bench.driver.launch_graph(executable, bench.stream.handle)
    assert bench.get(out, 16, "uint8") == [0xFF] * 16
    bench.driver.free(address)
    bench.replay(executable)
    assert bench.get(out, 16, "uint8") == [0x11] * 16
    bench.driver.free(address)


@covers("instantiate", "launch_graph")
def test_auto_free_gives_back_the_previous_launchs_allocations(bench: Bench) -> None:
    graph, address, out = _with_allocation(bench, freed=False)
    executable = bench.instantiate(graph, auto_free=True)
    bench.replay(executable, times=3)
    assert bench.get(out, 16, "uint8") == [0x11] * 16
    bench.driver.free(address)


@covers("instantiate", "destroy_exec")
def test_a_graph_with_memory_nodes_has_one_executable_at_a_time(bench: Bench) -> None:
    graph, _, _ = _with_allocation(bench, freed=True)
    executable = bench.driver.instantiate(graph)
    with refused("NOT_SUPPORTED"):
        bench.driver.instantiate(graph)
    bench.driver.destroy_exec(executable)
    bench.run(graph)


@covers("add_node", "clone_graph", "destroy_node", "remove_edges")
def test_a_graph_with_memory_nodes_cannot_be_embedded_cloned_or_thinned(bench: Bench) -> None:
    graph, _, _ = _with_allocation(bench, freed=True)
    with refused("NOT_SUPPORTED"):
        bench.driver.clone_graph(graph)
    with refused("NOT_SUPPORTED"):
        bench.add(bench.new_graph(), ChildParams(graph))
    with refused("NOT_SUPPORTED"):
        bench.driver.destroy_node(bench.driver.nodes(graph)[1])
    with refused("NOT_SUPPORTED"):
        bench.driver.remove_edges(graph, bench.driver.edges(graph)[:1])
    assert len(bench.driver.nodes(graph)) == 4
    assert len(bench.driver.edges(graph)) == 3


@covers("add_node")
def test_a_free_node_needs_a_graph_owned_allocation(bench: Bench) -> None:
    with refused("INVALID_VALUE"):
        bench.add(bench.new_graph(), FreeParams(bench.alloc(64)))


@covers("add_node")
def test_an_allocation_is_freed_once_in_a_graph(bench: Bench) -> None:
    graph, address, _ = _with_allocation(bench, freed=True)
    last = bench.driver.nodes(graph)[-1]
    with refused("INVALID_VALUE"):
        bench.add(graph, FreeParams(address), [last])


# ---- nodes that are refused ---------------------------------------------------------------------


REFUSED_NODES: dict[str, Callable[[Bench, int], NodeParams]] = {
    "kernel_no_blocks": lambda bench, x: bench.kernel_params(
        add_one, x, 1, config=LaunchConfig((0, 1, 1), (32, 1, 1))
    ),
    "memset_element_of_3": lambda _, x: fill_1d(x, 1, 4, 3),
    "memset_pitch": lambda _, x: MemsetParams(x, 1, 1, 8, height=2, pitch=4),
    "memcpy_nothing": lambda _, x: copy_1d(x, x + 8, 0),
    "memcpy_pitch": lambda _, x: copy_2d(x, x + 32, 8, 2, 4, 8),
    "alloc_nothing": lambda _, __: AllocParams(0),
}


@covers("add_node")
@pytest.mark.parametrize("kind", REFUSED_NODES)
def test_a_node_with_impossible_parameters_is_refused_and_not_added(
    bench: Bench, kind: str
) -> None:
    x = bench.alloc(64)
    graph = bench.new_graph()
    with refused("INVALID_VALUE"):
        bench.add(graph, REFUSED_NODES[kind](bench, x))
    assert bench.driver.nodes(graph) == []


@covers("create_conditional", "add_node")
@pytest.mark.parametrize(
    ("form", "size"), [("if", 0), ("if", 3), ("while", 2), ("switch", 0)], ids=str
)
def test_a_conditional_with_the_wrong_number_of_bodies_is_refused(
    bench: Bench, form: str, size: int
) -> None:
    graph = bench.new_graph()
    handle = bench.driver.create_conditional(graph)
    with refused("INVALID_VALUE"):
        bench.add(graph, ConditionalParams(handle, form, size))
    assert bench.driver.nodes(graph) == []
