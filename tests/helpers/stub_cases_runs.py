"""What graphcore.driver.cuda does to the stub: host callbacks, capture, executables."""

import gc
import logging
import os
import struct
import sys
import types

from helpers.stub_driver import (
    PLAIN,
    RICH,
    arguments,
    driver,
    exec_arguments,
    function,
    raises,
    stub,
)

from graphcore.driver.cuda.executables import compiled_launch
from graphcore.driver.records import (
    CaptureState,
    ChildParams,
    CopyOperand,
    Edge,
    EmptyParams,
    EventParams,
    HostParams,
    KernelParams,
    LaunchConfig,
    MemcpyParams,
    MemsetParams,
    NodeKind,
    UpdateResult,
)

# ---- host callbacks ----


def a_host_node_fires_on_every_replay_and_is_released_with_its_last_holder():
    cuda = driver()
    fired = []
    held = len(cuda._callbacks)
    graph = cuda.create_graph()
    node = cuda.add_node(graph, [], HostParams(lambda: fired.append(1)))
    assert cuda.node_params(node).callback() is None
    executable = cuda.instantiate(graph)
    clone = cuda.clone_graph(graph)
    cuda.destroy_graph(graph)
    cuda.destroy_graph(clone)
    gc.collect()
    for _ in range(3):
        cuda.launch_graph(executable, 0)
    assert len(fired) == 4
    assert len(cuda._callbacks) == held + 1
    cuda.destroy_exec(executable)
    assert len(cuda._callbacks) == held


def a_captured_host_launch_becomes_a_node_in_stream_order():
    cuda = driver()
    fired = []
    stream = cuda.create_stream(blocking=False)
    cuda.begin_capture(stream, "thread_local")
    cuda.launch(function(cuda), PLAIN, arguments(), stream)
    cuda.launch_host(lambda: fired.append("host"), stream)
    cuda.launch(function(cuda), PLAIN, arguments(), stream)
    graph = cuda.end_capture(stream)
    kinds = [cuda.node_kind(node) for node in cuda.nodes(graph)]
    assert kinds == [NodeKind.KERNEL, NodeKind.HOST, NodeKind.KERNEL]
    a, b, c = cuda.nodes(graph)
    assert set(cuda.edges(graph)) == {Edge(a, b), Edge(b, c)}
    assert not fired
    executable = cuda.instantiate(graph)
    cuda.launch_graph(executable, stream)
    cuda.launch_graph(executable, stream)
    assert fired == ["host", "host"]


def a_host_launch_outside_a_capture_fires_once_and_is_forgotten():
    cuda = driver()
    fired, held = [], len(cuda._callbacks)
    cuda.launch_host(lambda: fired.append(1), cuda.create_stream(blocking=False))
    assert fired == [1]
    stub().stub_fail(b"cuLaunchHostFunc", 900)
    raises("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", cuda.launch_host, fired.clear, 0)
    assert len(cuda._callbacks) == held


def a_raising_callback_is_logged_and_the_graph_goes_on():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("graphcore").addHandler(handler)
    try:
        driver().launch_host(lambda: 1 / 0, 0)
    finally:
        logging.getLogger("graphcore").removeHandler(handler)
    assert [record.exc_info[0] for record in records] == [ZeroDivisionError]


def foreign_host_nodes_are_read_by_address():
    cuda = driver()
    node = cuda.add_node(cuda.create_graph(), [], HostParams(None, 0x10, 0x20))
    assert cuda.node_params(node) == HostParams(None, 0x10, 0x20)


# ---- capture ----


def captures_begin_tell_their_frontier_and_end():
    cuda = driver()
    stream = cuda.create_stream(blocking=False)
    assert cuda.capture_status(stream).state is CaptureState.NONE
    for mode in ("global", "thread_local", "relaxed"):
        cuda.begin_capture(stream, mode)
        cuda.launch(function(cuda), PLAIN, arguments(), stream)
        status = cuda.capture_status(stream)
        assert status.state is CaptureState.ACTIVE
        assert status.sequence > 0
        assert list(status.frontier) == cuda.nodes(status.graph)
        extra = cuda.add_node(status.graph, status.frontier, EmptyParams())
        cuda.set_capture_frontier(stream, [extra])
        assert cuda.capture_status(stream).frontier == (extra,)
        cuda.set_capture_frontier(stream, [])
        assert cuda.capture_status(stream).frontier == ()
        assert cuda.end_capture(stream) == status.graph
    body = cuda.create_graph()
    cuda.begin_capture(stream, "relaxed", graph=body)
    assert cuda.end_capture(stream) == body


def a_failed_capture_ends_with_its_code():
    cuda = driver()
    stream = cuda.create_stream(blocking=False)
    cuda.begin_capture(stream, "global")
    stub().stub_fail(b"cuStreamEndCapture", 901)
    raises("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", cuda.end_capture, stream)
    assert cuda.capture_status(stream).state is CaptureState.NONE


def an_unknown_capture_mode_is_refused():
    cuda = driver()
    stream = cuda.create_stream(blocking=False)
    error = raises("CUDA_ERROR_INVALID_VALUE", cuda.begin_capture, stream, "strict")
    assert "global, thread_local, relaxed" in str(error)
    raises("CUDA_ERROR_INVALID_VALUE", cuda.exchange_capture_mode, "strict")
    assert cuda.capture_status(stream).state is CaptureState.NONE


def the_capture_mode_of_the_thread_is_exchanged():
    cuda = driver()
    before = cuda.exchange_capture_mode("relaxed")
    assert cuda.exchange_capture_mode("thread_local") == "relaxed"
    assert cuda.exchange_capture_mode(before) == "thread_local"


# ---- executables ----


def a_refused_instantiation_names_node_and_reason():
    cuda = driver()
    graph = cuda.create_graph()
    node = cuda.add_node(graph, [], EmptyParams())
    stub().stub_fail(b"cuGraphInstantiateWithParams", 801)
    error = raises("CUDA_ERROR_NOT_SUPPORTED", cuda.instantiate, graph)
    assert error.node == node
    assert "MULTIPLE_CTXS_NOT_SUPPORTED" in error.hint
    assert cuda.instantiate(graph, auto_free=True, use_node_priority=True)


def update_refusals_are_values_with_reason_node_and_from_node():
    cuda = driver()
    one, other, more = (cuda.create_graph() for _ in range(3))
    cuda.add_node(one, [], EmptyParams())
    changed = cuda.add_node(other, [], MemsetParams(64, 0, 1, 1))
    executable = cuda.instantiate(one)
    assert cuda.update_exec(executable, one).result is UpdateResult.SUCCESS
    answer = cuda.update_exec(executable, other)
    assert answer.result is UpdateResult.NODE_TYPE_CHANGED
    assert (answer.node, answer.from_node) == (changed, changed)
    answer = cuda.update_exec(executable, more)
    assert answer.result is UpdateResult.TOPOLOGY_CHANGED
    assert (answer.node, answer.from_node) == (None, None)
    stub().stub_fail(b"cuGraphExecUpdate", 1)
    raises("CUDA_ERROR_INVALID_VALUE", cuda.update_exec, executable, one)


def bound_updates_make_one_call_and_tell_what_was_refused():
    cuda = driver()
    one, two, more = (cuda.create_graph() for _ in range(3))
    cuda.add_node(more, [], EmptyParams())
    executable = cuda.instantiate(one)
    update, refused = cuda.bind_update(executable, two), cuda.bind_update(executable, more)
    before = stub().stub_calls(b"cuGraphExecUpdate")
    current = stub().stub_calls(b"cuCtxGetCurrent")
    assert not update()
    assert refused()
    stub().stub_fail(b"cuGraphExecUpdate", 1)
    assert update()
    assert not update()
    assert stub().stub_calls(b"cuGraphExecUpdate") == before + 4
    assert stub().stub_calls(b"cuCtxGetCurrent") == current, "the handles know their context"


def bound_launches_return_and_failures_are_raised_from_the_result():
    cuda = driver()
    executable = cuda.instantiate(cuda.create_graph())
    stream = cuda.create_stream(blocking=False)
    before = stub().stub_calls(b"cuGraphLaunch")
    launch = cuda.bind_launch(executable, stream)
    assert not launch()
    stub().stub_fail(b"cuGraphLaunch", 700)
    raises("CUDA_ERROR_ILLEGAL_ADDRESS", cuda.raise_launch, launch())
    assert stub().stub_calls(b"cuGraphLaunch") == before + 2
    cuda.upload(executable, stream)


def uploads_aside_go_to_one_stream_of_the_device():
    cuda = driver()
    first, second = (cuda.instantiate(cuda.create_graph()) for _ in range(2))
    uploads = stub().stub_calls(b"cuGraphUpload")
    cuda.upload_aside(first)
    streams = stub().stub_calls(b"cuStreamCreateWithPriority")
    cuda.upload_aside(second)
    driver().upload_aside(first)
    assert stub().stub_calls(b"cuGraphUpload") == uploads + 3
    assert stub().stub_calls(b"cuStreamCreateWithPriority") == streams
    assert cuda.own_streams() == (), "it is nobody's to capture or to close"
    stub().stub_fail(b"cuGraphUpload", 2)
    raises("CUDA_ERROR_OUT_OF_MEMORY", cuda.upload_aside, first)


def a_closed_driver_destroys_the_streams_that_it_lent_and_nobody_holds():
    cuda = driver()
    held = cuda.capture_stream(blocking=True)
    idle = cuda.capture_stream().handle
    assert cuda.capture_stream().handle == idle, "lent again"
    assert set(cuda.own_streams()) == {held.handle, idle}
    cuda.close()
    assert cuda.own_streams() == (held.handle,)
    del held
    assert cuda.own_streams() == ()


def an_installed_cupy_is_called_for_launches_without_being_imported_whole():
    class CUDARuntimeError(RuntimeError):
        status = 700

    launched = []
    runtime = types.SimpleNamespace(graphLaunch=lambda *handles: launched.append(handles))
    names = ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api")
    sys.modules.update(dict.fromkeys(names, types.SimpleNamespace(runtime=runtime)))
    compiled_launch.cache_clear()
    try:
        cuda = driver()
        executable = cuda.instantiate(cuda.create_graph())
        before = stub().stub_calls(b"cuCtxGetCurrent")
        assert cuda.bind_launch(executable, 0x500)() is None
        assert stub().stub_calls(b"cuCtxGetCurrent") == before
        assert cuda.bind_launch(executable, 0)() is None
        assert stub().stub_calls(b"cuCtxGetCurrent") == before + 1, "whose default stream it is"
        assert launched == [(executable, 0x500), (executable, 1)]
        error = CUDARuntimeError("illegal")
        raises("CUDA_ERROR_ILLEGAL_ADDRESS", cuda.raise_launch, error)
        assert "cupy" not in sys.modules
        version = int(os.environ["STUB_CUDA_VERSION"])
        stub().stub_set(version, 2)
        beside = driver()
        stub().stub_set(version, 1)
        before = stub().stub_calls(b"cuGraphLaunch")
        assert not beside.bind_launch(executable, 0x500)()
        assert stub().stub_calls(b"cuGraphLaunch") == before + 1
        assert len(launched) == 2, "the runtime would work on whichever device is current"
    finally:
        sys.modules.update(dict.fromkeys(names))
        compiled_launch.cache_clear()


def nodes_of_an_executable_change_one_by_one():
    cuda = driver()
    graph, event = cuda.create_graph(), cuda.create_event(timing=False)
    fired = []
    operand = CopyOperand(64)
    changes = [
        (
            KernelParams(function(cuda), PLAIN, arguments()),
            KernelParams(function(cuda), PLAIN, arguments(8, 9, 10)),
        ),
        (MemcpyParams(operand, operand, 4), MemcpyParams(operand, CopyOperand(128), 8)),
        (MemsetParams(64, 1, 4, 2), MemsetParams(128, 2, 1, 3)),
        (HostParams(lambda: fired.append("old")), HostParams(lambda: fired.append("new"))),
        (ChildParams(cuda.create_graph()), ChildParams(cuda.create_graph())),
        (EventParams(event, NodeKind.EVENT_RECORD), EventParams(event, NodeKind.EVENT_RECORD)),
        (EventParams(event, NodeKind.EVENT_WAIT), EventParams(event, NodeKind.EVENT_WAIT)),
    ]
    nodes = [cuda.add_node(graph, [], before) for before, _ in changes]
    executable = cuda.instantiate(graph)
    for node, (_, after) in zip(nodes, changes, strict=True):
        cuda.set_exec_node_params(executable, node, after)
    assert exec_arguments(executable, 0) == arguments(8, 9, 10)
    cuda.launch_graph(executable, 0)
    assert fired == ["new"]
    raises(
        "CUDA_ERROR_NOT_SUPPORTED", cuda.set_exec_node_params, executable, nodes[0], EmptyParams()
    )
    cuda.set_node_enabled(executable, nodes[0], False)
    assert not cuda.node_enabled(executable, nodes[0])
    assert cuda.node_enabled(executable, nodes[1])


def a_bound_update_writes_new_bytes_and_new_shapes():
    cuda = driver()
    graph, loaded = cuda.create_graph(), function(cuda)
    params = KernelParams(loaded, PLAIN, arguments())
    node = cuda.add_node(graph, [], params)
    executable = cuda.instantiate(graph)
    update = cuda.bind_exec_kernel_update(executable, node, params)
    for step in range(3):
        update(KernelParams(loaded, PLAIN, arguments(100 + step, 200 + step, step)))
        assert exec_arguments(executable, 0) == arguments(100 + step, 200 + step, step)
    update(KernelParams(loaded, LaunchConfig((9, 1, 1), (32, 1, 1)), arguments()))
    wrong = KernelParams(loaded, PLAIN, arguments()[:2])
    raises("CUDA_ERROR_INVALID_VALUE", update, wrong)
    stub().stub_fail(b"cuGraphExecKernelNodeSetParams", 1)
    assert raises("CUDA_ERROR_INVALID_VALUE", update, params).node == node


def a_bound_update_commits_its_block():
    cuda = driver()
    graph, loaded = cuda.create_graph(), function(cuda)
    params = KernelParams(loaded, PLAIN, arguments())
    node = cuda.add_node(graph, [], params)
    executable = cuda.instantiate(graph)
    update = cuda.bind_exec_kernel_update(executable, node, params)
    assert update.arguments() == arguments()
    struct.pack_into("=QQi4x", update.block, 0, 5, 6, 7)
    assert exec_arguments(executable, 0) == arguments()
    assert not update.commit()
    assert exec_arguments(executable, 0) == arguments(5, 6, 7)
    update(KernelParams(loaded, PLAIN, arguments(8, 9, 10)))
    assert update.arguments() == arguments(8, 9, 10)
    stub().stub_fail(b"cuGraphExecKernelNodeSetParams", 1)
    result = update.commit()
    assert raises("CUDA_ERROR_INVALID_VALUE", update.refuse, result).node == node
    stub().stub_fail(b"cuGraphExecKernelNodeSetParams", 1)
    raises("CUDA_ERROR_INVALID_VALUE", update, KernelParams(loaded, PLAIN, arguments(1, 2, 3)))
    assert update.arguments() == arguments(8, 9, 10)  # what the node has


def arguments_of_many_nodes_change_at_once():
    cuda = driver()
    graph, loaded = cuda.create_graph(), function(cuda)
    shapes = (PLAIN, RICH, PLAIN)
    nodes = [
        cuda.add_node(graph, [], KernelParams(loaded, config, arguments())) for config in shapes
    ]
    changes = [
        (node, KernelParams(loaded, config, arguments(number, 2, 3)))
        for number, (node, config) in enumerate(zip(nodes, shapes, strict=True))
    ]
    cuda.set_arguments(changes)
    assert cuda.all_params(graph) == changes
    few = KernelParams(loaded, PLAIN, arguments()[:2])
    raises("CUDA_ERROR_INVALID_VALUE", cuda.set_arguments, [(nodes[0], few)])
    stub().stub_fail(b"cuGraphKernelNodeSetParams", 1)
    assert raises("CUDA_ERROR_INVALID_VALUE", cuda.set_arguments, changes[1:]).node == nodes[1]


def closing_the_driver_leaves_what_it_made():
    cuda = driver()
    graph = cuda.create_graph()
    cuda.close()
    assert cuda.nodes(graph) == []
