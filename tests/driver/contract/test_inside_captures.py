"""Contract: what else the host may do while one of its streams captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from helpers.contract import Bench, copy_1d, covers, fill_1d, in_thread, refused
from helpers.kernels import add_one, scale

from graphcore.driver import LEGACY_STREAM, CaptureMode, Stream, kernel
from graphcore.driver.records import (
    CaptureState,
    Edge,
    EmptyParams,
    ExecHandle,
    GraphHandle,
    NodeHandle,
    StreamHandle,
)

MODES: list[CaptureMode] = ["global", "thread_local", "relaxed"]


@dataclass
class Things:
    """What was made before the capture began."""

    x: int
    y: int
    other: Stream
    graph: GraphHandle
    node: NodeHandle
    executable: ExecHandle
    spare: ExecHandle | None = None


def _things(bench: Bench) -> Things:
    x, y = bench.put([1, 2]), bench.put([1, 2])
    graph = bench.new_graph()
    node = bench.add_kernel(graph, add_one, x, 1)
    return Things(x, y, bench.new_stream(), graph, node, bench.instantiate(graph))


Call = Callable[[Bench, Things], object]

# ---- calls that are allowed in every mode -------------------------------------------------------

ALLOWED: dict[str, Call] = {
    "device_info": lambda bench, _: bench.driver.device_info(),
    "context_id": lambda bench, _: bench.driver.context_id(),
    "memory_info": lambda bench, _: bench.driver.memory_info(),
    "allocation_of": lambda bench, made: bench.driver.allocation_of(made.x),
    "function": lambda bench, _: bench.driver.function(scale),
    "function_not_loaded": lambda bench, _: bench.driver.function(
        kernel("late", "", 'extern "C" __global__ void late() {}', lambda _config: None)
    ),
    "function_info": lambda bench, _: bench.driver.function_info(bench.driver.function(scale)),
    "stream_device": lambda bench, _: bench.driver.stream_device(bench.stream.handle),
    "stream_device_of_another": lambda bench, made: bench.driver.stream_device(made.other.handle),
    "stream_device_of_legacy": lambda bench, _: bench.driver.stream_device(LEGACY_STREAM),
    "stream_is_blocking": lambda bench, _: bench.driver.stream_is_blocking(bench.stream.handle),
    "capture_status_of_another": lambda bench, made: bench.driver.capture_status(made.other.handle),
    "capture_status_of_legacy": lambda bench, _: bench.driver.capture_status(LEGACY_STREAM),
    "a_stream": lambda bench, _: bench.driver.destroy_stream(
        bench.driver.create_stream(blocking=False)
    ),
    "a_blocking_stream": lambda bench, _: bench.driver.destroy_stream(
        bench.driver.create_stream(blocking=True)
    ),
    "an_event": lambda bench, _: bench.driver.destroy_event(bench.driver.create_event(timing=True)),
    "a_graph": lambda bench, _: bench.driver.destroy_graph(bench.driver.create_graph()),
    "clone_graph": lambda bench, made: bench.driver.destroy_graph(
        bench.driver.clone_graph(made.graph)
    ),
    "add_node": lambda bench, made: bench.add(made.graph, EmptyParams(), [made.node]),
    "add_edges": lambda bench, made: bench.driver.add_edges(
        made.graph, [Edge(bench.add(made.graph, EmptyParams()), made.node)]
    ),
    "destroy_node": lambda bench, made: bench.driver.destroy_node(made.node),
    "node_params": lambda bench, made: bench.driver.node_params(made.node),
    "set_node_params": lambda bench, made: bench.driver.set_node_params(
        made.node, bench.kernel_params(add_one, made.y, 1)
    ),
    "update_exec": lambda bench, made: bench.driver.update_exec(made.executable, made.graph),
    "set_exec_node_params": lambda bench, made: bench.driver.set_exec_node_params(
        made.executable, made.node, bench.kernel_params(add_one, made.y, 1)
    ),
    "set_node_enabled": lambda bench, made: bench.driver.set_node_enabled(
        made.executable, made.node, False
    ),
    "upload_on_another_stream": lambda bench, made: bench.driver.upload(
        made.executable, made.other.handle
    ),
}


@covers(
    "device_info",
    "context_id",
    "memory_info",
    "function",
    "allocation_of",
    "function_info",
    "stream_device",
    "stream_is_blocking",
    "capture_status",
    "set_node_params",
    "update_exec",
    "set_exec_node_params",
    "set_node_enabled",
    "upload",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", ALLOWED)
def test_a_capture_goes_on_after(bench: Bench, call: str, mode: CaptureMode) -> None:
    made = _things(bench)
    with bench.capturing(mode=mode) as captured:
        bench.launch(add_one, made.x, 1)
        ALLOWED[call](bench, made)
        status = bench.driver.capture_status(bench.stream.handle)
        assert status.state is CaptureState.ACTIVE
        bench.launch(scale, made.x, 3.0, 1)
    assert len(bench.driver.nodes(captured[0])) == 2
    assert bench.get(made.x, 1) == [1]


# ---- work on streams that do not capture --------------------------------------------------------


def _launch(bench: Bench, made: Things, stream: StreamHandle) -> None:
    params = bench.kernel_params(add_one, made.y, 2)
    bench.driver.launch(params.function, params.config, params.arguments, stream)


WORK: dict[str, Callable[[Bench, Things, StreamHandle], object]] = {
    "launch": _launch,
    "copy": lambda bench, made, stream: bench.driver.copy(
        copy_1d(made.y, made.y + 4, 4),
        stream,
    ),
    "fill": lambda bench, made, stream: bench.driver.fill(
        fill_1d(made.y, 0, 2),
        stream,
    ),
    "launch_graph": lambda bench, made, stream: bench.driver.launch_graph(
        made.executable,
        stream,
    ),
}
DONE: dict[str, list[float]] = {
    "launch": [1, 2, 2, 3],
    "copy": [1, 2, 2, 2],
    "fill": [1, 2, 0, 0],
    "launch_graph": [2, 2, 1, 2],
}


@covers("launch", "copy", "fill", "launch_graph", "begin_capture")
@pytest.mark.parametrize("stream", ["another", "legacy"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("work", WORK)
def test_work_beside_a_non_blocking_capture_runs_at_once(
    bench: Bench, work: str, mode: CaptureMode, stream: str
) -> None:
    made = _things(bench)
    with bench.capturing(mode=mode) as captured:
        bench.launch(scale, made.x, 100.0, 1)
        WORK[work](bench, made, LEGACY_STREAM if stream == "legacy" else made.other.handle)
    assert len(bench.driver.nodes(captured[0])) == 1
    bench.driver.synchronize()
    assert bench.get(made.x, 2) + bench.get(made.y, 2) == DONE[work]


@covers("launch_host")
@pytest.mark.parametrize("stream", ["another", "legacy"])
def test_a_host_callback_beside_a_capture_is_called_at_once(bench: Bench, stream: str) -> None:
    calls: list[int] = []
    other = bench.new_stream()
    with bench.capturing() as captured:
        handle = LEGACY_STREAM if stream == "legacy" else other.handle
        bench.driver.launch_host(lambda: calls.append(1), handle)
    bench.driver.synchronize()
    assert calls == [1]
    assert bench.driver.nodes(captured[0]) == []


@covers("record_event", "wait_event")
def test_events_between_streams_that_do_not_capture_leave_a_capture_alone(bench: Bench) -> None:
    made, third, event = _things(bench), bench.new_stream(), bench.new_event()
    with bench.capturing() as captured:
        bench.launch(add_one, made.y, 1, stream=made.other)
        bench.driver.record_event(event.handle, made.other.handle)
        bench.driver.wait_event(third.handle, event.handle)
        bench.launch(scale, made.y, 10.0, 1, stream=third)
    assert bench.driver.nodes(captured[0]) == []
    assert bench.get(made.y, 1) == [20]


@covers("elapsed_ms")
@pytest.mark.parametrize("thread", ["this_thread", "another_thread"])
@pytest.mark.parametrize("mode", MODES)
def test_the_time_between_events_from_before_may_be_asked_in_every_mode(
    bench: Bench, mode: CaptureMode, thread: str
) -> None:
    other = bench.new_stream()
    first, second = (bench.new_event(timing=True).handle for _ in range(2))
    bench.driver.record_event(first, other.handle)
    bench.driver.record_event(second, other.handle)
    bench.driver.synchronize()

    def ask() -> float:
        return bench.driver.elapsed_ms(first, second)

    with bench.capturing(mode=mode):
        assert (ask() if thread == "this_thread" else in_thread(ask)) >= 0


# ---- calls that a capture's mode forbids --------------------------------------------------------


def _instantiate(bench: Bench, made: Things) -> object:
    return bench.instantiate(made.graph)


FORBIDDEN: dict[str, Call] = {
    "instantiate": _instantiate,
    "destroy_exec": lambda bench, made: bench.driver.destroy_exec(made.spare),
}


@covers("instantiate", "destroy_exec")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", FORBIDDEN)
def test_only_a_relaxed_capture_goes_on_after(bench: Bench, call: str, mode: CaptureMode) -> None:
    made = _things(bench)
    made.spare = bench.driver.instantiate(made.graph)
    bench.driver.begin_capture(bench.stream.handle, mode)
    bench.launch(add_one, made.x, 1)
    if mode == "relaxed":
        FORBIDDEN[call](bench, made)
        graph = bench.keep_graph(bench.driver.end_capture(bench.stream.handle))
        assert len(bench.driver.nodes(graph)) == 1
    else:
        with refused("STREAM_CAPTURE_UNSUPPORTED"):
            FORBIDDEN[call](bench, made)
        with refused("STREAM_CAPTURE_INVALIDATED"):
            bench.driver.end_capture(bench.stream.handle)
    # what was refused was not done, and can be done now
    if call != "destroy_exec" or mode != "relaxed":
        bench.driver.destroy_exec(made.spare)
    bench.replay(made.executable)
    assert bench.get(made.x, 1) == [2]
