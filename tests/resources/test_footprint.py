"""Footprint: memory that nobody gave us, attributed to the operands that point into it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import pytest
from helpers.contract import Bench, copy_1d, fill_1d
from helpers.graph_specs import Child, Step, build
from helpers.kernels import add_one, axpy
from helpers.snapshots import kernel_node, node, snapshot

from graphcore.driver import Driver, kernel
from graphcore.driver.records import (
    Allocation,
    AllocParams,
    CopyOperand,
    FreeParams,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
)
from graphcore.graph import GraphSnapshot, NodeRecord, read
from graphcore.resources.footprint import find_changed, record
from graphcore.resources.pools import Block, Blocks
from graphcore.resources.staleness import StaleResource

X, Y, SEGMENT = 0x7F0000000000, 0x7F0000100000, 0x7F0000200000
TYPED = kernel("typed", "f32* x, i64 n", "source")


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


class Device:
    """Allocations of a device that a test changes, and how often it was asked."""

    def __init__(self, *allocations: tuple[int, int, int]) -> None:
        self.allocations = {base: (size, number) for base, size, number in allocations}
        self.asked = 0
        self.driver = create_autospec(Driver, instance=True, is_emulated=False)
        self.driver.allocation_of.side_effect = self._find

    def _find(self, address: int) -> Allocation | None:
        self.asked += 1
        for base, (size, number) in self.allocations.items():
            if base <= address < base + size:
                return Allocation(base, size, number, MemoryKind.DEVICE, 0)
        return None


def device() -> Device:
    return Device((X, 4096, 1), (Y, 4096, 2), (SEGMENT, 2**21, 3))


def typed(address: int, number: int = 3) -> NodeRecord:
    return replace(kernel_node(0, "typed", arguments=[word(address), word(number)]), kernel=TYPED)


def changes(
    graph: GraphSnapshot | Iterable[NodeRecord],
    where: Device,
    change: Any,
    before: Blocks | None = None,
    after: Blocks | None = None,
    **options: Any,
) -> list[StaleResource]:
    seen = graph if isinstance(graph, GraphSnapshot) else snapshot(graph)
    footprint = record(seen, where.driver, blocks=before, **options)
    assert before is not None or list(find_changed(footprint, where.driver)) == []
    change(where.allocations)
    return list(find_changed(footprint, where.driver, after))


def drop_x(allocations: dict[int, tuple[int, int]]) -> None:
    del allocations[X]


NODES: dict[str, tuple[NodeRecord, str, bool]] = {
    "typed pointer": (typed(X + 8), "argument 0 x of node 0 (kernel typed)", True),
    "untyped argument": (
        kernel_node(0, "k", arguments=[word(Y), word(X + 8)]),
        "argument 1 of node 0 (kernel k)",
        True,
    ),
    "structure": (
        kernel_node(0, "k", arguments=[word(1) + word(X + 8) + word(9)]),
        "argument 0 (byte 8) of node 0 (kernel k)",
        False,
    ),
    "copy destination": (
        node(0, MemcpyParams(CopyOperand(X + 8), CopyOperand(Y), 64)),
        "dst of node 0 (memcpy memcpy)",
        True,
    ),
    "copy source": (
        node(0, MemcpyParams(CopyOperand(Y), CopyOperand(X + 8), 64)),
        "src of node 0 (memcpy memcpy)",
        True,
    ),
    "fill": (node(0, MemsetParams(X + 8, 0, 4, 16)), "address of node 0 (memset memset)", True),
}


@pytest.mark.parametrize("case", NODES)
def test_freed_memory_is_told_with_the_operand_that_points_into_it(case: str) -> None:
    record_, operand, is_certain = NODES[case]
    [stale] = changes([record_], device(), drop_x)
    assert (stale.operand, stale.field, stale.is_certain) == (operand, "memory", is_certain)
    assert stale.label == f"allocation {X:#x} + 8"
    assert str(stale).startswith(f"{stale.label} ({operand}): memory: expected 4096 bytes")
    assert str(stale).endswith("may be a number or padding") is not is_certain


def test_memory_freed_and_allocated_again_at_its_address_is_told_apart() -> None:
    [stale] = changes([typed(X)], device(), lambda found: found.update({X: (4096, 9)}))
    assert (stale.field, stale.actual) == (
        "allocation",
        "freed and allocated again: 4096 bytes, buffer id 9",
    )
    [stale] = changes([typed(X)], device(), lambda found: found.update({X: (512, 9)}))
    assert stale.actual == "freed, and other memory is there: 512 bytes, buffer id 9"


def test_inner_graphs_count(bench: Bench) -> None:
    address = bench.driver.alloc(64)
    inner = (Step(bench.kernel_params(add_one, address, 4)),)
    graph = read(bench.driver, build(bench, (Step(Child(inner)),)))
    footprint = record(graph, bench.driver)
    assert list(find_changed(footprint, bench.driver)) == []
    bench.driver.free(address)
    [stale] = find_changed(footprint, bench.driver)
    assert stale.operand == "argument 0 x of node 0 (kernel add_one)"


def test_real_nodes_of_every_kind_are_attributed(bench: Bench) -> None:
    driver = bench.driver
    a, b, c = (driver.alloc(64) for _ in range(3))
    steps = (
        Step(bench.kernel_params(axpy, 1.0, a, b, 4)),
        Step(copy_1d(b, a, 16)),
        Step(fill_1d(c, 0, 4)),
    )
    footprint = record(read(driver, build(bench, steps)), driver, names={"c": (c, 64)})
    assert len(footprint) == 3
    for address in (a, b, c):
        driver.free(address)
    found = list(find_changed(footprint, driver))
    assert [stale.operand for stale in found] == [
        "argument 1 x of node 0 (kernel axpy)",
        "argument 2 y of node 0 (kernel axpy)",
        "address of node 2 (memset memset)",
    ]
    assert [stale.label for stale in found] == [
        f"allocation {a:#x}",
        f"allocation {b:#x}",
        "c",
    ]


def test_memory_freed_and_allocated_again_is_found_on_both_drivers(bench: Bench) -> None:
    driver = bench.driver
    size = 3 * 2**20
    address = driver.alloc(size)
    graph = read(driver, build(bench, (Step(bench.kernel_params(add_one, address, 4)),)))
    footprint = record(graph, driver)
    driver.free(address)
    again = driver.alloc(size)
    try:
        [stale] = find_changed(footprint, driver)
        assert stale.field == ("allocation" if again == address else "memory")
    finally:
        driver.free(again)


def test_typed_numbers_never_count() -> None:
    number_like_an_address = typed(Y, X)
    assert changes([number_like_an_address], device(), drop_x) == []


def test_a_typed_pointer_into_nothing_is_told_at_the_first_look() -> None:
    where = device()
    footprint = record(snapshot([typed(0x6F0000000000)]), where.driver)
    [stale] = find_changed(footprint, where.driver)
    assert stale.actual == "memory that was free when first looked at"
    assert stale.label == "memory at 0x6f0000000000"
    null_and_number = [typed(0), kernel_node(1, "k", arguments=[word(0x6F0000000000)])]
    assert record(snapshot(null_and_number), where.driver).pieces == ()


def test_memory_of_the_host_is_not_expected_to_be_known() -> None:
    source = CopyOperand(0x6F0000000000, MemoryKind.HOST)
    copy = node(0, MemcpyParams(CopyOperand(X), source, 64))
    footprint = record(snapshot([copy, node(1, FreeParams(0x6E0000000000))]), device().driver)
    assert len(footprint) == 1


def test_on_the_emulated_driver_unknown_memory_is_the_hosts() -> None:
    where = device()
    where.driver.is_emulated = True
    assert record(snapshot([typed(0x6F0000000000)]), where.driver).pieces == ()


def test_the_graphs_own_memory_never_counts() -> None:
    def all_gone(allocations: dict[int, Any]) -> None:
        allocations.clear()

    graph = [node(0, AllocParams(256, X)), typed(X + 16), node(2, FreeParams(X))]
    assert changes(snapshot(graph), device(), all_gone) == []
    assert changes([typed(Y)], device(), all_gone, own=[(Y, 4096)]) == []
    assert len(changes([typed(Y)], device(), all_gone)) == 1, "the control"


# ---- pieces of another allocator ----------------------------------------------------------------


def piece(**changed: Any) -> Blocks:
    return Blocks([replace(Block(SEGMENT + 512, 1024, 1000, is_live=True), **changed)])


PIECES: dict[str, tuple[Blocks, str | None]] = {
    "as it was": (piece(), None),
    "given back": (piece(is_live=False), "memory that was given back to torch"),
    "merged": (
        piece(address=SEGMENT, size=2048, is_live=False),
        "memory that was given back to torch",
    ),
    "another size": (
        piece(requested=900),
        f"given back, and given out again: torch's 900 bytes at {SEGMENT + 512:#x}",
    ),
    "another start": (
        piece(address=SEGMENT, size=2048, requested=2000),
        f"given back, and given out again: torch's 2000 bytes at {SEGMENT:#x}",
    ),
    "segment gone": (Blocks(), "memory that is no longer torch's"),
}


@pytest.mark.parametrize("case", PIECES)
@pytest.mark.parametrize("kind", ["typed", "structure"])
def test_what_became_of_a_piece_in_a_living_segment_is_told(case: str, kind: str) -> None:
    after, words = PIECES[case]
    graph = {
        "typed": typed(SEGMENT + 520),
        "structure": kernel_node(0, arguments=[word(1) + word(SEGMENT + 520)]),
    }[kind]
    found = changes([graph], device(), lambda _: None, piece(), after)
    assert [stale.actual for stale in found] == ([] if words is None else [words])
    if found:
        assert found[0].expected == f"torch's 1000 bytes at {SEGMENT + 512:#x}"


def test_a_raw_word_into_free_memory_counts_as_padding_and_a_typed_one_as_stale() -> None:
    free = piece(is_live=False)
    raw = kernel_node(0, arguments=[word(1) + word(SEGMENT + 520)])
    assert record(snapshot([raw]), device().driver, blocks=free).pieces == ()
    [dead] = record(snapshot([typed(SEGMENT + 520)]), device().driver, blocks=free)
    assert dead.allocation is None


# ---- what it costs ------------------------------------------------------------------------------


def test_one_question_an_allocation_serves_all_pointers_and_each_check() -> None:
    where = device()
    nodes = [kernel_node(i, arguments=[word(X + 8 * i), word(Y)]) for i in range(256)]
    footprint = record(snapshot(nodes), where.driver)
    assert where.asked == 2
    assert len(footprint) == 2
    list(find_changed(footprint, where.driver))
    assert where.asked == 4
