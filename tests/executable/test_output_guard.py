"""OutputGuard: an output knows its run, and reading it after a later one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.contract import Bench
from helpers.graph_specs import Step, build
from helpers.kernels import add_one
from helpers.tensors import filled, poisoned, replay

import graphcore
from graphcore import (
    Buffer,
    CacheTypeError,
    ConfigurationError,
    Graph,
    GraphExec,
    LifecycleError,
    OutputGuard,
    OverwrittenOutputError,
)
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver


def doubling(driver: Driver) -> tuple[GraphExec, torch.Tensor, torch.Tensor]:
    """An executable that writes ``y = 2 x``, with both."""
    x, y = filled(driver, 1.0), poisoned(driver)
    y.copy_(x * 2)
    with graphcore.capture(driver=driver) as capture:
        capture.keep([x, y])
        y.copy_(x * 2)
    y.fill_(float("nan"))
    return capture.graph.instantiate(), x, y


def adding(bench: Bench, address: int) -> Graph:
    handle = build(bench, (Step(bench.kernel_params(add_one, address, 4)),))
    return Graph(bench.driver, handle, owned=False)


def test_an_output_is_read_until_the_next_run_and_refused_after_it(
    graphcore_driver: Driver,
) -> None:
    executable, x, y = doubling(graphcore_driver)
    first = OutputGuard(executable, y, "logits")
    replay(executable)
    assert first.get() is y
    assert y.tolist() == [2.0] * 4
    x.fill_(5.0)
    replay(executable)
    assert first.is_overwritten
    for read in (first.get, first.clone):
        with pytest.raises(OverwrittenOutputError, match=r"logits: .*run 1.*run 2.*clone\(\)"):
            read()
    second = first.latest()
    assert (first.run, second.run) == (1, 2)
    assert second.get().tolist() == [10.0] * 4


def test_a_clone_keeps_the_values_of_its_run(graphcore_driver: Driver) -> None:
    executable, x, y = doubling(graphcore_driver)
    guard = OutputGuard(executable, y)
    with graphcore_driver.stream() as stream:
        graphcore_driver.synchronize()
        executable.launch(stream)
        kept = guard.clone()
        executable.launch(stream)
        x.fill_(5.0)
        replay(executable, stream)
    assert kept.tolist() == [2.0] * 4
    assert y.tolist() == [10.0] * 4
    assert guard.is_overwritten


def test_a_guard_made_before_the_first_run_asks_for_it(graphcore_driver: Driver) -> None:
    executable, _, y = doubling(graphcore_driver)
    guard = OutputGuard(executable, y)
    assert "not written yet" in repr(guard)
    with pytest.raises(LifecycleError, match="has not run yet; launch it first"):
        guard.get()
    replay(executable)
    assert repr(guard) == "<OutputGuard output of run 1: current>"
    replay(executable)
    assert repr(guard) == "<OutputGuard output of run 1: overwritten>"


def test_a_guard_made_after_a_run_is_of_that_run(graphcore_driver: Driver) -> None:
    executable, _, y = doubling(graphcore_driver)
    replay(executable)
    guard = OutputGuard(executable, y)
    assert guard.get() is y
    replay(executable)
    assert guard.is_overwritten
    assert "of the run before the first guard: overwritten" in repr(guard)


def test_several_outputs_are_guarded_as_one_and_copied_as_one(graphcore_driver: Driver) -> None:
    executable, x, y = doubling(graphcore_driver)
    replay(executable)
    guard = OutputGuard(executable, {"y": y, "parts": [y[:2], (y[2:],)]}, "out")
    copied = guard.clone()
    x.fill_(7.0)
    replay(executable)
    assert copied["y"].tolist() == [2.0] * 4
    assert copied["parts"][0].tolist() == [2.0] * 2
    assert copied["parts"][1][0].tolist() == [2.0] * 2
    with pytest.raises(OverwrittenOutputError):
        guard.get()


def test_every_executable_of_the_graph_counts(bench: Bench) -> None:
    buffer = Buffer.allocate(4, driver=bench.driver)
    buffer.write(0)
    graph = adding(bench, buffer.address)
    one, two = graph.instantiate(), graph.instantiate()
    three = graph.clone().instantiate()
    for other in (two, three):
        guard = OutputGuard(one, buffer)
        replay(one, bench.stream)
        guard = guard.latest()
        kept = guard.clone()
        replay(other, bench.stream)
        assert guard.is_overwritten
        assert kept.read().tolist() == (buffer.read() - 1).tolist()


def test_two_graphs_over_one_tensor_know_of_each_other(bench: Bench) -> None:
    buffer = Buffer.allocate(4, driver=bench.driver)
    other = Buffer.allocate(4, driver=bench.driver)
    one, two, three = (
        adding(bench, each.address).instantiate() for each in (buffer, buffer, other)
    )
    first = OutputGuard(one, buffer)
    second, third = OutputGuard(two, buffer), OutputGuard(three, other)
    replay(three, bench.stream)
    replay(one, bench.stream)
    replay(three, bench.stream)
    assert not first.is_overwritten, "the control: a graph over other memory does not count"
    replay(two, bench.stream)
    with pytest.raises(OverwrittenOutputError, match="a run of another graph"):
        first.get()
    assert second.get() is buffer
    assert third.is_overwritten
    replay(one, bench.stream)
    assert second.is_overwritten
    assert not first.latest().is_overwritten


def test_a_guard_of_another_graph_is_no_run_of_it(bench: Bench) -> None:
    buffer = Buffer.allocate(4, driver=bench.driver)
    one, two = (adding(bench, buffer.address).instantiate() for _ in range(2))
    replay(two, bench.stream)
    replay(one, bench.stream)
    first = OutputGuard(one, buffer)
    OutputGuard(two, buffer)
    second = OutputGuard(two, buffer)
    assert first.get() is buffer
    assert second.get() is buffer, "which of the two ran last was not counted"
    replay(two, bench.stream)
    assert first.is_overwritten
    assert second.is_overwritten


def test_an_embedded_launch_is_a_run_whenever_the_graph_around_it_runs(bench: Bench) -> None:
    buffer = Buffer.allocate(4, driver=bench.driver)
    inner = adding(bench, buffer.address).instantiate()
    guard = OutputGuard(inner, buffer)
    with graphcore.capture(driver=bench.driver) as capture:
        inner.launch()
        inner.launch()
    outer = capture.graph.instantiate()
    replay(outer, bench.stream)
    assert guard.get() is buffer
    with graphcore.capture(driver=bench.driver) as around:
        outer.launch()
    outermost = around.graph.instantiate()
    replay(outermost, bench.stream)
    with pytest.raises(OverwrittenOutputError):
        guard.get()


@pytest.mark.parametrize("is_same", [True, False], ids=["in place", "re-instantiated"])
def test_runs_go_on_through_updates(bench: Bench, is_same: bool) -> None:
    buffer = Buffer.allocate(4, driver=bench.driver)
    executable = adding(bench, buffer.address).instantiate()
    guard = OutputGuard(executable, buffer)
    replay(executable, bench.stream)
    step = Step(bench.kernel_params(add_one, buffer.address, 2))
    handle = build(bench, (step,) if is_same else (step, step))
    outcome = executable.update(Graph(bench.driver, handle, owned=False))
    assert outcome.is_current
    assert guard.get() is buffer, "an update writes nothing"
    replay(executable, bench.stream)
    assert guard.is_overwritten


def test_after_a_close_the_last_output_stays_readable(graphcore_driver: Driver) -> None:
    executable, _, y = doubling(graphcore_driver)
    guard = OutputGuard(executable, y)
    replay(executable)
    executable.close()
    assert guard.get().tolist() == [2.0] * 4
    with pytest.raises(LifecycleError):
        guard.latest()
    with pytest.raises(LifecycleError, match="expected an open executable"):
        OutputGuard(executable, y)
    del executable
    with pytest.raises(LifecycleError, match="latest: expected an open executable"):
        guard.latest()


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped with the executable"])
def test_an_output_is_copied_after_the_stream_of_its_run_has_gone(
    graphcore_driver: Driver, is_closed: bool
) -> None:
    executable, _, y = doubling(graphcore_driver)
    guard = OutputGuard(executable, y)
    graphcore_driver.synchronize()
    stream = graphcore_driver.stream()
    executable.launch(stream)
    if is_closed:
        stream.close()
    else:
        executable.close()
    del stream, executable
    copy = guard.clone()
    graphcore_driver.synchronize()
    assert copy.tolist() == [2.0] * 4
    assert copy.data_ptr() != y.data_ptr()


def test_a_failed_launch_is_no_run() -> None:
    driver = EmulatedDriver()
    executable, _, y = doubling(driver)
    guard = OutputGuard(executable, y)
    replay(executable)
    executable._unbind()
    driver.bind_launch = lambda *_: lambda: (700, "lost")  # type: ignore[method-assign]
    raised: list[object] = []
    executable._raise_launch = raised.append  # type: ignore[assignment]
    executable.launch()
    assert raised == [(700, "lost")]
    assert guard.get() is y


def test_without_a_guard_the_bound_call_is_the_drivers_own(bench: Bench) -> None:
    buffer = Buffer.allocate(4, driver=bench.driver)
    executable = adding(bench, buffer.address).instantiate()
    replay(executable, bench.stream)
    plain = executable._call
    assert getattr(plain, "__name__", "") != "counted"
    guard = OutputGuard(executable, buffer)
    replay(executable, bench.stream)
    assert executable._call.__name__ == "counted"  # type: ignore[attr-defined]
    assert guard.is_overwritten


@pytest.mark.parametrize(
    ("output", "error", "words"),
    [
        (lambda: "y", CacheTypeError, "output: expected a tensor, got str"),
        (lambda: [3], CacheTypeError, r"output\[0\]: expected a tensor, got int"),
        (list, ConfigurationError, "output: expected at least one tensor"),
        (lambda: torch.eye(2).to_sparse(), CacheTypeError, "plain strided memory"),
    ],
    ids=["text", "number in a list", "empty list", "sparse"],
)
def test_what_is_no_output_is_refused(
    graphcore_driver: Driver, output: Callable[[], Any], error: type[Exception], words: str
) -> None:
    executable, _, _ = doubling(graphcore_driver)
    with pytest.raises(error, match=words):
        OutputGuard(executable, output())


def test_what_is_no_executable_is_refused(graphcore_driver: Driver) -> None:
    executable, _, y = doubling(graphcore_driver)
    with pytest.raises(CacheTypeError, match="exec_: expected a GraphExec, got Graph"):
        OutputGuard(executable.graph, y)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_an_output_of_another_driver_is_refused(graphcore_driver: Driver) -> None:
    if graphcore_driver.is_emulated:
        pytest.skip("host memory is the emulated driver's own")
    executable, _, _ = doubling(graphcore_driver)
    with pytest.raises(ConfigurationError, match="output: expected memory of driver cuda"):
        OutputGuard(executable, torch.ones(4))


def test_arrays_and_strided_memory_are_copied_by_their_own_library() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    array = numpy.zeros(8, numpy.float32)
    executable = adding(bench, array.ctypes.data).instantiate()
    guard = OutputGuard(executable, array[::2])
    replay(executable, bench.stream)
    copied = guard.clone()
    array[:] = 9
    assert copied.tolist() == [1.0, 1.0, 0.0, 0.0]
    strided = Buffer.view(array[::2])
    with pytest.raises(CacheTypeError, match="expected contiguous memory of a Buffer"):
        OutputGuard(executable, strided).clone()
