"""What OutputGuard guards is something that the graph writes, as far as its nodes say so."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from helpers.contract import Bench, copy_1d
from helpers.graph_specs import Step, build
from helpers.kernels import add_one, axpy
from helpers.tensors import device_of, filled, replay

import graphcore
from graphcore import Buffer, ConfigurationError, Graph, GraphExec, OutputGuard
from graphcore.driver import Driver
from graphcore.driver.emulated import EmulatedDriver
from graphcore.driver.records import AllocParams, FreeParams, MemsetParams, NodeParams
from graphcore.executable import update
from graphcore.resources.tensors import TensorRef


def executable_of(bench: Bench, *params: NodeParams) -> GraphExec:
    return Graph(bench.driver, build(bench, tuple(map(Step, params))), owned=False).instantiate()


def at(driver: Driver, address: int, count: int = 4) -> TensorRef:
    """Four floats at an address, as a tensor."""
    kind = "cpu" if driver.is_emulated else "cuda"
    return TensorRef(address, (count,), (1,), "float32", 4, kind, driver.device)


def test_memory_that_no_node_refers_to_is_refused_by_name(bench: Bench) -> None:
    x, other = filled(bench.driver, 1.0), filled(bench.driver, 1.0)
    executable = executable_of(bench, bench.kernel_params(add_one, x.data_ptr(), 4))
    with pytest.raises(ConfigurationError, match=r"logits\['b'\]: .*memory that no node refers to"):
        OutputGuard(executable, {"a": x, "b": other}, "logits")
    assert not executable.runs.is_counting, "nothing was begun"
    # one past the end is another's memory
    both = filled(bench.driver, 1.0, 8)
    executable = executable_of(bench, bench.kernel_params(add_one, both.data_ptr(), 4))
    assert OutputGuard(executable, both[4:]), "a view of the storage that is written"
    with pytest.raises(ConfigurationError, match="no node refers to"):
        OutputGuard(executable, filled(bench.driver, 1.0, 8))


def test_what_a_kernel_with_a_signature_only_reads_is_refused_with_the_argument(
    bench: Bench,
) -> None:
    x, y = filled(bench.driver, 1.0), filled(bench.driver, 1.0)
    step = bench.kernel_params(axpy, 2.0, x.data_ptr(), y.data_ptr(), 4)
    executable = executable_of(bench, step)
    with pytest.raises(
        ConfigurationError,
        match=r"output: expected a tensor that the graph writes, got one that its nodes only read "
        r"\(argument 1 x of node 0 ",
    ):
        OutputGuard(executable, x)
    guard = OutputGuard(executable, y)
    replay(executable, bench.stream)
    assert guard.get() is y
    # read by one node and written by another it is written
    after = bench.kernel_params(add_one, x.data_ptr(), 4)
    assert OutputGuard(executable_of(bench, step, after), x)


@pytest.mark.parametrize("shape", ["1-D", "rows"])
def test_copies_and_fills_write_what_they_reach(bench: Bench, shape: str) -> None:
    source, target = bench.alloc(256), bench.alloc(256)
    rows = {"height": 2, "pitch": 64} if shape == "rows" else {}
    copy = copy_1d(target, source, 16)
    fill = MemsetParams(target + 64, 0, 4, 4, **rows)
    executable = executable_of(bench, copy, fill)
    for address in (target, target + 64 + 64 * bool(rows)):
        assert OutputGuard(executable, at(bench.driver, address))
    with pytest.raises(ConfigurationError, match=r"only read \(src of node 0"):
        OutputGuard(executable, at(bench.driver, source))


def test_kernels_of_other_libraries_must_refer_to_the_memory(graphcore_driver: Driver) -> None:
    x, y = filled(graphcore_driver, 1.0, 8), filled(graphcore_driver, 0.0, 8)
    stranger = filled(graphcore_driver, 0.0, 8)
    executable = graphcore.capture_function(
        lambda: y.add_(x), driver=graphcore_driver
    ).instantiate()
    for tensor in (y, y[3:], y.view(2, 4)[1], y.detach()):
        assert OutputGuard(executable, tensor)
    # no signature says that it is only read
    assert OutputGuard(executable, x)
    for tensor in (stranger, stranger[2:]):
        with pytest.raises(ConfigurationError, match="no node refers to"):
            OutputGuard(executable, tensor)


@pytest.mark.parametrize("size", [8, 1024], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_products_of_matrices_refer_to_what_they_write(
    graphcore_driver: Driver, dtype: torch.dtype, size: int
) -> None:
    device = device_of(graphcore_driver)
    a, b, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    executable = graphcore.capture_function(
        lambda: torch.matmul(a, b, out=out), driver=graphcore_driver
    ).instantiate()
    assert OutputGuard(executable, out)
    made = graphcore.capture_function(lambda: a @ b, driver=graphcore_driver)
    assert OutputGuard(made.instantiate(), made.outputs)


def test_outputs_that_are_made_in_the_graph_are_written_by_it(bench: Bench) -> None:
    graph = bench.new_graph()
    made = bench.add(graph, AllocParams(64))
    params = bench.driver.node_params(made)
    assert isinstance(params, AllocParams)
    work = bench.add_kernel(graph, add_one, params.address, 16, after=[made])
    bench.add(graph, FreeParams(params.address), [work])
    executable = Graph(bench.driver, graph, owned=False).instantiate()
    assert OutputGuard(executable, at(bench.driver, params.address + 32)).run == 1


def test_what_inner_graphs_write_counts(bench: Bench) -> None:
    x, other = filled(bench.driver, 1.0), filled(bench.driver, 1.0)
    inner = executable_of(bench, bench.kernel_params(add_one, x.data_ptr(), 4))
    with graphcore.capture(driver=bench.driver) as capture:
        inner.launch()
    outer = capture.graph.instantiate()
    assert OutputGuard(outer, x)
    with pytest.raises(ConfigurationError, match="no node refers to"):
        OutputGuard(outer, other)


def test_a_change_of_one_node_counts_and_graphs_that_took_turns_keep_their_guards(
    bench: Bench,
) -> None:
    x, y = filled(bench.driver, 1.0), filled(bench.driver, 1.0)
    executable = executable_of(bench, bench.kernel_params(add_one, x.data_ptr(), 4))
    guard = OutputGuard(executable, x)
    with pytest.raises(ConfigurationError, match="no node refers to"):
        OutputGuard(executable, y)
    executable.set_params(0, {"x": y})
    assert OutputGuard(executable, y)
    assert guard.latest().run == 1
    # after an update the new graph's nodes count
    step = Step(bench.kernel_params(add_one, y.data_ptr(), 2))
    assert executable.update(Graph(bench.driver, build(bench, (step,)), owned=False)).is_current
    assert OutputGuard(executable, y)
    with pytest.raises(ConfigurationError, match="no node refers to"):
        OutputGuard(executable, x)
    assert guard.latest(), "made when the graph wrote it"


def test_a_table_of_pointers_is_said_by_the_caller(bench: Bench) -> None:
    x, other = filled(bench.driver, 1.0), filled(bench.driver, 1.0)
    executable = executable_of(bench, bench.kernel_params(add_one, x.data_ptr(), 4))
    guard = OutputGuard(executable, other, written_indirectly=True)
    replay(executable, bench.stream)
    assert guard.get() is other
    assert not guard.is_overwritten
    replay(executable, bench.stream)
    assert guard.is_overwritten


def test_a_host_callback_may_write_any_memory_of_the_emulated_driver() -> None:
    driver = EmulatedDriver()
    bench = Bench(driver)
    x, seen = filled(driver, 1.0), filled(driver, 0.0)
    with graphcore.capture(driver=driver) as capture:
        driver.launch_host(lambda: seen.fill_(1.0), capture.stream.handle)
        x.add_(1)
    assert OutputGuard(capture.graph.instantiate(), seen)
    array = numpy.zeros(8, numpy.float32)
    executable = executable_of(bench, bench.kernel_params(add_one, array.ctypes.data, 4))
    assert OutputGuard(executable, array[4:])
    with pytest.raises(ConfigurationError, match="no node refers to"):
        OutputGuard(executable, numpy.zeros(8, numpy.float32))


def test_memory_without_elements_is_no_question(bench: Bench) -> None:
    x = filled(bench.driver, 1.0)
    executable = executable_of(bench, bench.kernel_params(add_one, x.data_ptr(), 4))
    assert OutputGuard(executable, [x, torch.empty(0, device=device_of(bench.driver))])


def test_the_nodes_are_read_once_for_all_guards(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Any] = []
    plain = update.read
    monkeypatch.setattr(update, "read", lambda *a, **k: (reads.append(a), plain(*a, **k))[1])
    buffer = Buffer.allocate(4, driver=bench.driver)
    executable = executable_of(bench, bench.kernel_params(add_one, buffer.address, 4))
    for _ in range(3):
        OutputGuard(executable, buffer).latest()
    assert len(reads) == 1
