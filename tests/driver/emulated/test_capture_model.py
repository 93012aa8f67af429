"""Captures on the emulated driver beyond the contract: rules a device would crash or hang on."""

from __future__ import annotations

import sys

import pytest
from helpers.contract import Bench, refused
from helpers.kernels import ONE_BLOCK, add_one

from graphcore.driver import LEGACY_STREAM
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import CaptureState, StreamHandle
from graphcore.errors import CudaError

PER_THREAD_STREAM = StreamHandle(2)


@pytest.fixture
def bench() -> Bench:
    return Bench(EmulatedDriver())


def test_a_capture_of_an_unknown_mode_is_refused(bench: Bench) -> None:
    with pytest.raises(CudaError, match="mode: expected one of global, thread_local, relaxed"):
        bench.driver.begin_capture(bench.stream.handle, "strict")  # type: ignore[arg-type]
    with refused("INVALID_VALUE"):
        bench.driver.exchange_capture_mode("strict")  # type: ignore[arg-type]


def test_the_message_of_an_unjoined_capture_names_stream_and_nodes(bench: Bench) -> None:
    x = bench.put([1])
    side, forked = bench.new_stream(), bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.record_event(forked.handle, bench.stream.handle)
    bench.driver.wait_event(side.handle, forked.handle)
    bench.launch(add_one, x, 1, stream=side)
    (leaf,) = bench.driver.capture_status(side.handle).frontier
    words = f"stream {side.handle:#x} ends in nodes {leaf:#x}"
    with pytest.raises(CudaError, match=words):
        bench.driver.end_capture(bench.stream.handle)


def test_a_graph_is_captured_into_by_one_capture_at_a_time(bench: Bench) -> None:
    graph = bench.new_graph()
    other = bench.new_stream()
    with bench.capturing(graph=graph), refused("INVALID_VALUE"):
        bench.driver.begin_capture(other.handle, "thread_local", graph=graph)


def test_a_body_whose_graph_was_destroyed_takes_no_capture(bench: Bench) -> None:
    x = bench.put([1])
    graph = bench.driver.create_graph()
    _, _, bodies = bench.add_conditional(graph, "if")
    bench.driver.begin_capture(bench.stream.handle, "thread_local", graph=bodies[0])
    bench.launch(add_one, x, 1)
    bench.driver.destroy_graph(graph)
    with refused("INVALID_VALUE"):
        bench.driver.end_capture(bench.stream.handle)
    assert bench.driver.capture_status(bench.stream.handle).state is CaptureState.NONE


def test_nodes_of_a_graph_being_captured_are_not_taken_away(bench: Bench) -> None:
    x = bench.put([1])
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        (node,) = bench.driver.capture_status(bench.stream.handle).frontier
        with refused("INVALID_VALUE"):
            bench.driver.destroy_node(node)
    assert bench.driver.nodes(captured[0]) == [node]


def test_destroying_the_stream_of_a_capture_ends_the_capture(bench: Bench) -> None:
    x = bench.put([1])
    stream = bench.driver.create_stream(blocking=True)
    bench.driver.begin_capture(stream, "global")
    bench.driver.launch(bench.driver.function(add_one), ONE_BLOCK, add_one.pack(x, 1), stream)
    graph = bench.driver.capture_status(stream).graph
    assert graph is not None
    bench.driver.destroy_stream(stream)
    with refused("INVALID_VALUE"):
        bench.driver.nodes(graph)
    # nothing is left that would forbid calls
    bench.driver.free(bench.driver.alloc(8))
    bench.driver.synchronize_stream(LEGACY_STREAM)


def test_destroying_a_forked_stream_invalidates_the_capture(bench: Bench) -> None:
    side = bench.driver.create_stream(blocking=False)
    forked = bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.record_event(forked.handle, bench.stream.handle)
    bench.driver.wait_event(side, forked.handle)
    bench.driver.destroy_stream(side)
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.driver.end_capture(bench.stream.handle)


def test_the_legacy_stream_cannot_be_forked_into_a_capture(bench: Bench) -> None:
    forked = bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.record_event(forked.handle, bench.stream.handle)
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        bench.driver.wait_event(LEGACY_STREAM, forked.handle)
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.driver.end_capture(bench.stream.handle)


def test_a_stream_cannot_join_an_invalidated_capture(bench: Bench) -> None:
    side, forked = bench.new_stream(), bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.record_event(forked.handle, bench.stream.handle)
    bench.driver.invalidate_capture(bench.stream.handle)  # type: ignore[attr-defined]
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.driver.wait_event(side.handle, forked.handle)
    assert bench.driver.capture_status(side.handle).state is CaptureState.NONE
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.driver.set_capture_frontier(bench.stream.handle, [])


def test_another_drivers_capturing_stream_does_not_say_whether_it_is_blocking(
    bench: Bench,
) -> None:
    driver = bench.driver
    assert isinstance(driver, EmulatedDriver)
    other, theirs = driver.for_device(0), bench.new_stream(blocking=True).handle
    assert other.stream_is_blocking(theirs) is True
    with bench.capturing() as captured:
        with refused("STREAM_CAPTURE_UNSUPPORTED"):
            other.stream_is_blocking(bench.stream.handle)
        assert other.stream_is_blocking(theirs) is True
    assert bench.driver.nodes(captured[0]) == []
    assert other.stream_is_blocking(bench.stream.handle) is False


def test_destroying_an_executable_inside_a_capture_breaks_it_and_destroys_nothing(
    bench: Bench,
) -> None:
    x = bench.put([1])
    graph = bench.new_graph()
    bench.add_kernel(graph, add_one, x, 1)
    executable = bench.instantiate(graph)
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        bench.driver.destroy_exec(executable)
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.driver.end_capture(bench.stream.handle)
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


def test_the_per_thread_stream_captures_as_a_blocking_stream(bench: Bench) -> None:
    assert bench.driver.stream_is_blocking(PER_THREAD_STREAM)
    bench.driver.begin_capture(PER_THREAD_STREAM, "thread_local")
    with refused("STREAM_CAPTURE_IMPLICIT"):
        bench.driver.query_stream(LEGACY_STREAM)
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.driver.end_capture(PER_THREAD_STREAM)


def test_torch_is_recorded_only_where_it_is_loaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with bench.driver.recording(bench.stream.handle):
        assert "torch" not in sys.modules
