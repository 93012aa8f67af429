"""Every type of node a plan has: built and captured, read back field by field, launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from helpers.contract import Bench
from helpers.kernels import (
    ONE_BLOCK,
    add_one,
    copy_bytes,
    count_down,
    fill_value,
    scale,
    set_value,
    write_cluster_size,
    write_shape,
)
from helpers.plan_sites import GRAPH_WAYS, WAYS, Site

from graphcore.driver.records import (
    AllocParams,
    ConditionalParams,
    CopyOperand,
    EmptyParams,
    EventParams,
    FreeParams,
    HostParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemsetParams,
    NodeKind,
)
from graphcore.graph.nodes import NodeRecord

Results = dict[str, Any]


@dataclass
class Case:
    """What a node type must look like.

    Args:
        results: Contents of buffers after one launch.
        look: Compares the read nodes with what was asked for.
        options: Of build, capture and run.
        twice: Contents after two launches, where they differ.
    """

    results: Results
    look: Callable[[list[NodeRecord]], None]
    options: dict[str, Any] = field(default_factory=dict)
    twice: Results | None = None


def _kernel_case(config: LaunchConfig) -> Callable[[Site], Case]:
    def make(site: Site) -> Case:
        x = site.put("x", [1, 2, 3, 4])
        site.plan.launch(scale, config, x[1:], 3.0, 3)

        def look(nodes: list[NodeRecord]) -> None:
            (node,) = nodes
            assert isinstance(node.params, KernelParams)
            assert node.name == "scale"
            read = node.params.config
            priority = read.priority if config.priority is not None else None
            assert replace(read, priority=priority) == config
            values = [argument.value for argument in node.arguments]
            assert (values[0].address, values[1:]) == (site.address("x") + 4, [3.0, 3])

        return Case({"x": [1, 6, 9, 12]}, look, twice={"x": [1, 18, 27, 36]})

    return make


def _clustered(site: Site) -> Case:
    out = site.put("out", [-1], "int32")
    config = LaunchConfig((4, 1, 1), (32, 1, 1), cluster=(2, 1, 1))
    site.plan.launch(write_cluster_size, config, out)

    def look(nodes: list[NodeRecord]) -> None:
        assert isinstance(nodes[0].params, KernelParams)
        assert nodes[0].params.config.cluster == (2, 1, 1)

    return Case({"out": [2]}, look)


def _shaped(site: Site) -> Case:
    out = site.put("out", [-1] * 7, "int32")
    config = LaunchConfig((2, 3, 4), (5, 6, 7), shared_bytes=512)
    site.plan.launch(write_shape, config, out)

    def look(nodes: list[NodeRecord]) -> None:
        assert isinstance(nodes[0].params, KernelParams)
        assert replace(nodes[0].params.config, priority=None) == config

    return Case({"out": [2, 3, 4, 5, 6, 7, 512]}, look)


def _programmatic(site: Site) -> Case:
    x, y = site.put("x", [1]), site.put("y", [1])
    late = LaunchConfig((1, 1, 1), (32, 1, 1), programmatic=True)
    first = site.plan.launch(add_one, ONE_BLOCK, x, 1)
    fill = site.plan.memset(y, 0)
    # a fill lets nothing begin early: its edge stays plain
    site.plan.launch(add_one, late, y, 1, after=[first, fill])

    def look(nodes: list[NodeRecord]) -> None:
        assert [node.kind for node in nodes] == [NodeKind.KERNEL, NodeKind.MEMSET, NodeKind.KERNEL]

    return Case({"x": [2], "y": [1]}, look, twice={"x": [3], "y": [1]})


def _memcpy_1d(site: Site) -> Case:
    dst, src = site.put("dst", [-1] * 6), site.put("src", [1, 2, 3, 4])
    site.plan.memcpy(dst[2:5], src[1:])

    def look(nodes: list[NodeRecord]) -> None:
        to, source = site.address("dst") + 8, site.address("src") + 4
        assert nodes[0].params == MemcpyParams(CopyOperand(to), CopyOperand(source), 12)

    return Case({"dst": [-1, -1, 2, 3, 4, -1]}, look)


def _memcpy_2d(site: Site) -> Case:
    dst, src = site.put("dst", [[-1] * 3] * 3), site.put("src", [[1, 2, 3, 4], [5, 6, 7, 8]])
    site.plan.memcpy(dst[1:, 1:], src[:, 2:])

    def look(nodes: list[NodeRecord]) -> None:
        to = CopyOperand(site.address("dst") + 16, pitch=12)
        source = CopyOperand(site.address("src") + 8, pitch=16)
        assert nodes[0].params == MemcpyParams(to, source, 8, 2)

    return Case({"dst": [[-1, -1, -1], [-1, 3, 4], [-1, 7, 8]]}, look)


def _memcpy_3d(site: Site) -> Case:
    dst = site.put("dst", [[[0] * 4] * 3] * 2, "int32")
    src = site.put("src", [[[100 * z + 10 * y + x for x in range(5)] for y in range(4)]
                           for z in range(2)], "int32")  # fmt: skip
    site.plan.memcpy(dst[:, 1:, :2], src[:, :2, 3:])

    def look(nodes: list[NodeRecord]) -> None:
        to = CopyOperand(site.address("dst") + 16, pitch=16, rows=3)
        source = CopyOperand(site.address("src") + 12, pitch=20, rows=4)
        assert nodes[0].params == MemcpyParams(to, source, 8, 2, 2)

    rows = [[[0] * 4, [3 + z, 4 + z, 0, 0], [13 + z, 14 + z, 0, 0]] for z in (0, 100)]
    return Case({"dst": rows}, look)


def _scattered_copy(site: Site) -> Case:
    dst, src = site.put("dst", [[0] * 2] * 3), site.put("src", [[1, 2, 3], [4, 5, 6]])
    site.plan.memcpy(dst, src.whole.T)

    def look(nodes: list[NodeRecord]) -> None:
        assert [node.kind for node in nodes] == [NodeKind.KERNEL]
        assert nodes[0].name.startswith("strided_copy_")

    return Case({"dst": [[1, 4], [2, 5], [3, 6]]}, look)


def _memset_1d(site: Site) -> Case:
    dst = site.put("dst", [7] * 5, "int16")
    site.plan.memset(dst[1:4], -2)

    def look(nodes: list[NodeRecord]) -> None:
        assert nodes[0].params == MemsetParams(site.address("dst") + 2, 0xFFFE, 2, 3)

    return Case({"dst": [7, -2, -2, -2, 7]}, look)


def _memset_2d(site: Site) -> Case:
    dst = site.put("dst", [[7] * 4] * 3)
    site.plan.memset(dst[:, 1:3], 1.0)

    def look(nodes: list[NodeRecord]) -> None:
        address = site.address("dst") + 4
        assert nodes[0].params == MemsetParams(address, 0x3F800000, 4, 2, 3, 16)

    return Case({"dst": [[7, 1, 1, 7]] * 3}, look)


def _callback(site: Site) -> Case:
    x = site.put("x", [0])
    fired: list[int] = []

    def fire() -> None:
        fired.append(1)

    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    site.plan.callback(fire)

    def look(nodes: list[NodeRecord]) -> None:
        params = nodes[1].params
        assert isinstance(params, HostParams)
        assert params.callback is fire
        assert not fired

    return Case({"x": [1], "fired": lambda: fired == [1]}, look)


def _child_of_a_plan(site: Site) -> Case:
    from graphcore import GraphPlan

    x = site.put("x", [1, 2, 3, 4])
    inner = GraphPlan("inner")
    part = inner.buffer("part", (2,))
    inner.launch(add_one, ONE_BLOCK, part, 2)
    inner.launch(scale, ONE_BLOCK, part, 10.0, 2)
    site.plan.embed(inner, {"part": x[2:]})

    def look(nodes: list[NodeRecord]) -> None:
        assert [node.kind for node in nodes] == [NodeKind.CHILD]
        child = nodes[0].child
        assert child is not None
        assert [node.name for node in child.nodes] == ["add_one", "scale"]
        assert child.edges == ((0, 1),)
        assert child.nodes[0].arguments[0].value.address == site.address("x") + 8

    return Case({"x": [1, 2, 40, 50]}, look, twice={"x": [1, 2, 410, 510]})


def _child_of_a_graph(site: Site) -> Case:
    x = site.put("x", [1.0])
    inner = Site(site.bench, "inner")
    inner.buffers["y"] = site.buffers["x"]
    inner.plan.launch(add_one, ONE_BLOCK, inner.plan.buffer("y", (1,)), 1)
    site.plan.embed(inner.graph(), writes=[x])
    site.plan.launch(scale, ONE_BLOCK, x, 3.0, 1)

    def look(nodes: list[NodeRecord]) -> None:
        assert [node.kind for node in nodes] == [NodeKind.CHILD, NodeKind.KERNEL]
        assert nodes[0].child is not None
        assert [node.name for node in nodes[0].child.nodes] == ["add_one"]

    return Case({"x": [6]}, look, twice={"x": [21]})


def _events(site: Site) -> Case:
    x = site.put("x", [1])
    inside, outside = site.plan.event("inside"), site.plan.event("outside", external=True)
    given = site.bench.new_event()
    site.driver.record_event(given.handle, site.bench.stream.handle)
    site.plan.wait(outside)
    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    site.plan.record(inside)
    site.plan.wait(inside)

    def look(nodes: list[NodeRecord]) -> None:
        assert nodes[0].params == EventParams(given.handle, NodeKind.EVENT_WAIT)
        assert isinstance(nodes[2].params, EventParams)
        assert nodes[2].kind is NodeKind.EVENT_RECORD
        assert nodes[3].params == EventParams(nodes[2].params.event, NodeKind.EVENT_WAIT)

    return Case({"x": [2]}, look, options={"events": {"outside": given}}, twice={"x": [3]})


def _given_event(site: Site) -> Case:
    x = site.put("x", [1])
    done = site.plan.event("done")
    given = site.bench.new_event()
    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    site.plan.record(done)

    def look(nodes: list[NodeRecord]) -> None:
        assert nodes[1].params == EventParams(given.handle, NodeKind.EVENT_RECORD)

    return Case({"x": [2], "done": given.query}, look, {"events": {"done": given}}, {"x": [3]})


def _memory(site: Site) -> Case:
    out = site.put("out", [0, 0])
    tmp = site.plan.allocate("tmp", (8,))
    site.plan.launch(fill_value, ONE_BLOCK, tmp, 5.0, 8)
    site.plan.memcpy(out, tmp[6:])
    site.plan.deallocate(tmp)

    def look(nodes: list[NodeRecord]) -> None:
        alloc, _, copy, free = (node.params for node in nodes)
        assert isinstance(alloc, AllocParams)
        assert alloc.size >= 32
        assert alloc.address
        assert nodes[1].arguments[0].value.address == alloc.address
        source = CopyOperand(alloc.address + 24)
        assert copy == MemcpyParams(CopyOperand(site.address("out")), source, 8)
        assert free == FreeParams(alloc.address)

    return Case({"out": [5, 5]}, look)


def _conditional(form: str, value: int, expected: list[float]) -> Callable[[Site], Case]:
    counts = {"if": 1, "if_else": 2, "switch": 3}

    def make(site: Site) -> Case:
        plan, taken = site.plan, site.put("taken", [0, 0, 0])
        chosen = plan.condition("chosen")
        plan.launch(set_value, ONE_BLOCK, chosen, value)
        count = counts[form]
        opened = {
            "if": lambda: plan.if_then(chosen),
            "if_else": lambda: plan.if_else(chosen),
            "switch": lambda: plan.switch(chosen, count),
        }[form]()
        with opened as bodies:
            for index, body in enumerate([bodies] if count == 1 else bodies):
                body.launch(add_one, ONE_BLOCK, taken[index:], 1)

        def look(nodes: list[NodeRecord]) -> None:
            params = nodes[1].params
            assert isinstance(params, ConditionalParams)
            assert (params.form, params.size) == (form.removesuffix("_else"), count)
            assert nodes[0].arguments[0].value == params.handle
            assert [[node.name for node in body.nodes] for body in nodes[1].bodies] == [
                ["add_one"]
            ] * count

        return Case({"taken": expected}, look, twice={"taken": [2 * each for each in expected]})

    return make


def _while(site: Site) -> Case:
    plan = site.plan
    x, y, counter = site.put("x", [0, 0]), site.put("y", [0, 0]), site.put("n", [4], "int32")
    more = plan.condition("more", default=1)
    with plan.while_loop(more) as body:
        body.launch(add_one, ONE_BLOCK, x, 2)
        body.memcpy(y, x)
        body.launch(count_down, ONE_BLOCK, more, counter)

    def look(nodes: list[NodeRecord]) -> None:
        params = nodes[0].params
        assert isinstance(params, ConditionalParams)
        assert (params.form, params.size) == ("while", 1)
        names = [node.name for node in nodes[0].bodies[0].nodes]
        assert [name.split("_contiguous")[0] for name in names] == [
            "add_one",
            "strided_copy",
            "count_down",
        ]

    return Case({"x": [4, 4], "y": [4, 4], "n": [0]}, look, twice={"x": [5, 5], "n": [-1]})


def _nested(site: Site) -> Case:
    plan = site.plan
    x, counter = site.put("x", [0]), site.put("n", [3], "int32")
    taken, more = plan.condition("taken"), plan.condition("more", default=1)
    plan.launch(set_value, ONE_BLOCK, taken, 1)
    with plan.if_then(taken) as outer, outer.while_loop(more) as inner:
        inner.launch(add_one, ONE_BLOCK, x, 1)
        inner.launch(count_down, ONE_BLOCK, more, counter)

    def look(nodes: list[NodeRecord]) -> None:
        (inner_node,) = nodes[1].bodies[0].nodes
        assert inner_node.name == "while"
        names = [node.name for node in inner_node.bodies[0].nodes]
        assert names == ["add_one", "count_down"]

    return Case({"x": [3], "n": [0]}, look)


def _join(site: Site) -> Case:
    x, y = site.put("x", [1]), site.put("y", [1])
    site.plan.launch(add_one, ONE_BLOCK, x, 1)
    site.plan.launch(add_one, ONE_BLOCK, y, 1)
    site.plan.join()
    site.plan.launch(scale, ONE_BLOCK, x, 2.0, 1)

    def look(nodes: list[NodeRecord]) -> None:
        assert nodes[2].params == EmptyParams()

    return Case({"x": [4], "y": [2]}, look)


def _bytes(site: Site) -> Case:
    dst, src = site.put("dst", [0] * 3, "uint8"), site.put("src", [1, 2, 3], "uint8")
    site.plan.launch(copy_bytes, ONE_BLOCK, dst, src, 3, name="copied")

    def look(nodes: list[NodeRecord]) -> None:
        addresses = [argument.value.address for argument in nodes[0].arguments[:2]]
        assert addresses == [site.address("dst"), site.address("src")]

    return Case({"dst": [1, 2, 3]}, look)


CASES: dict[str, Callable[[Site], Case]] = {
    "kernel": _kernel_case(LaunchConfig((2, 1, 1), (64, 1, 1))),
    "kernel_shape": _shaped,
    "kernel_bytes": _bytes,
    "cooperative": _kernel_case(LaunchConfig((2, 1, 1), (32, 1, 1), cooperative=True)),
    "priority": _kernel_case(LaunchConfig((1, 1, 1), (32, 1, 1), priority=-1)),
    "clustered": _clustered,
    "programmatic": _programmatic,
    "memcpy_1d": _memcpy_1d,
    "memcpy_2d": _memcpy_2d,
    "memcpy_3d": _memcpy_3d,
    "scattered_copy": _scattered_copy,
    "memset_1d": _memset_1d,
    "memset_2d": _memset_2d,
    "callback": _callback,
    "child_plan": _child_of_a_plan,
    "child_graph": _child_of_a_graph,
    "events": _events,
    "given_event": _given_event,
    "memory": _memory,
    "if": _conditional("if", 1, [1, 0, 0]),
    "if_not": _conditional("if", 0, [0, 0, 0]),
    "if_else": _conditional("if_else", 0, [0, 1, 0]),
    "switch": _conditional("switch", 2, [0, 0, 1]),
    "while": _while,
    "nested": _nested,
    "join": _join,
}


@pytest.mark.parametrize("way", GRAPH_WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_node_reads_back_as_it_was_planned(bench: Bench, name: str, way: str) -> None:
    site = Site(bench)
    case = CASES[name](site)
    with site.graph(way, **case.options) as graph:
        snapshot = graph.snapshot()
    case.look(list(snapshot.nodes))
    expected = {(s, node.index) for node in site.plan.nodes for s in site.plan.after_of(node)}
    assert set(snapshot.edges) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_node_does_what_was_planned(bench: Bench, name: str, way: str) -> None:
    site = Site(bench)
    case = CASES[name](site)
    site.do(way, **case.options)
    for buffer, expected in case.results.items():
        if callable(expected):
            assert expected(), buffer
        else:
            assert site.read(buffer) == expected, buffer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("callback", "nested")])
def test_a_node_does_it_again_at_every_launch(bench: Bench, name: str, way: str) -> None:
    site = Site(bench)
    case = CASES[name](site)
    site.do(way, times=2, **case.options)
    for buffer, expected in (case.twice or {}).items():
        assert site.read(buffer) == expected, buffer


@pytest.mark.parametrize("way", WAYS)
def test_a_callback_fires_at_every_launch(bench: Bench, way: str) -> None:
    site, fired = Site(bench), []
    site.plan.callback(lambda: fired.append(1))
    site.do(way, times=5)
    assert fired == [1] * 5


@pytest.mark.parametrize("way", GRAPH_WAYS)
def test_a_programmatic_launch_has_early_edges_from_kernels_only(bench: Bench, way: str) -> None:
    site = Site(bench)
    _programmatic(site)
    with site.graph(way) as graph:
        snapshot = graph.snapshot()
    assert dict(snapshot.edges_with_data()) == {(0, 2): (1, 0, 1), (1, 2): (0, 0, 0)}
