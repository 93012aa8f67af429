"""Planned launches: bound to their stream once, and what makes them look again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from graphcore_kernels import _planned, moe_grouped_gemm, strided_copy
from graphcore_kernels._drivers import Operand, current_stream_reader
from helpers.isolated import run_script

import graphcore
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.errors import CudaError, LifecycleError
from graphcore.resources.buffer import Buffer

# in a process of its own: coverage and debuggers trace every line of this one
_COUNT = """
import sys, tracemalloc
from graphcore_kernels import strided_copy
from graphcore.driver.emulated import EmulatedDriver
from graphcore.resources.buffer import Buffer

driver = EmulatedDriver()
stream, other = driver.stream(), driver.stream()

def bound():
    return None

driver.bind_kernel = lambda *launch: bound
dst, src = (Buffer.allocate((4, 4), "float32", driver=driver) for _ in range(2))
launch = strided_copy.plan(dst, src).launch
launch(stream)
tracemalloc.start()
launch(stream)
before = tracemalloc.get_traced_memory()[0]
tracemalloc.reset_peak()
launch(stream)
peak = tracemalloc.get_traced_memory()[1]
tracemalloc.stop()

calls = []
def note(frame, event, argument):
    if event == "call":
        calls.append(frame.f_code.co_name)
    elif event == "c_call":
        calls.append(argument.__name__)

sys.setprofile(note)
launch(stream)
sys.setprofile(None)
print(peak - before, *calls)
"""


def plan_of(driver: Driver, value: float = 1.0) -> tuple[Any, Buffer]:
    dst, src = (Buffer.allocate((4,), "float32", driver=driver) for _ in range(2))
    src.write(numpy.full(4, value, numpy.float32))
    dst.write(numpy.zeros(4, numpy.float32))
    return strided_copy.plan(dst, src), dst


def product_of(driver: Driver) -> Any:
    """A product in two kernels."""
    x = Buffer.allocate((2, 8), "float32", driver=driver)
    x.write(numpy.ones((2, 8), numpy.float32))
    weights = Buffer.allocate((1, 8, 8), "float32", driver=driver)
    weights.write(numpy.ones((1, 8, 8), numpy.float32))
    offsets = Buffer.allocate((2,), "int32", driver=driver)
    offsets.write(numpy.asarray([0, 2], numpy.int32))
    scatter = Buffer.allocate((2,), "int32", driver=driver)
    scatter.write(numpy.arange(2, dtype=numpy.int32))
    return moe_grouped_gemm.plan(x, weights, offsets, scatter=scatter, driver=driver)


class Binds:
    """The bound launches of a driver, by the stream they are for."""

    def __init__(self, driver: Driver, patch: pytest.MonkeyPatch) -> None:
        self.streams: list[int] = []
        real = driver.bind_kernel

        def noting(*launch: Any) -> Callable[[], object]:
            self.streams.append(launch[3])
            return real(*launch)

        patch.setattr(driver, "bind_kernel", noting)


def test_a_planned_launch_makes_the_bound_call_and_no_other_and_allocates_nothing() -> None:
    done = run_script(_COUNT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "launch", "launch_one", "bound", "setprofile"]


def test_a_planned_launch_on_another_stream_looks_for_its_place() -> None:
    done = run_script(
        _COUNT.replace("launch(stream)\nsys.setprofile", "launch(other)\nsys.setprofile")
    )
    assert done.returncode == 0, done.stderr
    assert {"choose_place", "_bind"} <= set(done.stdout.split())


def test_a_plan_is_bound_once_for_a_stream_whatever_form_that_has(
    graphcore_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    binds = Binds(graphcore_driver, monkeypatch)
    plan, dst = plan_of(graphcore_driver, 3.0)
    with graphcore_driver.stream() as one, graphcore_driver.stream() as two:
        for stream in (one, one, one.handle, one.handle, two, two, one):
            plan.launch(stream)
            graphcore_driver.synchronize()
            assert dst.read().tolist() == [3.0] * 4
            dst.write(numpy.zeros(4, numpy.float32))
        assert binds.streams == [one.handle, two.handle, one.handle]


def test_a_closed_stream_is_refused_by_a_plan_that_is_bound_to_it(graphcore_driver: Driver) -> None:
    plan, _ = plan_of(graphcore_driver)
    stream = graphcore_driver.stream()
    plan.launch(stream)
    stream.close()
    with pytest.raises(LifecycleError, match="expected an open stream"):
        plan.launch(stream)


def test_a_launch_in_a_capture_becomes_a_node_although_the_plan_is_bound_to_the_stream(
    graphcore_driver: Driver,
) -> None:
    plan, dst = plan_of(graphcore_driver, 2.0)
    with graphcore_driver.stream(blocking=True) as stream:
        plan.launch(stream)
        stream.synchronize()
        dst.write(numpy.zeros(4, numpy.float32))
        with graphcore.capture(stream, driver=graphcore_driver) as capture:
            plan.launch(stream)
        assert dst.read().tolist() == [0.0] * 4
        labels = {owner.label for owner in capture.graph.owners}
        assert {"strided_copy dst", "strided_copy src"} <= labels
        with capture.graph.instantiate() as executable:
            executable.launch(stream)
            stream.synchronize()
        assert dst.read().tolist() == [2.0] * 4
        capture.graph.close()


def test_what_the_bound_call_says_was_refused_goes_to_the_driver_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = EmulatedDriver()
    made, launched = [], []
    answers = {0: 0, 1: 700}

    def binding(*launch: Any) -> Callable[[], object]:
        number = len(made)
        made.append(launch)
        return lambda: answers[number]

    product = product_of(driver)
    assert len(product.launches) == 2
    monkeypatch.setattr(driver, "bind_kernel", binding)
    # nothing runs: the second kernel would read what the first one did not write
    monkeypatch.setattr(driver, "launch", lambda *launch: launched.append(launch))
    with driver.stream() as stream:
        product.launch(stream)
        product.launch(stream)
    assert launched == [made[1], made[1]], "the first kernel was launched, once each time"


def test_what_the_driver_refuses_is_raised_and_the_next_launch_works() -> None:
    driver = EmulatedDriver()
    plan, dst = plan_of(driver)
    with driver.stream() as stream:
        plan.launch(stream)
        dst.write(numpy.zeros(4, numpy.float32))
        driver.faults.inject("launch")
        with pytest.raises(CudaError):
            plan.launch(stream)
        assert dst.read().tolist() == [0.0] * 4
        plan.launch(stream)
        assert dst.read().tolist() == [1.0] * 4


def test_without_a_stream_a_plan_follows_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = EmulatedDriver()
    binds = Binds(driver, monkeypatch)
    plan, _ = plan_of(driver)
    first, second = driver.stream(), driver.stream()
    now = [first.handle]
    reads: list[int] = []

    def read() -> int:
        reads.append(now[0])
        return now[0]

    monkeypatch.setattr(_planned, "current_stream_reader", lambda *_: read)
    monkeypatch.setattr(
        _planned, "choose_place", lambda *_: SimpleNamespace(driver=driver, stream=now[0])
    )
    for handle in (first.handle, first.handle, second.handle, second.handle):
        now[0] = handle
        plan.launch()
    assert binds.streams == [first.handle, second.handle]
    assert reads == [first.handle] * 2 + [second.handle] * 3


class _Libraries:
    """As much of torch and CuPy as is asked for a current stream."""

    class Array:
        pass

    def __init__(self, *, has_begun: bool = True) -> None:
        self.torch = SimpleNamespace(
            cuda=SimpleNamespace(is_initialized=lambda: has_begun),
            _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 100 + device),
        )
        stream = SimpleNamespace(ptr=77)
        self.cupy = SimpleNamespace(
            cuda=SimpleNamespace(get_current_stream=lambda device: stream), ndarray=self.Array
        )


@pytest.mark.parametrize(
    ("has_begun", "is_cupys", "expected"),
    [(True, False, 103), (True, True, 77), (False, True, 77), (False, False, None)],
)
def test_the_current_stream_is_read_from_the_library_that_it_would_be_taken_from(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool, is_cupys: bool, expected: int | None
) -> None:
    libraries = _Libraries(has_begun=has_begun)
    monkeypatch.setitem(sys.modules, "torch", libraries.torch)
    monkeypatch.setitem(sys.modules, "cupy", libraries.cupy)
    tensor: Any = libraries.Array() if is_cupys else object()
    operands = [Operand(tensor, SimpleNamespace(device=3))]  # type: ignore[arg-type]
    read = current_stream_reader(SimpleNamespace(is_emulated=False), operands)  # type: ignore[arg-type]
    assert (None if read is None else read()) == expected


def test_the_emulated_drivers_current_stream_has_no_short_way(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        plan, _ = plan_of(graphcore_driver)
        assert current_stream_reader(graphcore_driver, (plan.dst,)) is None
        plan.launch()
        assert plan.binding.now.stream is not None


def test_threads_that_share_a_plan_launch_each_on_its_own_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = EmulatedDriver()
    done: dict[int, list[int]] = {}

    def binding(*launch: Any) -> Callable[[], object]:
        return lambda: done.setdefault(threading.get_ident(), []).append(launch[3])

    monkeypatch.setattr(driver, "bind_kernel", binding)
    plan, _ = plan_of(driver)
    streams: dict[int, int] = {}

    def work() -> None:
        stream = driver.stream()
        streams[threading.get_ident()] = stream.handle
        together.wait()
        for _ in range(500):
            plan.launch(stream)

    together = threading.Barrier(2)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert done == {thread: [handle] * 500 for thread, handle in streams.items()}
