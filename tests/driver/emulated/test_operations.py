"""Operations: recorded work that a kernel node holds, re-points and keeps alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy
import pytest
from helpers.contract import Bench, refused

from graphcore.driver import kernel
from graphcore.driver.emulated import EmulatedDriver, Operation
from graphcore.driver.kernel import Pointer
from graphcore.driver.records import KernelParams, LaunchConfig, UpdateResult
from graphcore.errors import ConfigurationError


@dataclass(eq=False)
class Doubling:
    """Doubles one float at the address it is given; keeps an array as torch's would a tensor."""

    keep: object = None
    name: str = "test::double"
    layout: tuple[tuple[int, int], ...] = ((0, 8),)
    configs: list[LaunchConfig] = field(default_factory=list)

    def run(self, config: LaunchConfig, arguments: Sequence[bytes]) -> None:
        self.configs.append(config)
        address = int.from_bytes(arguments[0], "little")
        Pointer(address, "float32").array(1)[:] *= 2


def packed(array: numpy.ndarray) -> list[bytes]:
    return [array.ctypes.data.to_bytes(8, "little")]


@pytest.fixture
def bench() -> Bench:
    return Bench(EmulatedDriver())


def test_an_operation_runs_at_once_outside_a_capture(bench: Bench) -> None:
    x = numpy.array([3], "float32")
    operation = Doubling()
    assert isinstance(operation, Operation)
    bench.driver.launch_operation(operation, packed(x), bench.stream.handle)
    assert x[0] == 6


def test_a_captured_operation_is_a_kernel_node_with_its_name(bench: Bench) -> None:
    x = numpy.array([3], "float32")
    with bench.capturing() as captured:
        bench.driver.launch_operation(Doubling(), packed(x), bench.stream.handle)
    assert x[0] == 3
    (node,) = bench.driver.nodes(captured[0])
    params = bench.driver.node_params(node)
    assert isinstance(params, KernelParams)
    assert params.arguments == tuple(packed(x))
    info = bench.driver.function_info(params.function)
    assert (info.name, info.layout) == ("test::double", ((0, 8),))
    assert bench.driver.kernel_of(params.function) is None
    bench.run(captured[0], times=2)
    assert x[0] == 12


def test_an_update_points_an_operation_at_other_memory(bench: Bench) -> None:
    x, y = numpy.array([3], "float32"), numpy.array([5], "float32")
    with bench.capturing() as captured:
        bench.driver.launch_operation(Doubling(), packed(x), bench.stream.handle)
    (node,) = bench.driver.nodes(captured[0])
    params = bench.driver.node_params(node)
    assert isinstance(params, KernelParams)
    executable = bench.instantiate(captured[0])
    changed = replace(params, arguments=tuple(packed(y)))
    bench.driver.set_exec_node_params(executable, node, changed)
    bench.replay(executable)
    assert (x[0], y[0]) == (3, 10)


def test_node_clone_and_executable_keep_the_operation_alive_and_nothing_else_does() -> None:
    bench = Bench(EmulatedDriver())
    driver = bench.driver
    x = numpy.array([3], "float32")
    operation = Doubling(keep=x)
    alive = weakref.ref(operation)
    driver.begin_capture(bench.stream.handle, "thread_local")
    driver.launch_operation(operation, packed(x), bench.stream.handle)
    graph = driver.end_capture(bench.stream.handle)
    handle = driver.node_params(driver.nodes(graph)[0]).function
    clone = driver.clone_graph(graph)
    executable = driver.instantiate(clone)
    del operation
    driver.destroy_graph(graph)
    driver.destroy_graph(clone)
    gc.collect()
    assert alive() is not None
    bench.replay(executable)
    assert x[0] == 6
    driver.destroy_exec(executable)
    gc.collect()
    assert alive() is None
    with refused("INVALID_HANDLE"):
        driver.function_info(handle)
    bench.close()


def test_a_second_recording_updates_the_first_and_frees_its_operation(bench: Bench) -> None:
    x = numpy.array([3], "float32")
    graphs = []
    references = []
    for _ in range(2):
        operation = Doubling()
        references.append(weakref.ref(operation))
        bench.driver.begin_capture(bench.stream.handle, "thread_local")
        bench.driver.launch_operation(operation, packed(x), bench.stream.handle)
        graphs.append(bench.driver.end_capture(bench.stream.handle))
        del operation
    executable = bench.instantiate(graphs[0])
    answer = bench.driver.update_exec(executable, graphs[1])
    assert answer.result is UpdateResult.SUCCESS
    for graph in graphs:
        bench.driver.destroy_graph(graph)
    gc.collect()
    assert references[0]() is None
    bench.replay(executable)
    assert x[0] == 6


def test_arguments_that_do_not_fit_the_layout_are_refused(bench: Bench) -> None:
    with refused("INVALID_VALUE"):
        bench.driver.launch_operation(Doubling(), [b"1234"], bench.stream.handle)


def test_invalidating_a_capture_ends_it_without_a_graph(bench: Bench) -> None:
    bench.driver.invalidate_capture(bench.stream.handle)
    bench.driver.begin_capture(bench.stream.handle, "thread_local")
    bench.driver.invalidate_capture(bench.stream.handle)
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.driver.launch_operation(
            Doubling(), packed(numpy.ones(1, "float32")), bench.stream.handle
        )
    with refused("STREAM_CAPTURE_INVALIDATED"):
        bench.driver.end_capture(bench.stream.handle)


def test_a_kernel_without_a_reference_is_captured_but_cannot_run(bench: Bench) -> None:
    silent = kernel("silent", "", 'extern "C" __global__ void silent() {}')
    bench.driver.function(silent)
    with pytest.raises(ConfigurationError, match="silent has no Python reference"):
        bench.launch(silent)
    with bench.capturing() as captured:
        bench.launch(silent)
    executable = bench.instantiate(captured[0])
    with pytest.raises(ConfigurationError, match="silent has no Python reference"):
        bench.replay(executable)


def test_an_error_inside_a_kernel_names_the_kernel(bench: Bench) -> None:
    def fail(_config: LaunchConfig) -> None:
        raise IndexError("out of bounds")

    failing = kernel("failing", "", 'extern "C" __global__ void failing() {}', fail)
    bench.driver.function(failing)
    with bench.capturing() as captured:
        bench.launch(failing)
    executable = bench.instantiate(captured[0])
    with pytest.raises(IndexError) as caught:
        bench.replay(executable)
    assert any("kernel node failing" in note for note in caught.value.__notes__)
