"""diff(a, b): which nodes changed, in which fields, and what came or went."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from helpers.contract import Bench
from helpers.kernels import add_one, scale
from helpers.snapshots import chain, kernel_node, node, snapshot

from graphcore.driver.kernel import Kernel, Parameter
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalHandle,
    ConditionalParams,
    CopyOperand,
    FreeParams,
    GraphHandle,
    LaunchConfig,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
)
from graphcore.errors import CacheTypeError, ConfigurationError
from graphcore.graph import GraphSnapshot, NodeRecord, diff, read

WORD = (5).to_bytes(8, "little")


def typed(value: int) -> NodeRecord:
    kernel = Kernel("k", (Parameter("x", "f32*"),), "")
    record = kernel_node(0, "k", arguments=[value.to_bytes(8, "little")])
    return replace(record, kernel=kernel)


def scalar(value: float) -> NodeRecord:
    kernel = Kernel("k", (Parameter("x", "f32"),), "")
    return replace(kernel_node(0, "k", arguments=[struct.pack("<f", value)]), kernel=kernel)


CHILD = node(0, ChildParams(GraphHandle(1)), child=chain(2))
BODY = node(0, ConditionalParams(ConditionalHandle(1), "if", 1), bodies=(chain(1, name="a"),))
COPY = node(0, MemcpyParams(CopyOperand(1), CopyOperand(2), 8))
FILL = node(0, MemsetParams(1, 2, 4, 8))


def config(**changes: Any) -> NodeRecord:
    return kernel_node(0, config=replace(LaunchConfig((1, 1, 1), (32, 1, 1)), **changes))


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (kernel_node(0), config(grid=(2, 1, 1)), "grid: (1, 1, 1) -> (2, 1, 1)"),
        (kernel_node(0), config(cooperative=True), "cooperative: False -> True"),
        (kernel_node(0, "a"), kernel_node(0, "b"), "function: a -> b"),
        (typed(5), typed(6), "argument 0: 0x5 -> 0x6"),
        (
            kernel_node(0, arguments=[WORD]),
            kernel_node(0, arguments=[bytes(8)]),
            "argument 0: 0x5 -> 0x0",
        ),
        (scalar(1.5), scalar(2.5), "argument 0: 1.5 -> 2.5"),
        (
            kernel_node(0, arguments=[bytes(23) + b"\1"]),
            kernel_node(0, arguments=[bytes(23) + b"\2"]),
            "argument 0: <24 bytes 0000000000000000 0000000000000000 0000000000000001> -> "
            "<24 bytes 0000000000000000 0000000000000000 0000000000000002>",
        ),
        (
            kernel_node(0, arguments=[b"torch.float32"]),
            kernel_node(0, arguments=[b"torch.bfloat16"]),
            "argument 0: 'torch.float32' -> 'torch.bfloat16'",
        ),
        (COPY, node(0, MemcpyParams(CopyOperand(1), CopyOperand(3), 8)), "src.address: 0x2 -> 0x3"),
        (
            COPY,
            node(0, MemcpyParams(CopyOperand(1, MemoryKind.HOST), CopyOperand(2), 8)),
            "dst.memory: device -> host",
        ),
        (FILL, node(0, MemsetParams(1, 3, 4, 8)), "value: 0x2 -> 0x3"),
        (node(0, AllocParams(8, 4)), node(0, AllocParams(9, 4)), "size: 8 -> 9"),
        (node(0, FreeParams(4)), node(0, FreeParams(5)), "address: 0x4 -> 0x5"),
        (
            BODY,
            replace(BODY, bodies=(chain(1, name="b"),)),
            "body 0 node 0 function: a -> b",
        ),
        (
            CHILD,
            replace(CHILD, child=chain(3)),
            "child topology: 2 nodes, 1 edges -> 3 nodes, 2 edges",
        ),
        (
            BODY,
            replace(BODY, params=replace(BODY.params, form="while")),  # type: ignore[type-var]
            "form: if -> while",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_change_is_told_as_one_field(
    before: NodeRecord, after: NodeRecord, change: str
) -> None:
    found = diff(snapshot([before]), snapshot([after]))
    assert [str(field) for field in found.changed[0].fields] == [change]
    assert found
    assert not found.is_empty
    assert change in str(found)


def test_a_graph_does_not_differ_from_itself_and_handles_never_count() -> None:
    first, second = chain(5), chain(5)
    renumbered = replace(
        second,
        nodes=tuple(replace(record, handle=record.handle + 77) for record in second.nodes),  # type: ignore[type-var]
    )
    found = diff(first, renumbered)
    assert found.is_empty
    assert not found
    assert found.update_possible
    assert str(found) == "no difference"


def test_a_node_in_the_middle_is_found_as_added_and_the_rest_stays_aligned() -> None:
    names = [f"k{index}" for index in range(6)]
    old = snapshot([kernel_node(index, name) for index, name in enumerate(names)])
    names.insert(3, "new")
    new = snapshot([kernel_node(index, name) for index, name in enumerate(names)])
    found = diff(old, new)
    assert [record.name for record in found.added] == ["new"]
    assert not found.changed
    assert not found.removed
    back = diff(new, old)
    assert [record.name for record in back.removed] == ["new"]
    assert "node 3 (kernel new): removed" in str(back)
    assert not back.update_possible
    assert "update: topology_changed" in str(back)


def test_a_moved_edge_is_located() -> None:
    nodes = [kernel_node(index, f"k{index}") for index in range(4)]
    old = snapshot(nodes, [(0, 1), (1, 2), (0, 3), (2, 3)])
    new = snapshot(nodes, [(0, 1), (1, 2), (1, 3), (2, 3)])
    found = diff(old, new)
    assert (found.removed_edges, found.added_edges) == (((0, 3),), ((1, 3),))
    assert "edge 0 -> 3: removed" in str(found)
    assert "edge 1 -> 3: added" in str(found)
    assert not found.update_possible


def named(*names: str) -> list[NodeRecord]:
    return [kernel_node(index, name) for index, name in enumerate(names)]


def test_a_node_that_came_is_located_by_the_nodes_around_it() -> None:
    old = snapshot(named("a", "b", "c"), [(0, 1), (1, 2)])
    new = snapshot(named("a", "x", "b", "c"), [(0, 1), (1, 2), (2, 3)])
    (added, *edges) = diff(old, new).topology
    assert (added.what, added.node) == ("node added", new.nodes[1])
    assert (added.after, added.before) == ((new.nodes[0],), (new.nodes[2],))
    assert str(added) == (
        "node 1 (kernel x): added after node 0 (kernel a) and before node 2 (kernel b)"
    )
    # the edge that led past it is gone
    assert [str(edge) for edge in edges] == [
        "edge 0 -> 1: removed (node 0 (kernel a) -> node 1 (kernel b))"
    ]
    back = diff(new, old).topology
    assert [change.what for change in back] == ["node removed", "edge added"]


def test_a_node_without_dependencies_says_so_and_many_neighbours_are_counted() -> None:
    apart = diff(snapshot(named("a")), snapshot(named("a", "x"))).topology
    assert str(apart[0]) == "node 1 (kernel x): added, depending on nothing"
    wide = [(index, 4) for index in range(4)]
    joined = diff(snapshot(named("a", "b", "c", "d")), snapshot(named(*"abcdx"), wide)).topology
    assert str(joined[0]).endswith("after node 0 (kernel a), node 1 (kernel b) and 2 more")


def test_a_replaced_node_is_aligned_with_what_stood_there() -> None:
    old = snapshot(named("a", "b", "c", "d"), [(0, 1), (1, 2), (2, 3)])
    fill = node(1, MemsetParams(1, 2, 4, 8))
    new = snapshot([old.nodes[0], fill, *old.nodes[2:]], [(0, 1), (1, 2), (2, 3)])
    found = diff(old, new)
    (changed,) = found.changed
    assert (changed.before, changed.after) == (old.nodes[1], fill)
    assert str(changed.fields[0]) == "kind: kernel -> memset"
    assert found.topology == ()


def test_one_node_gone_and_another_come_keep_the_rest_aligned() -> None:
    old = snapshot(named(*"abcdefg"), [(index, index + 1) for index in range(6)])
    new = snapshot(named(*"acdexfg"), [(0, 1), (0, 2), *((i, i + 1) for i in range(2, 6))])
    found = diff(old, new)
    assert [record.name for record in found.removed] == ["b"]
    assert [record.name for record in found.added] == ["x"]
    assert not found.changed
    assert dict(found.partner) == {0: 0, 1: 2, 2: 3, 3: 4, 5: 5, 6: 6}


def test_a_difference_keeps_what_a_picture_of_it_needs() -> None:
    old, new = snapshot([CHILD]), snapshot([replace(CHILD, child=chain(3))])
    found = diff(old, new)
    assert (found.old, found.new, found.partner) == (old, new, {0: 0})
    (inner,) = found.changed[0].inner
    assert [change.what for change in inner.topology] == ["node added"]
    assert inner.new is new.nodes[0].child


def test_thousands_of_equal_nodes_are_not_searched_for_likeness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a search takes the square of their number: minutes
    monkeypatch.setattr("graphcore.graph.alignment.SequenceMatcher", None)
    names = ["k"] * 5000
    old, new = snapshot(named("a", *names, "b")), snapshot(named("x", *names, "k", "y"))
    found = diff(old, new)
    assert [len(found.added), len(found.removed), len(found.changed)] == [1, 0, 2]


def test_a_cluster_change_is_no_update_that_can_be_trusted() -> None:
    found = diff(snapshot([config()]), snapshot([config(cluster=(2, 1, 1))]))
    assert found.refusal is None
    assert [trap.field for trap in found.traps] == ["cluster"]
    assert not found.update_possible
    assert "accepted but not applied" in str(found)


def test_graphs_of_a_driver_are_read_and_compared(bench: Bench) -> None:
    class Readable:
        """A graph as the executable layer has it."""

        def __init__(self, factor: float) -> None:
            self.graph = bench.new_graph()
            first = bench.add_kernel(self.graph, add_one, address, 4)
            bench.add_kernel(self.graph, scale, address, factor, 4, after=[first])

        def snapshot(self) -> GraphSnapshot:
            return read(bench.driver, self.graph)

    address = bench.alloc(64)
    assert diff(Readable(2.0), Readable(2.0)).is_empty
    found = diff(Readable(2.0), Readable(3.0))
    assert str(found) == "node 1 (kernel scale): argument 1: 2.0 -> 3.0"
    assert found.update_possible


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("a", "got 'a'"), (None, "got None"), (GraphSnapshot, "got the type"), ([], "got list")],
    ids=repr,
)
def test_what_is_no_graph_is_refused_by_its_name(wrong: Any, words: str) -> None:
    with pytest.raises(CacheTypeError, match=f"^a: expected a Graph or GraphSnapshot .*{words}"):
        diff(wrong, snapshot([]))
    with pytest.raises(CacheTypeError, match=f"^b: expected a Graph or GraphSnapshot .*{words}"):
        diff(snapshot([]), wrong)


@pytest.mark.parametrize("wrong", ["x", [1], {0: "a line"}, {0: [1]}], ids=repr)
def test_notes_of_another_form_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^notes.*: expected a"):
        snapshot([kernel_node(0)]).drawing(wrong)


def test_an_edge_of_other_data_is_another_edge() -> None:
    plain = chain(2)
    programmatic = replace(plain, edge_data=((1, 0, 1),))
    found = diff(plain, programmatic)
    assert found
    assert (found.removed_edges, found.added_edges) == (((0, 1),), ((0, 1),))
    assert not diff(plain, replace(plain, edge_data=((0, 0, 0),)))


def test_a_comparison_is_shown_in_one_line() -> None:
    assert repr(diff(chain(2), chain(3))) == (
        "<GraphDiff 0 changed, 0 removed, 1 added; update in place not possible>"
    )
    assert repr(diff(chain(2), chain(2))).endswith("0 added; update in place possible>")
