"""What graphcore.driver.cuda does to the stub: node parameters both ways, edges."""

import ctypes
import struct

from helpers.stub_driver import (
    PLAIN,
    RICH,
    arguments,
    driver,
    function,
    raises,
    stub,
)

from graphcore.driver.records import (
    AllocParams,
    ChildParams,
    ConditionalParams,
    CopyOperand,
    Edge,
    EmptyParams,
    EventParams,
    FreeParams,
    KernelParams,
    MemcpyParams,
    MemoryKind,
    MemsetParams,
    NodeKind,
    OpaqueParams,
)

# ---- nodes, both ways ----


def every_kind_of_node_reads_back_as_it_was_added():
    cuda = driver()
    graph, event = cuda.create_graph(), cuda.create_event(timing=False)
    data = cuda.alloc(1024)
    device, host = CopyOperand(data), CopyOperand(data + 512, MemoryKind.HOST)
    wide = CopyOperand(data + 8, MemoryKind.UNIFIED, 64, 4)
    cases = [
        KernelParams(function(cuda), PLAIN, arguments()),
        KernelParams(function(cuda), RICH, arguments(5, 6, -7)),
        MemcpyParams(device, host, 100),
        MemcpyParams(host, device, 100),
        MemcpyParams(CopyOperand(data, pitch=64), CopyOperand(data + 8, pitch=32), 16, height=3),
        MemcpyParams(wide, wide, 16, 3, 2),
        MemsetParams(data, 0xFF, 1, 100),
        MemsetParams(data, 0xFFFF, 2, 10, 3, 64),
        EmptyParams(),
        EventParams(event, NodeKind.EVENT_RECORD),
        EventParams(event, NodeKind.EVENT_WAIT),
        FreeParams(data),
    ]
    for params in cases:
        node = cuda.add_node(graph, [], params)
        assert cuda.node_kind(node) is params.kind
        assert cuda.node_params(node) == params
    assert len(cuda.nodes(graph)) == len(cases)
    attributes = [(each.cluster, each.cooperative, each.priority) for each in (PLAIN, RICH)]
    assert cuda.kernel_attributes(graph) == attributes
    allocated = cuda.node_params(cuda.add_node(graph, [], AllocParams(4096)))
    assert allocated.size == 4096
    assert allocated.address
    embedded = cuda.node_params(cuda.add_node(graph, [], ChildParams(cuda.create_graph())))
    assert cuda.nodes(embedded.graph) == []
    assert cuda.kernel_attributes(graph) == attributes


def offsets_of_a_foreign_copy_are_added_to_the_address():
    from cuda.bindings import driver as bindings

    from graphcore.driver.cuda.copies import from_memcpy

    copy = bindings.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = 1000, 2000
    copy.srcPitch, copy.srcHeight, copy.dstPitch = 16, 4, 8
    copy.srcXInBytes, copy.srcY, copy.srcZ = 3, 2, 1
    copy.WidthInBytes, copy.Height, copy.Depth = 8, 2, 1
    expected = MemcpyParams(CopyOperand(2000, pitch=8), CopyOperand(1099, pitch=16), 8, 2)
    assert from_memcpy(copy) == expected
    copy.srcMemoryType = bindings.CUmemorytype.CU_MEMORYTYPE_ARRAY
    assert from_memcpy(copy).kind is NodeKind.MEMCPY


def changed_nodes_read_back_changed():
    cuda = driver()
    graph = cuda.create_graph()
    first, second = cuda.create_event(timing=False), cuda.create_event(timing=False)
    operand = CopyOperand(64)
    changes = [
        (
            KernelParams(function(cuda), RICH, arguments()),
            KernelParams(function(cuda), PLAIN, arguments(8, 9, 10)),
        ),
        (MemcpyParams(operand, operand, 4), MemcpyParams(operand, CopyOperand(128), 8)),
        (MemsetParams(64, 1, 4, 2), MemsetParams(128, 2, 1, 3)),
        (EventParams(first, NodeKind.EVENT_RECORD), EventParams(second, NodeKind.EVENT_RECORD)),
        (EventParams(first, NodeKind.EVENT_WAIT), EventParams(second, NodeKind.EVENT_WAIT)),
    ]
    for before, after in changes:
        node = cuda.add_node(graph, [], before)
        cuda.set_node_params(node, after)
        assert cuda.node_params(node) == after
    empty = cuda.add_node(graph, [], EmptyParams())
    raises("CUDA_ERROR_NOT_SUPPORTED", cuda.set_node_params, empty, EmptyParams())


def a_refused_change_of_a_kernel_node_puts_its_attributes_back():
    cuda = driver()
    node = cuda.add_node(cuda.create_graph(), [], KernelParams(function(cuda), RICH, arguments()))
    stub().stub_fail(b"cuGraphKernelNodeSetParams", 1)
    plain = KernelParams(function(cuda), PLAIN, arguments())
    raises("CUDA_ERROR_INVALID_VALUE", cuda.set_node_params, node, plain)
    assert cuda.node_params(node).config == RICH


def a_kernel_node_whose_attribute_is_refused_is_not_left_behind():
    cuda = driver()
    graph = cuda.create_graph()
    stub().stub_fail(b"cuGraphKernelNodeSetAttribute", 1)
    params = KernelParams(function(cuda), RICH, arguments())
    raises("CUDA_ERROR_INVALID_VALUE", cuda.add_node, graph, [], params)
    assert cuda.nodes(graph) == []


def packed_arguments_of_other_libraries_are_read():
    from graphcore.driver.cuda.reading import Arguments

    packed = ctypes.create_string_buffer(struct.pack("QQi", 11, 12, 13))
    size = ctypes.c_size_t(20)
    extra = (ctypes.c_void_p * 5)(2, ctypes.addressof(size), 1, ctypes.addressof(packed), 0)
    layout = ((0, 8), (8, 8), (16, 4))
    read = Arguments(layout).read
    assert read(0, ctypes.addressof(extra)) == arguments(11, 12, 13)
    assert Arguments(()).read(0, 0) == ()
    apart = [ctypes.create_string_buffer(data, 64) for data in arguments(11, 12, 13)]
    pointers = (ctypes.c_void_p * 3)(*map(ctypes.addressof, apart))
    assert read(ctypes.addressof(pointers), 0) == arguments(11, 12, 13)
    raises("CUDA_ERROR_NOT_SUPPORTED", read, 0, 0)


def edges_keep_their_data():
    cuda = driver()
    graph = cuda.create_graph()
    a, b, c = (cuda.add_node(graph, [], EmptyParams()) for _ in range(3))
    d = cuda.add_node(graph, [a, b], EmptyParams())
    cuda.add_edges(graph, [Edge(a, c, (1, 0, 1)), Edge(b, c)])
    edges = cuda.edges(graph)
    assert set(edges) == {Edge(a, d), Edge(b, d), Edge(a, c, (1, 0, 1)), Edge(b, c)}
    # whatever the order of the whole list, a node's dependencies come as they were added
    for target in (c, d):
        assert [edge.source for edge in edges if edge.target == target] == [a, b]
    raises("CUDA_ERROR_INVALID_VALUE", cuda.remove_edges, graph, [Edge(a, c)])
    assert cuda.edges(graph) == edges
    cuda.remove_edges(graph, [Edge(a, c, (1, 0, 1)), Edge(a, d)])
    assert set(cuda.edges(graph)) == {Edge(b, d), Edge(b, c)}
    cuda.destroy_node(a)
    assert a not in cuda.nodes(graph)
    assert cuda.edges(cuda.create_graph()) == []


def edges_are_added_all_or_none():
    cuda = driver()
    graph = cuda.create_graph()
    a, b, c = (cuda.add_node(graph, [], EmptyParams()) for _ in range(3))
    cuda.add_edges(graph, [Edge(a, b)])
    raises("CUDA_ERROR_INVALID_VALUE", cuda.add_edges, graph, [Edge(b, c), Edge(a, b)])
    assert cuda.edges(graph) == [Edge(a, b)]


def edges_are_removed_all_or_none():
    cuda = driver()
    graph = cuda.create_graph()
    a, b, c = (cuda.add_node(graph, [], EmptyParams()) for _ in range(3))
    there = [Edge(a, b, (1, 0, 1)), Edge(b, c)]
    cuda.add_edges(graph, there)
    for wrong in ([Edge(b, c), Edge(a, b)], [Edge(b, c), Edge(b, c)], [Edge(b, c), Edge(a, c)]):
        raises("CUDA_ERROR_INVALID_VALUE", cuda.remove_edges, graph, wrong)
        assert set(cuda.edges(graph)) == set(there)
    cuda.remove_edges(graph, there)
    assert cuda.edges(graph) == []


def arguments_may_be_any_bytes():
    cuda = driver()
    changing = tuple(map(bytearray, arguments(5, 6, 7)))
    node = cuda.add_node(cuda.create_graph(), [], KernelParams(function(cuda), PLAIN, changing))
    for data in changing:
        data[:] = bytes(len(data))
    assert cuda.node_params(node).arguments == arguments(5, 6, 7)


def an_unknown_form_of_conditional_is_refused():
    cuda = driver()
    graph = cuda.create_graph()
    params = ConditionalParams(cuda.create_conditional(graph), "unless")
    error = raises("CUDA_ERROR_INVALID_VALUE", cuda.add_node, graph, [], params)
    assert "if, while, switch" in str(error)
    assert cuda.nodes(graph) == []


def a_programmatic_kernel_node_has_programmatic_edges():
    from dataclasses import replace

    cuda = driver()
    graph = cuda.create_graph()
    plain = KernelParams(function(cuda), PLAIN, arguments())
    first = cuda.add_node(graph, [], plain)
    second = cuda.add_node(graph, [first], replace(plain, config=replace(PLAIN, programmatic=True)))
    assert cuda.edges(graph) == [Edge(first, second, (1, 0, 1))]


def conditional_nodes_give_their_bodies():
    cuda = driver()
    graph = cuda.create_graph()
    for form, size in (("if", 1), ("if", 2), ("while", 1), ("switch", 3)):
        handle = cuda.create_conditional(graph, 1)
        assert handle == 0x103
        node = cuda.add_node(graph, [], ConditionalParams(handle, form, size))
        params = cuda.node_params(node)
        assert (params.form, params.size, params.handle) == (form, size, handle)
        assert len(set(params.bodies)) == size
        cuda.add_node(params.bodies[-1], [], EmptyParams())
    assert cuda.create_conditional(graph, 0, assign_at_launch=False) == 0x100


def conditional_nodes_of_others_are_opaque_where_the_driver_does_not_tell():
    cuda = driver()
    graph = cuda.create_graph()
    made = ConditionalParams(cuda.create_conditional(graph), "while")
    node = cuda.add_node(graph, [], made)
    known = cuda.node_params(node)
    cuda.destroy_graph(graph)  # the stub keeps the node readable
    tells = cuda.device_info().driver_version >= (13, 2) and cuda._entry_points.has_node_params
    assert cuda.node_params(node) == (known if tells else OpaqueParams(NodeKind.CONDITIONAL))
