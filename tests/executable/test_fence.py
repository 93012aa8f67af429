"""Fences: whether the launches of an executable have run, without a cost for the launches."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from helpers.contract import Bench, in_thread
from helpers.kernels import add_one
from helpers.spinning import MILLISECOND, spin
from helpers.tensors import cuda_driver

import graphcore
from graphcore import GraphExec, LifecycleError
from graphcore.driver import Driver, Event
from graphcore.driver.emulated import EmulatedDriver


def adding(bench: Bench) -> GraphExec:
    x = bench.put([0])
    with graphcore.capture(driver=bench.driver) as capture:
        bench.launch(add_one, x, 1, stream=capture.stream)
    return capture.graph.instantiate()


class LateEvents(EmulatedDriver):
    """An emulated driver whose events have not happened until the test says so."""

    has_happened = False

    def query_event(self, event: int) -> bool:  # type: ignore[override]
        return self.has_happened and super().query_event(event)  # type: ignore[arg-type]


def test_what_was_never_launched_has_no_fence(bench: Bench) -> None:
    executable = adding(bench)
    assert executable.fence() is None
    assert executable.is_fenced


def test_a_fence_passes_once_its_launches_have_run(bench: Bench) -> None:
    executable = adding(bench)
    executable.launch(bench.stream)
    assert not executable.is_fenced
    fence = executable.fence()
    assert fence is not None
    assert executable.is_fenced
    fence.wait()
    assert fence.has_passed()
    fence.wait()


def test_a_launch_after_the_fence_is_seen(bench: Bench) -> None:
    executable = adding(bench)
    executable.launch(bench.stream)
    executable.fence()
    executable.launch(bench.stream)
    assert not executable.is_fenced
    with graphcore.capture(driver=bench.driver):
        pass  # a capture unbinds streams: that is no fence
    assert not executable.is_fenced


def test_a_fence_has_not_passed_while_its_event_has_not_happened() -> None:
    driver = LateEvents()
    bench = Bench(driver)
    executable = adding(bench)
    executable.launch(bench.stream)
    fence = executable.fence()
    assert fence is not None
    assert not fence.has_passed()
    driver.has_happened = True
    assert fence.has_passed()


def test_a_fence_is_not_asked_during_a_capture_which_it_would_break(bench: Bench) -> None:
    executable = adding(bench)
    executable.launch(bench.stream)
    fence = executable.fence()
    assert fence is not None
    bench.driver.synchronize()
    with graphcore.capture(driver=bench.driver) as capture:
        assert not fence.has_passed()
        with pytest.raises(LifecycleError, match="under way on this thread: waiting breaks it"):
            fence.wait()
    assert capture.graph is not None
    assert fence.has_passed()


def test_the_legacy_stream_is_not_touched_beside_a_capture_which_that_would_break(
    bench: Bench,
) -> None:
    executable = adding(bench)
    executable.launch(1)
    x = bench.alloc(4)
    with graphcore.capture(driver=bench.driver) as capture:
        fence = executable.fence()
        assert fence is not None
        assert not fence.has_passed()
        bench.launch(add_one, x, 1, stream=capture.stream)
    assert len(capture.graph.snapshot().nodes) == 1
    assert fence.has_passed()


def test_a_stream_that_captures_is_fenced_after_its_capture(bench: Bench) -> None:
    executable = adding(bench)
    executable.launch(bench.stream)
    bench.driver.begin_capture(bench.stream.handle, "relaxed")
    fence = executable.fence()
    assert fence is not None
    assert not fence.has_passed()
    with pytest.raises(LifecycleError, match="expected one that can be waited for"):
        fence.wait()
    bench.keep_graph(bench.driver.end_capture(bench.stream.handle))
    bench.driver.synchronize()
    assert fence.has_passed()


def test_a_stream_that_its_owner_closed_is_waited_for_through_the_device(bench: Bench) -> None:
    executable = adding(bench)
    stream = bench.driver.stream()
    executable.launch(stream)
    stream.close()
    fence = executable.fence()
    assert fence is not None
    assert fence.has_passed()


def test_the_device_is_not_waited_for_beside_a_capture_of_another_thread(bench: Bench) -> None:
    executable = adding(bench)
    stream = bench.driver.stream()
    executable.launch(stream)
    stream.close()
    fence = executable.fence()
    assert fence is not None
    x = bench.alloc(4)
    bench.driver.synchronize()
    with graphcore.capture(driver=bench.driver) as capture:
        with pytest.raises(LifecycleError, match="is gone, so that only the device as a whole"):
            in_thread(fence.wait)
        bench.launch(add_one, x, 1, stream=capture.stream)
    assert len(capture.graph.snapshot().nodes) == 1
    fence.wait()


def test_a_stream_that_was_launched_on_lives_as_long_as_it_may_be_asked(
    graphcore_driver: Driver,
) -> None:
    bench = Bench(graphcore_driver)
    executable = adding(bench)
    executable.launch(graphcore_driver.stream())  # nobody else holds it
    fence = executable.fence()
    assert fence is not None
    fence.wait()
    bench.close()


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 2], ids=["one stream", "another stream later"])
def test_a_fence_is_behind_a_kernel_that_still_runs(streams: int) -> None:
    bench = Bench(cuda_driver())
    x = bench.put([0])
    with graphcore.capture(driver=bench.driver) as capture:
        bench.launch(spin, x, 7.0, 300 * MILLISECOND, stream=capture.stream)
    executable = capture.graph.instantiate()
    for stream in [bench.new_stream() for _ in range(streams)]:
        # CUDA orders the launches of one executable: the newest one is the last to end
        executable.launch(stream)
    fence = executable.fence()
    assert fence is not None
    assert not fence.has_passed()
    fence.wait()
    assert fence.has_passed()
    assert all(stream.query() for stream in bench.streams)
    assert bench.get(x, 1) == [7.0]
    executable.close()
    bench.close()


class BegunBetween(EmulatedDriver):
    """A driver on which another thread begins a capture just before a fence records its event."""

    thread: threading.Thread | None = None

    def event(self, **more: Any) -> Event:
        if self.thread is not None and not self.thread.is_alive():
            self.thread.start()
            self.thread.join(0.05)
        return super().event(**more)


def test_no_capture_begins_between_the_look_and_the_record_on_the_legacy_stream() -> None:
    driver = BegunBetween()
    bench = Bench(driver)
    executable = adding(bench)
    executable.launch(1)
    graphs, may_end = [], threading.Event()

    def capture() -> None:
        with graphcore.capture(driver=driver) as capturing:
            assert may_end.wait(10)
        graphs.append(capturing.graph)

    driver.thread = threading.Thread(target=capture)
    fence = executable.fence()
    thread, driver.thread = driver.thread, None
    may_end.set()
    thread.join(10)
    assert fence is not None
    assert fence.has_passed()
    assert len(graphs) == 1
