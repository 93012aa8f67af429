"""Threads that prepare and make captures on one driver at the same time do not break each other."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from helpers.contract import in_thread
from helpers.tensors import filled, poisoned, replay, replayed

import graphcore
from graphcore import CaptureError, CudaError, Graph, LifecycleError, OutputGuard, StaticInputs
from graphcore.driver import LEGACY_STREAM, Driver, active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.executable.graph_exec import forget_bindings


def test_a_function_is_warmed_up_and_captured_while_another_thread_captures(
    graphcore_driver: Driver,
) -> None:
    x, y, z = (filled(graphcore_driver, 1.0) for _ in range(3))
    sum_of, out = poisoned(graphcore_driver), poisoned(graphcore_driver)

    def step() -> None:
        sum_of.copy_(y + z)

    with graphcore.capture(driver=graphcore_driver) as first:
        out.copy_(x * 2)
        second: Graph = in_thread(lambda: graphcore.capture_function(step, driver=graphcore_driver))
        out.add_(1)
    assert replayed(first.graph, out) == [3.0] * 4
    assert replayed(second, sum_of) == [2.0] * 4


@pytest.mark.parametrize("on_legacy_work", ["error", "ignore"])
def test_a_warm_up_reads_what_the_current_stream_wrote_before(
    graphcore_driver: Driver, on_legacy_work: str
) -> None:
    x, seen = filled(graphcore_driver, 0.0, 1 << 20), filled(graphcore_driver, 0.0, 1 << 20)
    for _ in range(50):
        x.add_(1)
    with graphcore.capture_function(
        lambda: seen.copy_(x), warmup=1, driver=graphcore_driver, on_legacy_work=on_legacy_work
    ):
        assert torch.equal(seen, torch.full_like(seen, 50.0))


def test_a_warm_up_that_fails_is_waited_for_and_keeps_its_own_error() -> None:
    driver = EmulatedDriver()

    def step() -> None:
        driver.faults.inject("synchronize_stream")
        raise KeyError("the step's own")

    with pytest.raises(KeyError, match="the step's own") as caught:
        graphcore.capture_function(step, warmup=1, driver=driver)
    assert "waiting for the warm-up that failed" in caught.value.__notes__[0]


def test_no_wait_for_the_whole_device_is_asked_for() -> None:
    driver = EmulatedDriver()
    driver.faults.inject("synchronize")
    x = filled(driver, 1.0)
    graph = graphcore.capture_function(lambda: x.add_(1), warmup=2, driver=driver)
    assert x.tolist() == [3.0] * 4
    assert len(graph.snapshot().nodes) == 1


# ---- launches of other threads on the legacy stream ---------------------------------------------


def test_a_launch_on_the_legacy_stream_that_would_break_a_capture_is_refused_and_breaks_nothing(
    graphcore_driver: Driver,
) -> None:
    x, y = filled(graphcore_driver, 1.0), filled(graphcore_driver, 1.0)
    executable = graphcore.capture_function(
        lambda: y.add_(1), warmup=1, driver=graphcore_driver
    ).instantiate()
    executable.launch(LEGACY_STREAM)  # bound to it: the capture makes it look again
    graphcore_driver.synchronize()
    before = y.tolist()
    own = graphcore_driver.stream()
    with graphcore.capture(driver=graphcore_driver, mode="relaxed") as capture:
        for stream in (LEGACY_STREAM, 0):
            for launch in (in_thread, lambda action: action()):  # the capturing thread's too
                with pytest.raises(CaptureError, match="legacy stream, on which work") as caught:
                    launch(partial(executable.launch, stream))
        in_thread(lambda: executable.launch(own))
        x.add_(1)
    error = caught.value
    assert error.code == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
    assert "the capture begun at" in str(error)
    assert "on_legacy_work='ignore'" in str(error)
    assert len(capture.graph.snapshot().nodes) == 1
    own.synchronize()
    executable.launch(LEGACY_STREAM)
    graphcore_driver.synchronize()
    assert y.tolist() == [value + 2 for value in before], "own stream and afterwards, no more"


class _Paused(EmulatedDriver):
    """Its launches on the legacy stream stop halfway: looked at, and not yet with the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def bind_launch(self, executable: int, stream: int) -> Callable[[], Any]:
        launch = super().bind_launch(executable, stream)

        def paused() -> Any:
            self.began.set()
            assert self.may_go_on.wait(20)
            return launch()

        return paused if stream == LEGACY_STREAM else launch


@pytest.mark.parametrize("waits", [True, False], ids=["it waits", "control: it does not"])
def test_a_capture_that_begins_while_another_thread_launches_on_the_legacy_stream_waits(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not waits:
        monkeypatch.setattr(active, "_wait_for_legacy_launches", lambda capture: None)
    driver = _Paused()
    x, y = filled(driver, 1.0), filled(driver, 1.0)
    executable = graphcore.capture_function(lambda: y.add_(1), driver=driver).instantiate()
    before = y.tolist()
    refused: list[CudaError] = []
    has_captured = threading.Event()

    def launch() -> None:
        try:
            executable.launch(LEGACY_STREAM)
        except CudaError as error:
            refused.append(error)

    def capture() -> Graph:
        with graphcore.capture(driver=driver) as made:
            x.add_(1)
            has_captured.set()
            driver.may_go_on.wait(20)
            launching.join(20)
        return made.graph

    launching = threading.Thread(target=launch)
    launching.start()
    assert driver.began.wait(20)
    with ThreadPoolExecutor(1) as others:
        found = others.submit(capture)
        assert has_captured.wait(0.2) != waits
        driver.may_go_on.set()
        if waits:
            assert len(found.result(20).snapshot().nodes) == 1
        else:
            with pytest.raises(CaptureError, match="STREAM_CAPTURE_IMPLICIT"):
                found.result(20)
    assert bool(refused) != waits
    driver.synchronize()
    assert y.tolist() == [value + waits for value in before]
    assert not active.LEGACY_LAUNCHES


def test_a_capture_waits_for_no_launch_of_a_thread_that_is_gone() -> None:
    driver = EmulatedDriver()
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    assert gone.ident is not None
    active.LEGACY_LAUNCHES[gone.ident] = None  # as a fork leaves it
    try:
        start = time.monotonic()
        with graphcore.capture(driver=driver):
            pass
        assert time.monotonic() - start < 5
    finally:
        del active.LEGACY_LAUNCHES[gone.ident]


def test_no_capture_is_broken_while_another_thread_launches_on_the_legacy_stream_all_the_time(
    graphcore_driver: Driver,
) -> None:
    x, y = filled(graphcore_driver, 0.0), filled(graphcore_driver, 0.0)
    executable = graphcore.capture_function(
        lambda: y.add_(1), driver=graphcore_driver
    ).instantiate()
    graphcore_driver.synchronize()
    before, launched, refusals = y.tolist(), [0], set()
    is_over = threading.Event()

    def launch() -> None:
        while not is_over.is_set():
            try:
                executable.launch()
                launched[0] += 1
            except CaptureError as error:
                refusals.add(error.code)

    turns = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    launching = threading.Thread(target=launch)
    launching.start()
    try:
        for _ in range(300):
            with graphcore.capture(driver=graphcore_driver) as made:
                x.add_(1)
            made.graph.close()
    finally:
        is_over.set()
        launching.join(20)
        sys.setswitchinterval(turns)
    graphcore_driver.synchronize()
    assert y.tolist() == [value + launched[0] for value in before]
    assert launched[0] > 0
    assert refusals == {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"}, "control: they did meet"


def test_a_launch_on_the_legacy_stream_beside_a_non_blocking_capture_runs(
    graphcore_driver: Driver,
) -> None:
    x, y = filled(graphcore_driver, 1.0), filled(graphcore_driver, 1.0)
    executable = graphcore.capture_function(
        lambda: y.add_(1), warmup=0, driver=graphcore_driver
    ).instantiate()
    with graphcore.capture(driver=graphcore_driver, on_legacy_work="ignore") as capture:
        in_thread(lambda: executable.launch(LEGACY_STREAM))
        x.add_(1)
    graphcore_driver.synchronize()
    assert y.tolist() == [2.0] * 4
    assert len(capture.graph.snapshot().nodes) == 1


def _inputs(driver: Driver) -> StaticInputs:
    return StaticInputs({"x": filled(driver, 0.0)}, fill={"x": 2.0}, driver=driver)


def _guarded(driver: Driver) -> OutputGuard:
    x = filled(driver, 1.0)
    graph = graphcore.capture_function(lambda: x.add_(1), warmup=0, driver=driver)
    executable = graph.instantiate()
    stream = driver.stream()
    executable.launch(stream)
    guard = OutputGuard(executable, x)
    executable.launch(stream)
    stream.synchronize()
    return guard.latest()


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(lambda d: partial(_inputs(d).copy_, x=[1.0]), id="static inputs"),
        pytest.param(lambda d: _inputs(d).reset, id="a reset"),
        pytest.param(lambda d: _guarded(d).clone, id="a copy of an output"),
        pytest.param(
            lambda d: partial(
                graphcore.capture_function, lambda: None, driver=d, on_legacy_work="ignore"
            ),
            id="a warm-up",
        ),
    ],
)
def test_other_work_of_ours_on_the_legacy_stream_is_refused_too(
    graphcore_driver: Driver, prepare: Callable[[Driver], Callable[[], object]]
) -> None:
    work = prepare(graphcore_driver)
    x = filled(graphcore_driver, 1.0)
    graphcore_driver.synchronize()
    with graphcore.capture(driver=graphcore_driver) as capture:
        with pytest.raises(CaptureError, match="legacy stream, on which work") as caught:
            in_thread(work)
        x.add_(1)
    assert caught.value.code == "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
    assert len(capture.graph.snapshot().nodes) == 1
    work()


# ---- two driver objects on one device -----------------------------------------------------------


def _twin(driver: Driver) -> Driver:
    """Another driver object for the same context."""
    if isinstance(driver, EmulatedDriver):
        return driver.for_device(driver.device)
    return graphcore.open_driver("cuda", device=driver.device)


def test_an_executable_of_another_driver_object_is_embedded_in_the_capture(
    graphcore_driver: Driver,
) -> None:
    twin = _twin(graphcore_driver)
    x = filled(graphcore_driver, 1.0)
    executable = graphcore.capture_function(lambda: x.add_(1), warmup=0, driver=twin).instantiate()
    stream = graphcore_driver.stream(blocking=True)
    executable.launch(stream)  # bound to it: the capture makes it look again
    with graphcore.capture(stream, driver=graphcore_driver) as capture:
        executable.launch(stream)
        executable.launch()
    kinds = [node.kind.value for node in capture.graph.snapshot().nodes]
    assert kinds == ["child", "child"]
    x.fill_(1.0)
    assert replayed_in_place(capture.graph, x) == [3.0] * 4


def test_instantiating_through_another_driver_object_inside_a_capture_is_refused(
    graphcore_driver: Driver,
) -> None:
    twin = _twin(graphcore_driver)
    x = filled(graphcore_driver, 1.0)
    graph = graphcore.capture_function(lambda: x.add_(1), warmup=0, driver=twin)
    with graphcore.capture(driver=graphcore_driver) as capture:
        with pytest.raises(LifecycleError, match="is under way on this thread"):
            graph.instantiate()
        x.add_(1)
    assert len(capture.graph.snapshot().nodes) == 1


def test_the_executables_of_a_closed_driver_do_not_disturb_a_capture() -> None:
    driver = EmulatedDriver()
    twin = driver.for_device(0)
    x = filled(driver, 1.0)
    executable = graphcore.capture_function(lambda: x.add_(1), warmup=0, driver=twin).instantiate()
    twin.close()
    with graphcore.capture(driver=driver) as capture:
        x.add_(1)
    assert len(capture.graph.snapshot().nodes) == 1
    executable.close()


def replayed_in_place(graph: Graph, x: torch.Tensor) -> list[float]:
    with graph.instantiate() as executable:
        replay(executable)
    values: list[float] = x.tolist()
    return values


def test_a_launch_that_another_threads_capture_unbinds_in_between_runs_once() -> None:
    driver = EmulatedDriver()
    x = filled(driver, 1.0)
    with graphcore.capture(driver=driver) as capturing:
        x.add_(1)
    executable, stream = capturing.graph.instantiate(), driver.stream()
    executable.launch(stream)
    bound = executable._call

    def begun_meanwhile() -> object:
        # what a capture of another thread does between our look at the stream and our call
        forget_bindings(driver)
        return executable._call()

    executable._call = begun_meanwhile
    executable.launch(stream)
    # and where it comes while the call is being bound: the stream is noted, the call is not there
    forget_bindings(driver)
    executable._bound_stream = stream
    executable.launch(stream)
    assert x.tolist() == [4.0] * 4
    assert executable._call is not bound


def swallowed_in_thread(driver: EmulatedDriver) -> None:
    in_thread(driver.synchronize)


def unseen(driver: EmulatedDriver) -> None:
    (capture,) = driver._machine.captures._active
    capture.is_invalid = True


@pytest.mark.parametrize(
    ("breaks", "may_pass"),
    [
        pytest.param(lambda driver: driver.synchronize(), False, id="the thread itself"),
        pytest.param(swallowed_in_thread, True, id="another thread"),
        pytest.param(unseen, True, id="nobody knows"),
    ],
)
def test_an_error_says_whether_another_try_may_succeed(
    breaks: Callable[[EmulatedDriver], object], may_pass: bool
) -> None:
    driver = EmulatedDriver()
    x = filled(driver, 1.0)

    def broken() -> None:
        with suppress(CudaError):
            breaks(driver)
        x.add_(1)

    with pytest.raises(CaptureError) as caught, graphcore.capture(driver=driver):
        broken()
    assert caught.value.code == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    assert caught.value.may_pass is may_pass
