"""What graphcore.driver.cuda does to the stub: captures into conditional bodies."""

import itertools

from helpers.stub_driver import (
    PLAIN,
    RICH,
    arguments,
    conditional_body,
    driver,
    function,
    raises,
    stub,
)

from graphcore.driver.records import (
    CaptureState,
    ChildParams,
    ConditionalParams,
    CopyOperand,
    Edge,
    EmptyParams,
    KernelParams,
    MemcpyParams,
    MemsetParams,
    NodeKind,
)


def a_capture_into_a_body_moves_in_at_its_end():
    cuda = driver()
    _, body = conditional_body(cuda)
    stream = cuda.create_stream(blocking=False)
    already = cuda.add_node(body, [], EmptyParams())
    cuda.begin_capture(stream, "thread_local", graph=body)
    cuda.launch(function(cuda), RICH, arguments(), stream)
    cuda.launch(function(cuda), PLAIN, arguments(8, 9, 10), stream)
    status = cuda.capture_status(stream)
    assert status.graph != body
    (last,) = status.frontier
    operand = CopyOperand(64)
    inner = cuda.create_graph()
    cuda.add_node(inner, [], EmptyParams())
    added = [
        MemcpyParams(operand, CopyOperand(128), 8),
        MemsetParams(64, 1, 4, 2),
        EmptyParams(),
        ChildParams(inner),
    ]
    for params in added:
        last = cuda.add_node(status.graph, [last], params)
    cuda.add_edges(status.graph, [Edge(cuda.nodes(status.graph)[0], last, (1, 0, 1))])
    destroyed = stub().stub_calls(b"cuGraphDestroy")
    assert cuda.end_capture(stream) == body
    # what was captured, and the copy of its child graph
    assert stub().stub_calls(b"cuGraphDestroy") == destroyed + 2
    first, *rest = cuda.nodes(body)
    assert first == already
    params = [cuda.node_params(node) for node in rest]
    assert params[0] == KernelParams(function(cuda), RICH, arguments())
    assert params[1] == KernelParams(function(cuda), PLAIN, arguments(8, 9, 10))
    assert params[2:5] == added[:3]
    assert [cuda.node_kind(node) for node in cuda.nodes(params[5].graph)] == [NodeKind.EMPTY]
    edges = {Edge(*pair) for pair in itertools.pairwise(rest)}
    assert set(cuda.edges(body)) == {*edges, Edge(rest[0], rest[-1], (1, 0, 1))}


def a_failed_capture_leaves_its_body_and_ends_another_given_graph():
    cuda = driver()
    graph, body = conditional_body(cuda)
    plain = cuda.create_graph()
    stream = cuda.create_stream(blocking=False)
    for given in (body, plain):
        cuda.begin_capture(stream, "thread_local", graph=given)
        cuda.launch(function(cuda), PLAIN, arguments(), stream)
        stub().stub_fail(b"cuStreamEndCapture", 901)
        raises("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", cuda.end_capture, stream)
    assert cuda.nodes(body) == []
    destroyed = stub().stub_calls(b"cuGraphDestroy")
    error = raises("CUDA_ERROR_INVALID_VALUE", cuda.destroy_graph, plain)
    assert "gone" in str(error)
    assert stub().stub_calls(b"cuGraphDestroy") == destroyed
    cuda.destroy_graph(graph)


def a_body_with_a_node_that_cannot_move_stays_as_it_was():
    cuda = driver()
    _, body = conditional_body(cuda)
    stream = cuda.create_stream(blocking=False)
    held = len(cuda._callbacks)
    cuda.begin_capture(stream, "thread_local", graph=body)
    cuda.launch(function(cuda), PLAIN, arguments(), stream)
    cuda.launch_host(lambda: None, stream)
    error = raises("CUDA_ERROR_NOT_SUPPORTED", cuda.end_capture, stream)
    assert "no captured node of kind host" in str(error)
    assert cuda.nodes(body) == []
    assert len(cuda._callbacks) == held
    cuda.begin_capture(stream, "thread_local", graph=body)
    cuda.launch(function(cuda), PLAIN, arguments(), stream)
    stub().stub_fail(b"cuGraphKernelNodeCopyAttributes", 1)
    raises("CUDA_ERROR_INVALID_VALUE", cuda.end_capture, stream)
    assert cuda.nodes(body) == []


def a_body_whose_graph_is_gone_takes_no_capture():
    cuda = driver()
    graph, body = conditional_body(cuda)
    stream = cuda.create_stream(blocking=False)
    handle = cuda.create_conditional(body)
    node = cuda.add_node(body, [], ConditionalParams(handle, "while"))
    inner = cuda.node_params(node).bodies[0]
    cuda.begin_capture(stream, "thread_local", graph=inner)
    cuda.launch(function(cuda), PLAIN, arguments(), stream)
    cuda.destroy_graph(graph)
    raises("CUDA_ERROR_INVALID_VALUE", cuda.end_capture, stream)
    assert cuda.capture_status(stream).state is CaptureState.NONE
