"""Attribution: every operand is told by name, else by allocation, and never guessed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
from helpers.contract import Bench, copy_1d
from helpers.kernels import axpy
from helpers.snapshots import kernel_node, node, snapshot

from graphcore.driver.kernel import Kernel, Parameter
from graphcore.driver.records import Allocation, FreeParams, MemoryKind, MemsetParams
from graphcore.errors import CacheTypeError
from graphcore.graph import read
from graphcore.resources.addresses import AddressBook, KnownMemory, Place, words
from graphcore.resources.attribution import attribute, attribute_by, notes
from graphcore.resources.pools import Block, Blocks
from graphcore.resources.spans import extent

BASE = 0x7F0000000000


class Allocations:
    """A driver that knows two allocations, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.known = [
            Allocation(BASE, 4096, 7, MemoryKind.DEVICE, 0),
            Allocation(BASE + 8192, 4096, 8, MemoryKind.DEVICE, 0),
        ]

    def allocation_of(self, address: int) -> Allocation | None:
        self.asked.append(address)
        return next((a for a in self.known if a.base <= address < a.base + a.size), None)


def word(address: int) -> bytes:
    return address.to_bytes(8, "little")


def test_pointers_of_a_real_graph_are_told_by_the_names_given(bench: Bench) -> None:
    keys, values = bench.alloc(65536), bench.alloc(4096)
    graph = bench.new_graph()
    first = bench.add_kernel(graph, axpy, 2.0, keys + 8192, values, 4)
    bench.add(graph, copy_1d(values, keys, 64), [first])
    bench.add(graph, MemsetParams(values + 16, 0, 4, 4))
    snapshot = read(bench.driver, graph)
    names = {"layer 4 keys": (keys, 65536), "layer 4 values": (values, 4096)}
    found = attribute(snapshot, names)
    assert [str(entry) for entry in found] == [
        "x = layer 4 keys + 8192 bytes",
        "y = layer 4 values",
        "dst = layer 4 values",
        "src = layer 4 keys",
        "address = layer 4 values + 16 bytes",
    ]
    assert repr(found[0]) == "<Attribution node 0 (kernel axpy): x = layer 4 keys + 8192 bytes>"
    assert [entry.argument for entry in found] == [1, 2, None, None, None]
    lines = notes(found)
    assert list(lines) == [0, 1, 2]
    text = snapshot.drawing(lines).to_html()
    assert "x = layer 4 keys + 8192 bytes" in text


def test_pointers_without_a_name_are_told_by_their_allocation(bench: Bench) -> None:
    memory = bench.alloc(4096)
    graph = bench.new_graph()
    bench.add(graph, MemsetParams(memory + 512, 0, 4, 4))
    snapshot = read(bench.driver, graph)
    assert attribute(snapshot) == []
    (found,) = attribute(snapshot, driver=bench.driver)
    assert found.place.allocation == bench.driver.allocation_of(memory)
    assert found.place.offset == memory + 512 - found.place.allocation.base  # type: ignore[union-attr]
    assert f"address = allocation {found.place.allocation.base:#x}" in str(found)  # type: ignore[union-attr]


def test_every_aligned_word_of_an_undeclared_structure_is_looked_at() -> None:
    inside = word(3) + word(BASE + 100) + word(0) + word(BASE + 8) + b"\1\2\3"
    graph = snapshot([kernel_node(0, arguments=[word(5), inside])])
    found = attribute(graph, {"x": (BASE, 4096)})
    assert [(entry.argument, entry.byte_offset, entry.place.offset) for entry in found] == [
        (1, 8, 100),
        (1, 24, 8),
    ]
    assert str(found[0]) == "arg 1 (byte 8) = x + 100 bytes"


def test_words_are_aligned_in_the_parameter_block_not_in_the_argument() -> None:
    data = bytes(4) + word(BASE)
    assert list(words(data, offset=4)) == [(4, BASE)]
    assert [at for at, _ in words(data, offset=0)] == [0]
    assert list(words(b"\1\2\3\4")) == []


def test_typed_scalars_are_no_pointers_and_typed_structures_are_searched() -> None:
    kernel = Kernel(
        "k", (Parameter("n", "u64"), Parameter("p", "f32*"), Parameter("s", "bytes:16")), ""
    )
    plain = kernel_node(0, "k", arguments=[word(BASE), word(BASE + 4), word(1) + word(BASE + 8)])
    names = {"x": (BASE, 4096)}
    assert [entry.operand for entry in attribute(snapshot([plain]), names)] == [
        "arg 0", "arg 1", "arg 2",
    ]  # fmt: skip
    typed = attribute(snapshot([replace(plain, kernel=kernel)]), names)
    assert [str(entry) for entry in typed] == ["p = x + 4 bytes", "s (byte 8) = x + 8 bytes"]


def test_overlapping_names_are_told_as_ambiguous() -> None:
    book = AddressBook({"cache": (BASE, 4096), "keys": (BASE + 1024, 64), "end": (BASE + 4096, 8)})
    alone, both, edge = (book.find(BASE + at) for at in (0, 1030, 4096))
    assert alone is not None
    assert both is not None
    assert edge is not None
    assert (alone.is_ambiguous, both.is_ambiguous, edge.is_ambiguous) == (False, True, False)
    assert both.matches == (("cache", 1030), ("keys", 6))
    assert str(both) == "ambiguous: cache + 1030 bytes or keys + 6 bytes"
    assert str(alone) == "cache"
    assert str(edge) == "end"
    assert book.find(BASE - 1) is None
    assert book.find(BASE + 4104) is None


def test_the_driver_is_asked_once_per_word_and_never_about_a_known_allocation() -> None:
    driver: Any = Allocations()
    book = AddressBook({"x": (BASE + 8192, 16)}, driver)
    places = [book.find(BASE + at) for at in (8, 16, 24, 8192, 8300, 8400, 50_000, 50_000)]
    assert driver.asked == [BASE + 8, BASE + 8300, BASE + 50_000]
    assert [place and place.offset for place in places] == [8, 16, 24, 0, 108, 208, None, None]
    assert str(places[0]) == (f"allocation {BASE:#x} + 8 bytes (4096 bytes, buffer id 7, device 0)")


@pytest.mark.parametrize("value", [0, 1, 4095, 2**57, 2**64 - 1])
def test_numbers_that_cannot_be_addresses_are_not_looked_up(value: int) -> None:
    driver: Any = Allocations()
    assert AddressBook({}, driver).find(value) is None
    assert driver.asked == []


def test_a_named_tensor_covers_all_that_its_strides_reach() -> None:
    array = numpy.zeros((4, 8), "float32")
    address = array.ctypes.data
    assert extent("x", array) == (address, 128)
    assert extent("x", array[:, ::2]) == (address, 4 * 31)
    assert extent("x", array[::-1]) == (address, 128)
    assert extent("x", array[:0])[1] == 0
    assert extent("x", (BASE, 64)) == (BASE, 64)
    book = AddressBook({"x": array[:, ::2]})
    assert book.find(address + 100) == Place((("x", 100),), None, 100)


def test_a_name_for_something_without_memory_is_refused() -> None:
    with pytest.raises(CacheTypeError, match="names\\['x'\\]"):
        AddressBook({"x": "not a tensor"})


def test_freed_graph_memory_is_attributed_too() -> None:
    graph = snapshot([node(0, FreeParams(BASE + 8))])
    assert [str(entry) for entry in attribute(graph, {"x": (BASE, 64)})] == [
        "address = x + 8 bytes"
    ]


def test_of_interleaved_views_the_one_with_the_element_is_told() -> None:
    both = numpy.zeros((4, 2), "float32")
    start = both.ctypes.data
    book = AddressBook({"left": both[:, 0], "right": both[:, 1]})
    places = [book.find(start + at) for at in (0, 4, 8, 12)]
    assert [str(place) for place in places] == [
        "left", "right", "left + 8 bytes", "right + 8 bytes",
    ]  # fmt: skip
    assert not any(place.is_ambiguous for place in places if place)


def test_what_the_first_book_knows_the_others_do_not_say() -> None:
    driver: Any = Allocations()
    books = [
        ("name", AddressBook({"mine": (BASE, 64)})),
        ("owner", AddressBook({"argument 0": (BASE, 256), "view": (BASE + 128, 16)})),
    ]
    blocks = Blocks(
        [
            Block(BASE, 512, 500, is_live=True),
            Block(BASE + 512, 512, 512, is_live=True),
            Block(BASE + 1024, 512, 400, is_live=False),
        ]
    )
    memory = KnownMemory(books, blocks, driver)
    found = [memory.find(BASE + at) for at in (8, 64, 130, 300, 512, 1100, 2048, 5000)]
    assert [str(place) for place in found] == [
        "mine + 8 bytes",
        "argument 0 + 64 bytes",
        "ambiguous: argument 0 + 130 bytes or view + 2 bytes",
        f"torch block {BASE:#x} of 500 bytes + 300 bytes",
        f"torch block {BASE + 512:#x} of 512 bytes",
        f"freed torch block {BASE + 1024:#x} of 400 bytes + 76 bytes",
        f"allocation {BASE:#x} + 2048 bytes (4096 bytes, buffer id 7, device 0)",
        "None",
    ]
    sources = [place.source for place in found if place]
    assert sources == ["name", "owner", "owner", "torch", "torch", "torch", "driver"]
    assert memory.find(3) is None


def test_pointers_into_nothing_known_are_told_where_they_are_declared() -> None:
    typed = Kernel("k", (Parameter("p", "f32*"), Parameter("n", "u64")), "")
    node_with = kernel_node(0, "k", arguments=[word(BASE), word(BASE)])
    graph = snapshot([replace(node_with, kernel=typed), node(1, copy_1d(BASE + 8, BASE + 16, 4))])
    memory = AddressBook({"x": (BASE + 8, 8)})
    assert [str(found) for found in attribute_by(graph, memory)] == ["dst = x"]
    assert [str(found) for found in attribute_by(graph, memory, also_unknown=True)] == [
        f"p = {BASE:#x}, in no memory that is known",
        "dst = x",
        f"src = {BASE + 16:#x}, in no memory that is known",
    ]
    raw = snapshot([node_with, node(1, copy_1d(BASE + 8, BASE, 4, src_memory=MemoryKind.HOST))])
    assert [str(found) for found in attribute_by(raw, memory, also_unknown=True)] == ["dst = x"]
