"""What a failed capture held goes with its error at once, not when Python's collector runs.

The collector is off in every test: whatever sits in a cycle stays.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.tensors import filled

import graphcore
from graphcore import CaptureError, CudaError, GraphCache
from graphcore.driver import Driver, active
from graphcore.driver.emulated import EmulatedDriver
from graphcore.executable import Capture
from graphcore.executable.capture_ending import forget_in_stacks
from graphcore.interop import current_stream


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Kept:
    """An object that a graph would keep."""


@dataclass
class Attempt:
    """One failing capture after another: where they captured, and what they held."""

    driver: Driver
    x: torch.Tensor
    handles: set[int] = field(default_factory=set)
    held: list[weakref.ref[Any]] = field(default_factory=list)

    @classmethod
    def on(cls, driver: Driver) -> Attempt:
        return cls(driver, filled(driver, 1.0))

    def capture(self, **options: Any) -> Capture:
        capture = graphcore.capture(driver=self.driver, **options)
        self.handles.add(capture.stream.handle)
        pool = capture._place.pool
        self.held += [weakref.ref(capture), *([] if pool is None else [weakref.ref(pool)])]
        return capture

    def work(self) -> torch.Tensor:
        """A new tensor; in a capture, an object that is kept by it besides."""
        y, kept = self.x * 2, Kept()
        active.keep(kept)
        self.handles.add(current_stream(self.driver))
        self.held += [weakref.ref(y), weakref.ref(kept)]
        return y

    def fails(self, way: Callable[[Attempt], object], kind: type[Exception]) -> None:
        """Does it the way that fails, and drops the error."""
        try:
            way(self)
        except kind:
            return
        pytest.fail(f"expected {kind.__name__}")

    def alive(self) -> list[Any]:
        return [each() for each in self.held if each() is not None]


# ---- ways to fail -------------------------------------------------------------------------------


def read_on_the_host(attempt: Attempt) -> None:
    with attempt.capture():
        y = attempt.work()
        y.sum().item()


def multiply_and_read_on_the_host(attempt: Attempt) -> None:
    """torch keeps a workspace for the product's stream; the stream is free all the same."""
    square = attempt.x.reshape(2, 2)
    _ = square @ square  # cuBLAS cannot begin in a capture
    with attempt.capture():
        y = attempt.work().reshape(2, 2)
        (y @ y).sum().item()


def wait_for_the_stream(attempt: Attempt) -> None:
    with attempt.capture() as capture:
        y = attempt.work()
        attempt.driver.synchronize_stream(capture.stream.handle)
        y.add_(1)


def wait_in_a_named_branch(attempt: Attempt) -> None:
    with attempt.capture() as capture, capture.annotate("a"), capture.fork() as side:
        y = attempt.work()
        attempt.driver.synchronize_stream(side.stream.handle)
        y.add_(1)


def swallow_a_refusal(attempt: Attempt) -> None:
    with attempt.capture() as capture:
        y = attempt.work()
        try:
            attempt.driver.synchronize_stream(capture.stream.handle)
        except CudaError:
            del y


def leave_a_fork_unjoined(attempt: Attempt) -> None:
    with attempt.capture() as capture, capture.fork(join=False):
        y = attempt.work()
        y.add_(1)


def launch_in_a_broken_capture(attempt: Attempt) -> None:
    graph = graphcore.capture_function(lambda: attempt.x + 1, driver=attempt.driver)
    executable = graph.instantiate()
    with executable, attempt.capture() as capture:
        y = attempt.work()
        try:
            attempt.driver.synchronize_stream(capture.stream.handle)
        except CudaError:
            executable.launch(capture.stream)
        y.add_(1)


def raise_an_error_of_the_users(attempt: Attempt) -> None:
    with attempt.capture():
        y = attempt.work()
        y.add_(1 // 0)


def expect_too_much(attempt: Attempt) -> None:
    with attempt.capture(expect=1000):
        y = attempt.work()
        y.add_(1)


class Unreadable(dict[str, object]):
    def items(self) -> Any:
        raise KeyError("no items")


def keep_what_cannot_be_looked_through(attempt: Attempt) -> None:
    with attempt.capture() as capture:
        y = attempt.work()
        y.add_(1)
        capture.keep(Unreadable())


def step_that_cannot_be_captured(attempt: Attempt) -> Callable[[], object]:
    def step() -> None:
        y = attempt.work()
        y.sum().item()

    return step


def capture_a_function(attempt: Attempt) -> None:
    graphcore.capture_function(step_that_cannot_be_captured(attempt), driver=attempt.driver)


def warm_up_a_function(attempt: Attempt) -> None:
    def step() -> None:
        y = attempt.work()
        y.add_(1 // 0)

    graphcore.capture_function(step, driver=attempt.driver)


def capture_into_a_cache(attempt: Attempt) -> None:
    with GraphCache(driver=attempt.driver) as cache:
        cache.get_or_capture("key", step_that_cannot_be_captured(attempt))


def capture_many_into_a_cache(attempt: Attempt) -> None:
    step = step_that_cannot_be_captured(attempt)
    with GraphCache(driver=attempt.driver, share_pool=True) as cache:
        cache.capture_all([1, 2], lambda _: step(), progress=False)


WAYS: dict[Callable[[Attempt], None], type[Exception]] = {
    read_on_the_host: CaptureError,
    multiply_and_read_on_the_host: CaptureError,
    wait_for_the_stream: CaptureError,
    wait_in_a_named_branch: CaptureError,
    swallow_a_refusal: CaptureError,
    leave_a_fork_unjoined: CaptureError,
    launch_in_a_broken_capture: CaptureError,
    raise_an_error_of_the_users: ZeroDivisionError,
    expect_too_much: CaptureError,
    keep_what_cannot_be_looked_through: KeyError,
    capture_a_function: CaptureError,
    warm_up_a_function: ZeroDivisionError,
    capture_into_a_cache: CaptureError,
    capture_many_into_a_cache: CaptureError,
}

WITH_ANOTHER_STREAM = (wait_in_a_named_branch, leave_a_fork_unjoined, launch_in_a_broken_capture)


def be_refused_at_the_beginning(attempt: Attempt) -> None:
    inject(attempt, "begin_capture")
    with attempt.capture():
        pass


def be_refused_a_function(attempt: Attempt) -> None:
    inject(attempt, "begin_capture")
    graphcore.capture_function(attempt.work, driver=attempt.driver)


def be_refused_at_the_end(attempt: Attempt) -> None:
    with attempt.capture():
        y = attempt.work()
        y.add_(1)
        inject(attempt, "end_capture")


def be_refused_the_nodes(attempt: Attempt) -> None:
    with attempt.capture():
        y = attempt.work()
        y.add_(1)
        inject(attempt, "nodes", count=2)


def break_it_as_it_begins(attempt: Attempt) -> None:
    driver: Any = attempt.driver
    driver.recording = driver.synchronize_stream
    try:
        with attempt.capture():
            pass
    finally:
        del driver.recording


def inject(attempt: Attempt, call: str, count: int = 1) -> None:
    assert isinstance(attempt.driver, EmulatedDriver)
    attempt.driver.faults.inject(call, count=count)


EMULATED_WAYS: dict[Callable[[Attempt], None], type[Exception]] = {
    be_refused_at_the_beginning: CudaError,
    be_refused_a_function: CudaError,
    be_refused_at_the_end: CaptureError,
    be_refused_the_nodes: CudaError,
    break_it_as_it_begins: CaptureError,
}


def name_of(way: object) -> str:
    return str(getattr(way, "__name__", way))


# ---- what is free afterwards --------------------------------------------------------------------


def leaves_nothing(driver: Driver, way: Callable[[Attempt], None], kind: type[Exception]) -> bool:
    Attempt.on(driver).fails(way, kind)  # makes the streams, and loads what a first call loads
    gc.collect()
    idle = driver.capture_streams.idle
    assert idle > 0
    attempt = Attempt.on(driver)
    attempt.fails(way, kind)
    assert driver.capture_streams.idle == idle
    assert driver.capture_streams.lent == 0
    assert attempt.held
    return attempt.alive() == []


def streams_of_ten(driver: Driver, way: Callable[[Attempt], None], kind: type[Exception]) -> int:
    attempt = Attempt.on(driver)
    for _ in range(10):
        attempt.fails(way, kind)
    assert attempt.handles <= set(driver.own_streams())
    return len(driver.own_streams())


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_what_a_failed_capture_held_is_free_as_soon_as_nobody_has_its_error(
    graphcore_driver: Driver, way: Callable[[Attempt], None]
) -> None:
    assert leaves_nothing(graphcore_driver, way, WAYS[way])


@pytest.mark.parametrize("way", EMULATED_WAYS, ids=name_of)
def test_what_a_capture_held_that_the_driver_failed_is_free_as_soon_as_nobody_has_its_error(
    way: Callable[[Attempt], None],
) -> None:
    assert leaves_nothing(EmulatedDriver(), way, EMULATED_WAYS[way])


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_ten_captures_that_fail_in_a_row_take_the_stream_of_one(
    graphcore_driver: Driver, way: Callable[[Attempt], None]
) -> None:
    assert streams_of_ten(graphcore_driver, way, WAYS[way]) == 1 + (way in WITH_ANOTHER_STREAM)


@pytest.mark.parametrize("way", EMULATED_WAYS, ids=name_of)
def test_ten_captures_that_the_driver_fails_in_a_row_take_the_stream_of_one(
    way: Callable[[Attempt], None],
) -> None:
    assert streams_of_ten(EmulatedDriver(), way, EMULATED_WAYS[way]) == 1


def test_an_error_that_is_held_holds_the_failed_step_and_lets_go_of_it(
    graphcore_driver: Driver,
) -> None:
    """As any traceback does: a debugger sees the variables of the step."""
    attempt = Attempt.on(graphcore_driver)
    held: list[CaptureError] = []
    try:
        read_on_the_host(attempt)
    except CaptureError as error:
        held.append(error)
    assert any(isinstance(each, torch.Tensor) for each in attempt.alive())
    cause = held[0].__cause__
    assert cause is not None
    assert cause.__traceback__ is not None
    del cause
    held.clear()
    assert attempt.alive() == []
    assert graphcore_driver.capture_streams.idle == 1


def test_clearing_a_stack_that_is_being_left_is_no_error() -> None:
    seen: list[BaseException] = []

    def fail() -> None:
        raise ZeroDivisionError

    def clear(kind: Any, error: BaseException, trace: Any) -> bool:
        seen.append(error)
        forget_in_stacks(error)
        return True

    with ExitStack() as stack:
        stack.push(clear)
        stack.callback(fail)
    assert [type(each) for each in seen] == [ZeroDivisionError]
