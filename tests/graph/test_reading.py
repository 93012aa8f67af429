"""Reading graphs of a driver: field by field, inner graphs, labels, and what it costs."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from helpers.contract import Bench, copy_1d, copy_2d
from helpers.kernels import add_one, axpy, count_down, set_value

from graphcore.driver import Driver, Kernel, Parameter, Pointer
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalParams,
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
)
from graphcore.graph import GraphSnapshot, LaunchAttributes, read
from graphcore.graph.reading import label_paths


class Counting:
    """A driver that counts the calls made through it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._driver, name)
        if not callable(attribute):
            return attribute

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return attribute(*arguments, **options)

        return counted


def test_a_kernel_node_reads_back_with_name_shape_and_typed_arguments(bench: Bench) -> None:
    graph = bench.new_graph()
    x, y = bench.alloc(64), bench.alloc(64)
    config = LaunchConfig((4, 2, 1), (32, 2, 2), 1024, (2, 1, 1))
    handle = bench.add_kernel(graph, axpy, 2.5, x, y, 7, config=config)
    snapshot = read(bench.driver, graph)
    (record,) = snapshot.nodes
    assert (record.index, record.handle, record.kind) == (0, handle, NodeKind.KERNEL)
    assert record.name == record.short_name == "axpy"
    assert isinstance(record.params, KernelParams)
    found = record.params.config
    assert (found.grid, found.block, found.shared_bytes) == (config.grid, config.block, 1024)
    assert found.cluster == (2, 1, 1)
    assert not found.cooperative
    assert record.kernel is axpy
    assert [(a.name, a.type, a.value) for a in record.arguments] == [
        ("a", "f32", 2.5),
        ("x", "const f32*", Pointer(x, "float32")),
        ("y", "f32*", Pointer(y, "float32")),
        ("n", "i32", 7),
    ]
    assert [(a.offset, a.size) for a in record.arguments] == [(0, 4), (8, 8), (16, 8), (24, 4)]
    assert snapshot.driver == bench.driver.name
    assert snapshot.context == bench.driver.context_id()
    assert snapshot.device == bench.driver.device
    assert snapshot.edges == ()


def test_copies_and_fills_read_back_field_by_field(bench: Bench) -> None:
    graph = bench.new_graph()
    a, b = bench.alloc(4096), bench.alloc(4096)
    pinned = bench.pin(bytes(64))
    bench.add(graph, copy_1d(a, b, 48))
    bench.add(graph, copy_2d(a, b, 16, 4, 64, 32))
    bench.add(graph, copy_1d(a, pinned, 64, src_memory=MemoryKind.HOST))
    bench.add(graph, MemsetParams(a, 0xAB, 1, 100))
    bench.add(graph, MemsetParams(b, 0x1234, 2, 8, 3, 64))
    params = [record.params for record in read(bench.driver, graph).nodes]
    one, two, three, four, five = params
    assert isinstance(one, MemcpyParams)
    assert (one.dst.address, one.src.address, one.width, one.height, one.depth) == (a, b, 48, 1, 1)
    assert isinstance(two, MemcpyParams)
    assert (two.width, two.height, two.dst.pitch, two.src.pitch) == (16, 4, 64, 32)
    assert isinstance(three, MemcpyParams)
    assert three.dst.memory is MemoryKind.DEVICE
    assert isinstance(four, MemsetParams)
    assert (four.address, four.value, four.element_size, four.width, four.height) == (
        a, 0xAB, 1, 100, 1,
    )  # fmt: skip
    assert isinstance(five, MemsetParams)
    assert (five.value, five.element_size, five.width, five.height, five.pitch) == (
        0x1234, 2, 8, 3, 64,
    )  # fmt: skip


def test_every_other_kind_reads_back_as_itself(bench: Bench) -> None:
    graph = bench.new_graph()
    event = bench.new_event()
    calls: list[int] = []
    bench.add(graph, EmptyParams())
    bench.add(graph, HostParams(lambda: calls.append(1)))
    bench.add(graph, EventParams(event.handle, NodeKind.EVENT_RECORD))
    bench.add(graph, EventParams(event.handle, NodeKind.EVENT_WAIT))
    alloc = bench.add(graph, AllocParams(256))
    allocated = bench.driver.node_params(alloc)
    assert isinstance(allocated, AllocParams)
    bench.add(graph, FreeParams(allocated.address), [alloc])
    snapshot = read(bench.driver, graph)
    assert [record.kind for record in snapshot.nodes] == [
        NodeKind.EMPTY,
        NodeKind.HOST,
        NodeKind.EVENT_RECORD,
        NodeKind.EVENT_WAIT,
        NodeKind.ALLOC,
        NodeKind.FREE,
    ]
    record, wait, alloc_read, free_read = (node.params for node in snapshot.nodes[2:])
    assert isinstance(record, EventParams)
    assert isinstance(wait, EventParams)
    assert record.event == wait.event == event.handle
    assert isinstance(alloc_read, AllocParams)
    assert isinstance(free_read, FreeParams)
    assert alloc_read.size == 256
    assert alloc_read.address == free_read.address != 0
    assert snapshot.edges == ((4, 5),)


def test_edges_are_indices_with_their_data(bench: Bench) -> None:
    graph = bench.new_graph()
    x = bench.alloc(64)
    first = bench.add_kernel(graph, add_one, x, 4)
    second = bench.add_kernel(graph, add_one, x, 4, after=[first])
    third = bench.add_kernel(graph, add_one, x, 4, after=[first])
    bench.add(graph, EmptyParams(), [second, third])
    snapshot = read(bench.driver, graph)
    assert sorted(snapshot.edges) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert snapshot.edge_data == ((0, 0, 0),) * 4
    assert [pair for pair, _ in snapshot.edges_with_data()] == list(snapshot.edges)


def test_child_graphs_and_conditional_bodies_are_read_recursively(bench: Bench) -> None:
    inner, graph = bench.new_graph(), bench.new_graph()
    x = bench.alloc(64)
    first = bench.add_kernel(inner, add_one, x, 4)
    bench.add_kernel(inner, add_one, x, 4, after=[first])
    bench.add(graph, ChildParams(inner))
    handle, _, (body,) = bench.add_conditional(graph, "while", default=1)
    bench.add_kernel(body, count_down, handle, x)
    snapshot = read(bench.driver, graph, annotations=[(0, 1, "block"), (1, 2, "loop")])
    child, loop = snapshot.nodes
    assert child.child is not None
    assert [record.name for record in child.child.nodes] == ["add_one", "add_one"]
    assert child.child.edges == ((0, 1),)
    assert isinstance(loop.params, ConditionalParams)
    assert (loop.params.form, loop.params.size, loop.name) == ("while", 1, "while")
    assert [[record.name for record in graph.nodes] for graph in loop.bodies] == [["count_down"]]
    assert snapshot.summary() == {"kernel": 3, "child": 1, "conditional": 1}
    assert [record.label for record in snapshot.walk()] == [
        "block", "block", "block", "loop", "loop",
    ]  # fmt: skip
    in_child = child.child.nodes[1]
    assert snapshot.find(in_child.handle) is in_child
    assert snapshot.find(12345) is None


def test_a_captured_graph_reads_like_a_built_one(bench: Bench) -> None:
    x = bench.alloc(64)
    with bench.capturing() as captured:
        bench.launch(add_one, x, 4)
        bench.launch(add_one, x, 5)
    snapshot = read(bench.driver, captured[0], annotations=[(1, 2, "second")])
    assert snapshot.edges == ((0, 1),)
    assert [record.arguments[1].value for record in snapshot.nodes] == [4, 5]
    assert [record.label for record in snapshot.nodes] == ["", "second"]


def test_a_kernel_given_by_the_caller_types_the_arguments_of_a_foreign_function(
    bench: Bench,
) -> None:
    class Foreign(Counting):
        """A driver that loaded none of the graph's functions."""

        def kernel_of(self, function: int) -> None:
            return None

    graph = bench.new_graph()
    bench.add_kernel(graph, add_one, bench.alloc(64), 4)
    driver: Any = Foreign(bench.driver)
    raw = read(driver, graph).nodes[0]
    assert raw.kernel is None
    assert raw.arguments[1].value is None
    assert raw.arguments[1].data == (4).to_bytes(4, "little")
    other_layout = Kernel("add_one", (Parameter("x", "f32*"),), "")
    typed = read(driver, graph, kernels=[other_layout, set_value, add_one]).nodes[0]
    assert typed.arguments[1].value == 4
    twin = Kernel("add_one", (Parameter("x", "u64"), Parameter("n", "f32")), "")
    unsure = read(driver, graph, kernels=[twin, add_one]).nodes[0]
    assert unsure.kernel is None


@pytest.mark.parametrize("count", [8, 128])
def test_reading_costs_one_call_a_graph_and_one_a_function(bench: Bench, count: int) -> None:
    graph = bench.new_graph()
    x = bench.alloc(64)
    previous: list[Any] = []
    for _ in range(count):
        previous = [bench.add_kernel(graph, add_one, x, 4, after=previous)]
    driver: Any = Counting(bench.driver)
    assert len(read(driver, graph).nodes) == count
    assert driver.calls == {
        "all_params": 1,
        "plain_edges": 1,
        "context_id": 1,
        "function_info": 1,
        "kernel_of": 1,
    }


def test_a_snapshot_outlives_its_graph(bench: Bench) -> None:
    graph = bench.driver.create_graph()
    bench.add_kernel(graph, add_one, bench.alloc(64), 4)
    snapshot = read(bench.driver, graph)
    bench.driver.destroy_graph(graph)
    assert snapshot.nodes[0].arguments[1].value == 4
    assert repr(snapshot) == "<GraphSnapshot 1 nodes (1 kernel), 0 edges>"
    assert repr(GraphSnapshot(())) == "<GraphSnapshot 0 nodes (empty), 0 edges>"


@pytest.mark.parametrize(
    ("annotations", "labels"),
    [
        ([], ["", "", "", ""]),
        ([(0, 2, "a"), (2, 4, "b")], ["a", "a", "b", "b"]),
        ([(1, 2, "attention"), (0, 4, "layer 0")], ["layer 0", "layer 0/attention", "layer 0",
                                                    "layer 0"]),
        ([(0, 4, "inner"), (0, 4, "outer")], ["outer/inner"] * 4),
        ([(3, 9, "past the end"), (-2, 1, "before")], ["before", "", "", "past the end"]),
        ([(2, 2, "nothing")], ["", "", "", ""]),
    ],
    ids=["none", "beside", "nested", "equal", "clipped", "empty"],
)  # fmt: skip
def test_nested_annotations_become_paths(
    annotations: list[tuple[int, int, str]], labels: list[str]
) -> None:
    assert label_paths(4, annotations) == labels


def test_launch_attributes_are_the_same_read_alone_or_taken_from_a_snapshot(bench: Bench) -> None:
    inner, graph = bench.new_graph(), bench.new_graph()
    x = bench.alloc(64)
    config = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    bench.add_kernel(inner, add_one, x, 4, config=config)
    bench.add_kernel(graph, add_one, x, 4)
    bench.add(graph, EmptyParams())
    bench.add(graph, ChildParams(inner))
    handle, _, bodies = bench.add_conditional(graph, "if", 2)
    for body in bodies:
        bench.add_kernel(body, set_value, handle, 0)
    alone = LaunchAttributes.read(bench.driver, graph)
    assert alone == LaunchAttributes.of(read(bench.driver, graph))
    assert [entry[0] for entry in alone.entries] == [
        (1, 1, 1), (2, 1, 1), (1, 1, 1), (1, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "may"),
    [
        ([(1, 1, 1)], [(1, 1, 1)], False),
        ([(2, 1, 1)] * 2, [(2, 1, 1)] * 2, False),
        ([(1, 1, 1)], [(2, 1, 1)], True),
        ([(1, 1, 1), (2, 1, 1)], [(1, 1, 1), (2, 1, 1)], True),
        ([], [], False),
    ],
)
def test_equal_clusters_everywhere_prove_that_no_update_hides_a_change(
    old: list[Any], new: list[Any], may: bool
) -> None:
    before = LaunchAttributes(tuple((cluster, False, None) for cluster in old))
    after = LaunchAttributes(tuple((cluster, False, None) for cluster in new))
    assert before.may_hide_a_change_to(after) is may


def test_all_nodes_read_at_once_are_the_nodes_read_one_by_one(bench: Bench) -> None:
    x, y = bench.alloc(256), bench.alloc(256)
    graph = bench.new_graph()
    child = bench.new_graph()
    bench.add_kernel(child, add_one, x, 4)
    shapes = [
        LaunchConfig((4, 2, 1), (32, 2, 2), 1024, (2, 1, 1), priority=-1),
        LaunchConfig((1, 1, 1), (32, 1, 1)),
        LaunchConfig((2, 1, 1), (32, 1, 1), cooperative=True),
    ]
    for number, config in enumerate([*shapes, *shapes]):
        bench.add_kernel(graph, axpy, float(number), x, y, number, config=config)
        bench.add_kernel(graph, add_one, x + 4 * number, number)
    others = [copy_1d(x, y, 8), MemsetParams(x, 0, 4, 4), ChildParams(child), EmptyParams()]
    for params in others:
        bench.add(graph, params)
    bench.add_conditional(graph, "while")
    driver = bench.driver
    expected = [(node, driver.node_params(node)) for node in driver.nodes(graph)]
    assert driver.all_params(graph) == expected
    assert len(expected) == 17
    assert driver.all_params(bench.new_graph()) == []


def test_reading_costs_in_proportion_to_the_nodes(bench: Bench) -> None:
    """Counted, not timed: nothing is looked for in what was read before."""
    counts = []
    for size in (50, 500):
        graph = bench.new_graph()
        last: list[Any] = []
        for _ in range(size):
            last = [bench.add_kernel(graph, add_one, bench.alloc(16), 4, after=last)]
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            snapshot = read(bench.driver, graph)
        finally:
            sys.setprofile(None)
        assert len(snapshot.nodes) == size
        counts.append(calls / size)
    assert counts[1] < counts[0] * 1.2
