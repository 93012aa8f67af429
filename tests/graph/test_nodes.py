"""What a node record says of itself."""

from __future__ import annotations

import pytest
from helpers.snapshots import VECTORIZED, chain, kernel_node, node, snapshot

from graphcore.driver import Kernel, Parameter, Pointer
from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalHandle,
    ConditionalParams,
    CopyOperand,
    EmptyParams,
    EventHandle,
    EventParams,
    GraphHandle,
    HostParams,
    LaunchConfig,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeKind,
)
from graphcore.graph.nodes import Argument, shorten


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("add_one", "add_one"),
        ("aten::mm.default", "aten::mm.default"),
        ("add_one(float*, int)", "add_one"),
        (
            VECTORIZED,
            "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, array<char*, 3ul> >",
        ),
        ("void cutlass::Kernel2<cutlass_80::tn>(cutlass_80::Params)", "Kernel2<tn>"),
        ("void at::native::(anonymous namespace)::norm<c10::Half>(int)", "norm<Half>"),
        ("void f<a::g(b::h)::{lambda(int)#1}>(int)", "f<g(h)::{lambda(int)#1}>"),
        ("<lambda>", "<lambda>"),
        ("", ""),
    ],
)
def test_short_names_drop_return_type_parameters_and_namespaces(name: str, short: str) -> None:
    assert shorten(name) == short


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (Argument(0, 0, 8, bytes(8), Pointer(0x7F00, "float32"), "f32*", "x"), "x = 0x7f00"),
        (Argument(1, 8, 4, b"\x05\0\0\0", 5, "i32", "n"), "n = 5"),
        (Argument(2, 12, 4, b"\x05\0\0\0"), "arg 2 = 0x5"),
        (Argument(3, 16, 3, b"cpu"), "arg 3 = 'cpu'"),
        (Argument(3, 16, 3, b"\1\2\3"), "arg 3 = <3 bytes 010203>"),
        (
            Argument(4, 16, 24, bytes(range(24)), bytes(range(24)), "bytes:24", "p"),
            "p = <24 bytes 0001020304050607 08090a0b0c0d0e0f...>",
        ),
    ],
    ids=["pointer", "typed", "word", "text", "odd", "structure"],
)
def test_an_argument_reads_as_its_type_says(argument: Argument, words: str) -> None:
    assert str(argument) == words


def test_arguments_take_offsets_from_the_layout_and_types_from_the_kernel() -> None:
    data = ((0x1234).to_bytes(8, "little"), b"\x07\0\0\0")
    record = kernel_node(0, "k", arguments=data)
    assert [(a.index, a.offset, a.size, a.value) for a in record.arguments] == [
        (0, 0, 8, None),
        (1, 8, 4, None),
    ]
    kernel = Kernel("k", (Parameter("x", "f32*"), Parameter("n", "i32")), "")
    typed = type(record)(0, record.handle, record.params, record.function, kernel)
    assert [(a.name, a.type, a.value) for a in typed.arguments] == [
        ("x", "f32*", Pointer(0x1234, "float32")),
        ("n", "i32", 7),
    ]


def test_arguments_without_a_layout_follow_one_another() -> None:
    record = kernel_node(0, "k", arguments=(bytes(8), bytes(4)))
    bare = type(record)(0, record.handle, record.params)
    assert [(a.offset, a.size) for a in bare.arguments] == [(0, 8), (8, 4)]
    assert bare.name == "kernel"


SHAPED = LaunchConfig((16, 8, 1), (32, 2, 4), 4096, (2, 1, 1))


@pytest.mark.parametrize(
    ("record", "name", "work"),
    [
        (
            kernel_node(0, "k", config=SHAPED),
            "k",
            "grid 16x8, block 32x2x4, cluster 2, 4096 B shared",
        ),
        (node(0, MemcpyParams(CopyOperand(1), CopyOperand(2), 64)), "memcpy", "64 B"),
        (node(0, MemcpyParams(CopyOperand(1), CopyOperand(2), 64, 4)), "memcpy", "64 B x 4"),
        (node(0, MemcpyParams(CopyOperand(1), CopyOperand(2), 64, 4, 2)), "memcpy", "64 B x 4 x 2"),
        (node(0, MemsetParams(1, 0, 4, 16)), "memset", "64 B"),
        (node(0, AllocParams(512)), "alloc", "512 B"),
        (node(0, EventParams(EventHandle(1), NodeKind.EVENT_WAIT)), "event wait", ""),
        (node(0, ChildParams(GraphHandle(1)), child=chain(3)), "child", "3 nodes"),
        (
            node(0, ConditionalParams(ConditionalHandle(1), "while", 1), bodies=(chain(2),)),
            "while",
            "2 nodes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_node_says_what_it_is_and_how_much_it_does(record, name: str, work: str) -> None:
    assert (record.name, record.work) == (name, work)
    assert str(record) == f"node 0 ({record.kind.value} {record.short_name})"


def test_the_table_row_of_a_node_says_what_it_works_on() -> None:
    config = LaunchConfig((1, 1, 1), (32, 1, 1), cooperative=True, priority=-2, programmatic=True)
    to_host = CopyOperand(0x10, MemoryKind.HOST)
    graph = snapshot(
        [
            kernel_node(0, config=config, arguments=[b"\5\0\0\0"]),
            node(1, MemcpyParams(to_host, CopyOperand(0x20, pitch=8), 4)),
            node(2, MemsetParams(0x10, 0xAB, 1, 4)),
            node(3, AllocParams(8, 0x40)),
            node(4, EventParams(EventHandle(0x99), NodeKind.EVENT_RECORD)),
            node(5, HostParams(None, 0x77)),
            node(6, HostParams(chain)),  # type: ignore[arg-type]
            node(7, EmptyParams()),
        ]
    )
    assert [box.lines for box in graph.drawing().boxes] == [
        ("cooperative", "programmatic launch", "priority -2", "arg 0 = 0x5"),
        ("dst 0x10 (host)", "src 0x20 (device, pitch 8)"),
        ("address 0x10", "value 0xab"),
        ("address 0x40",),
        ("event 0x99",),
        ("callback 0x77",),
        ("callback chain",),
        (),
    ]
    assert [box.label for box in graph.drawing().boxes[3:]] == [
        "alloc", "event record", "host", "host", "empty",
    ]  # fmt: skip
