"""Contract: every way a capture breaks - the code, the invalidated capture, the usable stream."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.contract import Bench, copy_1d, covers, fill_1d, in_thread, refused
from helpers.kernels import ONE_BLOCK, add_one

from graphcore.driver import LEGACY_STREAM, CaptureMode, Event, Stream
from graphcore.driver.records import CaptureState, ExecHandle

MODES: list[CaptureMode] = ["global", "thread_local", "relaxed"]


def assert_usable(bench: Bench, stream: Stream) -> None:
    """The stream is out of capture, runs work, and captures again."""
    assert bench.driver.capture_status(stream.handle).state is CaptureState.NONE
    x = bench.put([1])
    bench.launch(add_one, x, 1, stream=stream)
    bench.driver.synchronize_stream(stream.handle)
    assert bench.get(x, 1) == [2]
    with bench.capturing(stream) as captured:
        bench.launch(add_one, x, 1, stream=stream)
    bench.run(captured[0])
    assert bench.get(x, 1) == [3]


def assert_invalidated(bench: Bench, stream: Stream) -> None:
    """The capture has no graph any more, ends exactly once, and leaves a usable stream."""
    status = bench.driver.capture_status(stream.handle)
    assert status.state is CaptureState.INVALIDATED
    assert status.graph is None
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.driver.end_capture(stream.handle)
    assert_usable(bench, stream)
    with refused("ILLEGAL_STATE"):
        bench.driver.end_capture(stream.handle)


# ---- calls the host may not make about a capturing stream ---------------------------------------

WAITS: dict[str, Callable[[Bench, int], object]] = {
    "synchronize_stream": lambda bench, _: bench.driver.synchronize_stream(bench.stream.handle),
    "query_stream": lambda bench, _: bench.driver.query_stream(bench.stream.handle),
    "synchronize": lambda bench, _: bench.driver.synchronize(),
    "read": lambda bench, x: bench.driver.read(x, 4),
    "write": lambda bench, x: bench.driver.write(x, b"1234"),
}


@covers("synchronize_stream", "query_stream", "synchronize", "read", "write")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", WAITS)
def test_waiting_for_a_capturing_stream_is_unsupported_in_every_mode(
    bench: Bench, call: str, mode: CaptureMode
) -> None:
    x = bench.put([1])
    bench.driver.begin_capture(bench.stream.handle, mode)
    bench.launch(add_one, x, 1)
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        WAITS[call](bench, x)
    assert_invalidated(bench, bench.stream)
    assert bench.get(x, 1) == [1]


@covers("synchronize_stream")
def test_waiting_for_a_stream_forked_into_a_capture_breaks_it(bench: Bench) -> None:
    side, forked = bench.new_stream(), bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.record_event(forked.handle, bench.stream.handle)
    bench.driver.wait_event(side.handle, forked.handle)
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        bench.driver.synchronize_stream(side.handle)
    assert_invalidated(bench, bench.stream)
    assert_usable(bench, side)


@covers("synchronize_stream", "query_stream", "synchronize", "read", "write")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", WAITS)
def test_waiting_for_a_capturing_stream_on_another_thread_is_unsupported_in_every_mode(
    bench: Bench, call: str, mode: CaptureMode
) -> None:
    x = bench.put([1])
    bench.driver.begin_capture(bench.stream.handle, mode)
    bench.launch(add_one, x, 1)
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        in_thread(lambda: WAITS[call](bench, x))
    assert_invalidated(bench, bench.stream)


@covers("launch_graph")
@pytest.mark.parametrize("mode", MODES)
def test_an_executable_cannot_be_launched_into_a_capture(bench: Bench, mode: CaptureMode) -> None:
    x = bench.put([1])
    with bench.capturing() as inner:
        bench.launch(add_one, x, 1)
    executable = bench.instantiate(inner[0])
    bench.driver.begin_capture(bench.stream.handle, mode)
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        bench.driver.launch_graph(executable, bench.stream.handle)
    assert_invalidated(bench, bench.stream)
    bench.replay(executable)
    assert bench.get(x, 1) == [2]


@covers("upload")
@pytest.mark.parametrize("mode", MODES)
def test_an_executable_cannot_be_uploaded_into_a_capture(bench: Bench, mode: CaptureMode) -> None:
    executable = bench.instantiate(bench.new_graph())
    bench.driver.begin_capture(bench.stream.handle, mode)
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        bench.driver.upload(executable, bench.stream.handle)
    assert_invalidated(bench, bench.stream)


# ---- calls that capture modes forbid ------------------------------------------------------------


# about a stream and events that have nothing to do with the capture
UNINVOLVED: dict[str, Callable[[Bench, Stream, Event], object]] = {
    "synchronize_stream": lambda bench, stream, _: bench.driver.synchronize_stream(stream.handle),
    "query_stream": lambda bench, stream, _: bench.driver.query_stream(stream.handle),
    "synchronize_legacy": lambda bench, *_: bench.driver.synchronize_stream(LEGACY_STREAM),
    "query_legacy": lambda bench, *_: bench.driver.query_stream(LEGACY_STREAM),
    "synchronize_event": lambda bench, _, event: bench.driver.synchronize_event(event.handle),
    "query_event": lambda bench, _, event: bench.driver.query_event(event.handle),
}


@covers("synchronize_stream", "query_stream", "synchronize_event", "query_event")
@pytest.mark.parametrize("thread", ["this_thread", "another_thread"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", UNINVOLVED)
def test_waiting_for_what_has_nothing_to_do_with_a_capture_is_as_its_mode_says(
    bench: Bench, call: str, mode: CaptureMode, thread: str
) -> None:
    x, other, event = bench.put([1]), bench.new_stream(), bench.new_event(timing=True)
    bench.driver.record_event(event.handle, other.handle)
    bench.driver.synchronize()

    def ask() -> object:
        return UNINVOLVED[call](bench, other, event)

    def act() -> object:
        return ask() if thread == "this_thread" else in_thread(ask)

    bench.driver.begin_capture(bench.stream.handle, mode)
    bench.launch(add_one, x, 1)
    if mode == "global" or (mode == "thread_local" and thread == "this_thread"):
        with refused("STREAM_CAPTURE_UNSUPPORTED"):
            act()
        assert_invalidated(bench, bench.stream)
    else:
        act()
        graph = bench.keep_graph(bench.driver.end_capture(bench.stream.handle))
        assert len(bench.driver.nodes(graph)) == 1


UNSAFE: dict[str, Callable[[Bench, int, int], object]] = {
    "alloc": lambda bench, _x, _pinned: bench.driver.alloc(64),
    "free": lambda bench, x, _pinned: bench.driver.free(x),
    "alloc_pinned": lambda bench, _x, _pinned: bench.driver.alloc_pinned(64),
    "free_pinned": lambda bench, _x, pinned: bench.driver.free_pinned(pinned),
}


@covers("alloc", "free", "alloc_pinned", "free_pinned")
@pytest.mark.parametrize("mode", ["global", "thread_local"])
@pytest.mark.parametrize("call", UNSAFE)
def test_unsafe_calls_of_the_capturing_thread_break_its_capture(
    bench: Bench, call: str, mode: CaptureMode
) -> None:
    x, pinned = bench.driver.alloc(64), bench.driver.alloc_pinned(64)
    bench.driver.begin_capture(bench.stream.handle, mode)
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        UNSAFE[call](bench, x, pinned)
    assert_invalidated(bench, bench.stream)
    # what was refused was not done
    bench.driver.free(x)
    bench.driver.free_pinned(pinned)


@covers("alloc", "free", "alloc_pinned", "free_pinned")
@pytest.mark.parametrize("call", UNSAFE)
def test_unsafe_calls_of_another_thread_break_a_global_capture(bench: Bench, call: str) -> None:
    x, pinned = bench.driver.alloc(64), bench.driver.alloc_pinned(64)
    bench.driver.begin_capture(bench.stream.handle, "global")
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        in_thread(lambda: UNSAFE[call](bench, x, pinned))
    assert_invalidated(bench, bench.stream)
    bench.driver.free(x)
    bench.driver.free_pinned(pinned)


@covers("exchange_capture_mode", "alloc")
def test_a_thread_that_ignores_the_others_leaves_a_global_capture_alone(bench: Bench) -> None:
    def allocate() -> int:
        bench.driver.exchange_capture_mode("thread_local")
        return bench.driver.alloc(64)

    with bench.capturing(mode="global"):
        address = in_thread(allocate)
    bench.driver.free(address)


# ---- ending wrongly -----------------------------------------------------------------------------


@covers("end_capture")
def test_ending_without_a_capture_is_an_illegal_state(bench: Bench) -> None:
    with refused("ILLEGAL_STATE"):
        bench.driver.end_capture(bench.stream.handle)
    assert_usable(bench, bench.stream)


@covers("begin_capture")
def test_a_second_capture_on_a_capturing_stream_is_an_illegal_state(bench: Bench) -> None:
    x = bench.put([1])
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        with refused("ILLEGAL_STATE"):
            bench.driver.begin_capture(bench.stream.handle, "thread_local")
    assert len(bench.driver.nodes(captured[0])) == 1


@covers("end_capture")
def test_ending_on_a_forked_stream_is_unmatched(bench: Bench) -> None:
    x = bench.put([1])
    side, forked = bench.new_stream(), bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.record_event(forked.handle, bench.stream.handle)
    bench.driver.wait_event(side.handle, forked.handle)
    bench.launch(add_one, x, 1, stream=side)
    with refused("STREAM_CAPTURE_UNMATCHED"):
        bench.driver.end_capture(side.handle)
    assert_invalidated(bench, bench.stream)
    assert_usable(bench, side)


@covers("end_capture")
def test_work_left_on_a_forked_stream_is_unjoined(bench: Bench) -> None:
    x = bench.put([1])
    side, forked = bench.new_stream(), bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.record_event(forked.handle, bench.stream.handle)
    bench.driver.wait_event(side.handle, forked.handle)
    bench.launch(add_one, x, 1, stream=side)
    with refused("STREAM_CAPTURE_UNJOINED"):
        bench.driver.end_capture(bench.stream.handle)
    assert_usable(bench, bench.stream)
    assert_usable(bench, side)
    assert bench.get(x, 1) == [1]


@covers("end_capture")
def test_work_after_the_join_is_unjoined_again(bench: Bench) -> None:
    x = bench.put([1])
    side = bench.new_stream()
    forked, joined = bench.new_event(), bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.record_event(forked.handle, bench.stream.handle)
    bench.driver.wait_event(side.handle, forked.handle)
    bench.launch(add_one, x, 1, stream=side)
    bench.driver.record_event(joined.handle, side.handle)
    bench.driver.wait_event(bench.stream.handle, joined.handle)
    bench.launch(add_one, x, 1, stream=side)
    with refused("STREAM_CAPTURE_UNJOINED"):
        bench.driver.end_capture(bench.stream.handle)
    assert_usable(bench, bench.stream)


@covers("end_capture")
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_another_thread_cannot_end_a_capture(bench: Bench, mode: CaptureMode) -> None:
    x = bench.put([1])
    bench.driver.begin_capture(bench.stream.handle, mode)
    bench.launch(add_one, x, 1)
    with refused("STREAM_CAPTURE_WRONG_THREAD"):
        in_thread(lambda: bench.driver.end_capture(bench.stream.handle))
    # the capture is over all the same
    with refused("ILLEGAL_STATE"):
        bench.driver.end_capture(bench.stream.handle)
    assert_usable(bench, bench.stream)
    assert bench.get(x, 1) == [1]


# ---- events and other captures ------------------------------------------------------------------


@covers("wait_event")
def test_waiting_for_an_event_from_outside_is_isolation(bench: Bench) -> None:
    outside = bench.new_event()
    bench.driver.record_event(outside.handle, bench.new_stream().handle)
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    with refused("STREAM_CAPTURE_ISOLATION"):
        bench.driver.wait_event(bench.stream.handle, outside.handle)
    assert_invalidated(bench, bench.stream)


@covers("wait_event")
def test_waiting_for_an_event_never_recorded_does_nothing(bench: Bench) -> None:
    x, event = bench.put([1]), bench.new_event()
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        bench.driver.wait_event(bench.stream.handle, event.handle)
        bench.launch(add_one, x, 1)
    assert len(bench.driver.nodes(captured[0])) == 2
    assert len(bench.driver.edges(captured[0])) == 1


@covers("wait_event")
def test_waiting_for_another_captures_event_is_a_merge(bench: Bench) -> None:
    x = bench.put([1])
    other, theirs = bench.new_stream(), bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.begin_capture(other.handle, "thread_local")
    bench.launch(add_one, x, 1, stream=other)
    bench.driver.record_event(theirs.handle, other.handle)
    with refused("STREAM_CAPTURE_MERGE"):
        bench.driver.wait_event(bench.stream.handle, theirs.handle)
    for stream in (bench.stream, other):
        with refused("STREAM_CAPTURE_INVALIDATED"):
            bench.driver.end_capture(stream.handle)
    assert_usable(bench, bench.stream)
    assert_usable(bench, other)


@covers("elapsed_ms")
def test_the_time_between_events_of_a_capture_is_refused_and_breaks_nothing(bench: Bench) -> None:
    x = bench.put([1])
    first, second = bench.new_event(timing=True), bench.new_event(timing=True)
    with bench.capturing() as captured:
        bench.driver.record_event(first.handle, bench.stream.handle)
        bench.launch(add_one, x, 1)
        bench.driver.record_event(second.handle, bench.stream.handle)
        with refused("CAPTURED_EVENT"):
            bench.driver.elapsed_ms(first.handle, second.handle)
    assert len(bench.driver.nodes(captured[0])) == 1


@covers("query_event", "synchronize_event")
@pytest.mark.parametrize("call", ["query_event", "synchronize_event"])
def test_asking_about_an_event_of_a_capture_breaks_it(bench: Bench, call: str) -> None:
    captured = bench.new_event()
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.record_event(captured.handle, bench.stream.handle)
    with refused("CAPTURED_EVENT"):
        getattr(bench.driver, call)(captured.handle)
    assert_invalidated(bench, bench.stream)


PAST: dict[str, Callable[[Bench, Event, Event], object]] = {
    "query_event": lambda bench, first, _: bench.driver.query_event(first.handle),
    "synchronize_event": lambda bench, first, _: bench.driver.synchronize_event(first.handle),
    "elapsed_ms": lambda bench, first, second: bench.driver.elapsed_ms(first.handle, second.handle),
    "wait_event": lambda bench, first, _: bench.driver.wait_event(
        bench.stream.handle, first.handle
    ),
}


@covers("query_event", "synchronize_event", "elapsed_ms", "wait_event", "record_event")
@pytest.mark.parametrize("call", PAST)
def test_an_event_of_a_capture_that_is_over_says_nothing_until_it_is_recorded_again(
    bench: Bench, call: str
) -> None:
    first, second = bench.new_event(timing=True), bench.new_event(timing=True)
    x = bench.put([1])
    with bench.capturing():
        bench.driver.record_event(first.handle, bench.stream.handle)
        bench.launch(add_one, x, 1)
        bench.driver.record_event(second.handle, bench.stream.handle)
    with refused("INVALID_VALUE"):
        PAST[call](bench, first, second)
    for event in (first, second):
        bench.driver.record_event(event.handle, bench.stream.handle)
        bench.driver.synchronize_event(event.handle)
    PAST[call](bench, first, second)
    assert_usable(bench, bench.stream)


@covers("wait_event")
def test_an_event_of_a_capture_that_is_over_breaks_the_next(bench: Bench) -> None:
    x, event = bench.put([1]), bench.new_event()
    with bench.capturing():
        bench.driver.record_event(event.handle, bench.stream.handle)
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.launch(add_one, x, 1)
    with refused("INVALID_VALUE"):
        bench.driver.wait_event(bench.stream.handle, event.handle)
    assert_invalidated(bench, bench.stream)


# ---- the legacy stream --------------------------------------------------------------------------


@covers("begin_capture")
def test_the_legacy_stream_cannot_capture(bench: Bench) -> None:
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        bench.driver.begin_capture(LEGACY_STREAM, "thread_local")


def _launch_legacy(bench: Bench, x: int, _executable: ExecHandle) -> None:
    function = bench.driver.function(add_one)
    bench.driver.launch(function, ONE_BLOCK, add_one.pack(x, 1), LEGACY_STREAM)


LEGACY_WORK: dict[str, Callable[[Bench, int, ExecHandle], object]] = {
    "launch": _launch_legacy,
    "copy": lambda bench, x, _: bench.driver.copy(copy_1d(x, x + 4, 4), LEGACY_STREAM),
    "fill": lambda bench, x, _: bench.driver.fill(fill_1d(x, 0, 1), LEGACY_STREAM),
    "record_event": lambda bench, *_: bench.driver.record_event(
        bench.new_event().handle, LEGACY_STREAM
    ),
    "launch_graph": lambda bench, _, executable: bench.driver.launch_graph(
        executable, LEGACY_STREAM
    ),
    "synchronize_stream": lambda bench, *_: bench.driver.synchronize_stream(LEGACY_STREAM),
    "query_stream": lambda bench, *_: bench.driver.query_stream(LEGACY_STREAM),
}


@covers("launch", "copy", "fill", "record_event", "synchronize_stream")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", LEGACY_WORK)
def test_legacy_work_beside_a_blocking_capture_is_an_implicit_dependency(
    bench: Bench, call: str, mode: CaptureMode
) -> None:
    x = bench.put([1, 5])
    executable, blocking = bench.instantiate(bench.new_graph()), bench.new_stream(blocking=True)
    bench.driver.begin_capture(blocking.handle, mode)
    bench.launch(add_one, x, 1, stream=blocking)
    with refused("STREAM_CAPTURE_IMPLICIT"):
        LEGACY_WORK[call](bench, x, executable)
    assert_invalidated(bench, blocking)
    assert bench.get(x, 1) == [1]


@covers("launch_host")
@pytest.mark.parametrize("mode", MODES)
def test_a_legacy_callback_beside_a_blocking_capture_is_implicit_and_breaks_nothing(
    bench: Bench, mode: CaptureMode
) -> None:
    x, blocking = bench.put([1]), bench.new_stream(blocking=True)
    calls: list[int] = []
    with bench.capturing(blocking, mode) as captured:
        bench.launch(add_one, x, 1, stream=blocking)
        with refused("STREAM_CAPTURE_IMPLICIT"):
            bench.driver.launch_host(lambda: calls.append(1), LEGACY_STREAM)
    assert len(bench.driver.nodes(captured[0])) == 1
    bench.driver.synchronize()
    assert calls == []


@covers("capture_status")
def test_the_legacy_streams_status_is_hidden_by_a_blocking_capture_and_breaks_nothing(
    bench: Bench,
) -> None:
    x = bench.put([1])
    blocking = bench.new_stream(blocking=True)
    with bench.capturing(blocking) as captured:
        bench.launch(add_one, x, 1, stream=blocking)
        with refused("STREAM_CAPTURE_IMPLICIT"):
            bench.driver.capture_status(LEGACY_STREAM)
    assert len(bench.driver.nodes(captured[0])) == 1
    assert bench.driver.capture_status(LEGACY_STREAM).state is CaptureState.NONE


# ---- after the first error ----------------------------------------------------------------------


@covers("launch", "capture_status")
def test_work_after_the_error_answers_invalidated(bench: Bench) -> None:
    x = bench.put([1])
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    with refused("STREAM_CAPTURE_UNSUPPORTED"):
        bench.driver.synchronize_stream(bench.stream.handle)
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.launch(add_one, x, 1)
    assert_invalidated(bench, bench.stream)


@covers("destroy_graph", "capture_status")
def test_the_graph_of_a_capture_under_way_cannot_be_destroyed(bench: Bench) -> None:
    x = bench.put([1])
    with bench.capturing() as captured:
        bench.launch(add_one, x, 1)
        graph = bench.driver.capture_status(bench.stream.handle).graph
        assert graph is not None
        with refused("ILLEGAL_STATE"):
            bench.driver.destroy_graph(graph)
    assert captured == [graph]
    assert len(bench.driver.nodes(graph)) == 1
