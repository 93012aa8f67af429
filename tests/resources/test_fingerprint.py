"""Fingerprints: equal for the same capture, different for any single change, and in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import create_autospec

import pytest
from helpers.contract import Bench, copy_1d
from helpers.kernels import ONE_BLOCK, add_one, axpy
from helpers.snapshots import kernel_node, node, snapshot

from graphcore import CacheTypeError, ConfigurationError
from graphcore.driver import Driver, kernel
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalHandle,
    ConditionalParams,
    CopyOperand,
    EventHandle,
    EventParams,
    FreeParams,
    FunctionHandle,
    GraphHandle,
    HostParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeHandle,
    NodeKind,
)
from graphcore.graph import GraphSnapshot, NodeRecord, read
from graphcore.resources.fingerprint import fingerprint
from graphcore.resources.pools import Block, Blocks

X, Y = 0x7F0000000000, 0x7F0000100000
NAMES = {"x": (X, 4096), "y": (Y, 4096)}


def word(address: int) -> bytes:
    return address.to_bytes(8, "little")


def hello() -> None:
    """A host callback."""


def other() -> None:
    """Another one."""


def called(function: Callable[[], None]) -> tuple[str, str, int]:
    return __name__, function.__name__, function.__code__.co_firstlineno


# a graph with every kind of node, one change away from each variant below
NODES: tuple[NodeRecord, ...] = (
    kernel_node(0, "gemm", arguments=[word(X), word(Y + 64), (7).to_bytes(4, "little")]),
    kernel_node(1, "fused", arguments=[word(1) + word(X + 8) + word(9)]),
    node(2, MemcpyParams(CopyOperand(X), CopyOperand(Y), 64)),
    node(3, MemsetParams(X, 0, 4, 16)),
    node(4, HostParams(hello)),
    node(5, HostParams(None, 0x55)),
    node(6, EventParams(EventHandle(11), NodeKind.EVENT_RECORD)),
    node(7, EventParams(EventHandle(11), NodeKind.EVENT_WAIT)),
    node(8, AllocParams(256, 0x7E0000000000)),
    node(9, FreeParams(0x7E0000000000)),
    node(10, ChildParams(GraphHandle(1)), child=snapshot([kernel_node(0, "inner")])),
    node(
        11,
        ConditionalParams(ConditionalHandle(3), "while", 1),
        bodies=(snapshot([kernel_node(0, "body"), kernel_node(1, "body")], [(0, 1)]),),
    ),
)
EDGES = ((0, 1), (1, 2), (2, 3), (3, 4), (8, 9))
GRAPH = GraphSnapshot(NODES, EDGES, ((0, 0, 0),) * 5, driver="cuda")
BEFORE = fingerprint(GRAPH, NAMES)


def with_node(index: int, **changes: Any) -> GraphSnapshot:
    nodes = list(NODES)
    nodes[index] = replace(nodes[index], **changes)
    return replace(GRAPH, nodes=tuple(nodes))


def with_params(index: int, **changes: Any) -> GraphSnapshot:
    return with_node(index, params=replace(NODES[index].params, **changes))  # type: ignore[type-var]


def with_config(**changes: Any) -> GraphSnapshot:
    params = NODES[0].params
    assert isinstance(params, KernelParams)
    return with_params(0, config=replace(params.config, **changes))


def with_argument(index: int, *arguments: bytes) -> GraphSnapshot:
    return with_params(index, arguments=arguments)


GEMM = NODES[0].function
assert GEMM is not None
KERNEL_0 = "node 0 (kernel gemm)"
ARGUMENTS = [word(X), word(Y + 64), (7).to_bytes(4, "little")]
TYPED = kernel("gemm", "f32* a, f32* b, i32 n", "source one")
OTHER_SOURCE = kernel("gemm", "f32* a, f32* b, i32 n", "source two")

CHANGES: dict[str, tuple[GraphSnapshot, str]] = {
    "device": (replace(GRAPH, device=1), "graph: device was 0, is 1"),
    "context": (replace(GRAPH, context=5), "graph: context was 0, is 5"),
    "edge added": (
        replace(GRAPH, edges=(*EDGES, (5, 6)), edge_data=((0, 0, 0),) * 6),
        "node 6 (event_record event record): dependencies was (), is ((5,),)",
    ),
    "edge kind": (
        replace(GRAPH, edge_data=((0, 0, 1), *((0, 0, 0),) * 4)),
        "node 1 (kernel fused): dependencies was ((0,),), is ((0, 0, 0, 1),)",
    ),
    "node removed": (
        replace(GRAPH, nodes=NODES[:-1]),
        "node 11 (conditional while): only the first graph has it",
    ),
    "function": (
        with_node(0, function=replace(GEMM, name="gemv", raw_name="gemv")),
        f"{KERNEL_0}: function was gemm, is gemv",
    ),
    "layout": (
        with_node(0, function=replace(GEMM, layout=((0, 8), (8, 8), (24, 4)))),
        f"{KERNEL_0}: layout was ((0, 8), (8, 8), (16, 4)), is ((0, 8), (8, 8), (24, 4))",
    ),
    "grid": (with_config(grid=(2, 1, 1)), f"{KERNEL_0}: grid was (1, 1, 1), is (2, 1, 1)"),
    "block": (with_config(block=(64, 1, 1)), f"{KERNEL_0}: block was (32, 1, 1), is (64, 1, 1)"),
    "shared": (with_config(shared_bytes=64), f"{KERNEL_0}: shared_bytes was 0, is 64"),
    "cluster": (with_config(cluster=(2, 1, 1)), f"{KERNEL_0}: cluster was (1, 1, 1), is (2, 1, 1)"),
    "cooperative": (with_config(cooperative=True), f"{KERNEL_0}: cooperative was False, is True"),
    "priority": (with_config(priority=-1), f"{KERNEL_0}: priority was None, is -1"),
    "programmatic": (
        with_config(programmatic=True),
        f"{KERNEL_0}: programmatic was False, is True",
    ),
    "pointer moved": (
        with_argument(0, word(X + 4), *ARGUMENTS[1:]),
        f"{KERNEL_0}: argument 0 was x, is x + 4 bytes",
    ),
    "another buffer": (
        with_argument(0, word(Y), *ARGUMENTS[1:]),
        f"{KERNEL_0}: argument 0 was x, is y",
    ),
    "unknown memory": (
        with_argument(0, word(0x7D0000000000), *ARGUMENTS[1:]),
        f"{KERNEL_0}: argument 0 was x, is 0x7d0000000000",
    ),
    "scalar": (
        with_argument(0, *ARGUMENTS[:2], (8).to_bytes(4, "little")),
        f"{KERNEL_0}: argument 2 was 0x7, is 0x8",
    ),
    "pointer in a structure": (
        with_argument(1, word(1) + word(X + 16) + word(9)),
        "node 1 (kernel fused): argument 0 was <0100000000000000 0000000000000000 "
        "0900000000000000>, at byte 8 x + 8 bytes, is <0100000000000000 0000000000000000 "
        "0900000000000000>, at byte 8 x + 16 bytes",
    ),
    "rest of a structure": (
        with_argument(1, word(1) + word(X + 8) + word(10)),
        "0a00000000000000",
    ),
    "copy destination": (
        with_params(2, dst=CopyOperand(X + 4)),
        "node 2 (memcpy memcpy): dst was x, is x + 4 bytes",
    ),
    "copy memory": (
        with_params(2, src=CopyOperand(Y, MemoryKind.HOST)),
        "node 2 (memcpy memcpy): src.memory was device, is host",
    ),
    "copy width": (with_params(2, width=32), "node 2 (memcpy memcpy): width was 64, is 32"),
    "fill value": (with_params(3, value=1), "node 3 (memset memset): value was 0, is 1"),
    "fill address": (
        with_params(3, address=5),
        "node 3 (memset memset): address was x, is 5",
    ),
    "callback": (
        with_params(4, callback=other),
        f"node 4 (host host): callback was {called(hello)}, is {called(other)}",
    ),
    "foreign callback": (
        with_params(5, function=0x56),
        "node 5 (host host): callback was 85, is 86",
    ),
    "another event": (
        with_params(7, event=EventHandle(12)),
        "node 7 (event_wait event wait): event was 0, is 1",
    ),
    "allocation size": (with_params(8, size=512), "node 8 (alloc alloc): size was 256, is 512"),
    "free": (
        with_params(9, address=0x7E0000000008),
        "node 9 (free free): address was graph allocation 0, is graph allocation 0 + 8 bytes",
    ),
    "inner kernel": (
        with_node(10, child=snapshot([kernel_node(0, "changed")])),
        "node 10.0.0 (kernel inner): function was inner, is changed",
    ),
    "form": (with_params(11, form="if"), "node 11 (conditional while): form was while, is if"),
    "body": (
        with_node(11, bodies=(snapshot([kernel_node(0, "body"), kernel_node(1, "body")]),)),
        "node 11.0.1 (kernel body): dependencies was ((0,),), is ()",
    ),
}


@pytest.mark.parametrize(("changed", "words"), CHANGES.values(), ids=list(CHANGES))
def test_each_single_change_is_another_fingerprint_and_is_told_in_words(
    changed: GraphSnapshot, words: str
) -> None:
    after = fingerprint(changed, NAMES)
    assert after.digest != BEFORE.digest
    assert any(words in line for line in BEFORE.compare(after)), BEFORE.compare(after)
    assert after.compare(BEFORE)


def test_changes_differ_from_one_another_too() -> None:
    digests = {fingerprint(changed, NAMES).digest for changed, _ in CHANGES.values()}
    assert len(digests) == len(CHANGES)


def test_one_change_is_one_line() -> None:
    assert BEFORE.compare(fingerprint(with_config(grid=(2, 1, 1)), NAMES)) == [
        f"{KERNEL_0}: grid was (1, 1, 1), is (2, 1, 1)"
    ]
    assert BEFORE.compare(BEFORE) == []
    more = fingerprint(replace(GRAPH, nodes=(*NODES, kernel_node(12, "last"))), NAMES)
    assert "node 12 (kernel last): only the second graph has it" in BEFORE.compare(more)


def test_handles_and_labels_do_not_count() -> None:
    nodes = []
    for record in NODES:
        params = record.params
        if isinstance(params, KernelParams):
            params = replace(params, function=FunctionHandle(params.function + 9))
        elif isinstance(params, EventParams):
            params = replace(params, event=EventHandle(999))
        elif isinstance(params, ConditionalParams):
            params = replace(params, handle=ConditionalHandle(999))
        elif isinstance(params, HostParams):
            params = replace(params, user_data=999)
        elif isinstance(params, (AllocParams, FreeParams)):
            params = replace(params, address=0x6E0000000000)
        elif isinstance(params, ChildParams):
            params = replace(params, graph=GraphHandle(999))
        nodes.append(
            replace(record, params=params, handle=NodeHandle(record.handle + 5), label="layer 0")
        )
    assert fingerprint(replace(GRAPH, nodes=tuple(nodes)), NAMES) == BEFORE


def test_the_order_in_which_the_driver_lists_edges_does_not_count() -> None:
    many = replace(GRAPH, edges=((0, 3), (1, 3), (2, 3)), edge_data=())
    turned = replace(GRAPH, edges=((2, 3), (0, 3), (1, 3)), edge_data=())
    assert fingerprint(many).digest == fingerprint(turned).digest


def test_other_memory_of_the_same_names_is_the_same() -> None:
    moved = {"x": (X + 0x10000000, 4096), "y": (Y + 0x10000000, 4096)}
    first = snapshot([kernel_node(0, arguments=[word(X + 8), word(Y)])])
    second = snapshot([kernel_node(0, arguments=[word(X + 0x10000008), word(Y + 0x10000000)])])
    assert fingerprint(first, NAMES).digest == fingerprint(second, moved).digest
    assert fingerprint(first).digest != fingerprint(second).digest


def test_memory_of_the_graphs_own_counts_by_order() -> None:
    first = snapshot([kernel_node(0, arguments=[word(X + 8), word(Y)])])
    second = snapshot([kernel_node(0, arguments=[word(X + 0x10000008), word(Y)])])
    mine, theirs = [(X, 4096)], [(X + 0x10000000, 4096)]
    assert fingerprint(first, private=mine) == fingerprint(second, private=theirs)
    assert str(fingerprint(first, private=mine).fields[-2]).endswith("private memory 0 + 8 bytes")


def test_a_known_kernels_source_counts() -> None:
    typed, changed = with_node(0, kernel=TYPED), with_node(0, kernel=OTHER_SOURCE)
    one, two = fingerprint(typed, NAMES), fingerprint(changed, NAMES)
    assert len(one.compare(two)) == 1
    assert f"{KERNEL_0}: source was" in one.compare(two)[0]
    assert "source is new" in BEFORE.compare(one)[0]
    assert "is gone" in one.compare(BEFORE)[0]
    assert fingerprint(with_node(0, kernel=TYPED), NAMES) == one


def test_on_a_device_only_pointers_count_in_structures_of_other_libraries() -> None:
    # as much of a device's driver as a fingerprint asks for
    device = create_autospec(Driver, instance=True, is_emulated=False)
    device.allocation_of.return_value = None

    def digest(*arguments: bytes, known: bool = False) -> str:
        ours = kernel("fused", "bytes:24 p, i32 n", "source") if known else None
        graph = snapshot([replace(kernel_node(0, "fused", arguments=arguments), kernel=ours)])
        return fingerprint(graph, NAMES, driver=device).digest

    n, m = (7).to_bytes(4, "little"), (8).to_bytes(4, "little")
    base = word(1) + word(X + 8) + word(9)
    padding = word(1) + word(X + 8) + word(10)
    moved = word(1) + word(X + 16) + word(9)
    assert digest(base, n) == digest(padding, n)
    assert digest(base, n) != digest(moved, n)
    assert digest(base, n) != digest(base, m)
    # a structure of a kernel of ours is packed byte by byte: all of it counts
    assert digest(base, n, known=True) != digest(padding, n, known=True)


class Counter:
    """A callback with state."""

    def __call__(self) -> None: ...

    def step(self) -> None: ...


ONE, TWO = Counter(), Counter()
CALLBACKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "another line": (lambda: None, hello),
    "two lambdas": (
        lambda: None,
        lambda: None,
    ),
    "bound value": (partial(print, 1), partial(print, 2)),
    "bound keyword": (partial(print, end=""), partial(print, end=".")),
    "bound function": (partial(hello), partial(other)),
    "method and function": (ONE.step, hello),
    "kind of object": (ONE, hello),
    "builtin": (print, repr),
}


@pytest.mark.parametrize("case", CALLBACKS)
def test_another_callback_is_another_fingerprint(case: str) -> None:
    before, after = (fingerprint(with_params(4, callback=each)) for each in CALLBACKS[case])
    (line,) = before.compare(after)
    assert line.startswith("node 4 (host host): callback was ")


def test_the_same_callback_made_again_is_the_same() -> None:
    def step() -> Callable[[], None]:
        return lambda: None

    for first, second in ((step(), step()), (ONE.step, ONE.step), (partial(step), partial(step))):
        one, two = (fingerprint(with_params(4, callback=each)) for each in (first, second))
        assert one == two


def test_methods_of_two_objects_in_one_graph_are_told_apart() -> None:
    graphs = [
        snapshot([node(0, HostParams(ONE.step)), node(1, HostParams(each.step))])
        for each in (ONE, TWO)
    ]
    assert fingerprint(graphs[0]).digest != fingerprint(graphs[1]).digest


class Captured:
    """A captured graph as the executable layer has it."""

    def __init__(self, bench: Bench, step: Callable[[], None]) -> None:
        with bench.capturing() as captured:
            step()
        self.driver: Driver = bench.driver
        self.handle = captured[0]

    def snapshot(self) -> GraphSnapshot:
        return read(self.driver, self.handle)

    def private_memory(self) -> list[tuple[int, int]]:
        return self.driver.private_memory(self.handle)


def test_the_same_capture_twice_is_the_same_and_contents_never_count(bench: Bench) -> None:
    x, y = bench.alloc(4096), bench.alloc(4096)

    def step() -> None:
        bench.launch(add_one, x, 16)
        bench.launch(axpy, 2.0, x, y + 64, 16)

    first = Captured(bench, step)
    before = fingerprint(first)
    bench.driver.write(x, b"\0" * 4096)
    bench.run(first.handle, times=3)
    assert fingerprint(first) == before
    assert fingerprint(Captured(bench, step)) == before
    assert repr(before) == f"<Fingerprint {before.digest}, 3 parts>"

    def changed() -> None:
        bench.launch(add_one, x, 16)
        bench.launch(axpy, 2.0, x, y + 68, 16)

    after = fingerprint(Captured(bench, changed))
    (line,) = before.compare(after)
    assert line.startswith("node 1 (kernel axpy): argument 2 was allocation")
    named = fingerprint(first, {"x": (x, 4096), "y": (y, 4096)})
    assert "node 1 (kernel axpy): argument 2 = y + 64 bytes" in {str(f) for f in named.fields}
    assert len(str(named)) == 32


def test_freed_and_reused_memory_is_another_fingerprint(bench: Bench) -> None:
    address = bench.driver.alloc(1 << 20)
    graph = Captured(bench, lambda: bench.launch(add_one, address, 16))
    before = fingerprint(graph)
    bench.driver.free(address)
    again = bench.driver.alloc(1 << 20)
    try:
        assert fingerprint(graph).digest != before.digest
        snapshot_alone = fingerprint(graph.snapshot(), driver=bench.driver)
        assert snapshot_alone == fingerprint(graph)
    finally:
        bench.driver.free(again)


def test_one_look_at_an_allocation_serves_all_its_pointers(bench: Bench) -> None:
    x = bench.alloc(4096)
    graph = Captured(bench, lambda: [bench.launch(add_one, x + 64 * i, 16) for i in range(20)])
    asked: list[int] = []
    driver = create_autospec(Driver, instance=True, is_emulated=bench.driver.is_emulated)
    driver.allocation_of = lambda address: (
        asked.append(address) or bench.driver.allocation_of(address)
    )
    assert fingerprint(graph.snapshot(), driver=driver) == fingerprint(graph)
    assert len(asked) == 1


def test_shapes_of_launches_are_read_from_the_driver(bench: Bench) -> None:
    x = bench.alloc(4096)
    shapes = [ONE_BLOCK, LaunchConfig((2, 1, 1), (32, 1, 1)), LaunchConfig((1, 1, 1), (64, 1, 1))]
    digests = {
        fingerprint(Captured(bench, partial(bench.launch, add_one, x, 16, config=shape))).digest
        for shape in shapes
    }
    assert len(digests) == 3


@pytest.mark.parametrize("wrong", [["x"], "x", 3, [], 0], ids=repr)
def test_names_that_are_no_mapping_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="names: expected a mapping"):
        fingerprint(snapshot([]), wrong)


@pytest.mark.parametrize("wrong", ["a graph", None, 7, GraphSnapshot], ids=repr)
def test_what_is_no_graph_has_no_fingerprint(wrong: Any) -> None:
    with pytest.raises(CacheTypeError, match=r"^graph: expected a Graph or GraphSnapshot .*, got"):
        fingerprint(wrong)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"driver": "emulated"}, "driver: expected an open driver"),
        ({"private": 3}, r"private: expected \(address, bytes\) pairs, got int"),
        ({"private": [3]}, r"private: expected \(address, bytes\) pairs, got 3"),
        ({"names": {"x": (-1, 4)}}, r"names\['x'\]: expected \(address, bytes\) of 0 or more"),
    ],
    ids=["driver", "private", "private piece", "negative address"],
)
def test_other_arguments_that_cannot_work_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fingerprint(snapshot([]), **arguments)


def test_a_name_counts_before_the_graphs_own_memory() -> None:
    graph = snapshot([kernel_node(0, arguments=[word(X + 8), word(Y)])])
    fields = {
        str(field) for field in fingerprint(graph, {"x": (X, 64)}, private=[(X, 4096)]).fields
    }
    assert "node 0 (kernel work): argument 0 = x + 8 bytes" in fields


def test_the_piece_of_a_pool_that_a_pointer_lies_in_counts(bench: Bench) -> None:
    x = bench.alloc(4096)

    class Pooled(Captured):
        blocks: Blocks | None = None

        def pool_blocks(self) -> Blocks | None:
            return self.blocks

    def step() -> None:
        bench.launch(add_one, x + 512, 16)
        bench.driver.copy(copy_1d(x + 512, x, 16), bench.stream.handle)

    graph = Pooled(bench, step)
    words = []
    for block in (
        None,
        Block(x + 512, 512, 64, is_live=True),
        Block(x + 512, 512, 80, is_live=True),
    ):
        graph.blocks = None if block is None else Blocks([block])
        words.append(fingerprint(graph))
    without, one, two = words
    assert one.compare(two) == [
        "node 0 (kernel add_one): argument 0 piece was (512, 64), is (512, 80)",
        "node 1 (memcpy memcpy): dst piece was (512, 64), is (512, 80)",
    ]
    assert "node 0 (kernel add_one): argument 0 piece is new: (512, 64)" in without.compare(one)
    graph.blocks = Blocks([Block(x + 512, 512, 64, is_live=False)])
    assert fingerprint(graph) == without
